"""The project's own format: a folder that reads by memory map.

dataset.json          format_version, task, fps, sensors, action_dim, episode_ends, provenance
actions.npy           (N, Da) float32: all episodes, one behind the other
<sensor>.npy          (N, ...) float32, or uint8 for pixels
<sensor>.present.npy  (N,) bool, only where a sensor was ever missing
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from prism.data.episodes import (
    Array,
    BoolArray,
    Episode,
    FiniteCheck,
    IntArray,
    check_slice,
    stream_dtype,
    wanted_sensors,
)
from prism.data.files import hidden_beside, reason, sync, sync_folder
from prism.data.manifest import ACTIONS, MANIFEST, PRESENT, Manifest, check_sensors, read_manifest
from prism.errors import PrismError
from prism.sensors import SensorSpec

_CHECK_ROWS = 65536  # rows looked at together when searching for NaN


class StoreSource:
    """A dataset in the project's own format. Opening it checks everything but the pixels."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_manifest(path / MANIFEST)
        self.task, self.fps, self.action_dim = manifest.task, manifest.fps, manifest.action_dim
        self.sensors, self.provenance, ends = manifest.sensors, manifest.provenance, manifest.episode_ends
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        rows = int(ends[-1])
        self._actions = _map(path / f"{ACTIONS}.npy", (rows, self.action_dim), np.dtype(np.float32))
        self._present: dict[str, BoolArray] = {}
        self._streams: dict[str, Array] = {}
        for sensor in self.sensors:
            present = path / f"{sensor.name}{PRESENT}.npy"
            if present.exists():
                self._present[sensor.name] = _map(present, (rows,), np.dtype(np.bool_))
            file = path / f"{sensor.name}.npy"
            self._streams[sensor.name] = _map(file, (rows, *sensor.shape), stream_dtype(sensor))
            if sensor.kind == "vector":
                self._check_finite(file, self._streams[sensor.name], self._present.get(sensor.name))
        self._check_finite(path / f"{ACTIONS}.npy", self._actions, None)

    def __reduce__(self) -> tuple[type[StoreSource], tuple[Path]]:
        # A memory map would be pickled as its whole content: a worker process opens the folder again.
        return StoreSource, (self.path,)

    def _check_finite(self, file: Path, values: Array, present: BoolArray | None) -> None:
        check = FiniteCheck(str(file), self.lengths)
        for start in range(0, len(values), _CHECK_ROWS):
            part = slice(start, start + _CHECK_ROWS)
            check.add(values[part], None if present is None else present[part])

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        rows = slice(int(self._starts[episode]) + start, int(self._starts[episode]) + stop)
        names = [sensor.name for sensor in wanted_sensors(self, streams)]
        return Episode(
            {name: self._streams[name][rows] for name in names},
            self._actions[rows],
            {name: self._present[name][rows] for name in names if name in self._present},
        )


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _map(file: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A read-only memory map of exactly this shape and type; pickled objects are refused by numpy."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise PrismError(f"{file}: not found, but {MANIFEST} names it; collect or convert the dataset again") from None
    except Exception as error:  # numpy raises many kinds on a damaged header
        raise PrismError(
            f"{file}: truncated or not a .npy file ({reason(error)}); collect or convert the dataset again"
        ) from None
    if not isinstance(array, np.ndarray):
        array.close()  # numpy opens a zip archive by its first bytes, whatever its name
    if not isinstance(array, np.memmap) or array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise PrismError(
            f"{file}: holds {found}, {MANIFEST} says {dtype} {shape}; collect or convert the dataset again"
        )
    if file.stat().st_size != int(array.offset) + array.nbytes:
        raise PrismError(f"{file}: has bytes behind the array; collect or convert the dataset again")
    return array


class DatasetWriter:
    """Writes the own format, one episode at a time, with nothing held in memory.

    Everything goes to a hidden folder beside `path`, renamed by `close`; an exception inside the
    `with` block leaves nothing behind.

        with DatasetWriter(path, sensors, action_dim=4, fps=80.0, task="metaworld-reach") as writer:
            writer.add({"proprio": ...}, actions)
    """

    def __init__(
        self,
        path: Path,
        sensors: Sequence[SensorSpec],
        action_dim: int,
        fps: float,
        task: str,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        check_sensors(sensors)
        if action_dim <= 0 or not fps > 0:
            raise PrismError(f"{path}: action_dim {action_dim} and fps {fps} must be positive")
        if self.path.exists() or self.path.is_symlink():
            if not overwrite:
                raise PrismError(f"{path}: exists already; choose another path or pass overwrite")
            if not is_store(self.path):
                raise PrismError(
                    f"{path}: exists and is not a prism dataset, so it is not overwritten; remove it yourself"
                )
        self.sensors, self.action_dim, self.fps, self.task = tuple(sensors), action_dim, float(fps), task
        self.provenance = dict(provenance or {})
        self._ends: list[int] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temp = hidden_beside(self.path)
        self._temp.mkdir()
        self._files: dict[str, IO[bytes]] = {}
        self._present: dict[str, list[BoolArray]] = {}
        self._open = True
        try:
            self._start_file(ACTIONS, (action_dim,), np.dtype(np.float32))
            for sensor in self.sensors:
                self._start_file(sensor.name, sensor.shape, stream_dtype(sensor))
        except BaseException:
            self.abandon()
            raise

    @property
    def episodes(self) -> int:
        return len(self._ends)

    def add(
        self, streams: Mapping[str, ArrayLike], actions: ArrayLike, present: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """One episode: every sensor's stream (T, ...), actions (T, Da), and where sensors were missing."""
        where = f"{self.path}: episode {self.episodes}"
        if not self._open:
            raise PrismError(f"{self.path}: the writer is closed")
        names = {sensor.name for sensor in self.sensors}
        if set(streams) != names:
            raise PrismError(f"{where}: needs the streams {', '.join(sorted(names))}, got {', '.join(sorted(streams))}")
        values = np.ascontiguousarray(actions, dtype=np.float32)
        if values.ndim != 2 or values.shape[1] != self.action_dim:
            raise PrismError(f"{where}: 'actions' has shape {values.shape}, needs (T, {self.action_dim})")
        length = len(values)
        if length == 0:
            raise PrismError(f"{where}: is empty; leave it out")
        _require_finite(values, f"{where}: 'actions'")
        masks = self._checked_masks(present or {}, length, where)
        ready: dict[str, Array] = {ACTIONS: values}
        for sensor in self.sensors:
            ready[sensor.name] = _checked_stream(sensor, streams[sensor.name], length, masks.get(sensor.name), where)
        for name, array in ready.items():  # everything is checked: from here on only the disk can fail
            self._files[name].write(array.data)
        self._ends.append((self._ends[-1] if self._ends else 0) + length)
        for name in names:
            self._present.setdefault(name, []).append(masks.get(name, np.ones(length, np.bool_)))

    def close(self) -> None:
        """Completes the files and gives the folder its name."""
        if not self._open:
            return
        try:
            if not self._ends:
                raise PrismError(f"{self.path}: no episode was recorded, so no dataset is written")
            self._finish_files()
        except BaseException:
            self.abandon()
            raise
        self._open = False
        old = self._temp.with_suffix(".old")
        if self.path.exists():  # overwrite: the old dataset disappears only after the new one is complete
            os.replace(self.path, old)
        os.replace(self._temp, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Removes everything written so far."""
        self._open = False
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._temp, ignore_errors=True)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _start_file(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._files[name] = (self._temp / f"{name}.npy").open("w+b")
        _write_header(self._files[name], (0, *shape), dtype)

    def _checked_masks(self, present: Mapping[str, ArrayLike], length: int, where: str) -> dict[str, BoolArray]:
        masks = {name: np.asarray(mask) for name, mask in present.items()}
        for name, mask in masks.items():
            if name not in self._files or name == ACTIONS:
                raise PrismError(f"{where}: 'present' names '{name}', which is no sensor of this dataset")
            if mask.shape != (length,) or mask.dtype != np.bool_:
                raise PrismError(f"{where}: 'present' of '{name}' is {mask.dtype} {mask.shape}, needs bool ({length},)")
        return masks

    def _finish_files(self) -> None:
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {ACTIONS: ((self.action_dim,), np.dtype(np.float32))}
        shapes |= {sensor.name: (sensor.shape, stream_dtype(sensor)) for sensor in self.sensors}
        for name, (shape, dtype) in shapes.items():
            file = self._files[name]
            file.seek(0)
            # numpy pads the header so that a longer first axis fits in the same space.
            _write_header(file, (self._ends[-1], *shape), dtype)
            sync(file)
            file.close()
        for name, masks in self._present.items():
            mask = np.concatenate(masks)
            if not mask.all():
                with (self._temp / f"{name}{PRESENT}.npy").open("wb") as file:
                    np.save(file, mask, allow_pickle=False)
                    sync(file)
        ends = np.array(self._ends, np.int64)
        manifest = Manifest(self.task, self.fps, self.sensors, self.action_dim, ends, self.provenance)
        with (self._temp / MANIFEST).open("wb") as file:
            file.write(manifest.to_json().encode())
            sync(file)
        sync_folder(self._temp)


def _checked_stream(sensor: SensorSpec, values: ArrayLike, length: int, present: BoolArray | None, where: str) -> Array:
    array = np.asarray(values)
    dtype = stream_dtype(sensor)
    if array.shape != (length, *sensor.shape):
        raise PrismError(f"{where}: '{sensor.name}' has shape {array.shape}, needs {(length, *sensor.shape)}")
    if dtype == np.uint8 and array.dtype != np.uint8:
        raise PrismError(f"{where}: '{sensor.name}' is {array.dtype}, pixels must be uint8 (0..255)")
    array = np.ascontiguousarray(array, dtype=dtype)
    if sensor.kind == "vector":
        _require_finite(array if present is None else array[present], f"{where}: '{sensor.name}'")
    return array


def _require_finite(values: Array, where: str) -> None:
    good = np.isfinite(values).all(axis=1)
    if not good.all():
        raise PrismError(f"{where} is NaN or infinite at step {int(np.argmin(good))}; mend it or leave the episode out")


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)
