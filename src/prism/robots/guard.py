"""Between everything that commands and the robot: `Envelope` limits a command, `Guard` watches the robot.

Policy, teleoperation and replay all go through one Guard. It is never off; a limits file can narrow it (limits.py).
What only a policy can do, to leave the range of its demonstrations, the executor of prism-client does not let it.

| what                                           | then                                                    |
| ---------------------------------------------- | ------------------------------------------------------- |
| a command beyond a limit                       | the nearest one within all limits is sent               |
| a command that is no finite vector             | held: braked within the limits                          |
| a needed sensor is missing, NaN, late, frozen  | held at once; stopped after `hold_seconds`              |
| too much force, pose outside the workspace     | stopped                                                 |
| a command half a period too soon, or sooner    | not sent: twice the rate would be twice the speed       |
| one half a period too late, or later           | the robot stands still meanwhile, and starts from there |
| no command within a period and `watchdog`      | stopped, by a thread of its own (robots in real time)   |
| the robot says that it is not healthy          | stopped                                                 |
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.health import SensorMonitor
from prism.robots.contract import ActionSpace, Array, Reading, Robot
from prism.robots.limits import Limits

Vector = NDArray[np.float64]
_HUGE = 1e12  # of a command: no limit is as wide, and nothing overflows
SOON, LATE = 0.5, 1.5  # periods after the command before: between them the motion goes on
_FROZEN = 0.002  # of a position range: commanded travel without any change of the measured pose


class Envelope:
    """Turns any command into one within all limits. Knows nothing but the commands before, and the measured pose.

    Each dimension follows x (units) with velocity v: an absolute command is x, a change is v dt, a velocity v. Bounds
    on v come from the speed, from the acceleration and jerk since the last command, and from the position: the robot
    must be able to brake before its end. Braking uses all of the acceleration, so it is always within the bounds.
    """

    def __init__(self, space: ActionSpace, limits: Limits, rate: float) -> None:
        limits.check(space.dim)
        self._space, self._dt, self._scale = space, 1.0 / rate, space.scales
        kinds = np.array(space.kinds)
        self._absolute, self._velocity = kinds == "absolute", kinds == "velocity"
        endless = np.full(space.dim, math.inf)
        position = np.array(limits.position or [(-math.inf, math.inf)] * space.dim, np.float64)
        self._low, self._high = position.T
        # what a change integrates to is known only where it is measured
        told = np.arange(space.dim) < space.pose_dims
        self._bounded = self._absolute | told
        self._speed, self._acceleration, self._jerk = (
            np.array(most, np.float64) if most else endless.copy()
            for most in (limits.speed, limits.acceleration, limits.jerk)
        )
        self._quaternions = space.spec.quaternions
        turned = [first + i for first in self._quaternions for i in range(4)]
        self._acceleration[turned] = self._jerk[turned] = math.inf  # their speed is that of the rotation
        ended = np.isfinite(self._low) & np.isfinite(self._high)
        self._slack = np.zeros(space.dim)  # a gripper that is told to be a little more than closed is closed
        for i in (i for i in space.spec.grippers if ended[i]):
            self._slack[i] = limits.margin * (self._high[i] - self._low[i])
        self._cause = np.full(space.dim, "", "U12")  # of each dimension: the limit that changed the last command
        self.start(None)

    def start(self, pose: Vector | None) -> None:
        """Standing still at `pose` (units; NaN or missing where it is unknown)."""
        self._x = np.full(self._space.dim, math.nan)
        if pose is not None:
            self._x[: len(pose)] = pose
        self._v, self._a = np.zeros(self._space.dim), np.zeros(self._space.dim)

    def rest(self) -> None:
        """The robot was left without commands and stands still, except where it was given a velocity."""
        self._v, self._a = np.where(self._velocity, self._v, 0.0), np.zeros_like(self._a)

    @property
    def velocity(self) -> Vector:
        """Of the last command, units a second."""
        return self._v

    def limit(self, action: object, pose: Vector | None = None) -> tuple[NDArray[np.float32] | None, tuple[str, ...]]:
        """What may be sent instead of `action` (None: stand still), and why it is another. Nothing may where the robot
        is to stay and nobody knows where it is."""
        if pose is not None:
            known = self._absolute & np.isfinite(self._x)  # where it was sent, or seen when it began
            told = np.flatnonzero(~known[: len(pose)] & np.isfinite(pose))
            self._x[told] = pose[told]
        wanted, why = self._understood(action)
        if wanted is not None:
            end = np.clip(wanted, self._low / self._scale, self._high / self._scale)
            wanted = np.where(np.abs(end - wanted) * self._scale <= self._slack, end, wanted)
        if wanted is None and not np.isfinite(self._x[self._absolute]).all():
            return None, why
        asked = np.zeros(self._space.dim) if wanted is None else self._velocity_of(wanted)
        v = self._bounds(asked)
        sent = self._command_of(v, wanted)
        if wanted is not None:
            moved = np.abs(sent - wanted) > 1e-6 * np.maximum(1.0, np.abs(wanted))
            sent = np.where(moved, sent, wanted).astype(np.float32)  # what is within the limits is not even rounded
            why = self._why(moved)
        return sent, why

    def _why(self, moved: NDArray[np.bool_]) -> tuple[str, ...]:
        """One for each limit: which, and the first dimensions that it changed."""
        found = []
        for cause in dict.fromkeys(self._cause[moved].tolist()):
            names = [self._space.name(int(i)) for i in np.flatnonzero(moved & (self._cause == cause))]
            found.append(f"limited by {cause}: {', '.join(names[:4])}")
        return tuple(found)

    def _understood(self, action: object) -> tuple[Vector | None, tuple[str, ...]]:
        if action is None:
            return None, ("held",)
        try:
            wanted = np.asarray(action, np.float64)
        except (TypeError, ValueError):
            return None, ("held: not a command",)
        if wanted.shape != (self._space.dim,) or not np.isfinite(wanted).all():
            return None, ("held: not a finite command",)
        return np.clip(wanted, -_HUGE, _HUGE), ()

    def _velocity_of(self, command: Vector) -> Vector:
        units = command * self._scale
        start = np.where(np.isfinite(self._x), self._x, np.clip(units, self._low, self._high))
        self._x = np.where(self._absolute, start, self._x)  # of the first command where nothing was measured
        return np.where(self._absolute, (units - start) / self._dt, np.where(self._velocity, units, units / self._dt))

    def _bounds(self, asked: Vector) -> Vector:
        """The velocity nearest to `asked` within every bound."""
        most = self._acceleration * self._dt
        brake = np.sign(self._v) * np.maximum(np.abs(self._v) - most, 0.0)
        with np.errstate(invalid="ignore"):
            grown = self._jerk * self._dt
            low = np.maximum(self._v - most, np.minimum(self._v + (self._a - grown) * self._dt, brake))
            high = np.minimum(self._v + most, np.maximum(self._v + (self._a + grown) * self._dt, brake))
        wish = np.clip(np.clip(asked, low, high), -self._speed, self._speed)
        grows = np.where(np.abs(asked - self._v) > most, "acceleration", "jerk")
        self._cause = np.where(np.abs(asked) > self._speed, "speed", np.where(wish == asked, "position", grows))
        good = self._can_brake(wish)
        if good.all():
            return wish
        near, far = brake.copy(), wish.copy()  # `near` fits; where even braking does not, nothing better exists
        for _ in range(50):
            middle = 0.5 * (near + far)
            fits = self._can_brake(middle)
            near, far = np.where(fits, middle, near), np.where(fits, far, middle)
        return np.where(good, wish, near)

    def _can_brake(self, v: Vector) -> NDArray[np.bool_]:
        """Whether the robot stays within its positions if it moves by v dt and then brakes."""
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = self._acceleration * self._dt  # speed lost in a step
            steps = np.where(np.isfinite(lost), np.floor(np.abs(v) / lost), 0.0)
            braking = np.where(steps > 0, steps * np.abs(v) - lost * steps * (steps + 1) / 2, 0.0)
        end = self._x + (v + np.sign(v) * braking) * self._dt
        free = ~self._bounded | ~np.isfinite(self._x) | (v == 0)
        return np.asarray(free | np.where(v > 0, end <= self._high, end >= self._low))

    def _command_of(self, v: Vector, asked: Vector | None) -> NDArray[np.float32]:
        """The command with velocity v; remembers it."""
        x = self._x + v * self._dt
        if self._quaternions and asked is not None:
            self._turn(x, asked)
        units = np.where(self._absolute, x, np.where(self._velocity, v, v * self._dt))
        self._a = (v - self._v) / self._dt
        self._v, self._x = v, x
        return (units / self._scale).astype(np.float32)

    def _turn(self, x: Vector, asked: Vector) -> None:
        """Quaternions: along the shorter arc, by at most speed dt of its first number (radians)."""
        for first in self._quaternions:
            part = slice(first, first + 4)
            old, new = self._x[part], asked[part]
            length = float(np.linalg.norm(new))
            if not np.isfinite(old).all() or length < 1e-6:
                x[part] = old
                continue
            new = new / length * (1.0 if float(old @ new) >= 0 else -1.0)
            half = math.acos(min(1.0, float(old @ new) / max(float(np.linalg.norm(old)), 1e-9)))
            share = min(1.0, self._speed[first] * self._dt / (2 * half)) if half > 1e-9 else 1.0
            self._cause[part] = "speed"
            if half > 1e-9:
                new = (math.sin((1 - share) * half) * old + math.sin(share * half) * new) / math.sin(half)
            x[part] = new / np.linalg.norm(new)


@dataclass(frozen=True)
class Seen:
    """What can be believed of the robot now."""

    at: float  # the robot's clock
    observation: dict[str, Array]
    ages: dict[str, float]
    faults: dict[str, str]
    readings: dict[str, Reading]  # all of them, as they came


@dataclass(frozen=True)
class Sent:
    action: NDArray[np.float32] | None  # None: nothing was sent
    why: tuple[str, ...] = ()  # it is another than was asked for
    at: float = math.nan  # the robot's clock, by which it was limited


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
            raise PrismError(f"robot '{self.robot.name}': workspace {told}: nobody could watch the others; drop them")
        self._lock = threading.RLock()
        self._watching: threading.Thread | None = None
        self._alive = threading.Event()
        self._fed = math.inf
        self._clear()

    def _clear(self) -> None:
        self._monitor.reset()
        self._stamps: dict[str, float] = {}
        self._held_since: float | None = None
        self._last_sent, self._due = math.inf, -math.inf  # the last command; when the next is due at the robot's rate
        self._pose: Vector | None = None
        self._pose_stamp, self._travel, self._same = -math.inf, 0.0, 0
        self.commands = self.changed = 0

    @property
    def pose(self) -> Vector | None:
        """Where the robot was seen last, in units."""
        return self._pose

    def begin(self, seed: int = 0) -> Seen:
        """An episode starts: the robot prepares, and stands where it says."""
        self._fed = math.inf
        self.robot.prepare(seed)
        self._clear()
        self.state, self.reason = "go", ""
        seen = self.observe()
        self.envelope.start(self._pose)
        if self.robot.realtime and self._watching is None:
            self._alive.set()
            self._watching = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._watching.start()
        return seen

    def observe(self) -> Seen:
        """Read the robot, and judge what it says."""
        now, readings = self.robot.now(), self.robot.readings()
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
        return Seen(now, observation, ages, faults, readings)

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
        if self._pose is None or (pose != self._pose).any():
            self._travel, self._same = 0.0, 0
        elif stamp > self._pose_stamp:
            self._same += 1
        if self._same >= self.limits.frozen and self._travel > _FROZEN:  # told to move, and nothing of it shows
            faults[space.pose] = "frozen"
        self._pose, self._pose_stamp = pose, stamp

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
        """Why to stop at once; empty: no reason."""
        limits, health = self.limits, self.robot.health()
        if not health.ok:
            return health.reason
        if limits.force is not None and limits.force_sensor in observation:
            force = float(np.linalg.norm(observation[limits.force_sensor][:3]))
            if force > limits.force:
                return f"a force of {force:.0f} N, the limit is {limits.force:g}"
        for i, (at, (low, high)) in enumerate(
            zip(() if self._pose is None else self._pose, limits.workspace, strict=False)
        ):
            if not low <= at <= high:
                return f"{self.robot.actions.name(i)} = {at:.4g} is outside the workspace, {low:g} to {high:g}"
        return ""

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
            sent, why = self.envelope.limit(None if self.state == "hold" else action, self._pose)
            if sent is None:
                return Sent(None, why)
            try:
                if not self.dry:
                    self.robot.send(sent)
            except PrismError as error:
                self.stop(str(error))
                return Sent(None, (str(error),))
            self._last_sent, self._due, self._fed = now, max(now, self._due) + period, time.monotonic()
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
