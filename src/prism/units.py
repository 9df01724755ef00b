"""Units of actions and sensors: which two measure the same, and numbers that can only be of another unit."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

# of the unit: what it measures, and how many of the first unit of that kind it is
_KNOWN = {
    "m": ("length", 1.0),
    "cm": ("length", 0.01),
    "mm": ("length", 0.001),
    "rad": ("angle", 1.0),
    "deg": ("angle", math.pi / 180),
}
# Spreads further apart are another unit: millimetres for metres are 1000, degrees for radians 57.
APART = 20.0


def factor(one: str, other: str) -> float | None:
    """How many of `other` are one of `one`; None: they measure different things. A unit may end in "/s"."""
    if one == other:
        return 1.0
    (head, _, per), (there, _, per_there) = one.partition("/"), other.partition("/")
    found, wanted = _KNOWN.get(head), _KNOWN.get(there)
    if found is None or wanted is None or found[0] != wanted[0] or per != per_there:
        return None
    return found[1] / wanted[1]


def apart(one: Float, other: Float) -> float | None:
    """How many times larger the spreads `one` (D,) are than `other`, where that can only be another unit; else None.

    The median over the dimensions that move in both: a task may need ten times the way of another along one axis.
    """
    both = (one > 1e-9) & (other > 1e-9)
    if not both.any():
        return None
    ratio = float(np.median(one[both] / other[both]))
    return None if 1 / APART < ratio < APART else ratio
