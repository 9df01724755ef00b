"""LeRobot datasets, versions 2.0, 2.1 and 3.0: parquet rows and video frames, read as they are.

Sensors are the features that begin with `observation`, under the last part of their name, and `task` where there
is more than one instruction. Parquet pages are checked against their checksums where the writer made some (ours
does); video has none, so damage that still decodes cannot be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, BoolArray
from prism.data.formats.extras import need
from prism.data.formats.lerobot_meta import AGAIN, INFO, Feature, read_json, read_meta
from prism.data.formats.lerobot_rows import Rows
from prism.data.formats.lerobot_video import VideoFrames
from prism.data.formats.mapping import Column, Entry
from prism.data.formats.table import Raw, TableSource, make_table
from prism.errors import PrismError, reason
from prism.sensors import ActionSpec, SensorSpec

TASK = "task"
PRESENT = "present."  # a feature of this beginning says at which steps the feature named behind it was there
SPECS = "meta/prism.json"  # prism's own description of the sensors, where prism wrote the dataset
_INDEX = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_TEXT_BYTES = 64


def is_lerobot(path: Path) -> bool:
    return (path / INFO).is_file()


class LeRobotSource(TableSource):
    """Opening it reads `meta`; rows and frames are read when asked for."""

    def __init__(self, path: Path, fps: float | None = None, entries: Sequence[Entry] = ()) -> None:
        self.path = path
        self._arguments = (path, fps, tuple(entries))
        need("pyarrow", "data", f"{path}: parquet")
        self._meta = read_meta(path)
        self.fps, self.lengths = self._meta.fps, self._meta.lengths
        if fps is not None and fps != self.fps:
            raise PrismError(f"{path}: {INFO} says {self.fps:g} steps a second, not {fps:g}; leave --fps out")
        self.version = self._meta.stated
        notes: list[str] = []
        self._masks = {
            feature.key.removeprefix(PRESENT): feature.key
            for feature in self._meta.features.values()
            if feature.key.startswith(PRESENT) and feature.dtype == "bool"
        }
        stored, action = _stored_specs(path)
        columns = self._columns(notes, stored)
        if stored and not entries:
            entries = [Entry((key,), spec.name, spec.kind) for key, spec in stored.items()]
            notes.append(f"the sensors are as {SPECS} says")
        table = make_table(path, columns, "action", entries, self.fps, notes)
        by_name = {spec.name: spec for spec in stored.values()} if stored and not self._arguments[2] else {}
        self._use(
            dataclasses.replace(table, streams=tuple(_restored(s, by_name) for s in table.streams)), self._meta.robot
        )
        if action.quaternions and not self._arguments[2]:
            action.check(self.action_dim, str(path / SPECS))
            self.action_spec = dataclasses.replace(self.action_spec, quaternions=action.quaternions)
        self.notes = tuple(notes)
        tasks = set(self._meta.tasks.values())
        self.task = tasks.pop() if len(tasks) == 1 else ""
        self.sometimes_absent = frozenset(
            s.spec.name for s in self.table.streams for c in s.columns if c.key in (*self._masks, TASK)
        )
        self._videos = VideoFrames()
        self._rows = Rows(self._meta)

    def __reduce__(self) -> tuple[type[LeRobotSource], tuple[Any, ...]]:
        return LeRobotSource, self._arguments

    def _columns(self, notes: list[str], stored: Mapping[str, SensorSpec]) -> list[Column]:
        columns = []
        for feature in self._meta.features.values():
            key = feature.key
            if key in _INDEX or key in self._masks.values():
                continue
            skip = "" if key == "action" or key.startswith("observation") else "it is no observation"
            if feature.is_depth:
                skip = "depth packed into a video is not read"
            name = key.removeprefix("observation.").removeprefix("images.")
            if feature.dtype == "string":
                notes.append(f"'{key}' is left out: text of its own kind; the instruction is 'task'")
                continue
            dtype = np.dtype(np.uint8) if feature.dtype in ("image", "video") else _number(feature, self.path)
            shape = feature.shape
            rate = stored[key].sample_rate if key in stored else 0
            columns.append(Column(key, shape, dtype, name=name, skip=skip, sample_rate=rate, names=feature.names))
        if self._meta.tasks:
            longest = max(len(text.encode()) for text in self._meta.tasks.values())
            one = len(set(self._meta.tasks.values())) == 1
            skip = "every step has the same instruction" if one else ""
            size = max(_TEXT_BYTES, -(-longest // 16) * 16)
            if TASK in stored and stored[TASK].shape[0] >= longest:
                size = stored[TASK].shape[0]
            columns.append(Column(TASK, (size,), np.dtype(np.str_), skip=skip))
        return columns

    def _raw(
        self, episode: int, start: int, stop: int, columns: Mapping[str, Column]
    ) -> tuple[Raw, dict[str, BoolArray]]:
        where = self._where(episode)
        self._rows.check(episode, start, stop)
        raw: Raw = {}
        absent: dict[str, BoolArray] = {}
        for key, column in columns.items():
            if key == TASK:
                raw[key] = self._text(episode, start, stop)
            elif self._meta.features[key].dtype == "video":
                place = self._meta.videos[key]
                file, begin = place.files[place.file[episode]], float(place.begin[episode])
                at = f"{where}, '{key}'"
                raw[key] = self._videos.read(file, begin, start, stop - start, self.fps, column.shape, at)
            else:
                raw[key] = self._rows.read(episode, key, start, stop)
            if key in self._masks:
                here = self._rows.read(episode, self._masks[key], start, stop)
                absent[key] = ~here.reshape(-1).astype(np.bool_)
        if TASK in raw:  # prism writes an empty instruction where there was none
            nothing = np.array([not text for text in raw[TASK]], np.bool_)
            if nothing.any():
                absent[TASK] = nothing
        return raw, absent

    def _text(self, episode: int, start: int, stop: int) -> Array:
        indices = self._rows.read(episode, "task_index", start, stop).reshape(-1).tolist()
        if unknown := [index for index in indices if index not in self._meta.tasks]:
            raise PrismError(f"{self._where(episode)}: 'task_index' {unknown[0]} is not in meta/tasks; {AGAIN}")
        return np.array([self._meta.tasks[index] for index in indices], dtype=object)


def _number(feature: Feature, path: Path) -> np.dtype[Any]:
    try:
        dtype = np.dtype(feature.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise PrismError(
            f"{path / INFO}: feature '{feature.key}' has dtype '{feature.dtype}', which prism does not read"
        )
    return dtype


def _stored_specs(path: Path) -> tuple[dict[str, SensorSpec], ActionSpec]:
    file = path / SPECS
    if not file.is_file():
        return {}, ActionSpec()
    try:
        content = read_json(file)
        sensors = {str(key): SensorSpec.from_json(spec) for key, spec in content["sensors"].items()}
        return sensors, ActionSpec.from_json(content.get("action", {}), str(file))
    except PrismError as error:
        raise PrismError(str(error) if str(file) in str(error) else f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PrismError(f"{file}: 'sensors' is not what prism writes ({reason(error)}); remove the file") from None


def _restored(stream: Any, specs: Mapping[str, SensorSpec]) -> Any:
    """The stream with the spec it was recorded with: preprocessing included."""
    spec = specs.get(stream.spec.name)
    if spec is None or (spec.kind, spec.shape) != (stream.spec.kind, stream.spec.shape):
        return stream
    return dataclasses.replace(stream, spec=spec)
