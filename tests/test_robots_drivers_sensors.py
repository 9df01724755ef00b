"""Drivers of grippers, cameras, microphones, the Go2 with its arm, and ROS: units, faults and remedies.

The other side is a stand-in (tests/fakes); unitree_sdk2py, cyclonedds and websockets are the real ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.data import open_dataset
from prism.errors import PrismError
from prism.robots.contract import Robot, make_robot
from prism.robots.drivers.composed import make_part
from prism.robots.drivers.parts import Part
from prism.robots.guard import Guard, Seen
from prism.robots.loop import Keys, drive
from prism.robots.recording import Recording, Trace
from tests.fakes.driven import CELL, GO2, REAL_CLOCK, ROS, cell, loopback, ros, vendors, written
from tests.fakes.robotiq import Gripper
from tests.fakes.rosbridge import RosBridge
from tests.fakes.sensors import DARK, FULL
from tests.fakes.unitree import DOMAIN, Go2WithD1, go2_with_d1

pytestmark = REAL_CLOCK


def until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def sensor(name: str, rate: float = 20.0, **settings: Any) -> Part:
    part = make_part("sensors", f"sensors.{name}", settings)
    part.rate = part.step_rate = rate
    return part


# ------------------------------------------------------------------------------------------- cameras and microphones


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    return vendors(monkeypatch)


@pytest.fixture
def opened(fake: Any) -> Iterator[Callable[[Part], Part]]:
    parts: list[Part] = []

    def connect(part: Part) -> Part:
        parts.append(part)
        part.connect()
        return part

    yield connect
    for part in parts:
        part.close()


@pytest.mark.parametrize(
    ("driver", "kind", "shape"), [("uvc", "rgb", (480, 640, 3)), ("digit", "tactile", (240, 320, 3))]
)
def test_opencv_s_pictures_become_rgb(opened: Any, driver: str, kind: str, shape: tuple[int, ...]) -> None:
    camera = opened(sensor("eye", driver=driver, device=1))
    (spec,) = camera.sensors()
    assert (spec.name, spec.kind, spec.shape, spec.fps) == ("eye", kind, shape, 60.0 if driver == "digit" else 30.0)
    picture = camera.read()["eye"].value
    assert picture[100, 100].tolist() == [FULL, DARK, DARK], "red is first"


def test_the_real_opencv_is_read_as_rgb_and_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A film in place of a camera: OpenCV opens both."""
    cv2 = pytest.importorskip("cv2")
    film = tmp_path / "red.avi"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter_fourcc(*"MJPG"), 30.0, (64, 48))
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no films")
    for _ in range(10):
        writer.write(np.full((48, 64, 3), (10, 10, 200), np.uint8))
    writer.release()
    camera = sensor("eye", driver="uvc", device=str(film), width=64, height=48)
    camera.connect()
    assert np.allclose(camera.read()["eye"].value[20, 20], [200, 10, 10], atol=12)
    camera.close()
    capfd.readouterr()
    with pytest.raises(PrismError, match="camera 99 cannot be opened"):
        sensor("eye", driver="uvc", device=99).connect()
    assert capfd.readouterr().err == ""


def test_a_camera_that_is_not_there_is_one_line(fake: Any, opened: Any) -> None:
    fake.cv2.unplugged.add(4)
    with pytest.raises(PrismError, match=r"sensors.eye: camera 4 cannot be opened; is it plugged in"):
        opened(sensor("eye", driver="uvc", device=4))
    fake.cv2.sizes[5] = (1280, 720)
    with pytest.raises(
        PrismError, match=r"sensors.eye: it shows \(720, 1280, 3\) uint8; the file says \(480, 640, 3\)"
    ):
        opened(sensor("eye", driver="uvc", device=5))


def test_a_camera_that_is_unplugged_shows_nothing_new_and_comes_back(fake: Any, opened: Any) -> None:
    camera = opened(sensor("eye", driver="uvc", device=1))
    fake.cv2.unplugged.add(1)
    time.sleep(0.1)
    last = camera.read()["eye"].stamp
    time.sleep(0.2)
    assert camera.read()["eye"].stamp == last
    fake.cv2.unplugged.clear()
    assert until(lambda: camera.read()["eye"].stamp > last)


@pytest.mark.parametrize("missing", ["cv2", "pyrealsense2", "sounddevice"])
def test_a_missing_package_is_named(opened: Any, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    driver = {"cv2": "uvc", "pyrealsense2": "realsense", "sounddevice": "microphone"}[missing]
    extra = {"cv2": "cameras"}.get(missing, driver)
    with pytest.raises(PrismError, match=rf"driver {driver} needs the package {missing}: .*\[robots-{extra}\]"):
        opened(sensor("eye", driver=driver))


def test_a_realsense_shows_metres_and_says_when(fake: Any, opened: Any) -> None:
    camera = opened(sensor("wrist", driver="realsense", serial="123", depth="depth_wrist", width=64, height=48))
    readings = camera.read()
    assert readings["rgb_wrist"].value[0, 0].tolist() == [FULL, DARK, DARK]
    depth = readings["depth_wrist"]
    assert depth.value.dtype == np.float32
    assert np.allclose(depth.value, 0.5)
    seen = time.monotonic()
    assert depth.stamp < seen - 0.015, "taken before it came"
    with pytest.raises(PrismError, match=r"sensors.other: No device connected; is it plugged in"):
        opened(sensor("other", driver="realsense", serial="999"))


def test_a_microphone_gives_the_sound_of_each_step(opened: Any) -> None:
    microphone = opened(sensor("audio", rate=20.0, driver="microphone", sample_rate=16_000))
    (spec,) = microphone.sensors()
    assert (spec.kind, spec.shape, spec.sample_rate) == ("audio", (800,), 16_000)
    first = microphone.read()["audio"]
    assert np.allclose(first.value, np.sin(2 * np.pi * 100 * np.arange(800) / 16_000), atol=1e-5)
    with pytest.raises(PrismError, match=r"Error querying device -1; `python -m sounddevice` lists"):
        opened(sensor("other", driver="microphone", device="nowhere"))


def test_without_portaudio_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PrismError, match="PortAudio is missing; apt install libportaudio2"):
        sensor("audio", driver="microphone").connect()


def test_two_sensors_cannot_read_one_camera(tmp_path: Path) -> None:
    text = CELL.replace("device = 2", 'device = "/dev/video0"')
    with pytest.raises(PrismError, match=r"sensors.rgb_static and sensors.tactile read one device"):
        make_robot(str(written(tmp_path, text)))


# -------------------------------------------------------------------------------------------------------- the gripper


@pytest.fixture
def gripper() -> Iterator[Gripper]:
    made = Gripper(loopback())
    yield made
    made.close()


def robotiq(host: str) -> Part:
    return make_part("gripper", "gripper", {"driver": "robotiq", "host": host, "force": 40})


def test_a_robotiq_opens_and_closes(gripper: Gripper) -> None:
    part = robotiq(loopback())
    part.connect()
    part.prepare()
    assert part.state()[0].tolist() == [-1.0]  # type: ignore[index]
    part.send(np.array([1.0]), 0.0)
    assert until(lambda: part.state()[0][0] == 1.0)  # type: ignore[index]
    assert "SET POS 255 SPE 255 FOR 40 GTO 1" in gripper.said
    part.send(np.array([0.0]), 0.0)
    part.stop()
    assert until(lambda: "SET GTO 0" in gripper.said)
    time.sleep(0.1)
    assert gripper.said.index("SET GTO 0") == max(i for i, said in enumerate(gripper.said) if said.startswith("SET"))
    gripper.values["FLT"] = 14
    assert until(lambda: "fault 14" in part.health().reason)
    gripper.close()
    assert until(lambda: "does not answer" in part.health().reason)
    part.close()


def test_a_gripper_that_is_not_ready_is_one_line(gripper: Gripper) -> None:
    gripper.values["STA"] = 0
    with pytest.raises(PrismError, match="gripper: the gripper is not activated; activate it on the pendant"):
        robotiq(loopback()).connect()
    gripper.close()
    with pytest.raises(PrismError, match=r"gripper: no answer at 127.*:63352"):
        robotiq(loopback()).connect()


# ------------------------------------------------------------------------------------------------------- Go2 and D1


@pytest.fixture
def dog() -> Iterator[Go2WithD1]:
    pytest.importorskip("unitree_sdk2py")
    made = go2_with_d1()
    made.calls.clear()
    yield made
    made.silent, made.refuses, made.apart = False, 0, 0.0


@pytest.fixture
def go2(dog: Go2WithD1, tmp_path: Path) -> Iterator[Robot]:
    robot = make_robot(str(written(tmp_path, GO2.format(domain=DOMAIN))))
    robot.connect()
    robot.prepare(0)
    yield robot
    robot.close()


def moved(robot: Robot, commands: int, **numbers: float) -> None:
    action = np.zeros(robot.actions.dim, np.float32)
    for name, value in numbers.items():
        action[robot.actions.spec.names.index(name)] = value
    for _ in range(commands):
        robot.send(action)
        robot.wait(robot.now() + 1.0 / robot.rate)


def test_a_go2_walks_in_metres_a_second_and_stands_when_nobody_commands(dog: Go2WithD1, go2: Robot) -> None:
    assert go2.actions.spec.names == ("x", "y", "z", "rx", "ry", "rz", "gripper", "vx", "vy", "vyaw")
    assert go2.actions.kinds[-3:] == ("velocity",) * 3
    moved(go2, 4, vx=0.2, vyaw=9.0)
    moves = [numbers for _, what, numbers in dog.calls if what == "move"]
    assert np.allclose(moves[-1], [0.2, 0.0, 0.5]), "never faster than the file's limit"
    assert until(lambda: math.isclose(float(go2.read()["proprio"].value[7]), 0.2, abs_tol=1e-6))
    assert until(lambda: dog.calls[-1][1] == "stop" or any(what == "stop" for _, what, _ in dog.calls[-20:]))
    assert not any(what == "damp" for _, what, _ in dog.calls)


def test_the_legs_are_stopped_before_stop_returns(dog: Go2WithD1, go2: Robot) -> None:
    moved(go2, 3, vx=0.2)
    asked = time.monotonic()
    go2.stop()
    assert until(lambda: any(at > asked and what == "stop" for at, what, _ in dog.calls))
    first = next(at for at, what, _ in dog.calls if at > asked and what == "stop")
    time.sleep(0.2)
    assert not [what for at, what, _ in dog.calls if what == "move" and at > first]


def test_a_go2_that_refuses_or_is_silent_is_not_healthy(dog: Go2WithD1, go2: Robot) -> None:
    dog.refuses = 3203
    moved(go2, 1, vx=0.1)
    go2.stop()
    assert until(lambda: "code 3203" in go2.health().reason)
    dog.refuses, dog.silent = 0, True
    assert until(lambda: "no " in go2.health().reason)


def test_a_wrong_interface_is_one_line(dog: Go2WithD1, tmp_path: Path) -> None:
    robot = make_robot(str(written(tmp_path, GO2.format(domain=DOMAIN).replace('"lo"', '"eth77"'))))
    with pytest.raises(PrismError, match=r"arm: interface 'eth77' is not there; there are .*lo"):
        robot.connect()


def test_arm_and_base_are_on_one_network(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="arm and base name two interfaces"):
        make_robot(str(written(tmp_path, GO2.format(domain=DOMAIN).replace('"lo"', '"eth0"', 1))))


def test_a_d1_needs_no_other_gripper(tmp_path: Path) -> None:
    text = GO2.format(domain=DOMAIN).replace("[limits]", '[gripper]\ndriver = "robotiq"\nhost = "h"\n\n[limits]')
    text = text.replace("position = [", "position = [[-1, 1], ").replace("speed = [", "speed = [1, ")
    with pytest.raises(PrismError, match="two parts are commanded by 'gripper'"):
        make_robot(str(written(tmp_path, text)))


def test_a_d1_is_told_degrees_and_goes_where_it_is_told(dog: Go2WithD1, go2: Robot) -> None:
    start = go2.read()["proprio"].value[:6].copy()
    moved(go2, 10, z=0.005, gripper=1.0)
    assert until(lambda: bool(0.01 < go2.read()["proprio"].value[2] - start[2] < 0.053))
    assert np.allclose(go2.read()["proprio"].value[[0, 1, 3, 4, 5]], start[[0, 1, 3, 4, 5]], atol=0.03)
    angles = [numbers for _, what, numbers in dog.calls if what == "angles"]
    assert np.abs(np.subtract(angles[-1][:6], dog.angles[:6])).max() < 15, "degrees"
    assert angles[-1][6] == 0.0, "closed"
    assert until(lambda: math.isclose(float(go2.read()["proprio"].value[6]), 1.0, abs_tol=1e-6))


def test_a_d1_stands_where_it_cannot_reach(dog: Go2WithD1, go2: Robot) -> None:
    moved(go2, 40, x=0.01, z=0.01)
    arm: Any = go2._movers["arm"]  # type: ignore[attr-defined]
    assert arm.unreachable > 0
    told = [numbers[:6] for _, what, numbers in dog.calls if what == "angles"]
    assert np.abs(np.diff(told, axis=0)).max() <= math.degrees(0.1) + 1e-3, "1 rad/s at 10 Hz, near the end too"


def test_a_stop_holds_the_d1_where_it_is(dog: Go2WithD1, go2: Robot) -> None:
    moved(go2, 5, z=0.01)
    go2.stop()
    time.sleep(0.3)
    held, count = dog.angles.copy(), len(dog.calls)
    time.sleep(0.3)
    assert np.allclose(dog.angles, held)
    assert not any(what == "angles" for _, what, _ in dog.calls[count:])


def test_a_stop_of_the_d1_keeps_hold(dog: Go2WithD1, go2: Robot) -> None:
    dog.apart = 20.0
    moved(go2, 10, gripper=1.0)
    assert until(lambda: math.isclose(float(go2.read()["proprio"].value[6]), 0.2, abs_tol=1e-6)), "it squeezes"
    asked = time.monotonic()
    go2.stop()
    time.sleep(0.3)
    told = [numbers for at, what, numbers in dog.calls if what == "angles" and at > asked]
    assert told[-1][6] == 0.0, "where its fingers are, it would let go"


def test_a_stop_does_not_send_a_silent_d1_back(dog: Go2WithD1, go2: Robot) -> None:
    moved(go2, 2, x=-0.01)
    dog.silent = True
    moved(go2, 6, x=-0.01)
    go2.stop()
    assert until(lambda: go2._movers["arm"]._follower.standing.is_set())  # type: ignore[attr-defined]
    time.sleep(0.3)
    told = np.array([numbers for _, what, numbers in dog.calls if what == "angles"])
    assert np.abs(told[-1] - told[0]).max() > 1, "it moved"
    assert np.array_equal(told[-1], told[-2]), "it stands where it was told to be last"


def test_inverse_kinematics_inverts() -> None:
    pytest.importorskip("mujoco")
    from prism.robots.drivers.d1 import MODEL
    from prism.robots.drivers.ik import ArmModel

    model, rng = ArmModel(MODEL), np.random.default_rng(0)
    assert np.allclose(model.pose(np.zeros(6)), [0.05 + 0.1547 + 0.0777 + 0.11, 0, 0.4429, 0, 0, 0], atol=1e-6)
    for _ in range(50):
        joints = rng.uniform(0.8 * model.low, 0.8 * model.high)
        near = joints + rng.uniform(-0.2, 0.2, 6)
        found, metres, radians = model.solve(model.pose(joints), near)
        assert metres < 1e-3
        assert radians < 1e-2
        assert (model.low <= found).all()
        assert (found <= model.high).all()


# ---------------------------------------------------------------------------------------------------------------- ROS


@pytest.fixture
def bridge() -> Iterator[RosBridge]:
    made = RosBridge()
    yield made
    made.close()


def test_ros_topics_are_read_in_our_units(bridge: RosBridge, tmp_path: Path) -> None:
    robot = make_robot(str(written(tmp_path, ROS.format(url=bridge.url))))
    robot.connect()
    robot.prepare(0)
    readings = robot.read()
    assert readings["rgb_static"].value[0, 0].tolist() == [200, 0, 0]
    assert np.allclose(readings["depth_static"].value, 0.5)
    assert readings["force"].value.tolist() == [1, 2, 3, 1, 2, 3]
    moved(robot, 6, a=0.005)
    assert until(lambda: bool(0.01 < bridge.joints[0] < 0.031)), "by name, not by order"
    assert bridge.joints[1] == 0
    goals = np.array([data for _, data in bridge.commands])
    assert np.abs(np.diff(goals, axis=0)).max() <= 0.1 / 50 + 1e-9, "never faster than the file's limit"
    bridge.silent = True
    assert until(lambda: "no message on /joint_states" in robot.health().reason)
    robot.stop()
    with pytest.raises(PrismError, match="arm: no message on /joint_states"):
        robot.prepare(0)  # else it would be sent to where it was then
    robot.close()


def test_a_stop_does_not_send_a_silent_ros_arm_back(bridge: RosBridge, tmp_path: Path) -> None:
    robot = make_robot(str(written(tmp_path, ROS.format(url=bridge.url))))
    robot.connect()
    robot.prepare(0)
    moved(robot, 4, a=0.005)
    bridge.silent = True
    moved(robot, 8, a=0.005)
    robot.stop()
    robot.close()
    goals = np.array([data for _, data in bridge.commands])
    assert goals[-1][0] > 0.005, "it moved"
    assert np.array_equal(goals[-1], goals[-2]), "it stands where it was told to be last"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"a", "b"', '"a", "c"', "/joint_states has no joint 'c'; it has wheel, b, a"),
        ('topic = "/camera"', 'topic = "/other"', "rosbridge says: no topic /other"),
        ('url = "{url}"', 'url = "ws://127.0.0.1:9"', "is rosbridge running"),
        ("shape = [6]", "shape = [3]", "it shows (6,) float32; the file says (3,)"),
        ("geometry_msgs/msg/WrenchStamped", "my_msgs/msg/Force", "type 'my_msgs/msg/Force' is not read"),
    ],
)
def test_what_is_wrong_with_ros_is_one_line(bridge: RosBridge, tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in ROS
    file = written(tmp_path, ROS.replace(old, new, 1).format(url=bridge.url))
    with pytest.raises(PrismError) as caught:
        make_robot(str(file)).connect()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ all together


class Slowly:
    """A commander: along x, and closes the gripper."""

    who, plan, label = "operator", None, None

    def start(self, seed: int) -> None: ...

    def sent(self, action: np.ndarray) -> None: ...

    def trouble(self) -> str:
        return ""

    def act(self, seen: Seen, keys: str) -> np.ndarray:
        return np.array([0.001, 0, 0, 0, 0, 0, 1.0], np.float32)


def test_an_episode_of_a_whole_cell_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cell(tmp_path, monkeypatch) as robot, open(os.devnull) as nothing, Keys(nothing) as keys:
        recording = Recording(tmp_path / "data", robot, "reach")
        patient = dataclasses.replace(robot.limits, hold_seconds=1.0, watchdog=0.5)  # of a busy computer
        guard, trace = Guard(robot, patient, needs=[spec.name for spec in robot.sensors]), Trace(robot)
        robot.connect()
        assert not drive(guard, Slowly(), 0, 1.0, keys, trace, polls=6).stopped
        episode, _ = trace.episode()
        recording.add(episode, {"seed": 0})
        guard.close()
    read = open_dataset(tmp_path / "data").read(0)
    assert set(read.streams) == {"proprio", "force", "rgb_wrist", "depth_wrist", "rgb_static", "tactile", "audio"}
    assert read.actions.shape[1] == 7
    assert read.streams["rgb_static"][-1][5, 5].tolist() == [FULL, DARK, DARK]
    assert read.streams["proprio"][-1][0] > read.streams["proprio"][0][0]
    assert np.abs(read.streams["audio"]).max() > 0.9


def test_a_camera_that_fails_stops_a_robot_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ros(tmp_path, monkeypatch) as robot:
        robot.connect()
        guard = Guard(robot, robot.limits, needs=["rgb_static"])
        guard.begin()
        robot._parts[1]._alive.clear()  # type: ignore[attr-defined]  # its thread ends: nothing new comes

        def stopped() -> bool:
            guard.observe()
            guard.command(np.zeros(2, np.float32))
            return guard.state == "stopped"

        assert until(stopped)
        assert "sensor 'rgb_static' is late" in guard.reason
        guard.close()
