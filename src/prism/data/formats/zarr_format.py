"""Diffusion Policy's zarr: `data/<key>` time-major, `meta/episode_ends` cumulative; a folder or a zip of one.

Every array of `data` but `action` can be a sensor (prism.data.formats.mapping says which). Zarr stores chunks of many
steps; the decoded chunks last used are kept, within `cache_bytes`, and nothing else is. A zip has checksums; a
folder has none, so damage that still decodes cannot be seen there.
"""

from __future__ import annotations

import threading
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, BoolArray, FiniteCheck, IntArray
from prism.data.formats.mapping import Column, Entry
from prism.data.formats.table import Raw, Stream, TableSource, make_table
from prism.data.formats.zarr_store import AGAIN, ENDS, open_arrays
from prism.errors import PrismError, reason

DEFAULT_FPS = 10.0  # the format stores no rate; this is Push-T's
DEFAULT_CACHE_BYTES = 64 * 2**20
_MIN_ROWS = 1024  # vectors stored in tiny chunks are read this many steps at a time


@dataclass(frozen=True)
class _Stream:
    """One zarr array and how its blocks are read."""

    key: str
    array: Any  # zarr.Array
    block: int  # steps decoded together: whole chunks
    image: bool  # pixels stored as floats
    scale: float  # float pixels: what makes them 0..255


class ZarrSource(TableSource):
    """A Diffusion Policy dataset. Opening it reads the vectors once (for NaN), pixels only on demand."""

    def __init__(
        self,
        path: Path,
        fps: float = DEFAULT_FPS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        entries: Sequence[Entry] = (),
    ) -> None:
        if not fps > 0:
            raise PrismError(f"{path}: fps must be positive, not {fps}")
        self.path, self.fps, self._cache_bytes = path, float(fps), cache_bytes
        self._entries = tuple(entries)
        self._cache: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        notes = [f"the format stores no rate: {fps:g} steps a second are assumed"]
        arrays, ends = open_arrays(path, notes)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        action = next((entry.sources[0] for entry in entries if entry.name == "action"), "action")
        self._check_lengths(arrays, action, int(ends[-1]), notes)
        # Float pixels are kept as uint8. Key points of two hands may have their shape: then the table says so.
        numbers = {
            key
            for entry in entries
            if entry.kind == "vector" or entry.name == "action" or len(entry.sources) > 1
            for key in entry.sources
        }
        self._float_pixels = {key for key in arrays if _float_pixels(arrays[key])} - numbers - {action}
        columns = [
            Column(key, tuple(map(int, a.shape[1:])), np.dtype(np.uint8 if key in self._float_pixels else a.dtype))
            for key, a in sorted(arrays.items())
        ]
        self._use(make_table(path, columns, "action", entries, self.fps, notes))
        scales = {key: entry.scale for entry in entries for key in entry.sources}
        self._arrays: dict[str, _Stream] = {}
        for stream in (*self.table.streams, self.table.action):
            for key in (column.key for column in stream.columns):
                self._arrays[key] = self._stream(key, arrays[key], stream, scales.get(key, 0.0), notes)
        self.notes = tuple(notes)
        for stream in (*self.table.streams, self.table.action):
            if stream.spec.kind == "vector":
                for column in stream.columns:
                    self._check_finite(self._arrays[column.key])

    def __reduce__(self) -> tuple[type[ZarrSource], tuple[Any, ...]]:
        # Locks and open archives do not travel: a worker process opens the dataset again.
        return ZarrSource, (self.path, self.fps, self._cache_bytes, self._entries)

    def _check_lengths(self, arrays: dict[str, Any], action: str, end: int, notes: list[str]) -> None:
        rows = {key: int(array.shape[0]) if array.shape else 0 for key, array in arrays.items()}
        if action not in arrays:
            raise PrismError(
                f"{self.path}: key 'data/{action}' is missing; found {', '.join(sorted(arrays)) or 'nothing'}"
            )
        commands = arrays[action]
        if commands.ndim < 2 or 0 in commands.shape or commands.dtype.kind not in "fiu":
            raise PrismError(
                f"{self.path}: 'data/{action}' is {commands.dtype} {commands.shape}, needs numbers (T, Da)"
            )
        for key, count in rows.items():
            if count != rows[action]:
                raise PrismError(
                    f"{self.path}: 'data/{key}' has {count} steps, 'data/{action}' {rows[action]}; {AGAIN}"
                )
        if end > rows[action]:
            raise PrismError(f"{self.path}: '{ENDS}' goes to {end}, the data to {rows[action]}; {AGAIN}")
        if end < rows[action]:
            notes.append(f"the last {rows[action] - end} steps belong to no episode and are left out")

    def _raw(
        self, episode: int, start: int, stop: int, columns: Mapping[str, Column]
    ) -> tuple[Raw, dict[str, BoolArray]]:
        first = int(self._starts[episode])
        return {key: self._rows(self._arrays[key], first + start, first + stop) for key in columns}, {}

    def _stream(self, key: str, array: Any, stream: Stream, scale: float, notes: list[str]) -> _Stream:
        image = stream.spec.is_image
        chunk = max(int(array.chunks[0]), 1)
        block = chunk if image else chunk * max(_MIN_ROWS // chunk, 1)
        try:
            missing = int(array.nchunks) - int(array.nchunks_initialized)
        except Exception as error:  # names in the archive that make no sense
            raise PrismError(f"{self.path}: 'data/{key}' cannot be listed ({reason(error)}); {AGAIN}") from None
        if missing and (image or stream is self.table.action):
            raise PrismError(f"{self.path}: 'data/{key}' lacks {missing} of its {array.nchunks} chunks; {AGAIN}")
        if missing:  # legal in zarr: a chunk of nothing but the fill value need not be stored
            notes.append(f"'{key}' lacks {missing} of its chunks: they read as {array.fill_value}")
        if (pixels := key in self._float_pixels) and not scale:
            top = float(np.max(self._decode(key, array, 0, min(8, int(array.shape[0])))))
            scale = 255.0 if 0 < top <= 1 else 1.0
            notes.append(f"'{key}' holds floats, read as pixels from 0 to {255 / scale:g}")
        return _Stream(key, array, block, pixels, scale or 1.0)

    def _decode(self, key: str, array: Any, start: int, stop: int) -> Array:
        try:
            values: Array = array[start:stop]
        except Exception as error:  # each codec and store fails with exceptions of its own
            raise PrismError(
                f"{self.path}: 'data/{key}' cannot be decoded near step {start} ({reason(error)}); {AGAIN}"
            ) from None
        return values

    def _block(self, stream: _Stream, number: int) -> Array:
        """Block `number`, (rows, ...); pixels stored as floats are kept as uint8, a quarter of the size."""
        with self._lock:
            if (found := self._cache.get((stream.key, number))) is not None:
                self._cache.move_to_end((stream.key, number))
                return found
        start = number * stream.block
        values = self._decode(stream.key, stream.array, start, start + stream.block)
        if stream.image:
            values = self._pixels(stream, values, start)
        with self._lock:
            if (stream.key, number) not in self._cache and values.nbytes <= self._cache_bytes:
                self._cache[stream.key, number] = values
                self._cached_bytes += values.nbytes
                while self._cached_bytes > self._cache_bytes:
                    self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return values

    def _pixels(self, stream: _Stream, values: Array, start: int) -> Array:
        numbers = values.astype(np.float32, copy=False)
        # written so that NaN fails too
        if not (numbers.min() >= 0 and numbers.max() <= 255 / stream.scale):
            top = 255 / stream.scale
            raise PrismError(
                f"{self.path}: 'data/{stream.key}' has pixels outside 0..{top:g} near step {start}; mend it"
            )
        scaled = numbers if stream.scale == 1 else numbers * stream.scale
        pixels: Array = np.rint(scaled).astype(np.uint8)
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


def _float_pixels(array: Any) -> bool:
    return bool(array.dtype.kind == "f" and array.ndim == 4 and array.shape[3] == 3)
