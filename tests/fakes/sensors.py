"""Modules that stand in for cv2, pyrealsense2 and sounddevice, with the vendors' units, blocking and errors."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

DARK, FULL = 10, 200  # of the colours of fake pictures


class Cameras(ModuleType):
    """cv2. Pictures are BGR with a red of FULL; `unplugged` devices cannot be opened, or show nothing any more."""

    CAP_PROP_FRAME_WIDTH, CAP_PROP_FRAME_HEIGHT, CAP_PROP_FPS, CAP_PROP_BUFFERSIZE = 3, 4, 5, 38

    def __init__(self) -> None:
        super().__init__("cv2")
        self.utils = SimpleNamespace(logging=SimpleNamespace(setLogLevel=lambda level: level, LOG_LEVEL_SILENT=0))
        self.unplugged: set[Any] = set()
        self.sizes: dict[Any, tuple[int, int]] = {}  # that a camera insists on: (width, height)
        cameras = self

        class VideoCapture:
            def __init__(self, device: int | str) -> None:
                self._device, self._good = device, device not in cameras.unplugged
                self._set: dict[int, float] = {3: 640, 4: 480, 5: 30}
                self._next, self._count = time.monotonic(), 0

            def isOpened(self) -> bool:  # noqa: N802
                return self._good

            def set(self, key: int, value: float) -> bool:
                self._set[key] = value
                return True

            def read(self) -> tuple[bool, np.ndarray | None]:
                self._next = max(self._next + 1 / self._set[5], time.monotonic() - 0.2)
                time.sleep(max(0.0, self._next - time.monotonic()))
                if self._device in cameras.unplugged or not self._good:
                    return False, None
                width, height = cameras.sizes.get(self._device, (int(self._set[3]), int(self._set[4])))
                picture = np.full((height, width, 3), DARK, np.uint8)
                picture[..., 2] = FULL
                self._count += 1
                picture[0, 0, 0] = self._count % 256
                return True, picture

            def release(self) -> None:
                self._good = False

        self.VideoCapture = VideoCapture


class RealSenses(ModuleType):
    """pyrealsense2. Depth is counted in `scale` metres; errors are RuntimeErrors; frames carry the system's time."""

    def __init__(self, serials: tuple[str, ...] = ("123",), scale: float = 0.0001) -> None:
        super().__init__("pyrealsense2")
        self.serials, self.scale = list(serials), scale
        self.stream = SimpleNamespace(color="color", depth="depth")
        self.format = SimpleNamespace(rgb8="rgb8", z16="z16")
        self.timestamp_domain = SimpleNamespace(hardware_clock=0, system_time=1, global_time=2)
        self.align = lambda to: SimpleNamespace(process=lambda frames: frames)
        self.config = _Config
        self.pipeline = lambda: _Pipeline(self)


class _Config:
    def __init__(self) -> None:
        self.serial, self.streams = "", {}

    def enable_device(self, serial: str) -> None:
        self.serial = serial

    def enable_stream(self, stream: str, width: int, height: int, pixels: str, fps: int) -> None:
        self.streams[stream] = (width, height, pixels, fps)


class _Pipeline:
    def __init__(self, module: RealSenses) -> None:
        self._module = module

    def start(self, config: _Config) -> Any:
        if not self._module.serials or (config.serial and config.serial not in self._module.serials):
            raise RuntimeError("No device connected")
        self._config = config
        sensor = SimpleNamespace(get_depth_scale=lambda: self._module.scale)
        return SimpleNamespace(get_device=lambda: SimpleNamespace(first_depth_sensor=lambda: sensor))

    def wait_for_frames(self, timeout_ms: int = 5000) -> Any:
        fps = max(one[3] for one in self._config.streams.values())
        time.sleep(1.0 / fps)
        if not self._module.serials:
            time.sleep(timeout_ms / 1000)
            raise RuntimeError(f"Frame didn't arrive within {timeout_ms}")
        return SimpleNamespace(
            get_color_frame=lambda: self._frame("color"), get_depth_frame=lambda: self._frame("depth")
        )

    def _frame(self, stream: str) -> Any:
        width, height, pixels, _ = self._config.streams[stream]
        if pixels == "rgb8":
            data = np.full((height, width, 3), DARK, np.uint8)
            data[..., 0] = FULL
        else:
            data = np.full((height, width), round(0.5 / self._module.scale), np.uint16)  # half a metre
        taken = 1e3 * (time.time() - 0.02)
        return SimpleNamespace(get_data=lambda: data, get_timestamp=lambda: taken, get_frame_timestamp_domain=lambda: 2)

    def stop(self) -> None:
        self._config = _Config()


class Sounds(ModuleType):
    """sounddevice. `read` waits until the samples were heard, and gives (samples, channels) of float32."""

    def __init__(self) -> None:
        super().__init__("sounddevice")
        self.PortAudioError = type("PortAudioError", (Exception,), {})
        sounds = self

        class InputStream:
            latency = 0.01

            def __init__(self, samplerate: int, device: Any, channels: int, dtype: str) -> None:
                if device == "nowhere":
                    raise sounds.PortAudioError("Error querying device -1")
                assert dtype == "float32"
                self._rate, self._channels, self._begin, self._heard = samplerate, channels, time.monotonic(), 0

            def start(self) -> None:
                self._begin = time.monotonic()

            def read(self, frames: int) -> tuple[np.ndarray, bool]:
                self._heard += frames
                time.sleep(max(0.0, self._begin + self._heard / self._rate - time.monotonic()))
                t = np.arange(self._heard - frames, self._heard) / self._rate
                return np.tile(np.sin(2 * np.pi * 100 * t)[:, None], self._channels).astype(np.float32), False

            def stop(self) -> None: ...

            def close(self) -> None: ...

        self.InputStream = InputStream
