"""A dataset in memory and a policy that trains in a millisecond, for the tests of the loop and of checkpoints."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from prism.data.episodes import Episode, IntArray
from prism.data.windows import LazyStreams, Windows
from prism.errors import PrismError
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Draw, LossOutput, Policy, PolicySpec
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.types import Batch, Observation

SENSORS = (SensorSpec("proprio", "vector", (5,)),)


class MemorySource:
    """Smooth random walks; the action is a function of the observation."""

    def __init__(self, episodes: int = 6, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.path = Path("memory")
        self.sensors = SENSORS
        self.action_dim = 3
        self.fps = 10.0
        self.lengths = rng.integers(20, 40, episodes).astype(np.int64)
        self._episodes = []
        for length in self.lengths:
            states = rng.normal(size=(int(length), 5)).cumsum(0).astype(np.float32)
            self._episodes.append((states, np.sin(states[:, :3])))

    def read(self, episode: int, start: int = 0, stop: int | None = None, **_: Any) -> Episode:
        states, actions = self._episodes[episode]
        return Episode({"proprio": states[start:stop]}, actions[start:stop])


class GapWindows(Windows):
    """Windows of which some have no reading of the sensor."""

    gaps: Collection[int] = ()

    def batch(self, indices: IntArray, lazy: LazyStreams | None = None, views: IntArray | None = None) -> Batch:
        batch = super().batch(indices, lazy, views)
        present = batch.observation.present["proprio"] & ~torch.from_numpy(np.isin(indices, list(self.gaps)))[:, None]
        return replace(batch, observation=Observation(batch.observation.streams, {"proprio": present}))


def make_windows(seed: int = 0, gaps: Collection[int] = ()) -> tuple[Windows, Windows]:
    source = MemorySource(seed=seed)
    windows = GapWindows(source, 2, 8, episodes=[0, 1, 2, 3])
    windows.gaps = gaps
    return windows, Windows(source, 2, 8, episodes=[4, 5])


def fake_spec(width: int = 32) -> PolicySpec:
    return PolicySpec("fake", {"width": width}, SENSORS, 3, 10.0, 2, 8)


class FakePolicy(Policy):
    """actions = MLP(window) + noise(rng), with a buffer that moves in training like PRISM's threshold does."""

    threshold: Tensor

    def __init__(self, spec: PolicySpec, normalizer: Normalizer | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.normalizer = normalizer or Normalizer.empty(spec.sensors, spec.action_dim)
        width = spec.config["width"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.net = nn.Sequential(nn.Linear(10, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 24))
            self.unused = nn.Parameter(torch.zeros(3))  # never has a gradient
        self.register_buffer("threshold", torch.zeros(()))
        self.nan_from: int | None = None  # calls of loss from which on it is NaN
        self.calls = 0

    def _predict(self, observation: Observation) -> Tensor:
        window = self.normalizer.normalize_vector("proprio", observation.streams["proprio"]).flatten(1)
        actions: Tensor = self.net(window).unflatten(1, (8, 3))
        return actions

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        self.calls += self.training
        target = self.normalizer.normalize_actions(draw.batch.actions)
        noise = draw.rng.randn(target.shape)
        error = (self._predict(draw.batch.observation) + 0.1 * noise - target).abs().mean()
        if self.training:
            self.threshold.lerp_(error.detach(), 0.1)
            if self.nan_from is not None and self.calls > self.nan_from:
                error = error * torch.nan
                self.threshold.fill_(torch.nan)
        return LossOutput(error, {"threshold": self.threshold.clone(), "rejection_rate": noise.mean()})

    def sample(self, observation: Observation, candidates: int, rng: Random) -> Tensor:
        actions = self.normalizer.unnormalize_actions(self._predict(observation))
        return actions.unsqueeze(1).expand(-1, candidates, -1, -1)


def build_fake(spec: PolicySpec) -> Policy:
    if spec.method != "fake":
        raise PrismError(f"unknown method '{spec.method}'; this test knows: fake")
    return FakePolicy(spec)


def make_policy(width: int = 32) -> FakePolicy:
    statistics = compute_statistics(MemorySource(), [0, 1, 2, 3])
    return FakePolicy(fake_spec(width), Normalizer.from_statistics(statistics, SENSORS))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
