"""A recording of a robot: a folder of datasets of one episode each, so that what is finished survives anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prism.data.episodes import Episode, IntArray, Names, check_slice
from prism.data.formats.store import MANIFEST, StoreSource, is_store, read_manifest
from prism.data.formats.table import Entry
from prism.errors import PrismError

EPISODE = r"^episode-(\d{6,})$"
COMMANDS = "commands.npz"  # beside an episode, where there is more to say of it (robots/recording.py)
_KEPT_OPEN = 32  # episodes: each needs a file a stream


def is_recording(path: Path) -> bool:
    return path.is_dir() and any(_episode_folders(path))


def _episode_folders(path: Path) -> list[Path]:
    return sorted(child for child in path.glob("episode-*") if re.match(EPISODE, child.name) and is_store(child))


class RecordingSource:
    """A folder of datasets of one episode each, as `prism record` and `prism run` write them (robots/recording.py)."""

    def __init__(self, path: Path, fps: float | None = None, entries: Sequence[Entry] = ()) -> None:
        self.path = path
        self._folders = _episode_folders(path)
        manifests = [read_manifest(folder / MANIFEST) for folder in self._folders]
        if not manifests:
            raise PrismError(f"{path}: holds no episode; a recording has folders episode-000000, ...")
        first = manifests[0]
        if entries or (fps is not None and fps != first.fps):
            raise PrismError(f"{path}: a recording knows its sensors and its rate; leave --map and --fps out")
        self.task, self.fps, self.action_dim = first.task, first.fps, first.action_dim
        self.sensors, self.action_spec = first.sensors, first.action
        same = (first.sensors, first.fps, first.action_dim, first.action)
        for folder, other in zip(self._folders, manifests, strict=True):
            if (other.sensors, other.fps, other.action_dim, other.action) != same:
                raise PrismError(f"{folder}: has other sensors, actions or another rate than the first; move it away")
            if len(other.episode_ends) != 1:
                raise PrismError(f"{folder}: holds {len(other.episode_ends)} episodes, not one; move it away")
        self.lengths: IntArray = np.array([manifest.episode_ends[0] for manifest in manifests], np.int64)
        self.provenances = tuple(manifest.provenance for manifest in manifests)
        self.sometimes_absent = frozenset(name for manifest in manifests for name in manifest.sometimes_absent)
        filmed = dict.fromkeys(name for manifest in manifests for name in manifest.videos)
        self.notes: tuple[str, ...] = tuple(
            f"'{name}' is kept as h264 video: nearly the same pixels" for name in filmed
        )
        self.read_together = 32 if filmed else 0
        self.filmed = frozenset(filmed)
        self._opened: dict[int, StoreSource] = {}

    def folder(self, episode: int) -> Path:
        return self._folders[episode]

    def __reduce__(self) -> tuple[type[RecordingSource], tuple[Path]]:
        return RecordingSource, (self.path,)

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        if episode not in self._opened:
            if len(self._opened) >= _KEPT_OPEN:
                self._opened.pop(next(iter(self._opened)))
            self._opened[episode] = StoreSource(self._folders[episode])
            self._opened[episode].number = episode
        part = self._opened[episode].read(0, start, stop, streams)
        masks = {name: part.present.get(name, np.ones(part.length, np.bool_)) for name in part.streams}
        return Episode(part.streams, part.actions, {n: mask for n, mask in masks.items() if n in self.sometimes_absent})
