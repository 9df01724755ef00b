"""LeRobot's robots as ours, against an arm that keeps the contract of lerobot.robots.Robot (0.6.1). `make lerobot` has
the same against LeRobot's own base class."""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prism_client import ActionKind, PolicyInfo
from prism_client.messages import ActionInfo

from prism import cli
from prism.cli.run import Run as RunCommand
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.robots.contract import Reading, Robot, make_robot
from prism.robots.drivers import lerobot_robot
from prism.robots.guard import Guard
from prism.robots.loop import Keys, check_fit
from prism.robots.program import announce
from prism.sensors import ActionSpec, SensorSpec

JOINTS = ("shoulder_pan.pos", "elbow_flex.pos", "gripper.pos")
FILE = """
rate = 30
units = { "*" = "deg", "gripper.pos" = "%" }

[lerobot]
type = "so101_follower"
port = "/dev/ttyACM0"

[limits]
position = [[-100, 100], [-100, 100], [0, 100]]
speed = [90, 90, 200]
"""


class Arm:
    """Ten abstract members and a servo that goes 60 units a second towards its goal."""

    name, speed = "so101_follower", 60.0

    def __init__(self) -> None:
        self.is_connected, self.is_calibrated, self.calls = False, True, 0
        self.threads: set[int] = set()
        self.fail: Exception | None = None
        self.most = 1e9  # max_relative_target
        self._at, self._goal, self._then = np.array([10.0, -20.0, 50.0]), np.array([10.0, -20.0, 50.0]), 0.0

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**dict.fromkeys(JOINTS, float), "top": (12, 16, 3), "top_depth": (12, 16, 1)}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(JOINTS, float)

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate, "it would ask questions"
        if self.fail:
            raise self.fail
        self.is_connected, self._then = True, time.monotonic()

    def calibrate(self) -> None: ...
    def configure(self) -> None: ...

    def _move(self) -> None:
        now = time.monotonic()
        way = np.clip(self._goal - self._at, -self.speed * (now - self._then), self.speed * (now - self._then))
        self._at, self._then = self._at + way, now

    def get_observation(self) -> dict[str, Any]:
        assert self.is_connected
        self.threads.add(threading.get_ident())
        self.calls += 1
        if self.fail:
            raise self.fail
        self._move()
        picture = np.full((12, 16, 3), self.calls % 256, np.uint8)
        depth = np.full((12, 16, 1), 1500, np.uint16)
        return {**dict(zip(JOINTS, map(float, self._at), strict=True)), "top": picture, "top_depth": depth}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        assert self.is_connected
        assert tuple(action) == JOINTS
        self.threads.add(threading.get_ident())
        self._move()
        asked = np.array(list(action.values()))
        self._goal = np.clip(asked, self._at - self.most, self._at + self.most)
        return dict(zip(JOINTS, map(float, self._goal), strict=True))

    def disconnect(self) -> None:
        assert self.is_connected
        self.is_connected = False


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Arm:
    made = Arm()
    monkeypatch.setattr(lerobot_robot, "make_device", lambda table: made)
    return made


@pytest.fixture
def robot(arm: Arm, tmp_path: Path) -> Iterator[Robot]:
    file = tmp_path / "so101.toml"
    file.write_text(FILE)
    found = make_robot(str(file))
    found.connect()
    yield found
    found.close()
    assert not arm.is_connected


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def state(robot: Robot) -> np.ndarray:
    return robot.read()["state"].value


def test_it_says_what_it_is(robot: Robot) -> None:
    assert (robot.name, robot.rate, robot.realtime, robot.is_twin) == ("so101_follower", 30.0, True, False)
    assert robot.actions.spec == ActionSpec(
        JOINTS, robot="so101_follower", kind=ActionKind.ABSOLUTE, units=("deg", "deg", "%")
    )
    assert (robot.actions.pose, robot.actions.pose_dims) == ("state", 3)
    kinds = {spec.name: (spec.kind, spec.shape) for spec in robot.sensors}
    assert kinds == {"state": ("vector", (3,)), "top": ("rgb", (12, 16, 3)), "top_depth": ("depth", (12, 16))}
    assert robot.sensors[0].names == JOINTS
    readings = robot.read()
    assert readings["state"].value == pytest.approx([10, -20, 50])
    assert readings["top_depth"].value.max() == pytest.approx(1.5)  # metres
    for spec in robot.sensors:
        assert readings[spec.name].value.shape == spec.shape
        assert readings[spec.name].value.dtype == spec.dtype


def test_readings_are_new_stamped_and_the_callers(robot: Robot, arm: Arm) -> None:
    stamps, first = [], robot.read()
    kept = first["top"].value.copy()
    for _ in range(20):
        calls = arm.calls
        until(lambda calls=calls: arm.calls > calls + 1)  # type: ignore[misc]
        stamps.append(robot.read()["state"].stamp)
    assert all(a < b for a, b in itertools.pairwise(stamps))
    assert stamps[-1] <= robot.now()
    assert np.array_equal(first["top"].value, kept)


def test_it_goes_where_it_is_sent_within_its_limits(robot: Robot, arm: Arm) -> None:
    with pytest.raises(PrismError, match=r"it takes no commands: connect\(\), then prepare"):
        robot.send(np.zeros(3, np.float32))
    robot.prepare(0)
    robot.send(np.array([12.0, -21.0, 500.0], np.float32))
    until(lambda: bool(np.allclose(state(robot), [12, -21, 100], atol=0.1)))
    for bad in ([0.0], [np.nan, 0, 0]):
        with pytest.raises(PrismError, match="3 finite numbers"):
            robot.send(np.array(bad, np.float32))
    assert len(arm.threads) <= 2  # connect's first look, and the one that talks


def test_stop_stands_still_where_it_is(robot: Robot) -> None:
    robot.prepare(0)
    robot.send(np.array([100.0, -20.0, 50.0], np.float32))
    until(lambda: state(robot)[0] > 12)
    robot.stop()
    with pytest.raises(PrismError, match="takes no commands"):
        robot.send(np.zeros(3, np.float32))
    time.sleep(0.3)
    there = state(robot)
    time.sleep(0.3)
    assert there[0] < 90
    assert state(robot) == pytest.approx(there)
    robot.prepare(1)
    robot.send(there)


def test_a_stop_keeps_hold(robot: Robot, arm: Arm) -> None:
    """The gripper's goal is beyond where its fingers are stopped by what they squeeze."""
    robot.prepare(0)
    robot.stop()
    until(lambda: not robot._stopping)  # type: ignore[attr-defined]
    time.sleep(0.1)
    assert arm._goal[2] == pytest.approx(50), "nothing was sent: where it is"
    robot.prepare(1)
    robot.send(np.array([100.0, -20.0, 0.0], np.float32))
    until(lambda: state(robot)[0] > 12)
    robot.stop()
    until(lambda: arm._goal[0] < 90)
    assert arm._goal[2] == 0


def test_stop_does_not_send_it_back_to_where_it_was_seen_long_ago(robot: Robot, arm: Arm) -> None:
    robot.prepare(0)
    arm.fail = ConnectionError("Incorrect status packet!")  # it hears, and does not answer
    until(lambda: not robot.health().ok)
    time.sleep(0.2)
    robot.send(np.array([15.0, -20.0, 50.0], np.float32))
    until(lambda: arm._goal[0] == 15)
    robot.stop()
    until(lambda: not robot._stopping)  # type: ignore[attr-defined]
    time.sleep(0.1)
    assert arm._goal.tolist() == [15, -20, 50]


@pytest.mark.parametrize("closing", [False, True])
def test_a_stop_that_does_not_get_through_is_sent_again(robot: Robot, arm: Arm, closing: bool) -> None:
    robot.prepare(0)
    robot.send(np.array([90.0, -20.0, 50.0], np.float32))
    until(lambda: arm._goal[0] == 90)
    send, failures = arm.send_action, iter(range(3))

    def busy(action: dict[str, float]) -> dict[str, float]:
        if next(failures, None) is not None:
            raise ConnectionError("There is no status packet!")
        return send(action)

    arm.send_action = busy  # type: ignore[method-assign]
    robot.close() if closing else robot.stop()
    until(lambda: bool(arm._goal[0] < 90))


def test_a_bus_that_fails_is_unhealthy_until_it_answers_again(robot: Robot, arm: Arm) -> None:
    robot.prepare(0)
    assert robot.health().ok
    arm.fail = ConnectionError("Incorrect status packet!")
    until(lambda: not robot.health().ok)
    assert robot.health().reason == "Incorrect status packet!"
    arm.fail = None
    until(lambda: robot.health().ok)
    robot.close()
    assert robot.health().reason == "not connected"
    robot.connect()
    assert robot.health().ok


def test_what_lerobot_clips_is_said(robot: Robot, arm: Arm, caplog: pytest.LogCaptureFixture) -> None:
    arm.most = 5.0
    robot.prepare(0)
    for _ in range(3):
        robot.send(np.array([90.0, -20.0, 50.0], np.float32))
        time.sleep(0.1)
    until(lambda: bool(caplog.messages))
    assert caplog.messages == ["so101_follower: LeRobot changes commands of shoulder_pan.pos by limits of its own"]


def test_the_guard_stops_it_when_a_camera_is_lost(robot: Robot, arm: Arm) -> None:
    guard = Guard(robot, robot.limits, ["top"])
    guard.begin(0)
    original = arm.get_observation
    arm.get_observation = lambda: {k: v for k, v in original().items() if k != "top"}  # type: ignore[method-assign]
    end = time.monotonic() + 20
    while guard.state != "stopped" and time.monotonic() < end:
        guard.observe()
        guard.command(state(robot))
        time.sleep(1 / 30)
    assert "top" in guard.reason
    guard.close()


class Kiwi(Arm):
    """An arm of one joint on wheels, with a vector of its own and a key that nobody asked for."""

    name = "lekiwi"

    @property
    def observation_features(self) -> dict[str, Any]:
        return {"arm.pos": float, "x.vel": float, "imu": (6,), "map": (4, 4, 4, 2)}

    @property
    def action_features(self) -> dict[str, Any]:
        return {"arm.pos": float, "x.vel": float}


def test_wheels_are_velocities() -> None:
    limits = {"position": [[-90, 90], [-9, 9]], "speed": [60, 0.3]}
    robot = lerobot_robot.LeRobotRobot(Kiwi(), 30.0, {"arm.pos": "deg", "x.vel": "m"}, limits, ignore=("map",))
    assert robot.actions.kinds == ("absolute", "velocity")
    assert robot.actions.units == ("deg", "m/s")
    assert robot.actions.pose_dims == 1
    assert {spec.name: spec.kind for spec in robot.sensors} == {"state": "vector", "imu": "vector"}
    robot._last = np.array([5.0, 0.2], np.float32)
    still = robot._still()
    assert still is not None
    assert still.tolist() == [5.0, 0.0]
    with pytest.raises(PrismError, match=r"observation 'map' has shape .* ignore = \['map'\]"):
        lerobot_robot.LeRobotRobot(Kiwi(), 30.0, {"*": "deg"}, limits)


def test_a_hold_of_prism_run_stops_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"position": [[-90, 90], [-9, 9]], "speed": [60, 0.3]}
    robot = lerobot_robot.LeRobotRobot(Kiwi(), 30.0, {"arm.pos": "deg", "x.vel": "m"}, limits, ignore=("map",))
    info = PolicyInfo(2, ActionInfo(kind=ActionKind.ABSOLUTE))
    planner: Any = SimpleNamespace(info=info, trouble=lambda: "", submit=lambda step: None)
    monkeypatch.setattr(RunCommand, "_planner", lambda command, robot: nullcontext(planner))
    with ExitStack() as stack:
        run = RunCommand(Path("run"), robot="so101.toml")
        commander, _ = run._commander(robot, robot.limits, Keys(), stack)
    commander.executor._commanded = np.array([5.0, 0.2], np.float32)
    assert commander.executor._held().tolist() == [5.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rate = 30", ""), "rate is missing: commands a second"),
        (('units = { "*" = "deg", "gripper.pos" = "%" }', ""), "units is missing: LeRobot does not say them"),
        (('"*" = "deg", ', ""), r"units: none of 'shoulder_pan\.pos'"),
        (('type = "so101_follower"', ""), r"\[lerobot\] type is missing"),
        (("speed = [90, 90, 200]", ""), r"limits\.speed is missing.*one each of shoulder_pan\.pos, elbow_flex\.pos"),
        (("speed = [90, 90, 200]", "speed = [90]"), "speed: 1 limits for commands of 3 numbers"),
        (("rate = 30", "rate = 30\nratio = 2"), "unknown key 'ratio'"),
    ],
)
def test_a_wrong_file_is_one_line(arm: Arm, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = tmp_path / "so101.toml"
    file.write_text(FILE.replace(*change))
    with pytest.raises(PrismError, match=rf"so101\.toml: .*{message}"):
        make_robot(str(file))


def test_what_cannot_be_reached_is_one_line(arm: Arm, tmp_path: Path) -> None:
    file = tmp_path / "so101.toml"
    file.write_text(FILE)
    robot = make_robot(str(file))
    arm.fail = OSError("could not open port /dev/ttyACM0")
    with pytest.raises(PrismError, match="could not open port /dev/ttyACM0; is it on, is the cable in"):
        robot.connect()
    arm.fail, arm.is_calibrated = None, False
    with pytest.raises(PrismError, match="not calibrated; run lerobot-calibrate"):
        robot.connect()
    assert not arm.is_connected


def test_an_action_that_nobody_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arm, "action_features", {"wrist.torque": float})
    with pytest.raises(PrismError, match=r"'wrist\.torque' ends in neither \.pos nor \.vel"):
        lerobot_robot.LeRobotRobot(Arm(), 30.0, {"*": "deg"}, {})


def test_without_lerobot(tmp_path: Path) -> None:
    if importlib.util.find_spec("lerobot") is not None:
        pytest.skip("it is installed")
    file = tmp_path / "so101.toml"
    file.write_text(FILE)
    with pytest.raises(PrismError, match=r"lerobot: cannot be imported here .*pip install lerobot==0\.6\.1"):
        make_robot(str(file))


def test_a_policy_of_its_data_fits_it(
    robot: Robot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """prism train on what lerobot-record would have recorded; what `prism run` checks and prints before it moves."""
    monkeypatch.chdir(tmp_path)
    sensors = (SensorSpec("state", "vector", (3,), names=JOINTS), SensorSpec("top", "rgb", (24, 32, 3)))
    rng, spec = np.random.default_rng(0), ActionSpec(JOINTS, robot="so101_follower", kind="absolute")
    with DatasetWriter(Path("data"), sensors, 3, 30.0, "reach", action=spec) as writer:
        for _ in range(2):
            states = (np.array([10, -20, 50]) + np.cumsum(rng.normal(size=(30, 3)), 0)).astype(np.float32)
            writer.add({"state": states, "top": rng.integers(0, 256, (30, 24, 32, 3), dtype=np.uint8)}, states)
    assert cli.main(["train", "data", "--steps", "2", "--out", "run", "--set", "train.val_fraction=0"]) == 0
    info = Run("run").controller().planner.info
    with pytest.raises(PrismError, match="pass --resize"):
        check_fit(robot, info)
    assert list(check_fit(robot, info, resize=True)) == ["top"]
    with pytest.raises(PrismError, match=r"the policy's actions are .*, the robot's shoulder_pan"):
        check_fit(robot, replace(info, action=replace(info.action, names=("a", "b", "c"))))
    announce(robot, robot.limits, "")
    said = capfd.readouterr().out
    assert "so101_follower: 30 commands a second (absolute); limits, always on:" in said
    assert "gripper.pos: 0 to 100 %, 200 %/s" in said


def test_a_stop_gets_through_where_the_pose_is_not_a_number() -> None:
    """It was refused at the last look, again and again: the arm went on to where it had been sent."""
    limits = {"position": [[-90, 90], [-9, 9]], "speed": [60, 0.3]}
    robot = lerobot_robot.LeRobotRobot(Kiwi(), 30.0, {"arm.pos": "deg", "x.vel": "m"}, limits, ignore=("map",))
    robot._last = np.array([5.0, 0.2], np.float32)
    nothing = np.full(len(robot._numbers), np.nan, np.float32)
    robot._latest = {lerobot_robot.STATE: Reading(nothing, robot.now())}
    still = robot._still()
    assert still is not None
    assert still.tolist() == [5.0, 0.0]


def test_arms_within_a_robot_have_addresses_and_write_when_they_connect() -> None:
    table = {"type": "bi_so", "left": {"port": "one"}, "right": {"port": "two"}, "cameras": {"top": {"ip": "three"}}}
    assert sorted(lerobot_robot._addresses(table)) == ["lerobot:one", "lerobot:two"]
    arm = Arm()
    vars(arm)["left"] = Arm()
    limits = {"position": [[-90, 90]] * 3, "speed": [60] * 3}
    robot = lerobot_robot.LeRobotRobot(arm, 30.0, {"*": "deg"}, limits)
    with pytest.raises(PrismError, match="its driver has no way to read without writing"):
        Guard(robot, robot.limits, dry=True)
