"""Plans made smooth: the mean of several, or the nearest one of small third differences. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism.selection import FloatArray


def ensemble(plans: Sequence[tuple[int, FloatArray]], decay: float) -> FloatArray:
    """The newest of plans (first step, (Tp, Da)), oldest first: each action is the mean over the plans that have it,

    with weights exp(-decay i), i = 0 for the oldest of them (Zhao et al. 2023, Sec. IV.B).
    """
    start, newest = plans[-1]
    blended = np.empty_like(newest)
    for offset in range(len(newest)):
        step = start + offset
        said = np.stack([plan[step - at] for at, plan in plans if step < at + len(plan)])
        exponent = -decay * np.arange(len(said))
        weight = np.exp(exponent - exponent.max())  # of the heaviest: 1, however large the exponents
        blended[offset] = weight @ said / weight.sum()
    return blended


def least_jerk(plan: FloatArray, past: FloatArray, weight: float) -> FloatArray:
    """argmin_u |u - plan|^2 + weight |third differences of (past, u)|^2, plan (Tp, Da), past (at most 3, Da).

    Looks ahead over the whole plan, so it delays nothing; what was executed is fixed, so plans join smoothly.
    """
    third = np.diff(np.eye(len(past) + len(plan)), n=3, axis=0)
    old, new = third[:, : len(past)], third[:, len(past) :]
    system = np.eye(len(plan)) + weight * new.T @ new
    return np.asarray(np.linalg.solve(system, plan - weight * new.T @ old @ past), dtype=np.float64)
