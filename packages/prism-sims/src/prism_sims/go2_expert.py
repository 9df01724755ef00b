"""The experts of the Go2 twin: as a person would teleoperate it. Each looks at the last observation only (env.seen) and
remembers nothing, so that an imitator sees what it acts on: what has been done shows in where things are.

What they do follows from what they see without jumps, as far as it can: where a centimetre decides between two
commands, a policy of few demonstrations takes the wrong one. The base walks to the parking place, the slower the nearer
it is, and the legs stand below their deadband; the arm leaves its stowed pose on the last centimetres of the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from prism_sims.go2_tasks import Insert, Park, Pick, Station
from prism_sims.mujoco_env import Vector

_THERE = np.array([0.03, 0.06])  # metres, radians: nearer than this is as good
_GAIN = 1.6  # a second
_MOST = np.array([0.4, 0.2, 0.6])
_REACHES = np.array([0.12, 0.07]), np.array([0.3, 0.2])  # metres, radians from the parking place: the arm starts, works
_STOWED_AT, _STOWED_DOWN = np.array([0.25, 0.0, 0.15]), 0.9  # the hand of go2_model.STOWED; radians it points down
_LIFTED = 0.0  # metres above the foot of the arm: from there on it walks with the cube
_LEAD = 0.12  # metres by which a command is ahead of the hand, at most
_OPEN, _WIDE, _CLOSED = -1.0, -0.9, 1.0


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

    def walk(self, off: Vector, turn: float) -> tuple[Vector, float]:
        """Base velocity (vx, vy, yaw rate) to a place `off` and `turn` away; how far the arm may leave its stowed pose,
        0 to 1."""
        far = float(np.hypot(*off))
        left = np.array(
            [*off * max(0.0, 1.0 - _THERE[0] / max(far, 1e-9)), turn - np.clip(turn, -_THERE[1], _THERE[1])]
        )
        at_work = [float(np.clip((far_off - way) / (far_off - near), 0.0, 1.0))
                   for way, (far_off, near) in zip((far, abs(turn)), _REACHES, strict=True)]  # fmt: skip
        return np.clip(_GAIN * left, -_MOST * self.pace, _MOST * self.pace), min(at_work)

    def command(
        self, gripper: float, hand: Vector, yaw: float = 0.0, base: Vector | None = None, out: float = 1.0
    ) -> NDArray[np.float32]:
        """`hand`: its place in the arm's frame, pointing down; it is led there, a little ahead of where it is. `out`: 0
        is stowed, 1 is there."""
        at = self.proprio()[1:4]
        way = _STOWED_AT + out * (hand - _STOWED_AT) - at
        way *= min(1.0, _LEAD / max(float(np.linalg.norm(way)), 1e-9))
        half = np.array([out * yaw, _STOWED_DOWN + out * (np.pi / 2 - _STOWED_DOWN)]) / 2
        (c, d), (s, t) = np.cos(half), np.sin(half)
        turn = [c * d, -s * t, c * t, s * d]
        vx, vy, wz = np.zeros(3) if base is None else base
        return np.array([gripper, *(at + way), *turn, vx, vy, 0.0, 0.0, 0.0, wz], np.float32)


class ParkExpert(Go2Expert):
    def act(self) -> NDArray[np.float32]:
        x, y, sine, cosine = self.see(0, 4)
        turn = float(np.arctan2(sine, cosine))
        base, out = self.walk(np.array([x, y]), turn)
        return self.command(_OPEN, self.place(4), turn, base, out)


class InsertExpert(Go2Expert):
    """Over the hole, and the lower the nearer it is; where the peg stands on the rim, which touch tells, it presses
    lightly while it slides on."""

    def act(self) -> NDArray[np.float32]:
        x, y, sine, cosine = self.see(0, 4)
        turn = float(np.arctan2(sine, cosine))
        base, out = self.walk(np.array([x, y]), turn)
        hole, mouth, push = self.see(4), self.place(4), -float(self.env.seen["tactile"][0])
        beside = float(np.hypot(*hole[:2]))
        goal = mouth + np.array([0.0, 0.0, -0.05 + min(0.07, 10.0 * max(0.0, beside - 0.003))])
        if push > 3.0:
            goal[2] = max(goal[2], self.proprio()[3] - 0.012 + 0.003 * (push - 3.0))
        if hole[2] > -0.03 and beside < 0.03:  # the peg is at the hole: the base waits
            return self.command(_CLOSED, goal, turn)
        return self.command(_CLOSED, goal, turn, base, out)


class PickExpert(Go2Expert):
    """What it does next shows in the scene: is the cube between the fingers, is it lifted, is the base at the bin.

    It walks with the arm stowed, with the cube and without: so the cube says where to, and not the pose of the arm.
    """

    def act(self) -> NDArray[np.float32]:
        first, second, (sine, cosine) = self.see(0, 2), self.see(2, 2), self.see(4, 2)
        turn, twist = float(np.arctan2(sine, cosine)), float(np.arctan2(*self.see(6, 2)))
        cube, gripper = self.see(8), float(self.proprio()[0])
        if np.linalg.norm(cube) < 0.022 and gripper > -0.25:
            return self.carry(second, turn)
        base, out = self.walk(first, turn)
        beside, away = float(np.hypot(*cube[:2])), float(np.linalg.norm(cube))
        over = min(0.06, 4.0 * max(0.0, beside - 0.006))
        if cube[2] < -0.04:  # it is open before it comes down
            over = max(over, 0.06 * float(np.clip((gripper - _WIDE) / 0.3, 0.0, 1.0)))
        goal = self.place(8) + np.array([0.0, 0.0, over])
        if away < 0.05:  # the hand is at the cube: the base waits
            return self.command(_CLOSED if away < 0.012 else _OPEN, goal, twist)
        return self.command(_OPEN, goal, twist, base, out)

    def carry(self, off: Vector, turn: float) -> NDArray[np.float32]:
        """The cube is in the hand: up, to the bin, over it, let go."""
        base, out = self.walk(off, turn)
        lifted = float(np.clip((self.proprio()[3] - _LIFTED) / 0.05, 0.0, 1.0)) if out == 0.0 else 1.0
        bin, over = self.see(17), self.place(17) + np.array([0.0, 0.0, 0.10])
        return self.command(_OPEN if np.hypot(*bin[:2]) < 0.02 else _CLOSED, over, 0.0, lifted * base, out)


def make_go2_expert(env: Station) -> Go2Expert:
    kinds: dict[type[Station], type[Go2Expert]] = {Park: ParkExpert, Insert: InsertExpert, Pick: PickExpert}
    return kinds[type(env)](env)
