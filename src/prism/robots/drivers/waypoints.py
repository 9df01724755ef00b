"""Interpolation between waypoints, for an arm that takes more positions a second than there are commands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.robots.drivers.talker import Talker

Vector = NDArray[np.float64]


class Interpolator:
    """The arm's commanded position, from cycle to cycle."""

    def __init__(self, start: Vector, speed: Vector) -> None:
        if not np.isfinite(start).all():
            raise PrismError(f"it reports {start.tolist()}, which is not finite")
        self.at, self._goal, self._due, self._speed = start.copy(), start.copy(), -math.inf, speed

    def aim(self, goal: Vector, due: float) -> None:
        if not np.isfinite(goal).all():
            raise PrismError(f"its goal {goal.tolist()} is not finite: stopped")
        self._goal, self._due = goal, due

    def step(self, now: float, dt: float) -> Vector:
        """After `dt` seconds more: on the line to the goal, there at `due`, no axis above its speed."""
        move = (self._goal - self.at) * min(1.0, dt / max(self._due - now, dt))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.nanmin(np.where(move != 0, self._speed * dt / np.abs(move), np.inf))
        self.at = self.at + move * min(1.0, float(share))
        return self.at


class Follower(Talker):
    """The thread that does it.

    `go(at)` sends a position, and returns the arm's commanded position (another if `at` is unreachable); `hold(at)`
    tells it to stand where it is: where that is not measured, at `at`, where it was told to be last.
    """

    def __init__(self, hz: float, go: Callable[[Vector], Vector], hold: Callable[[Vector], None]) -> None:
        super().__init__(hz, self._follow)
        self._go, self._hold = go, hold
        self._path: Interpolator | None = None

    def begin(self, start: Vector, speed: Vector) -> None:
        self._path = Interpolator(start, speed)
        self.prepare()

    def send(self, target: Vector, due: float) -> None:
        if (path := self._path) is not None:
            path.aim(target, due)

    def _follow(self) -> None:
        path = self._path
        if self.stopping and path is not None:
            self._hold(path.at)  # a failed one is repeated in the next cycle
            self._path = None if self._path is path else self._path
        if self.stopping:
            self.standing.set()
        elif path is not None:
            path.at = self._go(path.step(time.monotonic(), 1.0 / self._hz))
