"""What every test shares: one thread, deterministic properties, and the data that only some machines have."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two xdist workers share two cores
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from tests.shape_checks import CHECKED

install_import_hook(CHECKED, "tests.shape_checks.checked")  # before prism is imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs us in the background ignores Ctrl-C for us
    signal.signal(signal.SIGINT, signal.default_int_handler)

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; the programs that tests start must see it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent

# derandomize: a red build is red for everybody. No deadline: a shared core makes any single example slow.
settings.register_profile("prism", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("prism")


@pytest.fixture(scope="session", autouse=True)
def own_claims(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two workers, or two checkouts, drive stand-ins with the same addresses: none locks another's out."""
    from prism.robots import claim

    claim.FOLDER = tmp_path_factory.mktemp("claims")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def human_pusht() -> Path:
    """The human Push-T demonstrations, where somebody has put a copy beside the checkout."""
    path = ROOT / ".." / "shared" / "data" / "pusht_cchi_v7_replay.zarr.zip"
    if not path.is_file():
        pytest.skip("human Push-T demonstrations are not on this machine (prism data collect pusht-human)")
    return path
