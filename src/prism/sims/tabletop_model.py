"""The tabletop scene: a UR5e with a Robotiq gripper, two blocks, a peg, and a board with two holes.

The board is drawn where it seems to be; each hole really is up to 7 mm beside the middle of the dark square that is
drawn for it. The hole is 5 mm wider than the peg, and a pixel of the static camera sees about a centimetre: which way
the hole lies shows only when the peg stands on its rim, in the torque at the wrist and in the fingertips.
"""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np

from prism.sims.robosuite_setup import load_robosuite

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
