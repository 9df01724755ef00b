"""A robot out of parts, as its file says. `prism run RUN --robot my_ur.toml`

    name = "ur5e"                 # of the robot's kind: recordings and policies carry it
    rate = 20.0                   # commands a second
    fps = 10.0                    # steps a second of demonstrations and policies; default: rate
    kind = "delta"                # of the arm's commands: absolute, delta or velocity
    episode_seconds = 60.0

    [arm]                         # also [gripper], [base]: what is commanded, in this order
    driver = "ur"
    host = "192.168.1.10"

    [sensors.rgb_wrist]           # as many as there are; each has its own rate and thread
    driver = "uvc"
    device = 0

    [limits]                      # prism/robots/limits.py; position and speed must be there
    position = [[0.3, 0.7], ...]
    speed = [0.25, ...]

`proprio` is where the arm and the gripper are, in the order of the commands, and then what else the parts measure.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import threading
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError, reason
from prism.io.files import JSON_BYTES, read_bytes
from prism.io.jsonconfig import from_json
from prism.robots.claim import Claim
from prism.robots.contract import ActionSpace, Health, Reading, Robot
from prism.robots.drivers.parts import Bounds, Part, Vector, state_age
from prism.robots.limits import LEAD, Limits
from prism.sensors import ActionSpec, SensorSpec

DRIVERS = {  # place -> driver -> where it is; the file is imported when a robot needs it
    "arm": {"ur": "ur:UR", "d1": "d1:D1", "ros": "ros:RosArm"},
    "gripper": {"robotiq": "robotiq:Robotiq"},
    "base": {"go2": "unitree_go2:Go2"},
    "sensors": {
        "uvc": "cameras:Camera",
        "digit": "cameras:Digit",
        "realsense": "realsense:RealSense",
        "microphone": "microphone:Microphone",
        "ros": "ros:RosTopic",
    },
}
_KEYS = {
    "name": str,
    "rate": float,
    "fps": float,
    "kind": str,
    "episode_seconds": float,
    "limits": dict,
} | dict.fromkeys(DRIVERS, dict)


class DrivenRobot(Robot):
    def __init__(
        self, name: str, rate: float, kind: ActionKind, parts: dict[str, Part], sensors: tuple[Part, ...],
        limits: Limits, episode_seconds: float = 60.0, fps: float = 0.0,
    ) -> None:  # fmt: skip
        self._movers, self._parts = parts, (*parts.values(), *sensors)
        axes = {place: part.axes() for place, part in parts.items()}
        names = tuple(axis.name for one in axes.values() for axis in one)
        measured = 0
        for place in ("arm", "gripper"):  # the first dimensions, as long as they are measured
            if place in parts and parts[place].state_names()[: len(axes[place])] == tuple(a.name for a in axes[place]):
                measured += len(axes[place])
        dims = {place: len(one) for place, one in axes.items()}
        ends = np.cumsum([0, *dims.values()])
        self._slices = {p: slice(int(a), int(b)) for p, a, b in zip(dims, ends[:-1], ends[1:], strict=True)}
        base = self._slices.get("base", slice(0, 0))
        space = ActionSpace(
            ActionSpec(names, robot=name, kind=kind, units=tuple(axis.unit for one in axes.values() for axis in one)),
            base=tuple(range(base.start, base.stop)),
            pose="proprio" if measured else None,
            pose_dims=measured,
        )
        self._state_names = tuple(n for part in parts.values() for n in part.state_names())
        specs = [spec for part in self._parts for spec in part.sensors()]
        if self._state_names:
            hz = next(part.state_hz for part in parts.values() if part.state_names())
            shape, old = (len(self._state_names),), state_age(hz or rate)
            specs.insert(0, SensorSpec("proprio", "vector", shape, fps=hz, max_age=old, names=self._state_names))
        super().__init__(name, rate, tuple(specs), space, limits, episode_seconds=episode_seconds, fps=fps)
        self.can_read_only = True
        self._check()
        self._lock = threading.RLock()
        self._connected = self._ready = False
        self._claim = Claim()

    def _check(self) -> None:
        """Check that the file does not contradict itself."""
        space, limits = self.actions, self.limits
        limits.check(space.dim, space.spec.names)
        axes = space.spec.names
        if twice := sorted({name for name in axes if axes.count(name) > 1}):
            raise PrismError(f"two parts are commanded by '{twice[0]}': a D1 has its own gripper; leave one out")
        names = [spec.name for spec in self.sensors]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PrismError(f"two sensors are called '{twice[0]}': rename one")
        if limits.force_sensor and limits.force_sensor not in names:
            raise PrismError(f"limits.force_sensor = '{limits.force_sensor}': there are only {', '.join(names)}")
        self._speed = np.array(limits.speed, np.float64)
        self._low, self._high = np.array(limits.position, np.float64).T
        for place, part in self._movers.items():
            own = self._slices[place]
            low, high, speed = self._low[own], self._high[own], self._speed[own]
            part.bounds = Bounds(-speed, speed, speed) if place == "base" else Bounds(low, high, speed)

    # -- the contract

    def connect(self) -> None:
        self.close()
        try:
            if not self.read_only:
                self._claim.take((one for part in self._movers.values() for one in part.addresses()), self.name)
            for part in self._parts:
                part.read_only = self.read_only
                part.connect()
        except BaseException:
            self._let_go()
            raise
        self._connected = True

    def prepare(self, seed: int) -> None:
        with self._lock:
            if not self._connected:
                raise PrismError(f"{self.name}: connect() first")
            if not (found := self.health()).ok:  # it would begin at where it was long ago
                raise PrismError(f"{self.name}: {found.reason}")
            target = np.concatenate([self._where(place) for place in self._movers])
            self._check_start(target)
            for part in () if self.read_only else self._movers.values():
                part.prepare()
            self._target = target
            self._ready = True

    def _check_start(self, here: Vector) -> None:
        """A little outside its limits an arm may come back; far outside, its numbers are wrong."""
        with np.errstate(invalid="ignore"):
            far = np.maximum(here - self._high, self._low - here) > (self._high - self._low) / 2
        if far.any():
            i = int(np.argmax(far))
            low, high = self._low[i], self._high[i]
            told = f"{self.actions.name(i)} = {here[i]:.4g} is far outside its limits, {low:g} to {high:g}"
            raise PrismError(f"{told}: move the robot there by hand, or fix its numbers")

    def _where(self, place: str) -> Vector:
        """Of the axes of a part: where they are; a base stands, and what is not measured is unknown."""
        part = self._slices[place]
        found, dims = self._movers[place].state(), part.stop - part.start
        if place == "base" or part.start >= self.actions.pose_dims:
            return np.full(dims, 0.0 if place == "base" else np.nan)
        if found is None:
            raise PrismError(f"{place}: it does not say where it is; is it switched on?")
        if not np.isfinite(found[0][:dims]).all():
            raise PrismError(f"{place}: it reports {found[0][:dims].tolist()}, which is not finite")
        return found[0][:dims].astype(np.float64)

    def read(self) -> dict[str, Reading]:
        if not self._connected:
            raise PrismError(f"{self.name}: connect() before read()")
        readings = {}
        if self._state_names and (states := self._states()) is not None:
            readings["proprio"] = states
        for part in self._parts:
            readings |= part.read()
        return readings

    def _states(self) -> Reading | None:
        found = [part.state() for part in self._movers.values() if part.state_names()]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        return Reading(np.concatenate([value for value, _ in known]).astype(np.float32), known[0][1])

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float64)
        if command.shape != (self.actions.dim,) or not np.isfinite(command).all():
            raise PrismError(f"{self.name}: a command is {self.actions.dim} finite numbers, not {action!r}")
        with self._lock:
            if not self._connected or not self._ready:
                raise PrismError(f"{self.name}: it takes no commands: connect(), then prepare(seed)")
            if self.read_only:
                raise PrismError(f"{self.name}: was opened for reading only")
            target = self._aim(command)
            for place, part in self._movers.items():
                part.bounds.check(target[self._slices[place]])
            self._target = target
            due = self.now() + 1.0 / self.rate
            for place, part in self._movers.items():
                part.send(self._target[self._slices[place]], due)

    def _aim(self, command: Vector) -> Vector:
        """Absolute positions, and velocities of a base, within the limits whoever commands."""
        kinds, most = np.array(self.actions.kinds), self._speed / self.rate
        base = np.isin(np.arange(len(command)), self.actions.base)
        change = np.where(kinds == "velocity", command / self.rate, command)
        target = np.where(kinds == "absolute", command, self._target + np.clip(change, -most, most))
        moves = (kinds != "absolute") & ~base
        if moves.any():
            here = np.concatenate([self._where(place) for place in self._movers])
            ahead = LEAD * self.limits.followed(len(command))  # what is blocked is not pressed harder and harder
            with np.errstate(invalid="ignore"):  # a pose that jumps does not take the target with it
                low, high = np.minimum(self._target, here - ahead), np.maximum(self._target, here + ahead)
                target = np.where(moves & np.isfinite(here), np.clip(target, low, high), target)
        return np.where(base, np.clip(command, -self._speed, self._speed), np.clip(target, self._low, self._high))

    def setpoint(self) -> NDArray[np.float64] | None:
        return self._target[: self.actions.pose_dims].copy() if self._ready else None

    def stop(self) -> None:
        self._ready = False  # before anything else, and whoever holds the lock
        if self.read_only:
            return
        for part in self._movers.values():
            part.halt()  # all, before one of them is waited for
        for part in self._movers.values():
            part.stop()

    def close(self) -> None:
        if self._connected:
            self.stop()
        self._connected = False
        self._let_go()

    def _let_go(self) -> None:
        with ExitStack() as stack:  # each, whatever another raises
            stack.callback(self._claim.release)  # last
            for part in self._parts:
                stack.callback(part.close)

    def health(self) -> Health:
        if not self._connected:
            return Health(False, "not connected")
        for part in self._parts:
            if not (found := part.health()).ok:
                return Health(False, f"{part.name}: {found.reason}")
        return Health()


# ------------------------------------------------------------------------------------------------------------- the file


def robot_from_file(file: Path) -> Robot:
    """A robot as its file describes it; nothing is connected. PrismError, with file and key, where it cannot be."""
    if not file.is_file():
        raise PrismError(f"{file}: not found; docs/howto/robots.md shows how such a file is written")
    try:
        text = read_bytes(file, JSON_BYTES).decode()
        data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrismError(f"{file}: cannot be read as {file.suffix[1:]} ({reason(error)}); fix the file") from None
    try:
        if isinstance(data, dict) and "lerobot" in data:
            from prism.robots.drivers.lerobot_robot import robot_from_table

            return robot_from_table(data)
        return _robot(data)
    except PrismError as error:
        raise PrismError(f"{file}: {error}") from None


def _robot(data: Any) -> Robot:
    _check_keys(data, list(_KEYS), "robot")
    for key, needed in _KEYS.items():
        value = float(data[key]) if needed is float and isinstance(data.get(key), int) else data.get(key, needed())
        if not isinstance(value, needed):
            raise PrismError(f"{key} = {value!r}: a {needed.__name__} is needed")
        data[key] = value
    if not data["name"] or not data["rate"] > 0:
        raise PrismError('name and rate are needed, as name = "ur5e", rate = 20.0 (commands a second)')
    parts = {place: make_part(place, place, data[place]) for place in ("arm", "gripper", "base") if data[place]}
    if not parts:
        raise PrismError("nothing can move: add [arm] or [base] with a driver")
    if "gripper" in parts and getattr(parts["gripper"], "host", None) == "":
        vars(parts["gripper"])["host"] = getattr(parts.get("arm"), "host", "")  # a URCap is at the arm's address
    sensors = tuple(make_part("sensors", f"sensors.{name}", table) for name, table in data["sensors"].items())
    _check_devices(sensors)
    networks = {(getattr(part, "interface", None), getattr(part, "domain", None)) for part in parts.values()}
    if len(networks - {(None, None)}) > 1:
        raise PrismError("arm and base name two interfaces or domains: unitree_sdk2py has one; give both the same")
    for part in (*parts.values(), *sensors):
        part.rate, part.step_rate = data["rate"], data["fps"] or data["rate"]
    dim = sum(len(part.axes()) for part in parts.values())
    limits = Limits.of(data["limits"], dim)
    kind = data["kind"] or ("velocity" if "arm" not in parts else "")
    known = ActionKind.parse(kind)
    if known is None:
        raise PrismError(f"kind = '{kind}': what are the arm's commands? one of {ActionKind.words()}")
    seconds = data["episode_seconds"] or 60.0
    return DrivenRobot(data["name"], data["rate"], known, parts, sensors, limits, seconds, data["fps"])


def _check_devices(sensors: tuple[Part, ...]) -> None:
    """Two sensors cannot read one device."""
    seen: dict[object, str] = {}
    for part in sensors:
        key = (getattr(part, "device", None), getattr(part, "serial", None), type(part).__name__ == "Microphone")
        if key[:2] != (None, None) and (other := seen.setdefault(key, part.name)) != part.name:
            raise PrismError(
                f"{other} and {part.name} read one device ({key[1] if key[0] is None else key[0]!r}): give each its own"
            )


def make_part(place: str, name: str, table: Any) -> Part:
    """The driver that a table of the file names, with its settings."""
    if not isinstance(table, dict) or not isinstance(table.get("driver"), str):
        raise PrismError(f"{name}: driver is missing; there are {', '.join(DRIVERS[place])}")
    where = DRIVERS[place].get(table["driver"])
    if where is None:
        raise PrismError(f"{name}.driver = '{table['driver']}' is unknown; there are {', '.join(DRIVERS[place])}")
    module, _, attribute = where.partition(":")
    kind = getattr(importlib.import_module(f"prism.robots.drivers.{module}"), attribute)
    settings = {key: value for key, value in table.items() if key != "driver"}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    _check_keys(settings, list(fields), name)
    own = {"sensor": name.partition(".")[2]} if "sensor" in fields and "sensor" not in settings else {}
    part: Part = from_json(kind, {**own, **settings}, name)
    part.name = name
    return part


def _check_keys(table: Any, known: list[str], where: str) -> None:
    if not isinstance(table, dict):
        raise PrismError(f"{where}: keys and values are needed, not a {type(table).__name__}")
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise PrismError(f"{where}: unknown key '{key}'; {hint}")
