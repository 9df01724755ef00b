"""App. A: streams with time stamps of their own, brought to the camera's clock at a chosen rate.

A step of the clock is a tick t_k = t_0 + k / rate, moved to the exposure of the camera's frame nearest to it (if one
is nearer than half a tick): everything else is then what it was when that picture was taken.

nearest   the sample nearest in time
hold      the last sample before
linear    between the samples before and after
slerp     the same for quaternions, along the shorter arc, with unit length
window    audio: the samples that end at the step

A step at which no sample is within `tolerance` is absent, and gaps longer than twice the tolerance are not
interpolated across. How much is absent is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prism.data.episodes import Array, BoolArray, FloatArray, IntArray
from prism.errors import PrismError
from prism.sensors import SensorSpec

_FRAMES = (100, 10_000)  # steps of the clock: at most 100 a frame and 10,000 more; beyond, the clock has jumped
_SAMPLES = (10, 50_000_000)  # of audio's time line, the same

Times = NDArray[np.float64]  # seconds


@dataclass(frozen=True)
class AlignConfig:
    rate: float  # steps a second
    tolerance: float | None = None  # seconds; default: one step
    images: Literal["nearest", "hold"] = "nearest"

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1e5:
            raise PrismError(f"the rate must be a positive number of steps a second, not {self.rate:g}")
        if self.tolerance is not None and not self.tolerance > 0:
            raise PrismError(f"the tolerance must be a positive number of seconds, not {self.tolerance:g}")

    @property
    def reach(self) -> float:
        return 1.0 / self.rate if self.tolerance is None else self.tolerance


@dataclass(frozen=True)
class Timed:
    """A recorded stream: samples (N, ...) with stamps (N,). Audio: values (samples,), one stamp a chunk.

    `quaternions`: where in a vector unit quaternions begin (4 numbers each, either order of the parts); `scalar`:
    which of the 4 is w, where that is known.
    `chunks` (audio): how many samples belong to each stamp, which is that of the chunk's first sample.
    """

    spec: SensorSpec
    times: Times
    values: Array
    quaternions: tuple[int, ...] = ()
    chunks: IntArray | None = None
    scalar: int | None = None


@dataclass(frozen=True)
class Gaps:
    """How well one stream covers the clock."""

    name: str
    steps: int
    absent: int
    longest: float  # seconds of the clock without it, at a stretch
    offset: float  # mean distance of the samples used, seconds

    def __str__(self) -> str:
        share = self.absent / max(self.steps, 1)
        lost = (
            f"absent from {share:.1%} of the steps, at most {self.longest:.2f} s at a stretch"
            if self.absent
            else "complete"
        )
        return f"'{self.name}' is {lost}; its samples are {1e3 * self.offset:.1f} ms off on average"


@dataclass(frozen=True)
class Aligned:
    clock: Times
    streams: dict[str, Array]
    present: dict[str, BoolArray]
    gaps: tuple[Gaps, ...]


@contextmanager
def named(where: str) -> Iterator[None]:
    """Whatever is wrong with a stream is said with its name."""
    try:
        yield
    except PrismError as error:
        raise PrismError(f"{where}: {error}") from None


def check_times(times: Times, where: str) -> Times:
    """Finite and not decreasing, at least one; PrismError says where they go backwards."""
    stamps = np.asarray(times, np.float64)
    if stamps.ndim != 1 or not len(stamps):
        raise PrismError(f"{where}: no time stamps; leave the stream out")
    if not np.isfinite(stamps).all():
        raise PrismError(
            f"{where}: time stamp {int(np.argmin(np.isfinite(stamps)))} is not a number; fix the recording"
        )
    back = np.flatnonzero(np.diff(stamps) < 0)
    if len(back):
        i = int(back[0])
        raise PrismError(
            f"{where}: time stamps go backwards by {stamps[i] - stamps[i + 1]:.6f} s after sample {i}; "
            "fix the recording (was the clock set while it ran?)"
        )
    return stamps


def _check_jump(times: Times, count: int, samples: int, most: tuple[int, int]) -> None:
    """A clock that was set while it recorded (NTP) would need memory for the years between."""
    if count > most[0] * samples + most[1]:
        steps = np.diff(times)
        i = int(np.argmax(steps))
        raise PrismError(f"time stamps jump by {steps[i]:.0f} s after stamp {i}; cut the recording there")


def camera_clock(times: Times, rate: float) -> Times:
    """Ticks at `rate` from the camera's first frame to its last, each moved to the nearest frame's own time."""
    count = int((times[-1] - times[0]) * rate + 1e-6) + 1
    _check_jump(times, count, len(times), _FRAMES)
    ticks = times[0] + np.arange(count) / rate
    frames = times[nearest(times, ticks)]
    clock = np.where(np.abs(frames - ticks) < 0.5 / rate, frames, ticks)
    same = np.flatnonzero(np.diff(clock) <= 0) + 1  # a camera slower than the rate: the frame is used twice
    clock[same] = ticks[same]
    return clock


def nearest(times: Times, clock: Times) -> IntArray:
    """Which sample is nearest; the earlier of two that are equally near."""
    after = np.searchsorted(times, clock, side="left").clip(1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    chosen: IntArray = np.where(times[after] - clock < clock - times[before], after, before)
    return chosen


def hold(times: Times, clock: Times) -> IntArray:
    """Which sample is the last at or before; the first one for steps before it."""
    last: IntArray = np.maximum(np.searchsorted(times, clock, side="right") - 1, 0)
    return last


def pick(
    times: Times, clock: Times, tolerance: float, method: Literal["nearest", "hold"]
) -> tuple[IntArray, BoolArray]:
    """Which sample belongs to which step, and whether it is near enough."""
    chosen = nearest(times, clock) if method == "nearest" else hold(times, clock)
    away = clock - times[chosen]
    here: BoolArray = np.abs(away) <= tolerance
    if method == "hold":
        here &= away >= 0  # nothing is known before the first sample
    return chosen, here


def interpolate(
    times: Times, values: Array, clock: Times, tolerance: float, quaternions: Sequence[int] = ()
) -> tuple[FloatArray, BoolArray]:
    """(T, D) between the samples around each step, and where a sample is near enough."""
    data = np.asarray(values, np.float64)
    near, here = pick(times, clock, tolerance, "nearest")
    before = np.clip(np.searchsorted(times, clock, side="right") - 1, 0, max(len(times) - 2, 0))
    after = np.minimum(before + 1, len(times) - 1)
    gap = times[after] - times[before]
    # outside the recording, across a long gap, and between samples of the same time: the nearest sample as it is
    inside = (gap > 0) & (gap <= 2 * tolerance) & (clock >= times[before]) & (clock <= times[after])
    weight = np.where(inside, (clock - times[before]) / np.where(gap > 0, gap, 1.0), 0.0)[:, None]
    start = np.where(inside[:, None], data[before], data[near])
    end = np.where(inside[:, None], data[after], data[near])
    out: Times = start + weight * (end - start)
    out = np.where(weight == 1, end, out)  # exactly the sample, at its own time
    for first in quaternions:
        part = slice(first, first + 4)
        out[:, part] = _slerp(start[:, part], end[:, part], weight)
    return out.astype(np.float32), here


def _slerp(a: Times, b: Times, weight: Times) -> Times:
    """Shortest arc: q(w) = (sin((1-w) h) a + sin(w h) b) / sin(h), cos(h) = a.b, with b negated where a.b < 0."""
    lengths = [np.linalg.norm(q, axis=1, keepdims=True) for q in (a, b)]
    if (short := np.minimum(*lengths) < 1e-6).any():
        raise PrismError(
            f"the quaternion at step {int(np.argmax(short))} has length 0 and is not a rotation; fix the recording, or "
            "leave the stream out"
        )
    a, b = a / lengths[0], b / lengths[1]
    dot = np.sum(a * b, axis=1, keepdims=True)
    b = np.where(dot < 0, -b, b)
    half = np.arccos(np.clip(np.abs(dot), 0, 1))
    sine = np.sin(half)
    small = sine < 1e-6  # nearly the same: a straight line is exact to rounding
    safe = np.where(small, 1.0, sine)
    left = np.where(small, 1 - weight, np.sin((1 - weight) * half) / safe)
    right = np.where(small, weight, np.sin(weight * half) / safe)
    out = left * a + right * b
    unit: Times = out / np.linalg.norm(out, axis=1, keepdims=True)
    return unit


def continuous_quaternions(values: Array, quaternions: Sequence[int], scalar: int | None = None) -> Array:
    """q and -q are one rotation: signs chosen so that no sample jumps away from the one before, and so that episodes
    begin with the same one. Of the first sample part `scalar` (w) is positive; None, or w = 0: its largest part is.
    """
    out = np.array(values, np.float64)
    for first in quaternions:
        part = out[:, first : first + 4]
        flips = np.sum(part[1:] * part[:-1], axis=1) < 0
        part *= np.where(np.concatenate([[0], np.cumsum(flips)]) % 2 == 1, -1.0, 1.0)[:, None]
        leading = part[0, scalar] if scalar is not None and part[0, scalar] else part[0, np.argmax(np.abs(part[0]))]
        part *= np.copysign(1.0, leading)
    return out


def audio_windows(
    times: Times, chunks: IntArray, samples: Array, sample_rate: int, clock: Times, size: int, tolerance: float
) -> tuple[FloatArray, BoolArray]:
    """(T, size): the samples that end at each step; absent where some of them were not recorded.

    Chunks whose stamps agree with the samples before them (within `tolerance`) are one recording; a chunk that
    comes later than that begins after a gap. One that comes earlier, by a chunk more, says that the rate is wrong.
    """
    begins = np.concatenate([[0], np.cumsum(chunks)[:-1]])
    position = np.zeros(len(times), np.int64)  # of each chunk's first sample on the common time line
    for i in range(1, len(times)):
        expected = position[i - 1] + int(chunks[i - 1])
        stamped = round((times[i] - times[0]) * sample_rate)
        if expected - stamped > tolerance * sample_rate + int(chunks[i - 1]):
            raise PrismError(
                f"chunk {i} of the audio begins {(expected - stamped) / sample_rate:.3g} s before the one before it "
                f"ends: is it one channel of {sample_rate} samples a second? If it is, raise the tolerance"
            )
        position[i] = stamped if stamped - expected > tolerance * sample_rate else expected
    total = int(position[-1] + chunks[-1])
    _check_jump(times, total, len(samples), _SAMPLES)
    line, known = np.zeros(total, np.float32), np.zeros(total + 1, np.int64)
    for at, begin, count in zip(position.tolist(), begins.tolist(), chunks.tolist(), strict=True):
        line[at : at + count] = samples[begin : begin + count]
        known[at + 1 : at + count + 1] = 1
    known = np.cumsum(known)
    # Seconds since 1970 in float64 are good to 0.2 microseconds: a hundredth of a sample at 48 kHz.
    ends = np.floor((clock - times[0]) * sample_rate + 0.05).astype(np.int64)
    inside = (ends >= size) & (ends <= total)
    here = inside & (known[np.clip(ends, 0, total)] - known[np.clip(ends - size, 0, total)] == size)
    rows = np.clip(ends[:, None] - size + np.arange(size), 0, max(total - 1, 0))
    return np.where(here[:, None], line[rows], 0).astype(np.float32), here


def align(streams: Mapping[str, Timed], camera: str, config: AlignConfig, where: str = "") -> Aligned:
    """All streams on the clock of the stream named `camera`. `where` goes before a stream's name in messages."""
    if camera not in streams:
        raise PrismError(f"there is no stream '{camera}' to give the clock; there are {', '.join(streams)}")
    stamps = {name: check_times(stream.times, f"{where}'{name}'") for name, stream in streams.items()}
    with named(f"{where}'{camera}'"):
        clock = camera_clock(stamps[camera], config.rate)
    values: dict[str, Array] = {}
    present: dict[str, BoolArray] = {}
    for name, stream in streams.items():
        with named(f"{where}'{name}'"):
            values[name], present[name] = _on_clock(stream, stamps[name], clock, config)
    gaps = tuple(count_gaps(name, times, clock, present[name]) for name, times in stamps.items())
    return Aligned(clock, values, present, gaps)


def _on_clock(stream: Timed, times: Times, clock: Times, config: AlignConfig) -> tuple[Array, BoolArray]:
    spec = stream.spec
    if spec.kind == "audio":
        chunks = stream.chunks if stream.chunks is not None else np.array([len(stream.values)])
        return audio_windows(times, chunks, stream.values, spec.sample_rate, clock, spec.shape[0], config.reach)
    if spec.kind == "vector":
        data = continuous_quaternions(stream.values, stream.quaternions, stream.scalar)
        return interpolate(times, data, clock, config.reach, stream.quaternions)
    if spec.kind == "text":  # an instruction is valid until the next one
        chosen, here = pick(times, clock, np.inf, "hold")
    else:
        chosen, here = pick(times, clock, config.reach, config.images)
    return stream.values[chosen], here


def count_gaps(name: str, times: Times, clock: Times, present: BoolArray) -> Gaps:
    padded = np.concatenate([[True], present, [True]])
    edges = np.flatnonzero(padded)
    run = int(np.diff(edges).max()) - 1
    step = float(np.median(np.diff(clock))) if len(clock) > 1 else 0.0
    away = np.abs(times[nearest(times, clock)] - clock)[present]
    return Gaps(name, len(clock), int((~present).sum()), run * step, float(away.mean()) if len(away) else 0.0)
