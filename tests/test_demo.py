"""The demo: what a second call keeps, moves aside or refuses; and the whole of it in miniature."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from prism.data.formats.store import DatasetWriter
from prism.errors import PrismError
from prism.runs import demo
from prism.runs.demo import DemoConfig
from prism.runs.demonstrations import Demonstrations
from prism.runs.recipes import Experiment, metaworld
from prism.runs.run import write_run_report
from prism.sensors import SensorSpec
from prism.training.checkpoint import list_checkpoints
from prism.training.config import TrainConfig
from tests.policy_fakes import small_config


def miniature(name: str = "metaworld-reach", steps: int = 3) -> DemoConfig:
    experiment = metaworld(name)
    small = replace(experiment.demonstrations, episodes=2)
    train = replace(experiment.train, minutes=0.0, steps=steps)
    return DemoConfig((replace(experiment, demonstrations=small, train=train),), episodes=1)


@pytest.fixture
def console() -> Console:
    return Console(stderr=True, width=300)


def test_the_same_demo_goes_on_and_another_is_moved_aside(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    demo._prepare(out, miniature(), console, fresh=False)
    (out / "work").write_text("done")

    demo._prepare(out, miniature(), console, fresh=False)
    assert (out / "work").read_text() == "done"

    demo._prepare(out, miniature(steps=4), console, fresh=False)
    assert [path.name for path in out.iterdir()] == ["demo.json"]
    demo._prepare(out, miniature(steps=4), console, fresh=True)
    aside = [path for path in tmp_path.iterdir() if path != out]
    assert len(aside) == 2, "nothing is deleted"
    assert sum((path / "work").exists() for path in aside) == 1


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, console: Console) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PrismError, match="not a demo"):
        demo._prepare(tmp_path, miniature(), console, fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_task_that_fails_says_why_in_one_line(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    config = miniature()
    demo._prepare(out, config, console, fresh=False)
    broken = out / "data" / config.experiments[0].name
    broken.mkdir(parents=True)
    (broken / "dataset.json").write_text("{")
    with pytest.raises(PrismError, match=r"metaworld-reach: .*dataset\.json.*output\.txt"):
        demo.run_demo(out, config, console)


class Process:
    """What the demo asks of a task's process; `at_last` is its exit status once it is told to stop."""

    pid = None

    def __init__(self, exitcode: int | None, at_last: int) -> None:
        self.exitcode, self.at_last = exitcode, at_last

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self) -> None:
        self.exitcode = self.at_last


def train_with(processes: list[Process], out: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = iter(processes)
    context = SimpleNamespace(Process=lambda **_: next(waiting))
    monkeypatch.setattr(demo.multiprocessing, "get_context", lambda _: context)
    demo._train_all(out, [metaworld("metaworld-reach"), metaworld("metaworld-push")], console)


def test_the_task_that_failed_is_blamed_and_not_the_one_that_was_stopped_for_it(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metaworld-push").mkdir()
    (tmp_path / "metaworld-push" / "output.txt").write_text("error: the disk is full\n")
    with pytest.raises(PrismError, match=r"^metaworld-push: the disk is full"):
        train_with([Process(None, -signal.SIGTERM), Process(2, 2)], tmp_path, console, monkeypatch)
    with pytest.raises(PrismError, match=r"^metaworld-reach: its process ended with -9"):
        train_with([Process(-9, -9), Process(None, -signal.SIGTERM)], tmp_path, console, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_with([Process(None, -signal.SIGTERM), Process(130, 130)], tmp_path, console, monkeypatch)


def test_a_task_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "data", (SensorSpec("proprio", "vector", (4,)),), 2, 10.0, "walk") as writer:
        for _ in range(2):
            states = rng.normal(size=(20, 4)).astype(np.float32)
            writer.add({"proprio": states}, np.sin(states[:, :2]))
    walk = Experiment(
        name="walk",
        task=None,
        demonstrations=Demonstrations("path", path=str(tmp_path / "data")),
        policy=small_config(),
        train=TrainConfig(steps=2, batch_size=4, val_fraction=0.0, threads=1),
    )
    run = tmp_path / "run"
    for _ in range(2):  # the second time in the folder that a kill before the first checkpoint leaves
        with pytest.raises(SystemExit) as end:
            demo._record_and_train(walk, run)
        assert end.value.code == 0, (run / "output.txt").read_text()
        assert len(list_checkpoints(run)) == 1
        shutil.rmtree(run / "checkpoints")


@pytest.mark.slow
def test_everything_in_miniature_and_again_at_once(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    results = demo.run_demo(out, miniature(), console)
    assert [result.task for result in results] == ["metaworld-reach"]
    told = json.loads((out / "metrics.json").read_text())
    assert told["minutes"] > 0
    assert told["training"]["metaworld-reach"]["seed"] == 0
    numbers = told["tasks"]["metaworld-reach"]
    assert numbers["episodes"] == 1
    assert {"success", "jerk"} <= set(numbers)
    assert set(numbers["latency_ms"]) >= {"p50", "p99"}
    page = write_run_report(out)
    assert page == out / "report.html"

    recording = (out / "evaluation" / "metaworld-reach.npz").stat().st_mtime_ns
    again = demo.run_demo(out, miniature(), console)
    assert again[0].summary() == results[0].summary()
    assert json.loads((out / "metrics.json").read_text()) == told, "the time is that of the call that did the work"
    assert (out / "evaluation" / "metaworld-reach.npz").stat().st_mtime_ns == recording
