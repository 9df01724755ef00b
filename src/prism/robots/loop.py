"""Driving a robot, one episode at a time: commanders, the loop and the keys."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from prism_client import Executor, Plan, PlanError, PolicyInfo
from prism_client.messages import ActionInfo

from prism.data.pictures import shrunk
from prism.errors import PrismError
from prism.io.terminal import TerminalLost, drop_lost_outputs
from prism.robots.contract import Array, Robot
from prism.robots.guard import Guard, Seen
from prism.robots.recording import Trace
from prism.robots.teleop import Teleop
from prism.sensors import KINDS, SensorSpec
from prism.units import factor

STOP, SUCCESS, FAILURE = " q", "s", "f"
KEYS = "space or q: stop now; s: it succeeded; f: it failed"
_NO_LETTERS = re.compile(r"\x1b(\[[0-9;]*[A-Za-z~]|O[A-Z])")  # what arrows and function keys send


class Keys:
    """Single keys of a terminal, without waiting for them; none where the input is no terminal."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdin
        self.is_terminal = self._stream.isatty()

    def help(self, keys: str) -> str:
        """Help on the keys; without a terminal: how to stop."""
        if self.is_terminal:
            return keys
        return f"no terminal, so no keys are read. Stop now: Ctrl-C, or kill {os.getpid()}"

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

            with contextlib.suppress(termios.error):  # it is lost
                termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)

    def pressed(self, wait: float = 0.0) -> str:
        """All keys since the last call, the oldest first. TerminalLost if the terminal is gone."""
        found = ""
        while self.is_terminal and select.select([self._stream], [], [], 0.0 if found else wait)[0]:
            try:
                new = os.read(self._stream.fileno(), 64).decode(errors="ignore")
            except OSError:
                new = ""
            if not new:
                drop_lost_outputs()
                raise TerminalLost
            found += new
        return _NO_LETTERS.sub("", found).lower()


class Commander(Protocol):
    @property
    def who(self) -> str: ...  # commanded last
    @property
    def plan(self) -> Plan | None: ...  # made in the last step
    @property
    def label(self) -> Array | None: ...  # what to record of the last step, where it is not what was executed
    def start(self, seed: int) -> None: ...
    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        """The next action; None: stand still. PlanError or PrismError stops the robot."""
        ...

    def revise(self) -> NDArray[np.generic] | None:
        """Another action for the step that is being executed; None: it stays."""
        ...

    def sent(self, action: Array | None) -> None:
        """The command that the robot really got in the last step; None: nothing."""

    def trouble(self) -> str:
        """Reason to stand still at once, also between two steps; empty: none."""
        ...


class PolicyCommander:
    """A policy, through the executor of prism-client."""

    who, label = "policy", None

    def __init__(self, executor: Executor, sizes: Mapping[str, SensorSpec] | None = None) -> None:
        self.executor, self._sizes = executor, dict(sizes or {})
        self.plan: Plan | None = None
        self._info = executor.planner.info
        self._names = {sensor.name for sensor in self._info.sensors}

    def start(self, seed: int) -> None:
        self.executor.reset(seed)
        now = self.executor.planner.info  # of a server that was restarted meanwhile
        if other := self._info.differs(now):
            raise PrismError(f"the server has another policy than was compared with the robot ({other[0]}): run again")

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        observation = {name: value for name, value in seen.observation.items() if name in self._names}
        for name, spec in self._sizes.items():
            if name in observation:
                observation[name] = shrunk(observation[name][None], spec)[0]
        ages = {name: seen.ages[name] for name in observation}
        self.plan = None  # also where the next line raises
        command = self.executor.step(observation, ages)
        self.plan = command.plan
        return command.action

    def revise(self) -> NDArray[np.generic] | None:
        command = self.executor.revise()
        self.plan = None if command is None else command.plan
        return None if command is None else command.action

    def sent(self, action: Array | None, taken_over: bool = False) -> None:
        self.executor.sent(action, taken_over)

    def trouble(self) -> str:
        return self.executor.planner.trouble()


class TeleopCommander:
    """A person, or the robot's own script (teleop.py)."""

    plan = None

    def __init__(self, teleop: Teleop) -> None:
        self.teleop, self.who = teleop, teleop.who

    @property
    def label(self) -> Array | None:
        return getattr(self.teleop, "label", None)

    def start(self, seed: int) -> None:
        self.teleop.start(seed)

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        return self.teleop.act(seen, keys)

    def revise(self) -> None:
        return None

    def sent(self, action: Array | None) -> None:
        pass

    def trouble(self) -> str:
        return ""


class Takeover:
    """A policy that a person can take over from. It keeps planning meanwhile, and continues from where it gets the
    robot back."""

    label = None

    def __init__(self, policy: PolicyCommander, teleop: Teleop) -> None:
        self._policy, self._teleop = policy, teleop
        self.executor, self.who = policy.executor, policy.who

    @property
    def plan(self) -> Plan | None:
        return self._policy.plan

    def start(self, seed: int) -> None:
        self._policy.start(seed)
        self._teleop.start(seed)
        self.who = self._policy.who

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        own, policys, failure = self._teleop.act(seen, keys), None, None
        try:
            policys = self._policy.act(seen, keys)
        except PlanError as error:
            failure = error
        wants = self._teleop.wants(keys, own, policys)  # once a step: it counts keys
        self.who = self._teleop.who if wants else self._policy.who
        if failure is not None and not wants:
            raise failure
        return own if wants else policys

    def revise(self) -> NDArray[np.generic] | None:
        new = self._policy.revise()
        return new if self.who == self._policy.who else None

    def sent(self, action: Array | None) -> None:
        self._policy.sent(action, taken_over=self.who != self._policy.who)

    def trouble(self) -> str:
        return self._policy.trouble() if self.who == self._policy.who else ""


@dataclass(frozen=True)
class Outcome:
    success: bool | None  # None: unknown
    stopped: str  # why, where the episode did not end by itself
    by_operator: bool
    keys: str  # the last ones


def drive(
    guard: Guard, commander: Commander, seed: int, seconds: float, keys: Keys, trace: Trace, polls: int = 1,
    ends: str = "",
) -> Outcome:  # fmt: skip
    """One episode. The commander acts once per step, and the robot gets a part of that action at each command.
    `polls`: readings a command, for a recording; `ends`: keys that end it, beside stop and s, f."""
    robot = guard.robot
    commander.start(seed)
    seen = guard.begin(seed)
    action = _ask(guard, commander, seen, "")  # it may take its time: nothing moves yet
    start, pressed, asked, done = robot.now(), "", "", np.zeros(robot.actions.dim)
    got: list[Array] = []  # commands of this step
    before: object = None if guard.pose is None else guard.pose / robot.actions.scales[: len(guard.pose)]
    for tick in range(max(1, round(seconds * robot.rate))):
        due, part = start + tick / robot.rate, tick % robot.parts
        for poll in range(1, polls + 1) if tick else ():
            robot.wait(due + (poll - polls) / (polls * robot.rate))
            seen = guard.observe()
            trace.see(seen)
        trace.see(seen)
        if camera := trace.overrun():
            guard.stop(why := f"the pictures of '{camera}' come faster than they are compressed")
            return Outcome(None, why, False, pressed)
        pressed = keys.pressed()
        asked += pressed
        if any(key in STOP for key in pressed):
            guard.stop("by the operator")
            return Outcome(None, "by the operator", True, pressed)
        judged = tick and any(key in SUCCESS + FAILURE + ends for key in pressed)  # before: of the last episode
        if robot.success() or judged:
            break
        if tick and part == 0:
            commander.sent(robot.actions.whole(np.stack(got)) if got else None)
            got.clear()
            before, action, asked = action, _ask(guard, commander, seen, asked), ""
            if getattr(commander, "over", False):  # a replay
                break
        if part == 0:
            trace.decide(tick // robot.parts, commander.who, commander.plan, commander.label)
        elif (new := commander.revise()) is not None:
            action = new
            trace.revise(tick // robot.parts, commander.plan)
        done = np.zeros_like(done) if part == 0 else done  # of this step's action
        lost = commander.trouble()
        sent = guard.command(None if lost else _part(robot, action, part, before, done))
        if lost:
            trace.why[lost] = trace.why.get(lost, 0) + 1
        for reason in sent.why:
            trace.why[reason] = trace.why.get(reason, 0) + 1
        if sent.action is not None:
            done = done + sent.action
            got.append(sent.action)
            trace.command(tick // robot.parts, due, sent.action, 1e3 * (robot.now() - due), sent.at)
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


def _part(robot: Robot, action: object, part: int, before: object, done: Array) -> object:
    """The part of a step's action to send now; invalid actions are left to the guard."""

    def is_action(value: object) -> bool:
        numbers = np.asarray(value)
        return numbers.shape == (robot.actions.dim,) and bool(np.isfinite(numbers).all())

    if robot.parts == 1 or action is None or not is_action(action):
        return action
    known = np.asarray(before) if before is not None and is_action(before) else None
    return robot.actions.part(np.asarray(action), part, robot.parts, known, done)


def _ask(guard: Guard, commander: Commander, seen: Seen, pressed: str) -> NDArray[np.generic] | None:
    """The commander's action; any error in it stops the robot."""
    try:
        return commander.act(seen, pressed)
    except (PlanError, PrismError) as error:
        guard.stop(f"{commander.who}: {error}")
    except Exception as error:  # a bug in a policy or a plugin: the robot stops first
        guard.stop(f"{commander.who}: {type(error).__name__}: {error}")
    return None


_BEYOND = 1.0  # how far demonstrated actions may exceed the robot's own limits, which cut them: 1 is twice as far


def check_fit(
    robot: Robot, info: PolicyInfo, resize: bool = False, action_kind: str | None = None
) -> dict[str, SensorSpec]:
    """PrismError unless the policy (planner.info) fits the robot; which pictures must be resized, to what.
    `action_kind`: what a person says of the policy's actions, where its data did not."""
    action = info.action
    kind = action.kind or action_kind
    if kind is None:
        raise PrismError(
            f"unknown kind of action: neither the policy nor its data say it, and robot '{robot.name}' takes "
            f"'{robot.actions.spec.kind}'; if they are that, pass --action-kind {robot.actions.spec.kind}"
        )
    if action_kind not in (None, kind):
        raise PrismError(f"--action-kind {action_kind}: the policy's actions are '{kind}'; drop the option")
    if info.action_dim != robot.actions.dim:
        raise PrismError(
            f"the policy gives {info.action_dim} numbers an action, robot '{robot.name}' takes {robot.actions.dim}: "
            "it was trained for another robot"
        )
    if kind != robot.actions.spec.kind:
        raise PrismError(
            f"the policy's actions are '{kind}', robot '{robot.name}' takes '{robot.actions.spec.kind}': train on "
            "data of this robot"
        )
    names, own = action.names, robot.actions.spec.names
    if names and own and names != own:
        raise PrismError(f"the policy's actions are {', '.join(names)}, the robot's {', '.join(own)}: another robot?")
    if (fps := info.fps) and not 0.98 < fps / robot.fps < 1.02:
        raise PrismError(
            f"the policy was trained at {fps:g} steps a second, robot '{robot.name}' makes {robot.fps:g}: record at "
            "the robot's, or set them to the policy's"
        )
    _check_units(robot, action)
    _check_range(robot, info.action_range)
    return _check_sensors(robot, info, resize)


_CONVERT = "convert the data (prism data convert --map KEY=action:vector:SCALE) and train again"


def _check_units(robot: Robot, action: ActionInfo) -> None:
    """PrismError where an action of 1 is not the same for the policy and the robot, as far as both state it."""
    space, scale = robot.actions, action.scale or (1.0,) * len(action.units)
    for i, (mine, own) in enumerate(zip(action.units, space.units, strict=False)):
        if not mine or not own:
            continue
        if space.kinds[i] == "velocity":
            mine, own = mine.removesuffix("/s"), own.removesuffix("/s")
        times = factor(mine, own)
        if times is None or not math.isclose(times * scale[i], space.scales[i], rel_tol=0.01):
            raise PrismError(
                f"an action of 1 in '{space.name(i)}' is {scale[i]:g} {mine} for the policy, {space.scales[i]:g} {own} "
                f"for robot '{robot.name}': {_CONVERT}"
            )


def _check_range(robot: Robot, demonstrated: Sequence[Sequence[float]] | None) -> None:
    """PrismError where the demonstrated actions are far beyond what the robot itself can do: another unit, or scale."""
    if demonstrated is None:
        return
    space, limits = robot.actions, robot.limits
    low, high = (np.asarray(end, np.float64) * space.scales for end in demonstrated)
    reach = np.maximum(np.abs(low), np.abs(high))
    turned = {first + entry for first in space.spec.quaternions for entry in range(4)}
    for i, kind in enumerate(space.kinds):
        unit, name = space.units[i].removesuffix("/s"), space.name(i)
        if kind == "absolute":
            near, far = limits.position[i] if limits.position else (-math.inf, math.inf)
            room = _BEYOND * (far - near) / 2
            if i in turned or not (low[i] < near - room or high[i] > far + room):
                continue
            fits = f"the demonstrated positions of '{name}' are {low[i]:.3g} to {high[i]:.3g} {unit}".rstrip()
            most = f"those of robot '{robot.name}' {near:.3g} to {far:.3g}"
        else:
            speed = limits.speed[i] if limits.speed else math.inf
            step = speed if kind == "velocity" else speed / robot.fps
            if reach[i] <= (1 + _BEYOND) * step:
                continue
            per = f"{unit}/s".lstrip("/") if kind == "velocity" else f"{unit} a step".lstrip()
            fits = f"the demonstrated actions of '{name}' reach {reach[i]:.3g} {per}"
            most = f"robot '{robot.name}' makes at most {step:.3g}"
        raise PrismError(f"{fits}, {most}: another unit, or normalised? {_CONVERT}")


def _check_sensors(robot: Robot, info: PolicyInfo, resize: bool) -> dict[str, SensorSpec]:
    there = {spec.name: spec for spec in robot.sensors}
    sizes: dict[str, SensorSpec] = {}
    for sensor in info.sensors:
        name, shape = sensor.name, sensor.shape
        if name not in there:
            if name in info.needs:
                raise PrismError(
                    f"robot '{robot.name}' has no sensor '{name}', which the policy requires; it has "
                    f"{', '.join(there)}" + ("; pass the instruction with --text" if sensor.kind == "text" else "")
                )
            continue
        if there[name].kind != sensor.kind:
            raise PrismError(f"sensor '{name}': the policy's is {sensor.kind}, the robot's {there[name].kind}")
        if there[name].shape == shape:
            continue
        if not KINDS[sensor.kind].is_image or there[name].shape[2:] != shape[2:]:
            raise PrismError(f"sensor '{name}': the policy needs shape {shape}, the robot gives {there[name].shape}")
        if not resize:
            raise PrismError(
                f"sensor '{name}': the policy needs pictures of {shape[0]} x {shape[1]}, the robot gives "
                f"{there[name].shape[0]} x {there[name].shape[1]}: pass --resize to bring them to that size"
            )
        sizes[name] = SensorSpec(name, sensor.kind, shape)
    return sizes


def ask_success(keys: Keys, patience: float = 60.0) -> bool | None:
    """Asks a person after an episode without a verdict."""
    until = time.monotonic() + patience
    while keys.is_terminal and time.monotonic() < until:
        for key in keys.pressed(0.1):
            if key in SUCCESS + FAILURE:
                return key in SUCCESS
    return None
