"""A UR controller on loopback, as far as ur_rtde needs one: RTDE (30004), scripts (30003), dashboard (29999).

RTDE is a protocol of packages: size (2 bytes), type (1 byte), payload, all big-endian. The client asks for a protocol
version, the controller's version, outputs at a frequency, inputs, and the start; then the controller sends packages.
The control client also uploads a script, which reads a command's number and arguments from input registers and answers
in output_int_register_0: 1 ready, 2 done. This is what that script does; its text is not run.

The arm is an integrator: the pose, or the joints, follow the servo's target with a lag and no faster than a cap.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VERSION = (5, 12, 4, 0)
NOTHING, SEEN, SERVOJ, SERVOL, SERVO_STOP, SET_WATCHDOG, STOP_SCRIPT = 0, -1, 11, 24, 16, 35, 255
AT_ONCE = {6, 9, 10, SERVOJ, SERVOL, 25, 26, 27, 38, 58, 66, 67, 68, 69, 70, 71}  # commands that nobody waits for
LOOKAHEAD = 9  # input_double_register of a servo command
SPEED, JOINT_SPEED = 1.0, math.pi  # m/s, rad/s: the controller's caps
_FORMATS = {"DOUBLE": "d", "VECTOR6D": "6d", "VECTOR3D": "3d", "VECTOR6INT32": "6i", "INT32": "i", "UINT32": "I",
            "UINT64": "Q", "UINT8": "B", "BOOL": "?"}  # fmt: skip
_TYPES = (  # of variables by their names, the first that fits
    (r"(in|out)put_int_register_\d+|robot_mode|safety_mode", "INT32"),
    (r"(in|out)put_double_register_\d+|.*speed.*scaling|speed_slider_fraction|timestamp|payload|.*momentum|"
     r".*voltage|.*current_robot|standard_analog_.*|tool_analog.*|tool_temperature|actual_execution_time|"
     r"tcp_force_scalar|actual_robot_.*|actual_main_voltage", "DOUBLE"),
    (r"joint_mode", "VECTOR6INT32"),
    (r".*status_bits|.*status|runtime_state|.*bit_registers.*|.*_types|.*mode|script_control_line", "UINT32"),
    (r"actual_tool_accelerometer|payload_cog|elbow_.*", "VECTOR3D"),
    (r"actual_digital_.*_bits", "UINT64"),
)  # fmt: skip


def _type(name: str) -> str:
    return next((kind for pattern, kind in _TYPES if re.fullmatch(pattern, name)), "VECTOR6D")


def _names(payload: bytes) -> tuple[str, ...]:
    return tuple(name for name in payload.decode().split(",") if name)  # ur_rtde ends its list with a comma


@dataclass
class Controller:
    """`events`: (time.monotonic, what, numbers) of everything that concerns motion, in order."""

    host: str = "127.0.0.1"
    pose: np.ndarray = field(default_factory=lambda: np.array([0.4, 0.0, 0.3, math.pi, 0.0, 0.0]))
    joints: np.ndarray = field(default_factory=lambda: np.array([0.0, -1.57, 1.57, -1.57, -1.57, 0.0]))
    force: np.ndarray = field(default_factory=lambda: np.zeros(6))
    remote: bool = True  # the switch on the teach pendant
    protective_stop: bool = False

    def __post_init__(self) -> None:
        self.events: list[tuple[float, str, tuple[float, ...]]] = []
        self.running = False  # the control script
        self.watchdog = 0.0  # Hz; 0: none
        self.fastest = 0.0  # m/s that the hand ever had
        self._ins: dict[str, Any] = {}
        self._ready, self._executing = 0, False
        self._servo: tuple[str, np.ndarray, float] | None = None
        self._fed = self._at = time.monotonic()
        self._lock = threading.RLock()
        self._alive = threading.Event()
        self._alive.set()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        ports: tuple[tuple[int, Callable[[socket.socket], None]], ...] = (
            (30004, self._rtde), (30003, self._script), (29999, self._dashboard))  # fmt: skip
        self._listeners = [self._listen(port, serve) for port, serve in ports]

    def close(self) -> None:
        self._alive.clear()
        for one in (*self._listeners, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(2.0)

    def cut(self) -> None:
        """The cable is pulled."""
        self.close()

    def count(self, what: str) -> int:
        return sum(name == what for _, name, _ in list(self.events))

    # -- sockets

    def _listen(self, port: int, serve: Callable[[socket.socket], None]) -> socket.socket:
        listener = socket.create_server((self.host, port))

        def accept() -> None:
            while self._alive.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(connection)
                self._start(lambda one=connection: self._until_closed(serve, one))

        self._start(accept)
        return listener

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _until_closed(self, serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
        try:
            serve(connection)
        except (OSError, EOFError):
            pass
        finally:
            connection.close()

    def _dashboard(self, connection: socket.socket) -> None:
        connection.sendall(b"Connected: Universal Robots Dashboard Server\n")
        for line in connection.makefile("r", encoding="ascii"):
            word = line.strip().lower()
            answers = {
                "polyscopeversion": f"URSoftware {VERSION[0]}.{VERSION[1]}.{VERSION[2]}.1101661 (Jun 15 2022)",
                "get serial number": "20225500000",
                "is in remote control": "true" if self.remote else "false",
            }
            if word == "stop":
                with self._lock:
                    self._end("dashboard stop")
                answers["stop"] = "Stopped"
            connection.sendall((answers.get(word, f"could not understand: '{word}'") + "\n").encode())

    def _script(self, connection: socket.socket) -> None:
        text = ""
        while chunk := connection.recv(65536):
            text += chunk.decode(errors="replace")
            if "def rtde_control" in text and text.rstrip().endswith("end"):
                with self._lock:
                    self.running, self._ready, self._executing, text = not self.protective_stop, 0, False, ""
                    self._servo, self.watchdog = None, 0.0
                    self.events.append((time.monotonic(), "script", ()))

    def _rtde(self, connection: socket.socket) -> None:
        inputs: dict[int, tuple[str, ...]] = {}
        outputs: tuple[str, ...] = ()
        frequency, sending = 500.0, threading.Lock()

        def reply(kind: int, payload: bytes) -> None:
            with sending:
                connection.sendall(struct.pack(">HB", 3 + len(payload), kind) + payload)

        while True:
            size, kind = struct.unpack(">HB", _exactly(connection, 3))
            payload = _exactly(connection, size - 3)
            if kind == ord("V"):
                reply(kind, struct.pack(">B", struct.unpack(">H", payload)[0] == 2))
            elif kind == ord("v"):
                reply(kind, struct.pack(">4I", *VERSION))
            elif kind == ord("O"):
                frequency, outputs = struct.unpack(">d", payload[:8])[0], _names(payload[8:])
                reply(kind, struct.pack(">B", 1) + ",".join(map(_type, outputs)).encode())
            elif kind == ord("I"):
                names = _names(payload)
                inputs[len(inputs) + 1] = names
                reply(kind, struct.pack(">B", len(inputs)) + ",".join(map(_type, names)).encode())
            elif kind == ord("S"):
                reply(kind, b"\1")
                self._start(lambda names=outputs, hz=frequency: self._until_closed(
                    lambda _: self._publish(reply, names, hz), connection))  # fmt: skip
            elif kind == ord("P"):
                reply(kind, b"\1")
            elif kind == ord("U"):
                names = inputs[payload[0]]
                values = struct.unpack(">" + "".join(_FORMATS[_type(name)] for name in names), payload[1:])
                with self._lock:
                    self._ins.update(zip(names, values, strict=False))
                    self._fed = time.monotonic()
                    self._obey()

    def _publish(self, reply: Callable[[int, bytes], None], names: tuple[str, ...], hz: float) -> None:
        due = time.monotonic()
        while self._alive.is_set():
            with self._lock:
                self._move()
                self._obey()
                payload = b"\1" + b"".join(self._packed(name) for name in names)
            reply(ord("U"), payload)
            due = max(due + 1.0 / hz, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))

    # -- the script, and the arm

    def _packed(self, name: str) -> bytes:
        kind = _type(name)
        values: Any = {
            "timestamp": (time.monotonic(),),
            "actual_q": self.joints,
            "target_q": self.joints,
            "actual_TCP_pose": self.pose,
            "target_TCP_pose": self.pose,
            "actual_TCP_force": self.force,
            "robot_mode": (7,),
            "safety_mode": (3 if self.protective_stop else 1,),
            "robot_status_bits": (1 | 2 * self.running,),
            "safety_status_bits": (4 if self.protective_stop else 1,),
            "runtime_state": (2 if self.running else 1,),
            "output_int_register_0": (self._ready,),
        }.get(name)
        code = _FORMATS[kind]
        if values is None:
            values = (0,) * (int(code[0]) if code[0].isdigit() else 1)
        return struct.pack(">" + code, *values)

    def _obey(self) -> None:
        command = int(self._ins.get("input_int_register_0", 0))
        if not self.running:
            self._ready = 0
        elif command in AT_ONCE:
            if command in (SERVOJ, SERVOL):
                numbers = tuple(float(self._ins[f"input_double_register_{i}"]) for i in range(11))
                name = "servoj" if command == SERVOJ else "servol"
                self._servo = (name, np.array(numbers[:6]), max(numbers[LOOKAHEAD], 0.03))
                self.events.append((time.monotonic(), name, numbers))
                self._ins["input_int_register_0"] = SEEN
            self._ready = 1
        elif command == NOTHING:
            self._executing, self._ready = False, 1
        elif command != SEEN and not self._executing:
            self._executing = True
            self._process(command)
            self._ready = 2

    def _process(self, command: int) -> None:
        if command == SERVO_STOP:
            self._servo = None
            self.events.append((time.monotonic(), "servo stop", ()))
        elif command == SET_WATCHDOG:
            self.watchdog = float(self._ins.get("input_double_register_0", 0.0))
            self.events.append((time.monotonic(), "set watchdog", (self.watchdog,)))
        elif command == STOP_SCRIPT:
            self._end("script ended")
        else:
            self.events.append((time.monotonic(), f"command {command}", ()))

    def _end(self, why: str) -> None:
        self.running, self._servo, self._ready = False, None, 0
        self.events.append((time.monotonic(), why, ()))

    def _move(self) -> None:
        now = time.monotonic()
        dt, self._at = now - self._at, now
        if self.protective_stop and self.running:
            self._end("protective stop")
        if self.running and self.watchdog and now - self._fed > 1.0 / self.watchdog:
            self._end("watchdog")
        if self._servo is None:
            return
        name, target, lag = self._servo
        at, cap = (self.joints, JOINT_SPEED) if name == "servoj" else (self.pose, SPEED)
        step = (target - at) * min(1.0, dt / lag)
        most = float(np.abs(step).max())
        step *= min(1.0, cap * dt / most) if most > 0 else 1.0
        if name == "servol" and dt > 0:
            self.fastest = max(self.fastest, float(np.linalg.norm(step[:3])) / dt)
        at += step


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        chunk = connection.recv(count - len(found))
        if not chunk:
            raise EOFError
        found += chunk
    return found


def main() -> None:
    """A controller in a process of its own, HOST; when its input ends it prints its events and goes."""
    controller = Controller(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
    print(json.dumps(controller.events))
    controller.close()


if __name__ == "__main__":
    main()
