"""A task of your own: a point in the plane has to reach a goal. Environment, expert and a row of the table of tasks.

    pip install --no-deps -e examples/my_task
    prism train point --episodes 20 --steps 500 && prism eval runs/point --episodes 10

This file and the entry point in pyproject.toml are all of it. The expert demonstrates; without one (expert=None) the
task is evaluated in, and trained from a recording: prism train PATH.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.sensors import SensorSpec
from prism.sims.environment import Array, Simulation
from prism.sims.task_table import Task

SENSORS = (SensorSpec("proprio", "vector", (2,)), SensorSpec("goal", "vector", (2,)))


class PointEnv(Simulation):
    def __init__(self) -> None:
        super().__init__("point", SENSORS, low=[-0.1, -0.1], high=[0.1, 0.1], fps=10.0, max_steps=60)

    def _start(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.at, self.goal = rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2)

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        self.at = self.at + action
        distance = float(np.linalg.norm(self.goal - self.at))
        return float(np.exp(-distance)), distance < 0.05  # score in [0, 1], success

    def _observe(self) -> dict[str, Array]:
        return {"proprio": self.at.astype(np.float32), "goal": self.goal.astype(np.float32)}

    def state(self) -> NDArray[np.float64]:
        return np.concatenate([self.at, self.goal])

    def render(self) -> NDArray[np.uint8] | None:
        return None  # no picture

    def close(self) -> None:
        pass


class PointExpert:
    """Goes straight to the goal."""

    def __init__(self, env: PointEnv) -> None:
        self.env = env

    def reset(self, seed: int) -> None:
        pass

    def act(self) -> NDArray[np.float32]:
        return np.clip(self.env.goal - self.env.at, -0.1, 0.1).astype(np.float32)


TASK = Task(PointEnv, PointExpert, recipe="state", actions=ActionKind.DELTA)
