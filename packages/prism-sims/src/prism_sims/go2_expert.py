"""The experts of the Go2 twin: as a person would teleoperate it. Each looks at the last observation only (env.seen) and
remembers nothing, so that an imitator sees what it acts on: what has been done shows in where things are.

The base walks to the parking place, and stops there; only then the arm leaves its stowed pose. At a walk it must come
nearer than `_NEAR` to stop; the slower it is, the more is good enough, up to `_FAR`: so it does not dither. Velocities
are proportional to the way, each at every step: where most labels are 0, a policy learns 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from prism_sims.go2 import Vector
from prism_sims.go2_tasks import Insert, Park, Pick, Station

_NEAR, _FAR = np.array([0.03, 0.06]), np.array([0.065, 0.14])  # metres, radians
_WALKING = 0.12  # m/s, at which _NEAR counts
_GAIN = 1.6  # a second: at _NEAR it is above the twin's deadband
_MOST = np.array([0.4, 0.2, 0.6])
_STOWED_AT, _STOWED_DOWN = np.array([0.25, 0.0, 0.15]), 0.9  # the hand of go2_model.STOWED; radians it points down
_LIFTED = 0.05  # metres above the foot of the arm: from there on it walks with the cube
_LEAD = 0.12  # metres by which a command is ahead of the hand, at most
_OPEN, _WIDE, _CLOSED = -1.0, -0.7, 1.0


class Go2Expert(ABC):
    def __init__(self, env: Station) -> None:
        self.env = env

    @abstractmethod
    def act(self) -> NDArray[np.float32]: ...

    def reset(self, seed: int) -> None:
        self.pace = float(np.random.default_rng([seed, 15]).uniform(0.85, 1.0))

    def see(self, start: int, count: int = 3) -> Vector:
        return self.env.seen["object_state"][start : start + count].astype(np.float64)

    def place(self, start: int) -> Vector:
        """Where a way of the hand ends, in the arm's frame."""
        return self.proprio()[1:4] + self.see(start)

    def proprio(self) -> Vector:
        return self.env.seen["proprio"].astype(np.float64)

    def walk(self, off: Vector, turn: float) -> Vector | None:
        """Base velocity (vx, vy, yaw rate) to a place `off` and `turn` away; None: it is there."""
        vx, vy, wz = self.proprio()[[8, 9, 13]]
        walks = min(1.0, (float(np.hypot(vx, vy)) + 0.2 * abs(wz)) / _WALKING)
        near, straight = _FAR + walks * (_NEAR - _FAR)
        if np.hypot(*off) < near and abs(turn) < straight:
            return None
        return np.clip(_GAIN * np.array([*off, turn]), -_MOST * self.pace, _MOST * self.pace)

    def command(
        self, gripper: float, hand: Vector, yaw: float = 0.0, down: float = np.pi / 2, base: Vector | None = None
    ) -> NDArray[np.float32]:
        """`hand`: its place in the arm's frame; it is led there, a little ahead of where it is. It points `down`."""
        at = self.proprio()[1:4]
        way = hand - at
        way *= min(1.0, _LEAD / max(float(np.linalg.norm(way)), 1e-9))
        (c, d), (s, t) = np.cos([yaw / 2, down / 2]), np.sin([yaw / 2, down / 2])
        turn = [c * d, -s * t, c * t, s * d]
        vx, vy, wz = np.zeros(3) if base is None else base
        return np.array([gripper, *(at + way), *turn, vx, vy, 0.0, 0.0, 0.0, wz], np.float32)

    def stowed(self, gripper: float, base: Vector | None) -> NDArray[np.float32]:
        return self.command(gripper, _STOWED_AT, down=_STOWED_DOWN, base=base)


class ParkExpert(Go2Expert):
    def act(self) -> NDArray[np.float32]:
        x, y, sine, cosine = self.see(0, 4)
        turn = float(np.arctan2(sine, cosine))
        base = self.walk(np.array([x, y]), turn)
        if base is not None:
            return self.stowed(_OPEN, base)
        return self.command(_OPEN, self.place(4), turn)


class InsertExpert(Go2Expert):
    """Over the hole, and the lower the nearer it is; where the peg stands on the rim, which touch tells, it presses
    lightly while it slides on."""

    def act(self) -> NDArray[np.float32]:
        x, y, sine, cosine = self.see(0, 4)
        turn = float(np.arctan2(sine, cosine))
        base = self.walk(np.array([x, y]), turn)
        hole, mouth, push = self.see(4), self.place(4), -float(self.env.seen["tactile"][0])
        if base is not None and hole[2] < -0.03:
            return self.stowed(_CLOSED, base)
        beside = float(np.hypot(*hole[:2]))
        goal = mouth + np.array([0.0, 0.0, -0.05 + min(0.07, 10.0 * max(0.0, beside - 0.003))])
        if push > 3.0:
            goal[2] = max(goal[2], self.proprio()[3] - 0.012)
        return self.command(_CLOSED, goal, turn)


class PickExpert(Go2Expert):
    """What it does next shows in the scene: is the cube between the fingers, is it lifted, is the base at the bin.

    It walks with the arm stowed and the hand closed, with the cube and without: so a grasp that missed leads to what
    was demonstrated, the way to the cube, and the cube says where to walk, not the pose of the arm.
    """

    def act(self) -> NDArray[np.float32]:
        first, second, (sine, cosine) = self.see(0, 2), self.see(2, 2), self.see(4, 2)
        turn, twist = float(np.arctan2(sine, cosine)), float(np.arctan2(*self.see(6, 2)))
        cube, gripper = self.see(8), float(self.proprio()[0])
        if np.linalg.norm(cube) < 0.022 and gripper > -0.25:
            return self.carry(second, turn)
        base = self.walk(first, turn)
        if base is not None and np.linalg.norm(cube) > 0.05:
            return self.stowed(_CLOSED, base)
        beside = float(np.hypot(*cube[:2]))
        over = min(0.06, 4.0 * max(0.0, beside - 0.006))
        if gripper > _WIDE and cube[2] < -0.03:  # it opens over the cube
            over = 0.06
        close = np.linalg.norm(cube) < 0.012
        return self.command(_CLOSED if close else _OPEN, self.place(8) + np.array([0.0, 0.0, over]), twist)

    def carry(self, off: Vector, turn: float) -> NDArray[np.float32]:
        """The cube is in the hand: up, to the bin, over it, let go."""
        base = self.walk(off, turn)
        if base is not None:
            low = self.proprio()[3] < _LIFTED
            return self.stowed(_CLOSED, None if low else base)
        bin, over = self.see(17), self.place(17) + np.array([0.0, 0.0, 0.10])
        return self.command(_OPEN if np.hypot(*bin[:2]) < 0.02 else _CLOSED, over)


def make_go2_expert(env: Station) -> Go2Expert:
    kinds: dict[type[Station], type[Go2Expert]] = {Park: ParkExpert, Insert: InsertExpert, Pick: PickExpert}
    return kinds[type(env)](env)
