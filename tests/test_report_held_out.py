"""Predicted beside recorded actions: the errors are those of the plans, at the steps that they are about."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from prism.controller import Controller, ControllerConfig
from prism.data import open_dataset
from prism.data.formats.store_writer import DatasetWriter
from prism.evaluation.sensor_use import Rise, SensorReport, SensorUse
from prism.normalize import Normalizer, Statistics, VectorStatistics
from prism.report import charts
from prism.report.held_out import over_the_horizon, replay, shown_episodes, write_held_out
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Observation
from tests.browser import CHROMIUM, Browser
from tests.evaluation_fakes import PointPolicy

SENSORS = (SensorSpec("proprio", "vector", (2,)), SensorSpec("goal", "vector", (2,)))


class KnowsTheFuture(PointPolicy):
    """proprio[0] is the time t; recorded actions are (t, -t). Candidate k is off by 0.1 k at every step."""

    def sample(self, observation: Observation, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Tp Da"]:
        shape = super().sample(observation, candidates, rng).shape
        at = observation.streams["proprio"][:, -1, 0]
        steps = at[:, None, None] + torch.arange(shape[2])[None, None] + 0.1 * torch.arange(shape[1])[None, :, None]
        return torch.stack([steps, -steps], dim=-1).float()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "data", SENSORS, 2, 10.0, "line") as writer:
        for length in (20, 30):
            time = np.arange(length, dtype=np.float32)
            states = np.stack([time, np.zeros_like(time)], axis=1)
            writer.add({"proprio": states, "goal": states}, np.stack([time, -time], axis=1))
    return tmp_path / "data"


def test_errors_belong_to_their_steps(data: Path) -> None:
    controller = Controller(
        KnowsTheFuture(), ControllerConfig(exec_horizon=4, candidates=3), scale=np.array([1.0, 1.0])
    )
    found = replay(controller, open_dataset(data), 1)
    assert found.recorded.shape == found.predicted.shape == (30, 2)
    chosen, nearest = (over_the_horizon([found], name) for name in ("chosen plan", "nearest candidate"))
    assert max(nearest) == pytest.approx(0.0, abs=1e-5), "candidate 0 is exact at every step of the plan"
    assert max(chosen) <= 0.2 + 1e-5
    assert np.abs(found.predicted - found.recorded).max() <= 0.2 + 1e-5


@pytest.mark.parametrize("held_out", [True, False])
def test_the_page(data: Path, tmp_path: Path, held_out: bool) -> None:
    controller = Controller(
        KnowsTheFuture(), ControllerConfig(exec_horizon=4, candidates=3), scale=np.array([1.0, 1.0])
    )
    both = ([0, 1], []) if held_out else ([], [0, 1])
    page = write_held_out(tmp_path / "report.html", controller, open_dataset(data), *both, [])
    text = page.read_text()
    HTMLParser().feed(text)
    assert ("were held out of the training" in text) is held_out
    assert ("<b>All are episodes that it was trained on</b>" in text) is not held_out
    assert text.count("<h3>Episode ") == 2
    if CHROMIUM is not None and held_out:
        for width in (1280, 400):
            with Browser(page.as_uri(), width) as browser:
                assert browser.ask("document.documentElement.scrollWidth") <= width
                assert browser.complaints == []


def test_few_held_out_episodes_stand_beside_some_that_were_trained_on() -> None:
    assert shown_episodes([4], [0, 1, 2, 3, 5]) == [(4, True), (0, False), (5, False)]
    assert shown_episodes([], [7]) == [(7, False)]
    assert shown_episodes(list(range(9)), [9]) == [(0, True), (2, True), (4, True), (6, True), (8, True)]


class Reaches(KnowsTheFuture):
    """With a camera, a gripper that never moves, and names that try to break out of the markup."""

    def __init__(self) -> None:
        super().__init__()
        sensors = (*SENSORS, SensorSpec("front", "rgb", (4, 6, 3)))
        action = ActionSpec(("along", "<img src=y>", "gripper"))
        self.spec = dataclasses.replace(self.spec, sensors=sensors, action_dim=3, action=action)
        seen = np.array([[0.0, 0.0, 0.5], [30.0, -30.0, 0.5]])
        still = VectorStatistics(2, seen[:, :2].min(0), seen[:, :2].max(0), seen[:, :2].mean(0), seen[:, :2].std(0))
        moved = VectorStatistics(2, seen.min(0), seen.max(0), seen.mean(0), seen.std(0))
        self.normalizer = Normalizer.from_statistics(Statistics(moved, {"proprio": still, "goal": still}))

    def sample(self, observation: Observation, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Tp Da"]:
        plans = super().sample(observation, candidates, rng)
        return torch.cat([plans, torch.full_like(plans[..., :1], 0.5)], dim=-1)


def test_yardsticks_pictures_and_names(tmp_path: Path) -> None:
    policy = Reaches()
    with DatasetWriter(tmp_path / "data", policy.spec.sensors, 3, 10.0, "line") as writer:
        for length in (20, 30, 25):
            time = np.arange(length, dtype=np.float32)
            states = np.stack([time, np.zeros_like(time)], axis=1)
            pictures = np.zeros((length, 4, 6, 3), np.uint8)
            actions = np.stack([time, -time, np.full_like(time, 0.5)], axis=1)
            writer.add({"proprio": states, "goal": states, "front": pictures}, actions)
    controller = Controller(policy, ControllerConfig(exec_horizon=4, candidates=3))
    source = open_dataset(tmp_path / "data")
    rise = Rise(0.5, 0.4, 0.6)
    eye = SensorUse("front", "rgb", "used", 0.9, 0.9, 0.8, rise, 0.9, 1.1, rise, False, False)
    flat = SensorUse("goal", "vector", "not used", 0.003, 0, 0.1, rise, 0, 0.1, rise, True, True, "leave it <i>out</i>")
    report = SensorReport((eye, flat), 40, 2, 6, 0.1, 0.25, 0.03, 1.1, 0.2)
    page = write_held_out(tmp_path / "report.html", controller, source, [0], [1, 2], [], sensors=report)
    text = page.read_text()
    HTMLParser().feed(text)
    for words in ("this policy</span>", "its cameras absent</span>", "mean action</span>", "110 %</b>"):
        assert words in text
    assert "front is used: it changes the plan by 90 %" in text
    assert "goal is not used: it changes the plan by 0.3 %: leave it &lt;i&gt;out&lt;/i&gt;" in text
    assert text.count('<img alt="front, ') == 3 * 5, "pictures beside the curves of each episode"
    assert "<h4>along</h4>" in text
    assert "<h4>gripper</h4>" not in text, "no card for what never moves"
    assert "Constant in the demonstrations, not in any\nfigure: gripper." in text
    assert "<img src=y>" not in text
    assert "&lt;img src=y&gt;" in text
    assert "recorded <b>" not in text, "the last value of a curve over time is no result"
    assert text.count("held out, 20 steps") == 1
    assert text.count("trained on, ") == 2
    if CHROMIUM is not None:
        for width in (1280, 400):
            with Browser(page.as_uri(), width) as browser:
                assert browser.ask("document.documentElement.scrollWidth") <= width
                assert browser.complaints == []


def test_the_mean_action_is_judged_on_the_steps_of_the_plans(data: Path, tmp_path: Path) -> None:
    controller = Controller(
        KnowsTheFuture(), ControllerConfig(exec_horizon=4, candidates=3), scale=np.array([1.0, 1.0])
    )
    page = write_held_out(tmp_path / "report.html", controller, open_dataset(data), [1], [], [])
    time = np.arange(30.0)
    apart = [abs(time[t : t + 8] - time.mean()) for t in range(0, 30, 4)]
    unit = float(np.concatenate(apart).mean())
    assert f"({charts.number(unit)} of half the actions" in page.read_text()
