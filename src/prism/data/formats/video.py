"""Video files: a codec for a camera's frames, and any frame of them by its time.

Written with a key frame every 2 frames, so that any can be found; read through a small cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prism.data.episodes import SKIP, Array, DamagedDataError
from prism.data.formats.recent import Recent, nbytes
from prism.data.formats.table import AGAIN, OtherSizeError
from prism.errors import PrismError, need, reason

Codec = Literal["h264", "av1"]
CHUNK = 1000  # files in a folder
_ENCODERS = {"h264": "libx264", "av1": "libsvtav1"}
_OPTIONS = {
    "h264": {"g": "2", "bf": "0", "crf": "20", "preset": "veryfast"},
    "av1": {"g": "2", "crf": "30", "preset": "8", "svtav1-params": "lp=1"},
}


@contextmanager
def ordinary_scheduling() -> Iterator[None]:
    """Undo what the AV1 encoder does when it starts as root: it puts the process, all threads, into the real-time
    class (SCHED_FIFO 99). Whatever busy process is started from it later would stop the machine."""
    threads = Path("/proc/self/task")
    if not threads.is_dir():  # only Linux knows of it
        yield
        return
    before = os.sched_getscheduler(0)
    priority = os.sched_getparam(0)
    try:
        yield
    finally:
        for thread in threads.iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                if os.sched_getscheduler(int(thread.name)) != before:
                    os.sched_setscheduler(int(thread.name), before, priority)


class VideoWriter:
    """One camera. Files are numbered; a new one is begun between episodes, when the last has become large."""

    def __init__(
        self, root: Path, template: str, key: str, fps: float, size: tuple[int, int], codec: str,
        all_colours: bool = False,
    ) -> None:  # fmt: skip
        self._av = need("av", "data", "video")
        if codec not in _ENCODERS:
            raise PrismError(f"--codec {codec}: use one of {', '.join(_ENCODERS)}")
        os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints a page of settings for every file
        self._root, self._template, self._key, self._codec = root, template, key, codec
        self._rate = Fraction(fps).limit_denominator(100_000)
        self._height, self._width = size
        # 4:2:0 halves the colour's resolution, which an odd size does not allow
        even = self._height % 2 == 0 and self._width % 2 == 0
        self._format = "yuv420p" if even and not all_colours else "yuv444p"
        self._number, self._frames, self._begin = -1, 0, 0
        self._container: Any = None

    def add(self, frames: Array) -> None:
        if self._container is None:
            self._start()
        try:
            if not self._stream.codec_context.is_open:
                with ordinary_scheduling():
                    self._stream.codec_context.open()
            for pixels in frames:
                frame = self._av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts = self._frames
                self._container.mux(self._stream.encode(frame))
                self._frames += 1
        except self._av.FFmpegError as error:
            raise PrismError(
                f"{self._key}: {self._codec} cannot encode {self._width} x {self._height}: {reason(error)}"
            ) from None

    def end_episode(self, limit: int) -> tuple[int, float, float]:
        """(file number, first second, last second) of the episode in it."""
        seconds = [float(n / self._rate) for n in (self._begin, self._frames)]
        number, self._begin = self._number, self._frames
        file = self._file()  # encoders hold frames back: it may not be there yet
        if file.exists() and file.stat().st_size > limit:
            self.close()
        return number, seconds[0], seconds[1]

    def close(self) -> None:
        if self._container is not None:
            self._container.mux(self._stream.encode(None))
            self._container.close()
            self._container = None

    def abandon(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            with suppress(self._av.FFmpegError):  # a full disk, which is why it is abandoned
                container.close()

    def info(self) -> dict[str, Any]:
        return {
            "video.height": self._height,
            "video.width": self._width,
            "video.codec": self._codec,
            "video.pix_fmt": self._format,
            "video.is_depth_map": False,
            "video.fps": float(self._rate),
            "video.channels": 3,
            "has_audio": False,
        }

    def _file(self) -> Path:
        return self._root / self._template.format(self._key, self._number // CHUNK, self._number % CHUNK)

    def _start(self) -> None:
        self._number += 1
        self._frames = self._begin = 0
        self._file().parent.mkdir(parents=True, exist_ok=True)
        self._container = self._av.open(str(self._file()), "w")
        self._stream = self._container.add_stream(_ENCODERS[self._codec], rate=self._rate)
        self._stream.width, self._stream.height, self._stream.pix_fmt = self._width, self._height, self._format
        self._stream.codec_context.options = _OPTIONS[self._codec]
        self._stream.codec_context.thread_count = 1


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
                except OtherSizeError as error:
                    self._open.forget(file)
                    raise PrismError(f"{where}: {file} has {error}: fix 'shape' of this feature there") from None
                except Exception as error:  # FFmpeg's errors, and ours
                    self._open.forget(file)
                    if isinstance(error, FileNotFoundError):
                        raise PrismError(f"{where}: {file} is not found; {AGAIN}") from None
                    words = getattr(error, "strerror", None) or reason(error)  # FFmpeg's, without the file again
                    raise DamagedDataError(f"{where}: {file} cannot be read ({words}); {AGAIN}", SKIP) from None
        return out


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
                sizes = f"{frame.height} x {frame.width}, meta/info.json says {shape[0]} x {shape[1]}"
                raise OtherSizeError(f"pictures of {sizes}")
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
