"""ALOHA's HDF5, an episode a file: episode_0.hdf5 holds `action`, `observations/{qpos, qvel, effort}` and
`observations/images/<camera>`, as pixels or as padded JPEGs (attribute `compress`).

A folder of such files is a dataset, and so is one of them. Its rate is not stored: ALOHA records 50 steps a second.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array
from prism.data.formats.hdf5_probe import check_deflated, probe, strange
from prism.data.formats.recent import Recent
from prism.data.formats.table import AGAIN, Absent, Column, Columns, Entry, Raw, TableSource, make_table
from prism.errors import PrismError, need, unreadable

DEFAULT_FPS = 50.0
_NAME = re.compile(r"episode_(\d{1,9})\.(hdf5|h5)")
_OPEN = 8  # files held open
_VECTORS, _IMAGES = "observations", "observations/images"


def _files(path: Path) -> list[Path]:
    """Episodes in the order of their numbers."""
    found = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    numbered = {int(match[1]): file for file in found if (match := _NAME.fullmatch(file.name))}
    return [numbered[number] for number in sorted(numbered)]


def is_aloha(path: Path) -> bool:
    return bool(_files(path))


class AlohaSource(TableSource):
    """Opening it looks at the shapes of every episode; rows and pictures are read when asked for."""

    def __init__(
        self, path: Path, fps: float | None = None, entries: Sequence[Entry] = (), trusted: bool = False
    ) -> None:
        self.path = path
        self._arguments = (path, fps, tuple(entries), True)  # a worker process need not look again
        self._h5py = need("h5py", "data", f"{path}: HDF5")
        self._lock = threading.Lock()
        self._files = _files(path)
        self._opened: Recent[Path, Any] = Recent(_OPEN, drop=lambda file: file.close())
        self._sound: set[tuple[Path, str]] = set()  # which were looked at by check_deflated
        self._pictures: set[str] = set()  # keys of compressed cameras
        self.fps = DEFAULT_FPS if fps is None else float(fps)
        assumed = f"the files do not say their rate: {DEFAULT_FPS:g} steps a second are assumed"
        notes = [assumed] if fps is None else []
        columns: dict[str, Column] = {}
        lengths = []
        for number, file in enumerate(self._files):
            if not trusted and (problem := probe(file)):
                raise PrismError(f"{file}: damaged: {problem}; {AGAIN}")
            with unreadable(f"{file}: truncated or not an HDF5 file", AGAIN):
                opened = self._file(file)
                if not trusted and (problem := strange(opened)):
                    raise PrismError(f"{file}: {problem}; write everything into one file, in smaller chunks")
            with unreadable(f"{file}: not readable as ALOHA's layout", AGAIN):
                found, length = self._survey(file, opened)
            columns = columns or found
            if odd := sorted(key for key in columns.keys() | found.keys() if columns.get(key) != found.get(key)):
                first = self._files[0].name
                raise PrismError(f"{file}: episode {number} and {first} differ in '{odd[0]}'; move one of them away")
            lengths.append(length)
        self.lengths = np.array(lengths, np.int64)
        if self._pictures:
            notes.append(
                "pictures are read with JPEG's colours; some recorders swap red and blue (inspect --page FILE shows it)"
            )
        self._use(make_table(path, list(columns.values()), "action", entries, self.fps, notes))
        self.notes = tuple(notes)

    def files(self, episode: int, streams: Collection[str]) -> list[Path]:
        return [self._files[episode]]

    def _file(self, file: Path) -> Any:
        if (found := self._opened.get(file)) is None:
            found = self._opened.keep(file, self._h5py.File(file, "r"))
        return found

    def _survey(self, file: Path, opened: Any) -> tuple[dict[str, Column], int]:
        """The columns of an episode, by its arrays, and its length."""
        found: dict[str, Any] = {"action": opened.get("action")}
        for place in (_VECTORS, _IMAGES):
            group = opened.get(place)
            names = group if isinstance(group, self._h5py.Group) else ()
            found |= {f"{place}/{name}": group[name] for name in names if f"{place}/{name}" != _IMAGES}
        for key, data in found.items():
            if not isinstance(data, self._h5py.Dataset) or len(data.shape) < 2:
                raise PrismError(f"{file}: '{key}' is missing or no array of steps; {AGAIN}")
        length = int(found["action"].shape[0])
        columns = {}
        for key, data in found.items():
            if int(data.shape[0]) != length or length == 0:
                raise PrismError(f"{file}: '{key}' has {data.shape[0]} steps, the actions have {length}; {AGAIN}")
            shape = tuple(map(int, data.shape[1:]))
            if key.startswith(f"{_IMAGES}/") and len(shape) == 1 and data.dtype == np.uint8:
                self._pictures.add(key)
                shape = _decoded(data[0]).shape
            columns[key] = Column(key, shape, np.dtype(data.dtype), name=key.rpartition("/")[2])
        return columns, length

    def _where(self, episode: int) -> str:
        return f"{self._files[episode]}: episode {episode}"

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        return {key: self._rows(episode, key, start, stop) for key in columns}, {}

    def _rows(self, episode: int, key: str, start: int, stop: int) -> Array:
        file = self._files[episode]
        with unreadable(f"{self._where(episode)}, '{key}': cannot be read", AGAIN):
            with self._lock:
                data = self._file(file)[key]
                if (file, key) not in self._sound:
                    check_deflated(data)
                    self._sound.add((file, key))
                values: Array = data[start:stop]
            return np.stack([_decoded(row) for row in values]) if key in self._pictures else values


def _decoded(row: Array) -> Array:
    """(H, W, 3) RGB of a padded JPEG, as the JPEG says."""
    from PIL import Image

    with Image.open(io.BytesIO(row.tobytes()), formats=("JPEG", "PNG")) as image:
        if image.width * image.height > 1 << 26:
            raise ValueError(f"an image of {image.width} x {image.height}")
        return np.asarray(image.convert("RGB"))
