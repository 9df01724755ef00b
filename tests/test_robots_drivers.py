"""Robots of a file (prism/robots/drivers): the file itself, and a UR through the real ur_rtde client.

Every driven robot also passes test_robots_conformance.py. The other drivers: test_robots_drivers_sensors.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from prism.cli import main
from prism.data import open_dataset
from prism.errors import PrismError
from prism.robots.contract import Robot, make_robot
from prism.robots.drivers.composed import DrivenRobot
from prism.robots.drivers.parts import Axis, Part
from prism.robots.drivers.rotation import from_reference, to_reference
from prism.robots.drivers.talker import Talker
from prism.robots.drivers.waypoints import Follower, Interpolator
from prism.robots.guard import Guard, Seen
from prism.robots.limits import Limits
from prism.robots.loop import Keys, drive
from prism.robots.recording import Recording, Trace
from tests.fakes.driven import REAL_CLOCK, UR, loopback, written
from tests.fakes.ur_controller import Controller

pytestmark = REAL_CLOCK

ROOT = Path(__file__).resolve().parent.parent


def until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Generous: only something that never comes takes long."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('driver = "ur"', 'driver = "ur6"', "arm.driver = 'ur6' is unknown; there are ur"),
        ('driver = "ur"', "", "arm: driver is missing"),
        ("host =", "hots =", "arm: unknown key 'hots'; did you mean host?"),
        ('host = "', 'frequency = 1000.0\nhost = "', "arm.frequency = 1000 is out of range; use 10 to 500"),
        ('host = "', 'control = "tool"\nhost = "', "arm.control = 'tool' is unknown: use one of pose, joints"),
        ("rate = 20", 'rate = "fast"', "rate = 'fast': a float is needed"),
        ("rate = 20", "", "name and rate are needed"),
        ("rate = 20", "rate = inf", "inf commands a second are not a multiple"),
        ("rate = 20", "rate = 20\nfps = nan", "20 commands a second are not a multiple of nan steps"),
        ("rate = 20", "rate = 20\nepisode_seconds = -1.0", "episode_seconds = -1: use a number above 0"),
        ('kind = "delta"', 'kind = "relative"', "kind = 'relative'"),
        ("speed = [0.05,", "speed = [0.05, 0.05,", "speed: 7 limits for commands of 6 numbers"),
        ("speed =", "velocity =", "velocity"),
        ("[0.3, 0.7]", "[0.7, 0.3]", "contradicts itself; the lower limit comes first"),
        ("[0.3, 0.7]", "[-0.7, -0.3]", "lies outside workspace"),
        ('force_sensor = "force"', 'force_sensor = "wrist"', "limits.force_sensor = 'wrist': there are only proprio"),
        ("[arm]", "[leg]", "unknown key 'leg'"),
        ('name = "ur5e"', "name = ur5e", "cannot be read as toml"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in UR
    file = written(tmp_path, UR.replace(old, new, 1))
    with pytest.raises(PrismError, match="toml") as caught:
        make_robot(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_must_be_in_the_file(tmp_path: Path) -> None:
    lines = [line for line in UR.splitlines() if not line.startswith(("speed", "workspace"))]
    with pytest.raises(PrismError, match=r"limits.speed is missing.*one each of x, y, z, rx, ry, rz"):
        make_robot(str(written(tmp_path, "\n".join(lines))))


def test_a_file_that_is_not_there_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match=r"nowhere.toml: not found"):
        make_robot(str(tmp_path / "nowhere.toml"))
    with pytest.raises(PrismError, match="--option host=1: a robot described by a file takes no options"):
        make_robot("my.toml", ["host=1"])


def test_the_files_of_the_documentation_are_files(tmp_path: Path) -> None:
    page = ROOT / "docs" / "howto" / "robots.md"
    files = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    ours = [text for text in files if "[lerobot]" not in text]  # that one needs LeRobot's environment
    robots = [make_robot(str(written(tmp_path, text))) for text in ours]
    assert [robot.name for robot in robots] == ["ur5e", "go2-d1", "my-arm"]
    with pytest.raises(PrismError, match=r"unknown robot 'ur5e': .* \(a real robot is a file, as my_robot.toml"):
        make_robot("ur5e")


def test_a_missing_package_and_a_wrong_address_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = make_robot(str(written(tmp_path, UR.format(host=loopback()))))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rtde_control", None)
        with pytest.raises(PrismError, match=r"driver ur needs .*pip install 'prism-policy\[robots-ur\]'"):
            robot.connect()
    pytest.importorskip("rtde_control")
    with pytest.raises(PrismError, match=r"arm: no answer at 127.*:30004 .*is host right\?"):
        robot.connect()
    assert not robot.health().ok


# ------------------------------------------------------------------------------------------------ what parts are told


class Mover(Part):
    """Is where it is put; keeps what it is told."""

    def __init__(self, axes: tuple[Axis, ...], at: list[float] | None) -> None:
        self._axes, self.at, self.told, self.log = axes, at, np.zeros(0), []

    def axes(self) -> tuple[Axis, ...]:
        return self._axes

    def state_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self._axes) if self.at is not None else ()

    def state(self) -> tuple[np.ndarray, float] | None:
        return None if self.at is None else (np.array(self.at), time.monotonic())

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def send(self, target: np.ndarray, due: float) -> None:
        self.told = target

    def halt(self) -> None:
        self.log.append("halt")

    def stop(self) -> None:
        self.log.append("stop")


def joined(kind: str) -> tuple[DrivenRobot, Mover, Mover, Mover]:
    arm = Mover((Axis("x", "m"), Axis("y", "m")), [0.1, 0.2])
    gripper, base = Mover((Axis("gripper", ""),), None), Mover((Axis("vx", "m"),), None)
    limits = Limits(position=((0, 1), (0, 1), (-1, 1), (-9, 9)), speed=(0.5, 0.5, math.inf, 0.3))
    robot = DrivenRobot("r", 10.0, kind, {"arm": arm, "gripper": gripper, "base": base}, (), limits)
    robot.connect()
    robot.prepare(0)
    return robot, arm, gripper, base


@pytest.mark.parametrize(
    ("kind", "command", "target"),
    [
        ("delta", [0.01, -0.02], [0.11, 0.18]),
        ("delta", [9.0, 0.0], [0.15, 0.2]),  # no more than the speed allows in a period
        ("velocity", [0.1, -0.2], [0.11, 0.18]),
        ("velocity", [9.0, 0.0], [0.15, 0.2]),
        ("absolute", [0.3, 0.4], [0.3, 0.4]),
        ("absolute", [5.0, -5.0], [1.0, 0.0]),  # within the positions
    ],
)
def test_every_kind_of_command_becomes_a_place(kind: str, command: list[float], target: list[float]) -> None:
    robot, arm, gripper, base = joined(kind)
    robot.send(np.array([*command, 0.5, 7.0], np.float32))
    assert np.allclose(arm.told, target)
    assert gripper.told.tolist() == [0.5], "a gripper is absolute, whatever the kind"
    assert base.told.tolist() == [0.3], "a base is a velocity, within its limit"


def test_an_arm_that_is_blocked_is_not_pressed_harder() -> None:
    robot, arm, _, _ = joined("delta")
    for _ in range(50):
        robot.send(np.array([0.05, 0, 0, 0], np.float32))
    assert np.allclose(arm.told, [0.1 + 0.5 * 0.3, 0.2]), "0.3 s ahead of where it is"
    for at in (0.6, 1e30):
        arm.at = [at, 0.2]
        robot.send(np.array([0.05, 0, 0, 0], np.float32))
        assert arm.told[0] <= 0.3 + 0.05 + 1e-9, "a reading that jumps took the target with it, to the end of the range"


def test_an_arm_whose_numbers_are_wrong_does_not_begin() -> None:
    """It began at 1e30, and its bounds were as wide."""
    robot, arm, _, _ = joined("absolute")
    arm.at = [1.2, 0.2]
    robot.prepare(0)
    arm.at = [1e30, 0.2]
    with pytest.raises(PrismError, match=r"x = 1e\+30 is far outside its limits, 0 to 1"):
        robot.prepare(0)


def test_all_parts_are_halted_before_one_is_waited_for() -> None:
    robot, *parts = joined("delta")
    shared: list[str] = []
    for part in parts:
        part.log = shared
    robot.stop()
    assert shared == ["halt"] * 3 + ["stop"] * 3


# --------------------------------------------------------------------------------------------------- the one who talks


def test_a_stop_wakes_the_one_who_talks_and_what_a_vendor_raises_is_a_fault() -> None:
    said: list[str] = []

    def cycle() -> None:
        if talker.stopping and not talker.standing.is_set():
            said.append("stand")
            talker.standing.set()
        elif not talker.stopping:
            said.append("move")
            raise RuntimeError("cable")

    talker = Talker(1.0, cycle)  # once a second: a stop wakes it
    talker.start("test")
    talker.stop()
    assert until(lambda: said == ["stand"])
    assert talker.fault == ""
    talker.prepare()
    talker.wake()
    assert until(lambda: "cable" in talker.fault)
    talker.stop()
    assert until(lambda: said[-1] == "stand"), "a fault does not end the thread"
    talker.close()


# --------------------------------------------------------------------------------------------------- between waypoints


def test_the_arm_is_at_a_waypoint_when_it_is_due() -> None:
    path, dt = Interpolator(np.zeros(2), np.array([1.0, 1.0])), 0.008
    path.aim(np.array([0.02, -0.01]), due=0.08)
    seen = np.array([path.step(i * dt, dt) for i in range(12)])
    assert np.allclose(seen[9], [0.02, -0.01])
    assert np.allclose(np.diff(seen[:10], axis=0), [0.002, -0.001]), "at one speed, on a straight line"
    assert np.array_equal(seen[-1], seen[9]), "and stands there"


def test_no_waypoint_makes_it_faster_than_its_limit() -> None:
    path, dt = Interpolator(np.zeros(3), np.array([0.5, 1.0, math.inf])), 0.002
    path.aim(np.array([1.0, 0.5, 0.0]), due=0.0)
    steps = np.diff([path.step(i * dt, dt) for i in range(400)], axis=0)
    assert np.abs(steps[:, 0]).max() <= 0.5 * dt + 1e-12
    assert np.allclose(steps[:, 1], steps[:, 0] / 2), "slower, on the same line"


def test_a_hold_that_does_not_get_through_is_sent_again() -> None:
    held: list[float] = []
    failures = iter(range(3))

    def hold(at: np.ndarray) -> None:
        if next(failures, None) is not None:
            raise OSError("the cable")
        held.append(float(at[0]))

    follower = Follower(100.0, lambda at: at, hold)
    follower.begin(np.array([0.5]), np.array([1.0]))
    follower.start("arm")
    follower.stop()
    assert until(follower.standing.is_set)
    assert held == [0.5]
    follower.close()


def test_rotations_about_a_reference_have_no_jump() -> None:
    down = np.array([math.pi, 0.0, 0.0])
    assert np.allclose(to_reference(np.array([-math.pi + 0.01, 0.0, 0.0]), down), [0.01, 0, 0])
    rng = np.random.default_rng(0)
    for turn in rng.uniform(-1, 1, (50, 3)):
        assert np.allclose(to_reference(from_reference(turn, down), down), turn)


# ------------------------------------------------------------------------------------- a UR, by the real ur_rtde client


@pytest.fixture
def controller() -> Iterator[Controller]:
    pytest.importorskip("rtde_control")
    made = Controller(loopback())
    yield made
    made.close()


@pytest.fixture
def ur(controller: Controller, tmp_path: Path) -> Iterator[Robot]:
    robot = make_robot(str(written(tmp_path, UR.format(host=controller.host))))
    with contextlib.closing(robot):
        robot.connect()
        robot.prepare(0)
        yield robot


def moved(robot: Robot, commands: int, action: list[float]) -> None:
    for _ in range(commands):
        robot.send(np.array(action, np.float32))
        robot.wait(robot.now() + 1.0 / robot.rate)


def test_a_ur_is_moved_in_metres_and_radians(controller: Controller, ur: Robot) -> None:
    start = controller.pose.copy()
    moved(ur, 10, [0.002, 0, -0.001, 0, 0, 0.01])
    goals = [numbers for _, what, numbers in controller.events if what == "servol"]
    x, y, z = goals[-1][:3] - start[:3]  # all the way, or less where this computer was too busy
    assert 0.004 < x <= 0.02 + 1e-6
    assert abs(y) < 1e-9
    assert -0.01 - 1e-6 <= z < -0.002
    assert np.allclose(to_reference(np.array(goals[-1][3:6]), np.array([math.pi, 0, 0]))[:2], 0, atol=1e-6)
    assert goals[-1][8:] == (1 / 125, 0.1, 300.0), "cycle, look-ahead, gain"
    steps = np.abs(np.diff([goal[:3] for goal in goals], axis=0))
    assert steps.max() <= 0.05 / 125 + 1e-9, "never faster than the file's speed"
    controller.force[:] = [1, 2, 3, 0, 0, 0]
    assert until(lambda: ur.read()["force"].value[:3].tolist() == [1, 2, 3])
    assert until(lambda: np.allclose(ur.read()["proprio"].value[:3], controller.pose[:3], atol=1e-3))


def test_a_hold_stands_still(controller: Controller, ur: Robot) -> None:
    moved(ur, 5, [0.002, 0, 0, 0, 0, 0])
    moved(ur, 4, [0, 0, 0, 0, 0, 0])

    def goals() -> np.ndarray:
        return np.array([numbers[:6] for _, what, numbers in controller.events if what == "servol"])

    assert until(lambda: len(goals()) > 20 and np.array_equal(goals()[-1], goals()[-20])), "it arrives"
    before = goals()
    assert until(lambda: len(goals()) > len(before) + 20), "the servo goes on"
    assert np.array_equal(goals()[-1], before[-1])


def test_the_stop_reaches_the_controller_before_stop_returns(controller: Controller, ur: Robot) -> None:
    moved(ur, 5, [0.002, 0, 0, 0, 0, 0])
    asked = time.monotonic()
    ur.stop()
    returned = time.monotonic()
    stops = ("servo stop", "dashboard stop")  # the second where this computer was too busy for the first
    assert until(lambda: any(at > asked and what in stops for at, what, _ in controller.events))
    first = next(at for at, what, _ in controller.events if at > asked and what in stops)
    if returned - asked < 0.06:
        assert first < returned, "it said that it stands, and did not"
    time.sleep(0.1)
    assert not [what for at, what, _ in controller.events if what == "servol" and at > first]


def test_a_protective_stop_stops_the_loop_and_is_cleared_by_a_person(controller: Controller, ur: Robot) -> None:
    guard = Guard(ur, dataclasses.replace(ur.limits, hold_seconds=1.0))  # a busy computer is no fault here
    guard.begin()
    controller.protective_stop = True
    assert until(lambda: (guard.observe(), guard.state)[1] == "stopped")
    assert "protective stop: clear it on the pendant" in guard.reason
    with pytest.raises(PrismError, match="protective stop"):
        ur.prepare(0)
    controller.protective_stop = False
    assert until(lambda: ur.health().ok)
    ur.prepare(0)
    assert until(lambda: ur.health().ok)
    moved(ur, 2, [0.001, 0, 0, 0, 0, 0])


def test_too_much_force_stops_it(controller: Controller, ur: Robot) -> None:
    guard = Guard(ur, dataclasses.replace(ur.limits, hold_seconds=1.0))  # a busy computer is no fault here
    guard.begin()
    controller.force[2] = -60.0
    assert until(lambda: (guard.observe(), guard.state)[1] == "stopped")
    assert "a force of 60 N" in guard.reason


def test_a_cable_that_is_pulled_is_noticed(controller: Controller, ur: Robot) -> None:
    controller.close()
    assert until(lambda: not ur.health().ok)
    assert "connection" in ur.health().reason
    ur.stop()
    with pytest.raises(PrismError):
        ur.send(np.zeros(6, np.float32))
    again = Controller(controller.host)
    ur.connect()
    ur.prepare(0)
    moved(ur, 3, [0.001, 0, 0, 0, 0, 0])
    assert again.count("servol") > 0
    ur.close()
    again.close()


def test_without_remote_control_it_says_so(controller: Controller, tmp_path: Path) -> None:
    controller.remote = False
    robot = make_robot(str(written(tmp_path, UR.format(host=controller.host))))
    with pytest.raises(PrismError, match="enable remote control") as caught:
        robot.connect()
    assert "\n" not in str(caught.value)


def test_a_killed_program_leaves_the_arm_standing(controller: Controller, tmp_path: Path) -> None:
    """kill -9 of the robot's process: the servo's own one sees it, stops the arm and ends."""
    file = written(tmp_path, UR.format(host=controller.host))
    code = (
        "import sys, time, numpy as np\nfrom prism.robots.contract import make_robot\n"
        "if __name__ == '__main__':\n robot = make_robot(sys.argv[1]); robot.connect(); robot.prepare(0)\n"
        " while True: robot.send(np.array([.001, 0, 0, 0, 0, 0], np.float32)); time.sleep(.05)\n"
    )
    script = tmp_path / "drives.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script), str(file)], env=dict(os.environ))
    assert until(lambda: controller.count("servol") > 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert until(lambda: controller.count("servo stop") + controller.count("watchdog") > 0)
    assert until(lambda: not controller.running)


class Reaches:
    """A demonstrator: along x, for as long as it is asked."""

    who, plan, label = "operator", None, None

    def start(self, seed: int) -> None: ...

    def sent(self, action: object) -> None: ...

    def trouble(self) -> str:
        return ""

    def act(self, seen: Seen, keys: str) -> np.ndarray:
        return np.array([0.0005, 0.0002 * math.sin(10 * seen.at), 0, 0, 0, 0], np.float32)


@pytest.fixture
def elsewhere() -> Iterator[subprocess.Popen[str]]:
    """A controller in a process of its own, for tests in which ours computes a policy."""
    pytest.importorskip("rtde_control")
    words = [sys.executable, "-m", "tests.fakes.ur_controller", loopback()]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_record_train_run_with_the_file_of_a_ur(elsewhere: subprocess.Popen[str], tmp_path: Path) -> None:
    """The file is all that differs from a twin, until the policy's commands arrive at the controller."""
    text = UR.format(host=loopback()).replace("[limits]", "[limits]\nhold_seconds = 1.0\nwatchdog = 0.5")
    file, data, run = written(tmp_path, text), tmp_path / "data", tmp_path / "run"
    robot = make_robot(str(file))
    recording = Recording(data, robot, "reach")
    guard = Guard(robot, robot.limits)
    robot.connect()
    with open(os.devnull) as nothing, Keys(nothing) as keys, contextlib.closing(guard):
        for seed in range(2):
            trace = Trace(robot)
            assert not drive(guard, Reaches(), seed, 1.5, keys, trace, polls=4).stopped
            recording.add(trace.episode()[0], {"seed": seed})
    small = ("--set", "policy.obs_horizon=2", "policy.pred_horizon=8", "controller.exec_horizon=4")
    assert main(["train", str(data), "--steps", "4", "--out", str(run), *small]) == 0
    drives = ["run", str(run), "--robot", str(file), "--seconds", "1", "--slow", "0.5"]
    begin = time.monotonic()
    assert main([*drives, "--dry-run"]) == 0
    end = time.monotonic()
    assert main([*drives, "--out", str(tmp_path / "out")]) == 0
    assert open_dataset(tmp_path / "out").read(0).length >= 2
    events = json.loads(elsewhere.communicate("")[0])
    assert not [what for at, what, _ in events if begin < at < end], "a dry run sends nothing"
    assert events[-1][1] != "servol", "in the end it is stopped"
