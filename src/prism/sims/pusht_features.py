"""Push-T as sensors: pure functions of the raw state (agent xy, block xy, block angle), in pixels and radians.

The environment and the demonstrations go through the same functions, so a policy sees in the simulator exactly
what it was trained on. Relative positions are spelt out, because a small network learns them slowly from
absolute ones.

Push-T has an exact mirror symmetry: the goal T lies at 45 degrees in the middle of the square, so the reflection
about its stem, (x, y) -> (512 - y, 512 - x), maps goal, block and (to one pixel) the walls onto themselves. Each
demonstration is therefore worth two (`mirror_state`, `mirror_action`).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec

Variant = Literal["state", "keypoints", "pixels"]
VARIANTS: dict[str, Variant] = {  # of each task; pusht-edge is pusht from other starts (sims/pusht_edge.py)
    "pusht": "state",
    "pusht-keypoints": "keypoints",
    "pusht-pixels": "pixels",
    "pusht-edge": "state",
}

SIZE = 512.0  # side of the square world, pixels
GOAL = np.array([256.0, 256.0, np.pi / 4])  # block xy and angle
IMAGE_SIZE = 96

# The T's outline in its own frame: bar of 120 x 30, stem of 30 x 90.
CORNERS = np.array(
    [(-60, 30), (-15, 30), (-15, 120), (15, 120), (15, 30), (60, 30), (60, 0), (-60, 0)], dtype=np.float64
)  # (8, 2)

Float = NDArray[np.floating]


def _rotation(angle: Float) -> Float:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)  # (..., 2, 2)


def keypoints(block: Float) -> Float:
    """Corners of a T at block = (x, y, angle), (..., 3) -> (..., 8, 2)."""
    corners = np.einsum("...ij,kj->...ki", _rotation(block[..., 2]), CORNERS)
    return np.asarray(corners + block[..., None, :2])


def _to_outline(point: Float) -> Float:
    """Vector from a point in the T's frame to the nearest point of its outline, (..., 2) -> (..., 2)."""
    start, edge = CORNERS, np.roll(CORNERS, -1, axis=0) - CORNERS  # (8, 2)
    offset = point[..., None, :] - start  # (..., 8, 2)
    along = np.clip((offset * edge).sum(-1) / (edge * edge).sum(-1), 0.0, 1.0)
    gap = along[..., None] * edge - offset  # (..., 8, 2)
    nearest = (gap * gap).sum(-1).argmin(-1)
    return np.asarray(np.take_along_axis(gap, nearest[..., None, None], axis=-2)[..., 0, :])


def object_state(state: Float) -> Float:
    """Where the block is, as seen from the agent, from the goal and from itself, (..., 5) -> (..., 41)."""
    agent, block = state[..., :2], state[..., 2:5]
    rotation = _rotation(block[..., 2])
    corners = keypoints(block)
    in_block = np.einsum("...ji,...j->...i", rotation, agent - block[..., :2])
    gap = np.einsum("...ij,...j->...i", rotation, _to_outline(in_block))
    parts = [
        block[..., :2] - GOAL[:2],
        np.cos(block[..., 2:3]),
        np.sin(block[..., 2:3]),
        in_block,
        gap,
        np.linalg.norm(gap, axis=-1, keepdims=True),
        (corners - agent[..., None, :]).reshape(*state.shape[:-1], 16),
        (corners - keypoints(GOAL)).reshape(*state.shape[:-1], 16),
    ]
    scale_free = [parts[0], parts[1] * 100.0, parts[2] * 100.0, *parts[3:]]  # all of the order of 100 pixels
    return np.concatenate(scale_free, axis=-1).astype(np.float32)


def sensor_specs(variant: Variant) -> tuple[SensorSpec, ...]:
    """The sensors of each variant; `proprio` is the agent's position in all of them."""
    proprio = SensorSpec("proprio", "vector", (2,))
    if variant == "state":
        return proprio, SensorSpec("object_state", "vector", (41,))
    if variant == "keypoints":
        return proprio, SensorSpec("object_state", "vector", (16,))
    if variant == "pixels":
        return proprio, SensorSpec("rgb_static", "rgb", (IMAGE_SIZE, IMAGE_SIZE, 3), random_shift=4)
    raise PrismError(f"unknown Push-T variant '{variant}'; use one of {', '.join(get_args(Variant))}")


def features(state: Float, variant: Variant) -> dict[str, NDArray[np.float32]]:
    """The vector sensors of a state (..., 5); pixels are rendered elsewhere."""
    state = np.asarray(state, dtype=np.float64)
    streams = {"proprio": state[..., :2].astype(np.float32)}
    if variant == "state":
        streams["object_state"] = object_state(state)
    elif variant == "keypoints":
        corners = keypoints(state[..., 2:5])
        streams["object_state"] = corners.reshape(*state.shape[:-1], 16).astype(np.float32)
    return streams


def mirror_action(action: Float) -> Float:
    """Reflect positions (..., 2) about the goal T's stem."""
    return np.asarray(SIZE - action[..., ::-1])


def mirror_state(state: Float) -> Float:
    """Reflect a state (..., 5): positions about the goal T's stem, angle -> pi/2 - angle."""
    agent, block = mirror_action(state[..., :2]), mirror_action(state[..., 2:4])
    angle = np.mod(np.pi / 2 - state[..., 4:5], 2 * np.pi)
    return np.concatenate([agent, block, angle], axis=-1)
