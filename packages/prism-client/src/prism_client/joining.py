"""Two plans made one, and a plan kept within a range: numbers alone; executor.py says when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prism_client.rotations import same_side, unit

Array = np.ndarray[Any, Any]


def joined(
    actions: Array, row: int, reference: Array, blend: int, most: Array | None, quaternions: Sequence[int]
) -> Array:
    """`actions` (T, D), which from `row` on begin near `reference` (D,): the gap is taken away in equal parts over
    `blend` steps, at most `most` each."""
    actions = same_side(actions, row, reference, quaternions)
    gap = np.asarray(reference - actions[row], dtype=np.float64)
    part = np.abs(gap) / (blend + 1)
    if most is not None:
        part = np.minimum(part, most)
    steps = np.arange(1, len(actions) - row + 1)[:, None]
    found = actions.astype(np.result_type(actions.dtype, np.float32))
    found[row:] += np.sign(gap) * np.maximum(np.abs(gap) - steps * part, 0.0)
    return unit(found, quaternions)


def within(actions: Array, limits: tuple[Array, Array], quaternions: Sequence[int]) -> tuple[Array, bool]:
    """`actions` (T, D) between limits (D,), and whether that changed anything; what is within stays to the last bit."""
    inside = unit(np.clip(actions, *limits).astype(actions.dtype), quaternions)
    moved = np.abs(inside - actions) > 1e-6 * np.maximum(1.0, np.abs(actions))
    return np.where(moved, inside, actions), bool(moved.any())
