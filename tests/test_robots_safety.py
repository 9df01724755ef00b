"""robots/guard.py and limits.py: whatever comes in, nothing beyond a limit goes out."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prism_client import ActionKind

from prism.errors import PrismError
from prism.robots.contract import ActionSpace, Health, Reading, Robot
from prism.robots.guard import Envelope, Guard
from prism.robots.limits import Limits, read_limits
from prism.sensors import ActionSpec, SensorSpec

RATE = 10.0
LIMITS = Limits(
    position=((-0.5, 0.5), (-0.2, 0.3), (0.0, 1.0)),
    speed=(0.4, 0.8, 2.0),
    acceleration=(1.0, 2.0, 9.0),
    jerk=(30.0, 15.0, 500.0),
)


def space(kind: str, scale: float = 0.5) -> ActionSpace:
    spec = ActionSpec(("x", "y", "z"), (), "points", ActionKind(kind), ("m", "m", "m"), (scale,) * 3)
    return ActionSpace(spec, pose="pose", pose_dims=3)


def integrate(kind: str, x: np.ndarray, sent: np.ndarray, scale: float = 0.5) -> np.ndarray:
    """A robot that does exactly as it is told."""
    units = scale * sent.astype(np.float64)
    return {"absolute": units, "delta": x + units, "velocity": x + units / RATE}[kind]


numbers = st.one_of(
    st.floats(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0]), st.floats(allow_nan=True)
)
commands = st.one_of(st.lists(numbers, min_size=3, max_size=3), st.none(), st.lists(numbers, max_size=5), st.just("x"))


@pytest.mark.parametrize("kind", ["absolute", "delta", "velocity"])
@settings(deadline=None, max_examples=60)
@given(asked=st.lists(commands, min_size=1, max_size=40), start=st.tuples(*[st.floats(0.05, 0.95)] * 3))
def test_no_command_goes_beyond_a_limit(kind: str, asked: list[object], start: tuple[float, ...]) -> None:
    low, high = np.array(LIMITS.position).T
    x = low + np.array(start) * (high - low)
    envelope = Envelope(space(kind), LIMITS, RATE)
    envelope.start(x)
    v = np.zeros(3)
    a = np.zeros(3)
    for action in asked:
        sent, _ = envelope.limit(action, x)
        assert sent is not None
        assert np.isfinite(sent).all()
        new = integrate(kind, x, sent)
        speed = (new - x) / RATE**-1
        growth = (speed - v) * RATE
        assert (new >= low - 1e-5).all()
        assert (new <= high + 1e-5).all()
        assert (np.abs(speed) <= np.array(LIMITS.speed) + 1e-5).all()
        assert (np.abs(growth) <= np.array(LIMITS.acceleration) + 1e-3).all()
        faster = np.abs(speed) > np.abs(v) + 1e-5
        assert (np.abs(growth - a) * RATE <= np.array(LIMITS.jerk) + 1e-2)[faster & (speed * v > 0)].all()
        x, v, a = new, speed, growth


@settings(deadline=None, max_examples=60)
@given(
    asked=st.lists(st.tuples(commands, st.tuples(*[st.floats(-5, 5)] * 3)), min_size=1, max_size=30),
)
def test_a_robot_that_is_elsewhere_is_not_driven_on(asked: list[tuple[object, tuple[float, ...]]]) -> None:
    """The measured pose jumps: speed and acceleration hold, and nothing leads farther out than braking does."""
    envelope = Envelope(space("delta"), LIMITS, RATE)
    envelope.start(np.zeros(3))
    low, high = np.array(LIMITS.position).T
    v = np.zeros(3)
    for action, pose in asked:
        sent, _ = envelope.limit(action, np.array(pose))
        assert sent is not None
        speed = 0.5 * sent.astype(np.float64) * RATE
        assert (np.abs(speed) <= np.array(LIMITS.speed) + 1e-5).all()
        assert (np.abs(speed - v) * RATE <= np.array(LIMITS.acceleration) + 1e-3).all()
        above, below = np.array(pose) > high, np.array(pose) < low
        assert (speed <= np.maximum(v - np.array(LIMITS.acceleration) / RATE, 0.0) + 1e-5)[above].all()
        assert (speed >= np.minimum(v + np.array(LIMITS.acceleration) / RATE, 0.0) - 1e-5)[below].all()
        v = speed


def test_limits_are_printed_in_their_units() -> None:
    limits = Limits(position=((0.0, 1.0), (-1.0, 1.0)), speed=(0.5, 0.4), acceleration=(2.0, 3.0))
    lines = limits.describe(("x", "base_vx"), ("m", "m/s"))
    assert lines[:2] == ["x: 0 to 1 m, 0.5 m/s, 2 m/s2", "base_vx: -1 to 1 m/s, 0.4 m/s, 3 m/s2"]


def test_which_limit_changed_a_command_is_said() -> None:
    for asked, said in {
        (0.0, 0.0, 0.0): (),
        (50.0, 0.0, 0.0): ("limited by speed: x",),
        (0.0, 0.035, 0.5): ("limited by jerk: y", "limited by speed: z"),
        (0.0, 0.08, 0.0): ("limited by acceleration: y",),
    }.items():
        envelope = Envelope(space("delta"), LIMITS, RATE)
        envelope.start(np.zeros(3))
        assert envelope.limit(asked)[1] == said, asked
    envelope = Envelope(space("delta"), LIMITS, RATE)
    envelope.start(np.array([0.0, 0.0, LIMITS.position[2][1]]))
    assert envelope.limit([0.0, 0.0, 1e-3])[1] == ("limited by position: z",)


def test_a_gripper_that_is_more_than_closed_is_closed() -> None:
    """A policy learns 1 and says 1.03: 1 is sent, and nothing was limited. 1.2 is, and any other number."""
    hand = ActionSpace(ActionSpec(("x", "gripper"), kind=ActionKind.ABSOLUTE, units=("m", "")))
    limits = Limits(position=((0.0, 1.0), (-1.0, 1.0)))
    for asked, sent, said in (
        ((1.0, 1.03), (1.0, 1.0), ()),
        ((1.0, -1.09), (1.0, -1.0), ()),
        ((1.0, 1.2), (1.0, 1.0), ("limited by position: gripper",)),
        ((1.01, 0.0), (1.0, 0.0), ("limited by position: x",)),
    ):
        envelope = Envelope(hand, limits, RATE)
        envelope.start(np.array([0.5, 0.0]))
        found, why = envelope.limit(asked)
        assert found is not None
        assert found.tolist() == pytest.approx(sent)
        assert why == said


def test_commands_within_the_limits_go_through_unchanged() -> None:
    envelope = Envelope(space("delta"), LIMITS, RATE)
    envelope.start(np.array([0.0, 0.0, 0.5]))
    sent, why = envelope.limit([0.01, -0.01, 0.02])
    assert sent is not None
    assert np.allclose(sent, [0.01, -0.01, 0.02])
    assert why == ()


def test_a_hold_stands_still_for_every_kind() -> None:
    """After some steps of motion, whatever the kind: it brakes, and then nothing moves any more."""
    for kind in ("absolute", "delta", "velocity"):
        envelope = Envelope(space(kind), LIMITS, RATE)
        x = np.array([0.0, 0.0, 0.5])
        envelope.start(x)
        for _ in range(3):
            wish = {"absolute": (x + 0.02) / 0.5, "delta": [0.04] * 3, "velocity": [0.4] * 3}[kind]
            sent, _ = envelope.limit(wish, x)
            assert sent is not None
            x = integrate(kind, x, sent)
        trace = []
        for _ in range(20):
            sent, _ = envelope.limit(None, x)
            assert sent is not None
            x = integrate(kind, x, sent)
            trace.append(x)
        assert np.allclose(trace[-1], trace[-10], atol=1e-6), kind


def test_quaternions_turn_at_the_speed_of_the_rotation() -> None:
    spec = ActionSpec(("qw", "qx", "qy", "qz"), (0,), "turntable", ActionKind.ABSOLUTE, ("",) * 4)
    turning = ActionSpace(spec, pose="pose", pose_dims=4)
    envelope = Envelope(turning, Limits(speed=(1.0,) * 4), RATE)
    old = np.array([1.0, 0.0, 0.0, 0.0])
    envelope.start(old)
    for _ in range(40):
        sent, _ = envelope.limit([0.0, -1.0, 0.0, 0.0])  # half a turn
        assert sent is not None
        assert np.linalg.norm(sent) == pytest.approx(1.0, abs=1e-5)
        assert 2 * math.acos(min(1.0, abs(float(old @ sent)))) <= 0.1 + 1e-3
        old = sent.astype(np.float64)
    assert abs(old[1]) == pytest.approx(1.0, abs=1e-3)


# ------------------------------------------------------------------ the guard


class Points(Robot):
    """A point that does as it is told, with a clock that a test sets, and faults that a test switches on."""

    def __init__(self, limits: Limits, realtime: bool = False) -> None:
        sensors = (
            SensorSpec("pose", "vector", (3,)),
            SensorSpec("force", "vector", (3,)),
            SensorSpec("eye", "vector", (1,)),
        )
        super().__init__("points", RATE, sensors, space("delta"), limits, realtime=realtime)
        self.x, self.time, self.stopped = np.array([0.0, 0.0, 0.5]), 100.0, 0
        self.values: dict[str, object] = {}  # of sensors that a test broke
        self.offset: dict[str, float] = {}  # of their stamps
        self.sent: list[np.ndarray] = []
        self.sick = ""

    def connect(self) -> None: ...
    def close(self) -> None: ...
    def now(self) -> float:
        return time.monotonic() if self.realtime else self.time

    def wait(self, until: float) -> None:
        self.time = until

    def health(self) -> Health:
        return Health(not self.sick, self.sick)

    def read(self) -> dict[str, Reading]:
        good = {"pose": self.x.astype(np.float32), "force": np.zeros(3, np.float32), "eye": np.float32([self.time])}
        shown = {**good, **self.values}
        at = self.now()
        return {k: Reading(v, at + self.offset.get(k, 0.0)) for k, v in shown.items() if v is not None}  # type: ignore[arg-type]

    def send(self, action: np.ndarray) -> None:
        if self.stopped:
            raise PrismError("stopped")
        self.sent.append(action)
        self.x = integrate("delta", self.x, action)

    def prepare(self, seed: int) -> None:
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


GUARDED = Limits(
    LIMITS.position, LIMITS.speed, LIMITS.acceleration, workspace=((-0.6, 0.6), (-0.3, 0.4), (-0.1, 1.1)),
    force=20.0, force_sensor="force",
)  # fmt: skip


def guarded(**more: object) -> tuple[Points, Guard]:
    robot = Points(GUARDED)
    guard = Guard(robot, GUARDED, **more)  # type: ignore[arg-type]
    guard.begin()
    return robot, guard


def steps(robot: Points, guard: Guard, count: int, action: object = (0.01, 0.0, 0.0)) -> None:
    for _ in range(count):
        guard.observe()
        guard.command(action)
        robot.wait(robot.time + 1 / RATE)


FAULTS: dict[str, tuple[dict[str, object], dict[str, float]]] = {
    "dead": ({"pose": None}, {}),
    "nan": ({"pose": np.float32([math.nan] * 3)}, {}),
    "swapped": ({"pose": np.zeros((4, 4), np.float32)}, {}),
    "late": ({}, {"pose": -5.0}),
    "ahead": ({}, {"pose": 5.0}),
    "force dead": ({"force": None}, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_needed_sensor_it_holds_then_stops(fault: str) -> None:
    robot, guard = guarded()
    steps(robot, guard, 3)
    robot.values, robot.offset = FAULTS[fault]
    steps(robot, guard, 1)
    assert guard.state == "hold"
    assert not robot.stopped
    steps(robot, guard, 5)
    assert guard.state == "stopped"
    assert robot.stopped
    assert guard.command([0.1, 0, 0]).action is None


def test_a_sensor_that_comes_back_in_time_goes_on() -> None:
    robot, guard = guarded()
    robot.values = {"pose": None}
    steps(robot, guard, 2)
    assert guard.state == "hold"
    robot.values = {}
    steps(robot, guard, 2)
    assert guard.state == "go"


def test_an_arm_of_positions_begins_where_it_is_seen_first() -> None:
    """Its pose is late when the episode begins: the first command is limited from where it then is."""
    robot = Points(GUARDED)
    robot.actions = space("absolute", 1.0)
    robot.values = {"pose": None}
    guard = Guard(robot, GUARDED)
    guard.begin()
    assert guard.command([0.4, 0.2, 0.9]).action is None
    robot.wait(robot.time + 1 / RATE)
    robot.values = {}
    guard.observe()
    sent = guard.command([0.4, 0.2, 0.9]).action
    assert sent is not None
    assert (np.abs(sent - [0.0, 0.0, 0.5]) <= np.array(GUARDED.speed) / RATE).all()


def test_a_sensor_that_nobody_needs_may_fail() -> None:
    robot, guard = guarded()
    robot.values = {"eye": None}
    steps(robot, guard, 10)
    assert guard.state == "go"
    robot, guard = guarded(needs=("eye",))
    robot.values = {"eye": None}
    steps(robot, guard, 10)
    assert guard.state == "stopped"


def test_a_frozen_pose_is_noticed_while_it_is_told_to_move() -> None:
    robot, guard = guarded()
    robot.values = {"pose": robot.x.astype(np.float32)}
    steps(robot, guard, 20, (0.0, 0.0, 0.0))
    assert guard.state == "go", "standing still is no fault"
    steps(robot, guard, 40, (0.05, 0.0, 0.0))
    assert guard.state == "stopped"
    assert "frozen" in guard.reason


class Arm(Points):
    """Of any kind of command, that follows its setpoint as a first-order lag, until something blocks it; its encoders
    are noisy, and its pose is told late."""

    def __init__(self, kind: str, limits: Limits, lag: float = 0.0, delay: int = 0, noise: float = 0.0) -> None:
        super().__init__(limits)
        self.actions, self.kind = space(kind, 1.0), kind
        self.lag, self.noise, self.blocked, self.adds_up = lag, noise, False, True
        self.goal, self.rng = self.x.copy(), np.random.default_rng(0)
        self.past = [(self.time, self.x.copy())] * (delay + 1)

    def setpoint(self) -> np.ndarray | None:
        return self.goal.copy() if self.adds_up else None

    def send(self, action: np.ndarray) -> None:
        self.sent.append(action)
        self.goal = integrate(self.kind, self.goal, action, 1.0)

    def wait(self, until: float) -> None:
        share = 1.0 if self.lag == 0 else 1 - math.exp((self.time - until) / self.lag)
        self.x = self.x if self.blocked else self.x + share * (self.goal - self.x)
        self.time = until
        self.past = [*self.past[1:], (self.time, self.x.copy())]

    def read(self) -> dict[str, Reading]:
        stamp, x = self.past[0]
        told = (x + self.rng.normal(0, self.noise, 3)).astype(np.float32)
        return {**super().read(), "pose": Reading(told, stamp)}


WIDE = Limits(((-2.0, 2.0),) * 3, (0.5,) * 3, (5.0,) * 3, force=20.0, force_sensor="force")
ON = {"absolute": (2.0, 0.0, 0.5), "delta": (0.05, 0.0, 0.0), "velocity": (0.5, 0.0, 0.0)}  # to x, as fast as it may


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("kind", ON)
def test_a_blocked_arm_is_not_pressed_harder_and_harder(kind: str, noise: float) -> None:
    """It was: under absolute commands its setpoint went on to the end of the range, 2 m away."""
    robot = Arm(kind, WIDE, lag=0.05, noise=noise)
    guard, most = Guard(robot, WIDE), 0.4 * 0.5
    guard.begin()
    for _ in range(8):
        guard.observe()
        said = guard.command(ON[kind]).why
        assert "following" not in str(said), "a lag that is usual is allowed"
        robot.wait(robot.time + 1 / RATE)
    robot.blocked, at = True, robot.x.copy()
    steps(robot, guard, 30, ON[kind])
    assert np.abs(robot.goal - at).max() <= most + 4 * noise
    assert guard.state == "stopped"
    assert ("following error): is it blocked?" if noise else "frozen") in guard.reason


def test_an_arm_that_is_pushed_away_is_stopped() -> None:
    robot = Arm("absolute", WIDE)
    guard = Guard(robot, WIDE)
    guard.begin()
    steps(robot, guard, 3, (0.0, 0.0, 0.5))
    robot.blocked, robot.x = True, np.array([0.0, 0.25, 0.5])
    steps(robot, guard, 2, (0.0, 0.0, 0.5))
    assert guard.state == "stopped"
    assert guard.reason == "y is 0.25 m from its commanded position (following error): is it blocked?"


def test_a_turn_that_is_blocked_is_not_pressed_harder() -> None:
    spec = ActionSpec(("qw", "qx", "qy", "qz"), (0,), "turntable", ActionKind.ABSOLUTE, ("",) * 4)
    turning = ActionSpace(spec, pose="pose", pose_dims=4)
    envelope = Envelope(turning, Limits(speed=(1.0,) * 4), RATE)
    here = np.array([1.0, 0.0, 0.0, 0.0])
    envelope.start(here)
    for _ in range(20):
        sent, why = envelope.limit([0.0, 1.0, 0.0, 0.0], here)
        assert sent is not None
        assert 2 * math.acos(min(1.0, float(sent[0]))) <= 0.4
    assert why == ("limited by following error: qw, qx",)
    envelope.see(np.array([math.cos(0.2), -math.sin(0.2), 0.0, 0.0]))
    assert envelope.exceeded() == 0


@pytest.mark.parametrize("adds_up", [True, False])
@pytest.mark.parametrize("kind", ["delta", "velocity"])
def test_what_was_commanded_since_the_pose_was_measured_counts(kind: str, adds_up: bool) -> None:
    """The pose is 0.3 s old: an arm at 0.5 m/s was driven 0.15 m beyond its position limit."""
    limits = dataclasses.replace(WIDE, position=((-0.6, 0.6),) * 3)
    robot = Arm(kind, limits, delay=3)
    robot.adds_up = adds_up
    robot.sensors = (dataclasses.replace(robot.sensors[0], max_age=0.5), *robot.sensors[1:])
    guard = Guard(robot, limits)
    guard.begin()
    for _ in range(40):
        steps(robot, guard, 1, ON[kind])
        assert robot.x[0] <= 0.6 + 1e-6
    assert robot.x[0] > 0.55


def test_force_workspace_and_health_stop_at_once() -> None:
    robot, guard = guarded()
    robot.values = {"force": np.float32([0, 0, 25])}
    steps(robot, guard, 1)
    assert guard.state == "stopped"
    assert guard.reason == "a force of 25 N, the limit is 20"
    robot, guard = guarded()
    robot.x = np.array([0.7, 0.0, 0.5])
    steps(robot, guard, 1)
    assert guard.reason == "x = 0.7 is outside the workspace, -0.6 to 0.6"
    robot, guard = guarded()
    robot.sick = "the emergency stop is pressed"
    steps(robot, guard, 1)
    assert guard.reason == robot.sick


def test_commands_at_twice_the_rate_are_not_twice_the_speed() -> None:
    robot, guard = guarded()
    guard.observe()
    assert guard.command((0.01, 0, 0)).action is not None
    robot.wait(robot.time + 0.2 / RATE)
    assert guard.command((0.01, 0, 0)).why == ("too early",)
    robot.wait(robot.time - 3600)  # a clock that was set back: the robot stands, and may start again
    assert guard.command((0.01, 0, 0)).action is not None


@settings(deadline=None, max_examples=60)
@given(
    lateness=st.lists(st.one_of(st.floats(0, 0.6), st.sampled_from([0.0, 1.6, 1.9, 2.1, 3.0])), min_size=5, max_size=40)
)
def test_a_loop_that_is_late_stays_within_the_limits(lateness: list[float]) -> None:
    """Ticks of the robot's rate, each late by so many periods: whoever gets no command for longer than a period and a
    half stands still and starts from there, and no stretch of time has more commands than the rate allows."""
    robot, guard = guarded()
    begin, moves = robot.time, []
    for tick, late in enumerate(lateness):
        robot.wait(max(robot.time, begin + (tick + late) / RATE))
        guard.observe()
        sent = guard.command((1.0, 0.0, 0.0))
        if sent.action is not None:
            assert sent.at == robot.time
            moves.append((sent.at, 0.5 * float(sent.action[0])))
    v = 0.0
    for number, (at, move) in enumerate(moves):
        waited = at - moves[number - 1][0] if number else math.inf
        before = 0.0 if waited > 1.5 / RATE else v
        v = move * RATE
        assert abs(v) <= LIMITS.speed[0] + 1e-5
        assert abs(v - before) * RATE <= LIMITS.acceleration[0] + 1e-3
        for end, _ in moves[number:]:
            count = sum(at <= other <= end for other, _ in moves)
            assert count <= (end - at) * RATE + 1.5 + 1e-6


def test_commands_at_almost_twice_the_rate_are_not_twice_the_speed() -> None:
    robot, guard = guarded()
    begin = robot.x[0]
    for _ in range(190):
        guard.observe()
        guard.command((0.002, 0.0, 0.0))
        robot.wait(robot.time + 1 / (1.9 * RATE))
    assert robot.x[0] - begin <= (10 * RATE + 2) * 0.5 * 0.002, "ten seconds have 100 commands, not 190"


def test_the_watchdog_stops_a_robot_that_gets_no_commands() -> None:
    robot = Points(GUARDED, realtime=True)
    guard = Guard(robot, GUARDED)
    guard.begin()
    try:
        time.sleep(0.4)
        assert guard.state == "go", "it waits for the first command: a plan may take its time"
        guard.command((0.0, 0.0, 0.0))
        until = time.monotonic() + 30
        while guard.state != "stopped" and time.monotonic() < until:
            time.sleep(0.01)
        assert robot.stopped
        assert "watchdog" in guard.reason
        assert guard.command((0.0, 0.0, 0.0)).action is None
    finally:
        guard.close()


@pytest.mark.parametrize("values", [{}, {"pose": None}])
def test_a_stop_while_the_robot_is_judged_stays_a_stop(values: dict[str, object]) -> None:
    """The watchdog is a thread of its own: it may stop between the look at the robot and what follows from it."""
    robot, guard = guarded()
    robot.values = values

    def health() -> Health:
        guard.stop("the loop hangs")
        return Health()

    robot.health = health  # type: ignore[method-assign]
    guard.observe()
    assert (guard.state, guard.reason) == ("stopped", "the loop hangs")


# ------------------------------------------------------------------ the file

FILES = {
    "position = [[0.2, 0.1], [0, 0.1], [0, 1]]": "contradicts itself",
    "speed = [0.1, 0.1]": "2 limits for commands of 3 numbers",
    "speed = [0.1, -0.1, 0.1]": "lets the robot not move",
    "speed = [9.0, 0.1, 0.1]": "above the robot's own 0.4",
    "position = [[-0.5, 0.6], [0, 0.1], [0, 1]]": "wider than the robot's own",
    "workspace = [[0.2, 0.5], [0, 0.1], [0, 1]]\nposition = [[-0.5, 0.1], [0, 0.1], [0, 1]]": "lies outside workspace",
    "force = 0.0": "newtons above 0",
    "force = 50.0": "above the robot's own 20",
    "speeed = [1]": "unknown key 'speeed'; there are position, speed",
    'force_sensor = "other"': "the robot's own is 'force'; leave the key out",
    "margin = -1.0": "out of range; use 0 to 0.25",
    "margin = 1.0": "margin = 1 is above its ceiling, 0.25: lower it",
    "hold_seconds = 10.0": "hold_seconds = 10 is above its ceiling, 1: lower it",
    "frozen = 1000": "frozen = 1000 is above its ceiling, 25: lower it",
    "watchdog = 10.0": "watchdog = 10 is above its ceiling, 0.5: lower it",
    "hold_seconds = 0.5": "hold_seconds = 0.5 is above the robot's own 0.3; lower it",
    "following = [0.5, 0.1, 0.1]": r"following\[0\] = 0.5 is above its ceiling, 0.4 \(1 s at full speed\): lower it",
    "following = [0.3, 0.1, 0.1]": r"following\[0\]: 0.3 is above the robot's own 0.16; lower it",
    "workspace = []": "fewer limits",
    "x = [": "cannot be read",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_contradicts_itself_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(PrismError, match=FILES[text]) as error:
        read_limits(file, GUARDED, 3)
    assert "\n" not in str(error.value)
    assert "limits.toml" in str(error.value)


def test_a_workspace_that_nobody_measures_is_refused() -> None:
    wide = dataclasses.replace(GUARDED, workspace=(*GUARDED.workspace, (0.0, 1.0)))
    with pytest.raises(PrismError, match="workspace has 4 ranges, and the pose that is measured 3 numbers"):
        Guard(Points(wide), wide)


def test_a_key_in_a_file_cannot_command_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text('{"\\u001b[31mred": 1}')
    with pytest.raises(PrismError, match=r"\\x1b\[31mred") as refused:
        read_limits(file, Limits(((-1.0, 1.0),), (1.0,), (2.0,)), 1)
    assert str(refused.value).isprintable()


def test_a_file_narrows_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text(json.dumps({"speed": [0.1, 0.1, 0.1], "force": 5}))
    found = read_limits(file, GUARDED, 3)
    assert found.speed == (0.1, 0.1, 0.1)
    assert found.force == 5
    assert found.position == GUARDED.position
    assert found.slowed(0.5).speed == (0.05, 0.05, 0.05)
    assert any("5 N" in line for line in found.describe(("x", "y", "z"), ("m", "m", "m")))


def test_a_bug_in_a_driver_stops_the_robot_first() -> None:
    """Any exception, not only ours: the loop ended without a stop, and its episode was lost."""
    for broken in ("send", "read"):
        robot, guard = guarded()
        steps(robot, guard, 2)
        setattr(robot, broken, lambda *_: 1 / 0)
        guard.observe()
        guard.command([0.01, 0.0, 0.0])
        assert robot.stopped
        assert guard.reason == "a bug in the driver, ZeroDivisionError: division by zero"


def test_a_pose_from_before_the_episode_is_not_believed() -> None:
    """The robot may still have moved then: its first command was limited from where it had been."""
    robot = Points(GUARDED)
    guard = Guard(robot, GUARDED)
    robot.offset = {"pose": -0.25}
    guard.begin()
    assert guard.state == "hold"
    robot.offset = {}
    steps(robot, guard, 1)
    assert guard.state == "go"


def test_a_force_that_overflows_is_too_much() -> None:
    robot, guard = guarded()
    robot.values = {"force": np.float32([3e38, 3e38, 0])}
    steps(robot, guard, 1)
    assert "limit is 20" in guard.reason
