"""Predicted beside recorded actions: the errors are those of the plans, at the steps that they are about."""

from __future__ import annotations

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
from prism.report.held_out import over_the_horizon, replay, write_held_out
from prism.sensors import SensorSpec
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
    page = write_held_out(tmp_path / "report.html", controller, open_dataset(data), [0, 1], held_out, [])
    text = page.read_text()
    HTMLParser().feed(text)
    assert ("held out of the training" in text) is held_out
    assert text.count("<h3>Episode ") == 2
    if CHROMIUM is not None and held_out:
        for width in (1280, 400):
            with Browser(page.as_uri(), width) as browser:
                assert browser.ask("document.documentElement.scrollWidth") <= width
                assert browser.complaints == []
