"""Turns any command into one within all limits of the robot: what is sent is decided here, when by guard.py.

Each dimension follows x (units) with velocity v: an absolute command is x, a change is v dt, a velocity v.

| limit                  | where it acts                                                                          |
| ---------------------- | -------------------------------------------------------------------------------------- |
| speed                  | |v|                                                                                    |
| acceleration, jerk     | on the change of v since the last command; braking may use all of the acceleration     |
| position               | the robot must be able to brake before its end. Under changes and velocities it counts |
|                        | from the farthest of the measured pose, the pose with the travel commanded since it    |
|                        | was measured, and the robot's own setpoint                                             |
| following error        | the setpoint stays within LEAD of it from the measured pose: what is blocked is not    |
|                        | pressed harder and harder                                                              |
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from prism.robots.contract import ActionSpace
from prism.robots.limits import LEAD, Limits

Vector = NDArray[np.float64]
_HUGE = 1e12  # of a command: no limit is as wide, and nothing overflows


class Envelope:
    """Knows only the previous commands and the arguments of `limit`. Braking uses all of the
    acceleration, so it is always within the bounds."""

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
        followed = np.where(told, limits.followed(space.dim), math.inf)
        followed[[*space.spec.grippers, *space.base]] = math.inf  # a gripper holds what it stops at
        self._most_turn = {first: float(followed[first]) for first in self._quaternions}  # of the rotation
        self._most_error = followed.copy()
        self._most_error[turned] = math.inf
        ended = np.isfinite(self._low) & np.isfinite(self._high)
        self._slack = np.zeros(space.dim)  # a gripper command beyond closed means closed
        for i in (i for i in space.spec.grippers if ended[i]):
            self._slack[i] = limits.margin * (self._high[i] - self._low[i])
        self._cause = np.full(space.dim, "", "U16")  # of each dimension: the limit that changed the last command
        self.start(None)

    def start(self, pose: Vector | None) -> None:
        """Standing still at `pose` (units; NaN or missing where it is unknown)."""
        self._x = np.full(self._space.dim, math.nan)
        if pose is not None:
            self._x[: len(pose)] = pose
        self._v, self._a, self._sum = (np.zeros(self._space.dim) for _ in range(3))
        self._nearest, self._farthest = self._x, self._x
        self._here = np.full(self._space.dim, math.nan)
        self._error, self._aimed = np.zeros(self._space.dim), self._absolute
        self.leashed = np.zeros(self._space.dim, np.bool_)  # dimensions that the following error held back last

    def rest(self) -> None:
        """The robot was left without commands and stands still, except where it was given a velocity."""
        self._v, self._a = np.where(self._velocity, self._v, 0.0), np.zeros_like(self._a)

    @property
    def velocity(self) -> Vector:
        """Velocity of the last command, units a second."""
        return self._v

    @property
    def course(self) -> Vector:
        """Where the commands lead, units: positions, NaN where none is known; of changes and velocities their sum."""
        return np.where(self._absolute, self._x, self._sum)

    @property
    def error(self) -> Vector:
        """Following error: the setpoint less the measured pose, units; 0 where either is unknown."""
        return self._error

    def exceeded(self) -> int | None:
        """The first dimension whose following error is beyond its limit."""
        beyond = np.flatnonzero(np.abs(self._error) > self._most_error * (1 + 1e-9)).tolist()
        beyond += [first for first, most in self._most_turn.items() if self._turned(self._x, first) > most]
        return min(beyond, default=None)

    def _turned(self, x: Vector, first: int) -> float:
        """Radians between a quaternion of `x` and the measured one; 0 where either is unknown."""
        a, b = x[first : first + 4], self._here[first : first + 4]
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        return 2 * math.acos(min(1.0, abs(float(a @ b)) / length)) if length > 1e-6 else 0.0

    def see(self, pose: Vector, setpoint: Vector | None = None, pending: Vector | None = None) -> None:
        """Where the robot is measured to be; of changes and velocities: its own setpoint, if it has one, and what was
        commanded since the pose was measured."""
        dims = len(pose)
        known = self._absolute & np.isfinite(self._x)  # where it was sent, or seen when it began
        told = np.flatnonzero(~known[:dims] & np.isfinite(pose))
        self._x[told] = pose[told]
        self._here, ahead = np.full(self._space.dim, math.nan), np.zeros(self._space.dim)
        self._here[:dims] = pose
        target = np.where(self._absolute, self._x, math.nan)
        if setpoint is not None:
            target[: len(setpoint)] = np.where(self._absolute[: len(setpoint)], target[: len(setpoint)], setpoint)
        if pending is not None:
            ahead = np.where(self._absolute, 0.0, pending)
        ends = np.stack([self._x, self._x + ahead, np.where(np.isfinite(target), target, self._x)])
        self._nearest, self._farthest = ends.min(0), ends.max(0)
        self._error, self._aimed = np.nan_to_num(target - self._here), np.isfinite(target)

    def limit(self, action: object, pose: Vector | None = None) -> tuple[NDArray[np.float32] | None, tuple[str, ...]]:
        """What may be sent instead of `action` (None: stand still), and why it is another. Nothing may where the robot
        is to stay and its position is unknown. `pose`: `see` it first."""
        if pose is not None:
            self.see(pose)
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
        unseen = self._absolute & ~np.isfinite(self._farthest)
        self._nearest, self._farthest = (np.where(unseen, start, end) for end in (self._nearest, self._farthest))
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
        ahead, behind = ((LEAD * self._most_error - side * self._error) / self._dt for side in (1.0, -1.0))
        leashed = np.clip(wish, np.minimum(-behind, 0.0), np.maximum(ahead, 0.0))
        leashed = np.where(wish > 0, np.maximum(leashed, brake), np.minimum(leashed, brake))
        leashed = np.where(np.abs(leashed) > np.abs(wish), wish, leashed)
        self.leashed = leashed != wish
        self._cause = np.where(self.leashed, "following error", self._cause)
        wish = leashed
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
        way = (v + np.sign(v) * braking) * self._dt
        free = ~self._bounded | ~np.isfinite(self._x) | (v == 0)
        return np.asarray(free | np.where(v > 0, self._farthest + way <= self._high, self._nearest + way >= self._low))

    def _command_of(self, v: Vector, asked: Vector | None) -> NDArray[np.float32]:
        """The command with velocity v; remembers it."""
        x = self._x + v * self._dt
        if self._quaternions and asked is not None:
            self._turn(x, asked)
        units = np.where(self._absolute, x, np.where(self._velocity, v, v * self._dt))
        self._a = (v - self._v) / self._dt
        self._error = np.where(self._aimed & np.isfinite(self._here), self._error + v * self._dt, 0.0)
        ahead = np.where(np.isfinite(x), x - self._x, 0.0)
        self._nearest, self._farthest = self._nearest + ahead, self._farthest + ahead
        self._v, self._x, self._sum = v, x, self._sum + v * self._dt
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
            apart = self._turned(x, first)
            if apart > LEAD * self._most_turn[first] and apart > self._turned(self._x, first):
                x[part], self._cause[part] = old, "following error"
