"""The only way to a robot: envelope.py limits each command, `Guard` watches the robot.

Policy, teleoperation and replay all go through one Guard. It is never off; a limits file can narrow it (limits.py).
The executor of prism-client keeps a policy within the range of its demonstrations.

| what                                           | then                                                    |
| ---------------------------------------------- | ------------------------------------------------------- |
| a command beyond a limit                       | the nearest one within all limits is sent               |
| a command that is not finite                   | held: braked within the limits                          |
| a needed sensor is missing, NaN, late, frozen  | held at once; stopped after `hold_seconds`              |
| too much force, pose outside the workspace     | stopped                                                 |
| the pose is farther from the setpoint than the | stopped                                                 |
| following error, or near that for `BLOCKED` s  |                                                         |
| a command half a period too soon, or sooner    | not sent: twice the rate would be twice the speed       |
| one half a period too late, or later           | the robot stands still meanwhile, and starts from there |
| no command within a period and `watchdog`      | stopped, by a thread of its own (robots in real time)   |
| the robot says that it is not healthy          | stopped                                                 |
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.inference.health import SensorMonitor
from prism.robots.contract import Array, Reading, Robot
from prism.robots.envelope import Envelope
from prism.robots.limits import Limits
from prism.sensors import SensorSpec

Vector = NDArray[np.float64]
SOON, LATE = 0.5, 1.5  # periods after the command before: between them the motion continues
BLOCKED = 1.0  # seconds for which a robot may be told to go on, and stay
_FROZEN = 0.002  # of a position range: commanded travel without any change of the measured pose


@dataclass(frozen=True)
class Seen:
    """The trusted state of the robot."""

    at: float  # the robot's clock
    observation: dict[str, Array]
    ages: dict[str, float]
    faults: dict[str, str]
    readings: dict[str, Reading]  # all of them, as they came
    course: Vector = field(default_factory=lambda: np.zeros(0))  # Envelope.course


@dataclass(frozen=True)
class Sent:
    action: NDArray[np.float32] | None  # None: nothing was sent
    why: tuple[str, ...] = ()  # it is another than was asked for
    at: float = math.nan  # the robot's clock, by which it was limited


def watched_by_guard(robot: Robot, sensors: Iterable[SensorSpec]) -> frozenset[str]:
    """Sensors of a policy that a guard of this robot watches as closely as the policy asks: of the others the policy
    itself leaves out frozen and late readings."""
    own = {spec.name: spec for spec in robot.sensors}
    found = [(spec, own[spec.name]) for spec in sensors if spec.name in own]
    closely = [
        theirs.name
        for theirs, mine in found
        if (mine.max_repeats or not theirs.max_repeats) and (mine.max_age or not theirs.max_age)
    ]
    return frozenset(closely)


@dataclass
class Guard:
    """The only way to command a robot. `begin`, then `observe` and `command` in turn."""

    robot: Robot
    limits: Limits
    needs: Collection[str] = ()  # sensors without which nothing may move, beside those that safety needs
    dry: bool = False  # commands are limited and counted, and not sent; devices are opened for reading only
    state: Literal["go", "hold", "stopped"] = field(default="stopped", init=False)
    reason: str = field(default="it has not begun", init=False)

    def __post_init__(self) -> None:
        space = self.robot.actions
        if self.dry and not (self.robot.can_read_only or self.robot.is_twin):
            raise PrismError(
                f"robot '{self.robot.name}': its driver has no way to read without writing; run without --dry-run"
            )
        self.robot.read_only = self.dry
        self.envelope = Envelope(space, self.limits, self.robot.rate)
        self._monitor = SensorMonitor(self.robot.sensors, self.robot.rate)
        names = {spec.name for spec in self.robot.sensors}
        safety = [name for name in (space.pose, self.limits.force_sensor) if name]
        self._needs = {*self.needs, *safety}
        if missing := sorted(self._needs - names):
            raise PrismError(f"robot '{self.robot.name}' has no sensor '{missing[0]}', which is needed to move safely")
        if len(self.limits.workspace) > space.pose_dims:
            told = f"has {len(self.limits.workspace)} ranges, and the pose that is measured {space.pose_dims} numbers"
            raise PrismError(f"robot '{self.robot.name}': workspace {told}: the others cannot be checked; drop them")
        self._lock = threading.RLock()
        self._watching: threading.Thread | None = None
        self._alive = threading.Event()
        self._fed, self._begun = math.inf, -math.inf
        self._clear()

    def _clear(self) -> None:
        self._monitor.reset()
        self._stamps: dict[str, float] = {}
        self._held_since: float | None = None
        self._last_sent, self._due = math.inf, -math.inf  # the last command; when the next is due at the robot's rate
        self._pose: Vector | None = None
        self._pose_stamp, self._travel, self._same = -math.inf, 0.0, 0
        self._history: deque[tuple[float, Vector]] = deque(maxlen=max(2, math.ceil(self.robot.rate)))  # when, how fast
        self._blocked: tuple[float, Vector] | None = None  # since when, and where it was then
        self.commands = self.changed = 0

    @property
    def pose(self) -> Vector | None:
        """The last measured pose, in units."""
        return self._pose

    def begin(self, seed: int = 0) -> Seen:
        """An episode starts: the robot prepares, and stands where it says."""
        self._fed = math.inf
        self.robot.prepare(seed)
        self._begun = self.robot.now()
        self._clear()
        self.state, self.reason = "go", ""
        self.envelope.start(None)
        seen = self.observe()
        self.envelope.start(self._pose)
        self._tell()
        seen = replace(seen, course=self.envelope.course)
        if self.robot.realtime and self._watching is None:
            self._alive.set()
            self._watching = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._watching.start()
        return seen

    def observe(self) -> Seen:
        """Read the robot and check its readings."""
        now = self.robot.now()
        try:
            readings = self.robot.readings()
        except Exception as error:  # of a driver, any kind: the robot stops first
            self.stop(_said(error))
            readings = {}
        faults: dict[str, str] = {}
        observation: dict[str, Array] = {}
        ages: dict[str, float] = {}
        for spec in self.robot.sensors:
            reading = readings.get(spec.name)
            age = None if reading is None else self._age(spec.name, reading, now, self.robot.period(spec))
            try:
                value, good = self._monitor.read(spec, None if reading is None else reading.value, age)
            except PrismError:
                value, good, faults[spec.name] = np.zeros(spec.shape, spec.dtype), False, "shape"
            if good and age is not None:
                observation[spec.name], ages[spec.name] = value, age
        self._monitor.step()
        faults |= {name: str(fault) for name, fault in self._monitor.faults.items()}
        self._see_pose(observation, readings, faults)
        self._judge(now, observation, faults)
        return Seen(now, observation, ages, faults, readings, self.envelope.course)

    def _age(self, name: str, reading: Reading, now: float, period: float) -> float:
        """Seconds since it was measured; endless where its clock went back, or is ahead of the robot's."""
        before = self._stamps.get(name, -math.inf)
        if not before <= reading.stamp <= now + period:
            return math.inf
        self._stamps[name] = reading.stamp
        return max(0.0, now - reading.stamp)

    def _see_pose(self, observation: dict[str, Array], readings: dict[str, Reading], faults: dict[str, str]) -> None:
        space = self.robot.actions
        if space.pose is None or space.pose not in observation:
            return
        pose, stamp = np.asarray(observation[space.pose][: space.pose_dims], np.float64), readings[space.pose].stamp
        if stamp < self._begun - 1.0 / self.robot.rate:  # it may still have moved then
            faults[space.pose] = "late"
            return
        if self._pose is None or (pose != self._pose).any():
            self._travel, self._same = 0.0, 0
        elif stamp > self._pose_stamp:
            self._same += 1
        if self._same >= self.limits.frozen and self._travel > _FROZEN:  # told to move, and nothing of it shows
            faults[space.pose] = "frozen"
        self._pose, self._pose_stamp = pose, stamp
        self._tell()

    def _tell(self) -> None:
        """The envelope: where the robot is, where it goes, and what was commanded since it was there."""
        if self._pose is not None:
            self.envelope.see(self._pose, self.robot.setpoint(), self._pending())

    def _pending(self) -> Vector:
        """Travel commanded since the pose was measured, units. A velocity lasts until the next command."""
        now, period, total = self.robot.now(), 1.0 / self.robot.rate, np.zeros(self.robot.actions.dim)
        velocity, after = np.array(self.robot.actions.kinds) == "velocity", now
        for at, v in reversed(self._history):
            end = np.where(velocity, max(at + period, after), at + period)
            total += v * np.maximum(0.0, end - max(at, self._pose_stamp))
            after = at
        return total

    def _judge(self, now: float, observation: dict[str, Array], faults: dict[str, str]) -> None:
        """Go, hold or stop."""
        if self.state == "stopped":
            return
        if danger := self._danger(observation):
            self.stop(danger)
        elif bad := sorted(self._needs & faults.keys()):
            self._held_since = now if self._held_since is None else self._held_since
            why = f"sensor '{bad[0]}' is {faults[bad[0]]}"
            self._become("hold", why)
            if (held := now - self._held_since) >= self.limits.hold_seconds:
                self.stop(f"{why}, for {held:.2f} s")
        else:
            self._held_since = None
            self._become("go", "")

    def _become(self, state: Literal["go", "hold", "stopped"], reason: str) -> None:
        """Only `begin` ends a stop: another thread may have stopped since this one looked."""
        with self._lock:
            if self.state != "stopped":
                self.state, self.reason = state, reason

    def _danger(self, observation: dict[str, Array]) -> str:
        """Reason to stop at once; empty: none."""
        limits, health = self.limits, self.robot.health()
        if not health.ok:
            return health.reason
        if limits.force is not None and limits.force_sensor in observation:
            force = float(np.linalg.norm(np.asarray(observation[limits.force_sensor][:3], np.float64)))
            if force > limits.force:
                return f"a force of {force:.0f} N, the limit is {limits.force:g}"
        if (i := self.envelope.exceeded()) is not None:
            return self._following(i)
        for i, (at, (low, high)) in enumerate(
            zip(() if self._pose is None else self._pose, limits.workspace, strict=False)
        ):
            if not low <= at <= high:
                return f"{self.robot.actions.name(i)} = {at:.4g} is outside the workspace, {low:g} to {high:g}"
        return ""

    def _following(self, i: int) -> str:
        name, unit = self.robot.actions.name(i), self.robot.actions.units[i]
        far = f"{abs(self.envelope.error[i]):.3g} {unit}".rstrip()
        return f"{name} is {far} from its commanded position (following error): is it blocked?"

    def _is_blocked(self, now: float) -> bool:
        """Whether the following error holds the robot back, and the pose has hardly moved meanwhile."""
        held = self.envelope.leashed
        if self._pose is None or not held.any():
            self._blocked = None
            return False
        dims = held[: len(self._pose)]
        if self._blocked is None or self._has_moved(dims, self._blocked[1]):
            self._blocked = now, self._pose
        return now - self._blocked[0] >= BLOCKED

    def _has_moved(self, dims: NDArray[np.bool_], start: Vector) -> bool:
        assert self._pose is not None
        most = self.limits.followed(self.robot.actions.dim)[: len(start)]
        return bool((np.abs(self._pose - start) > most / 4)[dims].any())

    def command(self, action: object) -> Sent:
        """Send a command, as it is allowed to be; None: stand still."""
        now, period = self.robot.now(), 1.0 / self.robot.rate
        with self._lock:
            if self.state == "stopped":
                return Sent(None, (f"stopped: {self.reason}",))
            gap = now - self._last_sent
            if gap < 0:  # the first one, or the clock was set back
                self._due = now
            elif now < self._due - (1.0 - SOON) * period:  # in the long run never more than the robot's rate
                return Sent(None, ("too early",))
            if not 0 <= gap <= LATE * period:
                self.envelope.rest()
            self._tell()
            sent, why = self.envelope.limit(None if self.state == "hold" else action)
            if sent is None:
                return Sent(None, why)
            if (i := self.envelope.exceeded()) is not None or self._is_blocked(now):
                problem = self._following(int(np.argmax(self.envelope.leashed)) if i is None else i)
                self.stop(problem)
                return Sent(None, (problem,))
            try:
                if not self.dry:
                    self.robot.send(sent)
            except Exception as error:  # of a driver, any kind: the robot stops first
                self.stop(problem := _said(error))
                return Sent(None, (problem,))
            self._last_sent, self._due, self._fed = now, max(now, self._due) + period, time.monotonic()
            self._history.append((now, self.envelope.velocity.copy()))
        self._count_travel()
        self.commands += 1
        self.changed += bool(why)
        return Sent(sent, why, now)

    def _count_travel(self) -> None:
        """The largest share of its range that a measured dimension was told to move since its pose last changed."""
        space, dims = self.robot.actions, self.robot.actions.pose_dims
        if self.dry or not dims or not self.limits.position or self._pose is None:
            return
        low, high = np.array(self.limits.position[:dims], np.float64).T
        moved = np.abs(self.envelope.velocity[:dims]) / self.robot.rate
        moved[[i for i in space.spec.grippers if i < dims]] = 0.0
        self._travel += float(np.max(moved / (high - low)))

    def stop(self, reason: str) -> None:
        """Now, and until `begin`."""
        self.robot.stop()  # first of all, and whoever holds the lock
        with self._lock:
            self._become("stopped", reason)
            self._fed = math.inf

    def close(self) -> None:
        self._alive.clear()
        if self._watching is not None:
            self._watching.join()
            self._watching = None
        self.robot.close()

    def _watch(self) -> None:
        most = 1.0 / self.robot.rate + self.limits.watchdog
        while self._alive.is_set():
            if self.state != "stopped" and time.monotonic() - self._fed > most:
                self.stop(f"no command for {most:.2g} s (watchdog): the loop hangs")
            time.sleep(min(0.01, self.limits.watchdog / 4))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, PrismError) else f"a bug in the driver, {type(error).__name__}: {error}"
