"""Nothing between two plans is lost: one time step of touch or sound holds the readings of several.

    plan at        t-8                              t                exec_horizon 8, obs_horizon 2
    images                                    o[t-1] o[t]            the window: what lies between is never seen
    touch, sound   r[t-8] r[t-7] ... r[t-1] | r[t-7] ... r[t]        history 8: two time steps of eight readings each

A time step of a sensor with a history is the stack (history, *shape) of its latest readings, the newest last. It is
made where readings arrive (Windows, Controller); all that knows time steps (encoders, token cache, server, ONNX graphs)
takes it as one. At the start of an episode the first reading fills it. A stack is present where any of its readings is;
one that is missing is filled with the one before, or at the beginning with the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from prism.data.episodes import Array, BoolArray
from prism.sensors import SensorSpec

_PICTURES = 2**17  # bytes of a stack of tactile images: eight of 64 x 64 x 3
_TOUCH = {"tactile", "touch", "force", "forces", "torque", "wrench", "ft", "contact"}  # words in the name of a vector


def feels_events(spec: SensorSpec) -> bool:
    """Whether what it reads may be over before the next plan: sound, touch, force."""
    words = set(re.split(r"[^a-z]+", spec.name.lower()))
    return spec.kind in ("audio", "tactile") or (spec.kind == "vector" and bool(words & _TOUCH))


def with_history(
    sensors: Sequence[SensorSpec], obs_horizon: int, exec_horizon: int, steps: int = 0
) -> tuple[SensorSpec, ...]:
    """Sensors of events that say no history get one: `steps`, or (0) so long that every step reaches a plan. Large
    tactile images do not: a training would read and hold that many of them for each one."""
    needed = steps or (exec_horizon if exec_horizon > obs_horizon else 1)
    wanted = [s for s in sensors if feels_events(s) and s.history == 0 and not (s.is_image and _big(s, needed))]
    return tuple(replace(spec, history=needed) if needed > 1 and spec in wanted else spec for spec in sensors)


def _big(spec: SensorSpec, steps: int) -> bool:
    return steps * math.prod(spec.shape) > _PICTURES


def unseen(sensors: Iterable[SensorSpec], obs_horizon: int, exec_horizon: int) -> list[str]:
    """Sensors of events of which steps between two plans reach none of them."""
    return [s.name for s in sensors if feels_events(s) and obs_horizon + s.steps - 1 < exec_horizon]


def memory(sensors: Iterable[SensorSpec], obs_horizon: int) -> int:
    """Readings that a plan is made from: of the sensor with the longest history."""
    return obs_horizon + max((spec.steps for spec in sensors), default=1) - 1


def stacked(values: Array, present: BoolArray) -> tuple[Array, BoolArray]:
    """Stacks (..., H, *shape) with their holes filled, and whether there is anything in them, from (..., H)."""
    there: BoolArray = np.asarray(present.any(-1))
    if present.all():
        return values, there
    steps = np.arange(present.shape[-1])
    before = np.maximum.accumulate(np.where(present, steps, -1), axis=-1)  # the latest reading until here
    fill = np.where(before >= 0, before, present.argmax(-1)[..., None])
    fill = fill.reshape(*fill.shape, *[1] * (values.ndim - fill.ndim))
    return np.take_along_axis(values, fill, axis=present.ndim - 1), there
