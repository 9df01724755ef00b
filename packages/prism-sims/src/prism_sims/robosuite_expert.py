"""Scripted demonstrators for robosuite: a list of phases an arm, each of which pulls the hand to a target.

Targets are functions of the simulator's state, asked anew at every step, so the loop is closed: an object that slips,
rolls or was not grasped is followed, and a phase whose condition breaks sends the arm back to an earlier one. The
hand's speed and the change of its speed from step to step are bounded. What a seed changes is in Style: pace, heights,
small offsets; two demonstrations of one start are alike and not the same.

    e = target - hand,   a = limit(GAIN e / 5 cm),   |a - a_previous| <= SLEW

Here are Lift, Can and Square; Transport and ToolHang are in robosuite_expert_long.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_sims.robosuite import RobosuiteEnv

Vector = NDArray[np.float64]
Frame = tuple[NDArray[np.float64], NDArray[np.float64]]  # position (3,), rotation (3, 3)

MOVE_UNIT, TURN_UNIT = 0.05, 0.5  # metres and radians that an action of 1 asks for (OSC_POSE)
GAIN, TURN_GAIN = 1.6, 1.2
SLEW = 0.2  # largest change of an action's part from one step to the next
WIDE = 0.07  # metres between the fingers: open
STILL = 5e-4  # metres a step: the fingers are at rest
REST = 1.5e-3  # metres a step: the hand is at rest
DOWN = np.array([0.0, 0.0, -1.0])
UP = np.array([0.0, 0.0, 1.0])
HOME = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])  # the hand's rotation when an episode starts


@dataclass(frozen=True)
class Phase:
    """Move the hand to `target(where the hand was when the phase began)`; then the next phase."""

    target: Callable[[Frame], Frame]
    closed: bool
    near: float = 0.012  # metres
    turned: float = 0.12  # radians
    speed: float = 1.0  # of 0.3 m/s
    least: int = 0  # steps
    most: int = 120  # steps, after which it goes on anyway
    until: Callable[[], bool] | None = None  # wait for this as well
    fingers: bool = False  # wait for them as well, until they hold something or are open
    rest: bool = False  # wait for the hand as well, until it stands still
    keep: Callable[[], bool] | None = None  # once false: begin again with phase `back`
    back: int = 0
    name: str = ""  # for arms that wait for each other


@dataclass(frozen=True)
class Style:
    """Random variation between demonstrations of the same start."""

    pace: float  # 0.75 .. 1
    hover: float  # metres added to heights at which things are approached and carried
    offset: Vector  # metres, small, (3,): where exactly the hand takes hold
    tilt: float  # radians, small

    @staticmethod
    def draw(seed: int) -> Style:
        rng = np.random.default_rng([seed, 2])
        return Style(rng.uniform(0.75, 1.0), rng.uniform(0.0, 0.04), rng.uniform(-0.004, 0.004, 3), rng.normal(0, 0.02))


def rotation_vector(turn: NDArray[np.float64]) -> Vector:
    """Logarithm of a rotation matrix; at half a turn any of its two axes."""
    cosine = (np.trace(turn) - 1.0) / 2.0
    angle = float(np.arccos(np.clip(cosine, -1.0, 1.0)))
    skew = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2.0
    sine = float(np.linalg.norm(skew))
    if sine > 1e-6:
        return np.asarray(skew / sine * angle)
    if cosine > 0:
        return np.zeros(3)
    column = (turn + np.eye(3))[:, int(np.argmax(np.diag(turn)))]
    return np.asarray(column / np.linalg.norm(column) * angle)


def about_z(angle: float) -> NDArray[np.float64]:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


def angle_between(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(rotation_vector(a @ b.T)))


def grasp_turn(across: Vector, like: NDArray[np.float64], approach: Vector = DOWN) -> NDArray[np.float64]:
    """The hand's rotation with fingers pointing along `approach` and closing along `across`, whose sign does not
    matter: of the two the one nearer to `like`."""
    across = across - approach * float(across @ approach)
    across = across / np.linalg.norm(across)
    made = np.stack([across, np.cross(approach, across), approach], axis=1)
    other = made @ np.diag([-1.0, -1.0, 1.0])
    return made if angle_between(made, like) <= angle_between(other, like) else other


def carried(hand: Frame, thing: Frame, goal: Frame) -> Frame:
    """Where the hand must be for `thing`, held as it is now, to be at `goal`."""
    turn = goal[1] @ thing[1].T
    return goal[0] + turn @ (hand[0] - thing[0]), turn @ hand[1]


def moved(frame: Frame, by: Sequence[float] | Vector) -> Frame:
    return frame[0] + np.asarray(by), frame[1]


def pick(
    grasp: Callable[[], Frame],
    held: Callable[[], bool],
    hover: float,
    lift: float,
    back: int = 0,
    near: float = 0.008,
    settle: bool = False,
) -> list[Phase]:
    """Above it, down, close, up by `lift`. `grasp` is the hand's pose that holds it; `held` must stay true after, or
    it begins again with phase `back`, the number of its own first. `settle`: comes to rest before it closes."""
    still = [Phase(lambda _: grasp(), False, near=near, turned=0.08, speed=0.3, rest=True, most=12)]
    return [
        Phase(lambda _: moved(grasp(), hover * UP), closed=False, near=0.02, turned=0.15),
        Phase(lambda _: grasp(), closed=False, near=near, turned=0.08, speed=0.6, most=60),
        *(still if settle else []),
        pause(closed=True),
        Phase(lambda start: moved(start, lift * UP), True, near=0.03, speed=0.8, keep=held, back=back, most=50),
    ]


def pause(closed: bool, name: str = "") -> Phase:
    """The hand stays where it is while the fingers move. Steps are not counted: a policy sees fingers, and no clock."""
    return Phase(lambda start: start, closed, fingers=True, most=20, near=1.0, turned=4.0, name=name)


class Arm:
    """One arm working through its phases."""

    def __init__(self, env: RobosuiteEnv, robot: int, phases: Sequence[Phase], pace: float) -> None:
        self._env, self._robot, self._phases, self._pace = env, robot, tuple(phases), pace
        self._last = np.zeros(6)
        self._opening = env.opening(robot)
        self._hand = env.hand(robot)[0]
        self._begin(0)

    @property
    def phase(self) -> int:
        return self._number

    @property
    def name(self) -> str:
        return self._phases[self._number].name

    def _begin(self, number: int) -> None:
        self._number, self._steps = number % len(self._phases), 0
        self._start = self._env.hand(self._robot)

    def act(self) -> NDArray[np.float32]:
        hand = self._env.hand(self._robot)
        resting = np.linalg.norm(hand[0] - self._hand) < REST
        self._hand = hand[0]
        before, self._opening = self._opening, self._env.opening(self._robot)
        holding = self._opening < WIDE and abs(self._opening - before) < STILL
        for _ in range(len(self._phases)):
            phase = self._phases[self._number]
            if phase.keep is not None and not phase.keep():
                self._begin(phase.back)
                continue
            position, turn = phase.target(self._start)
            move = position - hand[0]
            rotate = rotation_vector(turn @ hand[1].T)
            there = np.linalg.norm(move) < phase.near and np.linalg.norm(rotate) < phase.turned
            done = there and self._steps >= phase.least and (phase.until is None or phase.until())
            done = done and (not phase.fingers or (holding if phase.closed else self._opening > WIDE))
            done = done and (not phase.rest or resting)
            if not done and self._steps < phase.most:
                break
            self._begin(self._number + 1)
        self._steps += 1
        base = self._env.base_turn(self._robot)
        limit = phase.speed * self._pace
        step = _limited(GAIN / MOVE_UNIT * (base.T @ move), limit)
        wanted = np.concatenate([step, _limited(TURN_GAIN / TURN_UNIT * (base.T @ rotate), 1.0)])
        self._last = self._last + np.clip(wanted - self._last, -SLEW, SLEW)
        return np.append(self._last, 1.0 if phase.closed else -1.0).astype(np.float32)


def _limited(vector: Vector, length: float) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector if norm <= length else vector * (length / norm)


class ScriptedExpert(ABC):
    """Phases for each arm, drawn up when an episode starts."""

    def __init__(self, env: RobosuiteEnv) -> None:
        self.env = env
        self._arms: list[Arm] = []

    @abstractmethod
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        """The phases of each arm, for the episode that has just begun."""

    def reset(self, seed: int) -> None:
        style = Style.draw(seed)
        scripts = self.script(style)
        self._arms = [Arm(self.env, i, phases, style.pace) for i, phases in enumerate(scripts)]

    def act(self) -> NDArray[np.float32]:
        return np.concatenate([arm.act() for arm in self._arms])

    def near_hand(self, body: str, within: float, robot: int = 0) -> Callable[[], bool]:
        return lambda: bool(np.linalg.norm(self.env.hand(robot)[0] - self.env.body(body)[0]) < within)


class LiftExpert(ScriptedExpert):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        def grasp() -> Frame:
            position, turn = self.env.body("cube_main")
            return position + np.array([0, 0, style.offset[2]]), grasp_turn(
                about_z(style.tilt) @ nearest_side(turn), HOME
            )

        phases = pick(grasp, self.near_hand("cube_main", 0.03), 0.07 + style.hover, 0.12)
        return [phases]


class CanExpert(ScriptedExpert):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        env = self.env
        goal = np.array(env.sim_env.target_bin_placements[env.sim_env.object_id])
        goal[:2] += np.array([-0.045, -0.06]) + 4.0 * style.offset[:2]  # the near corner: its middle is out of reach
        carry = goal[2] + 0.25 + style.hover

        def grasp() -> Frame:
            position, _ = env.body("Can_main")
            return position + np.array([0, 0, 0.012 + style.offset[2]]), about_z(2.0 * style.tilt) @ HOME

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
            pause(closed=False),
            Phase(lambda start: moved(start, 0.15 * UP), closed=False, near=0.03, most=40),
        ]
        return [phases]


class SquareExpert(ScriptedExpert):
    def script(self, style: Style) -> Sequence[Sequence[Phase]]:
        env = self.env
        peg = env.body("peg1")[0]
        top = peg[2] + 0.1
        hand_yaw, nut_yaw = self._turns(peg)

        def grasp() -> Frame:
            position, turn = env.site("SquareNut_handle_site")
            return position + turn[:, 0] * (0.004 + style.offset[0]), grasp_turn(turn[:, 1], about_z(hand_yaw) @ HOME)

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
            pause(closed=False),
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


def nearest_side(turn: NDArray[np.float64], like: NDArray[np.float64] = HOME) -> Vector:
    """Of the horizontal axes of a box the one that asks for the smaller turn of the hand from `like`."""
    sides = [turn[:, i] for i in range(3) if abs(turn[2, i]) < 0.7]
    return np.asarray(max(sides, key=lambda side: abs(float(side @ like[:, 0]))))


def make_robosuite_expert(env: RobosuiteEnv) -> ScriptedExpert:
    from prism_sims.robosuite_expert_long import ToolHangExpert, TransportExpert

    experts: dict[str, Callable[[RobosuiteEnv], ScriptedExpert]] = {
        "lift": LiftExpert, "can": CanExpert, "square": SquareExpert,
        "transport": TransportExpert, "tool-hang": ToolHangExpert,
    }  # fmt: skip
    return experts[env.task](env)
