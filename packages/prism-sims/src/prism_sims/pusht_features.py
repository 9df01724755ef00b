"""Push-T as sensors: pure functions of the raw state (agent xy, block xy, block angle), in pixels and radians.

The environment and the demonstrations go through the same functions, so a policy sees in the simulator exactly
what it was trained on. Relative positions are spelt out, because a small network learns them slowly from
absolute ones.

Push-T has an exact mirror symmetry: the goal T lies at 45 degrees in the middle of the square, so the reflection
about its stem, (x, y) -> (512 - y, 512 - x), maps goal, block and (to one pixel) the walls onto themselves. Each
demonstration is therefore worth two (`mirror_state`, `mirror_action`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prism.data.episodes import Array, Episode, EpisodeSource, check_slice, read_together, wanted_sensors
from prism.data.views import with_sensors
from prism.errors import PrismError
from prism.sensors import SensorSpec

Variant = Literal["state", "keypoints", "pixels"]
VARIANTS: dict[str, Variant] = {  # of each task; pusht-edge is pusht from other starts (pusht.edge_start)
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


STATE, IMAGE, PIXELS = "state", "img", "rgb_static"
DRAWN_BYTES = 2**30  # frames drawn from states are kept, up to this much: 38,000 of them


def as_shown(source: EpisodeSource, task: str, mirror: bool) -> EpisodeSource:
    """Recordings of Push-T's state as a task's environment would show them (prism.sims.task_table.Task.as_shown)."""
    return PushTDemonstrations(source, VARIANTS[task], mirror)


class PushTDemonstrations:
    """Episodes of `source` through a variant's sensors; with `mirror`, episode e + E is the mirror image of e.

    A dataset stores the raw `state`; pixels come from a stored `img`, or are drawn again from the state.
    """

    def __init__(self, source: EpisodeSource, variant: Variant, mirror: bool = False) -> None:
        stored = {sensor.name: sensor for sensor in source.sensors}
        if STATE not in stored or stored[STATE].shape != (5,):
            found = f"of shape {stored[STATE].shape}" if STATE in stored else "missing"
            raise PrismError(f"{source.path}: '{STATE}' is {found}; Push-T needs agent xy, block xy, angle: (5,)")
        if source.action_dim != 2:
            raise PrismError(f"{source.path}: actions have {source.action_dim} dimensions; Push-T's have 2")
        size = (IMAGE_SIZE, IMAGE_SIZE, 3)
        self._has_images = IMAGE in stored and stored[IMAGE].shape == size
        self._source = with_sensors(source, (STATE, IMAGE) if self._has_images else (STATE,))
        self._variant: Variant = variant
        self.copies = 2 if mirror else 1
        self.sensors = sensor_specs(variant)
        self.path: Path = source.path
        self.action_dim, self.fps = source.action_dim, source.fps
        self.lengths = np.tile(source.lengths, self.copies)
        self.notes = source.notes
        self.sometimes_absent: frozenset[str] = frozenset()  # computed from the state, which is always there
        self.read_together = read_together(source) if self._has_images else 0
        if variant == "pixels" and not self._has_images:
            self.notes += (f"no '{IMAGE}' of {size} is stored: pictures are drawn from '{STATE}' as they are needed",)
        self._drawn: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._drawn_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PushTDemonstrations], tuple[EpisodeSource, Variant, bool]]:
        return PushTDemonstrations, (self._source, self._variant, self.copies == 2)  # not the frames, nor the lock

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        wanted = {sensor.name for sensor in wanted_sensors(self, streams)}
        copy, original = divmod(episode, len(self._source.lengths))
        pixels, stored = PIXELS in wanted, PIXELS in wanted and self._has_images
        raw = self._source.read(original, start, stop, (STATE, IMAGE) if stored else (STATE,))
        state: NDArray[np.floating] = np.asarray(raw.streams[STATE], dtype=np.float64)
        actions = raw.actions
        if copy:
            state, actions = mirror_state(state), mirror_action(actions).astype(np.float32)
        shown: dict[str, Array] = dict(features(state, self._variant))
        if pixels:
            images: Array = raw.streams[IMAGE] if stored else self._draw(original)[start:stop]
            # (x, y) -> (512 - y, 512 - x) is a transposition about the other diagonal
            shown[PIXELS] = np.ascontiguousarray(images.swapaxes(1, 2)[:, ::-1, ::-1]) if copy else images
        return Episode({name: stream for name, stream in shown.items() if name in wanted}, actions)

    def _draw(self, original: int) -> NDArray[np.uint8]:
        """All frames of an episode, drawn once (3 ms each) and kept while there is room."""
        from prism_sims.pusht import render_state

        with self._lock:  # one drawing board
            if original in self._drawn:
                self._drawn.move_to_end(original)
                return self._drawn[original]
            states = np.asarray(self._source.read(original, streams=(STATE,)).streams[STATE], dtype=np.float64)
            frames = np.stack([render_state(state) for state in states])
            frames.flags.writeable = False
            self._drawn[original] = frames
            self._drawn_bytes += frames.nbytes
            while self._drawn_bytes > DRAWN_BYTES and len(self._drawn) > 1:
                self._drawn_bytes -= self._drawn.popitem(last=False)[1].nbytes
            return frames
