"""The examples of a method, a task and a sensor from outside: found by their entry points, and used as a user would."""

from __future__ import annotations

import importlib
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import prism
from prism import cli
from prism.data.formats.store_writer import DatasetWriter
from prism.io import plugins
from prism.methods import METHODS
from prism.sensors import KINDS, SensorSpec
from prism.sims.task_table import TASKS, make_env

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--set", "train.batch_size=8", "train.threads=1"]


def install(example: str, site: Path) -> None:
    """What pip would do, without a network: the module, and what the distribution says of itself."""
    project = tomllib.loads((EXAMPLES / example / "pyproject.toml").read_text())["project"]
    assert len((EXAMPLES / example / "pyproject.toml").read_text().splitlines()) < 10
    info = site / f"{example}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in rows.items())
              for group, rows in project["entry-points"].items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(groups))
    plugins._found.cache_clear()  # a program is started after its packages were installed
    shutil.copy(EXAMPLES / example / f"{example}.py", site)
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed in, and an empty one to work in; nothing of them stays."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "site"
    for table in (METHODS, TASKS, KINDS):
        for name in set(table._rows) - set(table._built_in):
            del table._rows[name]
    for name in ("my_method", "my_task", "my_sensor"):
        sys.modules.pop(name, None)


def test_a_method(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "pusht", "--method", "linear", "--steps", "2"]) == cli.EXIT_USER
    assert "unknown method 'linear'" in capfd.readouterr().err
    install("my_method", site)
    assert "linear" in METHODS
    command = ["train", "pusht", "--method", "linear", "--demonstrations", "3", "--steps", "2", *SMALL]
    assert cli.main([*command, "policy.bias=false"]) == 0
    run = prism.load_run("runs/pusht-linear")
    assert run.experiment.method == "linear"
    assert run.settings.candidates == 1
    assert prism.evaluate(run, episodes=1, workers=1, progress=False).summary()["episodes"] == 1
    state = run.policy().state_dict()
    assert "head.weight" in state
    assert "head.bias" not in state


def test_a_task(site: Path) -> None:
    install("my_task", site)
    assert cli.main(["train", "point", "--episodes", "4", "--steps", "2", *SMALL]) == 0
    assert (Path("data") / "point" / "dataset.json").is_file()
    run = prism.load_run("runs/point")
    assert run.spec.action.kind == "delta"
    assert prism.evaluate(run, episodes=2, workers=1, progress=False).task == "point"
    env = make_env("point")
    with pytest.raises(prism.PrismError, match="call reset"):
        env.step(np.zeros(2, dtype=np.float32))


def test_a_sensor(site: Path, tmp_path: Path) -> None:
    with pytest.raises(prism.PrismError, match="unknown kind of sensor 'lidar'"):
        SensorSpec("lidar", "lidar", (36,))
    install("my_sensor", site)
    sensors = (SensorSpec("lidar", "lidar", (36,)), SensorSpec("proprio", "vector", (2,)))
    rng = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "scans", sensors, action_dim=2, fps=10.0, task="scan") as writer:
        for _ in range(3):
            scan, pose = rng.uniform(0, 30, (20, 36)), rng.normal(size=(20, 2))
            writer.add({"lidar": scan, "proprio": pose}, pose)
    run = prism.train(tmp_path / "scans", steps=2, progress=False, set=["train.batch_size=4", "train.threads=1"])
    controller = prism.load_run(run.folder).controller()
    seen = {"lidar": np.full(36, 2.0, dtype=np.float32), "proprio": np.zeros(2, dtype=np.float32)}
    assert controller.act(seen).shape == (2,)
    far = {**seen, "lidar": np.full(36, 25.0, dtype=np.float32)}
    actions = []
    for observation in (seen, far, {"proprio": seen["proprio"]}):
        controller.reset(0)
        actions.append(controller.act(observation).tolist())
    assert actions[0] != actions[1] != actions[2]  # it is looked at, and may be absent


def test_a_package_that_cannot_be_imported_is_named(site: Path) -> None:
    install("my_method", site)
    (site / "my_method.py").write_text("import no_such_module\n")
    with pytest.raises(prism.PrismError, match=r"method 'linear' comes from the package my-method.*no_such_module"):
        METHODS["linear"]
