"""LeRobot's `meta` folder, versions 2.0, 2.1 and 3.0: what there is, and in which file each episode is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import IntArray
from prism.data.formats.extras import need
from prism.errors import PrismError, reason

INFO = "meta/info.json"
AGAIN = "copy or download it again"
_MAX_META = 1 << 30
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


@dataclass(frozen=True)
class Feature:
    """One entry of info.json's `features`; images always (H, W, C)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    is_depth: bool = False
    names: tuple[str, ...] = ()  # of the dimensions of a vector


@dataclass(frozen=True)
class Place:
    """Where episodes are, by episode: a file, and where in it they begin."""

    files: tuple[Path, ...]  # distinct
    file: IntArray  # (E,) index into files
    begin: Any  # (E,) first row in the parquet, or the time of the first frame in the video


@dataclass(frozen=True)
class Meta:
    version: int
    stated: str  # as info.json has it: v2.1
    fps: float
    features: dict[str, Feature]
    lengths: IntArray
    data: Place
    videos: dict[str, Place]
    tasks: dict[int, str]
    robot: str


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
    try:
        data = json.loads(_content(file))
    except (ValueError, RecursionError) as error:
        raise PrismError(f"{file}: not readable as JSON ({reason(error)}); {AGAIN}") from None
    if not isinstance(data, dict):
        raise PrismError(f"{file}: holds a {type(data).__name__}, not a JSON object; {AGAIN}")
    return data


def _content(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_META:
            raise PrismError(f"{file}: is larger than 1 GB, no list of episodes; {AGAIN}")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PrismError(f"{file}: not found; {AGAIN}") from None
    except (OSError, ValueError) as error:
        raise PrismError(f"{file}: not readable ({reason(error)}); {AGAIN}") from None


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
        raise PrismError(f"{root / INFO}: '{what}' is '{template:.80}', which is no path inside the dataset; {AGAIN}")
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
            {"episode_chunk": e // chunk, "episode_index": e, **more} for e in range(count)
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


def _json_lines(file: Path) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(_content(file).splitlines()):
        try:
            entry = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise PrismError(f"{file}: line {number + 1} is no JSON ({reason(error)}); {AGAIN}") from None
        if isinstance(entry, dict):
            entries.append(entry)
        elif entry is not None:
            raise PrismError(f"{file}: line {number + 1} is no JSON object; {AGAIN}")
    return entries


def read_columns(file: Path, names: Sequence[str] | None) -> dict[str, Any]:
    """Plain columns of a small parquet file as arrays; None: all of them."""
    parquet = need("pyarrow.parquet", "data", f"{file}: parquet")
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            have = opened.schema_arrow.names
            wanted = have if names is None else list(names)
            if lost := [name for name in wanted if name not in have]:
                raise PrismError(f"{file}: column '{lost[0]}' is missing; {AGAIN}")
            table = opened.read(columns=wanted)
            return {name: table.column(name).to_numpy() for name in wanted}
    except FileNotFoundError:
        raise PrismError(f"{file}: not found; {AGAIN}") from None
    except PrismError:
        raise
    except Exception as error:  # arrow raises many kinds
        raise PrismError(f"{file}: truncated or not a parquet file ({reason(error)}); {AGAIN}") from None
