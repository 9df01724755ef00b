"""What a user says of the sensors of a dataset: preprocessing, rate, what a healthy reading looks like.

    agentview_image.crop=76,76  rgb_*.random_shift=4  depth_static.clip=0.2,3  force.limits=-60,60

action.quaternions=3:7 says which dimensions of the actions are a unit quaternion (nothing behind =: none are);
action.units=mm and action.scale=0.05 state what they measure: one for all dimensions, or m,m,m,rad one each.
NAME.KEY=VALUE; the keys are those of SensorSpec, NAME may be a pattern. What a sensor is called, and of which kind it
is, says --map (prism.data.formats.table).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from prism_client import ActionKind

from prism.data.episodes import Episode, EpisodeSource, IntArray, Names, check_slice, wanted_sensors
from prism.errors import PrismError
from prism.io.jsonconfig import with_settings
from prism.sensors import ActionSpec, SensorSpec, action_spec_of


@dataclass(frozen=True)
class SourceView:
    """Base of views: delegates to the source. A view adds its `sensors` and `read`."""

    source: EpisodeSource

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def action_dim(self) -> int:
        return self.source.action_dim

    @property
    def fps(self) -> float:
        return self.source.fps

    @property
    def lengths(self) -> IntArray:
        return self.source.lengths

    @property
    def notes(self) -> tuple[str, ...]:
        return self.source.notes

    def __getattr__(self, name: str) -> Any:
        """Optional attributes of a format: task, version, action_spec, sometimes_absent, read_together, files ..."""
        if name == "source" or name.startswith("__"):  # a copy or a pickle that is not filled yet
            raise AttributeError(name)
        return getattr(self.source, name)


@dataclass(frozen=True)
class Respecified(SourceView):
    """A source whose sensors have other specs, or that has fewer of them: what is left out is never read."""

    sensors: tuple[SensorSpec, ...]
    action_spec: ActionSpec

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        names = [sensor.name for sensor in wanted_sensors(self, streams)]
        return self.source.read(episode, start, stop, names)


@dataclass(frozen=True)
class LaterActions(SourceView):
    """Step t of a source with the action of step t + 1 (the last one twice): the paper's target A_{t+1:t+Tp}."""

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return self.source.sensors

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        length = int(self.lengths[episode])
        actions = self.source.read(episode, min(start + 1, length - 1), min(stop + 1, length), ()).actions
        missing = stop - start - len(actions)
        actions = np.concatenate([actions, np.repeat(actions[-1:], missing, axis=0)])
        return dataclasses.replace(self.source.read(episode, start, stop, streams), actions=actions)


def with_sensors(source: EpisodeSource, names: Collection[str]) -> EpisodeSource:
    """The same dataset with only the named sensors (PrismError for one that it lacks)."""
    return Respecified(source, wanted_sensors(source, names), action_spec_of(source))


# What the data are, not what is done with them.
_FIXED = ("name", "kind", "shape", "sample_rate", "names", "colour", "seen")
KEYS = tuple(field.name for field in dataclasses.fields(SensorSpec) if field.name not in _FIXED)


def with_sensor_settings(source: EpisodeSource, texts: Sequence[str]) -> EpisodeSource:
    """The source with its sensors as the texts say; PrismError names the one that is wrong."""
    specs = {spec.name: spec for spec in source.sensors}
    action = action_spec_of(source)
    for text in texts:
        target, equals, value = text.partition("=")
        pattern, _, key = target.strip().rpartition(".")
        if target.strip() == "action.quaternions" and equals:
            action = dataclasses.replace(action, quaternions=_quaternions(value, text))
            action.check(source.action_dim, f"--sensor {text}: {source.path}")
            continue
        if target.strip() == "action.kind" and equals:
            action = _stated(action, value.strip(), f"--action-kind {value.strip()}: {source.path}")
            continue
        if target.strip() in ("action.units", "action.scale") and equals:
            action = _measured(action, key, value, source.action_dim, f"--sensor {text}: {source.path}")
            continue
        if not equals or not pattern or key not in KEYS:
            raise PrismError(f"--sensor {text}: write SENSOR.KEY=VALUE, where KEY is one of {', '.join(KEYS)}")
        chosen = [name for name in specs if fnmatchcase(name, pattern)]
        if not chosen:
            raise PrismError(f"--sensor {text}: {source.path} has no sensor '{pattern}'; it has {', '.join(specs)}")
        value = value.strip()
        if "," in value and not value.startswith("["):
            value = f"[{value}]"
        for name in chosen:
            try:
                specs[name] = with_settings(specs[name], (f"{key}={value}",))
            except PrismError as error:
                raise PrismError(f"--sensor {text}: {str(error).removeprefix('--set.')}") from None
    return Respecified(source, tuple(specs.values()), action) if texts else source


def with_kind(source: EpisodeSource, kind: ActionKind, where: str) -> EpisodeSource:
    """The source with actions of that kind, where it does not say it itself."""
    action = action_spec_of(source)
    if action.kind is kind:
        return source
    if action.kind is not None:
        raise PrismError(f"{where} has actions that are {action.kind}, not {kind}: use other data")
    return Respecified(source, source.sensors, dataclasses.replace(action, kind=kind))


def _stated(action: ActionSpec, word: str, where: str) -> ActionSpec:
    kind = ActionKind.parse(word)
    if kind is None:
        raise PrismError(f"{where}: use one of {ActionKind.words()}")
    if action.kind not in (None, kind):
        raise PrismError(f"{where} says that its actions are {action.kind}: drop the option, or fix the data")
    return dataclasses.replace(action, kind=kind)


def _measured(action: ActionSpec, key: str, value: str, dim: int, where: str) -> ActionSpec:
    """With action.units or action.scale as stated: one entry a dimension, or one for all but grippers and rotations."""
    words = [word.strip() for word in value.split(",")]
    numbers = [_number(word) for word in words]
    if key == "scale" and None in numbers:
        raise PrismError(f"{where}: write numbers, for example action.scale=0.05")
    entries: list[Any] = list(numbers if key == "scale" else words)
    if len(entries) == 1:
        neutral: Any = 1.0 if key == "scale" else ""
        entries = [neutral if entry in action.still(dim) else entries[0] for entry in range(dim)]
    known = getattr(action, key)
    if known and known != tuple(entries):
        raise PrismError(f"{where} says that action.{key} is {known}: drop the option, or fix the data")
    change: dict[str, Any] = {key: tuple(entries)}
    stated = dataclasses.replace(action, **change)
    stated.check(dim, where)
    return stated


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _quaternions(value: str, text: str) -> tuple[int, ...]:
    """'3:7,10:14' -> (3, 10)"""
    parts = [re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", part.strip()) for part in value.split(",") if part.strip()]
    if not all(part is not None and int(part[2] or int(part[1]) + 4) == int(part[1]) + 4 for part in parts):
        raise PrismError(f"--sensor {text}: write FIRST:END of four dimensions, for example action.quaternions=3:7")
    return tuple(sorted(int(part[1]) for part in parts if part is not None))


# ---------------------------------------------------------------------------
# Less data, drawn by a seed: a fraction of the steps, or a number of demonstrations.


@dataclass(frozen=True)
class Portion(SourceView):
    """Some episodes of a source, the first steps of each."""

    episodes: IntArray
    steps: IntArray
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *self.remarks)

    def files(self, episode: int, streams: Collection[str]) -> list[Path]:
        find = getattr(self.source, "files", None)
        return [] if find is None else list(find(int(self.episodes[episode]), streams))

    @property
    def lengths(self) -> IntArray:
        return self.steps

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return self.source.sensors

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        return self.source.read(int(self.episodes[episode]), start, stop, streams)


def draw(
    lengths: Sequence[int] | IntArray, fraction: float | None = None, count: int | None = None, seed: int = 0
) -> tuple[IntArray, IntArray]:
    """Which of the episodes of these lengths, and how many steps of each; neither fraction nor count: all.

    Episodes come in an order that the seed draws: `count` of them whole; or whole ones until `fraction` of all steps is
    reached, of the last as many as are missing. (Of play data, as CALVIN's, an episode is hours long: whole ones would
    not give a tenth.) With one seed less is contained in more, so that learning curves over the amount of data add
    demonstrations and never exchange them.
    """
    sizes = np.asarray(lengths, np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    if fraction is not None and count is not None:
        raise PrismError("give a fraction or a number of demonstrations, not both")
    taken = sizes[order]
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise PrismError(f"the fraction of the data to train on must be in (0, 1], not {fraction:g}")
        wanted = max(round(fraction * int(sizes.sum())), 1)
        taken = np.clip(wanted - (np.cumsum(taken) - taken), 0, taken)
    elif count is not None:
        if not 1 <= count <= len(sizes):
            raise PrismError(f"{count} demonstrations were asked for, there are {len(sizes)} to train on")
        taken = np.where(np.arange(len(taken)) < count, taken, 0)
    back = np.argsort(order)
    steps: IntArray = taken[back]
    episodes = np.flatnonzero(steps)
    return episodes.astype(np.int64), steps[episodes]


def portion(
    source: EpisodeSource, episodes: Sequence[int] | IntArray, lengths: IntArray, remarks: tuple[str, ...] = ()
) -> EpisodeSource:
    """The first steps of these episodes of the source; `remarks` are added to its notes."""
    return Portion(source, np.asarray(episodes, np.int64), np.asarray(lengths, np.int64), remarks)
