"""Timing on a machine that does other things too: contestants take turns, and ratios are of neighbours in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Seconds a call, one entry a round. `cpu` does not count the time that other processes held the core."""

    wall: FloatArray
    cpu: FloatArray

    def summary(self) -> dict[str, float]:
        """Milliseconds of wall clock, and the median of CPU time."""
        return {
            "median": 1e3 * float(np.median(self.wall)),
            "p99": 1e3 * float(np.quantile(self.wall, 0.99)),
            "cpu_median": 1e3 * float(np.median(self.cpu)),
        }


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rng: np.random.Generator,
    seconds: float,
    min_rounds: int = 9,
    max_rounds: int = 300,
    min_sample_seconds: float = 1e-3,
) -> dict[str, Times]:
    """Time every call once a round, in a new random order each round.

    Lasts about `seconds` of CPU time (a busy machine makes it longer, not coarser) and at least `min_rounds`. The CPU
    time is the whole process's, so that it covers torch's worker threads. Short calls are repeated until a sample
    lasts `min_sample_seconds`, after one call that is not timed: it brings back the caches. Calls within a factor of
    two of the fastest are repeated equally often, so that close contests are fair.
    """
    lasts = {}
    for name, call in calls.items():
        call()  # the first one allocates
        lasts[name] = math.inf
        for _ in range(3):
            begin = time.perf_counter()
            call()
            lasts[name] = min(lasts[name], max(time.perf_counter() - begin, 1e-7))
    shortest = min(lasts.values())
    repeats = {
        name: max(1, round(min_sample_seconds / (shortest if last < 2 * shortest else last)))
        for name, last in lasts.items()
    }
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    start = time.process_time()
    for done in range(max_rounds):
        if done >= min_rounds and time.process_time() - start > seconds:
            break
        for i in rng.permutation(len(names)):
            name = names[i]
            call, count = calls[name], repeats[name]
            if count > 1:
                call()
            cpu_begin, begin = time.process_time(), time.perf_counter()
            for _ in range(count):
                call()
            wall[name].append((time.perf_counter() - begin) / count)
            cpu[name].append((time.process_time() - cpu_begin) / count)
    return {name: Times(np.array(wall[name]), np.array(cpu[name])) for name in names}


def paired_ratio(numerator: FloatArray, denominator: FloatArray) -> float:
    """Median over rounds of the ratio within a round: slow spells of the machine hit both and cancel."""
    return float(np.median(numerator / denominator))


def ratio_interval(
    numerator: FloatArray, denominator: FloatArray, rng: np.random.Generator, draws: int = 1000
) -> list[float]:
    """95 % bootstrap interval of `paired_ratio`."""
    ratios = numerator / denominator
    medians = np.median(ratios[rng.integers(len(ratios), size=(draws, len(ratios)))], axis=1)
    return [float(x) for x in np.quantile(medians, [0.025, 0.975])]
