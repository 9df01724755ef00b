"""Intel RealSense cameras: colour, depth, or both from one device; depth in metres, in the colour camera's pixels."""

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

_PATIENCE = 2000  # ms that a frame may take


@dataclass
class RealSense(Stream):
    serial: str = ""  # default: the only one there is
    color: str = "rgb_wrist"  # the sensor's name; "": not read
    depth: str = ""
    width: int = 640
    height: int = 480
    fps: int = 30

    def __post_init__(self) -> None:
        super().__init__()
        if not (self.color or self.depth) or self.color == self.depth:
            raise PrismError("a realsense needs color or depth: the names of two different sensors")

    def sensors(self) -> tuple[SensorSpec, ...]:
        size = (self.height, self.width)
        color = (SensorSpec(self.color, "rgb", (*size, 3), fps=float(self.fps)),) if self.color else ()
        depth = (SensorSpec(self.depth, "depth", size, fps=float(self.fps)),) if self.depth else ()
        return color + depth

    def open(self) -> None:
        self._rs: Any = need("pyrealsense2", "robots-realsense", "driver realsense")
        rs = self._rs
        config = rs.config()
        if self.serial:
            config.enable_device(self.serial)
        if self.color:
            config.enable_stream(rs.stream.color, self.width, self.height, rs.format.rgb8, self.fps)
        if self.depth:
            config.enable_stream(rs.stream.depth, self.width, self.height, rs.format.z16, self.fps)
        self._pipeline = rs.pipeline()
        profile = self._pipeline.start(config)  # RuntimeError: no such device, or no such size and rate
        self._metres = profile.get_device().first_depth_sensor().get_depth_scale() if self.depth else 0.0
        self._align = rs.align(rs.stream.color) if self.color and self.depth else None

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        frames = self._pipeline.wait_for_frames(_PATIENCE)  # RuntimeError where none came
        if self._align is not None:
            frames = self._align.process(frames)
        found: dict[str, tuple[Array, float]] = {}
        if self.color:
            frame = frames.get_color_frame()
            found[self.color] = np.array(frame.get_data(), np.uint8), self._stamp(frame)
        if self.depth:
            frame = frames.get_depth_frame()
            counts = np.asarray(frame.get_data(), np.uint16)
            found[self.depth] = counts.astype(np.float32) * np.float32(self._metres), self._stamp(frame)
        return found

    def _stamp(self, frame: Any) -> float:
        """When it was taken, on our clock; when it came, where the camera's clock is not this computer's."""
        now, domain = time.monotonic(), self._rs.timestamp_domain
        if frame.get_frame_timestamp_domain() not in (domain.global_time, domain.system_time):
            return now
        return now - min(max(time.time() - 1e-3 * float(frame.get_timestamp()), 0.0), 1.0)

    def shut(self) -> None:
        self._pipeline.stop()
