"""Cameras that the operating system knows (UVC), through OpenCV. A DIGIT touch sensor is one of them.

OpenCV's pictures are BGR; what leaves this file is RGB.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism.errors import PrismError, need
from prism.robots.contract import Array
from prism.robots.drivers.parts import Stream
from prism.sensors import SensorSpec


@dataclass
class Camera(Stream):
    sensor: str  # default: the table's name
    device: int | str = 0  # a number, or /dev/v4l/by-id/..., which stays the same when others are plugged in
    width: int = 640
    height: int = 480
    fps: float = 30.0

    kind = "rgb"

    def __post_init__(self) -> None:
        super().__init__()
        if min(self.width, self.height, self.fps) <= 0:
            raise PrismError(
                f"sensors.{self.sensor}: {self.width} x {self.height} at {self.fps:g} is not a picture size and rate"
            )

    def sensors(self) -> tuple[SensorSpec, ...]:
        return (SensorSpec(self.sensor, self.kind, (self.height, self.width, 3), fps=self.fps),)

    def open(self) -> None:
        cv2: Any = need("cv2", "robots-cameras", "driver uvc")
        cv2.utils.logging.setLogLevel(
            cv2.utils.logging.LOG_LEVEL_SILENT
        )  # what it would print is said below, on one line
        self._capture = cv2.VideoCapture(self.device)
        if not self._capture.isOpened():
            raise self.error(f"camera {self.device!r} cannot be opened", self.remedy)
        self._capture.set(cv2.CAP_PROP_FRAME_WIDTH, self.width)
        self._capture.set(cv2.CAP_PROP_FRAME_HEIGHT, self.height)
        self._capture.set(cv2.CAP_PROP_FPS, self.fps)
        self._capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # the latest, not the oldest

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        good, picture = self._capture.read()  # waits
        if not good:
            raise OSError(f"camera {self.device!r} shows nothing")
        return {self.sensor: (np.ascontiguousarray(picture[..., ::-1]), time.monotonic())}

    def shut(self) -> None:
        self._capture.release()


@dataclass
class Digit(Camera):
    """A DIGIT: 320 x 240 at 60 Hz."""

    width: int = 320
    height: int = 240
    fps: float = 60.0

    kind = "tactile"
