"""A kind of sensor of your own: a laser scanner that measures distances all around, and what encodes it.

    pip install --no-deps -e examples/my_sensor
    prism train recording.zarr --map scan=lidar:lidar state=proprio action=action

This file and the entry point in pyproject.toml are all of it. A dataset's sensor of this kind is read, stored, trained
on, served, and may be absent, like any other; SensorEncoder sees to absence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prism.encoders.kinds import SensorEncoder
from prism.sensors import Kind, SensorSpec

FARTHEST = 30.0  # metres


class LidarEncoder(SensorEncoder):
    """(N, R) metres -> nearness in [0, 1] -> convolutions round the circle -> (N, 64)."""

    def __init__(self, spec: SensorSpec, normalizer: Any) -> None:
        super().__init__(spec, features=64)
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 5, stride=2, padding=2, padding_mode="circular"), nn.ReLU(),
            nn.Conv1d(16, 32, 5, stride=2, padding=2, padding_mode="circular"), nn.ReLU(),
            nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(8 * 32, 64),
        )  # fmt: skip

    def encode(self, stream: Tensor, shift: Tensor | None) -> Tensor:  # shift: of images alone
        nearness = 1.0 - stream.float().clamp(0.0, FARTHEST) / FARTHEST
        return self.net(nearness.unsqueeze(1))


KIND = Kind("a laser scan", ("R",), encoder=LidarEncoder)
