"""Columns of LeRobot's parquet files: a row group at a time, checked against info.json, with a bounded cache."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, IntArray
from prism.data.formats.recent import Recent, nbytes
from prism.data.formats.table import AGAIN
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
            raise ValueError(f"an image is {image.height} x {image.width}, {INFO} says {shape}")
        return np.asarray(image.convert("RGB"))


# ---------------------------------------------------------------------------
# Frames of video files, by time, exactly. Consecutive frames are decoded once, and a few open decoders are kept.
#
# What limits reading in random order: a seek goes to the key frame before, and everything from there to the frame
# wanted is decoded. LeRobot writes a key frame every 2 frames for that reason; videos with a key frame every 250
# decode 125 frames for one. `prism data convert` to the own format decodes everything once.

_OPEN_DECODERS = 8  # decoders kept open
_FRAME_BYTES = 32 * 2**20  # decoded frames kept
_AHEAD = 24  # frames that are decoded rather than sought across


class VideoFrames:
    """The frames of any number of video files, through one small cache. Threads take turns."""

    def __init__(self, cache_bytes: int = _FRAME_BYTES) -> None:
        self._lock = threading.Lock()
        self._open: Recent[Path, _Decoder] = Recent(_OPEN_DECODERS, drop=lambda decoder: decoder.close())
        self._frames: Recent[tuple[Path, int], Array] = Recent(cache_bytes, nbytes)

    def read(
        self, file: Path, start: float, first: int, count: int, fps: float, shape: tuple[int, ...], where: str
    ) -> Array:
        """Frames first .. first+count-1, where frame i is at `start` + i/fps seconds: (count, H, W, 3) uint8."""
        out = np.empty((count, *shape), np.uint8)
        offset = round(start * fps * 16)  # episodes in one file begin between frames of other episodes
        keys = [(file, offset + 16 * (first + i)) for i in range(count)]
        with self._lock:
            missing = []
            for i, key in enumerate(keys):
                if (found := self._frames.get(key)) is not None and found.shape == shape:
                    out[i] = found
                else:
                    missing.append(i)
            if missing:
                try:
                    times = [start + (first + i) / fps for i in missing]
                    decoder = self._open.get(file) or self._open.keep(file, _Decoder(file))
                    for i, frame in zip(missing, decoder.read(times, 0.5 / fps, shape), strict=True):
                        out[i] = self._frames.keep(keys[i], frame)
                except Exception as error:  # FFmpeg's errors, and ours
                    self._open.forget(file)
                    if isinstance(error, FileNotFoundError):
                        raise PrismError(f"{where}: {file} is not found; {AGAIN}") from None
                    words = getattr(error, "strerror", None) or reason(error)  # FFmpeg's, without the file again
                    raise PrismError(f"{where}: {file} cannot be read ({words}); {AGAIN}, or --skip-damaged") from None
        return out

    def close(self) -> None:
        with self._lock:
            self._open.clear()


class _Decoder:
    """One open file and where its decoder stands."""

    def __init__(self, file: Path) -> None:
        av = need("av", "data", f"{file}: video")
        self._container = av.open(str(file))
        try:
            if not self._container.streams.video:
                raise ValueError("it holds no video")
            self._stream = self._container.streams.video[0]
            context = self._stream.codec_context
            context.thread_count = 1  # threads decode frames ahead: of no use for a few frames after a seek
            # explode: a damaged stream is an error, not a picture made up to hide it
            context.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
        except BaseException:
            self._container.close()
            raise
        self._convert = av.video.reformatter.VideoReformatter()  # one for all: making one takes as long as decoding
        self._frames: Iterator[Any] = iter(())
        self._at = np.inf  # the time of the last frame that came out; inf: seek first

    def close(self) -> None:
        self._frames = iter(())
        self._container.close()

    def read(self, times: list[float], tolerance: float, shape: tuple[int, ...]) -> Iterator[Array]:
        """The frames at these times (increasing), each within `tolerance` of a frame's own time."""
        pending: Any = None
        for time in times:
            if pending is None and not self._at + tolerance < time <= self._at + 2 * _AHEAD * tolerance:
                self._seek(time)
            frame, pending = self._frame_at(time, tolerance, pending)
            if (frame.height, frame.width, 3) != shape:
                raise ValueError(f"frames are {frame.height} x {frame.width}, info.json says {shape[0]} x {shape[1]}")
            yield self._to_rgb(frame)

    def _to_rgb(self, frame: Any) -> Array:
        pixels: Array = self._convert.reformat(frame, format="rgb24", threads=1).to_ndarray()
        return pixels

    def _seek(self, time: float) -> None:
        self._container.seek(max(int(time / self._stream.time_base), 0), stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self._at = -np.inf

    def _frame_at(self, time: float, tolerance: float, pending: Any) -> tuple[Any, Any]:
        """The frame nearest to `time`, and the one behind it if it had to be looked at."""
        best, first = pending, pending is None
        sought_again = False
        while True:
            if best is not None and best.time >= time - 0.2 * tolerance:
                break  # at the time, or behind it: no later frame is nearer
            frame = next(self._frames, None)
            if frame is None:
                break
            if frame.time is None or frame.is_corrupt:
                raise ValueError(f"the frame near {time:.3f} s is damaged")
            if first and frame.time > time + tolerance and not sought_again:
                # the seek went too far (a file without an index): once more, from the beginning
                self._container.seek(0, stream=self._stream, backward=True)
                self._frames, sought_again = self._container.decode(self._stream), True
                continue
            first = False
            self._at = frame.time
            if best is not None and abs(best.time - time) <= min(abs(frame.time - time), tolerance):
                return best, frame
            best = frame
        if best is None or abs(best.time - time) > tolerance:
            near = "the video ends before it" if best is None else f"the nearest is at {best.time:.3f} s"
            raise ValueError(f"there is no frame at {time:.3f} s: {near}")
        return best, None
