"""Whether a robot shows what the policy was trained on: looked at before the first action, and at the rate of a loop.

A planner says of each sensor (info["sensors"]) its shape; of a vector the mean and std of the training data; of an RGB
camera the mean colour of its pictures. Only what can be no chance is said: other units, channels in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FAR = 20.0  # standard deviations, and twice the mean: other units, not another scene
COLOUR = 12.0  # levels of 255 that red and blue of the training pictures must differ by to tell their order
RATE = 1.5  # times the rate of the data, or a 1.5th of it


def unlike(info: Mapping[str, Any], observation: Mapping[str, Any]) -> str:
    """What does not fit, in one line with its remedy; empty: nothing."""
    for sensor in info.get("sensors") or ():
        name, kind = str(sensor["name"]), sensor.get("kind")
        value = np.asarray(observation[name]) if name in observation and kind != "text" else None
        if value is None or value.dtype.kind not in "uif":
            continue
        shape = tuple(sensor["shape"])
        if value.ndim == len(shape) and value.shape != shape:
            sizes = [" x ".join(map(str, one)) for one in (value.shape, shape)]
            return f"sensor '{name}' is {sizes[0]}, the policy's {sizes[1]}: " + (
                "resize it" if len(shape) > 1 else "it is another sensor"
            )
        if value.shape == shape and (problem := _units(sensor, value) or _colours(sensor, value)):
            return f"sensor '{name}': {problem}"
    return ""


def _units(sensor: Mapping[str, Any], value: np.ndarray[Any, Any]) -> str:
    if sensor.get("mean") is None or sensor.get("std") is None:
        return ""
    mean, std = np.array(sensor["mean"], np.float64), np.array(sensor["std"], np.float64)
    if mean.shape != value.shape or not np.isfinite(value).all():
        return ""
    far = np.abs(value - mean) / (FAR * std + 2 * np.abs(mean))
    worst = int(np.argmax(far))
    if far[worst] <= 1:
        return ""
    return (
        f"number {worst} is {value[worst]:.4g}, in training it was {mean[worst]:.4g} with a deviation of "
        f"{std[worst]:.2g}: is it in other units, or in another order?"
    )


def _colours(sensor: Mapping[str, Any], value: np.ndarray[Any, Any]) -> str:
    trained = np.array(sensor.get("colour") or (), np.float64)
    if trained.shape != (3,) or value.shape[-1:] != (3,) or abs(trained[0] - trained[2]) < COLOUR:
        return ""
    seen = value.reshape(-1, 3).astype(np.float64).mean(0)
    as_is, swapped = (float(np.linalg.norm(one - trained)) for one in (seen, seen[::-1]))
    if abs(seen[0] - seen[2]) < COLOUR or as_is < 2 * swapped or (seen[0] > seen[2]) == (trained[0] > trained[2]):
        return ""
    here, there = (", ".join(f"{one:.0f}" for one in colour) for colour in (seen, trained))
    return f"its mean colour is {here}, in training it was {there}: are red and blue swapped (BGR for RGB)?"


def rate_problem(times: Sequence[float], fps: float) -> str:
    """Of a loop whose steps were at `times`, for a policy whose data have `fps` steps a second; empty: it fits."""
    period = float(np.median(np.diff(times)))
    if not fps or period <= 0 or 1 / RATE < period * fps < RATE:
        return ""
    said = f"the loop makes {1 / period:.3g} steps a second, the policy's data have {fps:g}"
    return f"{said}: run it at {fps:g}, or train on data of its own rate"
