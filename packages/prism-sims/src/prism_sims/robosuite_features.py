"""robosuite: where things are as seen from what they have to fit, from `proprio` and `object_state` alone.

robosuite tells every pose in the world and from the hand. How far a ring is from its post a network would have to find
as a small difference of two large numbers, rotated; and a quaternion jumps to its negative where w is 0, which is just
where a hand that points down is. So `relations` spells out

    each hand and each thing       two columns of its rotation (6)
    each pair of points that meet  their difference d (3), and tanh(d / 2 cm) (3), which is fine where it matters

Pure functions of what is observed: nothing is added that the other sensors do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FINE = 0.02  # metres

PEG = np.array([0.23, 0.1, 0.95])  # Square: the middle of its top, metres
HANDLE = np.array([0.054, 0.0, 0.0])  # of the nut

# ToolHang, metres, from the point that robosuite names of each thing, in its own axes
HOLE = np.array([0.0, 0.045, 0.155])  # of the stand: the middle of the cavity's mouth
TIP = np.array([0.0, 0.0, -0.2207])  # of the frame
GRIP = np.array([0.0, 0.0, -0.03375])  # of the frame: where it is held
POST = np.array([-0.0875, 0.0, 0.00375])  # of the frame: the post's foot, on the bar
RING = np.array([-0.09353, 0.0, 0.0])  # of the tool: the middle of the hole that hangs on the post

# Transport, metres along the hammer's handle from its middle: where one arm holds it, and the other takes it
HELD, TAKEN = np.array([0.0, 0.0, -0.03]), np.array([0.0, 0.0, 0.07])


@dataclass(frozen=True)
class Pose:
    """(..., 3) and (..., 3, 3)"""

    position: Array
    turn: Array

    def point(self, local: Array) -> Array:
        return np.asarray(self.position + self.turn @ local)


def rotation(xyzw: Array) -> Array:
    """Unit quaternions (..., 4), x first -> (..., 3, 3)."""
    x, y, z, w = np.moveaxis(xyzw / np.linalg.norm(xyzw, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def _pose(numbers: Array, first: int) -> Pose:
    return Pose(numbers[..., first : first + 3], rotation(numbers[..., first + 3 : first + 7]))


def _lift(hands: list[Pose], seen: Array) -> tuple[list[Pose], list[Array]]:
    cube = _pose(seen, 0)
    return [cube], [cube.position - hands[0].position]


def _can(hands: list[Pose], seen: Array) -> tuple[list[Pose], list[Array]]:
    can = _pose(seen, 7)
    return [can], [can.position - hands[0].position]


def _square(hands: list[Pose], seen: Array) -> tuple[list[Pose], list[Array]]:
    nut = _pose(seen, 7)
    return [nut], [nut.point(HANDLE) - hands[0].position, nut.position - PEG]


def _tool_hang(hands: list[Pose], seen: Array) -> tuple[list[Pose], list[Array]]:
    stand, frame, tool = (_pose(seen, first) for first in (7, 21, 35))
    (hand,) = hands
    meet = [
        frame.point(GRIP) - hand.position,
        frame.point(TIP) - stand.point(HOLE),
        tool.position - hand.position,
        tool.point(RING) - frame.point(POST),
    ]
    return [frame, tool], meet


def frame_in_hole(object_state: NDArray[np.floating]) -> bool:
    """ToolHang: whether the frame's tip is in the stand, between the walls, or on its ground."""
    stand, frame = (_pose(np.asarray(object_state, np.float64), first) for first in (7, 21))
    off = frame.point(TIP) - stand.point(HOLE)
    return bool(np.abs(off[:2]).max() < 0.015 and off[2] < 0.005)


def _transport(hands: list[Pose], seen: Array) -> tuple[list[Pose], list[Array]]:
    hammer, trash, lid = (_pose(seen, first) for first in (0, 7, 14))
    target_bin, trash_bin = seen[..., 21:24], seen[..., 24:27]
    giver, taker = hands
    meet = [
        lid.position - giver.position,
        hammer.point(HELD) - giver.position,
        hammer.point(TAKEN) - taker.position,
        giver.position - taker.position,
        trash.position - taker.position,
        trash.position - trash_bin,
        hammer.position - target_bin,
    ]
    return [hammer, trash, lid], meet


_TASKS: Mapping[str, Callable[[list[Pose], Array], tuple[list[Pose], list[Array]]]] = {
    "lift": _lift,
    "can": _can,
    "square": _square,
    "tool-hang": _tool_hang,
    "transport": _transport,
}


def relations(task: str, proprio: NDArray[np.floating], object_state: NDArray[np.floating]) -> NDArray[np.float32]:
    """(..., 9 a robot), (..., S) -> (..., R)"""
    own, seen = np.asarray(proprio, np.float64), np.asarray(object_state, np.float64)
    hands = [_pose(own, first) for first in range(0, own.shape[-1], 9)]
    things, meet = _TASKS[task](hands, seen)
    turns = [pose.turn[..., :2].reshape(*pose.turn.shape[:-2], 6) for pose in (*hands, *things)]
    near = [np.tanh(offset / FINE) for offset in meet]
    return np.concatenate([*turns, *meet, *near], axis=-1).astype(np.float32)
