"""App. A: per-key statistics, in one streaming pass, saved with the policy.

Actions are mapped to [-1, 1] by their range, vectors to zero mean and unit variance:

    a~ = (a - (max + min)/2) / ((max - min)/2)        o~ = (o - mean) / max(std, floor)

Noise is not movement: dividing by it would amplify it. Units are SI or nearly (metres, radians, newtons, [-1, 1]).

| what                | rule                                                                                   |
| ------------------- | -------------------------------------------------------------------------------------- |
| constant            | range <= 1e-4 of the largest magnitude: what encoders and simulators leave (0.1 %o)     |
| constant vector     | only centred: the divisor is 1                                                         |
| other vectors       | floor: 1/100 of the sensor's largest std, at least 1e-4 and at most 1e-3, and range/100 |
| constant action     | also where range <= 1e-4 of the median range, at least 1e-5 and at most 1e-4           |
|                     | normalised to 0, predicted exactly as its middle, without weight in the loss;          |
|                     | actions that are all constant are refused                                              |
| quaternions         | of the actions: one sign (see `one_sign`), unit norm after prediction                  |

So a dimension that moves by more than 1e-3 keeps its own statistics, and a reading 1 mm beside a dimension that was
noise is 1 to 10 standard deviations off, not 1000. No input is farther than LIMIT from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from prism.errors import PrismError
from prism.sensors import SensorSpec, action_spec_of

if TYPE_CHECKING:
    from prism.data.episodes import EpisodeSource

Float64Array = NDArray[np.float64]
_CHUNK = 8192  # steps read together: bounds the memory of the pass
_CONSTANT = 1e-4  # of the largest magnitude, or of the median range: movement below it counts as none
LIMIT = 100.0  # of normalised inputs: training data stay within it, a wild reading at run time too


@dataclass(frozen=True)
class VectorStatistics:
    """Statistics of one (N, D) stream, per dimension, in float64. `std` is that of the population."""

    count: int
    min: Float64Array
    max: Float64Array
    mean: Float64Array
    std: Float64Array

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Dimensions without movement to speak of, whatever the unit."""
        magnitude = np.maximum(np.abs(self.min), np.abs(self.max))
        return self.max - self.min <= np.maximum(_CONSTANT * magnitude, 1e-12)

    @property
    def idle(self) -> NDArray[np.bool_]:
        """For actions: dimensions without commands, constant or noise compared with the others."""
        span = self.max - self.min
        return self.constant | (span <= np.clip(_CONSTANT * np.median(span), 1e-5, 1e-4))

    @property
    def divisor(self) -> Float64Array:
        """For inputs: the divisor of deviations from the mean."""
        floor = np.clip(self.std[~self.constant].max(initial=0.0) / 100, 1e-4, 1e-3)
        floor = np.maximum(floor, (self.max - self.min) / LIMIT)
        return np.where(self.constant, 1.0, np.maximum(self.std, floor))


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
    """Statistics of the actions and of every vector sensor, in the dataset's order."""

    actions: VectorStatistics
    vectors: dict[str, VectorStatistics]
    quaternions: tuple[int, ...] = ()  # first dimensions of the quaternions among the actions
    references: Float64Array = field(default_factory=lambda: np.empty((0, 4)))  # (n, 4) the mean of each


def compute_statistics(source: EpisodeSource, episodes: Sequence[int] | None = None) -> Statistics:
    """One streaming pass over the given episodes (all of them by default); pixels are not read.

    Steps at which a sensor was absent do not count for it. Quaternions among the actions take a pass before, for their
    mean: their sign is chosen by it.
    """
    chosen = range(len(source.lengths)) if episodes is None else episodes
    sizes = {sensor.name: sensor.shape[0] for sensor in source.sensors if sensor.kind == "vector"}
    actions = RunningStatistics(source.action_dim)
    vectors = {name: RunningStatistics(size) for name, size in sizes.items()}
    quaternions = action_spec_of(source).quaternions
    references = mean_quaternions(source, chosen, quaternions)
    for episode in chosen:
        length = int(source.lengths[episode])
        for start in range(0, length, _CHUNK):
            part = source.read(int(episode), start, min(start + _CHUNK, length), streams=tuple(sizes))
            signed = one_sign(torch.from_numpy(part.actions), quaternions, torch.from_numpy(references))
            actions.add(signed.numpy())
            for name, running in vectors.items():
                rows = part.streams[name]
                running.add(rows[part.present[name]] if name in part.present else rows)
    commands = actions.result(f"{source.path}: actions")
    if commands.idle.all():
        raise PrismError(
            f"{source.path}: no entry of the actions ever moves, so there is nothing to learn: are they the right ones "
            "(--map KEY=action), and in units near SI (--map KEY=action:vector:SCALE)?"
        )
    return Statistics(
        commands,
        {name: running.result(f"{source.path}: sensor '{name}'") for name, running in vectors.items()},
        quaternions,
        references,
    )


# --------------------------------------------------------------------------- quaternions
# q and -q are one rotation. A sequence of actions has one of the two signs: its first quaternion is on the side of the
# mean of the training data (q . mean >= 0), each later one on the side of the one before it.


def mean_quaternions(source: EpisodeSource, episodes: Sequence[int], quaternions: Sequence[int]) -> Float64Array:
    """(n, 4): of each quaternion the mean rotation, the first eigenvector of sum q q^T, which has no sign to choose.

    PrismError if the numbers are not unit quaternions.
    """
    moments = np.zeros((len(quaternions), 4, 4))
    for episode in episodes if quaternions else ():
        rows = source.read(int(episode), streams=()).actions.astype(np.float64)
        for moment, first in zip(moments, quaternions, strict=True):
            q = rows[:, first : first + 4]
            norm = np.linalg.norm(q, axis=1)
            if (np.abs(norm - 1) > 0.1).any():
                step = int(np.argmax(np.abs(norm - 1) > 0.1))
                raise PrismError(
                    f"{source.path}: episode {episode}, step {step}: dimensions {first}:{first + 4} of the action have "
                    f"norm {norm[step]:.3g}, not a unit quaternion; if these values are not a "
                    "rotation: --sensor action.quaternions="
                )
            moment += q.T @ q
    means = np.linalg.eigh(moments)[1][:, :, -1] if len(moments) else np.empty((0, 4))
    largest = np.take_along_axis(means, np.abs(means).argmax(1)[:, None], 1) if len(means) else np.empty((0, 1))
    return means * np.where(largest < 0, -1.0, 1.0)


def one_sign(
    actions: Float[Tensor, "*batch T Da"], quaternions: Sequence[int], references: Tensor
) -> Float[Tensor, "*batch T Da"]:
    """Every quaternion (references (n, 4) or (*batch, n, 4)) with the sign that belongs to its sequence."""
    parts = []
    for i, first in enumerate(quaternions):
        q = actions[..., first : first + 4]
        before = torch.cat([references[..., None, i, :].expand_as(q[..., :1, :]).to(q), q[..., :-1, :]], dim=-2)
        turned = torch.where((q * before).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        parts.append((first, q * turned.cumprod(-2)))
    return _replaced(actions, parts)


def unit_norm(actions: Float[Tensor, "*batch Da"], quaternions: Sequence[int]) -> Float[Tensor, "*batch Da"]:
    """Every quaternion divided by its norm."""
    q = [(first, actions[..., first : first + 4]) for first in quaternions]
    return _replaced(actions, [(first, part / part.norm(dim=-1, keepdim=True).clamp(min=1e-6)) for first, part in q])


def _replaced(actions: Tensor, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    if not parts:
        return actions
    actions = actions.clone()
    for first, values in parts:
        actions[..., first : first + 4] = values
    return actions


class Normalizer(nn.Module):
    """Robot units <-> normalised values. Buffers only: they travel in the policy's weights file.

    All vector sensors share one buffer, in the order of the sensors, because a buffer's name may not
    hold the dots that sensor names often have.
    """

    action_center: Tensor  # (Da,)
    action_scale: Tensor  # (Da,)
    action_std: Tensor  # (Da,) of the normalised actions; 0 where a dimension is constant
    vector_center: Tensor  # (sum of D,)
    vector_scale: Tensor  # (sum of D,)
    quaternion_reference: Tensor  # (n, 4)

    def __init__(self, vector_sizes: dict[str, int], action_dim: int, quaternions: Sequence[int] = ()) -> None:
        """The identity, to be filled by `from_statistics` or by loading a state dict."""
        super().__init__()
        ends = np.cumsum([0, *vector_sizes.values()]).tolist()
        self._slices = {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(vector_sizes)}
        for key, size in (("action", action_dim), ("vector", ends[-1])):
            self.register_buffer(f"{key}_center", torch.zeros(size))
            self.register_buffer(f"{key}_scale", torch.ones(size))
        self.register_buffer("action_std", torch.ones(action_dim))
        self.quaternions = tuple(quaternions)
        # Not in the weights of a policy without quaternions: those have no such entry.
        reference = torch.full((len(self.quaternions), 4), 0.5)
        self.register_buffer("quaternion_reference", reference, persistent=bool(self.quaternions))

    @staticmethod
    def empty(sensors: Sequence[SensorSpec], action_dim: int, quaternions: Sequence[int] = ()) -> Normalizer:
        """The identity with buffers of the right sizes, for loading a saved policy."""
        sizes = {s.name: s.shape[0] for s in sensors if s.kind == "vector"}
        return Normalizer(sizes, action_dim, quaternions)

    @staticmethod
    def from_statistics(stats: Statistics, sensors: Sequence[SensorSpec] | None = None) -> Normalizer:
        """`sensors`: those of the policy, when it uses fewer than the statistics cover."""
        names = list(stats.vectors) if sensors is None else [s.name for s in sensors if s.kind == "vector"]
        if missing := [name for name in names if name not in stats.vectors]:
            raise PrismError(f"no statistics for sensor '{missing[0]}'; the dataset has {', '.join(stats.vectors)}")
        vectors = {name: stats.vectors[name] for name in names}
        a, sizes = stats.actions, {name: len(v.mean) for name, v in vectors.items()}
        module = Normalizer(sizes, len(a.mean), stats.quaternions)
        scale = np.where(a.idle, 1.0, (a.max - a.min) / 2)
        module.action_center.copy_(torch.from_numpy((a.max + a.min) / 2))
        module.action_scale.copy_(torch.from_numpy(scale))
        module.action_std.copy_(torch.from_numpy(np.where(a.idle, 0.0, a.std / scale)))
        if vectors:
            module.vector_center.copy_(torch.from_numpy(np.concatenate([v.mean for v in vectors.values()])))
            module.vector_scale.copy_(torch.from_numpy(np.concatenate([v.divisor for v in vectors.values()])))
        module.quaternion_reference.copy_(torch.from_numpy(stats.references))
        return module

    @property
    def action_moves(self) -> Float[Tensor, " Da"]:
        """1 where an action dimension moves, 0 where it is constant: its weight in a loss."""
        return (self.action_std > 0).to(self.action_scale.dtype)

    def normalize_actions(self, actions: Float[Tensor, "*batch T Da"]) -> Float[Tensor, "*batch T Da"]:
        """Robot units to [-1, 1], and beyond outside the training range; the axis before the last is time."""
        if self.quaternions:
            actions = one_sign(actions, self.quaternions, self.quaternion_reference)
        return (actions - self.action_center) / self.action_scale * self.action_moves

    def unnormalize_actions(self, actions: Float[Tensor, "*batch T Da"]) -> Float[Tensor, "*batch T Da"]:
        """[-1, 1] back to robot units."""
        actions = actions * (self.action_scale * self.action_moves) + self.action_center
        if self.quaternions:
            actions = unit_norm(actions, self.quaternions)
            actions = one_sign(actions, self.quaternions, self.quaternion_reference)
        return actions

    def normalize_vector(self, name: str, values: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Sensor units to zero mean and unit variance over the training set."""
        part = self._slices.get(name)
        if part is None:
            raise PrismError(f"sensor '{name}' has no statistics; this policy knows {', '.join(self._slices)}")
        return ((values - self.vector_center[part]) / self.vector_scale[part]).clamp(-LIMIT, LIMIT)

    def center(self, name: str) -> Float[Tensor, " D"]:
        """The mean of a vector sensor over the training set."""
        return self.vector_center[self._slices[name]]

    def scale(self, name: str) -> Float[Tensor, " D"]:
        """The standard deviation of a vector sensor over the training set, or its floor; 1 where it is constant."""
        return self.vector_scale[self._slices[name]]
