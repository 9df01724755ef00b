"""A robot that derives from LeRobot's own Robot, driven by prism.robots.drivers.lerobot_robot: `make lerobot`."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import numpy as np
import pytest
from prism.errors import PrismError
from prism.robots.contract import make_robot

ARM = """
from dataclasses import dataclass, field

import numpy as np
from lerobot.cameras import CameraConfig
from lerobot.robots import Robot, RobotConfig

JOINTS = ("pan", "lift", "gripper")


@RobotConfig.register_subclass("bench_arm")
@dataclass
class BenchArmConfig(RobotConfig):
    port: str = ""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)


class BenchArm(Robot):
    config_class, name = BenchArmConfig, "bench_arm"

    def __init__(self, config):
        super().__init__(config)
        self.config, self._connected = config, False
        self.at = dict.fromkeys(JOINTS, 0.0)

    @property
    def observation_features(self):
        return {**{f"{joint}.pos": float for joint in JOINTS}, "top": (24, 32, 3)}

    @property
    def action_features(self):
        return {f"{joint}.pos": float for joint in JOINTS}

    is_connected = property(lambda self: self._connected)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate=True):
        if self.config.port == "none":
            raise ConnectionError("no such port")
        self._connected = True

    def calibrate(self): ...
    def configure(self): ...

    def get_observation(self):
        return {**{f"{joint}.pos": at for joint, at in self.at.items()}, "top": np.zeros((24, 32, 3), np.uint8)}

    def send_action(self, action):
        self.at = {key.removesuffix(".pos"): value for key, value in action.items()}
        return action

    def disconnect(self):
        self._connected = False
"""
FILE = """
rate = 20
units = { "*" = "deg", "gripper.pos" = "%" }
[lerobot]
type = "TYPE"
port = "PORT"
id = "bench"
calibration_dir = "FOLDER"
[limits]
position = [[-90, 90], [-90, 90], [0, 100]]
speed = [90, 90, 200]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lerobot_bench_arm.py").write_text(ARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("lerobot_bench_arm")
    made = tmp_path / "arm.toml"
    made.write_text(FILE.replace("TYPE", "bench_arm").replace("FOLDER", str(tmp_path)))
    return made


def test_a_robot_of_lerobots(file: Path) -> None:
    robot = make_robot(str(file))
    assert (robot.name, robot.actions.spec.kind, robot.actions.units) == ("bench_arm", "absolute", ("deg", "deg", "%"))
    assert {spec.name: spec.kind for spec in robot.sensors} == {"state": "vector", "top": "rgb"}
    robot.connect()
    try:
        robot.prepare(0)
        robot.send(np.array([12.0, -30.0, 500.0], np.float32))
        end = time.monotonic() + 30
        while not np.allclose(robot.read()["state"].value, [12, -30, 100]):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert robot.health().ok
        robot.stop()
        with pytest.raises(PrismError, match="takes no commands"):
            robot.send(np.zeros(3, np.float32))
    finally:
        robot.close()


def test_bad_files_are_one_line(file: Path) -> None:
    text = file.read_text()
    cases = {
        ("bench_arm", "bench_amr"): r"'bench_amr' is unknown; did you mean bench_arm\?",
        ('port = "PORT"', 'prt = "x"'): "The fields `prt` are not valid.*its keys are those of lerobot-record",
        ("bench_arm", "so101_follower"): r"pip install 'lerobot\[feetech\]'",
    }
    for change, message in cases.items():
        file.write_text(text.replace(*change))
        with pytest.raises(PrismError, match=rf"arm\.toml: .*{message}"):
            make_robot(str(file))
    file.write_text(text.replace("PORT", "none"))
    with pytest.raises(PrismError, match="no such port; is it on"):
        make_robot(str(file)).connect()
