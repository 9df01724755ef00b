"""The limits of a robot, and the file that narrows them.

A file is JSON or TOML. Lists have one entry a dimension of the commands; units are those of the action space.

    position = [[0.3, 0.7], [-0.3, 0.3], [0.03, 0.4], [-1, 1]]
    speed = [0.25, 0.25, 0.1, 1000]          # units a second
    acceleration = [2.0, 2.0, 2.0, 1000]
    jerk = [40, 40, 40, 10000]               # of speeding up: braking may use all of the acceleration
    following = [0.05, 0.05, 0.03, 1000]     # from where it was told to be to the measured pose; beyond it the robot
    #                                          stops. Default: 0.4 s at full speed; at most 1 s
    workspace = [[0.28, 0.72], [-0.32, 0.32], [0.02, 0.42]]   # of the measured pose; outside it the robot stops
    force = 40.0                             # newtons at the wrist; beyond it the robot stops
    hold_seconds = 0.3                       # without a sensor that is needed the robot is held, and then stopped
    frozen = 2                               # readings of the pose that stay the same while the robot is to move
    watchdog = 0.1                           # seconds after which a command that does not come stops the robot
    margin = 0.05                            # of the range of its demonstrations that a policy may go beyond it

The last four have ceilings (CEILINGS) that no file can widen.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError, reason
from prism.io.files import JSON_BYTES, read_bytes
from prism.io.jsonconfig import from_json

Range = tuple[float, float]
LEAD = 0.75  # of the following error that commands may use up: the rest is for noise and for what pushes the robot
FOLLOWING, FOLLOWING_MOST = 0.4, 1.0  # seconds at full speed: of the default, and the most that a file may give
CEILINGS = {  # key -> least and most
    "hold_seconds": (0.01, 1.0),
    "frozen": (1, 25),
    "watchdog": (0.01, 0.5),
    "margin": (0.0, 0.25),
}


@dataclass(frozen=True)
class Limits:
    """See the top of this file. An empty tuple, or None: no such limit."""

    position: tuple[Range, ...] = ()
    speed: tuple[float, ...] = ()
    acceleration: tuple[float, ...] = ()
    jerk: tuple[float, ...] = ()
    following: tuple[float, ...] = ()  # empty: `followed`
    workspace: tuple[Range, ...] = ()
    force: float | None = None
    force_sensor: str = ""  # whose first three numbers are the force
    hold_seconds: float = 0.3
    frozen: int = 2
    watchdog: float = 0.1
    margin: float = 0.05

    def __post_init__(self) -> None:
        for key in ("position", "workspace"):
            for i, (low, high) in enumerate(getattr(self, key)):
                if not low < high:
                    raise PrismError(f"{key}[{i}]: {low:g} to {high:g} contradicts itself; the lower limit comes first")
        for key in ("speed", "acceleration", "jerk", "following"):
            for i, most in enumerate(getattr(self, key)):
                if not most > 0:
                    raise PrismError(f"{key}[{i}]: {most:g} lets the robot not move; use a number above 0")
        if self.jerk and not self.acceleration:
            raise PrismError("jerk: it limits how the acceleration grows, and no acceleration is given; add one")
        if self.acceleration and not self.speed:
            raise PrismError("acceleration: without a speed it does not end; add speed")
        if self.force is not None and not (0 < self.force < math.inf and self.force_sensor):
            raise PrismError(f"force: {self.force:g} needs newtons above 0, and force_sensor, whose numbers they are")
        for i, (far, speed) in enumerate(zip(self.following, self.speed, strict=False)):
            if far > (most := FOLLOWING_MOST * speed):
                told = f"its ceiling, {most:g} ({FOLLOWING_MOST:g} s at full speed)"
                raise PrismError(f"following[{i}] = {far:g} is above {told}: lower it")
        for key, (least, ceiling) in CEILINGS.items():
            value = getattr(self, key)
            if value > ceiling:
                raise PrismError(f"{key} = {value:g} is above its ceiling, {ceiling:g}: lower it")
            if not value >= least:
                raise PrismError(f"{key} = {value:g} is out of range; use {least:g} to {ceiling:g}")
        for i, ((low, high), (near, far)) in enumerate(zip(self.position, self.workspace, strict=False)):
            if low >= far or high <= near:
                raise PrismError(
                    f"position[{i}]: {low:g} to {high:g} lies outside workspace[{i}], {near:g} to {far:g}: nothing "
                    "could move; fix one of them"
                )

    def check(self, dim: int, names: Sequence[str] = ()) -> None:
        """PrismError unless there is one limit a dimension; of dimensions with `names`, a position and a speed too."""
        for key in ("position", "speed", "acceleration", "jerk", "following"):
            if (count := len(getattr(self, key))) not in (0, dim):
                raise PrismError(f"{key}: {count} limits for commands of {dim} numbers; give one each")
            if names and not count and key in ("position", "speed"):
                order = ", ".join(names)
                raise PrismError(f"limits.{key} is missing: a robot without it can go anywhere; one each of {order}")

    def followed(self, dim: int) -> NDArray[np.float64]:
        """Largest following error of each dimension, in units; inf without a limit."""
        most = self.following or tuple(FOLLOWING * speed for speed in self.speed) or (math.inf,) * dim
        return np.array(most, np.float64)

    def slowed(self, factor: float) -> Limits:
        """At `factor` of the speed; the path stays the same where everything else slows down with it. What an arm sags
        by does not get smaller: the following error stays, up to its ceiling."""
        speed = tuple(factor * most for most in self.speed)
        return replace(self, speed=speed, following=_below(self.followed(len(speed)).tolist(), speed))

    @staticmethod
    def of(data: dict[str, object], dim: int) -> Limits:
        """From a robot file."""
        return Limits()._with(data, dim)

    def _with(self, own: dict[str, object], dim: int) -> Limits:
        data = {key: getattr(self, key) for key in self.__dataclass_fields__}
        lists = {key: [list(v) if isinstance(v, tuple) else v for v in value] if isinstance(value, tuple) else value
                 for key, value in data.items()}  # fmt: skip
        if unknown := next((key for key in own if key not in data), None):
            raise PrismError(f"unknown key '{unknown}'; there are {', '.join(data)}")
        if self.following and isinstance(speed := own.get("speed"), list) and len(speed) == dim:
            lists["following"] = list(_below(self.following, speed))
        found = from_json(Limits, {**lists, **own}, "limits")
        found.check(dim)
        return found

    def narrowed(self, own: dict[str, object], dim: int) -> Limits:
        """Narrowed by the limits of a file; PrismError if one is wider than the robot's."""
        found = self._with(own, dim)
        for key in ("position", "workspace"):
            for i, (mine, theirs) in enumerate(zip(getattr(self, key), getattr(found, key), strict=False)):
                if theirs[0] < mine[0] or theirs[1] > mine[1]:
                    raise PrismError(
                        f"{key}[{i}]: {theirs[0]:g} to {theirs[1]:g} is wider than the robot's own {mine[0]:g} to "
                        f"{mine[1]:g}; narrow it"
                    )
        for key in ("speed", "acceleration", "jerk", "following"):
            own_limits = self.followed(dim) if key == "following" else getattr(self, key)
            for i, (most, asked) in enumerate(zip(own_limits, getattr(found, key), strict=False)):
                if asked > most:
                    raise PrismError(f"{key}[{i}]: {asked:g} is above the robot's own {most:g}; lower it")
        for key in ("position", "workspace", "speed", "acceleration", "jerk", "following"):
            if len(getattr(found, key)) < len(getattr(self, key)):
                raise PrismError(f"{key}: has fewer limits than the robot's own; give all, or leave the key out")
        for key in CEILINGS:
            if getattr(found, key) > getattr(self, key):
                raise PrismError(
                    f"{key} = {getattr(found, key):g} is above the robot's own {getattr(self, key):g}; lower it"
                )
        if self.force is not None and (found.force is None or found.force > self.force):
            raise PrismError(f"force: {found.force} is above the robot's own {self.force:g}; lower it")
        if self.force is not None and found.force_sensor != self.force_sensor:
            raise PrismError(f"force_sensor: the robot's own is '{self.force_sensor}'; leave the key out")
        return found

    def describe(self, names: tuple[str, ...], units: tuple[str, ...]) -> list[str]:
        """A line a dimension, and one for the rest: printed before anything moves."""
        lines = []
        for i, (name, unit) in enumerate(zip(names, units, strict=True)):
            parts = [f"{self.position[i][0]:g} to {self.position[i][1]:g} {unit}".rstrip()] if self.position else []
            for key, power in (("speed", "s"), ("acceleration", "s2"), ("jerk", "s3")):
                if (most := getattr(self, key)) and most[i] < math.inf:
                    parts.append(f"{most[i]:g} {unit.removesuffix('/s')}/{power}")
            lines.append(f"{name}: {', '.join(parts) or 'no limit'}")
        if self.workspace:
            lines.append("workspace: " + ", ".join(f"{low:g} to {high:g}" for low, high in self.workspace))
        if self.force is not None:
            lines.append(f"force: {self.force:g} N ('{self.force_sensor}')")
        if np.isfinite(far := self.followed(len(names))).any():
            told = ", ".join(f"{one:.3g}" for one in far)
            lines.append(f"following error: {told}; beyond it stopped")
        lines.append(f"a needed sensor fails: held, stopped after {self.hold_seconds:g} s")
        lines.append(f"no command: stopped {self.watchdog:g} s after it was due")
        lines.append(f"a policy: {self.margin:.0%} beyond the range of its demonstrations")
        return lines


def _below(following: Sequence[float], speed: Sequence[float]) -> tuple[float, ...]:
    """Below the ceilings that other speeds give."""
    return tuple(min(far, FOLLOWING_MOST * most) for far, most in zip(following, speed, strict=False))


def read_limits(file: Path, own: Limits, dim: int) -> Limits:
    """The robot's own limits, narrowed by a file."""
    if not file.is_file():
        raise PrismError(f"{file}: cannot be read: there is no such file; give the path of a limits file")
    try:
        text = read_bytes(file, JSON_BYTES).decode()
        data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrismError(f"{file}: cannot be read as {file.suffix or 'JSON'} ({reason(error)}); fix the file") from None
    if not isinstance(data, dict):
        raise PrismError(f"{file}: needs keys and values (position, speed, ...), not a {type(data).__name__}")
    try:
        return own.narrowed(data, dim)
    except PrismError as error:
        raise PrismError(f"{file}: {error}") from None
