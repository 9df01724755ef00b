"""Push-T: push the T onto its outline with a disc. Three variants of the same world: state, keypoints, pixels; and
`pusht-edge`, the state variant from starts that are ambiguous (sims/pusht_edge.py).

Protocol: 300 steps at 10 Hz, action = target position of the disc in [0, 512]^2, score = min(1, coverage / 0.95),
success (and end) at coverage > 0.95. Evaluation seeds are 100000 + i, their starts gym-pusht's (pusht_physics.reset).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sims.base import Array, StepResult
from prism.sims.pusht_edge import random_edge_start
from prism.sims.pusht_features import IMAGE_SIZE, SIZE, VARIANTS, Variant, features, sensor_specs
from prism.sims.pusht_physics import SUCCESS_COVERAGE, PushTPhysics

MAX_STEPS = 300
FPS = 10.0
_PICTURE = 256


class PushTEnv:
    """gym-pusht behind prism's interface, bit for bit the same world; the vector variants never draw."""

    def __init__(self, name: str = "pusht", max_steps: int = MAX_STEPS) -> None:
        if name not in VARIANTS:
            raise PrismError(f"unknown Push-T task '{name}'; use one of {', '.join(VARIANTS)}")
        if max_steps < 1:
            raise PrismError(f"max_steps {max_steps} is out of range: at least 1")
        self.variant: Variant = VARIANTS[name]
        self.name = name
        self.sensors = sensor_specs(self.variant)
        self.action_dim = 2
        self.action_low = np.zeros(2, dtype=np.float32)
        self.action_high = np.full(2, SIZE, dtype=np.float32)
        self.fps = FPS
        self.max_steps = max_steps
        self.physics = PushTPhysics()
        self._steps: int | None = None
        self._is_over = False

    def reset(self, seed: int) -> dict[str, Array]:
        if self.name == "pusht-edge":
            return self.reset_to_state(random_edge_start(seed))
        self.physics.reset(seed)
        self._steps, self._is_over = 0, False
        return self._observe()

    def reset_to_state(self, state: NDArray[np.floating[Any]]) -> dict[str, Array]:
        """Start from agent xy, block xy, block angle, (5,): for sweeps over starts."""
        state = np.asarray(state, dtype=np.float64)
        if state.shape != (5,) or not np.isfinite(state).all():
            raise PrismError(f"{self.name}: a state is 5 finite numbers (agent xy, block xy, angle), not {state!r}")
        self.physics.set_state(state)
        self._steps, self._is_over = 0, False
        return self._observe()

    def step(self, action: NDArray[np.float32]) -> StepResult:
        if self._steps is None:
            raise PrismError(f"{self.name}: call reset(seed) before step(action)")
        if self._is_over:
            raise PrismError(f"{self.name}: the episode is over; call reset(seed)")
        action = np.asarray(action, dtype=np.float32)
        if action.shape != (2,) or not np.isfinite(action).all():
            raise PrismError(f"{self.name}: an action is 2 finite numbers, not {action!r}")
        x, y = np.clip(action, self.action_low, self.action_high)
        self.physics.step(float(x), float(y))
        self._steps += 1
        coverage = self.physics.coverage()
        success = coverage > SUCCESS_COVERAGE
        self._is_over = success or self._steps >= self.max_steps
        score = min(1.0, coverage / SUCCESS_COVERAGE)
        return StepResult(self._observe(), score, success, done=self._is_over)

    def _observe(self) -> dict[str, Array]:
        streams: dict[str, Array] = dict(features(self.physics.state(), self.variant))
        if self.variant == "pixels":
            streams["rgb_static"] = self.physics.draw(IMAGE_SIZE)
        return streams

    def state(self) -> NDArray[np.float64]:
        """Agent xy, block xy, block angle in [0, 2 pi), (5,)."""
        return self.physics.state()

    def render(self) -> NDArray[np.uint8]:
        return self.physics.draw(_PICTURE)

    def close(self) -> None:
        self.physics.close()


@functools.cache
def _drawing_board() -> PushTPhysics:
    return PushTPhysics()


def render_state(state: NDArray[np.floating[Any]], size: int = IMAGE_SIZE) -> NDArray[np.uint8]:
    """The picture of a state (5,) -> (size, size, 3): what the pixels variant shows there, to a pixel or two.

    The exceptions are pixels where bar and stem meet: which of them is painted last depends on the world's history.
    """
    return _drawing_board().draw_state(state, size)
