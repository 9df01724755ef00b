"""A camera of a recording as video: compressed while it is recorded, each frame as the camera gave it.

    rgb_wrist.mp4          every frame that came, in order (h264, lossy: it looks the same and is not the same bytes)
    rgb_wrist.frames.npy   (T,) int64: which of them belongs to each step of the episode

dataset.json names such sensors under `videos`, with the number of frames, their rate and the file's CRC-32.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array
from prism.data.formats.store import AGAIN, RowFile
from prism.data.formats.video import VideoFrames, VideoWriter
from prism.errors import PrismError
from prism.io.files import sync
from prism.sensors import SensorSpec

FRAMES = ".frames"
_WAITING = 128 * 2**20  # bytes of frames that may wait to be compressed
_NICE = 10  # of the thread that compresses: whatever else wants to run goes first


logger = logging.getLogger("prism.recording")


@dataclass(frozen=True)
class Film:
    """A finished video file."""

    file: Path
    frames: int
    fps: float
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return {"frames": self.frames, "fps": self.fps, "crc32": self.crc32}

    def link(self, target: Path) -> None:
        """The same file as `target` too, in no more space; a copy where the disk knows no links."""
        try:
            os.link(self.file, target)
        except OSError:
            with self.file.open("rb") as whole, target.open("wb") as copy:
                shutil.copyfileobj(whole, copy)
                sync(copy)


class FilmWriter:
    """Compresses frames in a thread of its own: `add` never waits. What it cannot keep up with is dropped."""

    def __init__(self, folder: Path, spec: SensorSpec, fps: float) -> None:
        self.spec, self._fps = spec, fps
        size = (spec.shape[0], spec.shape[1])
        self._video = VideoWriter(folder, "{}.mp4", spec.name, fps, size, "h264", all_colours=True)
        self._file = folder / f"{spec.name}.mp4"
        self._frames = self.dropped = 0
        self._limit = max(8, _WAITING // max(1, size[0] * size[1] * 3))
        self._warned = False
        self._error: Exception | None = None
        self._discard = False
        self._queue: queue.SimpleQueue[Array | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compress, name=f"film {spec.name}", daemon=True)
        self._thread.start()

    def add(self, frame: Array) -> bool:
        """Whether it becomes part of the video."""
        waiting = self._queue.qsize()
        if not self._warned and 2 * waiting >= self._limit:
            self._warned = True
            logger.warning(
                "'%s' comes faster than it is compressed: %d pictures wait, above %d they are dropped (a lower rate or "
                "resolution, fewer cameras, or --no-video help)",
                self.spec.name,
                waiting,
                self._limit,
            )
        if waiting >= self._limit:
            self.dropped += 1
            return False
        self._frames += 1
        self._queue.put(frame)
        return True

    def abandon(self) -> None:
        """Nobody wants it; closed already: nothing happens."""
        self._discard = True
        self._queue.put(None)
        self._thread.join()
        self._video.abandon()

    def close(self) -> Film | None:
        """When all frames are in the file; None: there was none. PrismError where they could not be written. Once more:
        the same."""
        self._queue.put(None)
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            if self._frames:
                return finished(self._video, self._file, self._frames, self._fps)
            self._video.close()
        except OSError as error:  # FFmpeg's errors of a file are OSErrors too
            raise PrismError(
                f"{self._file}: cannot be written ({error.strerror or error}): is the disk full?"
            ) from None
        return None

    def _compress(self) -> None:
        with suppress(AttributeError, OSError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (frame := self._queue.get()) is not None:
            if self._error is None and not self._discard:
                try:
                    self._video.add(frame[None])
                except Exception as error:  # raised by close: the loop continues meanwhile
                    self._error = error


def finished(video: VideoWriter, file: Path, frames: int, fps: float) -> Film:
    """Closes a video whose frames have all been added, and waits for the disk."""
    video.close()
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return Film(file, frames, fps, _crc32(file))


class FilmRows:
    """The pictures of an episode's steps, decoded when they are read; the file is checked the first time."""

    def __init__(self, folder: Path, spec: SensorSpec, film: Film, rows: RowFile) -> None:
        self._file, self._spec, self._film, self._rows = folder / f"{spec.name}.mp4", spec, film, rows
        self._videos = VideoFrames(cache_bytes=4 * 2**20)
        self._checked = False

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Array:
        """Rows start..stop, a fresh array."""
        self._check()
        numbers = self._rows.read(start, stop).astype(np.int64)
        if not len(numbers):
            return np.empty((0, *self._spec.shape), np.uint8)
        if numbers.min() < 0 or numbers.max() >= self._film.frames:
            raise PrismError(f"{self._rows.file}: names a frame that {self._file.name} does not have; {AGAIN}")
        first, count = int(numbers.min()), int(np.ptp(numbers)) + 1
        where = f"'{self._spec.name}'"
        return self._videos.read(self._file, 0.0, first, count, self._film.fps, self._spec.shape, where)[
            numbers - first
        ]

    def _check(self) -> None:
        if self._checked:
            return
        if not self._file.is_file():
            raise PrismError(f"{self._file}: not found, but dataset.json names it; {AGAIN}")
        if _crc32(self._file) != self._film.crc32:
            raise PrismError(f"{self._file}: damaged: fails its checksum; {AGAIN}")
        self._checked = True


def films_of(file: Path, stated: object, sensors: Mapping[str, SensorSpec]) -> dict[str, Film]:
    """`videos` of dataset.json, checked."""
    films = {}
    for name, entry in stated.items() if isinstance(stated, dict) else ():
        spec, values = sensors.get(name), entry if isinstance(entry, dict) else {}
        frames, fps, crc32 = values.get("frames"), values.get("fps"), values.get("crc32")
        good = spec is not None and spec.kind == "rgb" and type(frames) is int and type(crc32) is int
        if not good or not isinstance(fps, int | float) or not 0 < fps < 1e5:
            raise PrismError(f"{file}: 'videos': '{name}' is not what prism writes; {AGAIN}")
        films[name] = Film(file.parent / f"{name}.mp4", int(frames or 0), float(fps), int(crc32 or 0))
    if films or stated in (None, {}):
        return films
    raise PrismError(f"{file}: 'videos' must be a JSON object, not {stated!r:.40}; {AGAIN}")


def _crc32(file: Path) -> int:
    found = 0
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            found = zlib.crc32(part, found)
    return found
