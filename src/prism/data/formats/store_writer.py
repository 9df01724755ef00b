"""Writing the project's own format (prism.data.formats.store): a stretch of steps at a time, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from prism.data.episodes import Array, BoolArray, first_bad_row
from prism.data.formats.store import (
    ACTIONS,
    CHECKSUM,
    MANIFEST,
    PRESENT,
    Checksums,
    Manifest,
    as_bytes,
    check_sensors,
    is_store,
)
from prism.errors import PrismError
from prism.io.files import AtomicWriter, hidden_beside, replace_folder, sync, sync_folder
from prism.sensors import ActionSpec, SensorSpec


class DatasetWriter(AtomicWriter):
    """Writes the own format, one episode at a time, or a long episode in parts, with nothing held in memory.

    Everything goes to a hidden folder beside `path`, renamed by `close`; an exception inside the
    `with` block leaves nothing behind.

        with DatasetWriter(path, sensors, action_dim=4, fps=80.0, task="metaworld-reach") as writer:
            writer.add({"proprio": ...}, actions)  # the same as extend(...), end_episode()
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
        action: ActionSpec | None = None,
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
        self.provenance, self.action_spec = dict(provenance or {}), action or ActionSpec()
        self.action_spec.check(action_dim, str(path))
        self._ends: list[int] = []
        self._rows = 0
        self._absent: set[str] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temp = hidden_beside(self.path)
        self._temp.mkdir()
        self._files: dict[str, IO[bytes]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._checksums: dict[str, Checksums] = {}
        self._open = True
        try:
            self._start_file(ACTIONS, (action_dim,), np.dtype(np.float32))
            for sensor in self.sensors:
                self._start_file(sensor.name, sensor.shape, sensor.dtype)
                self._start_file(sensor.name + PRESENT, (), np.dtype(np.bool_))
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
        if self._rows > (self._ends[-1] if self._ends else 0):
            raise PrismError(f"{self.path}: episode {self.episodes} is still open; call end_episode first")
        self.extend(streams, actions, present)
        self.end_episode()

    def end_episode(self) -> None:
        """What was added since the last call is one episode."""
        if self._rows == (self._ends[-1] if self._ends else 0):
            raise PrismError(f"{self.path}: episode {self.episodes}: is empty; leave it out")
        self._ends.append(self._rows)

    def extend(
        self, streams: Mapping[str, ArrayLike], actions: ArrayLike, present: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """The next steps of the episode that is being written."""
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
            mask = masks.get(sensor.name, np.ones(length, np.bool_))
            ready[sensor.name + PRESENT] = mask
            if not mask.all():
                self._absent.add(sensor.name)
        for name, array in ready.items():  # everything is checked: from here on only the disk can fail
            content = as_bytes(array)
            self._files[name].write(content)
            self._checksums[name].add(content)
        self._rows += length

    def close(self) -> None:
        """Completes the files and gives the folder its name."""
        if not self._open:
            return
        try:
            if self._rows > (self._ends[-1] if self._ends else 0):
                raise PrismError(f"{self.path}: episode {self.episodes} was not ended; call end_episode")
            if not self._ends:
                raise PrismError(f"{self.path}: no episode was recorded, so no dataset is written")
            self._finish_files()
        except BaseException:
            self.abandon()
            raise
        self._open = False
        replace_folder(self._temp, self.path)

    def abandon(self) -> None:
        """Removes everything written so far."""
        self._open = False
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _start_file(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._files[name] = (self._temp / f"{name}.npy").open("w+b")
        _write_header(self._files[name], (0, *shape), dtype)
        self._shapes[name] = shape, dtype
        self._checksums[name] = Checksums(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)

    def _checked_masks(self, present: Mapping[str, ArrayLike], length: int, where: str) -> dict[str, BoolArray]:
        masks = {name: np.asarray(mask) for name, mask in present.items()}
        for name, mask in masks.items():
            if name not in {sensor.name for sensor in self.sensors}:
                raise PrismError(f"{where}: 'present' names '{name}', which is no sensor of this dataset")
            if mask.shape != (length,) or mask.dtype != np.bool_:
                raise PrismError(f"{where}: 'present' of '{name}' is {mask.dtype} {mask.shape}, needs bool ({length},)")
        return masks

    def _finish_files(self) -> None:
        for name, (shape, dtype) in self._shapes.items():
            file = self._files[name]
            if name.endswith(PRESENT) and name.removesuffix(PRESENT) not in self._absent:
                file.close()
                (self._temp / f"{name}.npy").unlink()  # it was there all the time
                continue
            file.seek(0)
            # numpy pads the header so that a longer first axis fits in the same space.
            _write_header(file, (self._rows, *shape), dtype)
            sync(file)
            file.close()
            with (self._temp / f"{name}{CHECKSUM}.npy").open("wb") as sums:
                np.save(sums, self._checksums[name].result(), allow_pickle=False)
                sync(sums)
        ends = np.array(self._ends, np.int64)
        absent = tuple(sorted(self._absent))
        sizes = (self.sensors, self.action_dim, ends, self.provenance)
        manifest = Manifest(self.task, self.fps, *sizes, True, absent, self.action_spec)
        with (self._temp / MANIFEST).open("wb") as file:
            file.write(manifest.to_json().encode())
            sync(file)
        sync_folder(self._temp)


def _checked_stream(sensor: SensorSpec, values: ArrayLike, length: int, present: BoolArray | None, where: str) -> Array:
    array = np.asarray(values)
    dtype = sensor.dtype
    if array.shape != (length, *sensor.shape):
        raise PrismError(f"{where}: '{sensor.name}' has shape {array.shape}, needs {(length, *sensor.shape)}")
    if dtype == np.uint8 and array.dtype != np.uint8:
        raise PrismError(f"{where}: '{sensor.name}' is {array.dtype}, pixels must be uint8 (0..255)")
    array = np.ascontiguousarray(array, dtype=dtype)
    if sensor.kind == "vector":
        _require_finite(array if present is None else array[present], f"{where}: '{sensor.name}'")
    return array


def _require_finite(values: Array, where: str) -> None:
    if (step := first_bad_row(values)) is not None:
        raise PrismError(f"{where} is NaN or infinite at step {step}; mend it or leave the episode out")


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)
