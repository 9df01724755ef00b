"""Unit quaternions inside actions (..., D), each by its first dimension: q and -q are one rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def unit(actions: Array, quaternions: Sequence[int]) -> Array:
    """Their quaternions divided by their norm: sums of two are shorter than 1."""
    for first in quaternions:
        turn = actions[..., first : first + 4]
        turn /= np.maximum(np.linalg.norm(turn, axis=-1, keepdims=True), 1e-9)
    return actions


def same_side(actions: Array, row: int, reference: Array, quaternions: Sequence[int]) -> Array:
    """The same rotations (T, D), with the signs of which action `row` is nearer to `reference` (D,)."""
    turned = actions
    for first in quaternions:
        part = slice(first, first + 4)
        if float(actions[row, part] @ reference[part]) < 0:
            turned = turned.copy() if turned is actions else turned
            turned[:, part] = -turned[:, part]
    return turned
