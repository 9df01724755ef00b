"""Push-T demonstrations as the environment would show them.

A dataset stores the raw `state` (agent xy, block xy, block angle); the sensors of a variant are computed from it by
the functions that the environment itself uses. Pixels come from a stored `img`, or are drawn again from the state.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prism.data.episodes import Array, Episode, EpisodeSource, check_slice, read_together, wanted_sensors, with_sensors
from prism.errors import PrismError
from prism.sims.pusht_features import IMAGE_SIZE, Variant, features, mirror_action, mirror_state, sensor_specs

STATE, IMAGE, PIXELS = "state", "img", "rgb_static"
DRAWN_BYTES = 2**30  # frames drawn from states are kept, up to this much: 38,000 of them


class PushTDemonstrations:
    """Episodes of `source` through a variant's sensors; with `mirror`, episode e + E is the mirror image of e."""

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
        from prism.sims.pusht import render_state

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


def demonstrations(source: EpisodeSource, variant: Variant, mirror: bool = False) -> PushTDemonstrations:
    """The sensors of `variant` for a dataset with raw states; mirror=True appends every episode's mirror image."""
    return PushTDemonstrations(source, variant, mirror)
