"""The process that servoes a UR arm: it alone talks to the controller, at 125 or 500 Hz, whatever others compute.

The robot's process and this one share a `Board` of numbers. A waypoint is a goal and the time at which the arm is to be
there; in between the arm moves on a straight line and never faster than its speed limits. Without a new waypoint it
stands at the last one. ur_rtde may even crash when the network goes: only this process ends, and its controller stops
the arm by its watchdog.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.robots.drivers.parts import Bounds
from prism.robots.drivers.rotation import from_reference, to_reference
from prism.robots.drivers.waypoints import Interpolator

Vector = NDArray[np.float64]
OK, PROTECTIVE, EMERGENCY, NO_PROGRAM, NOT_SENT = 0.0, 1.0, 2.0, 3.0, 4.0  # Board's `status`
_SINGLE = ("stop", "stopped", "close", "prepare", "prepared", "seq", "due", "stamp", "status")
_SIX = ("goal", "pose", "joints", "force")


class Board:
    """Numbers that both processes see. `stop` is read and written without a lock: nothing can delay it."""

    def __init__(self, context: SpawnContext) -> None:
        self._array = context.Array("d", len(_SINGLE) + 6 * len(_SIX))

    def get(self, name: str) -> float:
        return float(self._array.get_obj()[_SINGLE.index(name)])

    def set(self, name: str, value: float) -> None:
        self._array.get_obj()[_SINGLE.index(name)] = value

    def write(self, singles: dict[str, float], sixes: dict[str, Vector]) -> None:
        """Together: one is never read without the other."""
        with self._array.get_lock():
            for name, value in singles.items():
                self.set(name, value)
            for name, values in sixes.items():
                first = len(_SINGLE) + 6 * _SIX.index(name)
                self._array.get_obj()[first : first + 6] = [float(value) for value in values]

    def read(self, single: str, *sixes: str) -> tuple[float, list[Vector]]:
        with self._array.get_lock():
            firsts = [len(_SINGLE) + 6 * _SIX.index(name) for name in sixes]
            return self.get(single), [np.array(self._array.get_obj()[first : first + 6]) for first in firsts]


@dataclass(frozen=True)
class ServoConfig:
    host: str
    frequency: float  # Hz
    control: str  # pose | joints
    bounds: Bounds  # of its axes
    orientation: tuple[float, float, float]  # of the tool, that rotations are measured from
    lookahead: float
    gain: float
    zero_force: bool
    watchdog: float  # Hz: the controller stops the arm where commands come more slowly
    read_only: bool = False  # the arm is measured, and its controller gets no command


class Servo:
    """One cycle after the other; `control` (None: read only) and `receive` are ur_rtde's interfaces."""

    def __init__(self, control: Any, receive: Any, config: ServoConfig, board: Board) -> None:
        self._control, self._receive, self._config, self._board = control, receive, config, board
        self._reference = np.array(config.orientation)
        self._bounds, self._refused = config.bounds, False
        self._path: Interpolator | None = None  # None: it stands, and takes no waypoints
        self._seq = self._prepared = 0.0
        self._told, self._stamp = -1.0, 0.0  # the controller's time of the last numbers, and ours

    def measure(self, now: float) -> Vector:
        """Tells the other process all that is measured; where the arm is, in the axes' units."""
        receive = self._receive
        if (told := receive.getTimestamp()) != self._told:  # else ur_rtde repeats what it knew: the network is gone
            self._told, self._stamp = told, now
        pose = np.array(receive.getActualTCPPose())
        pose[3:] = to_reference(pose[3:], self._reference)
        joints = np.array(receive.getActualQ())
        status = EMERGENCY if receive.isEmergencyStopped() else PROTECTIVE if receive.isProtectiveStopped() else OK
        if self._refused:
            status = NOT_SENT
        if status == OK and self._path is not None and not self._control.isProgramRunning():
            status = NO_PROGRAM
        numbers = {"pose": pose, "joints": joints, "force": np.array(receive.getActualTCPForce())}
        self._board.write({"stamp": self._stamp, "status": status}, numbers)
        return pose if self._config.control == "pose" else joints

    def cycle(self, now: float) -> None:
        here = self.measure(now)
        if self._control is None:
            return
        if self._board.get("stop"):
            self._stand()
        elif (asked := self._board.get("prepare")) != self._prepared:
            self._prepare(here)
            self._prepared = asked
            self._board.set("prepared", asked)
        if self._path is None:
            self._control.kickWatchdog()
            return
        seq, (goal,) = self._board.read("seq", "goal")
        try:
            if seq != self._seq:
                self._seq = seq
                self._path.aim(goal, self._board.get("due"))
            self._move(self._path.step(now, 1.0 / self._config.frequency))
        except PrismError:  # the other process hears of it by `status`
            self._refused = True
            self._stand()

    def _prepare(self, here: Vector) -> None:
        self._start_program()
        if self._config.zero_force:
            self._control.zeroFtSensor()
            self._start_program()  # where that took longer than the watchdog allows
        self._seq, self._refused = self._board.get("seq"), False
        self._bounds = self._config.bounds.around(here)
        self._path = Interpolator(here, self._bounds.speed)
        self.measure(time.monotonic())  # how it is now

    def _start_program(self) -> None:
        if self._control.isProgramRunning():
            return
        self._control.reuploadScript()  # after a protective stop, or a stop by the pendant
        until = time.monotonic() + 3.0
        while not self._control.isProgramRunning() and time.monotonic() < until:
            time.sleep(0.01)
        self._control.setWatchdog(self._config.watchdog)

    def _move(self, at: Vector) -> None:
        config, dt = self._config, 1.0 / self._config.frequency
        self._bounds.check(at)
        if config.control == "joints":
            self._control.servoJ(at.tolist(), 0.0, 0.0, dt, config.lookahead, config.gain)
            return
        turned = from_reference(at[3:], self._reference)
        self._control.servoL([*at[:3].tolist(), *turned.tolist()], 0.0, 0.0, dt, config.lookahead, config.gain)

    def _stand(self) -> None:
        if self._path is not None:
            self._path = None
            self._control.servoStop(10.0)  # m/s2, or rad/s2
        self._board.set("stopped", 1.0)

    def end(self) -> None:
        if self._control is not None:
            self._stand()
            self._control.stopScript()
            self._control.disconnect()


def serve(config: ServoConfig, board: Board, said: Connection) -> None:
    """The process's life: connects, says "" or why it could not, and cycles until it has to close."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the other process, which then stops the arm
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    try:
        import rtde_control
        import rtde_receive

        receive = rtde_receive.RTDEReceiveInterface(config.host, config.frequency)
        control = None if config.read_only else rtde_control.RTDEControlInterface(config.host, config.frequency)
        if control is not None:
            control.setWatchdog(config.watchdog)
        servo = Servo(control, receive, config, board)
        servo.measure(time.monotonic())
    except Exception as error:  # of the C++ library, any kind
        said.send(str(error) or type(error).__name__)
        return
    said.send("")
    try:
        while not board.get("close") and (parent is None or parent.is_alive()):
            start = receive.initPeriod()
            servo.cycle(time.monotonic())
            receive.waitPeriod(start)
    finally:
        with contextlib.suppress(Exception):
            servo.end()
        receive.disconnect()
