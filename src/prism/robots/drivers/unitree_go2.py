"""The Unitree Go2's legs, through unitree_sdk2py: vx, vy (m/s) and vyaw (rad/s) of the body, in sport mode.

A velocity holds until one period after its command was due; then the robot stands. `Damp` is never called by
itself: it lets the legs go.
"""

from __future__ import annotations

import contextlib
import io
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism.errors import need
from prism.robots.contract import Health
from prism.robots.drivers.parts import FIRST_READING, Axis, Part, Vector
from prism.robots.drivers.talker import Talker

_SILENT = 1.0  # seconds without news of the robot


def join(part: Part, interface: str, domain: int) -> Any:
    """unitree_sdk2py's channels, on the network interface that the robot is at."""
    channel: Any = need("unitree_sdk2py.core.channel", "robots-go2", f"driver of {part.name}")
    there = [name for _, name in socket.if_nameindex()]
    if interface not in there:
        raise part.error(f"interface '{interface}' is not there", f"there are {', '.join(there)} (`ip link`)")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # it prints why, and raises something else
            channel.ChannelFactoryInitialize(domain, interface)
    except Exception as error:
        raise part.error(said.getvalue().strip() or error, f"is interface '{interface}' up, with an address?") from None
    return channel


@dataclass
class Go2(Part):
    interface: str  # the network interface that the robot is at, as eth0
    hz: float = 20.0  # how often a velocity is repeated
    domain: int = 0  # of DDS

    state_hz = 50.0

    def __post_init__(self) -> None:
        self._talker = Talker(self.hz, self._say)
        self._subscriber: Any = None
        self._state: tuple[Vector, float] | None = None
        self._velocity, self._until, self._moving = (0.0, 0.0, 0.0), 0.0, False
        self._code = self._error_code = 0

    def axes(self) -> tuple[Axis, ...]:
        return (Axis("vx", "m"), Axis("vy", "m"), Axis("vyaw", "rad"))

    def state_names(self) -> tuple[str, ...]:
        return ("base_vx", "base_vy", "base_vyaw", "base_roll", "base_pitch", "base_yaw", "base_height")

    def state(self) -> tuple[Vector, float] | None:
        return self._state

    def addresses(self) -> tuple[str, ...]:
        return (f"go2:{self.interface}:{self.domain}",)

    def connect(self) -> None:
        channel = join(self, self.interface, self.domain)
        sport: Any = need("unitree_sdk2py.go2.sport.sport_client", "robots-go2", "driver go2")
        idl: Any = need("unitree_sdk2py.idl.unitree_go.msg.dds_", "robots-go2", "driver go2")
        self._subscriber = channel.ChannelSubscriber("rt/sportmodestate", idl.SportModeState_)
        self._subscriber.Init(self._hear, 10)
        if not self.read_only:
            self._client = sport.SportClient()
            self._client.SetTimeout(0.3)  # seconds that an answer may take
            self._client.Init()
        until = time.monotonic() + FIRST_READING
        while self._state is None and time.monotonic() < until:
            time.sleep(0.01)
        if self._state is None:
            self.close()
            raise self.error(
                f"no message from the robot on {self.interface} (rt/sportmodestate)",
                "is it on, is the cable in, has this computer an address in 192.168.123.x?",
            )
        if not self.read_only:
            self._talker.start(self.name)

    def _hear(self, said: Any) -> None:
        rpy = said.imu_state.rpy
        numbers = (said.velocity[0], said.velocity[1], said.yaw_speed, rpy[0], rpy[1], rpy[2], said.body_height)
        self._state = np.array(numbers, np.float64), time.monotonic()

    def _say(self) -> None:
        if not self._talker.stopping and time.monotonic() < self._until:
            self.bounds.check(np.array(self._velocity))
            self._code, self._moving = self._client.Move(*self._velocity), True
        elif self._moving or (self._talker.stopping and not self._talker.standing.is_set()):
            self._code = self._client.StopMove()
            self._moving = self._code != 0  # else again
            if self._talker.stopping and self._code == 0:
                self._talker.standing.set()

    def prepare(self) -> None:
        self._until = 0.0
        self._talker.prepare()

    def send(self, target: Vector, due: float) -> None:
        self._velocity = (float(target[0]), float(target[1]), float(target[2]))
        self._until = due + 1.0 / max(self.rate, 1.0)
        self._talker.wake()

    def halt(self) -> None:
        self._talker.halt()

    def stop(self) -> None:
        self._talker.stop()

    def close(self) -> None:
        self._talker.close()
        if self._subscriber is not None:
            self._subscriber.Close()
        self._subscriber = self._state = None
        self._talker.standing.clear()

    def health(self) -> Health:
        if self._state is None or time.monotonic() - self._state[1] > _SILENT:
            return Health(False, f"no message from the robot on {self.interface}: look at the cable, connect again")
        if self._talker.fault:
            return Health(False, f"{self._talker.fault}: look at the cable, connect again")
        if self._code != 0:
            return Health(False, f"the robot refuses to move or to stop (code {self._code}): is it in sport mode?")
        return Health()
