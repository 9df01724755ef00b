"""LeRobot datasets, versions 2.0, 2.1 and 3.0: parquet rows and video frames, read as they are.

Sensors are the features that begin with `observation`, under the last part of their name, and `task` where there
is more than one instruction. Parquet pages are checked against their checksums where the writer made some (ours
does); video has none, so damage that still decodes cannot be seen.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, BoolArray, IntArray
from prism.data.formats.lerobot_files import INFO, Feature, Meta, Place, Rows
from prism.data.formats.table import (
    ACTION,
    AGAIN,
    Absent,
    Column,
    Columns,
    Entry,
    Raw,
    TableSource,
    is_outcome,
    make_table,
)
from prism.data.formats.video import VideoFrames
from prism.errors import PrismError, need, reason, unreadable
from prism.io.files import JSON_BYTES
from prism.sensors import ActionSpec, SensorSpec

# ---------------------------------------------------------------------------
# LeRobot's `meta` folder, versions 2.0, 2.1 and 3.0: what there is, and in which file each episode is.

_MAX_LINES = 1 << 26  # bytes of a list of episodes: a hundred thousand have 20 million
_MAX_ROWS = 1 << 20  # of a list of episodes or of tasks
_PATHS = {
    2: (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    3: (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}


def read_meta(root: Path) -> Meta:
    info = read_json(root / INFO)
    file = root / INFO
    version = _version(info.get("codebase_version"), file)
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise PrismError(f"{file}: 'fps' must be a positive number, not {fps!r}; {AGAIN}")
    features = _features(info.get("features"), file)
    cameras = [f.key for f in features.values() if f.dtype == "video"]
    templates = tuple(info.get(key) or _PATHS[version][i] for i, key in enumerate(("data_path", "video_path")))
    if not (root / "videos").exists() and (root / "video").is_dir():
        templates = (templates[0], re.sub(r"^videos/", "video/", str(templates[1])))
    chunk = info.get("chunks_size", 1000)
    if not isinstance(chunk, int) or chunk <= 0:
        raise PrismError(f"{file}: 'chunks_size' must be a positive integer, not {chunk!r}; {AGAIN}")
    read = _episodes_v3 if version == 3 else _episodes_v2
    lengths, data, videos = read(root, templates, cameras, chunk)
    total = info.get("total_episodes")
    if isinstance(total, int) and total != len(lengths):
        raise PrismError(f"{file}: 'total_episodes' is {total}, the list of episodes has {len(lengths)}; {AGAIN}")
    robot = info["robot_type"] if isinstance(info.get("robot_type"), str) else ""
    stated = f"v{str(info['codebase_version']).removeprefix('v')}"
    return Meta(version, stated, float(fps), features, lengths, data, videos, _tasks(root, version), robot)


def read_json(file: Path) -> dict[str, Any]:
    with unreadable(f"{file}: not readable as JSON", AGAIN):
        data = json.loads(_content(file, JSON_BYTES))
    if not isinstance(data, dict):
        raise PrismError(f"{file}: holds a {type(data).__name__}, not a JSON object; {AGAIN}")
    return data


def _content(file: Path, most: int) -> str:
    _check_size(file, most)
    with unreadable(f"{file}: not readable", AGAIN):
        return file.read_text(encoding="utf-8")


def _check_size(file: Path, most: int) -> None:
    if not file.is_file():
        raise PrismError(f"{file}: not found; {AGAIN}")
    if file.stat().st_size > most:
        raise PrismError(f"{file}: is larger than {most / 1e6:.0f} MB, too large for this kind of file; {AGAIN}")


def _version(stated: object, file: Path) -> int:
    match = re.fullmatch(r"v?(\d)\.(\d)", str(stated))
    if not match or (match[1], match[2]) not in (("2", "0"), ("2", "1"), ("3", "0")):
        raise PrismError(f"{file}: 'codebase_version' is {stated!r:.20}; prism reads v2.0, v2.1 and v3.0")
    return int(match[1])


def _features(stated: object, file: Path) -> dict[str, Feature]:
    if not isinstance(stated, dict) or not stated:
        raise PrismError(f"{file}: 'features' is missing or empty; {AGAIN}")
    features = {}
    for key, entry in stated.items():
        shape: Any = entry.get("shape") if isinstance(entry, dict) else None
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 20 for n in shape)
        if not sizes or not isinstance(dtype, str):
            raise PrismError(f"{file}: feature '{key}' needs a 'dtype' and a 'shape' of integers; {AGAIN}")
        dims: tuple[int, ...] = tuple(shape)
        if dtype in ("image", "video"):
            names = entry.get("names")
            first = names[0] if isinstance(names, list) and len(names) == 3 else ""
            unnamed = not first and len(dims) == 3 and dims[0] in (1, 3) and dims[2] != 3
            if first in ("channels", "channel") or unnamed:
                dims = (*dims[1:], dims[0])
        info = entry.get("info") or entry.get("video_info") or {}
        depth = isinstance(info, dict) and bool(info.get("video.is_depth_map") or info.get("is_depth_map"))
        features[str(key)] = Feature(str(key), dtype, dims, depth, _dimension_names(entry.get("names"), dims))
    return features


def _dimension_names(stated: object, shape: tuple[int, ...]) -> tuple[str, ...]:
    """A list of names, or {"motors": a list}; nothing else is names."""
    if isinstance(stated, dict) and len(stated) == 1:
        stated = next(iter(stated.values()))
    if len(shape) != 1 or not isinstance(stated, list) or len(stated) != shape[0]:
        return ()
    return tuple(map(str, stated))


def expand(root: Path, template: str, values: Mapping[str, int | str], what: str) -> Path:
    """A path template of info.json with its {fields} filled in; it must stay inside the dataset."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise PrismError(f"{root / INFO}: '{what}' has the field '{match[0]}', known are {', '.join(values)}")
        value = values[match[1]]
        return f"{value:0{int(match[2] or 0)}d}" if isinstance(value, int) else value

    path = re.sub(r"\{(\w+)(?::0?(\d)d)?\}", fill, template)
    parts = Path(path).parts
    if Path(path).is_absolute() or ".." in parts or "{" in path:
        raise PrismError(
            f"{root / INFO}: '{what}' is '{template:.80}', which is not a path inside the dataset; {AGAIN}"
        )
    return root / path


def _episodes_v2(
    root: Path, templates: Sequence[str], cameras: Sequence[str], chunk: int
) -> tuple[IntArray, Place, dict[str, Place]]:
    file = root / "meta/episodes.jsonl"
    lengths = []
    for number, entry in enumerate(_json_lines(file)):
        length, index = entry.get("length"), entry.get("episode_index")
        if index != number or type(length) is not int or not 0 < length < 1 << 31:
            raise PrismError(f"{file}: line {number + 1} must be episode {number} with a positive 'length'; {AGAIN}")
        lengths.append(length)
    if not lengths:
        raise PrismError(f"{file}: lists no episode; {AGAIN}")
    count = len(lengths)

    def place(template: str, what: str, **more: str) -> Place:
        values: list[dict[str, int | str]] = [
            {"episode_chunk": e // chunk, "chunk_index": e // chunk, "episode_index": e, **more} for e in range(count)
        ]
        files = tuple(expand(root, template, value, what) for value in values)
        return Place(files, np.arange(count), np.zeros(count))

    videos = {key: place(templates[1], "video_path", video_key=key) for key in cameras}
    return np.array(lengths, np.int64), place(templates[0], "data_path"), videos


def _episodes_v3(
    root: Path, templates: Sequence[str], cameras: Sequence[str], chunk: int
) -> tuple[IntArray, Place, dict[str, Place]]:
    folder = root / "meta/episodes"
    names = ["episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
    for key in cameras:
        names += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    files = sorted(folder.glob("chunk-*/file-*.parquet"))
    if not files:
        raise PrismError(f"{folder}: holds no chunk-000/file-000.parquet; {AGAIN}")
    parts = [read_columns(file, names) for file in files]
    values = {name: np.concatenate([part[name] for part in parts]) for name in names}
    for name, array in values.items():
        good = array.dtype.kind == "f" if name.endswith("timestamp") else array.dtype.kind in "iu"
        if not good or (array < 0).any() or not np.isfinite(array).all() or (array > 1e15).any():
            raise PrismError(f"{folder}: column '{name}' must hold numbers that are not negative; {AGAIN}")
    order = np.argsort(values["episode_index"], kind="stable")
    values = {name: array[order] for name, array in values.items()}
    episodes = np.arange(len(order))
    if not len(order) or (values["episode_index"] != episodes).any():
        lost = int(np.argmax(values["episode_index"] != episodes)) if len(order) else 0
        raise PrismError(f"{folder}: episode {lost} is missing, or there twice; {AGAIN}")
    lengths: IntArray = values["length"].astype(np.int64)
    if (lengths < 1).any():
        raise PrismError(f"{folder}: episode {int(np.argmax(lengths < 1))} is empty; {AGAIN}")

    def place(prefix: str, template: str, what: str, begin: Any, **more: str) -> Place:
        pairs = np.stack([values[f"{prefix}/chunk_index"], values[f"{prefix}/file_index"]], axis=1).astype(np.int64)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        fields: list[dict[str, int | str]] = [
            {"chunk_index": int(c), "file_index": int(f), **more} for c, f in distinct
        ]
        return Place(tuple(expand(root, template, field, what) for field in fields), which.reshape(-1), begin)

    data = place("data", templates[0], "data_path", values["dataset_from_index"].astype(np.int64))
    first = np.full(len(data.files), np.iinfo(np.int64).max)
    np.minimum.at(first, data.file, data.begin)
    data = Place(data.files, data.file, data.begin - first[data.file])
    videos = {}
    for key in cameras:
        start = values[f"videos/{key}/from_timestamp"].astype(np.float64)
        videos[key] = place(f"videos/{key}", templates[1], "video_path", start, video_key=key)
    return lengths, data, videos


def _tasks(root: Path, version: int) -> dict[int, str]:
    if version == 2:
        file = root / "meta/tasks.jsonl"
        tasks: dict[Any, Any] = {entry.get("task_index"): entry.get("task") for entry in _json_lines(file)}
    else:
        file = root / "meta/tasks.parquet"
        if not file.exists():
            return {}
        columns = read_columns(file, None)
        # the text is the index of a pandas table: a column of its own, under one of these names
        texts = next((columns[name] for name in ("task", "__index_level_0__") if name in columns), None)
        if texts is None or "task_index" not in columns:
            raise PrismError(f"{file}: has the columns {', '.join(columns)}, needs task_index and task; {AGAIN}")
        tasks = dict(zip(columns["task_index"].tolist(), texts.tolist(), strict=True))
    if not all(type(index) is int and isinstance(text, str) for index, text in tasks.items()):
        raise PrismError(f"{file}: every task needs an integer 'task_index' and a text; {AGAIN}")
    return tasks


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """One at a time: the lines in a list would take twenty times the memory of the file."""
    _check_size(file, _MAX_LINES)
    with unreadable(f"{file}: not readable", AGAIN), file.open(encoding="utf-8") as opened:
        for number in count(1):
            if not (line := opened.readline(JSON_BYTES)):
                return
            with unreadable(f"{file}: line {number} is not JSON", AGAIN):
                if len(line) == JSON_BYTES:
                    raise ValueError("it is too long")
                entry = json.loads(line) if line.strip() else None
            if isinstance(entry, dict):
                yield entry
            elif entry is not None:
                raise PrismError(f"{file}: line {number} is not a JSON object; {AGAIN}")


def read_columns(file: Path, names: Sequence[str] | None) -> dict[str, Any]:
    """Plain columns of a small parquet file as arrays; None: all of them."""
    parquet = need("pyarrow.parquet", "data", f"{file}: parquet")
    if not file.is_file():
        raise PrismError(f"{file}: not found; {AGAIN}")
    with (
        unreadable(f"{file}: truncated or not a parquet file", AGAIN),
        parquet.ParquetFile(file, page_checksum_verification=True) as opened,
    ):
        have = opened.schema_arrow.names
        wanted = have if names is None else list(names)
        if lost := [name for name in wanted if name not in have]:
            raise PrismError(f"{file}: column '{lost[0]}' is missing; {AGAIN}")
        if opened.metadata.num_rows > _MAX_ROWS:  # equal values take no space in the file
            raise PrismError(f"{file}: has {opened.metadata.num_rows} rows, more than {_MAX_ROWS}; {AGAIN}")
        table = opened.read(columns=wanted)
        return {name: table.column(name).to_numpy() for name in wanted}


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
        stored, action = stored_specs(path)
        columns = self._columns(notes, stored)
        if stored and not entries:
            entries = [Entry((key,), spec.name, spec.kind) for key, spec in stored.items()]
            notes.append(f"the sensors are as {SPECS} says")
        stated_by = "--map" if self._arguments[2] else SPECS
        table = make_table(path, columns, "action", entries, self.fps, notes, stated_by)
        by_name = {spec.name: spec for spec in stored.values()} if stored and not self._arguments[2] else {}
        self._use(
            dataclasses.replace(table, streams=tuple(_restored(s, by_name) for s in table.streams)), self._meta.robot
        )
        if all(entry.name != ACTION for entry in self._arguments[2]):
            action.check(self.action_dim, str(path / SPECS))
            quaternions = action.quaternions or self.action_spec.quaternions
            names, robot = self.action_spec.names, self.action_spec.robot
            self.action_spec = dataclasses.replace(action, names=names, robot=robot, quaternions=quaternions)
        self.notes = tuple(notes)
        tasks = set(self._meta.tasks.values())
        self.task = tasks.pop() if len(tasks) == 1 else ""
        self.sometimes_absent = frozenset(
            s.spec.name for s in self.table.streams for c in s.columns if c.key in (*self._masks, TASK)
        )
        films = self._meta.videos
        self.filmed = frozenset(s.spec.name for s in self.table.streams if any(c.key in films for c in s.columns))
        self._videos = VideoFrames()
        self._rows = Rows(self._meta)

    def files(self, episode: int, streams: Collection[str]) -> list[Path]:
        """The files that these streams of an episode are in."""
        places = [self._meta.data]
        keys = [c.key for s in self.table.streams if s.spec.name in streams for c in s.columns]
        places += [self._meta.videos[key] for key in keys if key in self._meta.videos]
        return [place.files[int(place.file[episode])] for place in places]

    def _columns(self, notes: list[str], stored: Mapping[str, SensorSpec]) -> list[Column]:
        columns = []
        prefixed = any(key.startswith("observation") for key in self._meta.features)
        for feature in self._meta.features.values():
            key = feature.key
            if key in _INDEX or key in self._masks.values():
                continue
            seen = key.startswith("observation") or not (prefixed or is_outcome(key))  # older: state, image
            skip = "" if key == "action" or seen else "it is not an observation"
            picture = feature.dtype in ("image", "video")
            if feature.is_depth or (picture and feature.shape[2:] != (3,)):
                skip = "pictures of depth, or with other than 3 channels, are not read"
            name = key.removeprefix("observation.").removeprefix("images.")
            if feature.dtype == "string":
                notes.append(f"'{key}' is left out: text of its own kind; the instruction is 'task'")
                continue
            dtype = np.dtype(np.uint8) if picture else _number(feature, self.path)
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

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
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
        if TASK in raw:  # prism writes an empty instruction for a missing one
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


def stored_specs(path: Path) -> tuple[dict[str, SensorSpec], ActionSpec]:
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
