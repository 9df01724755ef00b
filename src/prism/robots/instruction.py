"""A robot with an instruction: the sentence is one more sensor, in recordings and for the policy."""

from __future__ import annotations

from prism_client import PolicyInfo

from prism.errors import PrismError
from prism.robots.contract import Robot
from prism.sensors import SensorSpec, encode_text

TEXT, BYTES = "text", 64  # the sensor, and its size in recordings


def instruct(robot: Robot, text: str, name: str = TEXT, size: int = BYTES) -> None:
    """Give `robot` a text sensor that reads `text`, in place of its own if it has one."""
    if not text.strip():
        raise PrismError("--text is empty: say in words what is to be done, or leave it out")
    robot.sensors = (*(spec for spec in robot.sensors if spec.name != name), SensorSpec(name, "text", (size,)))
    robot.told[name] = encode_text(text, size)


def instruct_for(robot: Robot, text: str, info: PolicyInfo) -> None:
    """Instruct `robot` in the form that the policy (planner.info) takes."""
    sensors = [sensor for sensor in info.sensors if sensor.kind == "text"]
    if not sensors:
        raise PrismError("--text: the policy has no text sensor; leave it out")
    instruct(robot, text, sensors[0].name, sensors[0].shape[0])
