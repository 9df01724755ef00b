"""Robotiq 2F and Hand-E grippers, as the URCap on a UR controller offers them: lines of text on port 63352.

A command is -1 (open) to 1 (closed), and so is the position that is measured; the gripper counts 0 to 255. It is asked
`hz` times a second, and told where to go in between. A stop leaves the fingers where they are, with what they hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prism.errors import PrismError
from prism.robots.claim import host_address
from prism.robots.contract import Array, Health
from prism.robots.drivers.parts import Axis, Stream, Vector, reach

PORT = 63352
_ACTIVE = 3  # STA: activation is complete
_SILENT = 1.0  # seconds
_FAULTS = range(8, 16)  # FLT: of these the gripper must be activated again


@dataclass
class Robotiq(Stream):
    host: str = ""  # default: the arm's
    port: int = PORT
    speed: int = 255  # 0 to 255
    force: int = 100  # 0 to 255
    hz: float = 30.0

    def __post_init__(self) -> None:
        super().__init__()
        for key, high in (("speed", 255), ("force", 255)):
            if not 0 <= getattr(self, key) <= high:
                raise PrismError(f"gripper.{key} = {getattr(self, key)} is out of range; use 0 to {high}")
        self.state_hz = self.hz
        self._target: int | None = None  # counts; None: nothing new
        self._stopping = self._stopped = False
        self._state: tuple[Vector, float] | None = None
        self._fault = 0

    def axes(self) -> tuple[Axis, ...]:
        return (Axis("gripper", ""),)

    def addresses(self) -> tuple[str, ...]:
        return (f"robotiq:{host_address(self.host)}:{self.port}",)

    def state_names(self) -> tuple[str, ...]:
        return ("gripper",)

    def state(self) -> tuple[Vector, float] | None:
        return self._state

    def open(self) -> None:
        self._socket = reach(self, self.host, self.port, "gripper's URCap")
        self._lines = self._socket.makefile("r", encoding="ascii")
        if self._ask("STA") != _ACTIVE:
            remedy = "activate it on the pendant (it moves when it does)"
            raise self.error("the gripper is not activated", remedy)

    def shut(self) -> None:
        self._lines.close()
        self._socket.close()

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        """Tells it what is new, and asks where it is."""
        if self._stopping and not self._stopped and not self.read_only:
            self._say("SET GTO 0")
            self._stopped = True
        target, self._target = self._target, None
        if target is not None and not self._stopping:
            self._say(f"SET POS {target} SPE {self.speed} FOR {self.force} GTO 1")
        counts = self._ask("POS")
        self._state = np.array([2.0 * counts / 255.0 - 1.0]), time.monotonic()
        self._fault = self._ask("FLT")
        time.sleep(1.0 / self.hz)
        return {}

    def _say(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())
        if (answer := self._lines.readline().strip()) != "ack":
            raise OSError(f"the gripper answers {answer!r} to {line!r}")

    def _ask(self, what: str) -> int:
        self._socket.sendall(f"GET {what}\n".encode())
        name, _, value = self._lines.readline().strip().partition(" ")
        if name != what or not value.lstrip("-").isdigit():
            raise OSError(f"the gripper answers {name!r} to GET {what}")
        return int(value)

    def prepare(self) -> None:
        self._target, self._stopping, self._stopped = None, False, False

    def send(self, target: Vector, due: float) -> None:
        if not np.isfinite(target).all():
            raise self.error(f"the command {target.tolist()} is not finite", "stopped")
        self._target = round(255.0 * (float(np.clip(target[0], -1.0, 1.0)) + 1.0) / 2.0)

    def halt(self) -> None:
        self._stopping = True

    def health(self) -> Health:
        if self._state is None or time.monotonic() - self._state[1] > _SILENT:
            return Health(False, f"the gripper at {self.host}:{self.port} does not answer: look at its URCap")
        if self._fault in _FAULTS:
            return Health(False, f"the gripper reports fault {self._fault}: activate it again on the pendant")
        return Health()
