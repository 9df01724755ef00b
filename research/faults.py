"""Faults on the UR5e twin while it is driven: is any command beyond a limit, how soon does it stand still? Minutes.

Try:
    python -m research faults --count 1000 --json faults.json

Each trial starts an episode of the scripted insertion, injects one fault at a random moment, and then plays the next
episode without it.

    injected          trials in which the fault took place (some end before it)
    violations        commands beyond a limit, by a judge of its own: finite, speed, acceleration, and the true pose
                      after the command within the position limits
    stopped_in_ms     p50, p99, max: from the fault to the first command (or stop) after which nothing moves any more
    by_fault          the same for each: dead, frozen, nan, late, swapped (another sensor's readings), force (a spike),
                      clock (the stamps jump), crash (of what commands), jumps (wild commands), operator (the stop)
    missed            trials in which it went on moving until the episode was over: an operator would have to notice
    recovered         share of the episodes afterwards that succeeded
    recorded          share of the interrupted episodes of two commands or more that can be kept as they are

The clock of the twin is simulated, 10 commands a second: a fault is noticed at the next command, 0 to 100 ms later. A
frozen pose shows only when the robot was told to move and did not. Nothing of it was tried on hardware.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from prism.errors import PrismError
from prism.robots.base import Health, Reading, Robot, make_robot
from prism.robots.loop import ScriptCommander
from prism.robots.recording import Trace
from prism.robots.safety import Guard
from prism.rollout.results import run_info
from research.report import Written

FAULTS = ("dead", "frozen", "nan", "late", "swapped", "force", "clock", "crash", "jumps", "operator")
_STILL = 1e-3  # of a command: nothing moves


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    count: int = 200
    """Trials; the faults take turns."""
    seed: int = 0
    """Of scenes and moments."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PrismError(f"--count {self.count} is out of range: use 1 or more")


class Faulty(Robot):
    """A robot of which one thing fails from `at` on, and the judge of what is sent to it."""

    def __init__(self, robot: Robot) -> None:
        super().__init__(
            robot.name, robot.rate, robot.sensors, robot.actions, robot.limits,
            is_twin=True, realtime=False, episode_seconds=robot.episode_seconds,
        )  # fmt: skip
        self.inner, self.fault, self.at = robot, "", np.inf
        self.violations = 0
        self.sent: list[tuple[float, float]] = []  # when, how large a motion
        self.stopped_at = np.inf

    def connect(self) -> None:
        self.inner.connect()

    def close(self) -> None:
        self.inner.close()

    def health(self) -> Health:
        return self.inner.health()

    def prepare(self, seed: int) -> None:
        self.inner.prepare(seed)
        self.sent, self.stopped_at, self._speed = [], np.inf, np.zeros(3)

    def now(self) -> float:
        return self.inner.now()

    def wait(self, until: float) -> None:
        self.inner.wait(until)

    def success(self) -> bool | None:
        return self.inner.success()

    def script(self, seed: int) -> Any:
        return self.inner.script(seed)

    def read(self) -> dict[str, Reading]:
        readings, now = self.inner.read(), self.now()
        if now < self.at:
            self._last = readings
            return readings
        pose = readings["proprio"]
        if self.fault == "dead":
            del readings["proprio"]
        elif self.fault == "frozen":
            readings["proprio"] = Reading(self._last["proprio"].value, pose.stamp)
        elif self.fault == "nan":
            readings["proprio"] = Reading(np.full_like(pose.value, np.nan), pose.stamp)
        elif self.fault == "late":
            readings = self._last
        elif self.fault == "swapped":
            readings["proprio"], readings["tactile"] = readings["tactile"], pose
        elif self.fault == "force":
            readings["tactile"] = Reading(np.full(6, 60.0, np.float32), readings["tactile"].stamp)
        elif self.fault == "clock":
            readings = {name: Reading(reading.value, reading.stamp - 3600.0) for name, reading in readings.items()}
        return readings

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float64)
        move = command[:3] * self.actions.scales[:3]
        speed = move * self.rate
        low, high = np.array(self.limits.position[:3]).T
        end = self.inner.read()["proprio"].value[:3].astype(np.float64) + move
        good = (
            bool(np.isfinite(command).all())
            and bool((np.abs(speed) <= np.array(self.limits.speed[:3]) + 1e-4).all())
            and bool((np.abs(speed - self._speed) * self.rate <= np.array(self.limits.acceleration[:3]) + 1e-2).all())
            and bool(((end >= low - 1e-3) | (move >= 0)).all() and ((end <= high + 1e-3) | (move <= 0)).all())
        )
        self.violations += not good
        self._speed = speed
        self.sent.append((self.now(), float(np.abs(command[:3]).max())))
        self.inner.send(action)

    def stop(self) -> None:
        self.stopped_at = min(self.stopped_at, self.now())
        self.inner.stop()

    def still_after(self, at: float) -> float | None:
        """Seconds from `at` to when nothing moves any more; None: it went on."""
        moving = [when for when, size in self.sent if when >= at and size > _STILL]
        if np.isinf(self.stopped_at) and moving and moving[-1] == self.sent[-1][0]:
            return None
        later = [when for when, _ in self.sent if when > (moving[-1] if moving else at)]
        return max(0.0, min([*later[:1], self.stopped_at]) - at)


class Commands(ScriptCommander):
    """The script of the robot, or what goes wrong with it."""

    def __init__(self, robot: Faulty, rng: np.random.Generator) -> None:
        super().__init__(robot)
        self.robot, self.rng = robot, rng

    def next(self) -> NDArray[np.generic]:
        action: NDArray[np.generic] = self._next()
        if self.robot.now() >= self.robot.at and self.robot.fault == "crash":
            raise RuntimeError("the policy crashed")
        if self.robot.now() >= self.robot.at and self.robot.fault == "jumps":
            wild = self.rng.choice([np.nan, np.inf, -np.inf, 1e30, -50.0, 50.0, 1.0, -1.0], 4)
            return np.asarray(wild, np.float64)
        return action


def play(guard: Guard, robot: Faulty, rng: np.random.Generator, seed: int, fault: str) -> tuple[Trace, float]:
    """One episode; the trace, and the moment of the fault."""
    robot.fault, robot.at = "", np.inf
    commands, trace = Commands(robot, rng), Trace(robot)
    seen = guard.begin(seed)
    commands.start(seed)
    start = robot.now()
    robot.fault, robot.at = fault, start + float(rng.uniform(0.2, 1.4)) if fault else np.inf
    for tick in range(round(robot.episode_seconds * robot.rate)):
        due = start + tick / robot.rate
        robot.wait(due)
        seen = guard.observe()
        trace.see(seen)
        if fault == "operator" and due >= robot.at:
            guard.stop("by the operator")
        if guard.state == "stopped" or robot.success():
            break
        try:
            action = commands.next()
        except RuntimeError as error:
            guard.stop(str(error))
            break
        sent = guard.command(action)
        if sent.action is not None:
            trace.command(due, sent.action, commands.who, 0.0)
    return trace, robot.at


def run(config: Config, console: Console) -> dict[str, Any]:
    logging.getLogger("prism.health").setLevel(logging.ERROR)  # it would say every fault
    rng = np.random.default_rng(config.seed)
    robot = Faulty(make_robot("ur5e-twin", ["realtime=false"]))
    robot.connect()
    guard = Guard(robot, robot.limits)
    took: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    injected = missed = recovered = recorded = kept = 0
    for trial in track(range(config.count), "faults", console=console, transient=True):
        fault = FAULTS[trial % len(FAULTS)]
        trace, at = play(guard, robot, rng, config.seed + trial, fault)
        happened = robot.now() >= at and (robot.stopped_at < np.inf or robot.sent[-1][0] >= at)  # not at the very end
        injected += happened
        if happened and fault != "jumps":  # wild commands are limited, and the robot goes on
            seconds = robot.still_after(at)
            missed += seconds is None
            if seconds is not None:
                took[fault].append(1e3 * seconds)
        if len(trace) > 1:
            recorded += 1
            kept += trace.episode()[0].length == len(trace)
        play(guard, robot, rng, config.seed + trial + 50_000, "")
        recovered += bool(robot.success())
    everything = [ms for times in took.values() for ms in times]
    return {
        "injected": injected,
        "violations": robot.violations,
        "stopped_in_ms": _spread(everything),
        "by_fault": {fault: {"count": len(times), **_spread(times)} for fault, times in took.items() if times},
        "missed": missed,
        "recovered": recovered / config.count,
        "recorded": kept / max(recorded, 1),
        "count": config.count,
        **run_info(config.seed),
    }


def _spread(times: list[float]) -> dict[str, float]:
    found = np.array(times or [0.0])
    return {"p50": float(np.median(found)), "p99": float(np.quantile(found, 0.99)), "max": float(found.max())}


def show(result: dict[str, Any], console: Console) -> None:
    for key in ("injected", "violations", "missed", "recovered", "recorded", "stopped_in_ms"):
        console.print(f"{key}: {result[key]}", highlight=False)
    for fault, row in result["by_fault"].items():
        console.print(f"  {fault}: {row['count']}, p50 {row['p50']:.0f}, max {row['max']:.0f} ms", highlight=False)
