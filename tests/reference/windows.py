"""Windows and statistics the slow and obvious way: one loop, one index at a time, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def window(
    stream: NDArray[Any], actions: NDArray[Any], step: int, obs_horizon: int, pred_horizon: int
) -> tuple[NDArray[Any], NDArray[Any], list[bool]]:
    """Observations step-To+1..step and actions step..step+Tp-1 of one episode, edges repeated."""
    observations = [stream[max(i, 0)] for i in range(step - obs_horizon + 1, step + 1)]
    last = len(actions) - 1
    future = [actions[min(i, last)] for i in range(step, step + pred_horizon)]
    valid = [i <= last for i in range(step, step + pred_horizon)]
    return np.stack(observations), np.stack(future), valid


def to_unit_range(values: NDArray[np.float64], train: NDArray[np.float64]) -> NDArray[np.float64]:
    """2 (x - min) / (max - min) - 1 per dimension; only centred where max = min."""
    low, high = train.min(axis=0), train.max(axis=0)
    middle = (low + high) / 2
    return np.where(high > low, 2 * (values - low) / np.where(high > low, high - low, 1) - 1, values - middle)


def to_unit_variance(values: NDArray[np.float64], train: NDArray[np.float64]) -> NDArray[np.float64]:
    """(x - mean) / std per dimension; only centred where std = 0."""
    std = train.std(axis=0)
    return (values - train.mean(axis=0)) / np.where(std > 0, std, 1)
