"""The expert of the tabletop. It stacks by sight; it inserts as one would with covered eyes at the end: to where the
hole seems to be, down until the peg stands on the rim, then along the board towards the hole until it drops in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from prism.sims.robosuite_expert import (
    HOME,
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
    nearest_side,
    pause,
    pick,
)
from prism.sims.tabletop import BLOCK, HOLES, PEG, TOP, TabletopEnv


class TabletopExpert(ScriptedExpert):
    env: TabletopEnv

    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        env, thing = self.env, self.env.command.thing
        body = f"{thing}_main"
        above = 0.5 * PEG[2] if thing == "peg" else 0.004

        def grasp() -> Frame:
            position, turn = env.body(body)
            return position + UP * (above + 0.5 * style.offset[2]), grasp_turn(nearest_side(turn), HOME)

        held = self.near_hand(body, above + 0.03)
        phases = pick(grasp, held, 0.09 + style.hover, 0.14 + style.hover, near=0.004, settle=8)
        return [phases + (self._insert(held) if env.command.onto in HOLES else self._stack(style, held))]

    def _to(self, where: Callable[[], Vector]) -> Callable[[Frame], Frame]:
        """The thing, held as it is, upright to `where()`."""

        def target(_: Frame) -> Frame:
            held = self.env.body(f"{self.env.command.thing}_main")
            yaw = float(np.arctan2(held[1][1, 0], held[1][0, 0]))
            quarter = np.round(yaw / (np.pi / 2)) * np.pi / 2
            squared = self.env.command.onto in HOLES
            return carried(self.env.hand(), held, (where(), about_z(quarter if squared else yaw)))

        return target

    def _stack(self, style: Style, held: Callable[[], bool]) -> list[Phase]:
        def over(height: float) -> Callable[[Frame], Frame]:
            return self._to(lambda: self.env.body(f"{self.env.command.onto}_main")[0] + (2 * BLOCK + height) * UP)

        return [
            Phase(over(0.08 + style.hover), True, near=0.012, keep=held),
            Phase(over(0.004), True, near=0.004, speed=0.4, keep=held, most=50),
            pause(closed=False, steps=6),
            Phase(lambda start: moved(start, 0.12 * UP), False, near=0.02, most=40),
        ]

    def _insert(self, held: Callable[[], bool]) -> list[Phase]:
        env, hole = self.env, self.env.command.onto

        def foot() -> Vector:
            position, turn = env.body("peg_main")
            return np.asarray(position - PEG[2] * turn[:, 2])

        def seen(height: float) -> Callable[[Frame], Frame]:
            return self._to(lambda: env.drawn(hole) + (PEG[2] + height) * UP)

        def small_turn(lean: Vector) -> NDArray[np.float64]:
            """A rotation by the small vector `lean`."""
            x, y, z = np.clip(lean, -0.3, 0.3)
            skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
            return np.asarray(np.eye(3) + skew + skew @ skew / 2)

        def press(where: Vector, depth: float) -> Callable[[Frame], Frame]:
            """The foot along the board to `where`, leaning on it; the hand leans against a peg that tilts."""

            def target(start: Frame) -> Frame:
                hand, now = env.hand(), foot()
                axis = env.body("peg_main")[1][:, 2]
                upright = small_turn(np.cross(axis, UP))
                place = np.array([*(hand[0][:2] + where[:2] - now[:2]), hand[0][2] - depth])
                return place, upright @ start[1]

            return target

        def down(depth: float) -> Callable[[], bool]:
            return lambda: bool(foot()[2] < TOP - depth)

        true = env.true_hole(hole)
        return [
            Phase(seen(0.06), True, near=0.012, turned=0.1, keep=held),
            Phase(seen(0.012), True, near=0.004, turned=0.05, speed=0.5, keep=held, most=50),
            Phase(press(env.drawn(hole), 0.005), True, speed=0.25, keep=held, most=30, near=1, until=env.touches_board),
            Phase(press(true, 0.003), True, speed=0.25, keep=held, most=80, near=1, until=down(0.006)),
            Phase(press(true, 0.012), True, speed=0.4, keep=held, most=60, near=1, until=down(0.03)),
            pause(closed=False, steps=6),
            Phase(lambda start: moved(start, 0.1 * UP), False, near=0.02, most=40),
        ]
