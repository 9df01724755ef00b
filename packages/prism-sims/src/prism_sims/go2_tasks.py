"""The paper's three loco-manipulation tasks (Sec. 5, hardware; App. A) on the Go2 twin, 60 seconds at most.

| task       | what to do                                                                                      |
| ---------- | ----------------------------------------------------------------------------------------------- |
| go2-park   | walk to the stand, stop in front of it, and bring the hand over the cube: pre-manipulation      |
| go2-insert | walk up to the board and put the peg in the hand into its hole, 4 mm of room on each side       |
| go2-pick   | walk up, take the cube, walk sideways to the bin, put it in                                     |

Starts are random: the robot up to a metre away and not facing the stand. object_state has, in this order,

    park, insert   where to stop, from the base (x, y; sine and cosine of the turn); the goal of the hand
    pick           where to stop at both stands, from the base (x, y, x, y; sine and cosine of the turn); sine and
                   cosine of the cube's turn; the cube, the bin

metres in the arm's frame. A goal is nine numbers: its way from the hand; the last 5 cm of it; where it is, from the
foot of the arm, within reach: what is a metre away would drown the centimetres that count. Nothing else is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from prism.errors import PrismError

from prism_sims import go2_model as parts
from prism_sims.go2 import Go2Env, Variant
from prism_sims.mujoco_env import Vector

AHEAD = 0.36  # metres from the foot of the arm to the middle of a stand, parked
HEIGHT = 0.22  # of the stands
PARKED, TURNED, RESTING = 0.07, 0.15, 0.06  # metres, radians, m/s: within these the robot is parked
OVER = 0.10  # metres from the cube up to where the hand waits
_STATION = np.array([1.0, 0.0])
_LAST = 0.05  # metres
_WITHIN = np.array([0.22, -0.14, -0.3]), np.array([0.5, 0.14, 0.1])  # of the arm's frame, where the hand works


class Station(Go2Env):
    """A stand in front of which to park; it faces the robot's start, more or less."""

    START: tuple[tuple[float, float], ...]  # ranges: metres before the parking place, metres aside, radians turned

    def _stand(self, rng: np.random.Generator, name: str) -> tuple[float, float, float]:
        """Places the stand, and the robot before it."""
        yaw = rng.uniform(-0.3, 0.3)
        self.stand, self.facing = np.array([*_STATION, HEIGHT]), yaw
        self.stand[:2] += rng.uniform(-0.1, 0.1, 2)
        self.put(name, self.stand, yaw)
        back, aside, turned = (rng.uniform(*ends) for ends in self.START)
        away = AHEAD + parts.MOUNT[0] + back
        x, y = self.stand[:2] + _turned(np.array([-away, aside]), yaw)
        return float(x), float(y), float(yaw + turned)

    def parking(self, beside: float = 0.0) -> Vector:
        """Where to stop, from the base: x, y (metres), sine and cosine of the turn; `beside`: a stand to the left."""
        goal = self.stand[:2] + _turned(np.array([-AHEAD, beside]), self.facing)
        off = _turned(goal - self.data.xpos[self._mount][:2], -self.heading())
        turn = self.facing - self.heading()
        return np.array([*off, np.sin(turn), np.cos(turn)])

    def is_parked(self, beside: float = 0.0) -> bool:
        x, y, sine, cosine = self.parking(beside)
        still = np.abs(self.walker.velocity).max() < RESTING
        return bool(np.hypot(x, y) < PARKED and abs(np.arctan2(sine, cosine)) < TURNED and still)

    def from_hand(self, point: Vector) -> Vector:
        """A point of the world, from the hand, in the arm's frame."""
        return self.seen_from_mount(point) - self.hand()[0]

    def goal_of(self, way: Vector) -> Vector:
        """Nine numbers of a way of the hand (3,)."""
        return np.concatenate([way, np.clip(way, -_LAST, _LAST), np.clip(self.hand()[0] + way, *_WITHIN)])


class Park(Station):
    objects = 13
    START = ((0.4, 1.0), (-0.4, 0.4), (-0.7, 0.7))

    def _things(self) -> str:
        return parts.stand("stand", HEIGHT) + parts.cube("cube")

    def _place(self, rng: np.random.Generator) -> tuple[float, float, float]:
        start = self._stand(rng, "stand")
        cube = self.stand + np.array([*_turned(rng.uniform(-0.03, 0.03, 2), self.facing), parts.CUBE])
        self.put("cube", cube, self.facing)
        return start

    def goal(self) -> Vector:
        return np.asarray(self.body("cube") + np.array([0.0, 0.0, OVER]))

    def _object_state(self) -> Vector:
        return np.concatenate([self.parking(), self.goal_of(self.from_hand(self.goal()))])

    def succeeded(self) -> bool:
        """Parked, the hand within 2.5 cm of its place and pointing down."""
        down = self.data.site_xmat[self._site].reshape(3, 3)[2, 0] < -0.95
        return bool(self.is_parked() and down and np.linalg.norm(self.from_hand(self.goal())) < 0.025)


class Insert(Station):
    objects = 13
    START = ((0.15, 0.5), (-0.2, 0.2), (-0.4, 0.4))
    tool = parts.peg()
    DEEP = 0.03  # metres

    def _things(self) -> str:
        return parts.stand("stand", HEIGHT, parts.board())

    def _place(self, rng: np.random.Generator) -> tuple[float, float, float]:
        return self._stand(rng, "stand")

    def _take(self) -> None:
        self.data.qpos[self._finger : self._finger + 2] = self.data.ctrl[18] = parts.PEG

    def _grip(self, opening: float) -> float:
        return parts.PEG  # it holds the peg

    def foot(self) -> Vector:
        """Of the peg, in the world."""
        turn = self.data.xmat[self.model.body("peg").id].reshape(3, 3)
        return np.asarray(self.body("peg") + turn[:, 0] * parts.PEG_LENGTH / 2)

    def hole(self) -> Vector:
        return np.asarray(self.stand + np.array([0.0, 0.0, 0.06]))

    def _object_state(self) -> Vector:
        """The hole's mouth from where the peg's foot is when nothing pushes it in."""
        tip = self.data.site_xpos[self._site] + self.data.site_xmat[self._site].reshape(3, 3)[:, 0] * parts.PEG_LENGTH
        way = self.seen_from_mount(self.hole()) - self.seen_from_mount(tip)
        return np.concatenate([self.parking(), self.goal_of(way)])

    def succeeded(self) -> bool:
        off = self.foot() - self.hole()
        return bool(off[2] < -self.DEEP and np.abs(off[:2]).max() < parts.HOLE)


class Pick(Station):
    objects = 26
    START = ((0.15, 0.5), (-0.2, 0.2), (-0.4, 0.4))

    def _things(self) -> str:
        return parts.stand("stand", HEIGHT) + parts.stand("bin", HEIGHT, parts.bin(), half=0.08) + parts.cube("cube")

    def _place(self, rng: np.random.Generator) -> tuple[float, float, float]:
        start = self._stand(rng, "stand")
        self.beside = rng.uniform(0.4, 0.55)
        bin = self.stand + np.array([*_turned(np.array([0.0, self.beside]), self.facing), 0.0])
        self.put("bin", bin, self.facing)
        self.turn = self.facing + rng.uniform(-0.4, 0.4)
        cube = self.stand + np.array([*_turned(rng.uniform(-0.03, 0.03, 2), self.facing), parts.CUBE])
        self.put("cube", cube, self.turn)
        return start

    def _object_state(self) -> Vector:
        cube = self.data.xmat[self.model.body("cube").id].reshape(3, 3)
        turn = _square(float(np.arctan2(cube[1, 0], cube[0, 0])) - self.heading())
        x, y, *facing = self.parking()
        things = [self.goal_of(self.from_hand(self.body(name))) for name in ("cube", "bin")]
        return np.concatenate([[x, y], self.parking(self.beside)[:2], facing, [np.sin(turn), np.cos(turn)], *things])

    def lost(self) -> bool:
        """It fell, or the cube lies on the floor, where the arm does not reach."""
        return self.fallen or bool(self.body("cube")[2] < HEIGHT / 2)

    def succeeded(self) -> bool:
        off = _turned((self.body("cube") - self.body("bin"))[:2], -self.facing)
        low = self.body("cube")[2] < HEIGHT + 0.05
        return bool(np.abs(off).max() < 0.07 and low and not self.held())


def _turned(way: Vector, angle: float) -> Vector:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([cosine * way[0] - sine * way[1], sine * way[0] + cosine * way[1]])


def _square(angle: float) -> float:
    """Of a square thing: -pi/4 to pi/4."""
    return float((angle + np.pi / 4) % (np.pi / 2) - np.pi / 4)


_KINDS: dict[str, Callable[..., Station]] = {"park": Park, "insert": Insert, "pick": Pick}
NAMES: dict[str, tuple[str, Variant]] = {
    f"go2-{task}" + ("" if variant == "state" else f"-{variant}"): (task, variant)
    for variant in get_args(Variant)
    for task in _KINDS
}


def make_go2(task: str, variant: Variant = "state", **more: Any) -> Station:
    name = next((name for name, what in NAMES.items() if what == (task, variant)), None)
    if name is None:
        raise PrismError(f"go2: there is no task '{task}' ({variant}): use one of {', '.join(NAMES)}")
    return _KINDS[task](name, variant, **more)
