"""Frames of video files, by time, exactly. Consecutive frames are decoded once, and a few open decoders are kept.

What limits reading in random order: a seek goes to the key frame before, and everything from there to the frame
wanted is decoded. LeRobot writes a key frame every 2 frames for that reason; videos with a key frame every 250
decode 125 frames for one. `prism data convert` to the own format decodes everything once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array
from prism.data.formats.extras import need
from prism.errors import PrismError, reason

AGAIN = "copy or download it again"
_OPEN = 8  # decoders kept open
_CACHE_BYTES = 32 * 2**20  # decoded frames kept
_AHEAD = 24  # frames that are decoded rather than sought across


class VideoFrames:
    """The frames of any number of video files, through one small cache. Threads take turns."""

    def __init__(self, cache_bytes: int = _CACHE_BYTES) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _Decoder] = OrderedDict()
        self._frames: OrderedDict[tuple[Path, int], Array] = OrderedDict()
        self._bytes, self._limit = 0, cache_bytes

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
                    self._frames.move_to_end(key)
                    out[i] = found
                else:
                    missing.append(i)
            if missing:
                try:
                    times = [start + (first + i) / fps for i in missing]
                    for i, frame in zip(missing, self._decoder(file).read(times, 0.5 / fps, shape), strict=True):
                        out[i] = frame
                        self._keep(keys[i], frame)
                except Exception as error:  # FFmpeg's errors, and ours
                    if (bad := self._open.pop(file, None)) is not None:
                        bad.close()
                    if isinstance(error, FileNotFoundError):
                        raise PrismError(f"{where}: {file} is not found; {AGAIN}") from None
                    words = getattr(error, "strerror", None) or reason(error)  # FFmpeg's, without the file again
                    raise PrismError(f"{where}: {file} cannot be decoded ({words}); {AGAIN}") from None
        return out

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _decoder(self, file: Path) -> _Decoder:
        decoder = self._open.pop(file, None) or _Decoder(file)
        self._open[file] = decoder
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)[1].close()
        return decoder

    def _keep(self, key: tuple[Path, int], frame: Array) -> None:
        if frame.nbytes > self._limit:
            return
        self._bytes += frame.nbytes - getattr(self._frames.get(key), "nbytes", 0)
        self._frames[key] = frame
        while self._bytes > self._limit:
            self._bytes -= self._frames.popitem(last=False)[1].nbytes


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
            yield self._convert.reformat(frame, format="rgb24", threads=1).to_ndarray()

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
