"""The Robot contract: what `prism run` and `prism record` need from a driver or a twin.

A robot has sensors, each with its own rate and time stamps, and takes `rate` commands a second. Policies, people and
recordings have `fps` steps a second, at most as many: a command is then a part of a step's action (`ActionSpace.part`).
It owns the clock: a driver's is the computer's, a twin's may run as fast as it can be computed. Loops ask `now` and
`wait`, never `time`.

    robot.connect()
    robot.prepare(seed)                    a twin sets its scene up; at a real robot a person does
    while ...:
        readings = robot.read()            the latest of each sensor; never blocks
        robot.send(action)                 never blocks; safety.Guard alone calls it
        robot.wait(next_tick)
    robot.stop()                           stands still within 100 ms; from any thread, at any time
    robot.close()

A dry run sets `read_only` before `connect`: devices are opened for reading only, and nothing is written to them. A
driver that can do so says it (`can_read_only`); others take no part in a dry run.

A robot of another package is an entry point of the group prism.robots: name -> a callable that makes it, whose keyword
arguments are its options. tests/test_robots_conformance.py holds every robot to what is written here.
"""

from __future__ import annotations

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError
from prism.io.plugins import Table
from prism.robots.limits import Limits
from prism.sensors import ActionSpec, SensorSpec

Array = NDArray[np.generic]
STOP_SECONDS = 0.1  # within which `stop` must have the robot standing still


@dataclass(frozen=True)
class Reading:
    """One time step of a sensor, as its spec says, and when it was measured on the robot's clock, in seconds."""

    value: Array
    stamp: float


@dataclass(frozen=True)
class Health:
    """`ok`: it can move. `reason`: why not."""

    ok: bool = True
    reason: str = ""


@dataclass(frozen=True)
class ActionSpace:
    """The meaning of a command, one entry per dimension.

    `spec.kind` is that of the motion: an absolute position, a change of it, or its velocity. Grippers and quaternions
    are absolute and a mobile base is a velocity, whatever the kind. A command of 1 is `spec.scale` of its unit (of a
    velocity: of its unit a second). `pose`: the sensor whose first numbers are where the dimensions are now, in units;
    None where that is not measured.
    """

    spec: ActionSpec  # its kind and units are known
    base: tuple[int, ...] = ()  # dimensions of a mobile base
    pose: str | None = None
    pose_dims: int = 0  # how many dimensions `pose` tells

    def __post_init__(self) -> None:
        dim = len(self.units)
        self.spec.check(dim, "action space")
        if self.spec.kind not in tuple(ActionKind):
            raise PrismError(f"action space: kind '{self.spec.kind}' is not one of {ActionKind.words()}")
        if (self.pose is None) != (self.pose_dims == 0) or not 0 <= self.pose_dims <= dim:
            raise PrismError(f"action space: pose '{self.pose}' cannot tell {self.pose_dims} of {dim} dimensions")

    @property
    def dim(self) -> int:
        return len(self.units)

    @property
    def units(self) -> tuple[str, ...]:
        return self.spec.units

    @property
    def scales(self) -> NDArray[np.float64]:
        return np.array(self.spec.scale or (1.0,) * self.dim)

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """Kind of each dimension."""
        still = self.spec.still(self.dim)
        absolute, velocity, motion = ActionKind.ABSOLUTE, ActionKind.VELOCITY, self.spec.kind
        assert motion is not None
        return tuple(absolute if i in still else velocity if i in self.base else motion for i in range(self.dim))

    def part(self, action: Array, number: int, parts: int, before: Array | None, done: Array | None = None) -> Array:
        """Command `number` of the `parts` that make up a step's action: an equal part of what is left of a change when
        `done` of it was sent, the same velocity, the place on the way from the action `before` to a position; a gripper
        has no way."""
        if parts == 1:
            return action
        kinds, share = np.array(self.kinds), (number + 1) / parts
        asked = np.asarray(action, np.float64)
        start = asked if before is None else np.asarray(before, np.float64)
        sent = np.zeros_like(asked) if done is None else np.asarray(done, np.float64)
        way = start + share * (asked - start)
        for first in self.spec.quaternions:  # the shorter arc, of length 1
            turn = slice(first, first + 4)
            old = start[turn] * (1.0 if float(start[turn] @ asked[turn]) >= 0 else -1.0)
            mixed = old + share * (asked[turn] - old)
            way[turn] = mixed / max(float(np.linalg.norm(mixed)), 1e-9)
        way[list(self.spec.grippers)] = asked[list(self.spec.grippers)]
        left = (asked - sent) / (parts - number)
        return np.asarray(np.where(kinds == "delta", left, np.where(kinds == "velocity", asked, way)))

    def whole(self, commands: Array) -> Array:
        """The action of a step from its commands (N, D), as they were sent."""
        kinds, rows = np.array(self.kinds), np.asarray(commands, np.float32)
        ends = np.where(kinds == "velocity", rows.mean(0), rows[-1])
        return np.asarray(np.where(kinds == "delta", rows.sum(0), ends), np.float32)

    def name(self, i: int) -> str:
        return self.spec.names[i] if self.spec.names else f"dimension {i}"


@dataclass
class Robot(ABC):
    """A robot, real or twin. The constructor does not connect."""

    name: str
    rate: float  # commands a second
    sensors: tuple[SensorSpec, ...]  # `fps`: of each sensor; 0: `rate`
    actions: ActionSpace
    limits: Limits  # its own: a file may only narrow them
    is_twin: bool = field(default=False, kw_only=True)  # starts anew by itself, and says whether it succeeded
    realtime: bool = field(default=True, kw_only=True)  # False: its clock stands still until a loop waits
    episode_seconds: float = field(default=60.0, kw_only=True)
    fps: float = field(default=0.0, kw_only=True)  # steps a second; default: `rate`
    read_only: bool = field(default=False, kw_only=True)  # set before `connect`: its devices are read, never written to
    told: dict[str, Array] = field(default_factory=dict, kw_only=True)  # what a person says, by text sensor
    can_read_only: bool = field(default=False, init=False)  # its driver keeps to `read_only`

    def __post_init__(self) -> None:
        self.fps = self.fps or self.rate
        if not (0 < self.fps <= self.rate < math.inf) or abs(self.rate / self.fps - self.parts) > 1e-6:
            raise PrismError(
                f"robot '{self.name}': {self.rate:g} commands a second are not a multiple of {self.fps:g} steps"
            )
        if not 0 < self.episode_seconds < math.inf:
            raise PrismError(f"robot '{self.name}': episode_seconds = {self.episode_seconds:g}: use a number above 0")

    @property
    def parts(self) -> int:
        """Commands per step."""
        return round(self.rate / self.fps)

    @abstractmethod
    def connect(self) -> None:
        """PrismError if it cannot be reached. May be called again after `close`."""

    @abstractmethod
    def read(self) -> dict[str, Reading]:
        """The latest reading of every sensor that has one. Stamps never go back."""

    def readings(self) -> dict[str, Reading]:
        """`read`, and what a person says (instruction.py)."""
        said = {name: Reading(words, self.now()) for name, words in self.told.items()}
        return {**self.read(), **said}

    @abstractmethod
    def send(self, action: NDArray[np.float32]) -> None:
        """One command (D,), from now on. PrismError where it is not connected, was stopped, or is no such command."""

    @abstractmethod
    def stop(self) -> None:
        """Stand still and refuse commands until `prepare`."""

    @abstractmethod
    def close(self) -> None:
        """Stop and disconnect. May be called twice."""

    @abstractmethod
    def health(self) -> Health: ...

    def setpoint(self) -> NDArray[np.float64] | None:
        """The commanded pose, of the dimensions of `pose`, in units. A robot that adds up changes or
        velocities says it: what is left to go counts for the limits. None: it moves on from where it is."""
        return None

    @abstractmethod
    def prepare(self, seed: int) -> None:
        """An episode begins: commands are taken again."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float) -> None:
        """Returns when the robot's clock says `until`."""
        while (left := until - self.now()) > 0:
            time.sleep(left)

    def success(self) -> bool | None:
        """Whether the task is done; None: unknown."""
        return None

    def script(self, seed: int) -> Callable[[], NDArray[np.float32]]:
        """A demonstrator of its own, the next command at each call: for twins, and to try `prism record`."""
        raise PrismError(f"robot '{self.name}' has no script: use another --teleop")

    def period(self, spec: SensorSpec) -> float:
        """Seconds between two readings of a sensor."""
        return 1.0 / (spec.fps or self.rate)


ROBOTS: Table[Callable[..., Robot]] = Table(
    "prism.robots", "robot", {}, remedy="none is installed; twins are in packages/prism-sims, docs/howto/extend.md"
)


def make_robot(name: str, options: Sequence[str] = ()) -> Robot:
    """By its name in the table, or by its file (drivers/composed.py); options are KEY=VALUE."""
    if name.endswith((".toml", ".json")):
        from prism.robots.drivers.composed import robot_from_file

        if options:
            raise PrismError(
                f"--option {options[0]}: a robot described by a file takes no options; write it into {name}"
            )
        return robot_from_file(Path(name))
    if name not in ROBOTS:
        raise PrismError(f"{ROBOTS.unknown(name)} (a real robot is a file, as my_robot.toml: docs/howto/robots.md)")
    make = ROBOTS[name]
    known = list(inspect.signature(make).parameters)
    given = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in known:
            raise PrismError(f"--option {option}: write KEY=VALUE; robot '{name}' has {', '.join(known) or 'none'}")
        given[key] = value
    return make(**given)
