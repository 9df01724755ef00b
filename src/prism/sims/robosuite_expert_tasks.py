"""Lift, Can and Square: take hold from above, carry, put down."""

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
    Vector,
    about_z,
    carried,
    grasp_turn,
    moved,
    pause,
    pick,
)

_HOME = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])  # the hand's rotation when an episode starts


class _OneArm(ScriptedExpert):
    def __init__(self, env: RobosuiteEnv) -> None:
        super().__init__(env)
        self.env = env

    def near_hand(self, body: str, within: float) -> Callable[[], bool]:
        return lambda: bool(np.linalg.norm(self.env.hand()[0] - self.env.body(body)[0]) < within)


class LiftExpert(_OneArm):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        def grasp() -> Frame:
            position, turn = self.env.body("cube_main")
            return position + np.array([0, 0, style.offset[2]]), grasp_turn(_nearest_side(turn, style.tilt), _HOME)

        phases = pick(grasp, self.near_hand("cube_main", 0.03), 0.07 + style.hover, 0.12)
        return [phases]


class CanExpert(_OneArm):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        env = self.env
        goal = np.array(env.sim_env.target_bin_placements[env.sim_env.object_id])
        goal[:2] += np.array([-0.045, -0.06]) + 4.0 * style.offset[:2]  # the near corner: its middle is out of reach
        carry = goal[2] + 0.25 + style.hover

        def grasp() -> Frame:
            position, _ = env.body("Can_main")
            return position + np.array([0, 0, 0.012 + style.offset[2]]), about_z(2.0 * style.tilt) @ _HOME

        def over(height: float) -> Callable[[Frame], Frame]:
            def target(start: Frame) -> Frame:
                hand, can = env.hand(), env.body("Can_main")
                across = goal[:2] - can[0][:2] if height < 0.2 or hand[0][2] > carry - 0.06 else np.zeros(2)
                return np.array([*(hand[0][:2] + across), goal[2] + height]), start[1]

            return target

        held = self.near_hand("Can_main", 0.06)
        phases = pick(grasp, held, 0.1 + style.hover, 0.2)
        phases += [
            Phase(over(0.25 + style.hover), closed=True, near=0.025, keep=held),
            Phase(over(0.09), closed=True, near=0.02, speed=0.7, most=40, keep=held),
            pause(closed=False, steps=5),
            Phase(lambda start: moved(start, 0.15 * UP), closed=False, near=0.03, most=40),
        ]
        return [phases]


class SquareExpert(_OneArm):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        env = self.env
        peg = env.body("peg1")[0]
        top = peg[2] + 0.1
        hand_yaw, nut_yaw = self._turns(peg)

        def grasp() -> Frame:
            position, turn = env.site("SquareNut_handle_site")
            return position + turn[:, 0] * (0.004 + style.offset[0]), grasp_turn(turn[:, 1], about_z(hand_yaw) @ _HOME)

        def nut_at(height: float) -> Callable[[Frame], Frame]:
            goal = np.array([*peg[:2], top + height]), about_z(nut_yaw)
            return lambda _: carried(env.hand(), env.body("SquareNut_main"), goal)

        def over(nut: Vector) -> bool:
            return bool(np.abs(nut[:2] - peg[:2]).max() < 0.006)

        held = self.near_hand("SquareNut_main", 0.09)
        phases = pick(grasp, held, 0.09 + style.hover, 0.16 + style.hover)
        phases += [
            Phase(nut_at(0.05 + style.hover), closed=True, near=0.012, turned=0.1, keep=held, most=120),
            Phase(nut_at(0.015), closed=True, near=0.005, turned=0.05, speed=0.5, keep=held, most=60,
                  until=lambda: over(env.body("SquareNut_main")[0])),
            Phase(nut_at(-0.11), closed=True, near=0.01, speed=0.5, keep=held, most=60),
            pause(closed=False, steps=5),
            Phase(lambda start: moved(start, 0.12 * UP), closed=False, near=0.03, most=40),
        ]  # fmt: skip
        return [phases]

    def _turns(self, peg: Vector) -> tuple[float, float]:
        """The hand's turn from home when it takes the handle, and the nut's when it is on the peg, one of four.

        Little turning, the wrist within its limits, the hand on the near side of the peg: the far one is out of reach.
        """
        env = self.env
        nut = env.body("SquareNut_main")[1]
        yaw = float(np.arctan2(nut[1, 0], nut[0, 0]))
        base = np.array(env.sim_env.robots[0].base_pos)
        best = (np.inf, 0.0, 0.0)
        for take in (yaw - 2 * np.pi, yaw - np.pi, yaw, yaw + np.pi):
            for turn in np.arange(-4, 5) * np.pi / 2:
                put = take + turn - yaw
                if not (-1.35 < take < 2.6 and -1.5 < put < 2.6):
                    continue
                hand = peg[:2] + 0.058 * np.array([np.cos(turn), np.sin(turn)])
                beyond = max(0.0, float(np.linalg.norm(hand - base[:2])) - 0.78)
                best = min(best, (abs(take) + abs(put) + 100.0 * beyond, float(take), float(turn)))
        return best[1], best[2]


def _nearest_side(turn: NDArray[np.float64], tilt: float) -> Vector:
    """Of the horizontal axes of a cube the one that asks for the smaller turn of the hand."""
    sides = [turn[:, i] for i in range(3) if abs(turn[2, i]) < 0.7]
    best = max(sides, key=lambda side: abs(float(side @ _HOME[:, 0])))
    return np.asarray(about_z(tilt) @ best)
