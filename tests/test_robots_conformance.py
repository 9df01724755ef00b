"""What prism/robots/contract.py promises, of every robot: `robot` lists them. A driver of yours passes the
same tests when it is added there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from prism.errors import PrismError
from prism.robots.contract import ROBOTS, STOP_SECONDS, Reading, Robot, make_robot
from tests.fakes.driven import DRIVEN, REAL_CLOCK

pytest.importorskip("mujoco")
pytestmark = REAL_CLOCK
FAST = ("realtime=false",)
ALL: dict[str, tuple[str, ...]] = {
    "ur5e-twin": FAST,
    "ur5e-twin rate=10": (*FAST, "rate=10"),
    "ur5e-twin task=tabletop-rattle": (*FAST, "task=tabletop-rattle"),
    "ur5e-twin realtime": ("realtime=true",),
    "go2-twin": FAST,
    "go2-twin task=go2-pick": (*FAST, "task=go2-pick"),
}


def make(name: str) -> Robot:
    return make_robot(name.partition(" ")[0], ALL[name])


@pytest.fixture(params=[*ALL, *DRIVEN])
def robot(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Robot]:
    with ExitStack() as stack:
        driven = DRIVEN.get(request.param)
        found = stack.enter_context(driven(tmp_path, monkeypatch)) if driven else make(request.param)
        stack.callback(found.close)
        found.connect()
        found.prepare(3)
        yield found


def still(robot: Robot) -> np.ndarray:
    """A command that leaves the robot where it is."""
    action = np.zeros(robot.actions.dim, np.float32)
    if robot.actions.spec.kind == "absolute":
        assert robot.actions.pose is not None
        dims = robot.actions.pose_dims
        action[:dims] = robot.read()[robot.actions.pose].value[:dims]
    return action


def moving(robot: Robot) -> np.ndarray:
    action = still(robot)
    action[robot.actions.base[0] if robot.actions.base else 0] = 0.5
    return action


def drive(robot: Robot, seconds: float, command: Callable[[Robot], np.ndarray]) -> list[dict[str, Reading]]:
    """Commands at the robot's rate, readings at that of its fastest sensor."""
    fastest = max(spec.fps or robot.rate for spec in robot.sensors)
    every = round(fastest / robot.rate)
    start, seen = robot.now(), []
    for tick in range(round(seconds * fastest)):
        robot.wait(start + tick / fastest)
        seen.append(robot.read())
        if tick % every == 0:
            robot.send(command(robot))
    return seen


def test_readings_are_as_their_specs_say(robot: Robot) -> None:
    readings = robot.read()
    assert set(readings) == {spec.name for spec in robot.sensors}
    for spec in robot.sensors:
        value = readings[spec.name].value
        assert value.shape == spec.shape
        assert value.dtype == spec.dtype


def test_stamps_advance_and_never_go_back(robot: Robot) -> None:
    seen = drive(robot, 1.0, still)
    for spec in robot.sensors:
        stamps = [readings[spec.name].stamp for readings in seen]
        assert all(a <= b for a, b in itertools.pairwise(stamps))
        assert stamps[-1] > stamps[0]
        assert stamps[-1] <= robot.now() + 1e-9


def test_sensors_keep_their_own_rates(robot: Robot) -> None:
    if robot.realtime:
        pytest.skip("how many readings come in a second of a busy computer is no test")
    seen = drive(robot, 2.0, still)
    for spec in robot.sensors:
        stamps = np.unique([readings[spec.name].stamp for readings in seen])
        assert np.allclose(np.diff(stamps), robot.period(spec))
        assert math.isclose(len(stamps), 2.0 / robot.period(spec), abs_tol=2)


def test_readings_are_the_callers_to_keep(robot: Robot) -> None:
    first = robot.read()
    kept = {name: reading.value.copy() for name, reading in first.items()}
    drive(robot, 0.5, moving)
    for name, reading in first.items():
        assert np.array_equal(reading.value, kept[name])


def test_its_limits_fit_its_commands(robot: Robot) -> None:
    robot.limits.check(robot.actions.dim)
    names = {spec.name for spec in robot.sensors}
    assert {name for name in (robot.actions.pose, robot.limits.force_sensor) if name} <= names
    assert len(robot.actions.kinds) == robot.actions.dim
    assert robot.actions.spec.robot


def test_wild_commands_do_not_move_it_out_of_its_limits(robot: Robot) -> None:
    seen = drive(robot, 1.0, lambda robot: np.full(robot.actions.dim, 1e6, np.float32))
    pose = robot.actions.pose
    if pose is None:
        pytest.skip("it does not measure where it is")
    for readings in seen:
        for value, (low, high) in zip(readings[pose].value, robot.limits.workspace, strict=False):
            assert low <= value <= high


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_what_is_no_command_is_refused(robot: Robot, bad: float) -> None:
    with pytest.raises(PrismError):
        robot.send(np.full(robot.actions.dim if bad else 1, bad, np.float32))


def stands(robot: Robot) -> bool:
    """For half a second, and goes on telling where it is."""
    first = robot.read()
    robot.wait(robot.now() + 0.5)
    later, pose, dims = robot.read(), str(robot.actions.pose), robot.actions.pose_dims
    still = np.allclose(first[pose].value[:dims], later[pose].value[:dims], atol=2e-3)
    return bool(still and later[pose].stamp > first[pose].stamp)


def test_it_stands_still_after_a_stop(robot: Robot) -> None:
    drive(robot, 0.5, moving)
    robot.stop()
    with pytest.raises(PrismError):
        robot.send(still(robot))
    robot.wait(robot.now() + STOP_SECONDS)
    if robot.actions.pose is not None:  # a busy computer may give a stand-in in real time no time to stop: not yet
        assert any(stands(robot) for _ in range(20 if robot.realtime else 1))
    robot.prepare(3)
    robot.send(still(robot))


def test_it_connects_again(robot: Robot) -> None:
    before = robot.now()
    robot.close()
    robot.close()
    assert not robot.health().ok
    with pytest.raises(PrismError):
        robot.send(still(robot))
    robot.connect()
    robot.prepare(3)
    assert robot.health().ok
    assert min(reading.stamp for reading in robot.read().values()) >= before - 1e-9
    drive(robot, 0.3, still)


@pytest.mark.parametrize("name", [name for name, options in ALL.items() if "realtime=false" in options])
def test_a_twin_repeats_itself(name: str) -> None:
    rng, shape = np.random.default_rng(0), make(name)
    commands = rng.uniform(-1, 1, (round(shape.rate), shape.actions.dim)).astype(np.float32)

    def play(robot: Robot) -> list[dict[str, Reading]]:
        robot.prepare(5)
        left = iter(commands)
        return drive(robot, 1.0, lambda _: next(left))

    one, two = make(name), make(name)
    assert one.is_twin
    for robot in (one, two):
        robot.connect()
    two.prepare(9)
    drive(two, 0.5, moving)  # whatever was played before
    for a, b in zip(play(one), play(two), strict=True):
        assert all(np.array_equal(a[key].value, b[key].value) for key in a)


@pytest.mark.parametrize(("name", "task"), [("ur5e-twin rate=10", "tabletop-insert-left"), ("go2-twin", "go2-insert")])
def test_the_twin_is_the_task(name: str, task: str) -> None:
    """The same commands lead to the same observations as in the simulated task, so both count the same successes."""
    from prism.sims.task_table import make_env

    robot, env = make(name), make_env(task)
    robot.connect()
    robot.prepare(7)
    observation = env.reset(7)
    script, start = robot.script(7), robot.now()
    for tick in range(1, env.max_steps + 1):
        action = script()
        robot.send(action)
        robot.wait(start + tick / robot.rate)
        result = env.step(action)
        readings = robot.read()
        assert all(np.array_equal(result.observation[name], readings[name].value) for name in observation)
        assert robot.success() == result.success
        if result.done:
            break
    assert robot.success()


def test_unknown_robots_and_options_are_one_line() -> None:
    assert "ur5e-twin" in ROBOTS
    with pytest.raises(PrismError, match=r"unknown robot 'ur5-twin': did you mean ur5e-twin"):
        make_robot("ur5-twin")
    with pytest.raises(PrismError, match="robot 'ur5e-twin' has task, realtime, rate"):
        make_robot("ur5e-twin", ["speed=3"])
    with pytest.raises(PrismError, match="neither 10 nor 50"):
        make_robot("ur5e-twin", ["rate=30"])
    with pytest.raises(PrismError, match="no scene 'tabletop-x'"):
        make_robot("ur5e-twin", ["task=tabletop-x"])
