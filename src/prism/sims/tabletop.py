"""A multisensory task of our own: four commands in words, one scene, holes that have to be felt.

| task                  | command                                  | success                                          |
| --------------------- | ---------------------------------------- | ------------------------------------------------ |
| tabletop-stack-red    | stack the red block on the blue block    | it rests there, and the hand has let go          |
| tabletop-stack-blue   | stack the blue block on the red block    | the same                                         |
| tabletop-insert-left  | put the peg in the left hole             | its foot is 2 cm below the board's top, upright  |
| tabletop-insert-right | put the peg in the right hole            | the same                                         |

Sensors: proprio, tactile (force and torque at the wrist), tactile_image (16 x 16, one channel a fingertip), audio
(16 kHz, 800 samples a step), text (the command); plain: object_state (blocks, peg; the holes only as they are drawn);
-pixels: rgb_static and rgb_wrist instead; -rgbd: with depth. 20 steps a second, at most 300. UR5e, Robotiq 2F-85,
actions as in robosuite.py.

The board is drawn where it seems to be; each hole really is up to 7 mm beside the middle of the dark square that is
drawn for it. The hole is 5 mm wider than the peg, and a pixel of the static camera sees about a centimetre: which way
the hole lies shows only when the peg stands on its rim, in the torque at the wrist and in the fingertips.
"""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec, encode_text
from prism.sims.base import Array
from prism.sims.robosuite import FPS, TASKS, RobosuiteEnv, Variant, build_class, load_robosuite
from prism.sims.tabletop_senses import RATE, TAXELS, Microphone, contact_forces, tactile_image

TABLE = 0.8  # metres, the table's top
BLOCK = 0.021  # half an edge
PEG = (0.0095, 0.0095, 0.05)  # half sizes
HOLE = 0.012  # half the width of a hole
BOARD = 0.022  # half its height
TOP = TABLE + 2 * BOARD
BOARD_X = 0.1
HOLES: dict[str, float] = {"left": 0.1, "right": -0.1}  # y, as the robot sees left and right
JITTER = 0.007
_UNIT = 0.05  # half the width of the part of the board round a hole
_COLOURS = {"red": (0.85, 0.1, 0.1, 1.0), "blue": (0.1, 0.2, 0.85, 1.0), "peg": (0.95, 0.75, 0.1, 1.0)}


def _geom(name: str, size: tuple[float, ...], pos: tuple[float, ...], **more: str) -> ET.Element:
    numbers = {"size": " ".join(f"{v:g}" for v in size), "pos": " ".join(f"{v:g}" for v in pos)}
    return ET.Element("geom", {"name": name, "type": "box", **numbers, **more})


def _board(name: str, y: float) -> list[ET.Element]:
    """What collides (a frame of four boxes, which a reset moves) and what is drawn (which stays)."""
    body = ET.Element("body", {"name": f"hole_{name}", "pos": f"{BOARD_X:g} {y:g} {TABLE + BOARD:g}"})
    wide, off = (_UNIT - HOLE) / 2, (_UNIT + HOLE) / 2
    # polished: its friction counts, not the peg's (priority)
    solid = {"group": "0", "rgba": "0.5 0.5 0.5 1", "friction": "0.12 0.005 0.0001", "priority": "1", "condim": "3"}
    body.append(_geom(f"hole_{name}_front", (wide, _UNIT, BOARD), (-off, 0, 0), **solid))
    body.append(_geom(f"hole_{name}_back", (wide, _UNIT, BOARD), (off, 0, 0), **solid))
    body.append(_geom(f"hole_{name}_near", (HOLE, wide, BOARD), (0, -off, 0), **solid))
    body.append(_geom(f"hole_{name}_far", (HOLE, wide, BOARD), (0, off, 0), **solid))
    drawn = {"group": "1", "contype": "0", "conaffinity": "0"}
    seen = ET.Element("body", {"name": f"board_{name}", "pos": f"{BOARD_X:g} {y:g} {TABLE + BOARD:g}"})
    seen.append(_geom(f"board_{name}_plate", (_UNIT, _UNIT, BOARD), (0, 0, 0), rgba="0.6 0.6 0.62 1", **drawn))
    dark = (HOLE + JITTER + 0.003,) * 2
    seen.append(_geom(f"board_{name}_dark", (*dark, 0.0005), (0, 0, BOARD), rgba="0.08 0.08 0.08 1", **drawn))
    return [body, seen]


@functools.cache
def tabletop_class() -> Any:
    """robosuite's environment class for the scene; made on first use, because robosuite is optional."""
    load_robosuite()
    from robosuite.environments.manipulation.manipulation_env import ManipulationEnv
    from robosuite.models.arenas import TableArena
    from robosuite.models.objects import BoxObject
    from robosuite.models.tasks import ManipulationTask

    class PrismTabletop(ManipulationEnv):  # type: ignore[misc]
        """Scene and placement; commands, success and sensors are in prism.sims.tabletop."""

        def __init__(self, **kwargs: Any) -> None:
            self.hole_at: dict[str, np.ndarray[Any, Any]] = {}
            super().__init__(**kwargs)

        def reward(self, action: Any = None) -> float:
            return 0.0

        def _check_success(self) -> bool:
            return False

        def _load_model(self) -> None:
            super()._load_model()
            self.robots[0].robot_model.set_base_xpos(self.robots[0].robot_model.base_xpos_offset["table"](0.8))
            arena = TableArena(table_full_size=(0.8, 0.8, 0.05), table_offset=(0.0, 0.0, TABLE))
            arena.set_origin([0, 0, 0])
            for name, y in HOLES.items():
                for element in _board(name, y):
                    arena.worldbody.append(element)
            block = {"size": [BLOCK] * 3, "density": 300.0, "friction": [1.0, 0.005, 0.0001]}
            self.things = {
                "red": BoxObject(name="red", rgba=_COLOURS["red"], **block),
                "blue": BoxObject(name="blue", rgba=_COLOURS["blue"], **block),
                "peg": BoxObject(
                    name="peg", rgba=_COLOURS["peg"], size=list(PEG), density=500.0, friction=[2.0, 0.05, 0.0001]
                ),
            }
            self.model = ManipulationTask(
                mujoco_arena=arena,
                mujoco_robots=[robot.robot_model for robot in self.robots],
                mujoco_objects=list(self.things.values()),
            )

        def _reset_internal(self) -> None:
            super()._reset_internal()
            rng = self.rng
            spots = [(-0.17, -0.2), (-0.17, -0.06)]
            if rng.random() < 0.5:
                spots.reverse()
            places = {"red": spots[0], "blue": spots[1], "peg": (-0.16, 0.17)}
            for name, (x, y) in places.items():
                yaw = rng.uniform(-0.4, 0.4) if name != "peg" else rng.uniform(-0.15, 0.15)
                height = PEG[2] if name == "peg" else BLOCK
                place = [x + rng.uniform(-0.03, 0.03), y + rng.uniform(-0.03, 0.03), TABLE + height + 0.001]
                turn = [np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
                self.sim.data.set_joint_qpos(self.things[name].joints[0], np.array([*place, *turn]))
            for name, y in HOLES.items():
                hole = np.array([BOARD_X, y, TABLE + BOARD])
                hole[:2] += rng.uniform(-JITTER, JITTER, 2)
                self.sim.model.body_pos[self.sim.model.body_name2id(f"hole_{name}")] = hole
                self.hole_at[name] = hole

    return PrismTabletop


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
        self.command, self.static_camera, self.touches = COMMANDS[command], "agentview", True
        self._microphone = Microphone()
        self._forces: list[NDArray[np.float64]] = []
        self._sound: NDArray[np.float32] = np.zeros(_SAMPLES, np.float32)
        kwargs = {**TASKS["lift"].env_args["env_kwargs"], "robots": ["UR5e"]}
        kwargs.pop("reward_shaping")
        args = {"env_name": "PrismTabletop", "env_kwargs": kwargs}
        self._build(command, variant, task_name(command, variant), args, max_steps)

    def _make(self) -> Any:
        sim_env = build_class(tabletop_class(), self.env_args["env_kwargs"])
        model = sim_env.sim.model
        self._pads = [model.geom_name2id(name) for name in _PADS]
        self._thing_geoms = {model.geom_name2id(f"{name}_g0") for name in _THINGS}
        return sim_env

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

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        self._forces = []
        super()._advance(action)
        success = self.succeeded()  # of the state that the step ended in
        return float(success), success

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

    def _touching(self, thing: str) -> set[int]:
        """The geoms that touch a thing."""
        contact, geom = self.sim_env.sim.data._data.contact, self.sim_env.sim.model.geom_name2id(f"{thing}_g0")
        pairs = [{int(a), int(b)} for a, b in zip(contact.geom1, contact.geom2, strict=True)]
        return {other for pair in pairs if geom in pair for other in pair - {geom}}

    def held(self) -> bool:
        """Both fingertips touch the thing that the command moves."""
        return self._touching(self.command.thing) >= set(self._pads)

    def touches_board(self) -> bool:
        """The peg stands on the board or on something of it."""
        model = self.sim_env.sim.model
        return any(str(model.geom_id2name(geom)).startswith("hole_") for geom in self._touching("peg"))

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
