"""The environment interface, and the expert that can demonstrate in it.

A task's name says which sensors it has, so that a policy, a dataset and an environment agree on them by that name:

    SIMULATOR-TASK           what learns fastest: vectors, privileged ones included where the benchmark has them
    SIMULATOR-TASK-pixels    cameras (rgb_wrist, rgb_static) and proprioception; never the objects' state
    SIMULATOR-TASK-rgbd      the same with depth_wrist and depth_static, metres

An environment makes exactly the sensors that it lists and nothing else: a picture that is not needed costs more
than the physics. One that needs a picture and cannot draw says so when it is made (offscreen.require_backend).
tests/test_sims_conformance.py holds every environment to what is written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec

Array = NDArray[np.generic]

# Evaluation episode i of every task has this seed + i: the numbers of Push-T's published protocol. Demonstrations are
# collected from seeds that count up from 0 and stop before it, so test episodes are unseen.
TEST_SEED = 100_000


@dataclass(frozen=True)
class StepResult:
    observation: dict[str, Array]  # one time step of every sensor, as its spec says
    score: float  # the benchmark's own progress measure in [0, 1], best so far is what counts
    success: bool  # the benchmark's own rule, at this step
    done: bool  # the episode ended (success where the benchmark stops there, nothing left to win, or the step limit)


class Env(Protocol):
    """A simulated robot.

    The same seed and the same actions give bit-identical observations, whatever was played before, in this process or
    in another. Actions outside the limits are clipped; one that is not finite, a step before a reset or after the end
    is a PrismError. Observations are the caller's to keep.

    Optional: `recorded_sensors` and `record(observation)`, where a recording holds something else than what is shown
    (Push-T: the state, from which every variant's sensors follow; Task.as_shown turns it back); `rendering_hint()`, the
    line that says why there are no pictures; `action_spec`, the names of an action's entries and its quaternions;
    `disturb(action, noise, rng)`, what is executed of a demonstrated action (default: noise in each step; Go2: pushes).
    """

    name: str
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    action_low: NDArray[np.float32]  # (Da,)
    action_high: NDArray[np.float32]  # (Da,)
    fps: float
    max_steps: int

    def reset(self, seed: int) -> dict[str, Array]:
        """The first observation: one time step of every sensor."""
        ...

    def step(self, action: NDArray[np.float32]) -> StepResult: ...
    def state(self) -> NDArray[np.float64]:
        """Privileged simulator state, for experts and analysis; never shown to a policy."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """A picture for people (H, W, 3), or None where this machine cannot draw one. Changes nothing."""
        ...

    def close(self) -> None: ...


class Simulation(ABC):
    """What every simulator here shares: counting steps, and refusing what the contract of Env refuses."""

    def __init__(
        self, name: str, sensors: tuple[SensorSpec, ...], low: ArrayLike, high: ArrayLike, fps: float, max_steps: int
    ) -> None:
        self.name, self.sensors, self.fps, self.max_steps = name, sensors, fps, max_steps
        self.action_low, self.action_high = np.asarray(low, dtype=np.float32), np.asarray(high, dtype=np.float32)
        self.action_dim = len(self.action_low)
        self.beyond = 0  # steps of an episode after its first success, to show how to stop
        self._steps: int | None = None  # None: no episode yet
        self._won: int | None = None  # the step of the first success
        self._is_over = False

    @abstractmethod
    def _start(self, seed: int) -> None:
        """Puts the world at the start of episode `seed`."""

    @abstractmethod
    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        """One control step with an action within the limits; the score and whether it is a success."""

    @abstractmethod
    def _observe(self) -> dict[str, Array]: ...

    def reset(self, seed: int) -> dict[str, Array]:
        self._start(seed)
        return self._begin()

    def _begin(self) -> dict[str, Array]:
        """The world is at a start: the first observation."""
        self._steps, self._won, self._is_over = 0, None, False
        return self._observe()

    def _need_episode(self, call: str) -> int:
        if self._steps is None:
            raise PrismError(f"{self.name}: call reset(seed) before {call}")
        return self._steps

    def step(self, action: NDArray[np.float32]) -> StepResult:
        steps = self._need_episode("step(action)")
        if self._is_over:
            raise PrismError(f"{self.name}: the episode is over; call reset(seed)")
        action = np.asarray(action, dtype=np.float32)
        if action.shape != (self.action_dim,) or not np.isfinite(action).all():
            raise PrismError(f"{self.name}: an action is {self.action_dim} finite numbers, not {action!r}")
        self._steps = steps + 1
        score, success = self._advance(np.clip(action, self.action_low, self.action_high))
        if success and self._won is None:
            self._won = self._steps
        rested = self._won is not None and self._steps >= self._won + self.beyond
        self._is_over = rested or self._steps >= self.max_steps
        return StepResult(self._observe(), score, success, done=self._is_over)


def rendering_hint(env: Env) -> str | None:
    """Why `env` draws no pictures here, as one line that says the remedy; None: it says nothing."""
    hint: Callable[[], str | None] | None = getattr(env, "rendering_hint", None)
    return None if hint is None else hint()


class NoExpertError(PrismError):
    """A task that nothing here can demonstrate."""


class Expert(Protocol):
    """Demonstrates a task using the privileged state."""

    def reset(self, seed: int) -> None: ...
    def act(self) -> NDArray[np.float32]: ...
