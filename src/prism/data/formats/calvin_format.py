"""CALVIN: one .npz a time step, `ep_start_end_ids.npy` (inclusive pairs), language annotations.

Sensors are the keys of a frame, plus `text` where the frames have an instruction: it is absent elsewhere. The
actions are `rel_actions` (--map actions=action for the absolute ones). Every array has the CRC-32 of its zip.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from prism_client import ActionKind

from prism.data.episodes import Array, BoolArray, IntArray
from prism.data.formats.npz import npy_header, npz_member, parse_npy
from prism.data.formats.plain_pickle import entry, items, read_plain
from prism.data.formats.table import AGAIN, Absent, Column, Columns, Entry, Raw, TableSource, make_table
from prism.errors import PrismError, reason, unreadable

# ---------------------------------------------------------------------------
# CALVIN's language annotations: a pickle, of which only plain values are read (plain_pickle.py).

_MAX_FILE = 1 << 28
_MAX_ANNOTATIONS = 10**6
_MAX_TEXT = 4096  # characters of one instruction


@dataclass(frozen=True)
class Annotation:
    """One instruction and the frames that it describes, both ends included."""

    text: str
    first: int
    last: int


def read_annotations(file: Path) -> tuple[Annotation, ...]:
    """`language.ann` and `info.indx` of an auto_lang_ann.npy."""
    with unreadable(f"{file}: not CALVIN's language annotations", "remove it to read the dataset without them"):
        if file.stat().st_size > _MAX_FILE:
            raise ValueError(f"it is larger than {_MAX_FILE / 1e6:.0f} MB")
        content = io.BytesIO(file.read_bytes())
        shape, _, dtype = npy_header(content)
        if shape != () or not dtype.hasobject:
            raise ValueError(f"it holds {dtype} {shape}, not one object")
        top = read_plain(content)
        texts = items(entry(entry(top, "language"), "ann"), _MAX_ANNOTATIONS)
        spans = items(entry(entry(top, "info"), "indx"), _MAX_ANNOTATIONS)
        if len(texts) != len(spans):
            raise ValueError(f"{len(texts)} instructions for {len(spans)} spans of frames")
        return tuple(_annotation(text, span) for text, span in zip(texts, spans, strict=True))


def _annotation(text: object, span: object) -> Annotation:
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ValueError("an instruction of 'language.ann' is not text of a sensible length")
    ends = items(span, 2)
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ValueError("an entry of 'info.indx' is not a pair of frame numbers")
    first, last = ends
    if not 0 <= first <= last:
        raise ValueError(f"'info.indx' has frames {first}..{last}")
    return Annotation(text, first, last)


DEFAULT_FPS = 30.0
IDS = "ep_start_end_ids.npy"
ANNOTATIONS = "lang_annotations/auto_lang_ann.npy"
TEXT = "text"
_TEXT_BYTES = 64  # at least; CALVIN's longest instruction has about 60
_FRAME = re.compile(r"episode_(\d{1,12})\.npz")


def is_calvin(path: Path) -> bool:
    return (path / IDS).is_file() or (path / "training" / IDS).is_file()


class CalvinSource(TableSource):
    """A split of CALVIN. Opening it lists the folder and reads one frame; reading opens the frames asked for."""

    def __init__(self, path: Path, fps: float | None = None, entries: Sequence[Entry] = ()) -> None:
        self._arguments = (path, fps, tuple(entries))
        notes: list[str] = []
        if not (path / IDS).is_file():
            path = path / "training"
            notes.append(f"the split {path} is read; give .../validation for the other")
        self.path, self.fps = path, float(fps or DEFAULT_FPS)
        if fps is None:
            notes.append(f"the format stores no rate: {DEFAULT_FPS:g} steps a second, as recorded, are assumed")
        ids = _read_ids(path / IDS)
        self._first: IntArray = ids[:, 0]
        self.lengths: IntArray = ids[:, 1] - ids[:, 0] + 1
        self._digits = _check_frames(path, ids)
        self._spans, self._last_of, self._texts = self._annotations(notes)
        columns = self._survey()
        self._use(make_table(path, columns, "rel_actions", entries, self.fps, notes))
        kinds = {"rel_actions": ActionKind.DELTA, "actions": ActionKind.ABSOLUTE}  # of the hand's pose, by the dataset
        self.action_spec = replace(self.action_spec, kind=kinds.get("+".join(c.key for c in self.table.action.columns)))
        self.notes = tuple(notes)
        self.sometimes_absent = frozenset(s.spec.name for s in self.table.streams if s.columns[0].key == TEXT)

    def _annotations(self, notes: list[str]) -> tuple[IntArray, IntArray, tuple[str, ...]]:
        """Sorted first frames of the spans, their last frames, their instructions."""
        if not (self.path / ANNOTATIONS).is_file():
            return np.empty(0, np.int64), np.empty(0, np.int64), ()
        found: list[Annotation] = sorted(read_annotations(self.path / ANNOTATIONS), key=lambda a: (a.first, a.last))
        notes.append(f"{len(found)} language annotations; where spans overlap, the one that began last counts")
        first = np.array([a.first for a in found], np.int64)
        return first, np.array([a.last for a in found], np.int64), tuple(a.text for a in found)

    def _survey(self) -> list[Column]:
        file = self._file(int(self._first[0]))
        with unreadable(f"{file}: episode 0, step 0 is not readable", AGAIN), zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            arrays = {name: npz_member(archive, name) for name in names}
        skip = {"scene_obs": "the simulator's own state, which no robot has", "actions": "rel_actions is learned"}
        if "rel_actions" not in arrays:
            skip.pop("actions")
        columns = [Column(k, tuple(v.shape), v.dtype, skip=skip.get(k, "")) for k, v in arrays.items()]
        if self._texts:
            longest = max(len(text.encode()) for text in self._texts)
            size = max(_TEXT_BYTES, -(-longest // 16) * 16)
            columns.append(Column(TEXT, (size,), np.dtype(np.str_)))
        return columns

    def _file(self, frame: int) -> Path:
        return self.path / f"episode_{frame:0{self._digits}d}.npz"

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        first = int(self._first[episode])
        keys = [key for key, column in columns.items() if not column.is_text]
        raw: Raw = {key: np.empty((stop - start, *columns[key].shape), columns[key].dtype) for key in keys}
        for step in range(start, stop):
            self._read_frame(episode, step, first + step, raw, step - start, columns)
        absent: dict[str, BoolArray] = {}
        if TEXT in columns:
            raw[TEXT], absent[TEXT] = self._text(first + start, first + stop)
        return raw, absent

    def _read_frame(
        self, episode: int, step: int, frame: int, into: Raw, row: int, columns: Mapping[str, Column]
    ) -> None:
        file, key = self._file(frame), ""
        try:
            with zipfile.ZipFile(file) as archive:
                for key, values in into.items():
                    array = npz_member(archive, key)
                    if array.shape != columns[key].shape or array.dtype != columns[key].dtype:
                        raise ValueError(f"is {array.dtype} {array.shape}, in the first frame {columns[key]}")
                    values[row] = array
        except FileNotFoundError:
            raise PrismError(f"{file}: not found: episode {episode} lacks its step {step}; {AGAIN}") from None
        except Exception as error:  # zipfile, zlib and numpy raise many kinds
            problem = "is missing" if isinstance(error, KeyError) else reason(error)
            raise PrismError(f"{file}: episode {episode}, step {step}, '{key}': {problem}; {AGAIN}") from None

    def _text(self, start: int, stop: int) -> tuple[Array, BoolArray]:
        frames = np.arange(start, stop)
        which = np.searchsorted(self._spans, frames, side="right") - 1
        reach = np.maximum.accumulate(self._last_of)
        while True:  # spans may nest: walk back from the one that began last to one that still lasts, if there is any
            over = (which >= 0) & (self._last_of[which] < frames)
            if not over.any():
                break
            which[over] = np.where(reach[which[over]] < frames[over], -1, which[over] - 1)
        texts = np.array([self._texts[i] if i >= 0 else "" for i in which.tolist()], dtype=object)
        absent: BoolArray = which < 0
        return texts, absent


def _read_ids(file: Path) -> IntArray:
    with unreadable(f"{file}: not readable", AGAIN):
        ids = parse_npy(file.read_bytes())
    if ids.ndim != 2 or ids.shape[1] != 2 or not len(ids) or ids.dtype.kind not in "iu":
        raise PrismError(f"{file}: is {ids.dtype} {ids.shape}, needs integers (episodes, 2); {AGAIN}")
    pairs: IntArray = ids.astype(np.int64)
    bad = (pairs[:, 0] < 0) | (pairs[:, 1] < pairs[:, 0]) | (pairs[:, 1] >= 10**12)
    if bad.any():
        episode = int(np.argmax(bad))
        raise PrismError(f"{file}: episode {episode} has frames {pairs[episode].tolist()}, first after last; {AGAIN}")
    return pairs


def _check_frames(path: Path, ids: IntArray) -> int:
    """Every frame of every episode is there; the number of digits in their names."""
    digits = 0
    numbers = []
    with os.scandir(path) as entries:
        for entry in entries:
            if match := _FRAME.fullmatch(entry.name):
                digits = digits or len(match[1])
                numbers.append(int(match[1]))
    frames = np.unique(np.array(numbers, np.int64))
    for episode, (first, last) in enumerate(ids.tolist()):
        low, high = np.searchsorted(frames, [first, last + 1]).tolist()
        if high - low != last - first + 1:
            have = frames[low:high]
            gaps = np.flatnonzero(have != first + np.arange(len(have)))
            gap = first + (int(gaps[0]) if len(gaps) else len(have))
            name = f"episode_{gap:0{digits or 7}d}.npz"
            raise PrismError(f"{path / name}: not found: episode {episode} lacks its step {gap - first}; {AGAIN}")
    return digits
