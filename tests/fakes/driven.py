"""Robots of prism/robots/drivers with stand-ins at the other end: for the conformance suite and the drivers' tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism.robots.contract import Robot, make_robot
from tests.fakes.robotiq import Gripper
from tests.fakes.rosbridge import RosBridge
from tests.fakes.sensors import Cameras, RealSenses, Sounds
from tests.fakes.unitree import DOMAIN, go2_with_d1
from tests.fakes.ur_controller import Controller

REAL_CLOCK = pytest.mark.flaky(reruns=2)
"""For tests with vendors' own clients on the real clock: ur_rtde gives up a connection where the machine stands still
for two seconds or its clock is set, as a virtual machine may; the robot then stops, as it should."""

UR = """
name = "ur5e"
rate = 20
kind = "delta"

[arm]
driver = "ur"
host = "{host}"
watchdog = 1.0  # a busy computer is no fault here

[limits]
position = [[0.3, 0.7], [-0.3, 0.3], [0.05, 0.5], [-0.5, 0.5], [-0.5, 0.5], [-0.5, 0.5]]
speed = [0.05, 0.05, 0.05, 0.5, 0.5, 0.5]
workspace = [[0.28, 0.72], [-0.32, 0.32], [0.04, 0.52]]
force = 40
force_sensor = "force"
"""


def loopback() -> str:
    """An address of this process alone: vendors' ports are fixed, and tests run side by side."""
    number = os.getpid()
    return f"127.{1 + number // 62500 % 250}.{1 + number // 250 % 250}.{2 + number % 250}"


def written(folder: Path, text: str) -> Path:
    file = folder / "robot.toml"
    file.write_text(text, encoding="utf-8")
    return file


CELL = (
    UR.replace("[limits]", """
[gripper]
driver = "robotiq"

[sensors.wrist]
driver = "realsense"
color = "rgb_wrist"
depth = "depth_wrist"
width = 64
height = 48

[sensors.rgb_static]
driver = "uvc"
device = "/dev/video0"
width = 64
height = 48

[sensors.tactile]
driver = "digit"
device = 2

[sensors.audio]
driver = "microphone"

[limits]""")
    .replace("[-0.5, 0.5]]", "[-0.5, 0.5], [-1, 1]]")
    .replace("0.5, 0.5, 0.5]\nwork", "0.5, 0.5, 0.5, inf]\nwork")
)  # fmt: skip
GO2 = """
name = "go2-d1"
rate = 10
kind = "delta"

[arm]
driver = "d1"
interface = "lo"
domain = {domain}

[base]
driver = "go2"
interface = "lo"
domain = {domain}

[limits]  # x y z rx ry rz gripper vx vy vyaw
position = [[0.1, 0.5], [-0.3, 0.3], [0.05, 0.6], [-1, 1], [-1, 1], [-1, 1], [-1, 1], [-1, 1], [-1, 1], [-1, 1]]
speed = [0.1, 0.1, 0.1, 0.5, 0.5, 0.5, inf, 0.3, 0.2, 0.5]
"""
ROS = """
name = "ros-arm"
rate = 20
kind = "delta"

[arm]
driver = "ros"
url = "{url}"
joints = ["a", "b"]
command_topic = "/forward_position_controller/commands"

[sensors.rgb_static]
driver = "ros"
url = "{url}"
topic = "/camera"
type = "sensor_msgs/msg/Image"
shape = [4, 6, 3]
fps = 50

[sensors.depth_static]
driver = "ros"
url = "{url}"
topic = "/depth"
type = "sensor_msgs/msg/Image"
shape = [4, 6]
fps = 50

[sensors.force]
driver = "ros"
url = "{url}"
topic = "/wrench"
type = "geometry_msgs/msg/WrenchStamped"
shape = [6]
fps = 50

[limits]
position = [[-1, 1], [-1, 1]]
speed = [0.1, 0.1]
"""


def vendors(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for the modules of cameras and microphones."""
    made = SimpleNamespace(cv2=Cameras(), pyrealsense2=RealSenses(), sounddevice=Sounds())
    for name, module in vars(made).items():
        patch.setitem(sys.modules, name, module)
    return made


@contextmanager
def cell(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Robot]:
    """A UR with everything: the real ur_rtde; stand-ins of gripper, cameras and microphone."""
    pytest.importorskip("rtde_control")
    vendors(patch)
    controller = Controller(loopback())
    gripper = Gripper(controller.host)
    try:
        yield make_robot(str(written(folder, CELL.format(host=controller.host))))
    finally:
        gripper.close()
        controller.close()


@contextmanager
def go2(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Robot]:
    """The real unitree_sdk2py and cyclonedds, and a robot of ours on loopback."""
    pytest.importorskip("unitree_sdk2py")
    go2_with_d1()
    yield make_robot(str(written(folder, GO2.format(domain=DOMAIN))))


@contextmanager
def ros(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Robot]:
    bridge = RosBridge()
    try:
        yield make_robot(str(written(folder, ROS.format(url=bridge.url))))
    finally:
        bridge.close()


DRIVEN: dict[str, Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[Robot]]] = {
    "ur cell": cell,
    "go2 d1": go2,
    "ros": ros,
}
