"""From waypoint to waypoint: how an arm that takes positions many times a second is led by one that says few."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prism.errors import reason

Vector = NDArray[np.float64]
_ACKNOWLEDGES = 0.06  # seconds that a stop waits until it is sent


class Interpolator:
    """Where the arm is told to be, from cycle to cycle."""

    def __init__(self, start: Vector, speed: Vector) -> None:
        self.at, self._goal, self._due, self._speed = start.copy(), start.copy(), -math.inf, speed

    def aim(self, goal: Vector, due: float) -> None:
        self._goal, self._due = goal, due

    def step(self, now: float, dt: float) -> Vector:
        """After `dt` seconds more: on the line to the goal, there at `due`, no axis above its speed."""
        move = (self._goal - self.at) * min(1.0, dt / max(self._due - now, dt))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.nanmin(np.where(move != 0, self._speed * dt / np.abs(move), np.inf))
        self.at = self.at + move * min(1.0, float(share))
        return self.at


class Follower:
    """A thread that does it, `hz` times a second. It alone talks to the arm.

    `go(at)` sends a position, and says where the arm then is told to be (another where `at` cannot be); `hold()` tells
    it to stand where it is. `fault`: why either failed.
    """

    def __init__(self, hz: float, go: Callable[[Vector], Vector], hold: Callable[[], None]) -> None:
        self._hz, self._go, self._hold = hz, go, hold
        self._path: Interpolator | None = None
        self._stopping, self.fault = True, ""
        self._alive, self._wake, self._standing = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        self.fault = ""
        self._alive.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def prepare(self, start: Vector, speed: Vector) -> None:
        self._path, self._stopping = Interpolator(start, speed), False
        self._standing.clear()

    def send(self, target: Vector, due: float) -> None:
        if (path := self._path) is not None:
            path.aim(target, due)

    def halt(self) -> None:
        self._stopping = True
        self._wake.set()

    def stop(self) -> None:
        self.halt()
        if self._thread is not None:
            self._standing.wait(_ACKNOWLEDGES)

    def close(self) -> None:
        if self._thread is not None:
            self.stop()
            self._alive.clear()
            self._wake.set()
            self._thread.join(2.0)
            self._thread = None

    def _run(self) -> None:
        while self._alive.is_set():
            try:
                self._cycle()
            except Exception as error:  # the vendor's; the robot is stopped for it
                self.fault = reason(error)
            self._wake.wait(1.0 / self._hz)
            self._wake.clear()

    def _cycle(self) -> None:
        path = self._path
        if self._stopping and path is not None:
            self._path = None
            self._hold()
        if self._stopping:
            self._standing.set()
        elif path is not None:
            path.at = self._go(path.step(time.monotonic(), 1.0 / self._hz))
