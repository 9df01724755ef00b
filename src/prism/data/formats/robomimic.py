"""robomimic's HDF5: `data/demo_i/{actions, obs/<key>}`, attributes `total`, `env_args`, `num_samples`.

Sensors are the keys of `obs`. Rewards, dones, simulator states and `next_obs` are not read. The format has no
checksum (unless a dataset was written with HDF5's own): damage inside the numbers cannot be seen.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prism_client import ActionKind

from prism.data.episodes import Array, IntArray
from prism.data.formats.hdf5_probe import check_deflated, probe, strange
from prism.data.formats.recent import Recent
from prism.data.formats.table import AGAIN, Absent, Column, Columns, Entry, Raw, TableSource, make_table
from prism.errors import PrismError, need, unreadable

DEFAULT_FPS = 20.0  # robosuite's control rate
_SUFFIXES = (".hdf5", ".h5")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OPEN = 64  # HDF5 datasets held open: each has a cache of its own


def is_robomimic(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix in _SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(8) == _SIGNATURE


def kind_of_controller(env_kwargs: object) -> ActionKind | None:
    """Of robosuite's operational-space controllers, of one arm or several; None: unknown, or of several kinds."""
    configs = env_kwargs.get("controller_configs") if isinstance(env_kwargs, dict) else None
    parts = configs.get("body_parts") if isinstance(configs, dict) else None  # robosuite 1.5
    arms = list(parts.values()) if isinstance(parts, dict) else configs if isinstance(configs, list) else [configs]
    kinds: set[ActionKind | None] = set()
    for arm in arms:
        arm = arm if isinstance(arm, dict) else {}
        stated = arm.get("control_delta", {"delta": True, "absolute": False}.get(str(arm.get("input_type"))))
        known = str(arm.get("type")).startswith("OSC") and isinstance(stated, bool)
        kinds.add((ActionKind.DELTA if stated else ActionKind.ABSOLUTE) if known else None)
    return kinds.pop() if len(kinds) == 1 else None


class RobomimicSource(TableSource):
    """A robomimic dataset. Opening it looks at the shapes of every demonstration, reading reads what is asked."""

    def __init__(
        self,
        path: Path,
        fps: float | None = None,
        entries: Sequence[Entry] = (),
        mask: str | None = None,
        trusted: bool = False,
    ) -> None:
        self.path = path
        self._arguments = (path, fps, tuple(entries), mask, True)  # a worker process need not look again
        self._lock = threading.Lock()
        self._datasets: Recent[tuple[str, str], Any] = Recent(_OPEN)
        self._sound: set[tuple[str, str]] = set()  # which were looked at by check_deflated
        self._h5py = need("h5py", "data", f"{path}: HDF5")
        if not trusted and (problem := probe(path)):
            raise PrismError(f"{path}: damaged: {problem}; {AGAIN}")
        with unreadable(f"{path}: truncated or not an HDF5 file", AGAIN):
            self._file = self._h5py.File(path, "r")
            if not trusted and (problem := strange(self._file)):
                raise PrismError(f"{path}: {problem}; write everything into one file, in smaller chunks")
        notes: list[str] = []
        with unreadable(f"{path}: not readable as robomimic's layout", AGAIN):
            self._demos = self._find_demos(mask, notes)
            self.fps = self._rate(fps, notes)
            columns, self.lengths = self._survey()
        self._use(make_table(path, columns, "actions", entries, self.fps, notes))
        if [column.key for column in self.table.action.columns] == ["actions"]:
            self.action_spec = replace(self.action_spec, kind=kind_of_controller(self._environment().get("env_kwargs")))
        self.notes = tuple(notes)

    def _find_demos(self, mask: str | None, notes: list[str]) -> list[str]:
        data = self._file.get("data")
        if not isinstance(data, self._h5py.Group):
            raise PrismError(f"{self.path}: group 'data' is missing; this is not robomimic's layout")
        numbered = {int(m[1]): name for name in data if (m := re.fullmatch(r"demo_(\d{1,9})", name))}
        demos = [numbered[number] for number in sorted(numbered)]
        if not demos:
            raise PrismError(f"{self.path}: 'data' holds no demo_0, demo_1, ...; this is not robomimic's layout")
        total = data.attrs.get("total")
        if total is not None:
            counts = {demo: _samples(data[demo]) for demo in demos}
            found = sum(counts.values())
            if found != int(total):
                gaps = sorted(set(range(len(demos))) - set(numbered))
                missing = f"demo_{gaps[0]} is missing" if gaps else "a demo is missing or cut"
                raise PrismError(
                    f"{self.path}: 'data' says {int(total)} samples, its demos have {found}: {missing}; {AGAIN}"
                )
        if len(numbered) <= max(numbered):  # legal: people remove demonstrations; but it may have been lost
            gap = min(set(range(max(numbered))) - set(numbered))
            notes.append(f"demo_{gap} is not there, though demo_{max(numbered)} is: removed, or lost?")
        masks = self._file.get("mask")
        filters = list(masks) if isinstance(masks, self._h5py.Group) else []
        chosen: set[str] | None = None
        for name in filters:
            listed = {entry.decode() if isinstance(entry, bytes) else str(entry) for entry in masks[name][()].tolist()}
            if absent := sorted(listed - set(demos)):
                raise PrismError(f"{self.path}: 'mask/{name}' lists {absent[0]}, which 'data' lacks; {AGAIN}")
            if name == mask:
                chosen = listed
        if mask is not None and chosen is None:
            raise PrismError(f"{self.path}: there is no mask '{mask}'; it has {', '.join(filters) or 'none'}")
        if filters and mask is None:
            notes.append(f"all {len(demos)} demonstrations are used; the file's masks ({', '.join(filters)}) are not")
        return demos if chosen is None else [demo for demo in demos if demo in chosen]

    def _rate(self, fps: float | None, notes: list[str]) -> float:
        if fps is not None:
            return float(fps)
        try:
            stored = self._environment()["env_kwargs"]["control_freq"]
            if 0 < float(stored) < 1e6:
                return float(stored)
        except (KeyError, TypeError, ValueError):
            pass
        notes.append(f"the file does not say its rate: {DEFAULT_FPS:g} steps a second are assumed")
        return DEFAULT_FPS

    def _environment(self) -> dict[str, Any]:
        """`env_args`: how robomimic builds the environment; empty where it is missing or damaged."""
        try:
            found = json.loads(self._file["data"].attrs["env_args"])
        except (KeyError, TypeError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _survey(self) -> tuple[list[Column], IntArray]:
        """The columns, by the first demonstration, and every length; all demonstrations must agree."""
        columns: dict[str, Column] = {}
        lengths = []
        for number, demo in enumerate(self._demos):
            where = f"{self.path}: episode {number}"
            found = self._file["data"][demo]
            shapes = {"actions": found.get("actions")}
            obs = found.get("obs")
            if isinstance(obs, self._h5py.Group):
                shapes |= {key: obs[key] for key in obs}
            bad = [key for key, value in shapes.items() if not isinstance(value, self._h5py.Dataset) or not value.shape]
            if bad or len(shapes) == 1:
                key = f"{demo}/{'actions' if 'actions' in bad else 'obs/' + bad[0] if bad else 'obs'}"
                raise PrismError(f"{where}: '{key}' is missing or no array; {AGAIN}")
            length = int(shapes["actions"].shape[0])
            if length == 0 or length != _samples(found):
                raise PrismError(
                    f"{where}: '{demo}' says {_samples(found)} samples, its actions have {length}; {AGAIN}"
                )
            if number and set(shapes) != set(columns):
                odd = sorted(set(shapes) ^ set(columns))[0]
                raise PrismError(
                    f"{where}: '{demo}' and {self._demos[0]} differ in the key '{odd}'; leave one of them out"
                )
            for key, value in shapes.items():
                column = Column(key, tuple(map(int, value.shape[1:])), np.dtype(value.dtype))
                known = columns.setdefault(key, column)
                if int(value.shape[0]) != length or (column.shape, column.dtype) != (known.shape, known.dtype):
                    raise PrismError(
                        f"{where}: '{demo}', '{key}' is {value.dtype} {value.shape}, needs {known.dtype} "
                        f"{(length, *known.shape)} as in {self._demos[0]}; {AGAIN}"
                    )
            lengths.append(length)
        if any(len(column.shape) == 3 for column in columns.values()) and "object" in columns:
            only = "the simulator's own state, which no robot has (there are cameras)"
            columns["object"] = Column("object", columns["object"].shape, columns["object"].dtype, skip=only)
        return list(columns.values()), np.array(lengths, np.int64)

    def _where(self, episode: int) -> str:
        return f"{self.path}: episode {episode} ({self._demos[episode]})"

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        return {key: self._rows(episode, key, start, stop) for key in columns}, {}

    def _rows(self, episode: int, key: str, start: int, stop: int) -> Array:
        demo = self._demos[episode]
        # a filter or a chunk's address may make no sense
        with unreadable(f"{self._where(episode)}, '{key}': cannot be read", AGAIN):
            with self._lock:
                dataset = self._datasets.get((demo, key))
                if dataset is None:
                    inside = key if key == "actions" else f"obs/{key}"
                    dataset = self._file[f"data/{demo}/{inside}"]
                    if (demo, key) not in self._sound:
                        check_deflated(dataset)
                        self._sound.add((demo, key))
                    self._datasets.keep((demo, key), dataset)
            values: Array = dataset[start:stop]
            return values


def _samples(demo: Any) -> int:
    """`num_samples`, or the number of actions if it is missing."""
    stored = demo.attrs.get("num_samples")
    return int(demo["actions"].shape[0] if stored is None else stored)
