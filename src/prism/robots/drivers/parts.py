"""A part of a robot: one device that is commanded, or read, or both. Each driver is one; composed.py joins them.

A part is a dataclass: its fields are the keys of its table in the robot's file. Making one connects to nothing and
imports no vendor's package.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError, reason
from prism.robots.contract import Array, Health, Reading
from prism.sensors import SensorSpec

Vector = NDArray[np.float64]
STATE_AGE = 0.1  # seconds that a robot's own numbers may be old at least: three periods at 125 Hz are a pause of Python
FIRST_READING = 5.0  # seconds that a sensor may take until it shows something


def state_age(hz: float) -> float:
    """Seconds that a robot's own numbers may be old where they are measured `hz` times a second."""
    return max(3.0 / hz, STATE_AGE)


@dataclass(frozen=True)
class Axis:
    """One number of a command. Grippers: -1 open, 1 closed; arms: an absolute position; bases: a velocity."""

    name: str
    unit: str


@dataclass(frozen=True)
class Bounds:
    """Limits of a part's commands in its axes' units: the driver's last check before sending."""

    low: Vector
    high: Vector
    speed: Vector  # units a second

    def around(self, here: Vector) -> Bounds:
        """An arm that stands outside its limits may come back."""
        low, high = np.fmin(self.low, here), np.fmax(self.high, here)
        return Bounds(low, high, self.speed)

    def check(self, at: Vector) -> None:
        """PrismError unless these are finite numbers within the limits."""
        slack = 1e-6 * (1.0 + np.abs(at))
        if not np.isfinite(at).all():
            raise PrismError(f"the command {at.tolist()} is not finite: stopped")
        if ((at < self.low - slack) | (at > self.high + slack)).any():
            raise PrismError(f"the command {at.tolist()} is beyond the limits: stopped")


class Part:
    """`name` is its place in the file ("arm", "sensors.rgb_wrist"), for messages; `rate` and `step_rate`: the robot's
    commands and steps a second; `bounds`: of its axes; `read_only`: nothing may be written to the device."""

    name, rate, step_rate, read_only = "", 0.0, 0.0, False
    bounds: Bounds

    def axes(self) -> tuple[Axis, ...]:
        """The axes of its commands; empty for a sensor."""
        return ()

    def sensors(self) -> tuple[SensorSpec, ...]:
        """Its sensors besides `state`."""
        return ()

    def state_names(self) -> tuple[str, ...]:
        """Of the numbers that it adds to `proprio`. An arm's and a gripper's begin with where their axes are."""
        return ()

    state_hz = 0.0  # how often they are measured; 0: once a command

    def state(self) -> tuple[Vector, float] | None:
        """Those numbers, and when they were measured; None: not yet."""
        return None

    def addresses(self) -> tuple[str, ...]:
        """Of what it commands, on this machine or from it: two programs with one of them would drive one device."""
        return ()

    def connect(self) -> None:
        """PrismError, with the remedy, where it cannot be reached."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Commands are taken from now on."""

    def read(self) -> dict[str, Reading]:
        """The latest of `sensors`; never blocks."""
        return {}

    def send(self, target: Vector, due: float) -> None:
        """Be at `target`, in the axes' units, at the time `due`; bases: at this velocity, until `due`. Never blocks."""

    def halt(self) -> None:
        """Stand still; says so and does not wait. From any thread."""

    def stop(self) -> None:
        """The same, and waits for it: at most 100 ms."""
        self.halt()

    def close(self) -> None:
        """Let go. Twice is once."""
        raise NotImplementedError

    def health(self) -> Health:
        return Health()

    def error(self, problem: object, remedy: str) -> PrismError:
        return PrismError(f"{self.name}: {reason(problem) if isinstance(problem, Exception) else problem}; {remedy}")


class Stream(Part):
    """A sensor in a thread of its own. A driver says how to open, to wait for the next reading, and to shut.

    One that fails shows nothing new, which holds and then stops the robot where it is needed (safety.Guard), and is
    opened again every second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[str, Reading] = {}
        self._thread: threading.Thread | None = None
        self._alive = threading.Event()

    def open(self) -> None:
        """PrismError or whatever the vendor raises."""
        raise NotImplementedError

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        """Waits for the next readings: value and stamp by the sensor's name."""
        raise NotImplementedError

    def shut(self) -> None:
        raise NotImplementedError

    remedy = "is it plugged in, and does no other program use it?"

    def connect(self) -> None:
        self.close()
        try:
            self.open()
            self._keep(self.grab())
        except Exception as error:  # each vendor raises its own kinds
            self._shut()
            raise error if isinstance(error, PrismError) else self.error(error, self.remedy) from None
        self._alive.set()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_open = True
        while self._alive.is_set():
            try:
                if not is_open:
                    self.open()
                    is_open = True
                self._keep(self.grab())
            except Exception:  # whatever it is, its readings grow old, and that is acted upon
                self._shut()
                is_open = False
                time.sleep(min(1.0, 10.0 / max(self.rate, 1.0)))

    def _keep(self, found: Mapping[str, tuple[Array, float]]) -> None:
        specs = {spec.name: spec for spec in self.sensors()}
        for name, (value, _) in found.items():
            if value.shape != (spec := specs[name]).shape or value.dtype != spec.dtype:
                remedy = f"the file says {spec.shape} {spec.dtype}: fix it"
                raise self.error(f"it shows {value.shape} {value.dtype}", remedy)
        with self._lock:
            for name, (value, stamp) in found.items():
                before = self._latest.get(name)
                if before is None or stamp > before.stamp:
                    self._latest[name] = Reading(value, stamp)

    def read(self) -> dict[str, Reading]:
        with self._lock:  # values are never written to again
            return {name: Reading(one.value.copy(), one.stamp) for name, one in self._latest.items()}

    def close(self) -> None:
        self._alive.clear()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None
            self._shut()
        with self._lock:
            self._latest = {}

    def _shut(self) -> None:
        try:
            self.shut()
        except Exception:  # it is gone already
            return


def reach(part: Part, host: str, port: int, what: str, seconds: float = 2.0) -> socket.socket:
    """A connection to a device, or one line that says what to look at."""
    if not host:
        raise part.error("host is missing", f'add host = "192.168.1.10", the address of the {what}')
    try:
        connection = socket.create_connection((host, port), seconds)
    except (OSError, UnicodeError) as error:
        remedy = f"is the {what} on, is the cable in, and is host right?"
        raise part.error(f"no answer at {host}:{port} ({reason(error)})", remedy) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
