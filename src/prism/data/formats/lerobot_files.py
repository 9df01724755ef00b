"""Columns of LeRobot's parquet files: a row group at a time, checked against info.json, with a bounded cache."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, IntArray
from prism.data.formats.recent import Recent, nbytes
from prism.data.formats.table import AGAIN, OtherSizeError
from prism.errors import PrismError, need, reason

INFO = "meta/info.json"
_COLUMN_BYTES = 32 * 2**20  # decoded columns
_OPEN_FILES = 8  # files held open
_TIME = "timestamp"


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
    """The location of each episode: a file and the first row in it."""

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


class Rows:
    """Columns of the parquet files, a row group at a time, with a bounded cache. Threads take turns."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._lock = threading.Lock()
        self._files: Recent[Path, tuple[Any, Any]] = Recent(_OPEN_FILES, drop=lambda found: found[0].close())
        self._cache: Recent[tuple[Path, int, str], Any] = Recent(_COLUMN_BYTES, nbytes)

    def check(self, episode: int, start: int, stop: int) -> None:
        """The rows are those of this episode, in order: a shifted index would give wrong data silently."""
        if (self.read(episode, "episode_index", start, stop).reshape(-1) != episode).any():
            raise PrismError(f"{self._file(episode)}: rows of episode {episode} belong to another episode; {AGAIN}")
        steps = self.read(episode, "frame_index", start, stop).reshape(-1).astype(np.int64)
        if (steps != np.arange(start, stop)).any():
            raise PrismError(f"{self._file(episode)}: 'frame_index' of episode {episode} does not count; {AGAIN}")
        if _TIME in self._meta.features:  # where a video's frames are, too
            times = self.read(episode, _TIME, start, stop).reshape(-1).astype(np.float64)
            away = np.abs(times - steps / self._meta.fps) * self._meta.fps
            if not (away < 0.5).all():  # written so that NaN fails too
                step = int(np.argmin(away < 0.5))
                back = step and times[step] < times[step - 1]
                what = "goes backwards" if back else f"is not that of {self._meta.fps:g} steps a second"
                raise PrismError(
                    f"{self._file(episode)}: episode {episode}, '{_TIME}' {what}: {times[step]:.3f} s at step "
                    f"{start + step}; {AGAIN}"
                )

    def read(self, episode: int, key: str, start: int, stop: int) -> Array:
        file = self._file(episode)
        first = int(self._meta.data.begin[episode])
        where = f"{file}: episode {episode}, '{key}'"
        feature = self._meta.features.get(key) or Feature(key, "int64", (1,))
        try:
            with self._lock:
                parts = self._parts(file, key, feature, first + start, first + stop)
            if feature.dtype == "image":
                return np.stack(
                    [_decode_image(content, feature.shape) for part in parts for content in part.to_pylist()]
                )
            return np.concatenate(parts)
        except FileNotFoundError:
            raise PrismError(f"{where}: the file is not found; {AGAIN}") from None
        except OtherSizeError as error:
            raise PrismError(f"{where}: has {error}: fix 'shape' of this feature there") from None
        except Exception as error:  # arrow raises many kinds
            raise PrismError(f"{where}: {reason(error)}; {AGAIN}") from None

    def _file(self, episode: int) -> Path:
        return self._meta.data.files[int(self._meta.data.file[episode])]

    def _parts(self, file: Path, key: str, feature: Feature, start: int, stop: int) -> list[Any]:
        opened, firsts = self._opened(file)
        if stop > firsts[-1]:
            raise ValueError(f"the file has {firsts[-1]} rows, {stop} are needed")
        parts: list[Any] = []
        group = int(np.searchsorted(firsts, start, side="right")) - 1
        while not parts or firsts[group] < stop:
            values = self._group(file, opened, group, key, feature)
            begin = int(firsts[group])
            low, high = max(start - begin, 0), max(min(stop, int(firsts[group + 1])) - begin, 0)
            parts.append(values.slice(low, high - low) if feature.dtype == "image" else values[low:high])
            group += 1
            if group == len(firsts) - 1:
                break
        return parts

    def _opened(self, file: Path) -> tuple[Any, Any]:
        """The open file, and the first row of each of its groups."""
        if (found := self._files.get(file)) is not None:
            return found
        parquet = need("pyarrow.parquet", "data", f"{file}: parquet")
        opened = parquet.ParquetFile(file, page_checksum_verification=True, memory_map=False, pre_buffer=False)
        counts = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
        return self._files.keep(file, (opened, np.cumsum([0, *counts])))

    def _group(self, file: Path, opened: Any, group: int, key: str, feature: Feature) -> Any:
        place = (file, group, key)
        if (found := self._cache.get(place)) is not None:
            return found
        if key not in opened.schema_arrow.names:
            raise ValueError("the column is missing")
        column = opened.read_row_group(group, columns=[key], use_threads=False).column(key)
        values = column.combine_chunks() if feature.dtype == "image" else _decode_column(column, feature)
        return self._cache.keep(place, values)


def _decode_column(column: Any, feature: Feature) -> Array:
    """(rows, *shape) of the type that info.json states; a column of another type or with holes is refused."""
    pa: Any = need("pyarrow", "data", "parquet")
    rows, shape, dtype = len(column), feature.shape, np.dtype(feature.dtype)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty column
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    sizes = list(shape)
    while hasattr(array, "storage"):
        array = array.storage
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        size = sizes.pop(0) if sizes else -1
        lengths = array.value_lengths() if not pa.types.is_fixed_size_list(array.type) else None
        uniform = array.type.list_size == size if lengths is None else bool(np.all(lengths.to_numpy(False) == size))
        if array.null_count or not uniform:
            raise ValueError(f"lists are not all of the length {size} that {INFO} says")
        array = array.flatten()
    if array.null_count:
        raise ValueError("holds empty cells")
    values: Array = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind != dtype.kind or values.dtype.itemsize > 8 or sizes not in ([], [1]):
        raise ValueError(f"is {column.type}, {INFO} says {feature.dtype} {shape}")
    if values.size != rows * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"has {values.size} numbers in {rows} rows, {INFO} says shape {shape}")
    return values.reshape(rows, *shape).astype(dtype, copy=False)


def _decode_image(content: Any, shape: tuple[int, ...]) -> Array:
    """A PNG or JPEG inside a parquet file."""
    from PIL import Image

    data = content.get("bytes") if isinstance(content, dict) else None
    if not isinstance(data, bytes):
        raise ValueError("an image's bytes are not in the file (only a path is); prism reads embedded images")
    with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
        if (image.height, image.width) != shape[:2]:
            sizes = f"{image.height} x {image.width}, {INFO} says {shape[0]} x {shape[1]}"
            raise OtherSizeError(f"pictures of {sizes}")
        return np.asarray(image.convert("RGB"))
