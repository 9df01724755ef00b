"""Driving a robot, an episode at a time: who commands, the loop, and the keys that a person has."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from prism_client import Executor, PlanError

from prism.data.pictures import shrunk
from prism.errors import PrismError
from prism.robots.base import Array, Robot
from prism.robots.recording import Trace
from prism.robots.safety import Guard, Seen
from prism.sensors import KINDS, SensorSpec

STOP, SUCCESS, FAILURE = " q", "s", "f"
KEYS = "space or q: stop now; s: it succeeded; f: it failed"


class Keys:
    """Single keys of a terminal, without waiting for them; none where the input is no terminal."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdin
        self.is_terminal = self._stream.isatty()

    def __enter__(self) -> Self:
        if self.is_terminal:
            import termios
            import tty

            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_terminal:
            import termios

            termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)

    def pressed(self, wait: float = 0.0) -> str:
        """All keys since the last call, the oldest first."""
        found = ""
        while self.is_terminal and select.select([self._stream], [], [], 0.0 if found else wait)[0]:
            new = os.read(self._stream.fileno(), 64).decode(errors="ignore")
            if not new:
                break
            found += new
        return found.lower()


class Commander(Protocol):
    who: str

    def start(self, seed: int) -> None: ...
    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        """The next command; None: stand still. PlanError or PrismError stops the robot."""
        ...


class PolicyCommander:
    """A policy, through the executor of prism-client."""

    who = "policy"

    def __init__(self, executor: Executor, sizes: Mapping[str, SensorSpec] | None = None) -> None:
        self.executor, self._sizes = executor, dict(sizes or {})
        self._names = {str(sensor["name"]) for sensor in executor.planner.info["sensors"]}

    def start(self, seed: int) -> None:
        self.executor.reset(seed)

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        observation = {name: value for name, value in seen.observation.items() if name in self._names}
        for name, spec in self._sizes.items():
            if name in observation:
                observation[name] = shrunk(observation[name][None], spec)[0]
        ages = {name: seen.ages[name] for name in observation}
        return self.executor.act(observation, ages)


class ScriptCommander:
    """The robot's own demonstrator (Robot.script)."""

    who = "script"

    def __init__(self, robot: Robot) -> None:
        self._robot = robot

    def start(self, seed: int) -> None:
        self._next: Callable[[], NDArray[np.float32]] = self._robot.script(seed)

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        return self._next()


class KeyboardCommander:
    """A person at a terminal: i k, j l, u o move the first three dimensions, g opens and closes the gripper.

    A terminal repeats a key that is held down, and does not say when it is released: a motion lasts 0.15 s.
    """

    who = "operator"
    HELP = "i/k, j/l, u/o: move along the first three dimensions; g: gripper"
    _MOVES = ("ik", "jl", "uo")

    def __init__(self, robot: Robot, share: float = 0.5) -> None:
        space = robot.actions
        if space.spec.kind == "absolute":
            raise PrismError("--teleop keyboard moves by changes or velocities; this robot takes absolute poses")
        if not robot.limits.speed:
            raise PrismError(f"--teleop keyboard needs the speed limits of robot '{robot.name}'; it has none")
        step = 1.0 / robot.rate if space.spec.kind == "delta" else 1.0
        self._size = share * step * np.array(robot.limits.speed) / space.scales
        self._robot, self._grippers = robot, space.spec.grippers

    def start(self, seed: int) -> None:
        self._until: dict[tuple[int, float], float] = {}
        self._closed = False

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        for key in keys:
            self._closed ^= key == "g"
            for dim, pair in enumerate(self._MOVES[: self._robot.actions.dim]):
                if key in pair:
                    self._until[dim, 1.0 if key == pair[0] else -1.0] = seen.at + 0.15
        action = np.zeros(self._robot.actions.dim, np.float32)
        for (dim, sign), until in self._until.items():
            if until > seen.at and dim not in self._grippers:
                action[dim] += sign * self._size[dim]
        action[list(self._grippers)] = 1.0 if self._closed else -1.0
        return action


@dataclass(frozen=True)
class Outcome:
    success: bool | None  # None: nobody said
    stopped: str  # why, where the episode did not end by itself
    by_operator: bool
    keys: str  # the last ones


def drive(
    guard: Guard, commander: Commander, seed: int, seconds: float, keys: Keys, trace: Trace, polls: int = 1,
    ends: str = "",
) -> Outcome:  # fmt: skip
    """One episode. `polls`: readings a command, for a recording; `ends`: keys that end it, beside stop and s, f."""
    robot = guard.robot
    commander.start(seed)
    seen = guard.begin(seed)
    action = _first(guard, commander, seen)  # it may take its time: nothing moves yet
    start, pressed = robot.now(), ""
    for tick in range(max(1, round(seconds * robot.rate))):
        due = start + tick / robot.rate
        for poll in range(1, polls + 1) if tick else ():
            robot.wait(due + (poll - polls) / (polls * robot.rate))
            seen = guard.observe()
            trace.see(seen)
        trace.see(seen)
        pressed = keys.pressed()
        if any(key in STOP for key in pressed):
            guard.stop("by the operator")
            return Outcome(None, "by the operator", True, pressed)
        if robot.success() or any(key in SUCCESS + FAILURE + ends for key in pressed):
            break
        if tick:
            action = _ask(guard, commander, seen, pressed)
        sent = guard.command(action)
        for reason in sent.why:
            trace.why[reason] = trace.why.get(reason, 0) + 1
        if sent.action is not None:
            trace.command(due, sent.action, commander.who, 1e3 * (robot.now() - due))
        if guard.state == "stopped":
            return Outcome(False if robot.is_twin else None, guard.reason, False, pressed)
    else:
        robot.wait(start + round(seconds * robot.rate) / robot.rate)
        guard.observe()
    success = robot.success()
    if success is None and any(key in SUCCESS + FAILURE for key in pressed):
        success = any(key in SUCCESS for key in pressed)
    guard.stop("the episode is over")
    return Outcome(success, "", False, pressed)


def _first(guard: Guard, commander: Commander, seen: Seen) -> NDArray[np.generic] | None:
    return _ask(guard, commander, seen, "")


def _ask(guard: Guard, commander: Commander, seen: Seen, pressed: str) -> NDArray[np.generic] | None:
    """What the commander says; whatever goes wrong in it stops the robot."""
    try:
        return commander.act(seen, pressed)
    except (PlanError, PrismError) as error:
        guard.stop(f"{commander.who}: {error}")
    except Exception as error:  # a bug in a policy or a plugin: the robot stops first
        guard.stop(f"{commander.who}: {type(error).__name__}: {error}")
    return None


def check_fit(robot: Robot, info: Mapping[str, Any], resize: bool = False) -> dict[str, SensorSpec]:
    """PrismError unless the policy (planner.info) fits the robot; which pictures must be resized, to what."""
    action = info.get("action") or {}
    kind = action.get("kind") or info.get("action_kind")
    if int(info["action_dim"]) != robot.actions.dim:
        raise PrismError(
            f"the policy gives {info['action_dim']} numbers an action, robot '{robot.name}' takes {robot.actions.dim}: "
            "it was trained for another robot"
        )
    if kind != robot.actions.spec.kind:
        raise PrismError(
            f"the policy's actions are '{kind}', robot '{robot.name}' takes '{robot.actions.spec.kind}': train on data "
            "that say their kind (prism record does), or state it (--set controller.selection.action_kind=...)"
        )
    names, own = tuple(action.get("names", ())), robot.actions.spec.names
    if names and own and names != own:
        raise PrismError(f"the policy's actions are {', '.join(names)}, the robot's {', '.join(own)}: another robot?")
    if (fps := float(info.get("fps") or 0.0)) and not 0.98 < fps / robot.rate < 1.02:
        raise PrismError(
            f"the policy was trained at {fps:g} steps a second, robot '{robot.name}' takes {robot.rate:g} commands: "
            "record at the robot's rate, or set it to the policy's"
        )
    return _check_sensors(robot, info, resize)


def _check_sensors(robot: Robot, info: Mapping[str, Any], resize: bool) -> dict[str, SensorSpec]:
    there = {spec.name: spec for spec in robot.sensors}
    sizes: dict[str, SensorSpec] = {}
    for sensor in info["sensors"]:
        name, shape = str(sensor["name"]), tuple(sensor["shape"])
        if name not in there:
            if name in (info.get("needs") or ()):
                raise PrismError(
                    f"robot '{robot.name}' has no sensor '{name}', which the policy was never trained without; it has "
                    f"{', '.join(there)}"
                )
            continue
        if there[name].kind != sensor["kind"]:
            raise PrismError(f"sensor '{name}': the policy's is {sensor['kind']}, the robot's {there[name].kind}")
        if there[name].shape == shape:
            continue
        if not KINDS[sensor["kind"]].is_image or there[name].shape[2:] != shape[2:]:
            raise PrismError(f"sensor '{name}': the policy needs shape {shape}, the robot gives {there[name].shape}")
        if not resize:
            raise PrismError(
                f"sensor '{name}': the policy needs pictures of {shape[0]} x {shape[1]}, the robot gives "
                f"{there[name].shape[0]} x {there[name].shape[1]}: pass --resize to bring them to that size"
            )
        sizes[name] = SensorSpec(name, sensor["kind"], shape)
    return sizes


def ask_success(keys: Keys, patience: float = 60.0) -> bool | None:
    """Of a person, after an episode that nobody judged."""
    until = time.monotonic() + patience
    while keys.is_terminal and time.monotonic() < until:
        for key in keys.pressed(0.1):
            if key in SUCCESS + FAILURE:
                return key in SUCCESS
    return None


def demonstrated_range(info: Mapping[str, Any]) -> tuple[Array, Array] | None:
    """Of the actions that the policy has learned from, where the planner says it."""
    found = info.get("action_range")
    return None if not found else (np.array(found[0], np.float64), np.array(found[1], np.float64))
