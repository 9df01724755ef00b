"""Means of a table training seeds x episodes, their intervals, and the paired test.

Every contestant is trained on the same seeds and meets the same episodes (environment seeds), so values form a table
x[s, e] and two contestants differ cell by cell. The bootstrap draws seeds and, independently, episodes with
replacement (crossed): both sources of chance count. With n seeds the spread between seeds is underestimated by about
sqrt((n - 1) / n); for one seed the interval is over episodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.rollout import metrics

FloatArray = NDArray[np.float64]

DRAWS = 10_000
_SEED = 20251116  # fixed: the same results always give the same intervals


@dataclass(frozen=True)
class Difference:
    """Of two contestants, on what both have: mean, 95 % interval, two-sided p."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    episodes: int


def bootstrap_means(table: FloatArray) -> FloatArray:
    """(DRAWS,) means of the table (S, E), rows and columns drawn with replacement."""
    rng = np.random.default_rng(_SEED)
    seeds, episodes = table.shape
    rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds
    columns = rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=DRAWS) / episodes
    means: FloatArray = np.einsum("ds,se,de->d", rows, table, columns, optimize=True)
    return means


def interval(table: FloatArray) -> tuple[float, float]:
    """95 % interval of the mean."""
    low, high = np.quantile(bootstrap_means(table), [0.025, 0.975])
    return float(low), float(high)


def success_interval(table: FloatArray) -> tuple[float, float]:
    """The same for successes; where all are equal, Wilson's over the episodes (the bootstrap would claim certainty)."""
    wins = table.mean()
    if wins in (0.0, 1.0):
        return metrics.wilson_interval(round(wins * table.shape[1]), table.shape[1])
    return interval(table)


def paired(one: FloatArray, other: FloatArray) -> Difference:
    """one - other, (S, E) each, the same seeds and episodes in both.

    p = 2 min(P(mean* <= 0), P(mean* >= 0)) over the bootstrap: the smallest two-sided level whose interval excludes
    0. Not below 2 / (DRAWS + 1), nor below 2^(1 - E): E pairs that all point one way would do that by chance.
    """
    table = one - other
    means = bootstrap_means(table)
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, max(2 * (tail + 1) / (DRAWS + 1), 2.0 ** (1 - table.shape[1])))
    return Difference(float(table.mean()), float(low), float(high), p, *table.shape)
