"""App. A: per-key statistics, in one streaming pass, saved with the policy.

Actions are mapped to [-1, 1] by their range, vectors to zero mean and unit variance:

    a~ = (a - (max + min)/2) / ((max - min)/2)        o~ = (o - mean) / std

A dimension that (nearly) never moved has no scale of its own; dividing by it would blow noise up,
so there the divisor is 1: it is only centred, and the round trip stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from prism.errors import PrismError
from prism.sensors import SensorSpec

if TYPE_CHECKING:
    from prism.data.episodes import EpisodeSource

Float64Array = NDArray[np.float64]
_CHUNK = 8192  # steps read together: bounds the memory of the pass
# Below this share of the largest magnitude, movement counts as none: simulators and encoders leave
# that much noise in dimensions that are meant to be constant.
_CONSTANT = 1e-4


@dataclass(frozen=True)
class VectorStatistics:
    """Of one (N, D) stream, per dimension, in float64. `std` is that of the population."""

    count: int
    min: Float64Array
    max: Float64Array
    mean: Float64Array
    std: Float64Array

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Dimensions without movement to speak of."""
        magnitude = np.maximum(np.abs(self.min), np.abs(self.max))
        return self.max - self.min <= np.maximum(_CONSTANT * magnitude, 1e-12)


class RunningStatistics:
    """Min, max, mean and variance of rows that arrive in chunks (Chan's pairwise merge, float64).

    With n_a, mean_a, M_a and a chunk's n_b, mean_b, M_b (M: sum of squared deviations),
    d = mean_b - mean_a:  mean = mean_a + d n_b/n,  M = M_a + M_b + d^2 n_a n_b / n.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._min = np.full(dim, np.inf)
        self._max = np.full(dim, -np.inf)
        self._mean = np.zeros(dim)
        self._squares = np.zeros(dim)

    def add(self, rows: NDArray[np.generic]) -> None:
        """rows (n, D); n may be 0."""
        if len(rows) == 0:
            return
        values = rows.astype(np.float64)
        mean = values.mean(axis=0)
        squares = ((values - mean) ** 2).sum(axis=0)
        total = self.count + len(values)
        shift = mean - self._mean
        self._mean = self._mean + shift * (len(values) / total)
        self._squares = self._squares + squares + shift**2 * (self.count * len(values) / total)
        self._min = np.minimum(self._min, values.min(axis=0))
        self._max = np.maximum(self._max, values.max(axis=0))
        self.count = total

    def result(self, where: str) -> VectorStatistics:
        if self.count == 0:
            raise PrismError(f"{where}: no value at all, so it has no statistics; leave it out")
        std = np.sqrt(self._squares / self.count)
        return VectorStatistics(self.count, self._min, self._max, self._mean, std)


@dataclass(frozen=True)
class Statistics:
    """Of the actions and of every vector sensor, in the dataset's order."""

    actions: VectorStatistics
    vectors: dict[str, VectorStatistics]


def compute_statistics(source: EpisodeSource, episodes: Sequence[int] | None = None) -> Statistics:
    """One streaming pass over the given episodes (all of them by default); pixels are not read.

    Steps at which a sensor was absent do not count for it.
    """
    chosen = range(len(source.lengths)) if episodes is None else episodes
    sizes = {sensor.name: sensor.shape[0] for sensor in source.sensors if sensor.kind == "vector"}
    actions = RunningStatistics(source.action_dim)
    vectors = {name: RunningStatistics(size) for name, size in sizes.items()}
    for episode in chosen:
        length = int(source.lengths[episode])
        for start in range(0, length, _CHUNK):
            part = source.read(int(episode), start, min(start + _CHUNK, length), streams=tuple(sizes))
            actions.add(part.actions)
            for name, running in vectors.items():
                rows = part.streams[name]
                running.add(rows[part.present[name]] if name in part.present else rows)
    return Statistics(
        actions.result(f"{source.path}: actions"),
        {name: running.result(f"{source.path}: sensor '{name}'") for name, running in vectors.items()},
    )


class Normalizer(nn.Module):
    """Robot units <-> normalised values. Buffers only: they travel in the policy's weights file.

    All vector sensors share one buffer, in the order of the sensors, because a buffer's name may not
    hold the dots that sensor names often have.
    """

    action_center: Tensor  # (Da,)
    action_scale: Tensor  # (Da,)
    action_std: Tensor  # (Da,) of the normalised actions; 1 where a dimension never moved
    vector_center: Tensor  # (sum of D,)
    vector_scale: Tensor  # (sum of D,)

    def __init__(self, vector_sizes: dict[str, int], action_dim: int) -> None:
        """The identity, to be filled by `from_statistics` or by loading a state dict."""
        super().__init__()
        ends = np.cumsum([0, *vector_sizes.values()]).tolist()
        self._slices = {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(vector_sizes)}
        for key, size in (("action", action_dim), ("vector", ends[-1])):
            self.register_buffer(f"{key}_center", torch.zeros(size))
            self.register_buffer(f"{key}_scale", torch.ones(size))
        self.register_buffer("action_std", torch.ones(action_dim))

    @staticmethod
    def empty(sensors: Sequence[SensorSpec], action_dim: int) -> Normalizer:
        """The identity with buffers of the right sizes, for loading a saved policy."""
        return Normalizer({s.name: s.shape[0] for s in sensors if s.kind == "vector"}, action_dim)

    @staticmethod
    def from_statistics(stats: Statistics, sensors: Sequence[SensorSpec] | None = None) -> Normalizer:
        """`sensors`: those of the policy, when it uses fewer than the statistics cover."""
        names = list(stats.vectors) if sensors is None else [s.name for s in sensors if s.kind == "vector"]
        if missing := [name for name in names if name not in stats.vectors]:
            raise PrismError(f"no statistics for sensor '{missing[0]}'; the dataset has {', '.join(stats.vectors)}")
        vectors = [stats.vectors[name] for name in names]
        module = Normalizer(
            {name: len(v.mean) for name, v in zip(names, vectors, strict=True)}, len(stats.actions.mean)
        )
        a = stats.actions
        scale = np.where(a.constant, 1.0, (a.max - a.min) / 2)
        module.action_center.copy_(torch.from_numpy((a.max + a.min) / 2))
        module.action_scale.copy_(torch.from_numpy(scale))
        module.action_std.copy_(torch.from_numpy(np.where(a.constant, 1.0, a.std / scale)))
        if vectors:
            module.vector_center.copy_(torch.from_numpy(np.concatenate([v.mean for v in vectors])))
            scales = [np.where(v.constant, 1.0, v.std) for v in vectors]
            module.vector_scale.copy_(torch.from_numpy(np.concatenate(scales)))
        return module

    def normalize_actions(self, actions: Float[Tensor, "*batch Da"]) -> Float[Tensor, "*batch Da"]:
        """Robot units to [-1, 1] (beyond it for actions outside the training range)."""
        return (actions - self.action_center) / self.action_scale

    def unnormalize_actions(self, actions: Float[Tensor, "*batch Da"]) -> Float[Tensor, "*batch Da"]:
        """[-1, 1] back to robot units."""
        return actions * self.action_scale + self.action_center

    def normalize_vector(self, name: str, values: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Sensor units to zero mean and unit variance over the training set."""
        part = self._slices.get(name)
        if part is None:
            raise PrismError(f"sensor '{name}' has no statistics; this policy knows {', '.join(self._slices)}")
        return (values - self.vector_center[part]) / self.vector_scale[part]

    def scale(self, name: str) -> Float[Tensor, " D"]:
        """The standard deviation of a vector sensor over the training set; 1 where it never moved."""
        return self.vector_scale[self._slices[name]]
