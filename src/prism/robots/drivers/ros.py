"""ROS 2 topics through rosbridge, JSON over a websocket: this computer needs no ROS.

On the robot: ros2 launch rosbridge_server rosbridge_websocket_launch.xml

RosArm     commands by one topic of numbers (std_msgs/msg/Float64MultiArray, as ros2_control's forward controllers take
           them), and reads positions of the same joints, by name, from sensor_msgs/msg/JointState
RosTopic   one sensor: pictures, depth, or the numbers of any type that `prism data` reads from bags
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from prism.data.formats.rosmsg import FIELDS, IMAGES, decode_image
from prism.errors import PrismError, need
from prism.robots.claim import host_address
from prism.robots.contract import Array, Health
from prism.robots.drivers.parts import Axis, Stream, Vector, state_age
from prism.robots.drivers.waypoints import Follower
from prism.sensors import SensorSpec

_PATIENCE = 2.0  # seconds that a message may take
_NUMBERS = "std_msgs/msg/Float64MultiArray"


class Bridge:
    """A connection to rosbridge."""

    def __init__(self, url: str, what: str) -> None:
        client: Any = need("websockets.sync.client", "serve", what)
        self._stack = ExitStack()
        made = client.connect(url, open_timeout=3.0, close_timeout=1.0, max_size=64 * 2**20, max_queue=4)
        self._socket = self._stack.enter_context(made)

    def subscribe(self, topic: str, kind: str) -> None:
        self._send({"op": "subscribe", "topic": topic, "type": kind, "queue_length": 1})

    def advertise(self, topic: str, kind: str) -> None:
        self._send({"op": "advertise", "topic": topic, "type": kind})

    def publish(self, topic: str, message: Mapping[str, Any]) -> None:
        self._send({"op": "publish", "topic": topic, "msg": message})

    def next(self) -> SimpleNamespace:
        """The next message; what rosbridge complains about is an OSError."""
        while True:
            said = json.loads(self._socket.recv(timeout=_PATIENCE), object_hook=lambda one: SimpleNamespace(**one))
            if said.op == "publish":
                message: SimpleNamespace = said.msg
                return message
            if said.op == "status" and said.level == "error":
                raise OSError(f"rosbridge says: {said.msg}")

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.send(json.dumps(message))

    def close(self) -> None:
        self._stack.close()


class StampClock:
    """When a message was measured, on this computer's clock.

    A header's stamp is of the robot's clock. The difference between both clocks is that of the message that was on its
    way the shortest; a backlog is longer on its way, and its messages look as old as they are. Clocks drift apart: the
    difference may grow by DRIFT a second. A delay that was there from the first message on cannot be told from a
    difference of the clocks. Messages without a stamp count from their arrival.
    """

    DRIFT = 5e-4

    def __init__(self) -> None:
        self._difference, self._arrived = math.inf, -math.inf

    def here(self, message: Any, arrived: float) -> float:
        stamp = getattr(getattr(message, "header", None), "stamp", None)
        ros1 = getattr(stamp, "secs", 0), getattr(stamp, "nsecs", 0)
        told = float(getattr(stamp, "sec", ros1[0])) + 1e-9 * float(getattr(stamp, "nanosec", ros1[1]))
        if not told or not math.isfinite(told):
            return arrived
        grown = self._difference + self.DRIFT * max(0.0, arrived - self._arrived)
        self._difference, self._arrived = min(arrived - told, grown), arrived
        return min(told + self._difference, arrived)


@dataclass
class RosTopic(Stream):
    sensor: str  # default: the table's name
    topic: str
    type: str
    shape: tuple[int, ...]  # of one message: (height, width, 3), (height, width) of depth, (numbers,)
    fps: float
    url: str = "ws://127.0.0.1:9090"

    remedy = "does `ros2 topic hz` show it, is rosbridge running, and is url right?"

    def __post_init__(self) -> None:
        super().__init__()
        if self.type not in (*IMAGES, *FIELDS):
            raise PrismError(f"sensors.{self.sensor}: type '{self.type}' is not read; {', '.join((*IMAGES, *FIELDS))}")

    def sensors(self) -> tuple[SensorSpec, ...]:
        kind = "vector" if self.type not in IMAGES else "rgb" if len(self.shape) == 3 else "depth"
        return (SensorSpec(self.sensor, kind, self.shape, fps=self.fps),)

    def open(self) -> None:
        self._bridge, self._clock = Bridge(self.url, "driver ros"), StampClock()
        self._bridge.subscribe(self.topic, self.type)

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        message = self._bridge.next()
        stamp = self._clock.here(message, time.monotonic())
        if self.type in IMAGES:
            message.data = np.frombuffer(base64.b64decode(message.data), np.uint8)  # uint8[] is base64 in JSON
            picture = decode_image(message)
            if picture.dtype == np.uint16:
                picture = picture.astype(np.float32) / np.float32(1000.0)  # millimetres
            return {self.sensor: (picture, stamp)}
        return {self.sensor: (FIELDS[self.type][0].get(message).astype(np.float32), stamp)}

    def shut(self) -> None:
        self._bridge.close()


@dataclass
class RosArm(Stream):
    joints: tuple[str, ...]  # their names in the joint states; the order of the command's numbers
    command_topic: str
    state_topic: str = "/joint_states"
    units: tuple[str, ...] = ()  # default: rad
    hz: float = 50.0  # of commands
    fps: float = 50.0  # of the joint states
    url: str = "ws://127.0.0.1:9090"

    remedy = RosTopic.remedy

    def __post_init__(self) -> None:
        super().__init__()
        if not self.joints or len(self.units) not in (0, len(self.joints)) or min(self.hz, self.fps) <= 0:
            raise PrismError("arm: name its joints, units are one each or none, hz and fps above 0")
        self.state_hz = self.fps
        self._state: tuple[Vector, float] | None = None
        self._null = ""  # a joint without a position
        self._follower = Follower(self.hz, self._go, self._hold)

    def axes(self) -> tuple[Axis, ...]:
        units = self.units or ("rad",) * len(self.joints)
        return tuple(Axis(name, unit) for name, unit in zip(self.joints, units, strict=True))

    def state_names(self) -> tuple[str, ...]:
        return self.joints

    def addresses(self) -> tuple[str, ...]:
        parts = urlsplit(self.url)
        return (f"ros:{host_address(parts.hostname or '')}:{parts.port}:{self.command_topic}",)

    def open(self) -> None:
        self._bridge = Bridge(self.url, "driver ros")
        if not self.read_only:
            self._bridge.advertise(self.command_topic, _NUMBERS)
        self._clock = StampClock()
        self._bridge.subscribe(self.state_topic, "sensor_msgs/msg/JointState")

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        said = self._bridge.next()
        where = dict(zip(said.name, said.position, strict=False))
        if missing := [name for name in self.joints if name not in where]:
            raise self.error(f"{self.state_topic} has no joint '{missing[0]}'", f"it has {', '.join(said.name)}")
        stamp = self._clock.here(said, time.monotonic())
        at = np.array([where[name] for name in self.joints], np.float64)  # null is NaN
        self._null = next((name for name, one in zip(self.joints, at, strict=True) if not np.isfinite(one)), "")
        if not self._null and (self._state is None or stamp > self._state[1]):
            self._state = at, stamp
        return {}

    def shut(self) -> None:
        self._bridge.close()

    def connect(self) -> None:
        super().connect()
        if self._null:
            self.close()
            raise self.error(*self._not_a_number())
        if not self.read_only:
            self._follower.start(self.name)

    def close(self) -> None:
        self._follower.close()
        super().close()

    def state(self) -> tuple[Vector, float] | None:
        return self._state

    def prepare(self) -> None:
        if self._null or self._state is None:
            raise self.error(*self._not_a_number())
        self._bounds = self.bounds.around(self._state[0])
        self._follower.begin(self._state[0], self.bounds.speed)

    def send(self, target: Vector, due: float) -> None:
        self._follower.send(target, due)

    def _go(self, at: Vector) -> Vector:
        self._bounds.check(at)
        self._publish(at)
        return at

    def _publish(self, at: Vector) -> None:
        self._bridge.publish(self.command_topic, {"layout": {"dim": [], "data_offset": 0}, "data": at.tolist()})

    def _hold(self, at: Vector) -> None:
        state = self._state  # its numbers are finite, and so are those of the follower
        self._publish(at if state is None or time.monotonic() - state[1] > state_age(self.fps) else state[0])

    def _not_a_number(self) -> tuple[str, str]:
        return f"{self.state_topic}: joint '{self._null}' is not a number", "is its encoder connected?"

    def halt(self) -> None:
        self._follower.halt()

    def stop(self) -> None:
        self._follower.stop()

    def health(self) -> Health:
        if self._null:
            return Health(False, self._not_a_number()[0])
        if self._state is None or time.monotonic() - self._state[1] > 1.0:
            return Health(False, f"no message on {self.state_topic}: {self.remedy}")
        return Health(not self._follower.fault, self._follower.fault)
