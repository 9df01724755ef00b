"""The one interface every format implements: episodes read lazily, by slices of time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prism.sensors import SensorSpec


@dataclass(frozen=True)
class Episode:
    """A slice of a demonstration: streams (T, ...), actions (T, Da), all in robot units."""

    streams: dict[str, NDArray[np.generic]]
    actions: NDArray[np.float32]

    @property
    def length(self) -> int:
        return int(self.actions.shape[0])


class EpisodeSource(Protocol):
    """A dataset, whatever its format."""

    path: Path  # for messages
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    fps: float
    lengths: NDArray[np.int64]  # (E,) steps of each episode

    def read(self, episode: int, start: int = 0, stop: int | None = None) -> Episode:
        """Steps start..stop of one episode; nothing else is read from disk."""
        ...
