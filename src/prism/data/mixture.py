"""Several datasets as one: the union of their sensors, a sentence for every episode, a weight for each dataset.

A sensor that a dataset lacks is absent in all its episodes. Text sensors are one sensor, whatever each dataset calls
its own; the episodes of a dataset without one are told its words (`Member.text`), where the datasets do not all say the
same. What does not fit together is a PrismError: two action spaces, two rates, one name for two different sensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prism.data.episodes import (
    Array,
    BoolArray,
    Episode,
    EpisodeSource,
    FloatArray,
    IntArray,
    Names,
    check_slice,
    read_together,
    wanted_sensors,
)
from prism.data.guess_kind import guess_kind, sampled
from prism.data.pictures import as_recorded
from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorSpec, action_spec_of, encode_text
from prism.units import apart

TEXT, TEXT_BYTES = "text", 64  # the sensor of the sentences, where no dataset has one; its least size
_LONGEST = 512  # bytes of a sentence


@dataclass(frozen=True)
class Member:
    """One of the datasets."""

    source: EpisodeSource
    weight: float = 1.0  # how often a step of it is drawn in training, relative to the others
    text: str = ""  # its words, for episodes without a text sensor; "": nothing is known
    copies: int = 1  # of each episode (mirror images): copy c of episode e is number c * originals + e

    @property
    def where(self) -> str:
        return str(self.source.path)


class Mixture:
    """An EpisodeSource: the episodes of the members, one member after the other."""

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise PrismError("a mixture needs at least one dataset; give their paths")
        for member in members:
            check_weight(member.weight, member.where)
        self.members = tuple(members)
        self.path = Path(members[0].source.path)
        self.paths = tuple(Path(member.source.path) for member in members)
        self.action_dim, self.fps = members[0].source.action_dim, members[0].source.fps
        self.action_spec = _one_action_space(self.members)
        self.lengths: IntArray = np.concatenate([member.source.lengths for member in members]).astype(np.int64)
        self.first: IntArray = np.cumsum([0, *(len(member.source.lengths) for member in members)], dtype=np.int64)
        self.remarks: list[str] = []
        self._own = _own_names(self.members)  # of each member: the mixture's name of a sensor -> its own
        self.recorded = self._union()  # as the robot has them; pictures in memory may be smaller (data/pictures.py)
        self.sensors = self._small()
        self.task = members[0].text if len({member.text for member in members}) == 1 else ""
        _check_motion(self.members, self.action_spec)
        self.read_together = max(read_together(member.source) for member in members)

    @property
    def notes(self) -> tuple[str, ...]:
        own = [f"{member.where}: {note}" for member in self.members for note in member.source.notes]
        return (*own, *self.remarks)

    @property
    def weights(self) -> FloatArray | None:
        """(E,) of every episode; None: all alike."""
        each = [member.weight for member in self.members]
        return None if len(set(each)) == 1 else np.repeat(each, np.diff(self.first)).astype(np.float32)

    @property
    def sometimes_absent(self) -> frozenset[str]:
        names = [sensor.name for sensor in self.sensors]
        found: set[str] = set()
        for own, member in zip(self._own, self.members, strict=True):
            absent = getattr(member.source, "sometimes_absent", own.values())
            found |= {name for name in names if name not in own or own[name] in absent}
        return frozenset(found)

    def files(self, episode: int, streams: Collection[str]) -> list[Path]:
        number, local = self.member_of(episode)
        find = getattr(self.members[number].source, "files", None)
        own = self._own[number]
        return [] if find is None else list(find(local, [own[name] for name in streams if name in own]))

    def member_of(self, episode: int) -> tuple[int, int]:
        """The member that an episode is of, and its number there."""
        number = int(np.searchsorted(self.first, episode, side="right")) - 1
        return number, episode - int(self.first[number])

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        number, local = self.member_of(episode)
        member, own = self.members[number], self._own[number]
        wanted = wanted_sensors(self, streams)
        part = member.source.read(local, start, stop, [own[spec.name] for spec in wanted if spec.name in own])
        values: dict[str, Array] = {}
        present: dict[str, BoolArray] = {}
        for spec in wanted:
            name = own.get(spec.name)
            if name is not None:
                values[spec.name] = _padded(part.streams[name], spec)
                if name in part.present:
                    present[spec.name] = part.present[name]
            elif spec.kind == "text" and spec.name == self._text and member.text:
                values[spec.name] = np.tile(encode_text(member.text, spec.shape[0]), (stop - start, 1))
            else:
                values[spec.name] = np.zeros((stop - start, *spec.shape), spec.dtype)
                present[spec.name] = np.zeros(stop - start, np.bool_)
        return Episode(values, part.actions, present)

    def _union(self) -> tuple[SensorSpec, ...]:
        found: dict[str, tuple[SensorSpec, str]] = {}
        for own, member in zip(self._own, self.members, strict=True):
            specs = {spec.name: spec for spec in as_recorded(member.source)}
            for name, theirs in ((name, replace(specs[key], name=name)) for name, key in own.items()):
                if name not in found:
                    found[name] = theirs, member.where
                    continue
                spec, where = found[name]
                _check_same(spec, where, theirs, member.where)
                if theirs.shape > spec.shape:  # text alone may differ: the longest holds all of them
                    spec = replace(spec, shape=theirs.shape)
                if replace(theirs, shape=spec.shape, names=spec.names) != spec:
                    self.remarks.append(f"'{name}' is prepared as in {where}, also where it is of {member.where}")
                found[name] = spec, where
        texts = [name for name, (spec, _) in found.items() if spec.kind == "text"]
        self._text = texts[0] if texts else TEXT
        said = {member.text for member in self.members}
        if not texts and len(said) > 1:
            longest = max(len(text.encode()) for text in said)
            size = max(TEXT_BYTES, -(-longest // 16) * 16)
            if longest > _LONGEST:
                raise PrismError(f"a sentence has {longest} bytes, {_LONGEST} are allowed: shorten it with --text")
            if TEXT in found:
                raise PrismError(f"'{TEXT}' is a sensor that is not text: give it another name (--map KEY=NAME)")
            found[TEXT] = SensorSpec(TEXT, "text", (size,)), ""
        self._check_sentences(found)
        return tuple(spec for spec, _ in found.values())

    def _small(self) -> tuple[SensorSpec, ...]:
        """The sensors with the sizes that the members show; PrismError where one is shrunk otherwise than another."""
        found: dict[str, tuple[SensorSpec, str]] = {}
        for own, member in zip(self._own, self.members, strict=True):
            specs = {spec.name: spec for spec in member.source.sensors}
            for name, spec in ((name, replace(specs[key], name=name)) for name, key in own.items()):
                _check_same(*found.setdefault(name, (spec, member.where)), spec, member.where)
        shapes = {name: spec for name, (spec, _) in found.items() if spec.kind != "text"}
        return tuple(shapes.get(spec.name, spec) for spec in self.recorded)

    def _check_sentences(self, found: dict[str, tuple[SensorSpec, str]]) -> None:
        if self._text not in found:
            return
        size = found[self._text][0].shape[0]
        for own, member in zip(self._own, self.members, strict=True):
            if self._text in own:
                continue
            if (long := len(member.text.encode())) > size:
                raise PrismError(
                    f"{member.where}: its sentence has {long} bytes, the sensor '{self._text}' {size}: "
                    "shorten it with --text, one for each dataset"
                )
            told = (
                f"instruction of every episode: '{member.text}'" if member.text else "the episodes have no instruction"
            )
            self.remarks.append(f"{member.where}: {told}")


def check_weight(weight: float, where: str) -> None:
    if not (math.isfinite(weight) and weight > 0):
        raise PrismError(f"{where}: its weight is {weight:g}; use more than 0, or leave the dataset out")


def _own_names(members: Sequence[Member]) -> list[dict[str, str]]:
    """For each member: the mixture's name of a sensor -> its own. Only text sensors differ."""
    texts = [[spec.name for spec in member.source.sensors if spec.kind == "text"] for member in members]
    shared = next((names[0] for names in texts if len(names) == 1), TEXT)
    found = []
    for names, member in zip(texts, members, strict=True):
        others = {spec.name for spec in member.source.sensors}
        rename = {names[0]: shared} if len(names) == 1 and shared not in others else {}
        found.append({rename.get(spec.name, spec.name): spec.name for spec in member.source.sensors})
    return found


def _one_action_space(members: Sequence[Member]) -> ActionSpec:
    first = members[0]
    known = action_spec_of(first.source)
    for member in members[1:]:
        theirs = action_spec_of(member.source)
        separate = "one policy cannot learn both: train one for each"
        if member.source.action_dim != first.source.action_dim:
            sizes = f"{first.source.action_dim} dimensions in {first.where}, {member.source.action_dim}"
            raise PrismError(f"actions have {sizes} in {member.where}: {separate}")
        if not math.isclose(member.source.fps, first.source.fps, rel_tol=0.01):
            raise PrismError(
                f"{first.where} has {first.source.fps:g} steps a second, {member.where} {member.source.fps:g}: bring "
                "them to one rate, or give --fps where the format stores none"
            )
        for key in ("kind", "names", "quaternions", "units", "scale"):
            ours, other = getattr(known, key), getattr(theirs, key)
            if ours and other and ours != other:
                raise PrismError(f"action.{key} is {ours} in {first.where}, {other} in {member.where}: {separate}")
        if known.quaternions != theirs.quaternions:
            raise PrismError(
                f"action.quaternions is {known.quaternions} in {first.where}, {theirs.quaternions} in {member.where}: "
                "set it for all with --sensor action.quaternions=FIRST:END"
            )
        known = ActionSpec(
            known.names or theirs.names,
            known.quaternions,
            known.robot if known.robot == theirs.robot else "",
            known.kind or theirs.kind,
            known.units or theirs.units,
            known.scale or theirs.scale,
        )
    return known


def _check_motion(members: Sequence[Member], known: ActionSpec) -> None:
    """PrismError where what the members do not say of their actions contradicts what others say, or show."""
    spreads = []
    for member in members if len(members) > 1 else ():
        found = sampled(member.source)
        if known.kind is not None and action_spec_of(member.source).kind is None:
            guess = guess_kind(member.source)
            if guess.kind is not known.kind:
                theirs = f"they look {guess.kind}" if guess.kind else "the data do not show it"
                raise PrismError(
                    f"actions are {known.kind} in another dataset, unknown in {member.where}: {theirs}. If they are "
                    f"{known.kind}, too, pass --action-kind {known.kind} (prism data convert --sensor action.kind=...)"
                )
        if found is not None:
            moving = np.setdiff1d(np.arange(member.source.action_dim), known.still(member.source.action_dim))
            spreads.append((found.spread()[moving], member.where))
    for spread, where in spreads[1:]:
        if times := apart(spread, spreads[0][0]):
            raise PrismError(
                f"actions spread {times:.4g} times as far in {where} as in {spreads[0][1]}: another unit? bring them "
                "to one (prism data convert --map KEY=action:vector:SCALE), or train one policy for each"
            )


def _check_same(spec: SensorSpec, where: str, theirs: SensorSpec, there: str) -> None:
    """PrismError where one name means two sensors."""
    sizes = spec.kind != "text" and spec.shape != theirs.shape
    if spec.kind != theirs.kind or sizes or spec.sample_rate != theirs.sample_rate:
        ours, other = (
            f"{one.kind} {one.shape}" + (f" at {one.sample_rate} Hz" if one.sample_rate else "")
            for one in (spec, theirs)
        )
        size = f", bring it to one size (prism data convert --sensor {spec.name}.resize=HEIGHT,WIDTH)"
        raise PrismError(
            f"'{spec.name}' is {ours} in {where}, {other} in {there}: leave it out (--without {spec.name})"
            + (size if spec.is_image and theirs.is_image else "")
            + ", or give one another name (prism data convert --map KEY=NAME)"
        )
    if spec.names and theirs.names and spec.names != theirs.names:
        raise PrismError(
            f"'{spec.name}' has the entries {' '.join(spec.names)} in {where}, {' '.join(theirs.names)} in {there}: "
            f"leave it out (--without {spec.name}), or give one another name (prism data convert --map KEY=NAME)"
        )


def _padded(values: Array, spec: SensorSpec) -> Array:
    """Text, with zeros up to the mixture's size."""
    missing = spec.shape[0] - values.shape[1] if spec.kind == "text" else 0
    return np.pad(values, ((0, 0), (0, missing))) if missing else values


# ---------------------------------------------------------------------------
# Which windows an epoch has, where some are drawn more often than others.


def epoch_size(weights: FloatArray) -> int:
    """Windows of an epoch: those of the largest weight all, of the others their share, at least one."""
    return sum(count for _, count in _shares(weights))


def drawn(weights: FloatArray, rng: np.random.Generator) -> IntArray:
    """The windows of an epoch, none twice, in order. weights (N,) of all windows."""
    parts = [
        group if count == len(group) else rng.choice(group, count, replace=False) for group, count in _shares(weights)
    ]
    return np.sort(np.concatenate(parts)).astype(np.int64)


def _shares(weights: FloatArray) -> list[tuple[IntArray, int]]:
    """For every weight, the windows that have it, and how many of them an epoch has."""
    largest = float(weights.max())
    groups = [(float(weight), np.flatnonzero(weights == weight)) for weight in np.unique(weights)]
    return [(group, max(round(len(group) * weight / largest), 1)) for weight, group in groups]
