"""Rotation vectors, as a difference to a reference: a tool that points down is at an angle of pi, where the vectors of
nearly equal rotations are far apart ((pi, 0, 0) and (-pi, 0, 0) are one). About a reference near the work they are not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def quaternion(turn: Vector) -> Vector:
    """Quaternion (w, x, y, z) of a rotation vector."""
    angle = float(np.linalg.norm(turn))
    scale = 0.5 if angle < 1e-9 else math.sin(angle / 2) / angle
    return np.array([math.cos(angle / 2), *(scale * turn)])


def vector(q: Vector) -> Vector:
    """The rotation vector, at most pi long, of a unit quaternion."""
    q = -q if q[0] < 0 else q
    length = float(np.linalg.norm(q[1:]))
    angle = 2 * math.atan2(length, float(q[0]))
    return np.asarray(q[1:] * (2.0 if length < 1e-9 else angle / length))


def product(a: Vector, b: Vector) -> Vector:
    """b first, then a."""
    w = a[0] * b[0] - a[1:] @ b[1:]
    return np.array([w, *(a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:]))])


def from_reference(turn: Vector, reference: Vector) -> Vector:
    """The rotation vector of an orientation that is `turn` away from `reference`, in the axes of the base."""
    return vector(product(quaternion(turn), quaternion(reference)))


def to_reference(orientation: Vector, reference: Vector) -> Vector:
    """The other way."""
    return vector(product(quaternion(orientation), quaternion(-reference)))
