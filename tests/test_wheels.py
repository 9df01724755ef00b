"""The wheels alone, without the checkout: what a user installs is complete."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("lerobot_env_prism", "lerobot_policy_prism", "prism_client", "prism_policy", "prism_sims")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, ROOT / "tools" / "wheels", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(folder.glob("*.whl"))


def test_every_package_has_a_wheel(wheels: list[Path]) -> None:
    assert [wheel.name.split("-")[0] for wheel in wheels] == list(NAMES)


def test_a_user_of_the_wheels_trains_and_evaluates(wheels: list[Path], tmp_path: Path) -> None:
    """An environment with PRISM's wheels; third parties' packages are those of the tests' environment. Its site folder
    is appended by a .pth file, and Python reads no .pth file of such a folder, so the checkout is not on the path."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    [site] = place.glob("lib/python*/site-packages")
    ours = [str(wheel) for wheel in wheels if not wheel.name.startswith("lerobot")]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, *ours], check=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    environment = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = run(str(python), "-c", "import prism, prism_client, prism_sims; print(prism.__file__)")
    assert found.startswith(str(site))
    assert "prism train" in run("prism", "--help")
    run("prism", "train", "pusht", "--episodes", "3", "--steps", "10", "--out", "runs/first")
    run("prism", "eval", "runs/first", "--episodes", "1", "--json", "result.json")
    assert (tmp_path / "result.json").is_file()
