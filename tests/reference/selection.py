"""Slow float64 versions of Sec. 4.5 and of docs/reference/metrics.md, in plain loops."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def plan_distance(a: F64, b: F64, scale: F64, discount: float = 1.0) -> float:
    """Weighted mean over steps of the root mean square over dimensions."""
    total, weights = 0.0, 0.0
    for t in range(len(a)):
        square = 0.0
        for j in range(len(scale)):
            square += ((a[t, j] - b[t, j]) / scale[j]) ** 2
        total += discount**t * math.sqrt(square / len(scale))
        weights += discount**t
    return total / weights


def modes(candidates: F64, scale: F64, radius: float) -> list[set[int]]:
    """Merge sets of candidates while any two members of different sets are near."""
    groups = [{k} for k in range(len(candidates))]
    merged = True
    while merged:
        merged = False
        for i in range(len(groups)):
            for j in range(i + 1, len(groups)):
                if any(
                    plan_distance(candidates[a], candidates[b], scale) <= radius for a in groups[i] for b in groups[j]
                ):
                    groups[i] |= groups.pop(j)
                    merged = True
                    break
            if merged:
                break
    return groups


def jerk(actions: F64, scale: F64) -> float:
    """Mean norm of a[t+3] - 3 a[t+2] + 3 a[t+1] - a[t], scaled."""
    norms = []
    for t in range(len(actions) - 3):
        square = 0.0
        for j in range(len(scale)):
            third = actions[t + 3, j] - 3 * actions[t + 2, j] + 3 * actions[t + 1, j] - actions[t, j]
            square += (third / scale[j]) ** 2
        norms.append(math.sqrt(square))
    return sum(norms) / len(norms) if norms else 0.0


def wilson(successes: int, trials: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The two proportions p at which |successes/trials - p| = z sqrt(p (1 - p) / trials), by bisection."""
    rate = successes / trials

    def excess(p: float) -> float:
        return abs(rate - p) - z * math.sqrt(p * (1 - p) / trials)

    def root(outside: float, inside: float) -> float:
        if excess(outside) <= 0:
            return outside
        for _ in range(200):
            middle = (outside + inside) / 2
            if excess(middle) > 0:
                outside = middle
            else:
                inside = middle
        return (outside + inside) / 2

    centre = min(max(rate, 1e-15), 1 - 1e-15)
    return (0.0 if successes == 0 else root(0.0, centre)), (1.0 if successes == trials else root(1.0, centre))
