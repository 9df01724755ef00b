"""Episodes of a robot as a dataset that grows: a folder of its own for each, whole or not there (kill -9, full disk).

    my-task/episode-000000/     the project's own format (data/formats/store.py), one episode
            episode-000001/     ...; what was never finished has a hidden name and is no episode

`Trace` keeps what happened, each stream with its own stamps; `Trace.episode` brings all of them to one rate (App. A).
`commands.npz` beside an episode holds what its steps do not say:

    time, sent, command, step, latency_ms    of each command: when it was due, when it was sent, what, of which step,
                                             how late it had arrived
    plan_step, plan, plan_ms             of each plan: the step that it was made for, (P, Tp, D), how long it took
    candidates, chosen                   (P, K, Tp, D) and which was executed; of servers that send them
"""

from __future__ import annotations

import io
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from prism_client import Plan

from prism.data.align import AlignConfig, Gaps, Timed, align, camera_clock, nearest
from prism.data.episodes import Episode
from prism.data.formats.episode_folders import COMMANDS, EPISODE, RecordingSource, is_recording
from prism.data.formats.film import FilmWriter
from prism.data.formats.store import is_store
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.io.files import HIDDEN, exclusive, explain_write_errors, remove_leftovers
from prism.robots.contract import Array, Robot
from prism.robots.guard import Seen
from prism.sensors import SensorSpec

Overrun = Literal["drop", "stop"]  # where pictures come faster than they are compressed


@dataclass
class Trace:
    """An episode as it happened."""

    robot: Robot
    films: Mapping[str, FilmWriter] = field(default_factory=dict)  # cameras whose pictures go there
    who: list[str] = field(default_factory=list)  # commanded, a step each
    latency_ms: list[float] = field(default_factory=list)  # from the tick to the command, a command each
    why: dict[str, int] = field(default_factory=dict)  # what the guard changed
    on_overrun: Overrun = "drop"
    _times: list[float] = field(default_factory=list)  # of the steps' first commands
    _sent: list[list[NDArray[np.float32]]] = field(default_factory=list)  # commands of each step
    _due: list[tuple[float, float, int]] = field(default_factory=list)  # of each command: due, sent, which step
    _labels: list[Array | None] = field(default_factory=list)
    _plans: list[tuple[int, Plan]] = field(default_factory=list)
    _step: int = -1
    _who: str = ""
    _label: Array | None = None
    _newest: dict[str, float] = field(default_factory=dict)
    _stamps: dict[str, list[float]] = field(default_factory=dict)
    _values: dict[str, list[Array]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Steps."""
        return len(self._sent)

    @property
    def actions(self) -> NDArray[np.float32]:
        """The executed or intended action of each step, (T, D)."""
        done = [self.robot.actions.whole(np.stack(sent)) for sent in self._sent]
        return np.stack([own if said is None else said for own, said in zip(done, self._labels, strict=True)])

    def see(self, seen: Seen) -> None:
        """Record the new readings of trusted sensors."""
        for name, value in seen.observation.items():
            stamp = seen.readings[name].stamp
            if stamp <= self._newest.get(name, -np.inf):
                continue
            self._newest[name] = stamp
            if name not in self.films:
                self._values.setdefault(name, []).append(value)
            elif not self.films[name].add(value):
                continue  # a reading that never came: absent, where none is near
            self._stamps.setdefault(name, []).append(stamp)

    def overrun(self) -> str:
        """Which camera's pictures are dropped, where that ends an episode; empty if none is."""
        lost = (name for name, film in self.films.items() if film.dropped)
        return next(lost, "") if self.on_overrun == "stop" else ""

    def decide(self, step: int, who: str, plan: Plan | None, label: Array | None) -> None:
        """A step begins: who commands, with which new plan; `label`: what to record where it is not what is sent."""
        self._who, self._label = who, label
        if plan is not None:
            self._plans.append((step, plan))

    def revise(self, step: int, plan: Plan | None) -> None:
        """The plan of a step came after its first command."""
        if plan is not None:
            self._plans.append((step, plan))

    def command(self, step: int, at: float, action: NDArray[np.float32], latency_ms: float, sent: float) -> None:
        """One command of step `step`, due at `at`, limited and sent at `sent`."""
        if step != self._step:
            self._step = step
            self._times.append(at)
            self._sent.append([])
            self.who.append(self._who)
            self._labels.append(self._label)
        self._sent[-1].append(action)
        self._due.append((at, sent, step))
        self.latency_ms.append(latency_ms)

    def details(self) -> dict[str, Array]:
        """commands.npz"""
        due, sent, steps = np.array(self._due, np.float64).reshape(-1, 3).T
        found: dict[str, Array] = {
            "time": due,
            "sent": sent,
            "step": steps.astype(np.int64),
            "command": np.concatenate([np.stack(one) for one in self._sent]),
            "latency_ms": np.array(self.latency_ms, np.float32),
        }
        if plans := [(step, plan) for step, plan in self._plans if np.shape(plan.actions) == self._shape_of_plans()]:
            found["plan_step"] = np.array([step for step, _ in plans], np.int64)
            found["plan"] = np.stack([np.asarray(plan.actions, np.float32) for _, plan in plans])
            found["plan_ms"] = np.array([plan.info.latency_ms for _, plan in plans], np.float32)
            candidates = [plan.candidates for _, plan in plans if len(plan.candidates)]
            if len({one.shape for one in candidates}) == 1 and len(candidates) == len(plans):
                found["candidates"] = np.stack(candidates).astype(np.float32)
                found["chosen"] = np.array([plan.info.index for _, plan in plans], np.int64)
        return found

    def _shape_of_plans(self) -> tuple[int, ...]:
        return np.shape(self._plans[0][1].actions)

    def commanded_by(self) -> list[tuple[str, int]]:
        """Who, for how many steps in a row."""
        return [(who, len(list(run))) for who, run in groupby(self.who)]

    def late(self) -> int:
        """Commands that came after the end of their slot."""
        return int(np.sum(np.array(self.latency_ms) > 1e3 / self.robot.rate))

    def episode(self) -> tuple[Episode, tuple[Gaps, ...]]:
        """At the robot's steps, on the clock of the commands. A film's stream is the number of the frame, (T,)."""
        if len(self) < 2:
            raise PrismError("an episode has at least two steps")
        times = np.array(self._times)
        clock = SensorSpec("actions", "vector", (self.robot.actions.dim,))
        streams = {"actions": Timed(clock, times, self.actions)}
        for spec in self.robot.sensors:
            if stamps := self._stamps.get(spec.name):
                filmed = spec.name in self.films
                values = np.arange(len(stamps)) if filmed else self._values[spec.name]
                streams[spec.name] = _timed(spec, np.array(stamps), values)
        aligned = align(streams, "actions", AlignConfig(self.robot.fps))
        rows = len(aligned.clock)
        found: dict[str, Array] = {}
        present: dict[str, NDArray[np.bool_]] = {}
        for spec in self.robot.sensors:
            here, blank = spec.name in aligned.streams, np.zeros((rows, *spec.shape), spec.dtype)
            dtype = np.dtype(np.int64) if here and spec.name in self.films else spec.dtype
            found[spec.name] = aligned.streams.get(spec.name, blank).astype(dtype)
            present[spec.name] = aligned.present.get(spec.name, np.zeros(rows, np.bool_))
        # a command is valid from its tick on: never a mean of two
        actions = self.actions[nearest(times, camera_clock(times, self.robot.fps))]
        gaps = tuple(gap for gap in aligned.gaps if gap.name != "actions")
        return Episode(found, actions.astype(np.float32), present), gaps

    def heard(self, gaps: Sequence[Gaps]) -> dict[str, dict[str, float]]:
        """For each sensor: readings a second, longest gap, and steps at which it was absent."""
        found = {}
        for gap in gaps:
            stamps = np.array(self._stamps[gap.name])
            apart = np.diff(stamps) if len(stamps) > 1 else np.zeros(1)
            rate = (len(stamps) - 1) / max(float(stamps[-1] - stamps[0]), 1e-9)
            found[gap.name] = {"rate": round(rate, 2), "gap": round(float(apart.max()), 4), "absent": gap.absent}
            if gap.name in self.films and (dropped := self.films[gap.name].dropped):
                found[gap.name]["dropped"] = dropped
        return found

    def corrections(self, episode: Episode) -> list[Episode]:
        """The stretches of `episode` that a policy did not command, of two steps or more."""
        times = np.array(self._times)
        who = np.array(self.who)[nearest(times, camera_clock(times, self.robot.fps))]
        found, at = [], 0
        for policy, run in groupby(who == "policy"):
            first, at = at, at + len(list(run))
            if not policy and at - first >= 2:
                part = slice(first, at)
                present = {name: mask[part] for name, mask in episode.present.items()}
                streams = {name: values[part] for name, values in episode.streams.items()}
                found.append(Episode(streams, episode.actions[part], present))
        return found


def _timed(spec: SensorSpec, stamps: NDArray[np.float64], values: Sequence[Array] | Array) -> Timed:
    if spec.kind != "audio":
        return Timed(spec, stamps, values if isinstance(values, np.ndarray) else np.stack(values))
    size = spec.shape[0]  # the samples that end at the stamp
    chunks = np.full(len(values), size, np.int64)
    return Timed(spec, stamps - size / spec.sample_rate, np.concatenate(values), chunks=chunks)


def choose_films(robot: Robot, no_video: bool, say: Callable[[str], None] = print) -> list[str]:
    """Which cameras become video while they are recorded, and say so."""
    cameras = [spec.name for spec in robot.sensors if spec.kind == "rgb"]
    if not cameras or no_video:
        return []
    if find_spec("av") is None:
        say("cameras are kept pixel by pixel; as video they are smaller: pip install 'prism-policy[data]'")
        return []
    say(f"as video, compressed meanwhile (--no-video keeps every pixel): {', '.join(cameras)}")
    return cameras


class Recording:
    """A dataset that episodes are added to. PrismError, before anything moves, where they would not fit it."""

    def __init__(self, path: Path, robot: Robot, task: str) -> None:
        self.path, self.robot, self.task = Path(path), robot, task
        self.sensors = tuple(replace(spec, fps=0.0, max_age=0.0) for spec in robot.sensors)
        self.episodes = 0
        strange = self.path.exists() and any(not child.name.startswith(".") for child in self.path.iterdir())
        if is_store(self.path) or (strange and not is_recording(self.path)):
            raise PrismError(f"{path}: exists and is not a recording of a robot; choose another folder")
        if is_recording(self.path):
            there = RecordingSource(self.path)
            theirs = (there.task, there.fps, there.action_spec, there.sensors)
            mine = (task, robot.fps, robot.actions.spec, self.sensors)
            what = ("task", "rate", "action space", "set of sensors")
            if other := [name for name, old, new in zip(what, theirs, mine, strict=True) if old != new]:
                raise PrismError(f"{path}: was recorded with another {' and '.join(other)}; use another folder")
            self.episodes = len(there.lengths)

    def next_seed(self) -> int:
        """After the last that is recorded; 0 where nothing is."""
        made = RecordingSource(self.path).provenances if self.episodes else ()
        return max((int(said["seed"]) for said in made if isinstance(said.get("seed"), int)), default=-1) + 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else records there meanwhile; what a killed process left half-written goes."""
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path):
            remove_leftovers(self.path)
            yield

    @contextmanager
    def filming(self, cameras: Collection[str]) -> Iterator[dict[str, FilmWriter]]:
        """For one episode: what compresses these cameras, in a hidden folder that is gone afterwards."""
        if not cameras:
            yield {}
            return
        folder = self.path / f"{HIDDEN}films-{secrets.token_hex(8)}"  # other writers leave this name alone
        folder.mkdir(parents=True)
        chosen = [spec for spec in self.robot.sensors if spec.name in cameras]
        films = {spec.name: FilmWriter(folder, spec, spec.fps or self.robot.rate) for spec in chosen}
        try:
            yield films
        finally:
            for film in films.values():
                film.abandon()
            shutil.rmtree(folder, ignore_errors=True)

    def add(
        self,
        episode: Episode,
        provenance: Mapping[str, Any],
        details: Mapping[str, Array] | None = None,
        films: Mapping[str, FilmWriter] | None = None,
    ) -> Path:
        """The next episode, on disk when this returns; `details`: commands.npz beside it; `films`: where its frames are
        (what other episodes are parts of may share one)."""
        with explain_write_errors(self.path, f"{self.episodes} episodes are there"):
            return self._add(episode, provenance, details or {}, films or {})

    def _add(
        self,
        episode: Episode,
        provenance: Mapping[str, Any],
        details: Mapping[str, Array],
        films: Mapping[str, FilmWriter],
    ) -> Path:
        finished = {name: film for name, writer in films.items() if (film := writer.close()) is not None}
        numbers = [int(match[1]) for child in self.path.glob("episode-*") if (match := re.search(EPISODE, child.name))]
        target = self.path / f"episode-{max(numbers, default=-1) + 1:06d}"
        what = (self.sensors, self.robot.actions.dim, self.robot.fps, self.task)
        spec = self.robot.actions.spec
        with DatasetWriter(target, *what, provenance=provenance, action=spec, films=finished) as writer:
            writer.add(episode.streams, episode.actions, episode.present)
            if details:
                content = io.BytesIO()
                np.savez_compressed(content, **details)  # type: ignore[arg-type]
                writer.attach(COMMANDS, content.getvalue())
        self.episodes += 1
        return target
