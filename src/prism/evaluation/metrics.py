"""The numbers we report. docs/reference/metrics.md defines each in words; these are the definitions in code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_Z95 = 1.959963984540054  # 97.5 % point of the standard normal
_BOOTSTRAP_SEED = 20251115  # fixed, so that the same episodes always give the same interval
_TABLE_SEED = 20251116
_BOOTSTRAP_DRAWS = 10_000


def jerk(actions: NDArray[np.floating], scale: NDArray[np.floating]) -> float:
    """Mean Euclidean norm of the third finite difference of the executed actions (T, Da), in scaled units.

        J = 1/(T-3) sum_t || (a_{t+3} - 3 a_{t+2} + 3 a_{t+1} - a_t) / scale ||_2

    per control step (no division by dt^3), scale (Da,) = half the range of the demonstrations' actions.
    Episodes of fewer than four actions have no third difference: their jerk is 0.
    """
    return mean(jerks(actions, scale))


def physical_jerk(actions: NDArray[np.floating], fps: float) -> float:
    """The same without scaling and divided by dt^3 = fps^-3: robot units of the command per second cubed."""
    return mean(jerks(actions)) * fps**3


def jerks(actions: NDArray[np.floating], scale: NDArray[np.floating] | float = 1.0) -> FloatArray:
    """(T-3,) the norms that `jerk` is the mean of."""
    if len(actions) < 4:
        return np.zeros(0)
    scaled = np.asarray(actions, dtype=np.float64) / np.asarray(scale, dtype=np.float64)
    return np.asarray(np.linalg.norm(np.diff(scaled, n=3, axis=0), axis=1))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion: honest at 0, at 1 and for few trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, _Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    low = 0.0 if successes == 0 else centre - half  # exactly 0 and 1 there; rounding would miss them
    return low, 1.0 if successes == trials else centre + half


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over episodes, 10,000 resamples with a fixed seed."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 0:
        return 0.0, 0.0
    rng = np.random.default_rng(_BOOTSTRAP_SEED)
    means = data[rng.integers(len(data), size=(_BOOTSTRAP_DRAWS, len(data)))].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear-interpolation percentile, q in [0, 100]; 0 for no values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else 0.0


def mean(values: Sequence[float] | FloatArray) -> float:
    return float(np.mean(np.asarray(values, dtype=np.float64))) if len(values) else 0.0


# Tables of training seeds x episodes. Every contestant is trained on the same seeds and meets the same episodes
# (environment seeds), so values form a table x[s, e] and two contestants differ cell by cell. The bootstrap draws seeds
# and, independently, episodes with replacement (crossed): both sources of chance count. With n seeds the spread between
# seeds is underestimated by about sqrt((n - 1) / n); for one seed the interval is over episodes alone.


@dataclass(frozen=True)
class Difference:
    """Difference of two contestants on their common trials: mean, 95 % interval, two-sided p."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    episodes: int


def bootstrap_means(table: FloatArray) -> FloatArray:
    """(_BOOTSTRAP_DRAWS,) means of the table (S, E), rows and columns drawn with replacement."""
    rng = np.random.default_rng(_TABLE_SEED)
    seeds, episodes = table.shape
    rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=_BOOTSTRAP_DRAWS) / seeds
    columns = rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=_BOOTSTRAP_DRAWS) / episodes
    means: FloatArray = np.einsum("ds,se,de->d", rows, table, columns, optimize=True)
    return means


def interval(table: FloatArray) -> tuple[float, float]:
    """95 % interval of the mean."""
    low, high = np.quantile(bootstrap_means(table), [0.025, 0.975])
    return float(low), float(high)


def success_interval(table: FloatArray) -> tuple[float, float]:
    """The same in [0, 1]; Wilson's over the episodes where all are 0 or all 1: the bootstrap would claim certainty."""
    wins = table.mean()
    if wins in (0.0, 1.0):
        return wilson_interval(round(wins * table.shape[1]), table.shape[1])
    low, high = interval(table)
    return max(low, 0.0), min(high, 1.0)  # a mean may be 1 + 2e-16


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the i-th smallest of m, times m - i + 1, never smaller than the one before, at most 1.

    Rejecting all that are below 5 % keeps the chance of any false claim of the family at 5 %.
    """
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, (len(values) - rank) * values[at])
        adjusted[at] = min(largest, 1.0)
    return adjusted


def paired(one: FloatArray, other: FloatArray) -> Difference:
    """one - other, (S, E) each, the same seeds and episodes in both.

    p = 2 min(P(mean* <= 0), P(mean* >= 0)) over the bootstrap: the smallest two-sided level whose interval excludes
    0. Not below 2 / (draws + 1), nor below 2^(1 - E): E pairs that all point one way would do that by chance.
    """
    table = one - other
    means = bootstrap_means(table)
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, max(2 * (tail + 1) / (_BOOTSTRAP_DRAWS + 1), 2.0 ** (1 - table.shape[1])))
    return Difference(float(table.mean()), float(low), float(high), p, *table.shape)
