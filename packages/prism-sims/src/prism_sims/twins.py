"""Twins: robots of the Robot contract (prism/robots/contract.py) that are simulated.

ur5e-twin   the UR5e of the tabletop (tabletop.py), with all its senses. A command is as there: a displacement of the
            hand, 1 is 3 cm, and the gripper. Steps of a policy are those of the tabletop, 10 a second.
go2-twin    the Go2 with an arm (go2.py): the paper's 14 numbers, 30 commands a second; proprio 60 times a second.

    option task=tabletop-insert-left     which scene; every name of tabletop.NAMES, or of go2_tasks.NAMES
    option realtime=true                 false: its clock stands still until somebody waits, and runs as fast as the
                                         physics can be computed: the same commands give the same readings, bit for bit
    option rate=50                       ur5e-twin's commands a second. 50: the loop sends a fifth of a step each 20 ms;
                                         joints' encoders (proprio) and forces (tactile, the mean of the last 0.1 s)
                                         come with each. 10: the tabletop itself, bit for bit; encoders 40 a second

A command that comes within GRACE of its slot is executed from the slot's beginning, as a controller with a buffer does;
where none comes the robot stands still. At 10 commands a second the next one begins a slot; at 50 its slots go on, and
a command that came too late for one is for the next, unless that has a newer one.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.robots.contract import ActionSpace, Health, Reading, Robot
from prism.robots.limits import Limits
from prism.sensors import ActionSpec, SensorSpec
from prism.sims.environment import Expert
from prism_client import ActionKind

from prism_sims import go2, go2_tasks
from prism_sims.go2_expert import make_go2_expert
from prism_sims.mujoco_env import rounded
from prism_sims.tabletop import NAMES, Insert, make_tabletop
from prism_sims.tabletop_arm import BLOCKS, FINE_BLOCKS, FPS, STEP
from prism_sims.tabletop_expert import make_tabletop_expert

GRACE, FINE_GRACE = 2.0, 1.5  # readings of the joints, at 10 and 50 commands a second
QUEUE, AHEAD = 2, 0.25  # commands; how much of a slot is over when the first command comes
RATES = {"10": BLOCKS, "50": FINE_BLOCKS}  # readings of the joints in a step, by commands a second
_SPACE = ActionSpace(
    ActionSpec(("x", "y", "z", "gripper"), (), "ur5e", ActionKind.DELTA, ("m", "m", "m", ""), (STEP, STEP, STEP, 1.0)),
    pose="proprio",
    pose_dims=3,
)
# Where the tabletop's servo lets the hand be; its speed; and what its scripted experts need to shake a box.
_LIMITS = Limits(
    position=((0.28, 0.72), (-0.38, 0.38), (0.02, 0.42), (-1.0, 1.0)),
    speed=(0.3, 0.3, 0.3, math.inf),
    acceleration=(6.0, 6.0, 6.0, math.inf),
    jerk=(200.0, 200.0, 200.0, math.inf),
    workspace=((0.25, 0.75), (-0.42, 0.42), (-0.01, 0.46)),
)


_GO2_SPACE = ActionSpace(
    go2.ACTION,
    base=tuple(range(8, 14)),
    pose="proprio",
    pose_dims=8,
)
_REACH = tuple(zip(go2.HAND_LOW.tolist(), go2.HAND_HIGH.tolist(), strict=True))
_BASE = tuple(zip(go2.LOW[8:].tolist(), go2.HIGH[8:].tolist(), strict=True))
# A command is ahead of the hand, and may jump: the arm itself goes no faster than go2.py lets it.
_GO2_LIMITS = Limits(
    position=((-1.0, 1.0), *_REACH, *((-1.0, 1.0),) * 4, *_BASE),
    speed=(math.inf, *(4.0,) * 3, *(6.0,) * 4, *go2.HIGH[8:].tolist()),
    acceleration=(math.inf,) * 8 + (25.0,) * 6,
    workspace=((-1.3, 1.3), *((low - 0.1, high + 0.1) for low, high in _REACH)),
    force=80.0,
    force_sensor="tactile",
)


class Twin(Robot):
    """A simulated task as a robot. Its environment runs a control step in blocks: aim(command), advance(block)."""

    _fast: tuple[str, ...] = ("proprio",)  # sensors that come with each block

    def __init__(
        self, name: str, env: Any, expert: Expert, space: ActionSpace, limits: Limits, realtime: str, rate: float,
        blocks: int,
    ) -> None:  # fmt: skip
        if realtime not in ("true", "false"):
            raise PrismError(f"{name}: realtime={realtime} is neither true nor false")
        self._env, self._expert = env, expert
        self._blocks, self._block_seconds = blocks, 1.0 / (env.fps * blocks)
        self._low, self._high = env.action_low, env.action_high  # of a command
        sensors = tuple(self._paced(spec) for spec in env.sensors)
        super().__init__(
            name, rate, sensors, space, limits, is_twin=True, realtime=realtime == "true",
            episode_seconds=env.max_steps / env.fps, fps=env.fps,
        )  # fmt: skip
        self.task = str(env.name)
        self._view = env._mj.MjData(env.model)  # for the joints' encoders between two observations
        self._lock = threading.RLock()
        self._connected = self._ready = False
        self._queue: deque[tuple[float, NDArray[np.float32]]] = deque(maxlen=QUEUE)  # when each came, in blocks
        self._begin, self._done, self._phase = 0.0, 0, 0  # when the episode began; blocks since then, of the slot
        self._readings: dict[str, Reading] = {}

    @abstractmethod
    def _idle(self, last: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """The command of a slot for which none came: it stands still. `last`: the one before."""

    @abstractmethod
    def _between(self) -> dict[str, NDArray[np.float32]]:
        """The fast sensors within a step: the state of the simulation stays as it is, to the last bit."""

    @abstractmethod
    def _trouble(self) -> str:
        """Why it cannot move; empty: it can."""

    def _paced(self, spec: SensorSpec) -> SensorSpec:
        """With the rate of its readings, and how old one may be: what safety needs comes with every command."""
        if spec.name not in self._fast:
            return dataclasses.replace(spec, fps=self._env.fps)
        late = 1.75 * self._block_seconds if self._env.fine else 0.0
        return dataclasses.replace(spec, fps=1.0 / self._block_seconds, max_age=late)

    # -- the contract

    def connect(self) -> None:
        self._connected = True
        self.prepare(0)
        self._ready = False

    def prepare(self, seed: int) -> None:
        with self._lock:
            if not self._connected:
                raise PrismError(f"{self.name}: connect() first")
            before = self.now()
            observation = self._env.reset(seed)
            self._begin, self._done = (time.monotonic() if self.realtime else before), 0
            self._phase, self._holds = 0, False
            self._next: NDArray[np.float32] | None = None
            self._queue.clear()
            self._first = True
            self._last: NDArray[np.float32] | None = None
            self._moves, self._succeeded = True, False
            self._ready = True
            self.held = 0  # slots without a command
            self._readings = {name: Reading(value, self._begin) for name, value in observation.items()}

    def now(self) -> float:
        return time.monotonic() if self.realtime else self._begin + self._done * self._block_seconds

    def wait(self, until: float) -> None:
        if self.realtime:
            return super().wait(until)
        with self._lock:
            self._run_to(round((until - self._begin) / self._block_seconds + 0.49))
        return None

    def read(self) -> dict[str, Reading]:
        with self._lock:
            if not self._connected:
                raise PrismError(f"{self.name}: connect() before read()")
            self._catch_up()
            return {name: Reading(reading.value.copy(), reading.stamp) for name, reading in self._readings.items()}

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float32)
        with self._lock:
            if not self._connected or not self._ready:
                raise PrismError(f"{self.name}: it takes no commands: connect(), then prepare(seed)")
            if command.shape != (self.actions.dim,) or not np.isfinite(command).all():
                raise PrismError(f"{self.name}: a command is {self.actions.dim} finite numbers, not {command!r}")
            command = np.clip(command, self._low, self._high)
            if self._env.fine:
                self._enqueue(command)
                return
            self._next = command
            self._catch_up()

    def setpoint(self) -> NDArray[np.float64] | None:
        with self._lock:
            return self._goal() if self._ready else None

    def _goal(self) -> NDArray[np.float64] | None:
        """The servo's commanded position; None: commands are positions."""
        return None

    def stop(self) -> None:
        with self._lock:
            self._catch_up()
            if self._ready:
                self._env.freeze()  # from the next block on
            self._ready, self._next = False, None
            self._queue.clear()

    def close(self) -> None:
        with self._lock:
            self.stop()
            self._connected = False

    def health(self) -> Health:
        if not self._connected:
            return Health(False, "not connected")
        trouble = self._trouble()
        return Health(not trouble, trouble)

    def success(self) -> bool | None:
        return self._succeeded

    def script(self, seed: int) -> Callable[[], NDArray[np.float32]]:
        """The scripted expert of the task: it looks at the last observation."""
        self._expert.reset(seed)
        return lambda: np.clip(self._expert.act(), self._env.action_low, self._env.action_high).astype(np.float32)

    # -- time

    def _catch_up(self) -> None:
        """In real time: the physics of all that is past. A slot without a command waits for it, for GRACE."""
        if not self.realtime or not self._connected:
            return
        past = (time.monotonic() - self._begin) / self._block_seconds
        self._run_to(int(past), int(past - (FINE_GRACE - 1.0 if self._env.fine else GRACE)))

    def _enqueue(self, command: NDArray[np.float32]) -> None:
        """At 50 commands a second. Slots, and the steps of the slow sensors, begin with the first command."""
        if self._first:
            self._catch_up()
            self._first, self._phase = False, 0
            if self.realtime:
                ends = time.monotonic() - AHEAD * self._block_seconds
                self._begin = max(self._begin, ends - self._done * self._block_seconds)
        self._queue.append(((self.now() - self._begin) / self._block_seconds, command))
        self._catch_up()

    def _run_to(self, blocks: int, without_command: int | None = None) -> None:
        """The physics of all blocks up to `blocks`; a slot without a command begins only before `without_command`."""
        while self._done < blocks:
            if self._env.fine:
                if len(self._queue) > 1 and self._queue[1][0] <= self._done + 0.5:
                    self._queue.popleft()  # too late for the slot before, and this one has its own
                if self._queue and self._queue[0][0] <= self._done + FINE_GRACE:
                    self._next = self._queue.popleft()[1]
                elif without_command is not None and self._ready and self._done >= without_command:
                    return
                self._start_slot()
            elif self._phase == 0 or (self._holds and self._next is not None):  # a command ends a slot that had none
                late = without_command is not None and self._done >= without_command
                if self._next is None and self._ready and late:
                    return
                self._start_slot()
            self._block()

    def _start_slot(self) -> None:
        command, self._holds = self._next, self._next is None
        self._phase = self._phase if self._env.fine else 0
        if command is None:
            self.held += 1
            command = self._idle(self._last)
        self._next, self._last = None, command
        if self._ready:  # stopped: where it is
            self._moves = self._env.aim(command)

    def _block(self) -> None:
        env, block = self._env, self._phase
        if self._moves:
            env.advance(block)
        self._done += 1
        self._phase = (block + 1) % self._blocks
        stamp = self._begin + self._done * self._block_seconds
        if env.fine:
            env._refresh()
            self._succeeded |= self._moves and env.succeeded()
        if block < self._blocks - 1:
            self._readings |= {name: Reading(value, stamp) for name, value in self._between().items()}
            return
        env._refresh()
        self._succeeded |= self._moves and env.succeeded()
        self._readings = {name: Reading(value, stamp) for name, value in env._observe().items()}


def _known(name: str, task: str, tasks: Collection[str]) -> str:
    if task not in tasks:
        raise PrismError(f"{name}: there is no scene '{task}'; use one of {', '.join(tasks)}")
    return task


class UR5eTwin(Twin):
    tasks = tuple(NAMES)

    def __init__(self, task: str = "tabletop-insert-left", realtime: str = "true", rate: str = "50") -> None:
        if rate not in RATES:
            raise PrismError(f"ur5e-twin: rate={rate} is neither {' nor '.join(RATES)}")
        env = make_tabletop(*NAMES[_known("ur5e-twin", task, NAMES)])
        if rate == "50":
            env.refine()
            self._fast = ("proprio", "tactile")
        limits = dataclasses.replace(_LIMITS, watchdog=0.06) if rate == "50" else _LIMITS
        if any(spec.name == "tactile" for spec in env.sensors):
            limits = dataclasses.replace(limits, force=Insert.LIMIT, force_sensor="tactile")
        expert = make_tabletop_expert(env)
        super().__init__("ur5e-twin", env, expert, _SPACE, limits, realtime, float(rate), RATES[rate])
        self._high = np.array([FPS / float(rate)] * 3 + [1.0], np.float32)  # 0.3 m/s
        self._low = -self._high

    def _goal(self) -> NDArray[np.float64] | None:
        return np.asarray(self._env._target, np.float64).copy()

    def _idle(self, last: NDArray[np.float32] | None) -> NDArray[np.float32]:
        return np.array([0.0, 0.0, 0.0, -1.0 if last is None else last[3]], np.float32)

    def _trouble(self) -> str:
        stopped = getattr(self._env, "stopped", False)
        return f"protective stop: more than {Insert.LIMIT:g} N" if stopped else ""

    def _between(self) -> dict[str, NDArray[np.float32]]:
        env = self._env
        if env.fine:
            hand, wrench = env.hand(), np.round(env._wrench, 3).astype(np.float32)
            return {"proprio": rounded([*hand, env.data.qpos[6]])} | (
                {"tactile": wrench} if "tactile" in self._readings else {}
            )
        self._view.qpos[:] = env.data.qpos
        env._mj.mj_kinematics(env.model, self._view)
        return {"proprio": rounded([*self._view.site_xpos[env._site], env.data.qpos[6]])}


class Go2Twin(Twin):
    tasks = tuple(go2_tasks.NAMES)

    def __init__(self, task: str = "go2-insert", realtime: str = "true") -> None:
        env = go2_tasks.make_go2(*go2_tasks.NAMES[_known("go2-twin", task, go2_tasks.NAMES)])
        super().__init__("go2-twin", env, make_go2_expert(env), _GO2_SPACE, _GO2_LIMITS, realtime, go2.FPS, go2.BLOCKS)

    def _idle(self, last: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """The hand stays where it was last sent to on the trunk, the base stops."""
        command = self._env.proprio()[: self.actions.dim] if last is None else last.copy()
        command[8:] = 0.0
        return command

    def _between(self) -> dict[str, NDArray[np.float32]]:
        env = self._env
        self._view.qpos[:] = env.data.qpos
        env._mj.mj_kinematics(env.model, self._view)
        return {"proprio": env.proprio(self._view)}

    def _trouble(self) -> str:
        return "it has fallen" if self._env.fallen else ""
