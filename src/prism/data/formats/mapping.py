"""Which key of a dataset becomes which sensor: the user's table, or a guess that says what it guessed.

A table is a list of entries `SOURCE=SENSOR[:KIND[:SCALE]]`:

    agentview_image=rgb_static                          the key's name, the sensor's name
    robot0_eef_pos+robot0_eef_quat=proprio:vector       several keys, joined into one vector
    depth_raw=depth_static:depth:0.001                  millimetres to metres
    rel_actions=action                                  what is to be learned

With a table nothing else is taken. Without one, every key that looks like a sensor is one, under its own name.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorKind

ACTION = "action"
_TACTILE = ("tactile", "digit", "gelsight")
_AUDIO = ("audio", "microphone", "sound")
_MAX_FLAT = 1024  # (H, W) arrays up to this size are flattened (keypoints); larger ones are images


@dataclass(frozen=True)
class Column:
    """One key of a dataset: one time step of it, as its file holds it. Text has dtype str and shape (max bytes,)."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str = ""  # what a guess calls the sensor; the key unless told
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
        if not equals or not name.strip() or not all(sources) or len(rest) > 2:
            raise PrismError(f"--map {text}: write SOURCE=SENSOR, SOURCE=SENSOR:KIND or SOURCE=SENSOR:KIND:SCALE")
        kind = rest[0] if rest and rest[0] else None
        if kind is not None and kind not in get_args(SensorKind):
            raise PrismError(f"--map {text}: no kind '{kind}'; use one of {', '.join(get_args(SensorKind))}")
        try:
            scale = float(rest[1]) if len(rest) == 2 else 0.0
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale) or (len(rest) == 2 and scale == 0):
            raise PrismError(f"--map {text}: the scale '{rest[1]}' is not a number other than 0")
        entries.append(Entry(sources, name.strip(), cast("SensorKind | None", kind), scale))
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PrismError(f"--map: two entries make the sensor '{twice[0]}'; rename one, or join their keys with '+'")
    return tuple(entries)


def sensor_name(key: str) -> str:
    """A key as a sensor's name, which can be a file's: /camera/color -> camera_color"""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", key).strip("_.-") or "sensor"


def guess_kind(column: Column) -> tuple[SensorKind | None, str]:
    """What a key looks like, by type, shape and name, and the reason if it is nothing."""
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
    return None, f"has shape {shape} a step and type {column.dtype}, no kind of sensor that it could be by its name"


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
