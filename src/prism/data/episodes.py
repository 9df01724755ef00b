"""The one interface every format implements: episodes read lazily, by slices of time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec

Array = NDArray[np.generic]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Names = Collection[str] | None  # of sensors; None: all of them
SKIP = "--skip-damaged leaves that episode out"  # the remedy where one episode cannot be read


class DamagedDataError(PrismError):
    """Its args: what cannot be read, and what leaves it out, in the options of `prism train`."""

    def __str__(self) -> str:
        return "; ".join(self.args)


@dataclass(frozen=True)
class Episode:
    """A slice of a demonstration: streams (T, ...), actions (T, Da), all in robot units.

    `present[name]` is (T,), False where that sensor was missing (the stream's content there means
    nothing); a sensor without an entry was there all the time.
    """

    streams: dict[str, Array]
    actions: FloatArray
    present: dict[str, BoolArray] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return int(self.actions.shape[0])


class EpisodeSource(Protocol):
    """A dataset in any format. Streams have the dtype and the shape of their spec."""

    @property
    def path(self) -> Path:
        """Its path, for messages."""
        ...

    @property
    def sensors(self) -> tuple[SensorSpec, ...]: ...

    @property
    def action_dim(self) -> int: ...

    @property
    def fps(self) -> float: ...

    @property
    def lengths(self) -> IntArray:
        """(E,) steps of each episode, all positive."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """The reader's guesses and omissions, one sentence each, shown to the user."""
        ...

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        """Steps start..stop of one episode; nothing else is read from disk.

        `streams` names the sensors wanted: None is all of them, () reads the actions alone.
        """
        ...


def read_together(source: EpisodeSource) -> int:
    """Number of neighbouring steps to read at once, because the format decodes them together. 0: single steps are
    as cheap."""
    return int(getattr(source, "read_together", 0))


def check_slice(source: EpisodeSource, episode: int, start: int, stop: int | None) -> tuple[int, int]:
    """The bounds as plain integers, or a PrismError: every reader refuses steps that do not exist."""
    count = len(source.lengths)
    if not 0 <= episode < count:
        raise PrismError(f"{source.path}: there is no episode {episode}; it has episodes 0..{count - 1}")
    length = int(source.lengths[episode])
    end = length if stop is None else stop
    if not 0 <= start <= end <= length:
        raise PrismError(f"{source.path}: episode {episode} has steps 0..{length}; {start}..{end} is outside it")
    return start, end


def read_in_parts(
    source: EpisodeSource, episode: int, steps: int, streams: Names = None
) -> Iterator[tuple[slice, Episode]]:
    """A whole episode, at most `steps` steps at a time: which steps they are, and what was recorded there."""
    length = int(source.lengths[episode])
    for start in range(0, length, steps):
        stop = min(start + steps, length)
        yield slice(start, stop), source.read(episode, start, stop, streams=streams)


def step_bytes(sensors: Iterable[SensorSpec]) -> int:
    """Bytes of one time step of these sensors."""
    return sum(int(np.prod(sensor.shape)) * sensor.dtype.itemsize for sensor in sensors)


def wanted_sensors(source: EpisodeSource, streams: Names) -> tuple[SensorSpec, ...]:
    """The sensors that a call to `read` asks for, in the source's order."""
    if streams is None:
        return source.sensors
    if unknown := set(streams) - {sensor.name for sensor in source.sensors}:
        known = ", ".join(sensor.name for sensor in source.sensors)
        raise PrismError(f"{source.path}: no sensor named {', '.join(sorted(unknown))}; it has {known}")
    return tuple(sensor for sensor in source.sensors if sensor.name in streams)


def first_bad_row(rows: Array, present: BoolArray | None = None) -> int | None:
    """The first row with NaN or infinity; where the sensor was absent a row may hold anything."""
    good = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if present is not None:
        good |= ~present
    return None if good.all() else int(np.argmin(good))


def check_finite(where: str, rows: Array, present: BoolArray | None = None, start: int = 0) -> None:
    """PrismError at the first NaN or infinity of steps start, start + 1, ... of a stream."""
    if (bad := first_bad_row(rows, present)) is not None:
        raise DamagedDataError(f"{where}: NaN or infinity at step {start + bad}", SKIP)


def checked_ends(ends: object, where: str) -> IntArray:
    """Cumulative episode ends as int64: a non-empty list of integers, positive and strictly increasing."""
    usable = isinstance(ends, np.ndarray) or (isinstance(ends, list) and all(type(end) is int for end in ends))
    array = np.asarray(ends) if usable else np.empty(0)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise PrismError(f"{where} must be a list of integers with one entry an episode; record the dataset again")
    cumulative: IntArray = array.astype(np.int64)
    lengths = np.diff(cumulative, prepend=0)
    if (lengths <= 0).any():
        episode = int(np.argmax(lengths <= 0))
        what = "is empty" if lengths[episode] == 0 else "ends before it starts"
        raise PrismError(f"{where}: episode {episode} {what} (ends must increase); leave that episode out")
    return cumulative
