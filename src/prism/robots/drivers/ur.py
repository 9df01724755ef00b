"""Universal Robots arms (CB3, e-Series) through ur_rtde. The servo itself is a process of its own: ur_servo.py.

`control = "pose"`: x, y, z of the tool's centre point in the base's frame (m), and rx, ry, rz: the rotation vector from
`orientation` to the tool's orientation, in the base's axes (rad). "joints": q0 to q5 (rad).
`force`: the wrench at the tool as the controller estimates it, N and Nm; zeroed at the beginning of an episode.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Literal

import numpy as np

from prism.errors import PrismError, check_choices, need
from prism.robots.claim import host_address
from prism.robots.contract import Health, Reading
from prism.robots.drivers.parts import STATE_AGE, Axis, Part, Vector, reach
from prism.robots.drivers.ur_servo import EMERGENCY, NO_PROGRAM, NOT_SENT, PROTECTIVE, Board, ServoConfig, serve
from prism.sensors import SensorSpec

DASHBOARD, RTDE = 29999, 30004  # ports
_CONNECTS, _PREPARES = 30.0, 6.0  # seconds
_ACKNOWLEDGES = 0.06  # seconds that the servo has to stop, before the controller is asked to
_SILENT = 1.0  # seconds without news of the controller
_REASONS = {
    PROTECTIVE: "protective stop: clear it on the pendant",
    EMERGENCY: "emergency stop: release it, and start the robot on the pendant",
    NOT_SENT: "a target was beyond the limits, or not a number: stopped",
    NO_PROGRAM: "the controller ended the control program: look at its log on the pendant",
}


@dataclass
class UR(Part):
    host: str
    control: Literal["pose", "joints"] = "pose"
    frequency: float = 125.0  # Hz; e-Series: up to 500
    orientation: tuple[float, float, float] = (math.pi, 0.0, 0.0)  # tool down
    lookahead: float = 0.1  # s, 0.03 to 0.2: smoother, and later
    gain: float = 300.0  # 100 to 2000: stiffer
    zero_force: bool = True
    watchdog: float = 10.0  # Hz: the controller stops the arm where this computer is slower than that

    def __post_init__(self) -> None:
        check_choices(self, "arm")
        for key, low, high in (
            ("frequency", 10, 500),
            ("lookahead", 0.03, 0.2),
            ("gain", 100, 2000),
            ("watchdog", 1, 50),
        ):
            if not low <= (value := getattr(self, key)) <= high:
                raise PrismError(f"arm.{key} = {value:g} is out of range; use {low:g} to {high:g}")
        self.state_hz = min(self.frequency, 125.0)
        self._process: SpawnProcess | None = None

    def axes(self) -> tuple[Axis, ...]:
        if self.control == "joints":
            return tuple(Axis(f"q{i}", "rad") for i in range(6))
        return tuple(Axis(name, "rad" if name[0] == "r" else "m") for name in ("x", "y", "z", "rx", "ry", "rz"))

    def state_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes())

    def sensors(self) -> tuple[SensorSpec, ...]:
        names = ("fx", "fy", "fz", "tx", "ty", "tz")
        return (SensorSpec("force", "vector", (6,), fps=self.state_hz, max_age=STATE_AGE, names=names),)

    def addresses(self) -> tuple[str, ...]:
        return (f"ur:{host_address(self.host)}",)

    def connect(self) -> None:
        need("rtde_control", "robots-ur", "driver ur")
        for port in (RTDE, DASHBOARD):
            reach(self, self.host, port, "robot's controller").close()
        context = multiprocessing.get_context("spawn")
        self._board = Board(context)
        self._board.set("stop", 1.0)
        ours, theirs = context.Pipe(duplex=False)
        config = ServoConfig(
            self.host, self.frequency, self.control, self.bounds, self.orientation, self.lookahead, self.gain,
            self.zero_force, self.watchdog, self.read_only,
        )  # fmt: skip
        self._process = context.Process(target=serve, args=(config, self._board, theirs), name="ur-servo")
        self._process.start()
        theirs.close()
        try:
            said = ours.recv() if ours.poll(_CONNECTS) else f"no answer within {_CONNECTS:g} s"
        except EOFError:
            said = "ur_rtde ended without a message"
        if said:
            self._end_process()
            remedy = "the robot must be on, its brakes released, and in remote control (the pendant's upper right)"
            raise self.error(f"{self.host}: {said}", remedy)

    def prepare(self) -> None:
        board, number = self._board, self._board.get("prepare") + 1
        board.set("stopped", 0.0)
        board.set("stop", 0.0)
        board.set("prepare", number)
        if not self._wait("prepared", number, _PREPARES) or not self.health().ok:
            self.stop()
            raise self.error("it takes no commands", self.health().reason or "connect again")

    def _wait(self, name: str, value: float, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._board.get(name) != value:
            if time.monotonic() > until or not self._running():
                return False
            time.sleep(0.001)
        return True

    def _running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def state(self) -> tuple[Vector, float] | None:
        stamp, (value,) = self._board.read("stamp", self.control)
        return value, stamp

    def read(self) -> dict[str, Reading]:
        stamp, (force,) = self._board.read("stamp", "force")
        return {"force": Reading(force.astype(np.float32), stamp)}

    def send(self, target: Vector, due: float) -> None:
        self._board.write({"seq": self._board.get("seq") + 1, "due": due}, {"goal": target})

    def halt(self) -> None:
        if self._process is not None and not self.read_only:
            self._board.set("stop", 1.0)

    def stop(self) -> None:
        self.halt()
        if self._process is not None and not self.read_only and not self._wait("stopped", 1.0, _ACKNOWLEDGES):
            with contextlib.suppress(PrismError, OSError), reach(self, self.host, DASHBOARD, "controller", 0.03) as to:
                to.sendall(b"stop\n")

    def close(self) -> None:
        if self._process is not None:
            self._board.set("close", 1.0)
            self._process.join(4.0)
            self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
            self._process = None

    def health(self) -> Health:
        if not self._running() or time.monotonic() - self._board.get("stamp") > _SILENT:
            return Health(False, f"the connection to {self.host} is lost: look at cable and controller, connect again")
        status = self._board.get("status")
        return Health(False, _REASONS[status]) if status in _REASONS else Health()
