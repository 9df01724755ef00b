"""What drivers let through to a device: nothing in a dry run, no NaN, nothing beyond the limits, one program."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prism.errors import PrismError
from prism.robots import claim
from prism.robots.contract import Robot, make_robot
from prism.robots.drivers import lerobot_robot
from prism.robots.guard import Guard
from prism.robots.teleop import Leader
from tests.fakes.driven import CELL, GO2, REAL_CLOCK, ROS, loopback, vendors, written
from tests.fakes.robotiq import Gripper
from tests.fakes.rosbridge import RosBridge
from tests.fakes.unitree import DOMAIN, go2_with_d1
from tests.fakes.ur_controller import Controller
from tests.test_robots_lerobot import FILE as LEROBOT
from tests.test_robots_lerobot import Arm

pytestmark = REAL_CLOCK

# ------------------------------------------------------------------ robots, and what reached their devices

Case = tuple[Robot, Callable[[], list[Any]]]


@contextmanager
def ur_case(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Case]:
    pytest.importorskip("rtde_control")
    vendors(patch)
    controller = Controller(loopback())
    gripper = Gripper(controller.host)
    try:
        robot = make_robot(str(written(folder, CELL.format(host=controller.host))))
        yield robot, lambda: [*controller.events, *(line for line in gripper.said if line.startswith("SET"))]
    finally:
        gripper.close()
        controller.close()


@contextmanager
def go2_case(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Case]:
    pytest.importorskip("unitree_sdk2py")
    fake = go2_with_d1()
    before = len(fake.calls)
    yield make_robot(str(written(folder, GO2.format(domain=DOMAIN)))), lambda: fake.calls[before:]


@contextmanager
def ros_case(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Case]:
    bridge = RosBridge()
    try:
        yield make_robot(str(written(folder, ROS.format(url=bridge.url)))), lambda: bridge.written
    finally:
        bridge.close()


class WrittenArm(Arm):
    """Keeps what is written to its motors."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.config = SimpleNamespace(disable_torque_on_disconnect=True)

    def connect(self, calibrate: bool = True) -> None:
        super().connect(calibrate)
        self.configure()  # as LeRobot's own do

    def configure(self) -> None:
        self.written.append("settings and torque")

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.written.append(dict(action))
        return super().send_action(action)

    def disconnect(self) -> None:
        if self.config.disable_torque_on_disconnect:
            self.written.append("torque off")
        super().disconnect()


@contextmanager
def lerobot_case(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Case]:
    arm = WrittenArm()
    patch.setattr(lerobot_robot, "make_device", lambda table: arm)
    yield make_robot(str(written(folder, LEROBOT))), lambda: arm.written


CASES = {"ur cell": ur_case, "go2 d1": go2_case, "ros": ros_case, "lerobot": lerobot_case}


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_writes_nothing_to_any_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        robot, written_to_device = stack.enter_context(CASES[name](tmp_path, monkeypatch))
        guard = Guard(robot, robot.limits, dry=True)
        stack.callback(guard.close)
        robot.connect()
        for seed in range(2):
            guard.begin(seed)
            for _ in range(5):
                seen = guard.observe()
                sent = guard.command(np.full(robot.actions.dim, 1e-3))
                assert sent.action is not None, sent.why
                robot.wait(robot.now() + 1.0 / robot.rate)
            assert robot.actions.pose in seen.observation, "it reads"
            guard.stop("the episode is over")
        guard.close()
        time.sleep(0.2)
        assert written_to_device() == []


# ------------------------------------------------------------------ numbers


def numbers_of(written: list[Any]) -> np.ndarray:
    """Every number that was written, of whatever driver."""
    found: list[float] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for one in value.values():
                collect(one)
        elif isinstance(value, list | tuple | np.ndarray):
            for one in value:
                collect(one)
        elif value is None or isinstance(value, int | float | np.floating):
            found.append(math.nan if value is None else float(value))

    collect(written)
    return np.array(found)


@pytest.mark.parametrize("when", ["at prepare", "while it moves", "at connect"])
def test_a_joint_that_is_null_does_not_reach_the_wire(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = RosBridge()
    robot = make_robot(str(written(tmp_path, ROS.format(url=bridge.url))))
    guard = Guard(robot, robot.limits)

    def null(joints: np.ndarray) -> list[Any]:
        return [9.0, None, joints[0]]

    try:
        if when == "at connect":
            bridge.position = null
            with pytest.raises(PrismError, match="joint 'b' is not a number"):
                robot.connect()
            return
        robot.connect()
        if when == "at prepare":
            bridge.position = null
            time.sleep(0.2)
            with pytest.raises(PrismError, match="joint 'b' is not a number"):
                guard.begin()
        else:
            guard.begin()
            for tick in range(30):
                bridge.position = null if tick > 5 else bridge.position
                guard.observe()
                guard.command([0.004, 0.004])
                robot.wait(robot.now() + 1.0 / robot.rate)
            assert guard.state == "stopped"
        time.sleep(0.2)
    finally:
        guard.close()
        sent = numbers_of([data for _, data in bridge.commands])
        bridge.close()
    assert np.isfinite(sent).all(), f"{np.isnan(sent).sum()} of {len(sent)} numbers are NaN"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e3])
@pytest.mark.parametrize("name", CASES)
def test_a_driver_looks_once_more_before_the_wire(
    name: str, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug behind the guard: the target is not a number, or far beyond the limits. The device does not hear of it."""
    with ExitStack() as stack:
        robot, written_to_device = stack.enter_context(CASES[name](tmp_path, monkeypatch))
        stack.callback(robot.close)
        robot.connect()
        robot.prepare(0)
        time.sleep(0.3)
        start = robot.read()[str(robot.actions.pose)].value[:3].astype(np.float64)
        before, target = len(written_to_device()), np.full(robot.actions.dim, bad)
        if name == "lerobot":
            wrong = {**vars(np), "clip": lambda *_: target.astype(np.float32)}
            monkeypatch.setattr(lerobot_robot, "np", SimpleNamespace(**wrong))
        else:
            monkeypatch.setattr(type(robot), "_aim", lambda *_: target)
        refused = False
        for _ in range(20):
            try:
                robot.send(np.zeros(robot.actions.dim, np.float32))
            except PrismError:
                refused = True
            time.sleep(0.05)
            refused |= not robot.health().ok
        assert refused, "the guard stops for either"
        monkeypatch.undo()
        robot.stop()
        after = written_to_device()[before:]
        if name == "ur cell":
            after = [[*one[2][:6]] for one in after if one[1] == "servol"] + [one for one in after if len(one) != 3]
        assert np.isfinite(numbers_of(after)).all()
        end = robot.read()[str(robot.actions.pose)].value[:3]
        assert np.abs(end - start).max() < 0.02 * (1 if name != "lerobot" else 100)


# ------------------------------------------------------------------ one program a robot


@pytest.mark.parametrize("name", CASES)
def test_a_second_program_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        robot, _ = stack.enter_context(CASES[name](tmp_path, monkeypatch))
        other = make_robot(str(tmp_path / "robot.toml"))
        stack.callback(robot.close)
        stack.callback(other.close)
        robot.connect()
        with pytest.raises(PrismError, match=f"another program on this machine drives it \\(process {os.getpid()}\\)"):
            other.connect()
        reader = make_robot(str(tmp_path / "robot.toml"))
        if name == "ros":  # what reads does not disturb
            dry = Guard(reader, reader.limits, dry=True)
            reader.connect()
            dry.close()
        robot.close()
        if name != "go2 d1":  # unitree_sdk2py has one connection a process
            other.connect()


def test_the_claim_of_a_killed_program_is_gone(tmp_path: Path) -> None:
    bridge = RosBridge()
    file = written(tmp_path, ROS.format(url=bridge.url))
    code = (
        "import sys, time; from pathlib import Path; from prism.robots import claim; claim.FOLDER = Path(sys.argv[2]); "
        "from prism.robots.contract import make_robot; robot = make_robot(sys.argv[1]); "
        "robot.connect(); print('drives', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(file), str(claim.FOLDER)], stdout=subprocess.PIPE, text=True
    )
    robot = make_robot(str(file))
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "drives\n"
        with pytest.raises(PrismError, match=f"process {other.pid}"):
            robot.connect()
        other.kill()
        other.wait()
        robot.connect()
        robot.prepare(0)
    finally:
        other.kill()
        other.wait()
        if other.stdout is not None:
            other.stdout.close()
        robot.close()
        bridge.close()


# ------------------------------------------------------------------ time stamps


def test_a_backlog_of_ros_messages_does_not_look_fresh(tmp_path: Path) -> None:
    """The bridge is two seconds behind: what it sends is that old, whenever it arrives."""
    bridge = RosBridge()
    robot = make_robot(str(written(tmp_path, ROS.format(url=bridge.url))))
    try:
        robot.connect()
        time.sleep(0.5)
        fresh = robot.now() - robot.read()["proprio"].stamp
        assert fresh < 1.0, "its clock is decades ahead of this computer's"
        bridge.backlog = 2.0
        time.sleep(0.5)
        assert robot.now() - robot.read()["proprio"].stamp > 0.4
        assert robot.now() - robot.read()["force"].stamp > 0.4
        bridge.backlog = 0.0
        time.sleep(0.3)
        assert robot.now() - robot.read()["proprio"].stamp < 1.0
    finally:
        robot.close()
        bridge.close()


def test_a_leader_is_only_read(tmp_path: Path) -> None:
    """It is led by hand; its driver held it, in a dry run too."""
    bridge = RosBridge()
    text = ROS.format(url=bridge.url)
    (tmp_path / "led").mkdir()
    robot, leader = make_robot(str(written(tmp_path, text))), make_robot(str(written(tmp_path / "led", text)))
    teleop = Leader(robot, leader)
    try:
        time.sleep(0.2)
    finally:
        teleop.close()
        time.sleep(0.2)
        bridge.close()
    assert bridge.written == []
