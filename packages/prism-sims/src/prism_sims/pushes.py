"""Demonstrations that show the way back: noise in every step, and now and then a push.

    executed = action + noise half z + push,    z ~ N(0, 1),    half: of the action's range

Noise alone is averaged out, or leaves a thread of places that were seen. A push begins in one step of 1 / often, lasts
a few steps and is noise strength z', drawn once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Pushes:
    """Of one episode. `steps`: at least, and less than; `strength` (Da,), of the noise; `forward`: entries pushed
    to the positive side alone."""

    def __init__(
        self, often: float, steps: tuple[int, int], strength: NDArray[np.float64], forward: tuple[int, ...] = ()
    ) -> None:
        self._often, self._steps, self._strength, self._forward = often, steps, strength, list(forward)
        self._left, self._push = 0, np.zeros(len(strength))

    def executed(
        self,
        action: NDArray[np.float32],
        half: NDArray[np.floating],
        noise: float,
        rng: np.random.Generator,
        free: Callable[[], bool] = lambda: True,
    ) -> NDArray[np.float32]:
        """The executed action: demonstrated plus push. A push begins only if `free`."""
        if self._often and self._left == 0 and rng.random() < self._often and free():
            self._push = noise * self._strength * rng.standard_normal(len(action))
            self._push[self._forward] = np.maximum(self._push[self._forward], 0.0)
            self._left = int(rng.integers(*self._steps))
        push = self._push if self._left else 0.0
        self._left = max(0, self._left - 1)
        return np.asarray(action + noise * half * rng.standard_normal(len(action)) + push, np.float32)
