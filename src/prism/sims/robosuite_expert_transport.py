"""Transport: one arm uncovers the hammer and hands it over, the other clears its bin, takes the hammer, puts it in.

Robot 0 stands at y = -0.81 and looks along +y, robot 1 opposite. They meet over the gap between their tables, the
hammer's handle along y: robot 0 holds it behind its middle, robot 1 near the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from prism.sims.robosuite_env import RobosuiteEnv
from prism.sims.robosuite_expert import (
    UP,
    Frame,
    Phase,
    ScriptedExpert,
    Style,
    about_z,
    carried,
    grasp_turn,
    moved,
    pause,
    pick,
)

_HOME = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
_BEHIND = -0.03  # metres along the handle from its middle: where robot 0 takes it
_APART = 0.1  # metres between the two hands on it
_TABLE = 0.8


class TransportExpert(ScriptedExpert):
    def __init__(self, env: RobosuiteEnv) -> None:
        super().__init__(env)
        self.env = env

    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        return [self._giver(style), self._taker(style)]

    def _home(self, robot: int) -> NDArray[np.float64]:
        return np.asarray(self.env.base_turn(robot) @ _HOME)

    def _hammer_grasp(self, robot: int, along: float) -> Frame:
        position, turn = self.env.body("payload_root")
        axis = turn[:, 2] - UP * turn[2, 2]
        across = np.cross(UP, axis)
        return position + along * turn[:, 2], grasp_turn(across, self._home(robot))

    def _holds(self, robot: int, body: str, within: float) -> Callable[[], bool]:
        return lambda: bool(np.linalg.norm(self.env.hand(robot)[0] - self.env.body(body)[0]) < within)

    def _hammer_to(self, robot: int, where: NDArray[np.float64], direction: float) -> Callable[[Frame], Frame]:
        """The hammer's middle to `where`, its handle turned about the vertical to `direction` (radians)."""

        def target(_: Frame) -> Frame:
            hammer = self.env.body("payload_root")
            now = float(np.arctan2(hammer[1][1, 2], hammer[1][0, 2]))
            goal = where, about_z(direction - now) @ hammer[1]
            return carried(self.env.hand(robot), hammer, goal)

        return target

    def _show(self, where: NDArray[np.float64]) -> Callable[[Frame], Frame]:
        """Robot 0's hand to `where`, the handle along y."""

        def target(_: Frame) -> Frame:
            axis = self.env.body("payload_root")[1][:, 2]
            return where, about_z(np.pi / 2 - float(np.arctan2(axis[1], axis[0]))) @ self.env.hand(0)[1]

        return target

    def _giver(self, style: Style) -> list[Phase]:
        env = self.env
        meet = np.array(
            [0.02, -0.05, 0.98 + style.hover / 2]
        )  # higher, the elbows would be straight and the arms stuck
        aside = np.array([-0.19, -0.45, _TABLE])

        def lid() -> Frame:
            position, turn = env.geom("transport_start_bin_lid_handle")
            return position + 0.004 * UP, grasp_turn(turn[:, 0], self._home(0))

        def lid_to(height: float) -> Callable[[Frame], Frame]:
            def target(start: Frame) -> Frame:
                held = env.body("transport_start_bin_lid_root")
                return carried(env.hand(0), held, (aside + height * UP, held[1]))[0], start[1]

            return target

        lid_held = self._holds(0, "transport_start_bin_lid_root", 0.05)
        phases = pick(lid, lid_held, 0.06 + style.hover, 0.1)
        phases += [
            Phase(lid_to(0.22), True, near=0.03, turned=0.2, keep=lid_held, most=90),
            Phase(lid_to(0.04), True, near=0.025, turned=0.3, speed=0.7, keep=lid_held, most=50),
            pause(closed=False, steps=5),
            Phase(lambda start: moved(start, 0.12 * UP), closed=False, near=0.03, most=40),
        ]
        first = len(phases)
        held = self._holds(0, "payload_root", 0.09)
        phases += pick(lambda: self._hammer_grasp(0, _BEHIND), held, 0.16 + style.hover, 0.2, back=first)
        past = np.array([0.08, -0.28, 1.07])  # over the bin's wall
        taken = lambda: self._arms[1].name in ("taken", "away")  # noqa: E731
        phases += [
            Phase(self._show(past), True, near=0.05, turned=0.3, keep=held, back=first, most=60),
            Phase(self._show(meet), True, near=0.02, turned=0.15, keep=held, back=first, most=120),
            Phase(self._show(meet), True, near=0.03, turned=0.3, keep=held, back=first, most=400,
                  until=taken, name="offered"),
            pause(closed=False, steps=6),
            Phase(lambda start: moved(start, [0.0, -0.06, 0.12]), closed=False, near=0.03, most=30, name="released"),
            Phase(lambda start: moved(start, [0.0, -0.15, 0.0]), closed=False, near=0.03, most=500, name="released",
                  until=lambda: False, keep=lambda: self._hammer_up(), back=first),
        ]  # fmt: skip
        return phases

    def _hammer_up(self) -> bool:
        """Not lying where robot 0 would have to take it again."""
        position = self.env.body("payload_root")[0]
        return bool(position[1] > -0.25)

    def _taker(self, style: Style) -> list[Phase]:
        env = self.env
        bin_for_trash = env.body("transport_trash_bin_root")[0]
        bin_for_hammer = env.body("transport_target_bin_root")[0]

        def trash() -> Frame:
            position, turn = env.body("trash_main")
            sides = [turn[:, i] for i in range(3) if abs(turn[2, i]) < 0.7]
            best = max(sides, key=lambda side: abs(float(side @ self._home(1)[:, 0])))
            return position, grasp_turn(best, self._home(1))

        def over(goal: NDArray[np.float64], height: float) -> Callable[[Frame], Frame]:
            return lambda _: (np.array([*goal[:2], _TABLE + height]), self._home(1))

        def hammer() -> Frame:
            middle, turn = env.body("payload_root")
            other = float((env.hand(0)[0] - middle) @ turn[:, 2])
            return self._hammer_grasp(1, float(np.clip(other + _APART, 0.02, 0.09)))

        def offered() -> bool:
            return self._arms[0].name == "offered"

        trash_held = self._holds(1, "trash_main", 0.04)
        phases = pick(trash, trash_held, 0.17 + style.hover, 0.2)
        phases += [
            Phase(over(bin_for_trash, 0.25), True, near=0.03, turned=0.3, keep=trash_held, most=90),
            Phase(over(bin_for_trash, 0.12), True, near=0.03, turned=0.3, keep=trash_held, speed=0.7, most=40),
            pause(closed=False, steps=5),
            Phase(over(bin_for_trash, 0.28), closed=False, near=0.03, most=40),
        ]
        first = len(phases)
        held = self._holds(1, "payload_root", 0.14)
        drop = np.array([*bin_for_hammer[:2], _TABLE + 0.07])
        side = np.pi / 2
        phases += [
            Phase(lambda _: (np.array([0.02, 0.18, 1.2]), self._home(1)), False, near=0.05, most=600, until=offered),
            Phase(lambda _: moved(hammer(), 0.06 * UP), False, near=0.015, turned=0.12, keep=offered, back=first),
            Phase(lambda _: hammer(), False, near=0.008, turned=0.1, speed=0.5, keep=offered, back=first, most=60),
            pause(closed=True, steps=10),
            Phase(lambda start: start, True, near=1.0, turned=4.0, least=3, most=60, name="taken", keep=held,
                  back=first, until=lambda: self._arms[0].name == "released"),
            Phase(lambda start: moved(start, [0.0, 0.12, 0.04]), True, near=0.04, keep=held, back=first, name="away"),
            Phase(self._hammer_to(1, drop + 0.2 * UP, side), True, near=0.03, turned=0.3, keep=held, back=first,
                  name="away"),
            Phase(self._hammer_to(1, drop, side), True, near=0.03, turned=0.4, keep=held, back=first, most=60,
                  speed=0.7, name="away"),
            pause(closed=False, steps=6, name="away"),
            Phase(lambda start: moved(start, 0.15 * UP), closed=False, near=0.03, most=40, name="away"),
        ]  # fmt: skip
        return phases
