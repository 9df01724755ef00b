"""Soft-argmax keypoints and mean responses of one picture, place by place (prism.encoders.frozen.KeypointHead)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def keypoint_head(
    values: Float64, weight: Float64, bias: Float64, temperature: float, keypoints: int, size: tuple[int, int]
) -> Float64:
    """values (P, C) -> rows of all keypoints, their columns, amounts."""
    rows, columns = size
    places = [
        (-1.0 + 2.0 * row / (rows - 1), -1.0 + 2.0 * column / (columns - 1))
        for row in range(rows)
        for column in range(columns)
    ]
    found: list[list[float]] = [[], [], []]
    for number in range(len(weight)):
        response = [float(weight[number] @ value + bias[number]) for value in values]
        if number >= keypoints:
            found[2].append(sum(max(one, 0.0) for one in response) / len(response))
            continue
        raised = [math.exp(math.exp(temperature) * one) for one in response]
        for axis in (0, 1):
            total = sum(share * place[axis] for share, place in zip(raised, places, strict=True))
            found[axis].append(total / sum(raised))
    return np.array([one for part in found for one in part])
