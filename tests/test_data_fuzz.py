"""A few randomly damaged datasets of every format in each run; a thousand with `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz_data import FORMATS, fuzz, run


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # libraries drop files that they fail to open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_refused_or_harmless(tmp_path: Path, kind: str) -> None:
    if kind == "rosbag":
        pytest.importorskip("rosbags")
    found = fuzz(kind, 8, 0, tmp_path)
    assert sum(found.values()) == 8
    assert found["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_thousand(kind: str) -> None:
    found, problems = run(kind, 1000)
    assert not problems
    assert sum(found.values()) == 1000


@pytest.mark.slow
def test_hdf5_that_never_ends(tmp_path: Path) -> None:
    """Seed 714 damages the heap that holds `env_args` so that HDF5's library loops: the probe's limit ends it."""
    assert fuzz("robomimic", 1, 714, tmp_path)["refused"] == 1
