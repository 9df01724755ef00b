"""Base of the dataset writers: episodes in parts, every value checked, atomic."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from prism.data.episodes import Array, BoolArray, FloatArray, first_bad_row
from prism.data.formats.store import check_sensors
from prism.errors import PrismError
from prism.io.files import HIDDEN, AtomicWriter, held, hidden_beside, remove_abandoned, replace_folder
from prism.sensors import ActionSpec, SensorSpec


class EpisodeWriter(AtomicWriter):
    """Writes a folder, one episode at a time, or a long episode in parts, with nothing held in memory.

    Everything goes to a hidden folder beside `path`, renamed by `close`; an exception inside the `with` block leaves
    nothing behind. A format says how steps are written, what is done at the end, and which files are open.
    """

    words: str  # what is written, for messages
    sign: str  # the file in it by which it is recognised

    def __init__(
        self,
        path: Path,
        sensors: Sequence[SensorSpec],
        action_dim: int,
        fps: float,
        task: str,
        overwrite: bool,
        action: ActionSpec | None,
    ) -> None:
        self.path = Path(path)
        check_sensors(sensors)
        if action_dim <= 0 or not fps > 0:
            raise PrismError(f"{path}: action_dim {action_dim} and fps {fps} must be positive")
        self._overwrite = overwrite
        if problem := self._in_the_way():
            raise PrismError(problem)
        self.sensors, self.action_dim, self.fps, self.task = tuple(sensors), action_dim, float(fps), task
        self.action_spec = action or ActionSpec()
        self.action_spec.check(action_dim, str(path))
        self._ends: list[int] = [0]  # of the episodes; the first begins at 0
        self._rows = 0
        self._open = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path.parent)
        self._lock = ExitStack()
        self._lock.enter_context(held(self.path))
        self._temp = hidden_beside(self.path)
        self._temp.mkdir()

    def _in_the_way(self) -> str:
        """Why the folder must not get its name, in words."""
        if not (self.path.exists() or self.path.is_symlink()):
            return ""
        if not self._overwrite:
            return f"{self.path}: exists already; choose another path or pass --overwrite"
        if (self.path / self.sign).is_file():
            return ""
        return f"{self.path}: exists and is not a {self.words} dataset, so it is not overwritten; remove it yourself"

    @abstractmethod
    def _write(self, streams: Mapping[str, Array], actions: FloatArray, masks: Mapping[str, BoolArray]) -> None:
        """The next steps, checked: a stream and a mask (where it was present) of every sensor."""

    @abstractmethod
    def _finish(self) -> None:
        """Completes the files."""

    @abstractmethod
    def _release(self) -> None:
        """Closes what is open, to be removed."""

    @property
    def episodes(self) -> int:
        return len(self._ends) - 1

    def add(
        self, streams: Mapping[str, ArrayLike], actions: ArrayLike, present: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """One episode: every sensor's stream (T, ...), actions (T, Da), and where sensors were missing."""
        if self._rows > self._ends[-1]:
            raise PrismError(f"{self.path}: episode {self.episodes} is still open; call end_episode first")
        self.extend(streams, actions, present)
        self.end_episode()

    def extend(
        self, streams: Mapping[str, ArrayLike], actions: ArrayLike, present: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """The next steps of the episode that is being written."""
        where = f"{self.path}: episode {self.episodes}"
        if not self._open:
            raise PrismError(f"{self.path}: the writer is closed")
        names = [sensor.name for sensor in self.sensors]
        if set(streams) != set(names):
            raise PrismError(f"{where}: needs the streams {', '.join(sorted(names))}, got {', '.join(sorted(streams))}")
        values = np.ascontiguousarray(actions, dtype=np.float32)
        if values.ndim != 2 or values.shape[1] != self.action_dim:
            raise PrismError(f"{where}: 'actions' has shape {values.shape}, needs (T, {self.action_dim})")
        length = len(values)
        if length == 0:
            raise PrismError(f"{where}: is empty; leave it out")
        _require_finite(values, f"{where}: 'actions'")
        masks: dict[str, BoolArray] = {name: np.ones(length, np.bool_) for name in names}
        for name, mask in ((name, np.asarray(mask)) for name, mask in (present or {}).items()):
            if name not in names:
                raise PrismError(f"{where}: 'present' names '{name}', which is not a sensor of this dataset")
            if mask.shape != (length,) or mask.dtype != np.bool_:
                raise PrismError(f"{where}: 'present' of '{name}' is {mask.dtype} {mask.shape}, needs bool ({length},)")
            masks[name] = mask
        checked = {s.name: self._checked(s, streams[s.name], masks[s.name], where) for s in self.sensors}
        self._write(checked, values, masks)  # everything is checked: from here on only the disk can fail
        self._rows += length

    def end_episode(self) -> None:
        """End the episode: everything added since the last call."""
        if self._rows == self._ends[-1]:
            raise PrismError(f"{self.path}: episode {self.episodes}: is empty; leave it out")
        self._ends.append(self._rows)

    def close(self) -> None:
        """Completes the files and gives the folder its name."""
        if not self._open:
            return
        with self._or_nothing():
            if self._rows > self._ends[-1]:
                raise PrismError(f"{self.path}: episode {self.episodes} was not ended; call end_episode")
            if not self.episodes:
                raise PrismError(f"{self.path}: no episode was recorded, so no dataset is written")
            self._finish()
        self._open = False
        with self._lock:
            if self._in_the_way():  # another program made it meanwhile
                other = self.path.with_name(f"{self.path.name}-{self._temp.name.removeprefix(HIDDEN)[:8]}")
                os.rename(self._temp, other)
                raise PrismError(f"{self.path}: another program created it meanwhile; the new data are in {other}")
            replace_folder(self._temp, self.path)

    def abandon(self) -> None:
        self._open = False
        with suppress(OSError):  # a full disk
            self._release()
        shutil.rmtree(self._temp, ignore_errors=True)
        self._lock.close()

    def _checked(self, sensor: SensorSpec, values: ArrayLike, present: BoolArray, where: str) -> Array:
        array, needed = np.asarray(values), (len(present), *sensor.shape)
        if array.shape != needed:
            raise PrismError(f"{where}: '{sensor.name}' has shape {array.shape}, needs {needed}")
        if sensor.dtype == np.uint8 and array.dtype != np.uint8:
            raise PrismError(f"{where}: '{sensor.name}' is {array.dtype}, pixels must be uint8 (0..255)")
        array = np.ascontiguousarray(array, dtype=sensor.dtype)
        if sensor.kind == "vector":
            _require_finite(array, f"{where}: '{sensor.name}'", present)
        return array

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise


def _require_finite(values: Array, where: str, present: BoolArray | None = None) -> None:
    if (step := first_bad_row(values, present)) is not None:
        raise PrismError(f"{where} is NaN or infinite at step {step}; fix it or leave the episode out")
