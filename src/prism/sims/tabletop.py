"""A multisensory task of our own: four commands in words, one scene, holes that have to be felt (tabletop_model.py).

| task                  | command                                  | success                                          |
| --------------------- | ---------------------------------------- | ------------------------------------------------ |
| tabletop-stack-red    | stack the red block on the blue block    | it rests there, and the hand has let go          |
| tabletop-stack-blue   | stack the blue block on the red block    | the same                                         |
| tabletop-insert-left  | put the peg in the left hole             | its foot is 2 cm below the board's top, upright  |
| tabletop-insert-right | put the peg in the right hole            | the same                                         |

Sensors: proprio, tactile (force and torque at the wrist), tactile_image (16 x 16, one channel a fingertip), audio
(16 kHz, 800 samples a step), text (the command); plain: object_state (blocks, peg; the holes only as they are drawn);
-pixels: rgb_static and rgb_wrist instead; -rgbd: with depth. 20 steps a second, at most 300. UR5e, Robotiq 2F-85,
actions as in robosuite_env.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec, encode_text
from prism.sims import offscreen
from prism.sims.base import Array, StepResult
from prism.sims.robosuite_env import RobosuiteEnv
from prism.sims.robosuite_setup import FPS, TASKS, Variant, build_class
from prism.sims.tabletop_model import BLOCK, BOARD_X, HOLES, PEG, TOP, tabletop_class
from prism.sims.tabletop_senses import RATE, TAXELS, Microphone, contact_forces, tactile_image

MAX_STEPS = 300
_TEXT = 48
_SAMPLES = int(RATE / FPS)
_PADS = ("gripper0_right_left_fingerpad_collision", "gripper0_right_right_fingerpad_collision")
_THINGS = ("red", "blue", "peg")


@dataclass(frozen=True)
class Command:
    words: str
    thing: str  # what is to be moved
    onto: str  # a block, or a hole


COMMANDS: dict[str, Command] = {
    "stack-red": Command("stack the red block on the blue block", "red", "blue"),
    "stack-blue": Command("stack the blue block on the red block", "blue", "red"),
    "insert-left": Command("put the peg in the left hole", "peg", "left"),
    "insert-right": Command("put the peg in the right hole", "peg", "right"),
}


def task_name(command: str, variant: Variant) -> str:
    return f"tabletop-{command}" + ("" if variant == "state" else f"-{variant}")


NAMES: dict[str, tuple[str, Variant]] = {task_name(c, v): (c, v) for c in COMMANDS for v in get_args(Variant)}


class TabletopEnv(RobosuiteEnv):
    """One command; `variant` says whether it shows the objects' state or pictures."""

    def __init__(self, command: str, variant: Variant = "state", max_steps: int = MAX_STEPS) -> None:
        if command not in COMMANDS:
            raise PrismError(f"tabletop: there is no command '{command}': use {', '.join(COMMANDS)}")
        self.task, self.variant, self.touches = command, variant, True
        self.command = COMMANDS[command]
        self.name = task_name(command, variant)
        if variant != "state":
            offscreen.require_backend(self.name)
        kwargs = {**TASKS["lift"].env_args["env_kwargs"], "robots": ["UR5e"]}
        kwargs.pop("reward_shaping")
        self.env_args = {"env_name": "PrismTabletop", "env_kwargs": kwargs}
        self.static_camera, self.max_steps = "agentview", max_steps
        self._microphone = Microphone()
        self._forces: list[NDArray[np.float64]] = []
        sim_env = build_class(tabletop_class(), self.env_args["env_kwargs"])
        model = sim_env.sim.model
        self._pads = [model.geom_name2id(name) for name in _PADS]
        self._thing_geoms = {model.geom_name2id(f"{name}_g0") for name in _THINGS}
        self._sound: NDArray[np.float32] = np.zeros(_SAMPLES, np.float32)
        self._adopt(sim_env, FPS)

    def _sensors(self) -> tuple[SensorSpec, ...]:
        shown = [SensorSpec("object_state", "vector", (31,))] if self.variant == "state" else self._picture_sensors()
        return (
            *shown,
            SensorSpec("proprio", "vector", (9,)),
            SensorSpec("tactile", "vector", (6,)),
            SensorSpec("tactile_image", "tactile", (TAXELS, TAXELS, 2)),
            SensorSpec("audio", "audio", (_SAMPLES,), sample_rate=RATE),
            SensorSpec("text", "text", (_TEXT,)),
        )

    def _start(self, seed: int) -> None:
        super()._start(seed)
        self._microphone.reset()
        self._forces = []
        self._sound = np.zeros(_SAMPLES, np.float32)

    def step(self, action: NDArray[np.float32]) -> StepResult:
        self._forces = []
        result = super().step(action)
        success = self.succeeded()
        self._is_over = success or self._steps >= self.max_steps
        return StepResult(result.observation, float(success), success, done=self._is_over)

    def _between_substeps(self, force: bool = False) -> None:
        super()._between_substeps(force)
        if not force:
            sim = self.sim_env.sim
            pads = set(self._pads)
            self._forces.append(contact_forces(sim.model._model, sim.data._data, pads, self._thing_geoms))

    def _observe(self) -> dict[str, Array]:
        sim = self.sim_env.sim
        observation = self._pictures() if self.variant != "state" else {"object_state": self._object_state()}
        if self._forces:
            self._sound = self._microphone.step(self._forces, _SAMPLES)
        observation |= {
            "proprio": self._proprio(),
            "tactile": np.mean(self._wrenches, axis=0).astype(np.float32),
            "tactile_image": tactile_image(sim.model._model, sim.data._data, self._pads),
            "audio": self._sound,
            "text": encode_text(self.command.words, _TEXT).copy(),
        }
        return {sensor.name: observation[sensor.name] for sensor in self.sensors}

    def _object_state(self) -> NDArray[np.float32]:
        """Red, blue, peg: seen from the hand (3), position (3), quaternion wxyz (4); whether the hand holds what it is
        to move (1). Where a hole really is, it does not say."""
        hand = self.hand()[0]
        parts: list[Any] = []
        for name in _THINGS:
            body = self.sim_env.sim.model.body_name2id(f"{name}_main")
            position, turn = self.sim_env.sim.data._data.xpos[body], self.sim_env.sim.data._data.xquat[body]
            parts += [position - hand, position, turn]
        parts.append([float(self.held())])
        return np.round(np.concatenate(parts), 4).astype(np.float32) + np.float32(0)

    def held(self) -> bool:
        """Both fingertips touch the thing that the command moves."""
        data, geom = self.sim_env.sim.data._data, self.sim_env.sim.model.geom_name2id(f"{self.command.thing}_g0")
        touched = set()
        for i in range(data.ncon):
            pair = (int(data.contact.geom1[i]), int(data.contact.geom2[i]))
            if geom in pair:
                touched |= set(pair) & set(self._pads)
        return len(touched) == 2

    def touches_board(self) -> bool:
        """The peg stands on the board or on something of it."""
        data, model = self.sim_env.sim.data._data, self.sim_env.sim.model
        peg = model.geom_name2id("peg_g0")
        for i in range(data.ncon):
            pair = {int(data.contact.geom1[i]), int(data.contact.geom2[i])}
            if peg in pair and str(model.geom_id2name((pair - {peg}).pop())).startswith("hole_"):
                return True
        return False

    def drawn(self, hole: str) -> NDArray[np.float64]:
        """The middle of the dark square on the board's top."""
        return np.array([BOARD_X, HOLES[hole], TOP])

    def true_hole(self, hole: str) -> NDArray[np.float64]:
        place = np.array(self.sim_env.hole_at[hole])
        place[2] = TOP
        return place

    def succeeded(self) -> bool:
        position, turn = self.body(f"{self.command.thing}_main")
        if self.command.onto in HOLES:
            foot = position - PEG[2] * turn[:, 2]
            beside = np.abs(foot - self.true_hole(self.command.onto))[:2].max()
            return bool(foot[2] < TOP - 0.02 and beside < 0.01 and turn[2, 2] > 0.97)
        below = self.body(f"{self.command.onto}_main")[0]
        offset = position - below
        away = np.linalg.norm(self.hand()[0] - position) > 0.05
        resting = abs(offset[2] - 2 * BLOCK) < 0.006 and np.abs(offset[:2]).max() < BLOCK
        return bool(resting and away)
