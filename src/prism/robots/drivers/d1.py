"""Unitree's D1 arm over DDS: seven servo angles in degrees, as JSON; the seventh is the gripper.

`control = "pose"`: x, y, z (m) and rx, ry, rz (rad) of the gripper in the arm's base (x forward, z up), by inverse
kinematics of our own; "joints": q0 to q5 (rad). Then the gripper, -1 open to 1 closed. A pose that cannot be reached is
not approached: the arm stands. A stop makes it hold where it is, and what it has gripped; its motors stay on.
"""

from __future__ import annotations

import json
import threading
import time
import types
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from prism.errors import PrismError, check_choices, need
from prism.robots.contract import Health
from prism.robots.drivers.ik import ArmModel
from prism.robots.drivers.parts import FIRST_READING, Axis, Part, Vector, state_age
from prism.robots.drivers.rotation import from_reference, to_reference
from prism.robots.drivers.unitree_go2 import join
from prism.robots.drivers.waypoints import Follower

COMMAND, ANGLES = "rt/arm_Command", "current_servo_angle"  # topics
_MOVE, _FAST = 2, 0  # funcode: all angles; mode: of a stream of them, with little smoothing
_REACHED = (0.005, 0.05)  # metres, radians
_SILENT = 1.0  # seconds

# Lengths of the arm in metres; the gripper points forward where all angles are 0.
MODEL = """
<mujoco>
  <compiler angle="radian" autolimits="true"/>
  <default><joint type="hinge"/><geom type="sphere" size="0.02" mass="0.1"/></default>
  <worldbody>
    <body pos="0 0 0.0738"><joint axis="0 0 -1" range="-2.36 2.36"/><geom/>
      <body pos="0 0 0.0578"><joint axis="0 1 0" range="-1.57 1.57"/><geom/>
        <body pos="0 0 0.27"><joint axis="0 1 0" range="-1.57 1.57"/><geom/>
          <body pos="0.05 0 0.0413"><joint axis="1 0 0" range="-2.36 2.36"/><geom/>
            <body pos="0.1547 0 0"><joint axis="0 1 0" range="-1.57 1.57"/><geom/>
              <body pos="0.0777 0 0"><joint axis="1 0 0" range="-2.36 2.36"/><geom/>
                <site name="tool" pos="0.11 0 0"/>
              </body></body></body></body></body></body>
  </worldbody>
</mujoco>
"""


def message(name: str, **fields: Any) -> Any:
    """A type of the arm's messages, as DDS knows it."""
    idl: Any = need("cyclonedds.idl", "robots-go2", "driver d1")
    made = types.new_class(
        name,
        (idl.IdlStruct,),
        {"typename": f"unitree_arm::msg::dds_::{name}"},
        lambda space: space.update(__annotations__=fields, __module__=__name__),
    )
    return dataclass(made)


def messages() -> tuple[Any, Any]:
    """Message types of a command and of the measured angles."""
    kinds: Any = need("cyclonedds.idl.types", "robots-go2", "driver d1")
    return message("ArmString_", data_=str), message(
        "PubServoInfo_", **{f"servo{i}_data_": kinds.float32 for i in range(7)}
    )


@dataclass
class D1(Part):
    interface: str
    control: Literal["pose", "joints"] = "pose"
    orientation: tuple[float, float, float] = (0.0, 0.0, 0.0)  # that rx, ry, rz are measured from
    gripper_open: float = 50.0  # degrees of the seventh servo; 0: closed
    signs: tuple[float, float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # of the six others
    joint_speed: float = 1.0  # rad/s that no joint exceeds, near a singular posture too
    hz: float = 10.0  # commands a second to the arm
    domain: int = 0  # of DDS

    def __post_init__(self) -> None:
        check_choices(self, "arm")
        if min(self.gripper_open, self.joint_speed, self.hz) <= 0 or {abs(sign) for sign in self.signs} != {1.0}:
            raise PrismError("arm: gripper_open, joint_speed and hz are above 0, signs are 1 or -1")
        self.state_hz = self.hz
        self._lock = threading.Lock()  # of the model
        self._follower = Follower(self.hz, self._go, self._hold)
        self._measured: tuple[Vector, float] | None = None  # radians, and the gripper's servo in degrees
        self._seq = self.unreachable = 0
        self._null = False  # an angle is not a number
        self._publisher: Any = None
        self._connected = False

    def axes(self) -> tuple[Axis, ...]:
        pose = tuple(Axis(name, "rad" if name[0] == "r" else "m") for name in ("x", "y", "z", "rx", "ry", "rz"))
        joints = tuple(Axis(f"q{i}", "rad") for i in range(6))
        return (*(pose if self.control == "pose" else joints), Axis("gripper", ""))

    def state_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes())

    def addresses(self) -> tuple[str, ...]:
        return (f"d1:{self.interface}:{self.domain}",)

    def connect(self) -> None:
        channel = join(self, self.interface, self.domain)
        self._model = ArmModel(MODEL)
        self._command, angles = messages()
        self._publisher = None if self.read_only else channel.ChannelPublisher(COMMAND, self._command)
        if self._publisher is not None:
            self._publisher.Init()
        self._subscriber = channel.ChannelSubscriber(ANGLES, angles)
        self._subscriber.Init(self._hear, 10)
        self._connected = True
        until = time.monotonic() + FIRST_READING
        while self._measured is None:
            if time.monotonic() > until:
                self.close()
                remedy = "is the arm on, and is interface the right one?"
                raise self.error(f"no angles of the arm on {self.interface} ({ANGLES})", remedy)
            time.sleep(0.01)
        if not self.read_only:
            self._follower.start(self.name)

    def _hear(self, said: Any) -> None:
        angles = np.array([getattr(said, f"servo{i}_data_") for i in range(7)], np.float64)
        joints = np.radians(angles[:6]) * np.array(self.signs)
        self._null = not bool(np.isfinite(angles).all())
        if self._null:
            return
        self._measured = np.array([*joints, angles[6]]), time.monotonic()

    def state(self) -> tuple[Vector, float] | None:
        if (measured := self._measured) is None:
            return None
        numbers, stamp = measured
        return np.array([*self._where(numbers[:6]), 1.0 - 2.0 * numbers[6] / self.gripper_open]), stamp

    def _where(self, joints: Vector) -> Vector:
        """The six numbers that a command has, of joints in radians."""
        if self.control == "joints":
            return joints
        with self._lock:
            pose = self._model.pose(joints)
        return np.array([*pose[:3], *to_reference(pose[3:], np.array(self.orientation))])

    def prepare(self) -> None:
        state, measured = self.state(), self._measured
        if state is None or measured is None:
            raise self.error("it does not say where it is", "connect again")
        self._joints = measured[0][:6]
        self._bounds = self.bounds.around(state[0])
        self._follower.begin(state[0], self.bounds.speed)

    def send(self, target: Vector, due: float) -> None:
        self._follower.send(target, due)

    def _go(self, at: Vector) -> Vector:
        self._bounds.check(at)
        joints, metres, radians = at[:6], 0.0, 0.0
        if self.control == "pose":
            pose = np.array([*at[:3], *from_reference(at[3:6], np.array(self.orientation))])
            with self._lock:
                joints, metres, radians = self._model.solve(pose, self._joints)
        step = joints - self._joints
        share = min(1.0, self.joint_speed / self.hz / max(float(np.abs(step).max()), 1e-9))
        if metres > _REACHED[0] or radians > _REACHED[1]:
            share, self.unreachable = 0.0, self.unreachable + 1
        self._joints = self._joints + share * step
        self._publish(self._servos(at))
        return at if share == 1.0 else np.array([*self._where(self._joints), at[6]])

    def _servos(self, at: Vector) -> Vector:
        """Their commanded positions."""
        return np.array([*self._joints, self.gripper_open * (1.0 - at[6]) / 2.0])

    def _hold(self, at: Vector) -> None:
        told, seen = self._servos(at), self._measured
        if seen is not None and time.monotonic() - seen[1] <= state_age(self.hz):
            told[:6] = seen[0][:6]  # the gripper stays as it was told: where it is, it would let go of what it holds
        self._publish(told)

    def _publish(self, numbers: Vector) -> None:
        if not np.isfinite(numbers).all():
            raise PrismError(f"the command {numbers.tolist()} is not finite: stopped")
        self._seq += 1
        angles = (*np.degrees(numbers[:6] * np.array(self.signs)), numbers[6])
        data = {"mode": _FAST} | {f"angle{i}": round(float(angle), 3) for i, angle in enumerate(angles)}
        said = {"seq": self._seq, "address": 1, "funcode": _MOVE, "data": data}
        self._publisher.Write(self._command(json.dumps(said, separators=(",", ":"))))

    def halt(self) -> None:
        self._follower.halt()

    def stop(self) -> None:
        self._follower.stop()

    def close(self) -> None:
        self._follower.close()
        if self._connected:
            self._connected = False
            if self._publisher is not None:
                self._publisher.Close()
            self._subscriber.Close()
        self._measured = None

    def health(self) -> Health:
        if self._null:
            return Health(False, f"an angle of the arm on {self.interface} is not a number: is a servo unplugged?")
        if self._measured is None or time.monotonic() - self._measured[1] > _SILENT:
            return Health(False, f"no angles of the arm on {self.interface}: look at the cable, connect again")
        return Health(not self._follower.fault, self._follower.fault)
