"""Video files for LeRobot datasets: many episodes in one file, a key frame every 2 frames so that any can be found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

from prism.data.episodes import Array
from prism.data.formats.extras import need
from prism.errors import PrismError, reason

_ENCODERS = {"h264": "libx264", "av1": "libsvtav1"}
_OPTIONS = {
    "h264": {"g": "2", "bf": "0", "crf": "20", "preset": "veryfast"},
    "av1": {"g": "2", "crf": "30", "preset": "8", "svtav1-params": "lp=1"},
}
_CHUNK = 1000


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

    def __init__(self, root: Path, template: str, key: str, fps: float, size: tuple[int, int], codec: str) -> None:
        self._av = need("av", "data", "video")
        if codec not in _ENCODERS:
            raise PrismError(f"--codec {codec}: use one of {', '.join(_ENCODERS)}")
        os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints a page of settings for every file
        self._root, self._template, self._key, self._codec = root, template, key, codec
        self._rate = Fraction(fps).limit_denominator(100_000)
        self._height, self._width = size
        # 4:2:0 halves the colour's resolution, which an odd size does not allow
        self._format = "yuv420p" if self._height % 2 == 0 and self._width % 2 == 0 else "yuv444p"
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
        if self._container is not None:
            self._container.close()
            self._container = None

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
        return self._root / self._template.format(self._key, self._number // _CHUNK, self._number % _CHUNK)

    def _start(self) -> None:
        self._number += 1
        self._frames = self._begin = 0
        self._file().parent.mkdir(parents=True, exist_ok=True)
        self._container = self._av.open(str(self._file()), "w")
        self._stream = self._container.add_stream(_ENCODERS[self._codec], rate=self._rate)
        self._stream.width, self._stream.height, self._stream.pix_fmt = self._width, self._height, self._format
        self._stream.codec_context.options = _OPTIONS[self._codec]
        self._stream.codec_context.thread_count = 1
