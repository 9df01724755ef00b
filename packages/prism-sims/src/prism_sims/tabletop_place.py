"""Two tasks of the tabletop in which things are put down with care, and their experts.

| task          | what to do                                                             |
| ------------- | ---------------------------------------------------------------------- |
| tabletop-can  | the can on the mark, which lies 0 to 3 cm above the table              |
| tabletop-nest | the middle container into the large one, the small one into the middle |

The can is fragile: it breaks when it falls by a centimetre or is pressed down. The force at the fingers tells that it
stands; that it slips in the hand tells it a little later, so no sense alone decides. Experts have no memory: an action
follows from one observation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prism_sims import tabletop_model as parts
from prism_sims.mjcf import box, free
from prism_sims.mujoco_env import Vector
from prism_sims.tabletop import WORDS, Fragile
from prism_sims.tabletop_arm import TabletopEnv
from prism_sims.tabletop_expert import TabletopExpert, action

CAN, CAN_HEIGHT, CAN_HELD = 0.028, 0.10, 0.054  # radius; the hand's point above its foot
# containers, large to small: half width outside, height; each stands out of the next larger one, to be held there
NEST = {"large": (0.048, 0.05), "middle": (0.036, 0.08), "small": (0.024, 0.11)}
WALL = 0.0025  # half the thickness of a container's walls
HELD = 0.014  # metres below its rim where a container is held


class Can(Fragile):
    """How high the mark lies shows when the can stands on it."""

    sense, objects, steps, words, fragile = "tactile", 5, 80, WORDS["can"], "can"

    def _xml(self) -> str:
        shape = f'type="cylinder" size="{CAN} {CAN_HEIGHT / 2}" pos="0 0 {CAN_HEIGHT / 2}" rgba="0.8 0.15 0.15 1"'
        can = free("can", f'<geom {shape} mass="0.06" friction="1 0.01 0.001"/>')
        mark = box((0.04, 0.04, 0.015), (0, 0, -0.015), "0.1 0.1 0.1 1")
        return parts.scene(can + f'<body name="mark">{mark}</body>')

    def _place(self, rng: np.random.Generator) -> Vector:
        side = 1.0 if rng.random() < 0.5 else -1.0
        self.put("can", [*(np.array([0.42, 0.14 * side]) + rng.uniform(-0.04, 0.04, 2)), 0.0005])
        at = np.array([0.52, -0.1 * side]) + rng.uniform(-0.05, 0.05, 2)
        self.model.body("mark").pos[:] = *at, rng.uniform(0.0, 0.03)
        self.broken = False
        return np.array([0.45, 0.0, 0.2]) + rng.uniform(-0.03, 0.03, 3)

    def _object_state(self) -> Vector:
        """From the hand to where the can is held; from the can to the mark, without its height."""
        can = self.body("can")
        return np.concatenate([can + np.array([0.0, 0.0, CAN_HELD]) - self.hand(), (self.body("mark") - can)[:2]])

    def succeeded(self) -> bool:
        off = self.body("can") - self.body("mark")
        upright = self.data.xmat[self.model.body("can").id][8] > 0.99
        stands = upright and np.hypot(*off[:2]) < 0.008 and abs(off[2]) < 0.003
        return bool(stands and not self.broken and self.let_go("can"))


class Nest(TabletopEnv):
    """Three containers without a lid, on the table; the walls leave 4.5 mm of play on each side."""

    sense, objects, steps, words = "tactile", 12, 140, WORDS["nest"]

    def _xml(self) -> str:
        colours = ("0.35 0.35 0.4 1", "0.2 0.45 0.6 1", "0.85 0.6 0.2 1")
        return parts.scene("".join(_container(name, rgba) for name, rgba in zip(NEST, colours, strict=True)))

    def _place(self, rng: np.random.Generator) -> Vector:
        for name, spot in zip(NEST, rng.permutation(3), strict=True):
            self.put(name, [0.46 + rng.uniform(-0.03, 0.03), 0.16 * (spot - 1) + rng.uniform(-0.02, 0.02), 0.0005])
        return np.array([0.45, 0.0, 0.24]) + rng.uniform(-0.03, 0.03, 3)

    def _object_state(self) -> Vector:
        """From the hand to where the middle and the small container are held; from the middle one's foot to the large
        one's floor, from the small one's to the middle one's."""
        hand, (large, middle, small) = self.hand(), (self.body(name) for name in NEST)
        up = np.array([0.0, 0.0, 2 * WALL])
        held = [self.body(name) + np.array([0.0, 0.0, NEST[name][1] - HELD]) - hand for name in ("middle", "small")]
        return np.concatenate([*held, large + up - middle, middle + up - small])

    def succeeded(self) -> bool:
        left = self._object_state()[6:].reshape(2, 3)
        nested = np.abs(left[:, :2]).max() < 0.008 and np.abs(left[:, 2]).max() < 0.006
        return bool(nested and self.let_go("small"))


def _container(name: str, rgba: str) -> str:
    half, height = NEST[name]
    floor = box((half, half, WALL), (0, 0, WALL), rgba, 'mass="0.02"')
    walls = ""
    for axis in range(2):
        for sign in (-1, 1):
            size, pos = np.array([half, half, height / 2]), np.array([0.0, 0.0, height / 2])
            size[axis], pos[axis] = WALL, sign * (half - WALL)
            walls += box(size, pos, rgba, 'mass="0.01"')
    return free(name, floor + walls)


class _Placer(TabletopExpert):
    GAIN = 0.7  # share of the way that is gone in a step: the last centimetre takes a few

    def opening(self) -> float:
        return float(self.env.seen["proprio"][3])

    def take(self, way: Vector) -> NDArray[np.float32]:
        """Over the thing, then down as into a funnel, then the fingers close."""
        beside = float(np.hypot(*way[:2]))
        if beside < 0.006 and abs(way[2]) < 0.006:
            return action(np.zeros(3), True)
        above = np.array([0.0, 0.0, np.clip(20.0 * (beside - 0.003), 0.0, 0.12)])
        return action(self.GAIN * (way + above), False)

    def holds(self, way: Vector, half: float) -> bool:
        closed = half - 0.008 < self.opening() < half + 0.003
        return closed and float(np.abs(way).max()) < 0.02

    def carry(self, left: Vector, slow: float) -> NDArray[np.float32]:
        """Up first, then across; over the goal down."""
        rise = left[2] + np.clip(12.0 * (np.hypot(*left[:2]) - 0.003), 0.0, 0.12)
        across = left[:2] * np.clip(1.0 - rise / 0.04, 0.0, 1.0)
        return action(self.GAIN * np.array([*across, rise]), True, slow)

    def up(self) -> NDArray[np.float32]:
        loose = self.opening() > 0.95 * parts.OPEN
        return action(np.array([0.0, 0.0, 0.03 if loose else 0.0]), False)


class CanExpert(_Placer):
    """Sets the can down until the fingers carry none of it."""

    def act(self) -> NDArray[np.float32]:
        seen = self.env.seen["object_state"].astype(np.float64)
        way, beside = seen[:3], seen[3:5]
        foot = float(self.hand()[2] + way[2]) - CAN_HELD
        if np.hypot(*beside) < 0.007 and foot < 0.033:
            carried = self.env.seen["tactile"][2] < 0.5  # newtons that push the hand up: it stands
            if self.holds(way, CAN) and carried:
                return action(np.array([*(0.3 * beside), -0.004]), True)
            return self.up()
        if self.holds(way, CAN):
            return self.carry(np.array([*beside, 0.03 - foot]), slow=0.6)
        return self.take(way)


class NestExpert(_Placer):
    """The middle container first; when it is in and let go, the small one."""

    def act(self) -> NDArray[np.float32]:
        ways = self.env.seen["object_state"][:12].astype(np.float64).reshape(4, 3)
        for name, way, left in (("middle", ways[0], ways[2]), ("small", ways[1], ways[3])):
            there = np.abs(left[:2]).max() < 0.006 and abs(left[2]) < 0.004
            near = float(np.hypot(*way[:2])) < 0.03 and way[2] > -0.04  # the hand is still round it
            if there and near:
                return self.up()
            if not there and self.holds(way, NEST[name][0]):
                return self.carry(left, slow=0.6 if left[2] < -0.03 else 0.35)
            if not there:
                return self.take(way)
        return self.up()
