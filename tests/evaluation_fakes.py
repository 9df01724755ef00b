"""A point that must reach a goal, and policies that get it there: small, exact, picklable factories for the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from prism_client import ActionKind
from torch import Tensor

from prism.normalize import Normalizer
from prism.policy import Draw, LossOutput, Policy, PolicySpec
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.sims.environment import StepResult
from prism.types import Observation

SENSORS = (SensorSpec("proprio", "vector", (2,)), SensorSpec("goal", "vector", (2,)))


class PointEnv:
    """A point in [-1, 1]^2 moves by 0.1 * action; success within 0.15 of a goal that the seed draws."""

    def __init__(self, picture: bool = False) -> None:
        self.name = "point"
        self.sensors = SENSORS
        self.action_dim = 2
        self.action_low = np.full(2, -1, dtype=np.float32)
        self.action_high = np.full(2, 1, dtype=np.float32)
        self.fps = 10.0
        self.max_steps = 60
        self._picture = picture

    def reset(self, seed: int) -> dict[str, NDArray[np.generic]]:
        rng = np.random.default_rng(seed)
        self._at = np.zeros(2)
        self._goal = rng.uniform(-1, 1, size=2)
        self._steps = 0
        return self._observe()

    def _observe(self) -> dict[str, NDArray[np.generic]]:
        return {"proprio": self._at.astype(np.float32), "goal": self._goal.astype(np.float32)}

    def step(self, action: NDArray[np.float32]) -> StepResult:
        self._at = self._at + 0.1 * action
        self._steps += 1
        distance = float(np.linalg.norm(self._at - self._goal))
        success = distance < 0.15
        return StepResult(
            self._observe(), max(0.0, 1 - distance), success, done=success or self._steps >= self.max_steps
        )

    def state(self) -> NDArray[np.float64]:
        return np.concatenate([self._at, self._goal])

    def render(self) -> NDArray[np.uint8] | None:
        return np.full((40, 60, 3), self._steps, dtype=np.uint8) if self._picture else None

    def close(self) -> None:
        pass


class PointPolicy(Policy):
    """Walks towards the goal; the noise comes from the generator, so seeds matter."""

    def __init__(self, noise: float = 0.1, obs_horizon: int = 2, pred_horizon: int = 8) -> None:
        super().__init__()
        self.spec = PolicySpec(
            "point", {}, SENSORS, 2, 10.0, obs_horizon, pred_horizon, ActionSpec(kind=ActionKind.ABSOLUTE)
        )
        self.normalizer = Normalizer.empty(SENSORS, 2)
        self.noise = noise
        self.seen: list[Observation] = []

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        raise NotImplementedError

    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        assert torch.is_inference_mode_enabled()
        self.seen.append(observation)
        way = observation.streams["goal"][:, -1] - observation.streams["proprio"][:, -1]  # (B, 2)
        way = way / way.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        plan = way[:, None, None].expand(-1, candidates, self.spec.pred_horizon, -1)
        return plan + self.noise * rng.randn(plan.shape)


def make_point_env() -> PointEnv:
    return PointEnv()


def make_picture_env() -> PointEnv:
    return PointEnv(picture=True)


def make_point_policy() -> PointPolicy:
    return PointPolicy()


class DeadlyEnv(PointEnv):
    """Takes its process down in the middle of the episodes whose seeds are named, so many times each.

    `deaths` holds a folder a seed in which each death leaves a file: the memory that survives the process.
    """

    def __init__(self, deaths: Path, times: Mapping[int, int]) -> None:
        super().__init__()
        self._deaths, self._times, self._seed = deaths, times, 0

    def reset(self, seed: int) -> dict[str, NDArray[np.generic]]:
        self._seed = seed
        return super().reset(seed)

    def step(self, action: NDArray[np.float32]) -> StepResult:
        folder = self._deaths / str(self._seed)
        folder.mkdir(exist_ok=True)
        if self._steps == 3 and (count := len(list(folder.iterdir()))) < self._times.get(self._seed, 0):
            (folder / str(count)).touch()
            if count % 2:
                raise ValueError("the simulation diverged")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def make_deadly_env(deaths: Path, times: Mapping[int, int]) -> DeadlyEnv:
    return DeadlyEnv(deaths, times)
