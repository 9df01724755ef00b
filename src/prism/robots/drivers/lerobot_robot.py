"""Any robot of LeRobot's as a robot of ours. `prism run RUN --robot so101.toml`, where LeRobot 0.6 is installed too

    rate = 30.0                       # commands a second: that of the demonstrations
    units = { "*" = "deg", "gripper.pos" = "%" }     # LeRobot does not say them; "deg" alone: of all

    [lerobot]                         # as lerobot-record takes it, --robot.KEY
    type = "so101_follower"
    port = "/dev/ttyACM0"
    id = "black"
    cameras.top = { type = "opencv", index_or_path = 0, width = 640, height = 480, fps = 30 }

    [limits]                          # prism/robots/limits.py; position and speed must be there, one each action
    position = [[-110, 110], [-100, 100], [-100, 90], [-95, 95], [-160, 160], [0, 100]]
    speed = [60, 60, 60, 60, 60, 200]

| LeRobot                               | here                                                                      |
| ------------------------------------- | ------------------------------------------------------------------------- |
| actions KEY.pos, KEY.vel              | absolute, velocity; any other key is refused                              |
| observations that are numbers         | the vector `state`, as in LeRobot's datasets; where the actions are, too  |
| (H, W, 3), (H, W, 1), (N,)            | a camera; depth, millimetres to metres; a vector                          |

LeRobot's calls wait for the bus and are not for several threads: one thread makes all of them, twice a command. To stop
is to command the measured positions, and no velocity; a gripper (by its name) stays as it was told, and keeps hold.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import pkgutil
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError, reason
from prism.robots.claim import Claim, host_address
from prism.robots.contract import ActionSpace, Array, Health, Reading, Robot
from prism.robots.drivers.parts import Bounds, state_age
from prism.robots.limits import Limits
from prism.sensors import ActionSpec, SensorSpec

STATE = "state"  # as prism reads observation.state of LeRobot's datasets
_KEYS = ("name", "rate", "units", "episode_seconds", "ignore", "lerobot", "limits")
_SUFFIXES = {".pos": "absolute", ".vel": "velocity"}
_OLD = 2.0  # seconds without an observation: it hangs
_REMEDY = "is it on, is the cable in, is the port right, and does no other program use it?"
logger = logging.getLogger("prism.robots")


class LeRobotRobot(Robot):
    """`device` keeps the contract of lerobot.robots.Robot; `addresses` are its ports and hosts (claim.py)."""

    def __init__(
        self, device: Any, rate: float, units: Mapping[str, str], limits: Mapping[str, Any], name: str = "",
        ignore: tuple[str, ...] = (), episode_seconds: float = 60.0, addresses: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._addresses, self._claim = addresses, Claim()
        self._device, self._actions = device, tuple(map(str, device.action_features))
        inner = [
            one for one in vars(device).values() if hasattr(one, "send_action")
        ]  # arms that write when they connect
        self.can_read_only = not inner
        shown = {key: value for key, value in device.observation_features.items() if key not in ignore}
        self._numbers = tuple(key for key, value in shown.items() if not isinstance(value, tuple))
        sensors = [_sensor(key, value) for key, value in shown.items() if isinstance(value, tuple)]
        if self._numbers:
            sensors.insert(0, SensorSpec(STATE, "vector", (len(self._numbers),), names=self._numbers))
        kinds = [_kind(key) for key in self._actions]
        # the first dimensions, as long as their positions are measured
        same = [a == b and kind == "absolute" for a, b, kind in zip(self._actions, self._numbers, kinds, strict=False)]
        measured = same.index(False) if False in same else len(same)
        moving = ActionKind.ABSOLUTE if "absolute" in kinds else ActionKind.VELOCITY
        space = ActionSpace(
            ActionSpec(
                self._actions,
                robot=str(device.name),
                kind=moving,
                units=tuple(_unit(key, units, self._actions) for key in self._actions),
            ),
            base=tuple(i for i, kind in enumerate(kinds) if kind != moving),
            pose=STATE if measured else None,
            pose_dims=measured,
        )
        own = Limits.of(dict(limits), space.dim)
        own.check(space.dim, self._actions)
        super().__init__(
            name or str(device.name), rate, tuple(sensors), space, own, episode_seconds=episode_seconds
        )  # fmt: skip
        self._velocity = np.array(kinds) == "velocity"
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._clear()

    def _clear(self) -> None:
        self._ready = self._alive = self._stopping = self._stopping_now = False
        self._next: NDArray[np.float32] | None = None
        self._last: NDArray[np.float32] | None = None  # sent
        self._latest: dict[str, Reading] = {}
        self._problem, self._warned = "", False
        self._unsafe = False  # a command was refused at the last look: until `prepare`

    # -- the contract

    def connect(self) -> None:
        self.close()
        if (
            self.read_only
        ):  # LeRobot's `connect` writes settings and switches torque on, its `disconnect` switches it off
            self._device.configure = lambda: None
            if hasattr(getattr(self._device, "config", None), "disable_torque_on_disconnect"):
                self._device.config.disable_torque_on_disconnect = False
        else:
            self._claim.take(self._addresses, self.name)
        try:
            self._device.connect(calibrate=False)  # it would ask questions
            if not self._device.is_calibrated:
                raise PrismError(f"{self.name}: it is not calibrated; run lerobot-calibrate with the same type and id")
            self._observe()
        except BaseException as error:  # each vendor raises its own kinds
            self._let_go()
            if isinstance(error, PrismError) or not isinstance(error, Exception):
                raise
            raise PrismError(f"{self.name}: {reason(error)}; {_REMEDY}") from None
        self._alive = True
        self._thread = threading.Thread(target=self._work, name=f"{self.name}-lerobot", daemon=True)
        self._thread.start()

    def prepare(self, seed: int) -> None:
        with self._changed:
            if not self._alive:
                raise PrismError(f"{self.name}: connect() first")
            self._ready, self._stopping, self._next = True, False, None
            self._problem, self._unsafe = "" if self._unsafe else self._problem, False

    def read(self) -> dict[str, Reading]:
        if not self._alive:
            raise PrismError(f"{self.name}: connect() before read()")
        with self._changed:
            return {name: Reading(one.value.copy(), one.stamp) for name, one in self._latest.items()}

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float32)
        if command.shape != (self.actions.dim,) or not np.isfinite(command).all():
            raise PrismError(f"{self.name}: a command is {self.actions.dim} finite numbers, not {action!r}")
        with self._changed:
            if not self._alive or not self._ready:
                raise PrismError(f"{self.name}: it takes no commands: connect(), then prepare(seed)")
            if self.read_only:
                raise PrismError(f"{self.name}: was opened for reading only")
            low, high = np.array(self.limits.position, np.float32).T
            speed = np.array(self.limits.speed, np.float32)
            self._next = np.where(self._velocity, np.clip(command, -speed, speed), np.clip(command, low, high))
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = self._stopping or (self._ready and not self.read_only)
            self._ready, self._next = False, None
            self._changed.notify()

    def close(self) -> None:
        self.stop()
        with self._changed:
            self._alive = False
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
            self._let_go()
        self._clear()

    def health(self) -> Health:
        if not self._alive:
            return Health(False, "not connected")
        if self._problem:
            return Health(False, self._problem)
        with self._changed:
            newest = max((one.stamp for one in self._latest.values()), default=0.0)
        if (age := self.now() - newest) > _OLD:
            return Health(False, f"no observation for {age:.1f} s")
        return Health()

    def _let_go(self) -> None:
        with suppress(Exception):  # it is gone already, or was never there
            self._device.disconnect()
        self._claim.release()

    # -- the thread that alone talks to the device

    def _work(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                while self._alive and self._next is None and not self._stopping and (left := due - self.now()) > 0:
                    self._changed.wait(left)
                command, stopping, alive = self._next, self._stopping, self._alive
                self._next, self._stopping = None, False
                if stopping:
                    command = self._still()
                self._stopping_now = stopping
            try:
                if command is not None:
                    self._command(command)
                stopping = False
                if alive and self.now() >= due:
                    due = self.now() + 0.5 / self.rate
                    self._observe()
                    self._problem = self._problem if self._unsafe else ""
            except Exception as error:  # a bus that answers again is healthy again; until then nothing moves
                self._problem = reason(error)
                self._unsafe |= isinstance(error, PrismError)
                with self._changed:  # a stop that did not get through is sent again
                    self._stopping |= stopping and not self._ready
                time.sleep(0.01)
            if not alive and not (self._stopping and self.now() < due + 1.0):
                return

    def _command(self, command: NDArray[np.float32]) -> None:
        self._check(command)
        asked = dict(zip(self._actions, map(float, command), strict=True))
        sent = self._device.send_action(asked)
        self._last = command
        other = [key for key, value in (sent or {}).items() if key in asked and abs(value - asked[key]) > 1e-3]
        if other and not self._warned:  # once: recordings say what was asked for
            self._warned = True
            logger.warning("%s: LeRobot changes commands of %s by limits of its own", self.name, ", ".join(other))

    def _check(self, command: NDArray[np.float32]) -> None:
        """The last look before the bus; a stop may leave an arm where it is, outside its limits."""
        low, high = np.array(self.limits.position, np.float64).T
        speed, at = np.array(self.limits.speed, np.float64), command.astype(np.float64)
        most = Bounds(np.where(self._velocity, -speed, low), np.where(self._velocity, speed, high), speed)
        (most.around(at) if self._stopping_now else most).check(at)

    def _still(self) -> NDArray[np.float32] | None:
        """The command that stops it: where it is measured, or was sent to; no velocity."""
        here = np.zeros(self.actions.dim, np.float32) if self._last is None else self._last.copy()
        known = self._velocity.copy() if self._last is None else np.ones(self.actions.dim, np.bool_)
        state = self._latest.get(STATE)
        if state is not None and self.now() - state.stamp <= state_age(self.rate):
            measured = dict(zip(self._numbers, state.value, strict=True))
            for i, key in enumerate(self._actions):
                known_now = np.isfinite(measured.get(key, np.nan))  # else the stop would never get through
                if known_now and not (self._last is not None and "gripper" in key):
                    here[i], known[i] = measured[key], True
        here[self._velocity] = 0.0
        return here if known.all() else None

    def _observe(self) -> None:
        stamp = self.now()  # before: a reading is never younger than it says
        seen = self._device.get_observation()
        found: dict[str, Array] = {}
        for spec in self.sensors:
            if spec.name == STATE:
                found[STATE] = np.array([seen[key] for key in self._numbers], np.float32)
            elif (value := seen.get(spec.name)) is not None:
                found[spec.name] = _shaped(np.asarray(value), spec)
        with self._changed:
            self._latest |= {name: Reading(value, stamp) for name, value in found.items()}


def _kind(key: str) -> str:
    for suffix, kind in _SUFFIXES.items():
        if key.endswith(suffix):
            return kind
    raise PrismError(f"lerobot: action '{key}' ends in neither .pos nor .vel: prism does not know what it moves")


def _unit(key: str, units: Mapping[str, str], actions: tuple[str, ...]) -> str:
    for pattern in (key, *(pattern for pattern in units if fnmatchcase(key, pattern))):
        if pattern in units:
            return units[pattern] + ("/s" if key.endswith(".vel") and not units[pattern].endswith("/s") else "")
    raise PrismError(f"units: none of '{key}', and LeRobot does not say it; the actions are {', '.join(actions)}")


def _sensor(key: str, shape: tuple[int, ...]) -> SensorSpec:
    if len(shape) == 3 and shape[2] == 3:
        return SensorSpec(key, "rgb", shape)
    if len(shape) == 3 and shape[2] == 1:
        return SensorSpec(key, "depth", shape[:2])
    if len(shape) == 1:
        return SensorSpec(key, "vector", shape)
    raise PrismError(f"lerobot: observation '{key}' has shape {shape}, of no kind that prism knows: ignore = ['{key}']")


def _shaped(value: Array, spec: SensorSpec) -> Array:
    if spec.kind == "depth":
        metres = value.reshape(value.shape[:2]).astype(np.float32)
        value = metres / 1000 if value.dtype.kind in "iu" else metres
    if value.shape != spec.shape or (spec.kind == "rgb" and value.dtype != np.uint8):
        raise PrismError(f"'{spec.name}' shows {value.shape} {value.dtype}, not {spec.shape} {spec.dtype}")
    return value.astype(spec.dtype)


# ------------------------------------------------------------------------------------------------------------- the file


def robot_from_table(data: Mapping[str, Any]) -> Robot:
    """The robot that a file with a table `lerobot` describes; nothing is connected."""
    for key in data:
        if key not in _KEYS:
            raise PrismError(f"unknown key '{key}'; there are {', '.join(_KEYS)}")
    rate, units, table, limits = (data.get(key) for key in ("rate", "units", "lerobot", "limits"))
    if not isinstance(rate, int | float) or not rate > 0:
        raise PrismError("rate is missing: commands a second, that of the demonstrations; rate = 30.0")
    units = {"*": units} if isinstance(units, str) else units
    if not isinstance(units, dict) or not all(isinstance(unit, str) and unit for unit in units.values()):
        raise PrismError('units is missing: LeRobot does not say them; units = "deg", or one each: {"a.pos" = "deg"}')
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise PrismError('[lerobot] type is missing: as --robot.type of lerobot-record; type = "so101_follower"')
    if not isinstance(limits, dict):
        raise PrismError("[limits] is missing: position and speed, one each action")
    more = {key: data[key] for key in ("name", "episode_seconds") if key in data}
    more |= {"ignore": tuple(data.get("ignore", ())), "addresses": _addresses(table)}
    return LeRobotRobot(make_device(table), float(rate), units, limits, **more)


def _addresses(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Ports and hosts of what moves; without one: its type and id."""
    found, tables = list[str](), [table]
    while tables:  # the arms of a robot with two have tables of their own
        one = tables.pop()
        tables += [value for key, value in one.items() if isinstance(value, dict) and key != "cameras"]
        found += [
            str(value) for key, value in one.items() if re.search(r"(^|_)(port|ip|host|address|url)$", key) and value
        ]
    named = [f"lerobot:{os.path.realpath(one) if one.startswith('/') else host_address(one)}" for one in found]
    return tuple(named) or (f"lerobot:{table['type']}:{table.get('id', '')}",)


def make_device(table: Mapping[str, Any]) -> Any:
    """LeRobot's own robot of a config, with the robots and cameras of other packages that it finds."""
    try:
        draccus, robots, cameras, plugins = map(
            importlib.import_module, ("draccus", "lerobot.robots", "lerobot.cameras", "lerobot.utils.import_utils")
        )
    except ImportError as error:
        raise PrismError(
            f"lerobot: cannot be imported here ({reason(error)}); install prism into LeRobot's environment, or LeRobot "
            "0.6 into this one: pip install lerobot==0.6.1 (Python 3.12)"
        ) from None
    for package in (robots, cameras):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):  # of a vendor that is not installed
                importlib.import_module(module.name)
    plugins.register_third_party_plugins()
    kinds = sorted(robots.RobotConfig.get_known_choices())
    if table["type"] not in kinds:
        close = difflib.get_close_matches(table["type"], kinds, n=1)
        hint = f"did you mean {close[0]}?" if close else f"LeRobot has {', '.join(kinds)}"
        raise PrismError(f"lerobot.type = '{table['type']}' is unknown; {hint}")
    try:
        return robots.make_robot_from_config(draccus.decode(robots.RobotConfig, dict(table)))
    except Exception as error:
        raise PrismError(f"lerobot: {reason(error)}; its keys are those of lerobot-record, --robot.KEY") from None
