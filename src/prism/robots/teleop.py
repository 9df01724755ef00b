"""Teleoperation: devices and scripts that move a robot. One line of TELEOPS per device.

    keyboard      keys of the terminal               prism record data/x --robot NAME --teleop keyboard
    gamepad       sticks and buttons, by evdev       pip install evdev
    spacemouse    six axes, by hid                   pip install hid
    leader=ROBOT  an arm that a person moves: another robot of the table, whose pose is followed
    scripted      the robot's own demonstrator (Robot.script): twins, and to try things

A device is anything with `read() -> Motion` and `close()`; what it costs to open it is spent when it is opened.
All of them say when they take over from a policy (`prism run --teleop`): a key, a button, a hand on the stick; the
script does where the policy's action is far from its own, as a person who watches would.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError, reason
from prism.io.plugins import Table
from prism.robots.contract import Array, Robot, make_robot
from prism.robots.guard import Seen

TAKE = "t"  # takes over, and gives back
_SHARE = 0.5  # of the robot's speed limits, at full deflection


class Teleop(Protocol):
    who: str
    help: str

    def start(self, seed: int) -> None: ...
    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        """The next action; None: stand still."""
        ...

    def wants(self, keys: str, own: Array | None, policys: Array | None) -> bool:
        """Whether it is in command, of a robot that a policy moves otherwise."""
        ...

    def close(self) -> None: ...


class Toggled:
    """In command after `t`, until the next one."""

    _taken = False

    def start(self, seed: int) -> None:
        self._taken = False

    def wants(self, keys: str, own: Array | None, policys: Array | None) -> bool:
        self._taken ^= keys.count(TAKE) % 2 == 1
        return self._taken

    def close(self) -> None: ...


class Script:
    """The robot's own demonstrator. It takes over where the policy's action is farther from its own than `far`, in
    half ranges of a command, for 2 steps in a row, and gives back where they agree for 6.

    `noise` (half ranges) disturbs what is executed, not what is recorded (`label`): such demonstrations show how to
    come back to the way.
    """

    who, help = "script", ""

    def __init__(self, robot: Robot, far: float = 0.15, noise: float = 0.0) -> None:
        self._robot, self._far, self._noise = robot, far, noise
        self.label: Array | None = None

    def start(self, seed: int) -> None:
        self._next: Callable[[], NDArray[np.float32]] = self._robot.script(seed)
        self._taken, self._others = False, 0
        self._rng = np.random.default_rng([seed, 17])

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        action = self._next()
        if not self._noise:
            return action
        self.label = action
        pushed = action + self._noise * self._rng.standard_normal(action.shape)
        grippers = list(self._robot.actions.spec.grippers)
        pushed[grippers] = action[grippers]
        return np.clip(pushed, -1.0, 1.0).astype(np.float32)

    def wants(self, keys: str, own: Array | None, policys: Array | None) -> bool:
        apart = False
        if own is not None and policys is not None:
            apart = float(np.abs(np.asarray(own, np.float64) - np.asarray(policys, np.float64)).max()) > self._far
        self._others = self._others + 1 if apart != self._taken else 0
        if self._others >= (6 if self._taken else 2):
            self._taken, self._others = not self._taken, 0
        return self._taken

    def close(self) -> None: ...


class Person:
    """Moves at a share of the speed limits. The grippers stay as the policy last had them until the person moves them:
    a takeover drops nothing."""

    def __init__(self, robot: Robot, device: str) -> None:
        self._robot, self._size = robot, full_speed(robot, device)
        self._grippers = list(robot.actions.spec.grippers)

    def start(self, seed: int) -> None:
        self._grip: NDArray[np.float64] = np.full(len(self._grippers), -1.0)

    def _still(self, toggles: bool) -> NDArray[np.float32]:
        self._grip = np.where(self._grip > 0, -1.0, 1.0) if toggles else self._grip
        action = np.zeros(self._robot.actions.dim, np.float32)
        action[self._grippers] = self._grip
        return action

    def _follow(self, taken: bool, policys: Array | None) -> bool:
        if not taken and policys is not None:
            self._grip = np.asarray(policys, np.float64)[self._grippers]
        return taken


class Keyboard(Toggled, Person):
    """A person at a terminal: i k, j l, u o move the first three dimensions, g opens and closes the gripper.

    A terminal repeats a key that is held down, and does not say when it is released: a motion lasts 0.15 s.
    """

    who, help = "operator", "i/k, j/l, u/o: move along the first three dimensions; g: gripper"
    _MOVES = ("ik", "jl", "uo")

    def __init__(self, robot: Robot) -> None:
        Person.__init__(self, robot, "keyboard")

    def start(self, seed: int) -> None:
        Toggled.start(self, seed)
        Person.start(self, seed)
        self._until: dict[tuple[int, float], float] = {}

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        space = self._robot.actions
        for key in keys:
            for dim, pair in enumerate(self._MOVES[: space.dim]):
                if key in pair:
                    self._until[dim, 1.0 if key == pair[0] else -1.0] = seen.at + 0.15
        action = self._still(keys.count("g") % 2 == 1)
        for (dim, sign), until in self._until.items():
            if until > seen.at and dim not in self._grippers:
                action[dim] += sign * self._size[dim]
        return action

    def wants(self, keys: str, own: Array | None, policys: Array | None) -> bool:
        return self._follow(super().wants(keys, own, policys), policys)


def full_speed(robot: Robot, device: str) -> NDArray[np.float64]:
    """Size of an action at full deflection, per dimension."""
    space = robot.actions
    if space.spec.kind == "absolute":
        raise PrismError(f"--teleop {device} moves by changes or velocities; this robot takes absolute poses")
    if not robot.limits.speed:
        raise PrismError(f"--teleop {device} needs the speed limits of robot '{robot.name}'; it has none")
    step = 1.0 / robot.fps if space.spec.kind == "delta" else 1.0
    return np.asarray(_SHARE * step * np.array(robot.limits.speed) / space.scales)


# ------------------------------------------------------------------ devices


@dataclass(frozen=True)
class Motion:
    """State of a device: axes in -1 to 1, in the order of the robot's dimensions without its grippers."""

    axes: tuple[float, ...] = ()
    closed: bool | None = None  # the gripper; None: as it was
    takes: bool = False  # the button that takes over is held
    toggles: bool = False  # the gripper opens if it was closed, and closes if it was open


class Device(Protocol):
    name: str

    def read(self) -> Motion: ...
    def close(self) -> None: ...


class Sticks(Person):
    """Any device of axes and buttons. A hand on the stick is in command."""

    who = "operator"
    _DEAD = 0.08  # of an axis, around its middle

    def __init__(self, robot: Robot, device: Device) -> None:
        super().__init__(robot, device.name)
        self._device = device
        self.help = f"{device.name}: move it; its first button closes the gripper"

    def start(self, seed: int) -> None:
        super().start(seed)
        self._motion = Motion()

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        try:
            self._motion = motion = self._device.read()
        except OSError as error:
            raise PrismError(
                f"--teleop {self._device.name}: the device is gone ({reason(error)}); plug it in"
            ) from None
        if motion.closed is not None:
            self._grip = np.full(len(self._grippers), 1.0 if motion.closed else -1.0)
        action = self._still(motion.toggles)
        moved = [dim for dim in range(len(action)) if dim not in self._grippers]
        for dim, axis in zip(moved, motion.axes, strict=False):
            if abs(axis) > self._DEAD and math.isfinite(axis):
                action[dim] = float(np.clip(axis, -1.0, 1.0)) * self._size[dim]
        return action

    def wants(self, keys: str, own: Array | None, policys: Array | None) -> bool:
        moved = any(abs(axis) > self._DEAD for axis in self._motion.axes)
        return self._follow(self._motion.takes or moved, policys)

    def close(self) -> None:
        self._device.close()


class Gamepad:
    """Left stick x, y; right stick z and the turn; button A closes the gripper, B opens it; shoulder button: takes."""

    name = "gamepad"
    _AXES: ClassVar = {"ABS_X": (1, -1.0), "ABS_Y": (0, -1.0), "ABS_RX": (3, 1.0), "ABS_RY": (2, -1.0)}

    def __init__(self) -> None:
        try:
            import evdev
        except ImportError:
            raise PrismError("--teleop gamepad needs evdev: pip install evdev") from None
        self._codes = evdev.ecodes
        pads = [evdev.InputDevice(path) for path in evdev.list_devices()]
        pads = [pad for pad in pads if self._codes.BTN_SOUTH in pad.capabilities().get(self._codes.EV_KEY, ())]
        if not pads:
            raise PrismError("--teleop gamepad: none is connected, or /dev/input is not readable; plug one in")
        self._pad = pads[0]

    def read(self) -> Motion:
        held, axes = self._pad.active_keys(), [0.0] * 4
        for name, (at, sign) in self._AXES.items():
            info = self._pad.absinfo(getattr(self._codes, name))
            middle, half = (info.max + info.min) / 2, max((info.max - info.min) / 2, 1)
            axes[at] = sign * (info.value - middle) / half
        closed = True if self._codes.BTN_SOUTH in held else False if self._codes.BTN_EAST in held else None
        return Motion(tuple(axes), closed, self._codes.BTN_TL in held)

    def close(self) -> None:
        self._pad.close()


class SpaceMouse:
    """3Dconnexion's: reports 1 and 2 are the six axes, 3 the buttons; the newest of each counts."""

    name = "spacemouse"
    _VENDORS, _FULL = (0x256F, 0x046D), 350.0
    _SIGNS = (-1.0, -1.0, -1.0, -1.0, -1.0, -1.0)  # its y looks towards the person, its z down
    _ORDER = (1, 0, 2, 4, 3, 5)

    def __init__(self) -> None:
        try:
            import hid
        except ImportError:
            raise PrismError("--teleop spacemouse needs hid: pip install hid") from None
        devices = [d for d in hid.enumerate() if d["vendor_id"] in self._VENDORS]
        found = [d for d in devices if "space" in (d["product_string"] or "").lower()]  # None: it may not be read
        if not found:
            raise PrismError("--teleop spacemouse: none is connected, or it is not readable (udev); plug one in")
        self._mouse = hid.Device(path=found[0]["path"])
        self._mouse.nonblocking = True
        self._axes, self._buttons = [0.0] * 6, 0

    def read(self) -> Motion:
        toggles = False
        while report := bytes(self._mouse.read(16)):
            if report[0] in (1, 2):
                first, numbers = 3 * (report[0] - 1), (len(report) - 1) // 2
                for i, value in enumerate(struct.unpack(f"<{numbers}h", report[1 : 1 + 2 * numbers])[: 6 - first]):
                    self._axes[first + i] = value / self._FULL
            elif report[0] == 3:
                toggles ^= bool(report[1] & 1 and not self._buttons & 1)
                self._buttons = report[1]
        axes = tuple(sign * self._axes[i] for i, sign in zip(self._ORDER, self._SIGNS, strict=True))
        return Motion(axes, None, bool(self._buttons & 2), toggles)

    def close(self) -> None:
        self._mouse.close()


class Leader(Toggled):
    """An arm that a person moves. A robot of absolute poses goes where it is; others follow its motion."""

    who, help = "operator", f"move the leader; {TAKE}: take over, give back"

    def __init__(self, robot: Robot, leader: Robot) -> None:
        space, led = robot.actions, leader.actions
        if led.pose is None or led.pose_dims < space.dim or led.units[: space.dim] != space.units:
            raise PrismError(
                f"--teleop leader={leader.name}: it does not report the {space.dim} numbers of robot '{robot.name}' "
                f"({', '.join(space.units)})"
            )
        self._robot, self._leader = robot, leader
        leader.read_only = leader.can_read_only or leader.is_twin  # it is led by hand: nothing is sent to it
        leader.connect()

    def start(self, seed: int) -> None:
        super().start(seed)
        self._before: NDArray[np.float64] | None = None

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        space, pose = self._robot.actions, self._leader.actions.pose
        reading = self._leader.read().get(pose or "")
        if reading is None:
            return None
        at = np.asarray(reading.value[: space.dim], np.float64)
        before, self._before = self._before, at
        if len(at) < space.dim or not np.isfinite(at).all():
            return None
        moved = np.zeros(space.dim) if before is None else at - before
        kinds, step = np.array(space.kinds), self._robot.fps
        units = np.where(kinds == "absolute", at, np.where(kinds == "delta", moved, moved * step))
        return np.asarray(units / space.scales, np.float32)

    def close(self) -> None:
        self._leader.close()


def _leader(robot: Robot, word: str) -> Teleop:
    if not word:
        raise PrismError("--teleop leader=ROBOT: which arm leads?")
    return Leader(robot, make_robot(word))


TELEOPS: Table[Callable[[Robot, str], Teleop]] = Table(
    "prism.teleops",
    "teleoperation",
    {
        "keyboard": lambda robot, word: Keyboard(robot),
        "gamepad": lambda robot, word: Sticks(robot, Gamepad()),
        "spacemouse": lambda robot, word: Sticks(robot, SpaceMouse()),
        "leader": _leader,
        "scripted": lambda robot, word: Script(robot),
    },
)


def make_teleop(name: str, robot: Robot, is_terminal: bool, noise: float = 0.0) -> Teleop:
    """By its name, as leader=ROBOT where that asks for a word. PrismError before anything moves."""
    kind, _, word = name.partition("=")
    make = TELEOPS[kind]
    if kind == "keyboard" and not is_terminal:
        raise PrismError("--teleop keyboard needs a terminal: start it in one, or use --teleop scripted")
    if noise and kind != "scripted":
        raise PrismError(f"--noise {noise:g} disturbs a script; a person does not need it: drop it")
    return Script(robot, noise=noise) if kind == "scripted" else make(robot, word)
