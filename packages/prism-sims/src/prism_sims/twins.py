"""Twins: robots of the Robot contract (prism/robots/base.py) that are simulated.

ur5e-twin   the UR5e of the tabletop (tabletop.py), with all its senses. A command is as there: a displacement of the
            hand, 1 is 3 cm, and the gripper. 10 commands a second; the joints' encoders (proprio) 40 times a second, in
            the middle of a command too.

    option task=tabletop-insert-left     which table; every name of tabletop.NAMES
    option realtime=true                 false: its clock stands still until somebody waits, and runs as fast as the
                                         physics can be computed: the same commands give the same readings, bit for bit

A command that comes within GRACE of its slot is executed from the slot's beginning, as a controller with a buffer does;
where none comes the robot stands still, and the next one begins a slot.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.robots.base import ActionSpace, Health, Reading, Robot
from prism.robots.limits import Limits
from prism.sensors import ActionSpec

from prism_sims.tabletop import NAMES, Insert, make_tabletop
from prism_sims.tabletop_arm import BLOCKS, FPS, STEP
from prism_sims.tabletop_expert import make_tabletop_expert

BLOCK = 1.0 / (FPS * BLOCKS)  # seconds between two readings of the joints
GRACE = 2 * BLOCK  # seconds
_SPACE = ActionSpace(
    ActionSpec(("x", "y", "z", "gripper"), robot="ur5e", kind="delta"),
    units=("m", "m", "m", ""),
    scale=(STEP, STEP, STEP, 1.0),
    pose="proprio",
    pose_dims=3,
)
# Where the tabletop's servo lets the hand be; its speed; and what its scripted experts need to shake a box.
_LIMITS = Limits(
    position=((0.28, 0.72), (-0.38, 0.38), (0.02, 0.42), (-1.0, 1.0)),
    speed=(0.3, 0.3, 0.3, math.inf),
    acceleration=(6.0, 6.0, 6.0, math.inf),
    workspace=((0.25, 0.75), (-0.42, 0.42), (-0.01, 0.46)),
)


class UR5eTwin(Robot):
    def __init__(self, task: str = "tabletop-insert-left", realtime: str = "true") -> None:
        if task not in NAMES:
            raise PrismError(f"ur5e-twin: there is no table '{task}'; use one of {', '.join(NAMES)}")
        if realtime not in ("true", "false"):
            raise PrismError(f"ur5e-twin: realtime={realtime} is neither true nor false")
        self._env = make_tabletop(*NAMES[task])
        self._expert = make_tabletop_expert(self._env)
        sensors = tuple(
            dataclasses.replace(spec, fps=1.0 / BLOCK if spec.name == "proprio" else 0.0) for spec in self._env.sensors
        )
        limits = _LIMITS
        if any(spec.name == "tactile" for spec in sensors):
            limits = dataclasses.replace(limits, force=Insert.LIMIT, force_sensor="tactile")
        super().__init__(
            "ur5e-twin", FPS, sensors, _SPACE, limits, is_twin=True, realtime=realtime == "true",
            episode_seconds=self._env.max_steps / FPS,
        )  # fmt: skip
        self.task = task
        self._view = self._env._mj.MjData(self._env.model)  # for the joints' encoders between two observations
        self._lock = threading.RLock()
        self._connected = self._ready = False
        self._begin, self._done, self._phase = 0.0, 0, 0  # when the episode began; blocks since then, of the slot
        self._readings: dict[str, Reading] = {}

    # -- the contract

    def connect(self) -> None:
        self._connected = True
        self.prepare(0)
        self._ready = False

    def prepare(self, seed: int) -> None:
        with self._lock:
            if not self._connected:
                raise PrismError("ur5e-twin: connect() first")
            before = self.now()
            observation = self._env.reset(seed)
            self._begin, self._done = (time.monotonic() if self.realtime else before), 0
            self._phase, self._holds = 0, False
            self._next: NDArray[np.float32] | None = None
            self._gripper, self._moves, self._succeeded = -1.0, True, False
            self._ready = True
            self.held = 0  # slots without a command
            self._readings = {name: Reading(value, self._begin) for name, value in observation.items()}

    def now(self) -> float:
        return time.monotonic() if self.realtime else self._begin + self._done * BLOCK

    def wait(self, until: float) -> None:
        if self.realtime:
            return super().wait(until)
        with self._lock:
            self._run_to(round((until - self._begin) / BLOCK + 0.49))
        return None

    def read(self) -> dict[str, Reading]:
        with self._lock:
            if not self._connected:
                raise PrismError("ur5e-twin: connect() before read()")
            self._catch_up()
            return {name: Reading(reading.value.copy(), reading.stamp) for name, reading in self._readings.items()}

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float32)
        with self._lock:
            if not self._connected or not self._ready:
                raise PrismError("ur5e-twin: it takes no commands: connect(), then prepare(seed)")
            if command.shape != (4,) or not np.isfinite(command).all():
                raise PrismError(f"ur5e-twin: a command is 4 finite numbers, not {command!r}")
            self._next = np.clip(command, -1.0, 1.0)
            self._catch_up()

    def stop(self) -> None:
        with self._lock:
            self._catch_up()
            if self._ready:
                self._env.freeze()  # from the next block on
            self._ready, self._next = False, None

    def close(self) -> None:
        with self._lock:
            self.stop()
            self._connected = False

    def health(self) -> Health:
        if not self._connected:
            return Health(False, "not connected")
        if getattr(self._env, "stopped", False):
            return Health(False, f"protective stop: more than {Insert.LIMIT:g} N")
        return Health()

    def success(self) -> bool | None:
        return self._succeeded

    def script(self, seed: int) -> Callable[[], NDArray[np.float32]]:
        """The scripted expert of the table: it looks at the last observation."""
        self._expert.reset(seed)
        return lambda: np.clip(self._expert.act(), -1.0, 1.0).astype(np.float32)

    # -- time

    def _catch_up(self) -> None:
        """In real time: the physics of all that is past. A slot without a command waits for it, for GRACE."""
        if not self.realtime or not self._connected:
            return
        past = time.monotonic() - self._begin
        self._run_to(int(past / BLOCK), int((past - GRACE) / BLOCK))

    def _run_to(self, blocks: int, without_command: int | None = None) -> None:
        """The physics of all blocks up to `blocks`; a slot without a command begins only before `without_command`."""
        while self._done < blocks:
            if self._phase == 0 or (self._holds and self._next is not None):  # a command ends a slot that had none
                late = without_command is not None and self._done >= without_command
                if self._next is None and self._ready and late:
                    return
                self._start_slot()
            self._block()

    def _start_slot(self) -> None:
        command, self._phase, self._holds = self._next, 0, self._next is None
        if command is None:
            self.held += 1
            command = np.array([0.0, 0.0, 0.0, self._gripper], np.float32)
        self._next, self._gripper = None, float(command[3])
        if self._ready:  # stopped: where it is
            self._moves = self._env.aim(command)

    def _block(self) -> None:
        env, block = self._env, self._phase
        if self._moves:
            env.advance(block)
        self._done += 1
        self._phase = (block + 1) % BLOCKS
        stamp = self._begin + self._done * BLOCK
        if block < BLOCKS - 1:
            self._view.qpos[:] = env.data.qpos
            env._mj.mj_kinematics(env.model, self._view)
            hand = self._view.site_xpos[env._site]
            value = np.round([*hand, env.data.qpos[6]], 4).astype(np.float32) + np.float32(0)
            self._readings["proprio"] = Reading(value, stamp)
            return
        env._refresh()
        self._succeeded |= self._moves and env.succeeded()
        self._readings = {name: Reading(value, stamp) for name, value in env._observe().items()}
