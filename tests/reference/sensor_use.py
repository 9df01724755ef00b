"""Slow float64 versions of "Is the sensor used?" in docs/reference/metrics.md, in plain loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def error(plans: F64, actions: F64, valid: NDArray[np.bool_], scale: F64, moves: NDArray[np.bool_]) -> float:
    """Of one window: plans (K, T, D) against actions (T, D), over valid steps and dimensions that move."""
    total, count = 0.0, 0
    for k in range(len(plans)):
        for t in range(len(actions)):
            for d in range(len(scale)):
                if valid[t] and moves[d]:
                    total += abs(plans[k, t, d] - actions[t, d]) / scale[d]
                    count += 1
    return total / count


def change(plans: F64, usual: F64, valid: NDArray[np.bool_], scale: F64, moves: NDArray[np.bool_]) -> float:
    """Of one window: candidate k against the candidate of the same latent, with every sensor."""
    return sum(error(plans[k : k + 1], usual[k], valid, scale, moves) for k in range(len(plans))) / len(plans)


def another_draw(plans: F64, valid: NDArray[np.bool_], scale: F64, moves: NDArray[np.bool_]) -> float:
    """Of one window: candidate k against candidate k - 1, whose latent is another one."""
    count = len(plans)
    return sum(error(plans[k : k + 1], plans[(k - 1) % count], valid, scale, moves) for k in range(count)) / count


def mean_action(actions: F64, valid: NDArray[np.bool_], scale: F64, moves: NDArray[np.bool_]) -> float:
    """The unit of all shares; actions (N, T, D)."""
    dims = len(scale)
    rows = [actions[n, t] for n in range(len(actions)) for t in range(actions.shape[1]) if valid[n, t]]
    mean = np.array([sum(row[d] for row in rows) / len(rows) for d in range(dims)])
    constant = np.broadcast_to(mean, actions.shape[1:])[None]
    return sum(error(constant, a, v, scale, moves) for a, v in zip(actions, valid, strict=True)) / len(actions)
