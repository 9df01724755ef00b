"""CALVIN's scene in numbers: what the experts act on, and what the variants `-state` show a policy.

Both come from robot_obs (15) and scene_obs (24), which CALVIN's recordings have too, and from the frames of the four
things that move on joints, which are read from the loaded world once:

    drawer, slider, switch, button      the point where a hand takes hold, and the direction in which the joint moves it
    red_block, blue_block, pink_block   position and turn about the vertical

scene_obs is the simulator's own state: no camera is needed, and no robot has it. A policy of pictures never sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError

from prism_sims.calvin_checkout import BLOCKS

Vector = NDArray[np.float64]

FIXTURES = ("slider", "drawer", "button", "switch")  # the order of their joints in scene_obs
# Joint, and where we take hold in the frame of its link, metres.
_HOLDS = {
    "slider": ("base__slide", (0.14, 0.0, 0.069)),
    "drawer": ("base__drawer", (0.0, 0.035, 0.21)),  # the gap behind the bar
    "button": ("base__button", (0.0, 0.024, 0.0)),
    "switch": ("base__switch", (0.0, 0.053, -0.008)),
}
PROPRIO = 11
OBJECT_STATE = 6 + 2 * 3 * (len(FIXTURES) + len(BLOCKS)) + 2 * len(BLOCKS)
_NEAR = 0.03  # metres: the scale of the last centimetres


@dataclass(frozen=True)
class Fixture:
    """A thing on a joint: where the hand takes hold at joint position 0, and how that point moves with the joint."""

    hold: Vector  # (3,) metres
    axis: Vector  # (3,) unit


def read_fixtures(sim: Any) -> dict[str, Fixture]:
    """From the loaded world: frames and axes of the joints."""
    p, cid = sim.p, sim.cid
    found = {}
    for body in (thing.uid for thing in sim.scene.fixed_objects):
        for joint in range(p.getNumJoints(body, physicsClientId=cid)):
            info = p.getJointInfo(body, joint, physicsClientId=cid)
            for name, (wanted, offset) in _HOLDS.items():
                if info[1].decode() == wanted:
                    link = p.getLinkState(body, joint, physicsClientId=cid)
                    turn = np.array(p.getMatrixFromQuaternion(link[5])).reshape(3, 3)
                    axis = turn @ np.array(info[13])
                    at = float(p.getJointState(body, joint, physicsClientId=cid)[0])
                    found[name] = Fixture(np.array(link[4]) + turn @ np.array(offset) - at * axis, axis)
    if missing := [name for name in FIXTURES if name not in found]:
        raise PrismError(f"CALVIN's scene has no joint '{_HOLDS[missing[0]][0]}': use its scenes A to D")
    return found


@dataclass(frozen=True)
class Scene:
    """One moment."""

    hand: Vector  # (3,) between the finger tips, metres
    turn: Vector  # (3,) roll, pitch, yaw
    width: float  # between the fingers, metres
    is_closing: bool  # the gripper's last command
    joints: Mapping[str, float]  # by FIXTURES
    holds: Mapping[str, Vector]  # (3,) where they are taken hold of, now
    blocks: Mapping[str, Vector]  # (6,) position, roll, pitch, yaw
    axes: Mapping[str, Vector]  # (3,) by FIXTURES

    @staticmethod
    def read(fixtures: Mapping[str, Fixture], state: Vector) -> Scene:
        """`state`: robot_obs and scene_obs, (39,)."""
        robot, scene = state[:15], state[15:]
        joints = {name: float(scene[i]) for i, name in enumerate(FIXTURES)}
        holds = {name: fixtures[name].hold + joints[name] * fixtures[name].axis for name in FIXTURES}
        blocks = {block: scene[6 + 6 * i : 12 + 6 * i] for i, block in enumerate(BLOCKS)}
        axes = {name: fixtures[name].axis for name in FIXTURES}
        return Scene(robot[:3], robot[3:6], float(robot[6]), bool(robot[14] < 0), joints, holds, blocks, axes)


def proprio(state: Vector) -> NDArray[np.float32]:
    """(11,) position, sines and cosines of the three angles, which robot_obs lets jump at pi, width, last command."""
    angles = state[3:6]
    return np.concatenate([state[:3], np.sin(angles), np.cos(angles), state[[6, 14]]]).astype(np.float32)


def object_state(fixtures: Mapping[str, Fixture], state: Vector) -> NDArray[np.float32]:
    """(54,) joints and lights; each thing as seen from the hand, in metres and with the last centimetres enlarged; the
    blocks' turns from the hand's, doubled, because half a turn of a block changes nothing."""
    scene = Scene.read(fixtures, state)
    things = [*scene.holds.values(), *(pose[:3] for pose in scene.blocks.values())]
    away = np.stack(things) - scene.hand
    turns = 2.0 * np.array([pose[5] - scene.turn[2] for pose in scene.blocks.values()])
    parts = [state[15:21], away.ravel(), np.tanh(away / _NEAR).ravel(), np.cos(turns), np.sin(turns)]
    return np.concatenate(parts).astype(np.float32)
