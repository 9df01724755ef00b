"""The mean colour of a camera in the training data: on a robot it tells BGR from RGB (prism_client/first_look.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prism.data.episodes import EpisodeSource
from prism.data.inspect import sample_frames
from prism.sensors import SensorSpec

_EPISODES, _EACH = 8, 3  # frames that are looked at


def with_colours(sensors: Sequence[SensorSpec], source: EpisodeSource) -> tuple[SensorSpec, ...]:
    return tuple(replace(spec, colour=_colour(spec, source)) if spec.kind == "rgb" else spec for spec in sensors)


def _colour(spec: SensorSpec, source: EpisodeSource) -> tuple[float, float, float] | None:
    frames = [frame.reshape(-1, 3).mean(0) for *_, frame in sample_frames(source, spec, _EPISODES, _EACH)]
    if not frames:
        return None
    red, green, blue = np.mean(frames, axis=0).round(1).tolist()
    return red, green, blue
