"""The two long robosuite tasks.

ToolHang: the frame is taken up from the table, stood on its tip, let into the stand; the tool is hung on its hook.
The frame is an L with a grip near its corner: in its own axes the rod points to -z (the tip), the bar to -x, and at the
bar's end a post of 12 mm stands up. It lies flat with y down, so the hand takes it along y, leaning towards the corner,
which makes the hand point half down when the frame stands. The bar then points to -y, where the tool lies. The tool's
ring (19 mm inside) goes over the post (7.5 mm) from above, flat, the handle away from the stand; then the handle is
tipped, which brings the ring round the post's foot on to the bar, and let go.

Transport: one arm uncovers the hammer and hands it over, the other clears its bin, takes the hammer, puts it in.
Robot 0 stands at y = -0.81 and looks along +y, robot 1 opposite. They meet over the gap between their tables, the
hammer's handle along y: robot 0 holds it behind its middle, robot 1 near the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from prism_sims.robosuite_expert import (
    DOWN,
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
)  # fmt: skip

_LEAN = 0.6  # radians between the vertical and the hand that takes the frame
_HOLE = np.array([0.0, 0.045, 0.08])  # in the stand: the middle of the cavity's mouth
_TIP = np.array([0.04375, 0.0, -0.13445])  # in the frame
_POST = np.array([-0.04375, 0.0, 0.09])  # in the frame: the post's foot, on the bar
_DEPTH = 0.149  # metres from the mouth down to the tip when it stands on the ground of the cavity
_TIPPED = 0.8  # radians by which the handle hangs when the ring is round the post's foot


class ToolHangExpert(ScriptedExpert):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        phases = self._assemble(style)
        return [phases + self._hang(style, len(phases))]

    def _place(self, body: str, local: Vector) -> Vector:
        position, turn = self.env.body(body)
        return np.asarray(position + turn @ local)

    # -- the frame

    def _assembled(self) -> bool:
        return bool(self.env.sim_env._check_frame_assembled())

    def _frame_grasp(self, style: Style) -> Frame:
        position, turn = self.env.geom("frame_grip_frame")
        approach = np.cos(_LEAN) * DOWN - np.sin(_LEAN) * turn[:, 2]
        approach = approach / np.linalg.norm(approach)
        like = grasp_turn(turn[:, 0], about_z(1.2) @ HOME)
        return position + (0.005 + style.offset[0]) * turn[:, 2], grasp_turn(turn[:, 0], like, approach)

    def _frame_to(self, goal: Callable[[], Frame]) -> Callable[[Frame], Frame]:
        """The hand's target that brings the frame's tip to goal()[0], its axes to goal()[1]."""
        return lambda _: carried(
            self.env.hand(), (self._place("frame_root", _TIP), self.env.body("frame_root")[1]), goal()
        )

    def _stood_up(self) -> Frame:
        """Lifted, the shortest way to upright."""
        turn = self.env.body("frame_root")[1]
        return np.array([-0.1, -0.1, 1.03]), _onto(turn[:, 2], UP) @ turn

    def _over_hole(self, height: float) -> Callable[[], Frame]:
        def goal() -> Frame:
            side = -float(np.sign(self._down_side))
            return self._place("stand_root", _HOLE) + height * UP, about_z(side * np.pi / 2)

        return goal

    def _let_in(self, start: Frame) -> Frame:
        """Straight down. The hand keeps its turn: the walls set the frame's, and a hand that worked against them would
        only turn round the grip."""
        off = self._place("stand_root", _HOLE) - self._place("frame_root", _TIP)
        hand = self.env.hand()[0]
        return np.array([*(hand[:2] + off[:2]), hand[2] + off[2] - _DEPTH]), start[1]

    def _assemble(self, style: Style) -> list[Phase]:
        env = self.env
        self._down_side = -1.0 if env.body("frame_root")[1][2, 1] < 0 else 1.0

        def held() -> bool:
            return bool(np.linalg.norm(env.hand()[0] - env.geom("frame_grip_frame")[0]) < 0.03)

        def aligned() -> bool:
            off = (self._place("frame_root", _TIP) - self._place("stand_root", _HOLE))[:2]
            return bool(
                np.linalg.norm(off) < 0.002 and np.arccos(np.clip(env.body("frame_root")[1][2, 2], -1, 1)) < 0.015
            )

        def guided() -> bool:
            """Held, and over the mouth or in it."""
            off = self._place("frame_root", _TIP) - self._place("stand_root", _HOLE)
            return held() and bool(np.linalg.norm(off[:2]) < 0.003 or off[2] < -0.003)

        phases = pick(lambda: self._frame_grasp(style), held, 0.08 + style.hover, 0.2, settle=True)
        lined_up = len(phases) + 2
        phases += [
            Phase(self._frame_to(self._stood_up), True, near=0.04, turned=0.15, keep=held, most=120),
            Phase(self._frame_to(self._over_hole(0.05 + style.hover)), True, near=0.015, turned=0.1, keep=held),
            Phase(self._frame_to(self._over_hole(0.012)), True, near=0.004, turned=0.02, speed=0.4, keep=held, most=80,
                  until=aligned),
            Phase(self._let_in, True, near=0.006, turned=0.5, speed=0.35, keep=guided, back=lined_up, most=110,
                  until=self._assembled),
            Phase(lambda start: start, True, near=1.0, turned=4.0, keep=self._assembled, back=lined_up),
            pause(closed=False),
            Phase(lambda start: moved(start, -0.08 * start[1][:, 2]), False, near=0.02, most=30),
            Phase(lambda _: (np.array([-0.05, -0.1, 1.15]), about_z(1.3) @ HOME), False, near=0.05, turned=0.4),
        ]  # fmt: skip
        return phases

    # -- the tool

    def _tool_grasp(self, style: Style) -> Frame:
        position, turn = self.env.body("tool_root")
        return position + style.offset[0] * turn[:, 0], grasp_turn(turn[:, 1], about_z(1.3) @ HOME)

    def _tipped(self) -> float:
        """Radians by which the handle hangs below the horizontal."""
        return float(np.arcsin(np.clip(-self.env.body("tool_root")[1][2, 0], -1.0, 1.0)))

    def _ring_to(self, inward: float, height: float, tip: float = 0.0) -> Callable[[Frame], Frame]:
        """The ring's middle `inward` metres from the post's and `height` above the bar, the handle away from the stand
        and `tip` radians below the horizontal, to which it goes in small steps: the hand has to swing round the ring.
        """

        def target(_: Frame) -> Frame:
            tool, frame = self.env.body("tool_root")[1], self.env.body("frame_root")[1]
            angle = float(np.clip(tip, -0.1, self._tipped() + 0.12))
            level = np.array([frame[0, 0], frame[1, 0], 0.0]) / np.linalg.norm(frame[:2, 0])
            handle = -np.cos(angle) * level - np.sin(angle) * UP
            flat = np.cross(level, UP) * (1.0 if tool[2, 2] > 0 else -1.0)
            turn = np.stack([handle, flat, np.cross(handle, flat)], axis=1)
            where = self._place("frame_root", _POST + np.array([inward, 0.0, 0.0])) + height * UP
            return carried(self.env.hand(), (self.env.site("tool_hole1_center")[0], tool), (where, turn))

        return target

    def _hang(self, style: Style, first: int) -> list[Phase]:
        def off_post() -> Vector:
            """The ring's middle from the post's foot, in the frame's axes."""
            off = self.env.site("tool_hole1_center")[0] - self._place("frame_root", _POST)
            return np.asarray(self.env.body("frame_root")[1].T @ off)

        def over_post() -> bool:
            return held() and bool(np.linalg.norm(off_post()[:2]) < 0.005)

        def round_post() -> bool:
            inward, sideways, height = off_post()
            return held() and bool(-0.01 < inward < 0.025 and abs(sideways) < 0.01 and height < 0.014)

        held = self.near_hand("tool_root", 0.03)
        phases = pick(lambda: self._tool_grasp(style), held, 0.1 + style.hover, 0.28, back=first)
        above = first + len(phases)
        phases += [
            Phase(self._ring_to(0.0, 0.05 + style.hover), True, near=0.015, turned=0.1, keep=held, back=first),
            Phase(self._ring_to(0.0, 0.02), True, near=0.004, turned=0.06, speed=0.4, keep=held, back=first,
                  until=lambda: bool(np.linalg.norm(off_post()[:2]) < 0.002)),
            Phase(self._ring_to(0.001, 0.006), True, near=0.003, turned=0.1, speed=0.3, keep=over_post, back=above,
                  most=40),
            Phase(self._ring_to(0.002, -0.002, _TIPPED), True, near=0.006, turned=0.2, speed=0.3, keep=round_post,
                  back=above, most=80, until=lambda: self._tipped() > _TIPPED - 0.15),
            Phase(self._ring_to(0.015, -0.004, _TIPPED + 0.2), True, near=0.01, turned=0.1, speed=0.3, rest=True,
                  keep=round_post, back=above, most=60),
            pause(closed=False),
            Phase(lambda start: moved(start, 0.1 * UP), False, near=0.03, most=40),
            Phase(lambda start: start, False, least=10, most=12),
            Phase(lambda start: start, False, near=1.0, turned=4.0, keep=lambda: False, back=first),
        ]  # fmt: skip
        return phases


def _onto(a: Vector, b: Vector) -> NDArray[np.float64]:
    """The smallest rotation that takes unit vector a to b; they must not be opposite."""
    cross, dot = np.cross(a, b), float(a @ b)
    skew = np.array([[0.0, -cross[2], cross[1]], [cross[2], 0.0, -cross[0]], [-cross[1], cross[0], 0.0]])
    return np.asarray(np.eye(3) + skew + skew @ skew / (1.0 + dot))


_BEHIND = -0.03  # metres along the handle from its middle: where robot 0 takes it
_APART = 0.1  # metres between the two hands on it
_TABLE = 0.8


class TransportExpert(ScriptedExpert):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        return [self._giver(style), self._taker(style)]

    def _home(self, robot: int) -> NDArray[np.float64]:
        return np.asarray(self.env.base_turn(robot) @ HOME)

    def _hammer_grasp(self, robot: int, along: float) -> Frame:
        position, turn = self.env.body("payload_root")
        axis = turn[:, 2] - UP * turn[2, 2]
        across = np.cross(UP, axis)
        return position + along * turn[:, 2], grasp_turn(across, self._home(robot))

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
        meet = np.array([0.02, -0.05, 0.98 + style.hover / 2])  # higher, the elbows would be straight
        aside = np.array([-0.19, -0.45, _TABLE])

        def lid() -> Frame:
            position, turn = env.geom("transport_start_bin_lid_handle")
            return position + 0.004 * UP, grasp_turn(turn[:, 0], self._home(0))

        def lid_to(height: float) -> Callable[[Frame], Frame]:
            def target(start: Frame) -> Frame:
                held = env.body("transport_start_bin_lid_root")
                return carried(env.hand(0), held, (aside + height * UP, held[1]))[0], start[1]

            return target

        lid_held = self.near_hand("transport_start_bin_lid_root", 0.05, robot=0)
        phases = pick(lid, lid_held, 0.06 + style.hover, 0.1)
        phases += [
            Phase(lid_to(0.22), True, near=0.03, turned=0.2, keep=lid_held, most=90),
            Phase(lid_to(0.04), True, near=0.025, turned=0.3, speed=0.7, keep=lid_held, most=50),
            pause(closed=False),
            Phase(lambda start: moved(start, 0.12 * UP), closed=False, near=0.03, most=40),
        ]
        first = len(phases)
        held = self.near_hand("payload_root", 0.09, robot=0)
        phases += pick(lambda: self._hammer_grasp(0, _BEHIND), held, 0.16 + style.hover, 0.2, back=first, settle=True)
        past = np.array([0.08, -0.28, 1.07])  # over the bin's wall
        taken = lambda: self._arms[1].name in ("taken", "away")  # noqa: E731
        phases += [
            Phase(self._show(past), True, near=0.05, turned=0.3, keep=held, back=first, most=60),
            Phase(self._show(meet), True, near=0.02, turned=0.15, keep=held, back=first, most=120),
            Phase(self._show(meet), True, near=0.03, turned=0.3, keep=held, back=first, most=400,
                  until=taken, name="offered"),
            pause(closed=False),
            Phase(lambda start: moved(start, [0.0, -0.06, 0.12]), closed=False, near=0.03, most=30, name="released"),
            Phase(lambda start: moved(start, [0.0, -0.15, 0.0]), closed=False, near=0.03, most=500, name="released",
                  until=lambda: False, keep=lambda: bool(env.body("payload_root")[0][1] > -0.25), back=first),
        ]  # fmt: skip
        return phases

    def _taker(self, style: Style) -> list[Phase]:
        env = self.env
        bin_for_trash = env.body("transport_trash_bin_root")[0]
        bin_for_hammer = env.body("transport_target_bin_root")[0]

        def trash() -> Frame:
            position, turn = env.body("trash_main")
            return position, grasp_turn(nearest_side(turn, self._home(1)), self._home(1))

        def over(goal: NDArray[np.float64], height: float) -> Callable[[Frame], Frame]:
            return lambda _: (np.array([*goal[:2], _TABLE + height]), self._home(1))

        def hammer() -> Frame:
            middle, turn = env.body("payload_root")
            other = float((env.hand(0)[0] - middle) @ turn[:, 2])
            return self._hammer_grasp(1, float(np.clip(other + _APART, 0.02, 0.09)))

        def offered() -> bool:
            return self._arms[0].name == "offered"

        trash_held = self.near_hand("trash_main", 0.04, robot=1)
        phases = pick(trash, trash_held, 0.17 + style.hover, 0.2, settle=True)
        phases += [
            Phase(over(bin_for_trash, 0.25), True, near=0.03, turned=0.3, keep=trash_held, most=90),
            Phase(over(bin_for_trash, 0.12), True, near=0.03, turned=0.3, keep=trash_held, speed=0.7, most=40),
            pause(closed=False),
            Phase(over(bin_for_trash, 0.28), closed=False, near=0.03, most=40),
        ]
        first = len(phases)
        held = self.near_hand("payload_root", 0.14, robot=1)
        drop = np.array([*bin_for_hammer[:2], _TABLE + 0.07])
        side = np.pi / 2
        phases += [
            Phase(lambda _: (np.array([0.02, 0.18, 1.2]), self._home(1)), False, near=0.05, most=600, until=offered),
            Phase(lambda _: moved(hammer(), 0.06 * UP), False, near=0.015, turned=0.12, keep=offered, back=first),
            Phase(lambda _: hammer(), False, near=0.008, turned=0.1, speed=0.5, keep=offered, back=first, most=60,
                  rest=True),
            pause(closed=True),
            Phase(lambda start: start, True, near=1.0, turned=4.0, least=3, most=60, name="taken", keep=held,
                  back=first, until=lambda: self._arms[0].name == "released"),
            Phase(lambda start: moved(start, [0.0, 0.12, 0.04]), True, near=0.04, keep=held, back=first, name="away"),
            Phase(self._hammer_to(1, drop + 0.2 * UP, side), True, near=0.03, turned=0.3, keep=held, back=first,
                  name="away"),
            Phase(self._hammer_to(1, drop, side), True, near=0.03, turned=0.4, keep=held, back=first, most=60,
                  speed=0.7, name="away"),
            pause(closed=False, name="away"),
            Phase(lambda start: moved(start, 0.15 * UP), closed=False, near=0.03, most=40, name="away"),
        ]  # fmt: skip
        return phases
