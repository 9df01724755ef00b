"""The environment interface, and the expert that can demonstrate in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prism.sensors import SensorSpec

Array = NDArray[np.generic]


@dataclass(frozen=True)
class StepResult:
    observation: dict[str, Array]  # one time step of every sensor, as its spec says
    score: float  # the benchmark's own progress measure in [0, 1], best so far is what counts
    success: bool  # the benchmark's own rule, at this step
    done: bool  # the episode ended (success where the benchmark stops there, or the step limit)


class Env(Protocol):
    """A simulated robot. The same seed gives bit-identical episodes."""

    name: str
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    action_low: NDArray[np.float32]  # (Da,)
    action_high: NDArray[np.float32]  # (Da,)
    fps: float
    max_steps: int

    def reset(self, seed: int) -> dict[str, Array]: ...
    def step(self, action: NDArray[np.float32]) -> StepResult: ...
    def state(self) -> NDArray[np.float64]:
        """Privileged simulator state, for experts and analysis; never shown to a policy."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """A picture (H, W, 3), or None where this machine cannot draw one."""
        ...

    def close(self) -> None: ...


class Expert(Protocol):
    """Demonstrates a task using the privileged state."""

    def reset(self, seed: int) -> None: ...
    def act(self) -> NDArray[np.float32]: ...
