"""Stand-ins of robots on a simulated clock, and the judge of everything that is sent to them.

`Naive` adds up whatever it gets, as a robot of another package may; `Driven` is the robots of drivers/composed.py with
a wire of their own. Both lag behind their setpoint, can be blocked, and have a pose with noise and delay.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
from prism_client import ActionKind

from prism.errors import PrismError
from prism.robots.contract import ActionSpace, Health, Reading, Robot
from prism.robots.drivers.composed import DrivenRobot
from prism.robots.drivers.parts import Axis, Part
from prism.robots.drivers.waypoints import Interpolator
from prism.robots.guard import LATE
from prism.robots.limits import Limits
from prism.sensors import ActionSpec, SensorSpec

FORCE = SensorSpec("force", "vector", (3,))
NOISE = 1e-4  # of encoders, where they are noisy
CYCLES = 4  # of a driver's wire, a command


class Judge:
    """What the limits say, computed anew from what was sent and what was shown. `found`: violations."""

    def __init__(self, space: ActionSpace, limits: Limits, rate: float) -> None:
        self.space, self.limits, self.dt = space, limits, 1.0 / rate
        self.kinds, self.scale = np.array(space.kinds), space.scales
        self.turned = [first + i for first in space.spec.quaternions for i in range(4)]
        self.found: list[str] = []
        self.commands = 0
        self.begin(np.full(space.dim, math.nan))

    def begin(self, at: np.ndarray) -> None:
        """Standing at `at`: commands are allowed again."""
        self.at, self.v, self.last = at.copy(), np.zeros(self.space.dim), -math.inf
        self.stopped, self.unseen_since, self.force = False, None, 0.0
        self.shown: np.ndarray | None = None
        self.lied = False  # in this episode an encoder showed what was not: positions cannot be held
        self.times: deque[float] = deque(maxlen=50)

    def show(self, now: float, pose: np.ndarray | None, good: bool, force: float | None) -> None:
        """The robot is asked what it sees; `good`: a pose that can be believed."""
        self.unseen_since = None if good else now if self.unseen_since is None else self.unseen_since
        self.shown = pose if good else self.shown
        self.force = self.force if force is None or not math.isfinite(force) else force

    def say(self, what: str, detail: object = "") -> None:
        self.found.append(f"{what} {detail}")

    def sent(self, now: float, command: np.ndarray, goal: np.ndarray, before: np.ndarray) -> None:
        """`goal`, `before`: where everything that was sent leads to, with this command and without it."""
        self.commands += 1
        limits, space, dt = self.limits, self.space, self.dt
        if self.stopped:
            self.say("sent after a stop")
        if not np.isfinite(command).all():
            self.say("not finite", command)
            return
        units = command * self.scale
        start = np.where(np.isfinite(self.at), self.at, units)
        unknown = ~np.isfinite(self.at) & (self.kinds == "absolute")
        v = np.where(self.kinds == "absolute", (units - start) / dt, units / dt)
        v = np.where(self.kinds == "velocity", units, v)
        free = np.ones(space.dim, np.bool_)
        free[self.turned] = False
        if limits.speed and (np.abs(v) > np.array(limits.speed) * (1 + 1e-4) + 1e-4)[free].any():
            self.say("speed", v)
        gap = now - self.last
        old = np.where(self.kinds == "velocity", self.v, 0.0) if not gap <= LATE * dt + 1e-9 else self.v
        if limits.acceleration and self.last > -math.inf:
            most = np.array(limits.acceleration) * dt
            if (np.abs(v - old) > most * (1 + 1e-3) + 2e-4 * np.maximum(self.scale, 1))[free & np.isfinite(most)].any():
                self.say("acceleration", (v - old, most))
        low, high = np.array(limits.position).T
        slack = 1e-4 * (1 + np.abs(goal)) + 0.02 * limits.followed(space.dim)
        slack = np.where(np.isfinite(slack), slack, 1e-3) + 5 * NOISE
        places = ~np.isin(np.arange(space.dim), space.base)
        braking = np.abs(v) < np.abs(self.v) - 1e-9
        out = ((goal > high + slack) & (v > 1e-6)) | ((goal < low - slack) & (v < -1e-6))
        if (out & places & ~braking & free).any() and not self.lied:
            self.say("position", (goal, low, high))
        if self.shown is not None:
            dims = len(self.shown)
            error, most = np.abs(goal[:dims] - self.shown), limits.followed(space.dim)[:dims]
            still = [i for i in (*space.spec.grippers, *self.turned) if i < dims]
            error[still] = 0.0
            if (error > most * (1 + 1e-3) + 1e-4 + 5 * NOISE).any():
                self.say("following error", (error, most))
        if limits.force is not None and self.force > limits.force:
            self.say("force", self.force)
        if self.unseen_since is not None and now - self.unseen_since > limits.hold_seconds + 3 * dt:
            self.say("no pose for", now - self.unseen_since)
        self.times.append(now)
        if len(self.times) > 10 and (len(self.times) - 1.5) * dt > self.times[-1] - self.times[0] + 1e-9:
            self.say("more commands than the rate", len(self.times))
        self.at, self.v, self.last = start + v * dt, np.where(unknown, math.nan, v), now


class Simulated:
    """The clock, the body and the faults of a stand-in."""

    def start(self, seed: int, space: ActionSpace, limits: Limits, rate: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.time, self.dim, self.dims = 100.0, space.dim, space.pose_dims
        middle = np.array([sum(side) / 2 if np.isfinite(side).all() else 0.0 for side in limits.position])
        for first in space.spec.quaternions:
            middle[first : first + 4] = (1.0, 0.0, 0.0, 0.0)
        self.body, self.goal = middle.copy(), middle.copy()
        self.lag, self.noise, self.delay, self.blocked = 0.05, 0.0, 0, False
        self.values: dict[str, Any] = {}  # faults: sensor -> what it shows; None: nothing
        self.offset, self.force = 0.0, 1.0
        self.frozen: np.ndarray | None = None  # what the encoders say from now on
        self.past: deque[tuple[float, np.ndarray]] = deque([(self.time, self.body.copy())], maxlen=20)
        self.events: dict[int, list[Any]] = {}  # by tick
        self.ticks = 0
        self.judge = Judge(space, limits, rate)

    def move(self, until: float) -> None:
        """Time goes on, and what was planned for this tick happens."""
        self.ticks += 1
        for event in self.events.pop(self.ticks, ()):
            event()
        until = max(until, self.time)
        share = 1.0 if self.lag == 0 else 1 - math.exp((self.time - until) / self.lag)
        if not self.blocked:
            self.body = self.body + share * (self.goal - self.body)
        self.time = until
        self.past.append((self.time, self.body.copy()))

    def settle(self) -> None:
        """Between two episodes: it stands still."""
        for _ in range(8):
            self.move(self.time + self.judge.dt)

    def readings(self) -> dict[str, Reading]:
        stamp, body = self.past[max(0, len(self.past) - 1 - self.delay)]
        pose = body[: self.dims] + self.noise * self.rng.standard_normal(self.dims)
        if self.frozen is not None:
            pose = self.frozen[: self.dims]
        shown: dict[str, Any] = {"proprio": pose.astype(np.float32), "force": np.float32([0, 0, self.force])}
        shown |= self.values
        return {name: Reading(value, stamp + self.offset) for name, value in shown.items() if value is not None}

    def start_of(self, at: np.ndarray) -> np.ndarray:
        """For the judge: where the encoders say something else, not known to it."""
        return np.full_like(at, math.nan) if self.frozen is not None or self.noise else at

    def told(self, found: dict[str, Reading], now: float, old: float) -> None:
        pose, force = found.get("proprio"), found.get("force")
        self.judge.lied |= self.frozen is not None
        good = (
            pose is not None
            and pose.value.shape == (self.dims,)
            and bool(np.isfinite(pose.value).all())
            and now - pose.stamp + self.judge.dt >= -1e-9
            and now - pose.stamp <= old
        )
        believed = None if force is None or now - force.stamp > 0.1 or now < force.stamp - 0.1 else force.value
        self.judge.show(
            now,
            np.asarray(pose.value, np.float64) if good and pose is not None else None,
            good,
            None if believed is None or believed.shape != (3,) else float(np.linalg.norm(believed)),
        )


class Naive(Simulated, Robot):
    def __init__(self, space: ActionSpace, limits: Limits, rate: float, fps: float, seed: int) -> None:
        sensors = (SensorSpec("proprio", "vector", (space.pose_dims,), max_age=0.3), FORCE)
        Robot.__init__(self, "naive", rate, sensors, space, limits, realtime=False, episode_seconds=5.0, fps=fps)
        self.start(seed, space, limits, rate)
        self.adds_up, self.sick, self.is_ready = True, "", False

    def connect(self) -> None: ...

    def close(self) -> None:
        self.stop()

    def now(self) -> float:
        return self.time

    def wait(self, until: float) -> None:
        self.move(until)

    def health(self) -> Health:
        return Health(not self.sick, self.sick)

    def setpoint(self) -> np.ndarray | None:
        return self.goal[: self.dims].copy() if self.adds_up else None

    def read(self) -> dict[str, Reading]:
        found = self.readings()
        self.told(found, self.time, 0.3)
        return found

    def prepare(self, seed: int) -> None:
        self.settle()
        self.goal = self.body.copy()
        at = np.full(self.dim, math.nan)
        at[: self.dims] = self.body[: self.dims]
        self.judge.begin(self.start_of(at))
        self.is_ready = True

    def send(self, action: np.ndarray) -> None:
        if not self.is_ready:
            raise PrismError("stopped")
        command, before = np.asarray(action, np.float64), self.goal.copy()
        units, kinds = command * self.judge.scale, self.judge.kinds
        change = np.where(kinds == "velocity", units / self.rate, units)
        self.goal = np.where(kinds == "absolute", units, self.goal + change)
        base = list(self.actions.base)
        self.goal[base] = 0.0
        self.judge.sent(self.time, command, self.goal, before)

    def stop(self) -> None:
        self.is_ready, self.judge.stopped = False, True
        self.goal = self.body.copy()


class Wire(Part):
    """A device behind a driver's interpolator: `CYCLES` positions a command, each judged."""

    def __init__(self, axes: tuple[Axis, ...], robot: Any, measured: bool = True) -> None:
        self._axes, self.robot, self.measured = axes, robot, measured
        self.path: Interpolator | None = None
        self.first = 0

    def axes(self) -> tuple[Axis, ...]:
        return self._axes

    def state_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self._axes) if self.measured else ()

    def state(self) -> tuple[np.ndarray, float] | None:
        shown = self.robot.body_now.get("proprio")
        return None if shown is None else (np.asarray(shown.value, np.float64)[self.own], shown.stamp)

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + len(self._axes))

    def connect(self) -> None: ...

    def close(self) -> None:
        self.halt()

    def prepare(self) -> None:
        state = self.state()
        if self.measured and state is not None:
            self.path = Interpolator(state[0], self.bounds.speed)
            self.around = self.bounds.around(state[0])
        self.robot.body_model.judge.stopped = False

    def send(self, target: np.ndarray, due: float) -> None:
        if self.path is not None:
            self.path.aim(target, due)

    def halt(self) -> None:
        self.path = None

    def cycle(self, now: float, dt: float) -> None:
        """The wire, between two commands."""
        model = self.robot.body_model
        if self.path is None:
            return
        before = self.path.at.copy()
        at = self.path.step(now, dt)
        self.around.check(at)
        if not np.isfinite(at).all():
            model.judge.say("not finite on the wire", at)
        if (np.abs(at - before) > self.bounds.speed * dt * (1 + 1e-6) + 1e-9).any():
            model.judge.say("speed on the wire", at - before)
        model.goal[self.own] = at


class Body(Simulated):
    pass


class Driven(DrivenRobot):
    """drivers/composed.py on a simulated clock."""

    def __init__(self, kind: str, seed: int) -> None:
        arm = Wire((Axis("x", "m"), Axis("y", "m"), Axis("z", "m")), self)
        gripper = Wire((Axis("gripper", ""),), self, measured=False)
        base = Wire((Axis("vx", "m"),), self, measured=False)
        limits = Limits(
            position=((0.2, 0.8), (-0.3, 0.3), (0.0, 0.5), (-1, 1), (-9, 9)),
            speed=(0.25, 0.25, 0.1, math.inf, 0.5),
            acceleration=(2.0, 2.0, 1.0, math.inf, math.inf),
            workspace=((0.1, 0.9), (-0.4, 0.4), (-0.1, 0.6)),
        )
        self.body_model, self.body_now = Body(), {}
        super().__init__("cell", 20.0, kind, {"arm": arm, "gripper": gripper, "base": base}, (), limits, fps=10.0)
        self.body_model.start(seed, self.actions, limits, 20.0)
        self.realtime, self.episode_seconds = False, 5.0
        self.arm = arm

    def now(self) -> float:
        return self.body_model.time

    def wait(self, until: float) -> None:
        model = self.body_model
        begin, rest = model.time, max(0.0, until - model.time)
        for cycle in range(CYCLES if rest else 0):
            self.arm.cycle(begin + (cycle + 1) * rest / CYCLES, rest / CYCLES)
        model.move(until)
        self.look()

    def look(self) -> None:
        found = self.body_model.readings()
        if "proprio" in found and found["proprio"].value.shape == (3,):  # a part tells as many numbers as it has
            self.body_now = {"proprio": found["proprio"]}

    def connect(self) -> None:
        self.look()
        super().connect()

    def read(self) -> dict[str, Reading]:
        self.look()
        found = super().read()
        self.body_model.told(found, self.body_model.time, 0.15)
        return found

    def prepare(self, seed: int) -> None:
        self.body_model.settle()
        self.look()
        super().prepare(seed)
        at = np.full(self.actions.dim, math.nan)
        at[: self.actions.pose_dims] = self._target[: self.actions.pose_dims]
        self.body_model.judge.begin(self.body_model.start_of(at))
        self.body_model.goal[:3] = self.body_model.body[:3]

    def send(self, action: np.ndarray) -> None:
        before = self._target.copy()
        super().send(action)
        goal = self._target.copy()
        self.body_model.judge.sent(self.body_model.time, np.asarray(action, np.float64), goal, before)

    def stop(self) -> None:
        super().stop()
        self.body_model.judge.stopped = True


def model_of(robot: Any) -> Simulated:
    return robot.body_model if isinstance(robot, Driven) else robot


def twin_spaces() -> dict[str, tuple[ActionSpace, Limits, float, float]]:
    """Of the twins of prism-sims: space, limits, commands and steps a second."""
    from prism_sims import twins

    quick = {"watchdog": 0.06}
    ur5e = Limits(**{**vars(twins._LIMITS), **quick, "force": 45.0, "force_sensor": "force"})
    go2 = Limits(**{**vars(twins._GO2_LIMITS), "force_sensor": "force"})
    return {"ur5e-twin": (twins._SPACE, ur5e, 50.0, 10.0), "go2-twin": (twins._GO2_SPACE, go2, 30.0, 30.0)}


def plain_space(kind: str) -> tuple[ActionSpace, Limits, float, float]:
    names = ("x", "y", "z", "gripper")
    spec = ActionSpec(names, (), "plain", ActionKind(kind), ("m", "m", "m", ""), (0.5,) * 3 + (1.0,))
    space = ActionSpace(spec, (), "proprio", 3)
    limits = Limits(
        position=((-0.5, 0.5), (-0.2, 0.3), (0.0, 1.0), (-1, 1)),
        speed=(0.4, 0.8, 2.0, math.inf),
        acceleration=(1.0, 2.0, 9.0, math.inf),
        jerk=(30.0, 15.0, 500.0, math.inf),
        workspace=((-0.7, 0.7), (-0.4, 0.5), (-0.2, 1.2)),
        force=20.0,
        force_sensor="force",
    )
    return space, limits, 20.0, 10.0
