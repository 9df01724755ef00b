"""From keys to sensors: what every reader of a foreign format shares.

A reader lists its columns and gets their raw values; a Table says which column becomes which sensor and
converts values to what prism.sensors promises. Everything that was guessed or left out is in `notes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism.data.episodes import Array, BoolArray, Episode, FloatArray, IntArray, check_slice, wanted_sensors
from prism.data.formats.manifest import check_sensors
from prism.data.formats.mapping import ACTION, Column, Entry, action_spec, find_column, guess_kind, sensor_name
from prism.errors import PrismError
from prism.sensors import SensorKind, SensorSpec, encode_text

Raw = dict[str, Array]  # values (T, ...) by key; text is an array of str objects


@dataclass(frozen=True)
class Stream:
    """A sensor (or the actions) and the columns that it is made of."""

    spec: SensorSpec
    columns: tuple[Column, ...]
    scale: float = 1.0  # stored value times scale is the sensor's unit
    channels_first: bool = False

    def convert(self, raw: Raw, where: str, present: BoolArray | None = None) -> Array:
        """(T, *spec.shape) of spec.dtype; PrismError for values that cannot be of this sensor."""
        kind = self.spec.kind
        if kind == "vector":
            values = np.concatenate([_rows(raw[c.key]).astype(np.float32) for c in self.columns], axis=1)
            if self.scale != 1:
                values = values * np.float32(self.scale)
            self._check_finite(values, where, present)
            return values
        value = raw[self.columns[0].key]
        if kind == "text":
            size = self.spec.shape[0]
            try:  # few texts, many steps: each is encoded once
                known = {text: encode_text(text, size) for text in set(value.tolist())}
            except PrismError as error:
                raise PrismError(f"{where}, '{self._keys}': {error}; mend it or leave the key out") from None
            return np.stack([known[text] for text in value.tolist()]) if len(value) else np.empty((0, size), np.uint8)
        if kind in ("rgb", "tactile"):
            return self._pixels(value, where)
        value = value.reshape(len(value), *self.spec.shape)
        numbers = value.astype(np.float32) * np.float32(self.scale)
        if kind == "audio":
            self._check_finite(numbers, where, present)
            return numbers
        numbers[~np.isfinite(numbers)] = 0  # depth: cameras mark "nothing measured" in many ways
        if numbers.size and numbers.min() < 0:
            step = int(np.argmax(numbers.reshape(len(numbers), -1).min(axis=1) < 0))
            raise PrismError(f"{where}, '{self._keys}': negative depth at step {step}; mend it or leave the key out")
        return numbers

    @property
    def _keys(self) -> str:
        return "+".join(column.key for column in self.columns)

    def _pixels(self, value: Array, where: str) -> Array:
        if self.channels_first:
            value = np.moveaxis(value, 1, -1)
        if value.dtype == np.uint8:
            return np.ascontiguousarray(value)
        numbers = value.astype(np.float32) * np.float32(self.scale)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() <= 255.5):  # written so that NaN fails too
            raise PrismError(
                f"{where}, '{self._keys}': pixels outside 0..{255 / self.scale:g}; give the scale that makes them "
                "0..255, as in --map KEY=SENSOR:rgb:SCALE"
            )
        pixels: Array = np.rint(numbers).astype(np.uint8)
        return pixels

    def _check_finite(self, values: Array, where: str, present: BoolArray | None) -> None:
        good = np.isfinite(values).all(axis=1)
        if present is not None:
            good |= ~present
        if not good.all():
            step = int(np.argmin(good))
            raise PrismError(
                f"{where}, '{self._keys}': NaN or infinity at step {step}; mend it or leave that episode out"
            )


def _rows(values: Array) -> Array:
    return values.reshape(len(values), int(np.prod(values.shape[1:], dtype=np.int64)))


@dataclass(frozen=True)
class Table:
    """Every sensor of a dataset and its actions."""

    streams: tuple[Stream, ...]
    action: Stream

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return tuple(stream.spec for stream in self.streams)


def make_table(
    path: Path, columns: Sequence[Column], action: str, entries: Sequence[Entry], fps: float, notes: list[str]
) -> Table:
    """`action` is the key that this format usually has; notes get one sentence for every guess."""
    given = {entry.name: entry for entry in entries}
    target = given.get(ACTION, Entry((action,), ACTION))
    act = _stream(path, columns, Entry(target.sources, ACTION, "vector", target.scale), fps, notes)
    notes += [
        f"action[{first}:{first + 4}] is a quaternion (if it is not: --sensor action.quaternions=)"
        for first in action_spec(act.columns).quaternions
    ]
    wanted = [entry for entry in entries if entry.name != ACTION]
    if wanted:
        used = {key for entry in (*wanted, target) for key in entry.sources}
        if unused := [column.key for column in columns if column.key not in used]:
            notes.append(f"not in the table given with --map, so left out: {', '.join(unused)}")
    else:
        wanted = _guess([column for column in columns if column.key not in target.sources], notes)
    if not wanted:
        keys = ", ".join(column.key for column in columns)
        raise PrismError(f"{path}: no key looks like a sensor; name them with --map SOURCE=SENSOR:KIND (it has {keys})")
    streams = tuple(_stream(path, columns, entry, fps, notes) for entry in wanted)
    try:
        check_sensors([stream.spec for stream in streams])
    except PrismError as error:
        raise PrismError(f"{path}: {error}; use --map SOURCE=SENSOR") from None
    return Table(streams, act)


def _guess(columns: Sequence[Column], notes: list[str]) -> list[Entry]:
    found, taken = [], []
    for column in columns:
        kind, problem = guess_kind(column)
        if column.skip:
            notes.append(f"'{column.key}' is left out: {column.skip}")
        elif kind is None:
            notes.append(f"'{column.key}' is left out: it {problem}")
        else:
            found.append(Entry((column.key,), sensor_name(column.name or column.key), kind))
            taken.append(f"{found[-1].name} is {kind}")
    if taken:
        notes.append(f"sensors were guessed by type, shape and name (--map changes it): {', '.join(taken)}")
    return found


def _stream(path: Path, columns: Sequence[Column], entry: Entry, fps: float, notes: list[str]) -> Stream:
    chosen = tuple(find_column(columns, key, str(path)) for key in entry.sources)
    kind, problem = (entry.kind, "") if entry.kind else guess_kind(chosen[0])
    first = chosen[0]
    label = "+".join(entry.sources)
    if kind is None:
        raise PrismError(f"{path}: '{label}' {problem}; say its kind: --map {label}={entry.name}:KIND")
    if len(chosen) > 1 and kind != "vector":
        raise PrismError(f"{path}: only vectors can be joined; '{label}' is {kind}")
    if any(column.is_text != (kind == "text") for column in chosen) or any(c.dtype.kind not in "fiubU" for c in chosen):
        raise PrismError(f"{path}: '{label}' is {first}, it cannot be {kind}; change --map")
    if kind == "vector":
        flat = [c for c in chosen if len(c.shape) > 1]
        notes += [f"'{c.key}' {c.shape} is flattened to {int(np.prod(c.shape))} numbers" for c in flat]
        size = sum(int(np.prod(c.shape, dtype=np.int64)) for c in chosen)
        spec = dataclasses.replace(_spec(path, label, entry.name, kind, (size,)), names=action_spec(chosen).names)
        return Stream(spec, chosen, entry.scale or 1.0)
    shape = first.shape
    first_axis = kind == "rgb" and len(shape) == 3 and shape[2] != 3 and shape[0] == 3
    if first_axis:
        notes.append(f"'{label}' {shape} has its channels first: turned to {(*shape[1:], 3)}")
        shape = (*shape[1:], 3)
    if kind == "depth" and len(shape) == 3 and shape[2] == 1:
        shape = shape[:2]
    if kind == "audio" and len(shape) == 2 and shape[1] == 1:
        shape = shape[:1]
    rate = 0
    if kind == "audio":
        rate = first.sample_rate or round(shape[0] * fps)
        if not first.sample_rate:
            notes.append(f"'{label}' has {shape[0]} samples a step: {rate} a second")
    scale = entry.scale or first.scale or _usual_scale(path, first, kind, notes)
    return Stream(_spec(path, label, entry.name, kind, shape, rate), chosen, scale, first_axis)


def _spec(
    path: Path, key: str, name: str, kind: SensorKind, shape: tuple[int, ...], sample_rate: int = 0
) -> SensorSpec:
    try:
        return SensorSpec(name, kind, shape, sample_rate=sample_rate)
    except PrismError as error:
        raise PrismError(f"{path}: '{key}': {error}; change --map") from None


def _usual_scale(path: Path, column: Column, kind: SensorKind, notes: list[str]) -> float:
    """What makes metres, pixels and samples of what is usually stored."""
    dtype = column.dtype
    if kind == "depth" and dtype.kind in "iu":
        notes.append(f"'{column.key}' holds {dtype}: read as millimetres (--map {column.key}=SENSOR:depth:SCALE)")
        return 0.001
    if kind == "audio" and dtype.kind == "i":
        return 1.0 / float(1 << (8 * dtype.itemsize - 1))
    if kind in ("rgb", "tactile") and dtype != np.uint8:
        raise PrismError(
            f"{path}: '{column.key}' holds {dtype} pixels: say what makes them 0..255, "
            f"as in --map {column.key}={sensor_name(column.key)}:{kind}:255, or leave the key out"
        )
    return 1.0


class TableSource:
    """An EpisodeSource whose columns are read by `_raw`; the rest is here.

    A subclass sets path, fps, lengths and notes, calls `_use(table)`, and implements `_raw`.
    """

    path: Path
    fps: float
    lengths: IntArray
    notes: tuple[str, ...]
    sometimes_absent: frozenset[str] = frozenset()  # sensors that `present` may have an entry for
    read_together = 32  # steps: each of these formats pays for opening, seeking or decoding, more than for the bytes

    def _use(self, table: Table, robot: str = "") -> None:
        self.table = table
        self.sensors = table.sensors
        self.action_dim = table.action.spec.shape[0]
        self.action_spec = action_spec(table.action.columns, robot)
        self._by_name = {stream.spec.name: stream for stream in table.streams}

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        chosen = [self._by_name[sensor.name] for sensor in wanted_sensors(self, streams)]
        if start == stop:
            empty = {s.spec.name: np.empty((0, *s.spec.shape), s.spec.dtype) for s in chosen}
            return Episode(empty, np.empty((0, self.action_dim), np.float32))
        columns = {c.key: c for stream in (*chosen, self.table.action) for c in stream.columns}
        where = self._where(episode)
        raw, absent = self._raw(episode, start, stop, columns)
        for key, column in columns.items():
            _check(raw[key], column, stop - start, where)
        present: dict[str, BoolArray] = {}
        for stream in chosen:
            for column in stream.columns:
                if column.key in absent:
                    name = stream.spec.name
                    present[name] = present.get(name, np.ones(stop - start, np.bool_)) & ~absent[column.key]
        values = {s.spec.name: s.convert(raw, where, present.get(s.spec.name)) for s in chosen}
        actions: FloatArray = self.table.action.convert(raw, where).astype(np.float32, copy=False)
        return Episode(values, actions, present)

    def _where(self, episode: int) -> str:
        """File and episode, for messages."""
        return f"{self.path}: episode {episode}"

    def _raw(
        self, episode: int, start: int, stop: int, columns: Mapping[str, Column]
    ) -> tuple[Raw, dict[str, BoolArray]]:
        """Steps start..stop of these columns, and where a key was absent (True: absent)."""
        raise NotImplementedError


def _check(values: Array, column: Column, length: int, where: str) -> None:
    expected = (length,) if column.is_text else (length, *column.shape)
    if values.shape != expected or (not column.is_text and values.dtype != column.dtype):
        raise PrismError(
            f"{where}, '{column.key}': is {values.dtype} {values.shape}, the dataset's other steps say "
            f"{column.dtype} {expected}; record or copy it again"
        )
