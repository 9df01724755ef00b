"""Slow float64 versions of Eq. 4-9 in plain loops, with the paper's equation numbers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def distance(a: F64, b: F64, valid: NDArray[np.bool_], weights: F64, eps: float, discount: float = 1.0) -> float:
    """Eq. 4 between two sequences (T, A), over the valid steps of b; discount 1 is the paper's mean over time."""
    total, steps = 0.0, 0.0
    for t in range(a.shape[0]):
        if not valid[t]:
            continue
        steps += discount**t
        for d in range(a.shape[1]):
            total += discount**t * weights[d] * math.sqrt((a[t, d] - b[t, d]) ** 2 + eps**2)
    return total / steps if steps else 0.0


def own(candidates: F64, target: F64, valid: NDArray[np.bool_], weights: F64, eps: float, discount: float = 1.0) -> F64:
    """D_{i,k}."""
    b, k = candidates.shape[:2]
    return np.array(
        [[distance(candidates[i, c], target[i], valid[i], weights, eps, discount) for c in range(k)] for i in range(b)]
    )


def all_pairs(
    candidates: F64, targets: F64, valid: NDArray[np.bool_], weights: F64, eps: float, discount: float = 1.0
) -> F64:
    """D_{i,k->j}."""
    b, k, g = candidates.shape[0], candidates.shape[1], targets.shape[0]
    out = np.zeros((b, k, g))
    for i in range(b):
        for c in range(k):
            for j in range(g):
                out[i, c, j] = distance(candidates[i, c], targets[j], valid[j], weights, eps, discount)
    return out


def reject_at_random(uniform: F64, q: float) -> NDArray[np.bool_]:
    """The placebo for Eq. 5: a number below q rejects its candidate."""
    return np.array([[u < q for u in row] for row in uniform])


def hard_loss(own_distance: F64, rejected: NDArray[np.bool_]) -> tuple[float, list[int]]:
    """Eq. 6: the mean over i of the minimum over the candidates left, all of them where none is left."""
    total, chosen = 0.0, []
    for row, barred in zip(own_distance, rejected, strict=True):
        allowed = [k for k in range(len(row)) if not barred[k]] or list(range(len(row)))
        best = min(allowed, key=lambda k: row[k])
        chosen.append(best)
        total += row[best]
    return total / len(own_distance), chosen


def ema_threshold(previous: float | None, value: float, alpha: float, clamp: tuple[float, float] | None) -> float:
    """Eq. 7."""
    new = value if previous is None else alpha * previous + (1 - alpha) * value
    return new if clamp is None else min(max(new, clamp[0]), clamp[1])


def soft_loss(own_distance: F64, top: int, tau: float, scaled: bool) -> float:
    """Eq. 9 over the `top` nearest candidates of each row."""
    total = 0.0
    for row in own_distance:
        nearest = sorted(row)[:top]
        total -= math.log(sum(math.exp(-d / tau) for d in nearest))
    value = total / len(own_distance)
    return value * tau if scaled else value
