"""The experts of the tabletop. Each looks at the last observation only (env.seen), so an imitator sees what it acts on.

Insert   proprio, where the hole seems to be, the wrench at the peg's tip
Rattle   the boxes' places and the sound: shakes the left box; silent, it goes aside, and the right one is taken
Height   the stand's place without its height, and depth
Command  the things' places, the fingers' opening and the sentence

What was found out stays to be seen and heard: a full box rattles on its way, an empty left box stands aside. So a
policy that remembers little can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prism.sensors import decode_text

from prism_sims import tabletop_model as parts
from prism_sims.mujoco_env import Vector
from prism_sims.tabletop import Command, Height, Insert, Rattle
from prism_sims.tabletop_arm import RATE, STEP, TabletopEnv, depth_rays


@dataclass(frozen=True)
class Go:
    """Move the hand by `way()`, asked anew at every step, until it is `near`; then the next one."""

    way: Callable[[], Vector]
    closed: bool
    near: float = 0.006  # metres
    speed: float = 1.0  # of 0.3 m/s
    least: int = 0  # steps
    most: int = 30  # steps, after which it goes on anyway


class TabletopExpert:
    """Plays `plan()`; what it decides, it decides from env.seen when it gets there."""

    def __init__(self, env: TabletopEnv) -> None:
        self.env = env
        self.reset(0)

    def reset(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 12])
        self.pace = rng.uniform(0.8, 1.0)
        self._plan = self.plan()
        self._go: Go | None = None
        self._steps = 0

    def plan(self) -> Iterator[Go]:
        return iter(())

    def see(self, start: int = 0) -> Vector:
        """Three numbers of object_state, metres from the hand."""
        return self.env.seen["object_state"][start : start + 3].astype(np.float64)

    def hand(self) -> Vector:
        return self.env.seen["proprio"][:3].astype(np.float64)

    def act(self) -> NDArray[np.float32]:
        while True:
            if self._go is None:
                self._go, self._steps = next(self._plan, Go(lambda: np.zeros(3), False, near=0.0)), 0
            way, go = self._go.way(), self._go
            if self._steps < go.most and (self._steps < go.least or np.linalg.norm(way) >= go.near):
                break
            self._go = None
        self._steps += 1
        return action(way, go.closed, go.speed * self.pace)


def action(way: Vector, closed: bool, speed: float = 1.0) -> NDArray[np.float32]:
    wanted = way / STEP
    length = float(np.linalg.norm(wanted))
    return np.array([*(wanted if length <= speed else wanted * speed / length), 1.0 if closed else -1.0], np.float32)


class InsertExpert(TabletopExpert):
    """Over the place where the hole seems to be, down until the peg stands; then away from the side that carries it,
    which the torque tells, until it falls in. No memory: an action follows from one observation."""

    def act(self) -> NDArray[np.float32]:
        seen = self.see()
        wrench = self.env.seen["tactile"].astype(np.float64)
        above, beside = -seen[2], float(np.hypot(*seen[:2]))  # of the hand: the peg gives way, by 1 mm for 1.5 N
        foot = above + wrench[2] / 1500.0
        if above > 0.012 and beside > (0.003 if above > 0.03 else 0.016):
            return action(np.array([*seen[:2], 0.03 - above if beside < 0.03 else 0.0]), True, self.pace)
        if foot < -0.003:  # in the hole: down, away from its walls
            return action(np.array([*(3e-4 * np.clip(wrench[:2], -5, 5)), -0.015]), True)
        if wrench[2] > 1.0:
            carried = np.array([-wrench[4], wrench[3]]) / wrench[2]  # where the board carries it, from its axis
            way = -carried / max(float(np.abs(carried).max()), 5e-4)
            way = np.where(np.abs(seen[:2]) > 0.013, np.sign(seen[:2]), way)  # the hole is not out there
            return action(np.array([*(0.0025 * way), -0.0035 - above]), True)
        return action(np.array([0.0, 0.0, -0.015 if above > 0.02 else -0.004]), True)


class RattleExpert(TabletopExpert):
    """What it hears decides where the box goes; it rattles on the way too, so a policy may change its mind."""

    LEFT, RIGHT, MARK = 0, 3, 6
    ASIDE = 0.21  # metres, y of the place for the box that is silent

    def plan(self) -> Iterator[Go]:
        yield from self.take(self.LEFT)
        for side in (-0.015, 0.03, -0.03, 0.03, -0.015):  # shake it while it rises
            yield from self.by(np.array([0.0, side, 0.014]), closed=True, steps=2)
        if loudness(self.env.seen["audio"]) < 0.001:
            yield Go(lambda: np.array([0.0, self.ASIDE - self.hand()[1], 0.0]), True)
            yield from self.put_down()
            yield from self.take(self.RIGHT)
            yield from self.by(np.array([0.0, 0.0, 0.06]), closed=True, steps=4)
        yield Go(lambda: self.see(self.MARK) * (1, 1, 0), True)
        yield from self.put_down()

    def by(self, way: Vector, closed: bool, steps: int) -> Iterator[Go]:
        goal = self.hand() + way
        yield Go(lambda: goal - self.hand(), closed, most=steps)

    def take(self, which: int) -> Iterator[Go]:
        above = np.array([0.0, 0.0, 0.06])
        yield Go(lambda: self.see(which) + above, False)
        yield Go(lambda: self.see(which), False, near=0.005, speed=0.7)
        yield Go(lambda: np.zeros(3), True, near=-1.0, most=3)

    def put_down(self) -> Iterator[Go]:
        floor = 0.004 + parts.BOX
        yield Go(lambda: np.array([0.0, 0.0, floor - self.hand()[2]]), True, near=0.003, speed=0.7)
        yield Go(lambda: np.zeros(3), False, near=-1.0, most=2)
        yield from self.by(np.array([0.0, 0.0, 0.07]), closed=False, steps=5)


def loudness(sound: NDArray[np.generic]) -> float:
    """Power between 600 and 1300 Hz, where a ball rings on wood."""
    power = np.abs(np.fft.rfft(sound.astype(np.float64))) ** 2 / len(sound) ** 2
    hertz = np.fft.rfftfreq(len(sound), 1 / RATE)
    return float(power[(hertz > 600) & (hertz < 1300)].sum())


class HeightExpert(TabletopExpert):
    def plan(self) -> Iterator[Go]:
        # slowly: a way of three steps among fourteen is hardly learned
        yield Go(lambda: np.array([*self.env.seen["object_state"][:2], 0.0]), True, near=0.004, speed=0.35)
        yield Go(self.down, True, near=0.002, speed=0.6, most=40)
        yield Go(lambda: np.zeros(3), False, near=-1.0, most=2)
        yield Go(lambda: np.array([0.0, 0.0, 0.03]), False, near=-1.0, most=4)

    def down(self) -> Vector:
        stand = self.env.seen["object_state"][:2].astype(np.float64)
        below = surface_below(self.env.seen["depth_wrist"], stand)
        gap = below - parts.BLOCK - 0.0075  # the hand holds the block 5 mm above its middle
        return np.array([*stand, -gap if gap > 0.02 else -0.7 * gap])


def surface_below(depth: NDArray[np.generic], stand: Vector) -> float:
    """Metres from the hand's point down to the plate, whose middle is `stand` from the hand: the nearest surface that
    is seen round there, the fingers and the block left out."""
    x, y, _ = np.moveaxis(depth_rays(), -1, 0)
    metres = depth.astype(np.float64)
    lean = np.arctan2(0.42, 0.908)
    forward, down = np.sin(lean), np.cos(lean)  # of the picture's up and of the optical axis
    # in the world's axes, from the hand's point: the camera is 7.5 cm in front of it and 12 cm above
    ahead = 0.075 + metres * (y * down - forward)
    aside = -metres * x
    below = metres * (down + y * forward) - 0.12
    plate = np.maximum(np.abs(ahead - stand[0]), np.abs(aside - stand[1])) < 0.034
    beside = np.maximum(np.abs(ahead), np.abs(aside)) > parts.BLOCK + 0.005  # not the block
    plate &= (below > parts.BLOCK) & (beside | (below > parts.BLOCK + 0.01)) & (metres > 0)
    return float(np.median(below[plate])) if plate.any() else 0.1


@dataclass(frozen=True)
class Move:
    """A command: which of object_state's places is taken, which is the way left to its goal."""

    word: str  # of the sentence, by which it is known
    thing: int
    goal: int
    half: float = parts.CUP + parts.CUP_WALL  # opening of the fingers that hold it
    rest: float = parts.CUP_HELD  # height of that place when it stands on the table
    drop: float = 0.0  # metres above the goal where it is let go


_MOVES = (
    Move("hook", thing=0, goal=8),
    Move("ball", thing=3, goal=7, half=parts.SMALL_BALL, rest=parts.SMALL_BALL, drop=0.024),
    Move("yellow", thing=2, goal=6),
    Move("blue", thing=1, goal=5),
)


class CommandExpert(TabletopExpert):
    """No memory: an action follows from one observation, so whatever went wrong is tried again from there."""

    GAIN = 0.7  # share of the way that is gone in a step: the last centimetre takes a few

    def act(self) -> NDArray[np.float32]:
        words = decode_text(self.env.seen["text"])
        move = next(move for move in _MOVES if move.word in words)
        way, left = self.see(6 * move.thing), self.see(6 * move.goal)
        opening = float(self.env.seen["proprio"][3])
        beside, up = float(np.hypot(*way[:2])), float(self.hand()[2] + way[2]) - move.rest
        loose = opening > move.half + 0.003
        hangs = move.word == "hook"
        if self.there(move, left) or (hangs and loose and up > 0.1):
            return action(np.array([0.0, 0.0, STEP if loose else 0.0]), False)
        if not loose and max(beside, abs(way[2])) < 0.025 and opening > move.half - 0.008:
            goal = self.along_hook(left) if hangs else left + np.array([0.0, 0.0, move.drop])
            return self.carry(goal, funnel=not hangs, speed=float(np.clip(0.3 + 20.0 * up, 0.3, 0.9)))
        if loose and beside < 0.008 and abs(way[2]) < 0.006:
            return action(np.zeros(3), True)
        above = np.array([0.0, 0.0, np.clip(12.0 * (beside - 0.004), 0.0, 0.1)])  # over it, down as into a funnel
        return action(self.GAIN * (way + above), False)

    def carry(self, left: Vector, funnel: bool, speed: float) -> NDArray[np.float32]:
        """Up first, then across; over the goal down, as into a funnel."""
        rise = left[2] + (np.clip(3.0 * (np.hypot(*left[:2]) - 0.004), 0.0, 0.05) if funnel else 0.0)
        across = left[:2] * np.clip(1.0 - rise / 0.05, 0.0, 1.0)
        return action(self.GAIN * np.array([*across, rise]), True, speed)

    @staticmethod
    def there(move: Move, left: Vector) -> bool:
        x, y, z = left
        if move.word == "hook":
            return bool(abs(x) < 0.012 and y < -0.015 and 0.006 < z < 0.02)
        return bool(np.hypot(x, y) < (0.010 if move.drop else 0.007) and abs(z + move.drop) < 0.006 + move.drop / 3)

    @staticmethod
    def along_hook(left: Vector) -> Vector:
        """The handle goes round the hook to a place before its tip, over the tip, along the arm, down on it."""
        x, y, z = -left  # of the handle's opening, from the tip
        level = abs(x) < 0.007 and abs(z - 0.004) < 0.006
        if y > -0.005 and abs(x) < 0.012 and abs(z) < 0.018:
            goal = (0.0, 0.025, 0.004 if y < 0.017 else -0.012)
        elif level and y > -0.07:
            goal = (0.0, 0.025, 0.004)
        else:
            goal = (0.0, -0.045, 0.004) if y < -0.025 else (-0.06, -0.05, 0.004)
        return np.asarray(left + goal)


def make_tabletop_expert(env: TabletopEnv) -> TabletopExpert:
    from prism_sims.tabletop_place import Can, CanExpert, Nest, NestExpert

    kinds: dict[type[TabletopEnv], type[TabletopExpert]] = {
        Insert: InsertExpert, Rattle: RattleExpert, Height: HeightExpert, Command: CommandExpert,
        Can: CanExpert, Nest: NestExpert,
    }  # fmt: skip
    return kinds[type(env)](env)
