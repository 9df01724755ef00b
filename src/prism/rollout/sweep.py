"""How far apart the modes of a set of rollouts are. docs/metrics.md, "The Push-T sweep"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def mode_distance(paths: Sequence[Float], modes: Sequence[str], a: str, b: str, steps: int = 40) -> float | None:
    """Distance between the mean paths of modes `a` and `b`: mean over steps 0 .. `steps` of the Euclidean distance.

        D = 1 / (steps + 1) * sum_t || mean_{i in a} x_t^i - mean_{i in b} x_t^i ||

    paths: (T, 2) each, one point a control step; one that ends early stays where it ended. None where a mode is empty:
    a mean of nothing is nowhere.
    """
    means = []
    for mode in (a, b):
        members = [_held(path, steps + 1) for path, of in zip(paths, modes, strict=True) if of == mode]
        if not members:
            return None
        means.append(np.mean(members, axis=0))
    return float(np.linalg.norm(means[0] - means[1], axis=-1).mean())


def _held(path: Float, length: int) -> Float:
    return np.asarray(path, dtype=np.float64)[np.minimum(np.arange(length), len(path) - 1)]
