"""Diffusion Policy's zarr: `data/<key>` time-major, `meta/episode_ends` cumulative; a folder or a zip of one.

Every array of `data` but `action` becomes a sensor under its own name: (T, H, W, 3) an RGB image, any
other number array a vector (flattened: keypoints (T, 9, 2) are 18 numbers). What cannot be a sensor is
left out and said in `notes`. Zarr stores chunks of many steps; the decoded chunks last used are kept,
within `cache_bytes`, and nothing else is.
"""

from __future__ import annotations

import threading
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import (
    Array,
    Episode,
    FiniteCheck,
    FloatArray,
    IntArray,
    check_slice,
    wanted_sensors,
)
from prism.data.files import reason
from prism.data.zarr_store import AGAIN, ENDS, open_arrays
from prism.errors import PrismError
from prism.sensors import SensorSpec

DEFAULT_FPS = 10.0  # the format stores no rate; this is Push-T's
DEFAULT_CACHE_BYTES = 128 * 2**20
_MIN_ROWS = 1024  # vectors stored in tiny chunks are read this many steps at a time


@dataclass(frozen=True)
class _Stream:
    """One zarr array and how it becomes a sensor."""

    key: str
    array: Any  # zarr.Array
    block: int  # steps decoded together: whole chunks
    image: bool
    scale: float  # float pixels: 1 for 0..255, 255 for 0..1


class ZarrSource:
    """A Diffusion Policy dataset. Opening it reads the vectors once (for NaN), pixels only on demand."""

    def __init__(self, path: Path, fps: float = DEFAULT_FPS, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        if not fps > 0:
            raise PrismError(f"{path}: fps must be positive, not {fps}")
        self.path, self.fps, self._cache_bytes = path, float(fps), cache_bytes
        self._cache: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        notes = [f"the format stores no rate: {fps:g} steps a second are assumed"]
        arrays, ends = open_arrays(path, notes)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        rows = {key: int(array.shape[0]) if array.shape else 0 for key, array in arrays.items()}
        if "action" not in arrays:
            raise PrismError(f"{path}: key 'data/action' is missing; found {', '.join(sorted(arrays)) or 'nothing'}")
        for key, count in rows.items():
            if count != rows["action"]:
                raise PrismError(f"{path}: 'data/{key}' has {count} steps, 'data/action' {rows['action']}; {AGAIN}")
        if ends[-1] > rows["action"]:
            raise PrismError(f"{path}: '{ENDS}' goes to {ends[-1]}, the data to {rows['action']}; {AGAIN}")
        if ends[-1] < rows["action"]:
            notes.append(f"the last {rows['action'] - int(ends[-1])} steps belong to no episode and are left out")
        self._streams: dict[str, _Stream] = {}
        sensors: list[SensorSpec] = []
        for key, array in sorted(arrays.items()):
            if key == "action":
                if array.ndim != 2 or array.shape[1] == 0 or array.dtype.kind not in "fiu":
                    raise PrismError(f"{path}: 'data/action' is {array.dtype} {array.shape}, needs numbers (T, Da)")
                self._streams[key] = self._stream(key, array, image=False, notes=notes)
            elif (spec := _sensor(key, array, notes)) is not None:
                sensors.append(spec)
                self._streams[key] = self._stream(key, array, image=spec.kind == "rgb", notes=notes)
        if not sensors:
            raise PrismError(f"{path}: 'data' holds no array that could be a sensor; found {', '.join(sorted(arrays))}")
        self.sensors = tuple(sensors)
        self.action_dim = int(arrays["action"].shape[1])
        self.notes = tuple(notes)
        for stream in self._streams.values():
            if not stream.image:
                self._check_finite(stream)

    def __reduce__(self) -> tuple[type[ZarrSource], tuple[Path, float, int]]:
        # Locks and open archives do not travel: a worker process opens the dataset again.
        return ZarrSource, (self.path, self.fps, self._cache_bytes)

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        first = int(self._starts[episode])
        values = {
            sensor.name: self._rows(self._streams[sensor.name], first + start, first + stop).reshape(-1, *sensor.shape)
            for sensor in wanted_sensors(self, streams)
        }
        actions: FloatArray = self._rows(self._streams["action"], first + start, first + stop).astype(np.float32)
        return Episode(values, actions)

    def _stream(self, key: str, array: Any, image: bool, notes: list[str]) -> _Stream:
        chunk = max(int(array.chunks[0]), 1)
        block = chunk if image else chunk * max(_MIN_ROWS // chunk, 1)
        missing = int(array.nchunks) - int(array.nchunks_initialized)
        if missing and (image or key == "action"):
            raise PrismError(f"{self.path}: 'data/{key}' lacks {missing} of its {array.nchunks} chunks; {AGAIN}")
        if missing:  # legal in zarr: a chunk of nothing but the fill value need not be stored
            notes.append(f"'{key}' lacks {missing} of its chunks: they read as {array.fill_value}")
        scale = 1.0
        if image and array.dtype.kind == "f":
            top = float(np.max(self._decode(key, array, 0, min(8, int(array.shape[0])))))
            scale = 255.0 if 0 < top <= 1 else 1.0
            notes.append(f"'{key}' holds floats, read as pixels from 0 to {255 / scale:g}")
        return _Stream(key, array, block, image, scale)

    def _decode(self, key: str, array: Any, start: int, stop: int) -> Array:
        try:
            values: Array = array[start:stop]
        except Exception as error:  # each codec and store fails with exceptions of its own
            raise PrismError(
                f"{self.path}: 'data/{key}' cannot be decoded near step {start} ({reason(error)}); {AGAIN}"
            ) from None
        return values

    def _block(self, stream: _Stream, number: int) -> Array:
        """Block `number` in its final type: uint8 pixels or float32 numbers, (rows, ...)."""
        with self._lock:
            if (found := self._cache.get((stream.key, number))) is not None:
                self._cache.move_to_end((stream.key, number))
                return found
        start = number * stream.block
        values = self._decode(stream.key, stream.array, start, start + stream.block)
        if stream.image:
            values = self._pixels(stream, values, start)
        else:
            values = values.reshape(len(values), -1).astype(np.float32)
        with self._lock:
            if (stream.key, number) not in self._cache and values.nbytes <= self._cache_bytes:
                self._cache[stream.key, number] = values
                self._cached_bytes += values.nbytes
                while self._cached_bytes > self._cache_bytes:
                    self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return values

    def _pixels(self, stream: _Stream, values: Array, start: int) -> Array:
        if values.dtype == np.uint8:
            return values
        numbers = values.astype(np.float32)
        # written so that NaN fails too
        if not (numbers.min() >= 0 and numbers.max() <= 255 / stream.scale):
            top = 255 / stream.scale
            raise PrismError(
                f"{self.path}: 'data/{stream.key}' has pixels outside 0..{top:g} near step {start}; mend it"
            )
        pixels: Array = np.rint(numbers * stream.scale).astype(np.uint8)
        return pixels

    def _rows(self, stream: _Stream, start: int, stop: int) -> Array:
        """Steps start..stop of the whole dataset, a copy."""
        first, last = start // stream.block, max(stop - 1, start) // stream.block
        parts = []
        for number in range(first, last + 1):
            offset = number * stream.block
            parts.append(self._block(stream, number)[max(start - offset, 0) : stop - offset])
        return np.concatenate(parts)

    def _check_finite(self, stream: _Stream) -> None:
        check = FiniteCheck(f"{self.path}: 'data/{stream.key}'", self.lengths)
        total = int(self.lengths.sum())
        for start in range(0, total, stream.block):
            rows = self._decode(stream.key, stream.array, start, min(start + stream.block, total))
            check.add(rows)


def is_zarr(path: Path) -> bool:
    """A folder that looks like a zarr group, or a zip (whatever is in it: opening it says what is wrong)."""
    if path.is_dir():
        return any((path / name).exists() for name in (".zgroup", "zarr.json", "meta/episode_ends", "data/action"))
    return path.suffix == ".zip" or zipfile.is_zipfile(path)


def _sensor(key: str, array: Any, notes: list[str]) -> SensorSpec | None:
    """The sensor that an array is by its shape, or None with a note."""
    shape = tuple(int(size) for size in array.shape[1:])
    if array.dtype.kind not in "fiub" or 0 in shape:
        notes.append(f"'{key}' ({array.dtype}, {shape} a step) is no sensor and is left out")
        return None
    if len(shape) == 3 and shape[2] == 3:
        return SensorSpec(key, "rgb", shape)
    if len(shape) >= 3:
        notes.append(f"'{key}' has shape {shape} a step, neither (H, W, 3) nor a vector, and is left out")
        return None
    if len(shape) == 2:
        notes.append(f"'{key}' {shape} is flattened to {shape[0] * shape[1]} numbers")
    return SensorSpec(key, "vector", (int(np.prod(shape, dtype=np.int64)),))
