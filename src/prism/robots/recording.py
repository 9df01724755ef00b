"""Episodes of a robot as a dataset that grows: a folder of its own for each, whole or not there (kill -9, full disk).

    my-task/episode-000000/     the project's own format (data/formats/store.py), one episode
            episode-000001/     ...; what was never finished has a hidden name and is no episode

`Trace` keeps what happened, each stream with its own stamps; `Trace.episode` brings all of them to one rate (App. A).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.data.align import AlignConfig, Gaps, Timed, align, camera_clock, nearest
from prism.data.episodes import Episode
from prism.data.formats.recording import EPISODE, RecordingSource, is_recording
from prism.data.formats.store import is_store
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.robots.base import Array, Robot
from prism.robots.safety import Seen
from prism.sensors import SensorSpec


@dataclass
class Trace:
    """An episode as it happened."""

    robot: Robot
    who: list[str] = field(default_factory=list)  # commanded, a command each
    latency_ms: list[float] = field(default_factory=list)  # from the tick to the command
    why: dict[str, int] = field(default_factory=dict)  # what the guard changed
    _times: list[float] = field(default_factory=list)
    _actions: list[NDArray[np.float32]] = field(default_factory=list)
    _stamps: dict[str, list[float]] = field(default_factory=dict)
    _values: dict[str, list[Array]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._actions)

    def see(self, seen: Seen) -> None:
        """What is new, of what can be believed."""
        for name, value in seen.observation.items():
            stamps, stamp = self._stamps.setdefault(name, []), seen.readings[name].stamp
            if not stamps or stamp > stamps[-1]:
                stamps.append(stamp)
                self._values.setdefault(name, []).append(value)

    def command(self, at: float, action: NDArray[np.float32], who: str, latency_ms: float) -> None:
        self._times.append(at)
        self._actions.append(action)
        self.who.append(who)
        self.latency_ms.append(latency_ms)

    def commanded_by(self) -> list[tuple[str, int]]:
        """Who, for how many commands in a row."""
        return [(who, len(list(run))) for who, run in groupby(self.who)]

    def late(self) -> int:
        """Commands that came after the end of their slot."""
        return int(np.sum(np.array(self.latency_ms) > 1e3 / self.robot.rate))

    def episode(self) -> tuple[Episode, tuple[Gaps, ...]]:
        """At the robot's rate, on the clock of the commands."""
        if len(self) < 2:
            raise PrismError("an episode has at least two commands")
        times = np.array(self._times)
        clock = SensorSpec("actions", "vector", (self.robot.actions.dim,))
        streams = {"actions": Timed(clock, times, np.stack(self._actions))}
        for spec in self.robot.sensors:
            if spec.name in self._values:
                streams[spec.name] = _timed(spec, np.array(self._stamps[spec.name]), self._values[spec.name])
        aligned = align(streams, "actions", AlignConfig(self.robot.rate))
        rows = len(aligned.clock)
        values: dict[str, Array] = {}
        present: dict[str, NDArray[np.bool_]] = {}
        for spec in self.robot.sensors:
            blank = np.zeros((rows, *spec.shape), spec.dtype)
            values[spec.name] = aligned.streams.get(spec.name, blank).astype(spec.dtype)
            present[spec.name] = aligned.present.get(spec.name, np.zeros(rows, np.bool_))
        # a command is valid from its tick on: never a mean of two
        actions = np.stack(self._actions)[nearest(times, camera_clock(times, self.robot.rate))]
        gaps = tuple(gap for gap in aligned.gaps if gap.name != "actions")
        return Episode(values, actions.astype(np.float32), present), gaps


def _timed(spec: SensorSpec, stamps: NDArray[np.float64], values: list[Array]) -> Timed:
    if spec.kind != "audio":
        return Timed(spec, stamps, np.stack(values))
    size = spec.shape[0]  # the samples that end at the stamp
    chunks = np.full(len(values), size, np.int64)
    return Timed(spec, stamps - size / spec.sample_rate, np.concatenate(values), chunks=chunks)


class Recording:
    """A dataset that episodes are added to. PrismError, before anything moves, where they would not fit it."""

    def __init__(self, path: Path, robot: Robot, task: str) -> None:
        self.path, self.robot, self.task = Path(path), robot, task
        self.sensors = tuple(replace(spec, fps=0.0) for spec in robot.sensors)
        self.episodes = 0
        if is_store(self.path) or (self.path.exists() and not is_recording(self.path) and any(self.path.iterdir())):
            raise PrismError(f"{path}: exists and is no recording of a robot; choose another folder")
        if is_recording(self.path):
            there = RecordingSource(self.path)
            same = (there.sensors, there.fps, there.action_spec) == (self.sensors, robot.rate, robot.actions.spec)
            if not same or there.task != task:
                raise PrismError(
                    f"{path}: was recorded with another task, rate, action space or other sensors; use another folder"
                )
            self.episodes = len(there.lengths)

    def next_seed(self) -> int:
        """After the last that is recorded; 0 where nothing is."""
        made = RecordingSource(self.path).provenances if self.episodes else ()
        return max((int(said["seed"]) for said in made if isinstance(said.get("seed"), int)), default=-1) + 1

    def add(self, episode: Episode, provenance: Mapping[str, Any]) -> Path:
        """The next episode, on disk when this returns."""
        numbers = [int(match[1]) for child in self.path.glob("episode-*") if (match := re.search(EPISODE, child.name))]
        target = self.path / f"episode-{max(numbers, default=-1) + 1:06d}"
        what = (self.sensors, self.robot.actions.dim, self.robot.rate, self.task)
        with DatasetWriter(target, *what, provenance=provenance, action=self.robot.actions.spec) as writer:
            writer.add(episode.streams, episode.actions, episode.present)
        self.episodes += 1
        return target
