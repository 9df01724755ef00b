"""From keys to sensors: what every reader of a foreign format shares.

A reader lists its columns and gets their raw values; a Table says which column becomes which sensor and
converts values to what prism.sensors promises. Everything that was guessed or left out is in `notes`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from prism.data.episodes import (
    Array,
    BoolArray,
    Episode,
    FloatArray,
    IntArray,
    Names,
    check_finite,
    check_slice,
    wanted_sensors,
)
from prism.data.formats.store import check_sensors
from prism.errors import PrismError
from prism.sensors import KINDS, ActionSpec, SensorKind, SensorSpec, encode_text

# ---------------------------------------------------------------------------
# Which key of a dataset becomes which sensor: the user's table, or a guess that says what it guessed.
#
# A table is a list of entries `SOURCE=SENSOR[:KIND[:SCALE]]`:
#
#     agentview_image=rgb_static                          the key's name, the sensor's name
#     robot0_eef_pos+robot0_eef_quat=proprio:vector       several keys, joined into one vector
#     depth_raw=depth_static:depth:0.001                  millimetres to metres
#     rel_actions=action                                  what is to be learned
#     reward=                                             nothing: the key is ignored
#
# A table of several entries takes no other sensor. Without one, every key that looks like a sensor is one, under its
# own name; an entry alone changes what is guessed of its key.

ACTION, IGNORED = "action", ""
STEP_BYTES = 64 * 2**20  # of one sensor: a picture of 4K has 25 MB
AGAIN = "copy or download it again"
_TACTILE = ("tactile", "digit", "gelsight")
_AUDIO = ("audio", "microphone", "sound")
_MAX_FLAT = 1024  # (H, W) arrays up to this size are flattened (keypoints); larger ones are images


class OtherSizeError(ValueError):
    """A picture is whole, and of another size than is stated."""


@dataclass(frozen=True)
class Column:
    """One key of a dataset: one time step of it, as its file holds it. Text has dtype str and shape (max bytes,)."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str = ""  # what a guess calls the sensor; default: the key
    skip: str = ""  # why a guess leaves it out
    scale: float = 0.0  # the reader's knowledge of the unit; 0: the kind's usual one
    sample_rate: int = 0  # audio
    names: tuple[str, ...] = ()  # of the dimensions, where the file has them
    quaternions: tuple[int, ...] = ()  # first dimensions of unit quaternions, where the reader knows

    @property
    def is_text(self) -> bool:
        return self.dtype.kind == "U"

    def __str__(self) -> str:
        return f"text of up to {self.shape[0]} bytes" if self.is_text else f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    sources: tuple[str, ...]
    name: str
    kind: SensorKind | None = None  # None: by shape and name, as a guess would
    scale: float = 0.0  # multiplies what is stored; 0: the kind's usual unit


def parse_map(texts: Sequence[str]) -> tuple[Entry, ...]:
    """The table from the command line; PrismError names the entry that is wrong."""
    entries = []
    for text in texts:
        source, equals, target = text.rpartition("=")
        name, *rest = target.split(":")
        sources = tuple(part.strip() for part in source.split("+"))
        if equals and not target.strip() and all(sources):
            entries.append(Entry(sources, IGNORED))
            continue
        if not equals or not name.strip() or not all(sources) or len(rest) > 2:
            raise PrismError(f"--map {text}: write SOURCE=SENSOR[:KIND[:SCALE]], or SOURCE= to ignore it")
        kind = rest[0] if rest and rest[0] else None
        if kind is not None and kind not in KINDS:
            raise PrismError(f"--map {text}: {KINDS.unknown(kind)}")
        try:
            scale = float(rest[1]) if len(rest) == 2 else 0.0
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale) or (len(rest) == 2 and scale == 0):
            raise PrismError(f"--map {text}: the scale '{rest[1]}' is not a number other than 0")
        entries.append(Entry(sources, name.strip(), kind, scale))
    names = [entry.name for entry in entries if entry.name != IGNORED]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PrismError(f"--map: two entries make the sensor '{twice[0]}'; rename one, or join their keys with '+'")
    return tuple(entries)


def sensor_name(key: str) -> str:
    """A key as a sensor's name, which can be a file's: /camera/color -> camera_color"""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", key).strip("_.-") or "sensor"


def guess_kind(column: Column) -> tuple[SensorKind | None, str]:
    """The kind of a key by type, shape and name, and the reason if it fits none."""
    shape, kind, name = column.shape, column.dtype.kind, column.key.lower()
    if column.is_text:
        return "text", ""
    if kind not in "fiub" or 0 in shape:
        return None, f"is {column}, no sensor"
    if len(shape) <= 1:
        return ("audio" if any(word in name for word in _AUDIO) and shape and shape[0] >= 16 else "vector"), ""
    if "depth" in name and (len(shape) == 2 or (len(shape) == 3 and shape[2] == 1)):
        return "depth", ""
    if len(shape) == 2:
        if shape[0] * shape[1] <= _MAX_FLAT:
            return "vector", ""
        return None, f"has shape {shape} a step: map it as depth if it is"
    if len(shape) == 3:
        touch = any(word in name for word in _TACTILE)
        if touch and kind == "u" and column.dtype.itemsize == 1:
            return "tactile", ""
        if shape[2] == 3 and not touch:
            return "rgb", ""
        if shape[0] == 3 and not touch:
            return "rgb", ""
    return None, f"has shape {shape} a step and type {column.dtype}, which fits no kind of sensor"


def action_spec(columns: Sequence[Column], robot: str = "") -> ActionSpec:
    """What the columns of the actions say of them. Quaternions are those that the reader knows, that are called so (a
    key of four numbers with `quat` in it), or whose dimensions are called so: qw qx qy qz, ee_quat.x .y .z .w."""
    names: list[str] = []
    quaternions: list[int] = []
    for column in columns:
        size, begin = int(np.prod(column.shape, dtype=np.int64)), len(names)
        own = column.names if len(column.names) == size else ()
        found = column.quaternions or ((0,) if size == 4 and "quat" in column.key.lower() else _called_quaternions(own))
        quaternions += [begin + first for first in found]
        names += own or [f"{column.key}[{i}]" for i in range(size)]
    return ActionSpec(tuple(names) if any(c.names for c in columns) else (), tuple(quaternions), robot)


def _called_quaternions(names: Sequence[str]) -> tuple[int, ...]:
    found = []
    for first in range(len(names) - 3):
        four = [name.lower() for name in names[first : first + 4]]
        stem = four[0][:-1]
        same = all(name[:-1] == stem for name in four) and "".join(n[-1] for n in four) in ("wxyz", "xyzw")
        if same and re.search(r"quat|orient|rotation|(^|[^a-z])q[_.]?$", stem):
            found.append(first)
    return tuple(found)


def find_column(columns: Sequence[Column], key: str, where: str) -> Column:
    for column in columns:
        if column.key == key:
            return column
    keys = [column.key for column in columns]
    close = difflib.get_close_matches(key, keys, n=3)
    raise PrismError(
        f"{where}: there is no key '{key}'; {'near it are' if close else 'it has'} {', '.join(close or keys)}"
    )


Raw = dict[str, Array]  # values (T, ...) by key; text is an array of str objects
Absent = dict[str, BoolArray]  # (T,) by key: True where it was absent; a key without an entry was there all the time
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Stream:
    """A sensor (or the actions) and the columns that it is made of."""

    spec: SensorSpec
    columns: tuple[Column, ...]
    scale: float = 1.0  # stored value times scale is the sensor's unit
    channels_first: bool = False

    def convert(self, raw: Raw, where: str, start: int, present: BoolArray | None = None) -> Array:
        """(T, *spec.shape) of spec.dtype; PrismError for values, from step `start` on, that cannot be of it."""
        kind = self.spec.kind
        if kind == "vector":
            values = np.concatenate([_rows(raw[c.key]).astype(np.float32) for c in self.columns], axis=1)
            if self.scale != 1:
                values = values * np.float32(self.scale)
            check_finite(f"{where}, '{self._keys}'", values, present, start)
            return values
        value = raw[self.columns[0].key]
        if kind == "text":
            size = self.spec.shape[0]
            try:  # few texts, many steps: each is encoded once
                known = {text: encode_text(text, size) for text in set(value.tolist())}
            except PrismError as error:
                raise PrismError(f"{where}, '{self._keys}': {error}; fix it or leave the key out") from None
            return np.stack([known[text] for text in value.tolist()]) if len(value) else np.empty((0, size), np.uint8)
        if kind in ("rgb", "tactile"):
            return self._pixels(value, where)
        value = value.reshape(len(value), *self.spec.shape)
        numbers = value.astype(np.float32) * np.float32(self.scale)
        if kind == "audio":
            check_finite(f"{where}, '{self._keys}'", numbers, present, start)
            return numbers
        numbers[~np.isfinite(numbers)] = 0  # depth: cameras mark "nothing measured" in many ways
        if numbers.size and numbers.min() < 0:
            step = start + int(np.argmax(numbers.reshape(len(numbers), -1).min(axis=1) < 0))
            raise PrismError(f"{where}, '{self._keys}': negative depth at step {step}; fix it or leave the key out")
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
    path: Path,
    columns: Sequence[Column],
    action: str,
    entries: Sequence[Entry],
    fps: float,
    notes: list[str],
    stated_by: str = "--map",
) -> Table:
    """`action` is the key that this format usually has; notes get one sentence for every guess."""
    for column in columns:
        if (size := math.prod(column.shape) * column.dtype.itemsize) > STEP_BYTES:
            raise PrismError(
                f"{path}: one step of '{column.key}' has {size / 1e6:.0f} MB, too large for a sensor; {AGAIN}"
            )
    given = {entry.name: entry for entry in entries}
    target = given.get(ACTION) or Entry((_action_key(path, columns, action, notes),), ACTION)
    act = _stream(path, columns, Entry(target.sources, ACTION, "vector", target.scale), fps, notes)
    notes += [
        f"action[{first}:{first + 4}] is a quaternion (if it is not: --sensor action.quaternions=)"
        for first in action_spec(act.columns).quaternions
    ]
    ignored = {key for entry in entries if entry.name == IGNORED for key in entry.sources}
    for key in ignored:
        find_column(columns, key, str(path))
    wanted = [entry for entry in entries if entry.name not in (ACTION, IGNORED)]
    used = {key for entry in (*wanted, target) for key in entry.sources} | ignored
    unused = [column for column in columns if column.key not in used]
    if not wanted or (len(entries) == 1 and stated_by == "--map"):  # one entry alone corrects a guess
        wanted = [*wanted, *_guess(unused, notes)]
    elif unused:
        notes.append(f"not in the table of {stated_by}, so left out: {', '.join(column.key for column in unused)}")
    if not wanted:
        keys = ", ".join(column.key for column in columns)
        raise PrismError(f"{path}: no key looks like a sensor; name them with --map SOURCE=SENSOR:KIND (it has {keys})")
    streams = tuple(_stream(path, columns, entry, fps, notes) for entry in wanted)
    try:
        check_sensors([stream.spec for stream in streams])
    except PrismError as error:
        raise PrismError(f"{path}: {error}; use --map SOURCE=SENSOR") from None
    return Table(streams, act)


_ACTIONS = ("action", "actions")  # what others call them
_NO_SENSORS = ("reward", "rewards", "done", "dones", "success", "discount", "terminated", "truncated", "is_first",
               "is_last", "is_terminal")  # fmt: skip


def is_outcome(key: str) -> bool:
    """Whether a simulator or a person adds this key afterwards; no robot has it."""
    return key.startswith("next.") or re.split(r"[./]", key)[-1].lower() in _NO_SENSORS


def _action_key(path: Path, columns: Sequence[Column], usual: str, notes: list[str]) -> str:
    """The key of the actions: as the format has it, or the only one that is called so; else the table to give."""
    keys = [column.key for column in columns]
    if usual in keys:
        return usual
    called = [key for key in keys if re.split(r"[./]", key)[-1].lower() in _ACTIONS]
    if len(called) == 1:
        notes.append(f"'{called[0]}' is taken for the actions (--map KEY=action changes it)")
        return called[0]
    guessed = _guess([column for column in columns if column.key not in called], [])
    table = " ".join(f"{entry.sources[0]}={entry.name}" for entry in guessed)
    vectors = [column.key for column in columns if guess_kind(column)[0] == "vector"]
    which = ", ".join(called or vectors) or "none that could be"
    raise PrismError(
        f"{path}: there is no key '{usual}': which are the actions ({which})? Choose it, with the sensors: --map "
        f"KEY=action {table}"
    )


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
        raise PrismError(f"{path}: '{label}' {problem}; state its kind: --map {label}={entry.name}:KIND")
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
    """The scale from the usual storage to metres, pixels and samples."""
    dtype = column.dtype
    if kind == "depth" and dtype.kind in "iu":
        notes.append(f"'{column.key}' holds {dtype}: read as millimetres (--map {column.key}=SENSOR:depth:SCALE)")
        return 0.001
    if kind == "audio" and dtype.kind == "i":
        return 1.0 / float(1 << (8 * dtype.itemsize - 1))
    if kind in ("rgb", "tactile") and dtype != np.uint8:
        raise PrismError(
            f"{path}: '{column.key}' holds {dtype} pixels: give the scale that makes them 0..255, "
            f"as in --map {column.key}={sensor_name(column.key)}:{kind}:255, or leave the key out"
        )
    return 1.0


class TableSource:
    """An EpisodeSource whose columns are read by `_raw`; the rest is here.

    A subclass sets path, fps, lengths, notes and `_arguments` (its own), calls `_use(table)`, and implements `_raw`.
    """

    path: Path
    fps: float
    lengths: IntArray
    notes: tuple[str, ...]
    _arguments: tuple[Any, ...]
    sometimes_absent: frozenset[str] = frozenset()  # sensors that `present` may have an entry for
    read_together = 32  # steps: each of these formats pays for opening, seeking or decoding, more than for the bytes

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), self._arguments  # locks and open files do not travel: a worker process opens it again

    def _use(self, table: Table, robot: str = "") -> None:
        self.table = table
        self.sensors = table.sensors
        self.action_dim = table.action.spec.shape[0]
        self.action_spec = action_spec(table.action.columns, robot)
        self._by_name = {stream.spec.name: stream for stream in table.streams}

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
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
        values = {s.spec.name: s.convert(raw, where, start, present.get(s.spec.name)) for s in chosen}
        actions: FloatArray = self.table.action.convert(raw, where, start).astype(np.float32, copy=False)
        return Episode(values, actions, present)

    def _where(self, episode: int) -> str:
        """File and episode, for messages."""
        return f"{self.path}: episode {episode}"

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        """Steps start..stop of these columns, and where a key was absent."""
        raise NotImplementedError


def _check(values: Array, column: Column, length: int, where: str) -> None:
    expected = (length,) if column.is_text else (length, *column.shape)
    if values.shape != expected or (not column.is_text and values.dtype != column.dtype):
        raise PrismError(
            f"{where}, '{column.key}': is {values.dtype} {values.shape}, the dataset's other steps say "
            f"{column.dtype} {expected}; record or copy it again"
        )
