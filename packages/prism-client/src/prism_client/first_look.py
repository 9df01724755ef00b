"""Whether a robot shows what the policy was trained on: looked at before the first action, and at the rate of a loop.

A planner says of each sensor (SensorInfo) its shape and `seen`, what the training data showed; of a vector also
mean and std. Policies from before `seen` tell the mean colour of a camera, or nothing. What `look` compares:

| sensor | refused                                                     | a warning                              |
| ------ | ----------------------------------------------------------- | -------------------------------------- |
| any    | another size                                                |                                        |
| vector | other units, by how far it is off and by the factor that    | the same by one number alone           |
|        | explains it; a rotation of another norm or order            |                                        |
| rgb    | black; red and blue swapped; the picture of another camera  | much darker or brighter than any frame |
| depth  | nothing measured; ten times nearer or farther than any frame | three times                            |
| audio  | integers, or samples beyond 1                               | much louder, silent, another spectrum  |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from prism_client.messages import SensorInfo

FAR = 20.0  # standard deviations, and twice the mean: other units, not another scene
COLOUR = 12.0  # levels of 255 that red and blue of the training pictures must differ by to tell their order
PATTERN = 3.0  # levels by which red minus blue must vary over the picture, to tell it by where it is
TAIL = 24.0  # levels by which the reddest and the bluest pixels must differ, to tell it by them
GRID = 8  # cells of a picture in each direction
FINE = 120  # pixels of a picture's longer side that are looked at, about
BANDS = 8  # of a spectrum
RATE = 1.5  # times the rate of the data, or a 1.5th of it
RATE_STEPS = 10  # that a rate is measured over
UNITS = (
    (57.29578, "degrees, where training had radians"),
    (1 / 57.29578, "radians, where training had degrees"),
    (1000.0, "millimetres, where training had metres"),
    (0.001, "metres, where training had millimetres"),
)
ANYWAY = "if this is correct: --trust-sensors, in Python look=False"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Look:
    wrong: str = ""  # a line with its remedy: nothing may move; empty: no such thing
    doubts: tuple[str, ...] = ()  # worth a warning, where nothing is wrong


def look(sensors: Iterable[SensorInfo], observation: Mapping[str, Any]) -> Look:
    """Of the first observation. A sensor that is missing is not looked at; only what can be no chance is wrong."""
    fitting: dict[str, tuple[SensorInfo, Array]] = {}
    doubts: list[str] = []
    for sensor in sensors:
        name, kind = sensor.name, sensor.kind
        given = observation.get(name)
        value = np.asarray(given) if given is not None and kind != "text" else None
        if value is None or value.dtype.kind not in "uif":
            continue
        shape = sensor.shape
        if value.ndim == len(shape) and value.shape != shape:
            sizes = [" x ".join(map(str, one)) for one in (value.shape, shape)]
            remedy = "resize it" if len(shape) > 1 else "it is another sensor"
            return Look(f"sensor '{name}' is {sizes[0]}, the policy's {sizes[1]}: {remedy}")
        if value.shape != shape:
            continue
        if kind in ("rgb", "depth"):  # a server looks beside other robots' plans: it may not take long
            stride = max(1, max(shape[:2]) // FINE)
            value = value[::stride, ::stride]
        for wrong, problem in _CHECKS.get(kind, _no_check)(sensor, value):
            if wrong:
                return Look(f"sensor '{name}': {problem} ({ANYWAY})")
            doubts.append(f"sensor '{name}': {problem}")
        fitting[name] = sensor, value
    swapped = _exchanged(fitting)
    return Look(f"{swapped} ({ANYWAY})") if swapped else Look("", tuple(doubts))


Found = Iterator[tuple[bool, str]]  # is it wrong, or a doubt; what it is


def _no_check(sensor: SensorInfo, value: Array) -> Found:
    return iter(())


# ---------------------------------------------------------------------------- vectors


def _vector(sensor: SensorInfo, value: Array) -> Found:
    value = value.astype(np.float64)
    if not np.isfinite(value).all():
        return
    seen = sensor.seen
    rotations = seen.get("quaternions") or ()
    for rotation in rotations:
        yield from _rotation(rotation, value)
    if seen.get("low") is not None:
        moved, low, high = value.copy(), np.array(seen["low"], np.float64), np.array(seen["high"], np.float64)
        if low.shape == value.shape:
            for rotation in rotations:  # judged above
                part = slice(int(rotation["first"]), int(rotation["first"]) + 4)
                moved[part], low[part], high[part] = 0.0, 0.0, 0.0
            yield from _units(moved, low, high)
    if sensor.mean and sensor.std:
        mean, std = np.array(sensor.mean, np.float64), np.array(sensor.std, np.float64)
        if mean.shape == std.shape == value.shape:
            far = np.abs(value - mean) / (FAR * std + 2 * np.abs(mean))
            worst = int(np.argmax(far))
            if far[worst] > 1:
                here = f"number {worst} is {value[worst]:.4g}, in training it was {mean[worst]:.4g}"
                said = f"{here} with a deviation of {std[worst]:.2g}"
                yield True, f"{said}: is it in other units, or in another order?"


def _units(value: Array, low: Array, high: Array) -> Found:
    """Numbers that left the demonstrated range by more than its width, and are back in it in another unit."""
    room = np.maximum(high - low, 0.1 * np.ptp(np.stack([low, high]), axis=0).max(initial=0.0))

    def beyond(numbers: Array) -> Array:
        far: Array = np.maximum(np.maximum(low - numbers, numbers - high), 0) / np.maximum(room, 1e-12)
        return far

    moves = high > low
    far = np.where(moves, beyond(value), 0.0)
    out = far > 1
    if not out.any():
        return
    worst = int(np.argmax(far))
    here = f"number {worst} is {value[worst]:.4g}, in training it was {low[worst]:.4g} to {high[worst]:.4g}"
    for factor, words in UNITS:
        if (beyond(value / factor)[out] <= 0.1).all():
            yield bool(out.sum() > 1 or far[worst] > 3), f"{here}: is it in {words}?"
            return
    if far[worst] > 10:
        yield False, f"{here}: is it the same sensor?"


def _rotation(rotation: Mapping[str, Any], value: Array) -> Found:
    first, mean, least = int(rotation["first"]), np.array(rotation["mean"], np.float64), float(rotation["least"])
    q = value[first : first + 4]
    which, norm = f"numbers {first} to {first + 3}", float(np.linalg.norm(q))
    if abs(norm - 1) > 0.1:
        yield True, f"{which} have norm {norm:.3g}, in training they were a unit quaternion: are these other angles?"
        return
    as_is = abs(float(q @ mean))
    for turn, words in ((1, "x y z w, where training had w x y z"), (-1, "w x y z, where training had x y z w")):
        turned = abs(float(np.roll(q, turn) @ mean))
        if as_is < least - 0.05 and turned > least - 0.02 and turned > as_is + 0.1:
            yield True, f"the rotation in {which} is unlike any in training: is it {words}?"
            return


# ---------------------------------------------------------------------------- pictures


def cells(picture: Array) -> Array:
    """(H, W, C) -> (GRID * GRID, C): the mean of each cell, NaN where nothing in it is finite."""
    height, width = picture.shape[:2]
    found = np.full((GRID * GRID, picture.shape[2]), np.nan)
    for cell in range(GRID * GRID):
        y, x = divmod(cell, GRID)
        rows = slice(y * height // GRID, -(-(y + 1) * height // GRID))
        part = picture[rows, x * width // GRID : -(-(x + 1) * width // GRID)].reshape(-1, picture.shape[2])
        if part.dtype.kind in "ui":
            found[cell] = part.mean(axis=0)
        elif np.isfinite(part).any():
            found[cell] = np.nanmean(part, axis=0)
    return found


def tail(picture: Array) -> float:
    """How much farther the reddest pixels are from the middle than the bluest, in levels; white balance cancels out."""
    warm = picture[..., 0].astype(np.float64) - picture[..., 2]
    low, middle, high = np.quantile(warm, (0.01, 0.5, 0.99))
    return float(high + low - 2 * middle)


def _rgb(sensor: SensorInfo, value: Array) -> Found:
    if value.dtype != np.uint8:
        yield True, f"pixels are uint8, 0 to 255, these are {value.dtype}"
        return
    seen = sensor.seen
    mean = float(value.mean())
    if seen.get("grid"):
        grid = np.array(seen["grid"], np.float64).reshape(-1, 3)
        dark, bright = (float(one) for one in seen["bright"])
        if mean < 3 < dark / 4 or (value.std() < 1 and float(grid.std(0).max()) > 4):
            said = "black" if mean < 3 else "of one colour"
            yield True, f"the picture is {said}, in training its mean was {dark:.0f} to {bright:.0f}: is the lens free?"
            return
        if mean < dark / 2 or 255 - mean < (255 - bright) / 2:
            yield False, f"the picture's mean is {mean:.0f}, in training it was {dark:.0f} to {bright:.0f}: the light?"
        colour = grid.mean(0)
        swapped = _swapped_colours(value, seen, grid)
    else:
        colour = np.array(sensor.colour, np.float64)
        swapped = False
    if colour.shape != (3,) or value.shape[-1:] != (3,):
        return
    here = value.reshape(-1, 3).astype(np.float64).mean(0)
    as_is, other = (float(np.linalg.norm(one - colour)) for one in (here, here[::-1]))
    tells = min(abs(colour[0] - colour[2]), abs(here[0] - here[2])) >= COLOUR and as_is >= 2 * other
    if swapped or (tells and (here[0] > here[2]) != (colour[0] > colour[2])):
        said, there = (", ".join(f"{one:.0f}" for one in each) for each in (here, colour))
        what = "what was red is blue" if swapped else f"its mean colour is {said}, in training it was {there}"
        yield True, f"{what}: are red and blue swapped (BGR for RGB)?"


def _swapped_colours(value: Array, seen: Mapping[str, Any], grid: Array) -> bool:
    """By where red minus blue is high, or by its extreme pixels: a grey or bright scene has no mean colour."""
    here, there = (one[:, 0] - one[:, 2] for one in (cells(value), grid))
    here, there = here - here.mean(), there - there.mean()
    sizes = [float(np.sqrt((one**2).mean())) for one in (here, there)]
    if min(sizes) >= PATTERN and float((here * there).mean()) < -0.5 * sizes[0] * sizes[1]:
        return True
    mean, deviation = (float(one) for one in seen["tail"])
    now = tail(value)
    return min(abs(now), abs(mean)) >= TAIL and abs(mean) >= 3 * deviation and now * mean < 0


def _depth(sensor: SensorInfo, value: Array) -> Found:
    seen = sensor.seen
    if seen.get("low") is None:
        return
    low, high = float(seen["low"]), float(seen["high"])
    known = value[np.isfinite(value) & (value > 0)]
    there = f"in training its median was {low:.3g} to {high:.3g} m"
    if not known.size:
        yield True, f"no pixel was measured, {there}: is the camera free?"
        return
    middle = float(np.median(known))
    here = f"the median of the depth is {middle:.4g}, {there}"
    if middle > 10 * high or middle < low / 10:
        unit = middle / np.sqrt(low * high)
        words = "is it in millimetres (times 0.001)?" if 100 < unit < 10_000 else "is it in metres?"
        yield True, f"{here}: {words}"
    elif middle > 3 * high or middle < low / 3:
        yield False, f"{here}: is it the same place?"


def _exchanged(fitting: Mapping[str, tuple[SensorInfo, Array]]) -> str:
    """Two cameras of which each shows what the other did."""
    pictures = {
        name: (sensor.seen, cells(value if value.ndim == 3 else np.where(value > 0, value, np.nan)[..., None]))
        for name, (sensor, value) in fitting.items()
        if sensor.kind in ("rgb", "depth") and sensor.seen.get("grid")
    }

    def off(name: str, shown: Array) -> float:
        """How far a picture is from those of a camera in training, in their deviations."""
        seen = pictures[name][0]
        grid, spread = (np.array(seen[key], np.float64).reshape(shown.shape) for key in ("grid", "spread"))
        floor = 8.0
        if shown.shape[1] == 1:  # depth; 0: never measured in training
            grid, floor = np.where(grid > 0, grid, np.nan), 0.05 * float(grid.max(initial=1e-3))
        far = (np.abs(shown - grid) / (spread + floor)).reshape(-1)
        far = far[np.isfinite(far)]
        return float(far.mean()) if far.size else 0.0

    for one, two in combinations(pictures, 2):
        a, b = pictures[one][1], pictures[two][1]
        if a.shape != b.shape or fitting[one][1].shape != fitting[two][1].shape:
            continue
        straight = off(one, a), off(two, b)
        if np.array_equal(fitting[one][1], fitting[two][1]) and max(straight) > 1 + min(straight):
            return f"sensors '{one}' and '{two}' show the same picture: is one camera read twice?"
        if max(off(one, b), off(two, a)) < 0.5 * min(straight):
            return f"sensors '{one}' and '{two}' look like each other's training data: are the cameras swapped?"
    return ""


# ---------------------------------------------------------------------------- sound


def spectrum(sound: Array) -> Array:
    """(samples,) -> (BANDS,): log10 of each band's share of the power; the bands are of equal width in octaves."""
    power = np.abs(np.fft.rfft(sound.astype(np.float64)))[1:] ** 2
    edges = np.unique(np.geomspace(1, len(power) + 1, BANDS + 1).round().astype(int)) - 1
    bands = np.add.reduceat(power, edges[:-1]) if len(edges) > 1 else power.sum(keepdims=True)
    shares = np.zeros(BANDS)
    shares[: len(bands)] = bands / max(float(bands.sum()), 1e-30)
    return np.asarray(np.log10(shares + 1e-6))


def _audio(sensor: SensorInfo, value: Array) -> Found:
    seen = sensor.seen
    remedy = "are these counts of 16 bits? Divide by 32768"
    if value.dtype.kind in "iu":
        yield True, f"sound is float in -1 to 1, this is {value.dtype}: {remedy}"
        return
    if seen.get("peak") is None or not np.isfinite(value).all():
        return
    peak, loud = float(np.abs(value).max(initial=0.0)), float(np.sqrt((value.astype(np.float64) ** 2).mean()))
    trained, (quiet, loudest) = float(seen["peak"]), (float(one) for one in seen["level"])
    if peak > 1.5 * max(trained, 1.0):
        yield True, f"samples go to {peak:.4g}, in training to {trained:.2g}: {remedy}"
        return
    if loud > 8 * loudest or loud < quiet / 8:
        yield False, f"the sound's level is {loud:.2g}, in training it was {quiet:.2g} to {loudest:.2g}"
    elif loud > 0 and seen.get("bands"):
        mean, spread = (np.array(seen[key], np.float64) for key in ("bands", "band_spread"))
        if float((np.abs(spectrum(value) - mean) / (spread + 0.3)).mean()) > 4:
            yield False, "its spectrum is unlike any in training: is it another sample rate or byte order?"


_CHECKS = {"vector": _vector, "rgb": _rgb, "depth": _depth, "audio": _audio}


# ---------------------------------------------------------------------------- the rate of a loop


class Pace:
    """The rate of a loop, over a window after its first plan. A loop that kept its time table while it waited for
    that plan catches up first: that is not its rate."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._first: float | None = None
        self._steps = 0
        self._times: deque[float] = deque(maxlen=RATE_STEPS + 1)
        self._done = not fps

    def step(self, now: float) -> str:
        """At each step, when its observation is there: what does not fit, once; empty: nothing."""
        if self._done:
            return ""
        if self._first is None:  # the step that waits for its plan
            self._first = now
            return ""
        self._steps += 1
        self._times.append(now)
        if len(self._times) <= RATE_STEPS:
            return ""
        period = float(np.median(np.diff(self._times)))
        if 1 / RATE < period * self._fps < RATE:
            self._done = True
            return ""
        behind = self._steps < 1 + self._fps * (now - self._first)
        if period <= 0 or (period * self._fps < 1 and behind):
            self._times.clear()
            return ""
        self._done = True
        said = f"the loop makes {1 / period:.3g} steps a second, the policy's data have {self._fps:g}"
        return f"{said}: run it at {self._fps:g}, or train on data of its own rate"
