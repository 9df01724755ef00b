"""`prism train --robust`: trained for sensors that fail, and told what a healthy reading looks like.

Limits of health (SensorSpec.limits) from the training data, wide: a policy should not lose a sensor because a scene is
a little brighter or a thing a little farther than it was shown.

| sensor       | lowest .. highest that is believed                                                       |
| ------------ | ---------------------------------------------------------------------------------------- |
| vector       | its smallest and largest value, and once the distance between them beyond each            |
| rgb, tactile | of the mean: halfway from the darkest frame to black, and from the brightest to white     |
| depth        | of the mean of what was measured: half the smallest, twice the largest                    |
| audio, text  | none                                                                                     |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prism.data.episodes import EpisodeSource
from prism.normalize import Statistics
from prism.sensors import SensorSpec

# Chosen to cover what docs/reference/sensors.md lists as faults, each often enough to be learned from thousands of
# windows and so seldom that most windows are as the robot sees them.
ROBUST = (
    "policy.encoder.dropout=0.1",
    "train.robust.step_dropout=0.05",
    "train.robust.span_dropout=0.1",
    "train.robust.frozen=0.05",
    "train.robust.occlusion=0.1",
    "train.robust.noise=0.1",
    "train.robust.limits=true",
)
_FRAMES = 200  # of each camera, evenly over the training data


def health_limits(
    sensors: Sequence[SensorSpec], source: EpisodeSource, episodes: Sequence[int], statistics: Statistics
) -> tuple[SensorSpec, ...]:
    """The sensors with limits from these episodes; those that have some keep them."""
    means = _means(source, episodes, [s for s in sensors if s.is_image and s.limits is None])
    found = []
    for spec in sensors:
        limits = None
        if spec.kind == "vector" and spec.name in statistics.vectors:
            own = statistics.vectors[spec.name]
            low, high = float(own.min.min()), float(own.max.max())
            room = max(high - low, 1e-3)
            limits = low - room, high + room
        elif len(seen := means.get(spec.name, [])):
            low, high = min(seen), max(seen)
            limits = (low / 2, 2 * high) if spec.kind == "depth" else (low / 2, (high + 255) / 2)
        usable = limits is not None and spec.limits is None and limits[0] < limits[1]
        found.append(replace(spec, limits=limits) if usable else spec)
    return tuple(found)


def _means(source: EpisodeSource, episodes: Sequence[int], cameras: Sequence[SensorSpec]) -> dict[str, list[float]]:
    """Of each camera the means of some frames in which it was there; depth: of what was measured."""
    found: dict[str, list[float]] = {spec.name: [] for spec in cameras}
    ends = np.cumsum(source.lengths[list(episodes)])
    for at in np.unique(np.linspace(0, ends[-1] - 1, _FRAMES).astype(int)) if cameras else ():
        number = int(np.searchsorted(ends, at, side="right"))
        episode = int(episodes[number])
        step = int(at - ends[number] + source.lengths[episode])
        part = source.read(episode, step, step + 1, streams=list(found))
        for spec in cameras:
            frame = part.streams[spec.name][0].astype(np.float64)
            if spec.kind == "depth":
                frame = frame[np.isfinite(frame) & (frame > 0)]
            if frame.size and (spec.name not in part.present or part.present[spec.name][0]):
                found[spec.name].append(float(frame.mean()))
    return found
