"""The project's own format: a folder of plain .npy files, read by position.

dataset.json          format_version, task, fps, sensors, action_dim, episode_ends, checksums, provenance; where
                      known: action {names, quaternions: first dimensions, robot}
actions.npy           (N, Da) float32: all episodes, one behind the other
<sensor>.npy          (N, ...) float32, or uint8 for pixels and text
<sensor>.present.npy  (N,) bool, only where a sensor was ever missing
<stream>.crc.npy      CRC-32 of blocks of rows (prism.data.formats.rows), one file for each of the above
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from prism.data.episodes import (
    BoolArray,
    Episode,
    FiniteCheck,
    FloatArray,
    IntArray,
    check_slice,
    stream_dtype,
    wanted_sensors,
)
from prism.data.formats.manifest import ACTIONS, CHECKSUM, MANIFEST, PRESENT, is_store, read_manifest
from prism.data.formats.rows import RowFile
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError

__all__ = ["DatasetWriter", "StoreSource", "is_store"]

_CHECK_ROWS = 65536  # rows looked at together when searching for NaN


class StoreSource:
    """A dataset in the project's own format. Opening it checks everything but pixels, which are checked when read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_manifest(path / MANIFEST)
        self.task, self.fps, self.action_dim = manifest.task, manifest.fps, manifest.action_dim
        self.sensors, self.provenance, ends = manifest.sensors, manifest.provenance, manifest.episode_ends
        self.action_spec = manifest.action
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        self._checked = manifest.checksums
        self.notes: tuple[str, ...] = () if self._checked else ("recorded without checksums: damage may not be seen",)
        rows = int(ends[-1])
        self._actions = self._open(ACTIONS, (rows, self.action_dim), np.dtype(np.float32))
        self._present: dict[str, RowFile] = {}
        self._streams: dict[str, RowFile] = {}
        for sensor in self.sensors:
            if (path / f"{sensor.name}{PRESENT}.npy").exists() or sensor.name in manifest.sometimes_absent:
                self._present[sensor.name] = self._open(f"{sensor.name}{PRESENT}", (rows,), np.dtype(np.bool_))
            self._streams[sensor.name] = self._open(sensor.name, (rows, *sensor.shape), stream_dtype(sensor))
            if sensor.kind == "vector":
                self._check_finite(self._streams[sensor.name], self._present.get(sensor.name))
        self._check_finite(self._actions, None)
        self.sometimes_absent = frozenset(self._present)

    def __reduce__(self) -> tuple[type[StoreSource], tuple[Path]]:
        return StoreSource, (self.path,)  # a worker process opens the folder again

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> RowFile:
        rows = RowFile(self.path / f"{name}.npy", shape, dtype, MANIFEST)
        if self._checked:
            sums = RowFile(self.path / f"{name}{CHECKSUM}.npy", (rows.blocks,), np.dtype(np.uint32), MANIFEST)
            rows.check_with(sums.read(0, rows.blocks))
        return rows

    def _check_finite(self, values: RowFile, present: RowFile | None) -> None:
        check = FiniteCheck(str(values.file), self.lengths)
        for start in range(0, len(values), _CHECK_ROWS):
            stop = min(start + _CHECK_ROWS, len(values))
            mask: BoolArray | None = None if present is None else present.read(start, stop).astype(np.bool_)
            check.add(values.read(start, stop), mask)

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        first, last = int(self._starts[episode]) + start, int(self._starts[episode]) + stop
        names = [sensor.name for sensor in wanted_sensors(self, streams)]
        try:
            actions: FloatArray = self._actions.read(first, last).astype(np.float32, copy=False)
            values = {name: self._streams[name].read(first, last) for name in names}
            masks = {name: self._present[name].read(first, last) for name in names if name in self._present}
        except PrismError as error:
            raise PrismError(f"{error} (reading episode {episode})") from None
        return Episode(values, actions, {name: mask.astype(np.bool_) for name, mask in masks.items()})
