"""What a frozen network sees in every frame, computed once: a training step then reads features and no pictures.

    features/DATASET-CAMERA-HASH/part-00000/   features.npy (rows, views, values) float16, present.npy (rows,)

View 0 is the frame as it is, in the others each frame is moved by a few pixels. The folder is in PRISM_DATA or the
user's cache; its name changes with the dataset's content, the network, the picture's size, crop and shifts, so
features of another crop are never read. Parts are written whole or not at all and checksummed: interrupted, the next
call computes those that are missing, and a damaged one is computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prism.data.episodes import BoolArray, EpisodeSource, IntArray, read_in_parts
from prism.data.locate import data_folder
from prism.data.pictures import content, grouped
from prism.errors import PrismError
from prism.io import files
from prism.io.files import DamagedError
from prism.sensors import SensorSpec

HalfArray = NDArray[np.float16]
_PART_BYTES = 64 * 2**20
_FRAMES = 32  # that the network sees together
_FILES = ("features.npy", "present.npy")


@dataclass(frozen=True)
class Kept:
    """The features of one camera: row r of episode e is row starts[e] + r of the parts, one behind the other."""

    name: str
    views: int
    starts: IntArray  # (E,), -1: not kept
    ends: IntArray  # (P,) of the parts, cumulative
    features: tuple[HalfArray, ...]  # (rows, views, values) each, mapped and not read
    present: BoolArray  # (rows,)
    content: str  # of the frames that they were made of, the same on every machine

    def chosen(self, episodes: IntArray) -> Kept:
        """The features for a source with only these episodes."""
        return replace(self, starts=self.starts[episodes])

    def rows(self, episodes: IntArray, steps: IntArray, views: IntArray) -> tuple[HalfArray, BoolArray]:
        """Episodes (B,), steps (B, To) and views (B,) -> features (B, To, values), presence (B, To)."""
        rows = (self.starts[episodes][:, None] + steps).reshape(-1)
        view = np.repeat(views % self.views, steps.shape[1])
        part = np.searchsorted(self.ends, rows, side="right")
        found = np.empty((len(rows), self.features[0].shape[2]), np.float16)
        for number in np.unique(part).tolist():
            here = part == number
            first = int(self.ends[number]) - len(self.features[number])
            found[here] = self.features[number][rows[here] - first, view[here]]
        return found.reshape(*steps.shape, -1), self.present[rows].reshape(steps.shape)


@dataclass(frozen=True)
class Look:
    """A frozen network as it sees one camera."""

    spec: SensorSpec  # with the shift of the views, in stored pixels
    run: Callable[[Tensor, Tensor | None], Tensor]  # uint8 (N, H, W, 3), shifts (2, N) -> (N, values)
    values: int
    key: dict[str, Any]  # all that its features depend on, beside the frames
    words: str  # "rgb_wrist at 120x160"


def keep_features(
    source: EpisodeSource,
    episodes: Collection[int],
    looks: Sequence[Look],
    views: int,
    most: int,
    say: Callable[[str], None],
    folder: Path | None = None,
) -> dict[str, Kept]:
    """The features of these episodes by camera, computed where they are not there yet.

    Many frames get fewer views: at most `most` pictures are looked at, if that leaves one view of each. `say` is told
    what is about to be computed, how long it takes, how large it is and where. {}: there is no room.
    """
    wanted = np.zeros(len(source.lengths), np.bool_)
    wanted[list(episodes)] = True
    frames = int(source.lengths[wanted].sum()) * len(looks)
    views = max(min(views, most // max(frames, 1)), 1)
    folder = folder or data_folder() / "features"
    plans = [_Plan(source, look, views, folder, wanted) for look in looks]
    todo = sum(plan.missing_rows for plan in plans)
    if todo and not _announced(plans, todo, views, folder, say):
        return {}
    clock, done = _Progress(todo, say), dict[str, Kept]()
    for plan in plans:
        for number in plan.missing:
            plan.compute(number)
            clock.add(plan.rows_of(number))
        done[plan.look.spec.name] = plan.open(say)
    return done


class _Plan:
    """The parts of one camera."""

    def __init__(self, source: EpisodeSource, look: Look, views: int, folder: Path, wanted: BoolArray) -> None:
        self.source, self.look, self.views, self.wanted = source, look, views, wanted
        self.row_bytes = 2 * views * look.values
        self.groups = grouped(source.lengths.tolist(), max(_PART_BYTES // self.row_bytes, 1))
        self.content, path = content(source, [look.spec]), Path(source.path).resolve()
        about = [look.key, self.content, str(path), path.stat().st_mtime_ns, views, look.spec.to_json()]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        self.folder = folder / f"{path.name}-{look.spec.name}-{name}"
        self.used = [number for number, group in enumerate(self.groups) if wanted[group].any()]
        self.missing = [number for number in self.used if not (self.place(number) / files.CHECKSUMS).is_file()]

    @property
    def missing_rows(self) -> int:
        return sum(map(self.rows_of, self.missing))

    def place(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def rows_of(self, number: int) -> int:
        return int(self.source.lengths[self.groups[number]].sum())

    def compute(self, number: int) -> None:
        features = np.empty((self.rows_of(number), self.views, self.look.values), np.float16)
        present, row = np.ones(len(features), np.bool_), 0
        name = self.look.spec.name
        for episode in self.groups[number]:
            shifts = self._shifts(episode)
            for steps, part in read_in_parts(self.source, episode, _FRAMES, [name]):
                pixels, rows = torch.from_numpy(np.ascontiguousarray(part.streams[name])), slice(row, row + part.length)
                for view in range(self.views):
                    shift = shifts[view - 1, :, steps] if view else None
                    features[rows, view] = self.look.run(pixels, shift).half().numpy()
                present[rows] = part.present.get(name, True)
                row += part.length
        features[~present] = 0.0  # the frames there may hold anything
        with files.explain_write_errors(self.folder, "PRISM_DATA names another folder"):
            files.write_folder(self.place(number), {"features.npy": _npy(features), "present.npy": _npy(present)})

    def _shifts(self, episode: int) -> Tensor:
        """(views - 1, 2, T), the same whenever they are drawn."""
        most = self.look.spec.random_shift
        camera = int.from_bytes(hashlib.sha256(self.look.spec.name.encode()).digest()[:4])
        drawn = np.random.default_rng([episode, camera]).integers(
            -most, most + 1, (self.views, 2, int(self.source.lengths[episode]))
        )
        return torch.from_numpy(drawn[1:])

    def open(self, say: Callable[[str], None]) -> Kept:
        features, present, rows = list[HalfArray](), list[BoolArray](), list[int]()
        starts: IntArray = np.full(len(self.source.lengths), -1, np.int64)
        for number in self.used:
            own = self._open_part(number, say)
            first = sum(rows)
            for episode in self.groups[number]:
                starts[episode] = first
                first += int(self.source.lengths[episode])
            features.append(own[0])
            present.append(own[1])
            rows.append(self.rows_of(number))
        ends = np.cumsum(rows, dtype=np.int64)
        name = self.look.spec.name
        return Kept(name, self.views, starts, ends, tuple(features), np.concatenate(present), self.content)

    def _open_part(self, number: int, say: Callable[[str], None]) -> tuple[HalfArray, BoolArray]:
        place = self.place(number)
        try:
            sums = files.read_sums(place)
            for file in _FILES:
                files.read_verified(place, file, sums)
        except DamagedError as error:
            say(f"kept features are damaged and computed again: {error}")
            self.compute(number)
        features = np.load(place / "features.npy", mmap_mode="r", allow_pickle=False)
        present = np.load(place / "present.npy", allow_pickle=False)
        if features.shape != (self.rows_of(number), self.views, self.look.values) or features.dtype != np.float16:
            raise PrismError(f"{place}: holds {features.dtype} {features.shape}; remove the folder")
        return features, present


def _announced(plans: Sequence[_Plan], todo: int, views: int, folder: Path, say: Callable[[str], None]) -> bool:
    """Say what comes; False: there is no room."""
    needed = sum(plan.row_bytes * plan.missing_rows for plan in plans)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise PrismError(f"{folder}: cannot be made ({error.strerror}); set PRISM_DATA to another folder") from None
    if free < 1.1 * needed + 10**8:
        say(f"no room for {needed / 1e6:.0f} MB of features in {folder}: every step computes its own, slowly")
        return False
    each = views * sum(_seconds(plan) * plan.missing_rows for plan in plans) / todo
    cameras = ", ".join(plan.look.words for plan in plans if plan.missing)
    say(
        f"features of {todo} frames ({cameras}), {views} view{'s' * (views > 1)} of each, are computed once: "
        f"{1000 * each:.0f} s per thousand frames, about {todo * each:.0f} s; {needed / 1e6:.0f} MB in {folder}"
    )
    return True


def _seconds(plan: _Plan) -> float:
    """Seconds that the network needs for a picture, measured on a few."""
    if not plan.missing:
        return 0.0
    spec = plan.look.spec
    episode = plan.groups[plan.missing[0]][0]
    stop = min(8, int(plan.source.lengths[episode]))
    began = time.perf_counter()
    frames = plan.source.read(episode, 0, stop, [spec.name]).streams[spec.name]
    reading = time.perf_counter() - began
    pixels = torch.from_numpy(np.ascontiguousarray(frames))
    plan.look.run(pixels, None)
    began = time.perf_counter()
    plan.look.run(pixels, None)
    return (reading / plan.views + time.perf_counter() - began) / stop


class _Progress:
    def __init__(self, rows: int, say: Callable[[str], None]) -> None:
        self.rows, self.say, self.done, self.said = rows, say, 0, 0
        self.began = time.perf_counter()

    def add(self, rows: int) -> None:
        self.done += rows
        if self.done == self.rows or 4 * (self.done - self.said) >= self.rows:
            self.said, spent = self.done, time.perf_counter() - self.began
            self.say(f"features: {self.done} of {self.rows} frames, {spent:.0f} s")


def _npy(values: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
