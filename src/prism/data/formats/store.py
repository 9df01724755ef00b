"""The project's own format: a folder of plain .npy files, read by position.

dataset.json          format_version, task, fps, sensors, action_dim, episode_ends, checksums, provenance; where
                      known: action {names, quaternions: first dimensions, robot}; videos (film.py)
actions.npy           (N, Da) float32: all episodes, one behind the other
<sensor>.npy          (N, ...) float32, or uint8 for pixels and text
<sensor>.present.npy  (N,) bool, only where a sensor was ever missing
<stream>.crc.npy      CRC-32 of blocks of rows (prism.data.formats.store), one file for each of the above
"""

from __future__ import annotations

import io
import json
import os
import re
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.data.episodes import (
    SKIP,
    Array,
    BoolArray,
    DamagedDataError,
    Episode,
    FloatArray,
    IntArray,
    Names,
    check_finite,
    check_slice,
    checked_ends,
    wanted_sensors,
)
from prism.data.formats.npz import npy_header
from prism.errors import PrismError, reason, unreadable
from prism.io.files import JSON_BYTES, read_bytes
from prism.sensors import ActionSpec, SensorSpec

# ---------------------------------------------------------------------------
# dataset.json of the project's own format: what it holds, and every way in which it can be wrong.

if TYPE_CHECKING:
    from prism.data.formats.film import Film, FilmRows
    from prism.data.formats.table import Entry

FORMAT_VERSION = 1
MANIFEST = "dataset.json"
ACTIONS = "actions"
PRESENT = ".present"
CHECKSUM = ".crc"
AGAIN = "collect or convert the dataset again"
_REQUIRED = ("format_version", "task", "fps", "sensors", "action_dim", "episode_ends")


@dataclass(frozen=True)
class Manifest:
    task: str
    fps: float
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    episode_ends: IntArray  # (E,) cumulative
    provenance: dict[str, Any]  # free-form: who recorded it, with what
    checksums: bool = False  # every stream has a file of checksums
    sometimes_absent: tuple[str, ...] = ()  # sensors that have a file of presence
    action: ActionSpec = field(default_factory=ActionSpec)
    videos: dict[str, Film] = field(default_factory=dict)  # sensors that are no .npy file

    def to_json(self) -> str:
        data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "task": self.task,
            "fps": self.fps,
            "sensors": [sensor.to_json() for sensor in self.sensors],
            "action_dim": self.action_dim,
            "episode_ends": self.episode_ends.tolist(),
            "provenance": self.provenance,
        }
        if action := self.action.to_json():
            data["action"] = action
        if self.videos:
            data["videos"] = {name: film.to_json() for name, film in self.videos.items()}
        if self.checksums:
            data |= {"checksums": "crc32", "sometimes_absent": list(self.sometimes_absent)}
            data["own_checksum"] = _checksum(data)
        return json.dumps(data, indent=1)


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _checksum(data: dict[str, Any]) -> int:
    """Checksum of everything in dataset.json but itself."""
    return zlib.crc32(json.dumps({key: data[key] for key in sorted(data) if key != "own_checksum"}).encode())


def read_manifest(file: Path) -> Manifest:
    """dataset.json with every field checked."""
    if not file.is_file():
        raise PrismError(f"{file}: not found; a prism dataset is a folder that holds it")
    with unreadable(f"{file}: not readable as JSON", AGAIN):
        data = json.loads(read_bytes(file, JSON_BYTES))
    if not isinstance(data, dict):
        raise PrismError(f"{file}: holds a {type(data).__name__}, not a JSON object; collect or convert it again")
    version = data.get("format_version")
    if version is not None and version != FORMAT_VERSION:
        raise PrismError(
            f"{file}: 'format_version' is {version!r}, this prism reads {FORMAT_VERSION}; use the prism that wrote it"
        )
    if missing := [key for key in _REQUIRED if key not in data]:
        raise PrismError(f"{file}: key '{missing[0]}' is missing; {AGAIN}")
    fps, action_dim, task = data["fps"], data["action_dim"], data["task"]
    if not isinstance(task, str):
        raise PrismError(f"{file}: 'task' must be text, not {task!r}; fix the file")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise PrismError(f"{file}: 'fps' must be a positive number of steps a second, not {fps!r}; fix the file")
    if isinstance(action_dim, bool) or not isinstance(action_dim, int) or action_dim <= 0:
        raise PrismError(f"{file}: 'action_dim' must be a positive integer, not {action_dim!r}; fix the file")
    provenance = data.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise PrismError(f"{file}: 'provenance' must be a JSON object, not {provenance!r}; fix the file")
    ends = checked_ends(data["episode_ends"], f"{file}: 'episode_ends'")
    sensors = _read_sensors(file, data["sensors"])
    checked, absent = data.get("checksums"), data.get("sometimes_absent", [])
    names = [sensor.name for sensor in sensors]
    if checked not in (None, "crc32") or not isinstance(absent, list) or not all(name in names for name in absent):
        raise PrismError(f"{file}: 'checksums' or 'sometimes_absent' is not what prism writes; fix the file")
    if "own_checksum" in data and data["own_checksum"] != _checksum(data):
        raise PrismError(
            f"{file}: does not match its 'own_checksum': damaged, or edited; if you edited it, remove that key"
        )
    action = ActionSpec.from_json(data.get("action", {}), str(file))
    action.check(action_dim, f"{file}: 'action'")
    parts = (task, float(fps), sensors, action_dim, ends, provenance, checked is not None, tuple(absent), action)
    if "videos" not in data:
        return Manifest(*parts)
    from prism.data.formats.film import films_of

    return Manifest(*parts, films_of(file, data["videos"], {sensor.name: sensor for sensor in sensors}))


def _read_sensors(file: Path, data: object) -> tuple[SensorSpec, ...]:
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise PrismError(f"{file}: 'sensors' must be a list of sensor specs; {AGAIN}")
    try:
        sensors = tuple(SensorSpec.from_json(entry) for entry in data)
        check_sensors(sensors)
    except PrismError as error:
        raise PrismError(f"{file}: 'sensors': {error}") from None
    except (TypeError, ValueError) as error:
        raise PrismError(f"{file}: 'sensors': {reason(error)}; {AGAIN}") from None
    return sensors


def check_sensors(sensors: Sequence[SensorSpec]) -> None:
    """At least one sensor, each with a name of its own that can be a file name."""
    if not sensors:
        raise PrismError("a dataset needs at least one sensor")
    names = [sensor.name for sensor in sensors]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
            raise PrismError(f"sensor name {name!r}: use letters, digits, '_', '-' and '.' only")
        if name == ACTIONS or name.endswith((PRESENT, CHECKSUM)):
            raise PrismError(f"sensor name '{name}' is reserved; choose another")
        if names.count(name) > 1:
            raise PrismError(f"two sensors are named '{name}'; rename one")


# ---------------------------------------------------------------------------
# Rows of a .npy file, read by position and checked against checksums.
#
# Not a memory map: its pages count as the process's memory until the system is short of it, and a file that
# shrinks while it is mapped kills the process.
#
# Checksums are CRC-32 over blocks of rows of about 16 kB (a picture is a block of its own), so that any slice can be
# checked without reading much beyond it.

BLOCK_BYTES = 16384
_HEADER = 4096  # bytes that hold any header numpy writes for a plain array


def block_rows(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(row_bytes, 1))


def as_bytes(values: Array) -> memoryview:
    """The array's own memory (it must be contiguous)."""
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


class RowFile:
    """A .npy file of exactly this shape and type. Reading is safe from several threads."""

    def __init__(self, file: Path, shape: tuple[int, ...], dtype: np.dtype[Any], said_by: str) -> None:
        self.file, self.shape, self.dtype = file, shape, dtype
        self._checksums: IntArray | None = None
        try:
            self._descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            raise PrismError(f"{file}: not found, but {said_by} names it; {AGAIN}") from None
        weakref.finalize(self, os.close, self._descriptor)
        with unreadable(f"{file}: truncated or not a .npy file", AGAIN):
            head = io.BytesIO(os.pread(self._descriptor, _HEADER, 0))
            found, fortran, kind = npy_header(head)
        self._offset = head.tell()
        if kind.hasobject:
            raise PrismError(f"{file}: not a .npy file of numbers (it holds pickled objects, never loaded); {AGAIN}")
        if found != shape or kind != dtype or (fortran and len(shape) > 1):
            raise PrismError(f"{file}: holds {kind} {found}, {said_by} says {dtype} {shape}; {AGAIN}")
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._block = block_rows(self._row_bytes)
        size = os.fstat(self._descriptor).st_size
        if size != self._offset + shape[0] * self._row_bytes:
            what = "truncated" if size < self._offset + shape[0] * self._row_bytes else "has bytes behind the array"
            raise PrismError(f"{file}: {what}; {AGAIN}")

    def check_with(self, checksums: Array) -> None:
        """Compare every later read with these checksums, one per block."""
        self._checksums = checksums.astype(np.int64)

    @property
    def blocks(self) -> int:
        return -(-self.shape[0] // self._block)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Rows start..stop, a fresh array."""
        if self._checksums is None or stop <= start:
            return self._fetch(start, stop)
        first = start // self._block * self._block
        last = min(-(-stop // self._block) * self._block, self.shape[0])
        values = self._fetch(first, last)
        content = as_bytes(values)
        step = self._block * self._row_bytes
        for number in range(first // self._block, -(-last // self._block)):
            begin = (number * self._block - first) * self._row_bytes
            if zlib.crc32(content[begin : begin + step]) != self._checksums[number]:
                row = number * self._block
                raise PrismError(f"{self.file}: damaged: rows {row}..{row + self._block} fail their checksum; {AGAIN}")
        return values[start - first : stop - first]

    def _fetch(self, start: int, stop: int) -> Array:
        values = np.empty((stop - start, *self.shape[1:]), self.dtype)
        content = as_bytes(values)
        position, done = self._offset + start * self._row_bytes, 0
        while done < len(content):
            got = os.preadv(self._descriptor, [content[done:]], position + done)
            if got <= 0:
                raise PrismError(f"{self.file}: became shorter while it was read; {AGAIN}")
            done += got
        return values


class Checksums:
    """CRC-32 of the blocks of rows that are written, in order."""

    def __init__(self, row_bytes: int) -> None:
        self._step = block_rows(row_bytes) * row_bytes
        self._done: list[int] = []
        self._running, self._filled = 0, 0

    def add(self, content: memoryview) -> None:
        """Bytes of whole rows."""
        at = 0
        while at < len(content):
            piece = content[at : at + self._step - self._filled]
            self._running = zlib.crc32(piece, self._running)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == self._step:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._running)
        self._running, self._filled = 0, 0

    def result(self) -> Array:
        if self._filled:
            self._close_block()
        return np.array(self._done, np.uint32)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


class StoreSource:
    """A dataset in the project's own format. Opening it checks shapes and sizes, reading checks what is read."""

    def __init__(self, path: Path, fps: float | None = None, entries: Sequence[Entry] = ()) -> None:
        self.path, self.number = path, 0  # what its first episode is called in errors
        if entries:
            raise PrismError(f"{path}: a prism dataset has its sensors already; --map is for other formats")
        while True:  # it may be replaced (--overwrite) while its files are opened one by one
            before = _inode(path)
            try:
                self._open_all(path, fps)
            except (PrismError, OSError):
                if _inode(path) == before:
                    raise
            else:
                if _inode(path) == before:
                    return

    def _open_all(self, path: Path, fps: float | None) -> None:
        manifest = read_manifest(path / MANIFEST)
        if fps is not None and fps != manifest.fps:
            raise PrismError(f"{path}: {MANIFEST} says {manifest.fps:g} steps a second, not {fps:g}; leave --fps out")
        self.task, self.fps, self.action_dim = manifest.task, manifest.fps, manifest.action_dim
        self.sensors, self.provenance, ends = manifest.sensors, manifest.provenance, manifest.episode_ends
        self.action_spec = manifest.action
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        self._checked = manifest.checksums
        self.notes: tuple[str, ...] = () if self._checked else ("recorded without checksums: damage may not be seen",)
        self.read_together = 32 if manifest.videos else 0
        self.filmed = frozenset(manifest.videos)  # cameras that are video
        rows = int(ends[-1])
        self._actions = self._open(ACTIONS, (rows, self.action_dim), np.dtype(np.float32))
        self._present: dict[str, RowFile] = {}
        self._streams: dict[str, RowFile | FilmRows] = {}
        for sensor in self.sensors:
            if (path / f"{sensor.name}{PRESENT}.npy").exists() or sensor.name in manifest.sometimes_absent:
                self._present[sensor.name] = self._open(f"{sensor.name}{PRESENT}", (rows,), np.dtype(np.bool_))
            if sensor.name in manifest.videos:
                self._streams[sensor.name] = self._film(sensor, manifest.videos[sensor.name], rows)
                continue
            self._streams[sensor.name] = self._open(sensor.name, (rows, *sensor.shape), sensor.dtype)
        self.sometimes_absent = frozenset(self._present)

    def __reduce__(self) -> tuple[type[StoreSource], tuple[Path]]:
        return StoreSource, (self.path,)  # a worker process opens the folder again

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> RowFile:
        rows = RowFile(self.path / f"{name}.npy", shape, dtype, MANIFEST)
        if self._checked:
            sums = RowFile(self.path / f"{name}{CHECKSUM}.npy", (rows.blocks,), np.dtype(np.uint32), MANIFEST)
            rows.check_with(sums.read(0, rows.blocks))
        return rows

    def _film(self, sensor: SensorSpec, film: Film, rows: int) -> FilmRows:
        from prism.data.formats.film import FRAMES, FilmRows

        return FilmRows(self.path, sensor, film, self._open(f"{sensor.name}{FRAMES}", (rows,), np.dtype(np.int64)))

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        first, last = int(self._starts[episode]) + start, int(self._starts[episode]) + stop
        wanted = wanted_sensors(self, streams)
        names = [sensor.name for sensor in wanted]
        try:
            actions: FloatArray = self._actions.read(first, last).astype(np.float32, copy=False)
            values = {name: self._streams[name].read(first, last) for name in names}
            masks = {name: self._present[name].read(first, last) for name in names if name in self._present}
        except PrismError as error:
            raise DamagedDataError(f"episode {self.number + episode}: {error.args[0]}", SKIP) from None
        present: dict[str, BoolArray] = {name: mask.astype(np.bool_) for name, mask in masks.items()}
        check_finite(f"{self._actions.file}: episode {self.number + episode}", actions, None, start)
        for name in (sensor.name for sensor in wanted if sensor.kind == "vector"):
            where = f"{self.path / name}.npy: episode {self.number + episode}"
            check_finite(where, values[name], present.get(name), start)
        return Episode(values, actions, present)
