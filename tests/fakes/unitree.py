"""A Go2 with a D1 arm on DDS, at this computer's loopback: the real unitree_sdk2py and cyclonedds are the other side.

One a process: unitree_sdk2py has one connection, and its servers do not end. `calls`: (time, what, numbers).
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from typing import Any

import numpy as np

DOMAIN = 1 + os.getpid() % 200  # processes beside this one have others
DAMP, STOP_MOVE, MOVE = 1001, 1003, 1008
SERVO_SPEED = 60.0  # degrees a second


class Go2WithD1:
    def __init__(self) -> None:
        from unitree_sdk2py.core.channel import ChannelFactoryInitialize, ChannelPublisher, ChannelSubscriber
        from unitree_sdk2py.idl.default import unitree_go_msg_dds__SportModeState_ as blank
        from unitree_sdk2py.idl.unitree_go.msg.dds_ import SportModeState_
        from unitree_sdk2py.rpc.server import Server

        from prism.robots.drivers.d1 import ANGLES, COMMAND, messages

        ChannelFactoryInitialize(DOMAIN, "lo")
        self.calls: list[tuple[float, str, tuple[float, ...]]] = []
        self.velocity, self._moved = np.zeros(3), 0.0
        self.angles, self._target = np.array([0.0, -30.0, 30.0, 0.0, 0.0, 0.0, 25.0]), np.zeros(7)
        self._target[:] = self.angles
        self.silent = False  # nothing is heard of it
        self.apart = 0.0  # degrees that the fingers are held apart by what they squeeze
        self.refuses = 0  # the code that it answers
        robot = self

        class Sport(Server):  # type: ignore[misc]
            def Init(self) -> None:  # noqa: N802
                self._SetApiVersion("1.0.0.1")
                for number in (DAMP, STOP_MOVE, MOVE):
                    self._RegistHandler(number, functools.partial(robot._obey, number), 0)

        self._server = Sport("sport")
        self._server.Init()
        self._server.Start(False)
        _, self._angles_type = messages()
        self._state_type = blank
        self._sport = ChannelPublisher("rt/sportmodestate", SportModeState_)
        self._servo = ChannelPublisher(ANGLES, self._angles_type)
        for publisher in (self._sport, self._servo):
            publisher.Init()
        self._commands = ChannelSubscriber(COMMAND, messages()[0])
        self._commands.Init(self._hear, 10)
        threading.Thread(target=self._live, daemon=True).start()

    def _obey(self, number: int, parameter: str) -> tuple[int, str]:
        if not self.refuses:
            words = json.loads(parameter)
            moves = number == MOVE
            self.velocity[:] = [words["x"], words["y"], words["z"]] if moves else 0.0
            self._moved = time.monotonic()
            what = {MOVE: "move", STOP_MOVE: "stop", DAMP: "damp"}[number]
            self.calls.append((time.monotonic(), what, tuple(self.velocity)))
        return self.refuses, ""

    def _hear(self, said: Any) -> None:
        words = json.loads(said.data_)
        assert (words["address"], words["funcode"]) == (1, 2), "all angles at once"
        angles = [words["data"][f"angle{i}"] for i in range(7)]
        self._target = np.clip(angles, [-135, -90, -90, -135, -90, -135, 0], [135, 90, 90, 135, 90, 135, 65])
        self.calls.append((time.monotonic(), "angles", tuple(angles)))

    def _live(self) -> None:
        period = 0.02
        while True:
            time.sleep(period)
            if time.monotonic() - self._moved > 1.0:
                self.velocity[:] = 0.0
            self.angles = self.angles + np.clip(self._target - self.angles, -SERVO_SPEED * period, SERVO_SPEED * period)
            self.angles[6] = max(self.angles[6], self.apart)
            if self.silent:
                continue
            state = self._state_type()
            state.velocity[0], state.velocity[1], state.yaw_speed = map(float, self.velocity)
            state.body_height = 0.3
            self._sport.Write(state)
            self._servo.Write(self._angles_type(*map(float, self.angles)))


@functools.cache
def go2_with_d1() -> Go2WithD1:
    return Go2WithD1()
