"""Pictures at the size that the policy sees, made once: decoding and shrinking 480 x 640 at every step is what makes
training on a CPU impossible.

A sensor with `resize` and without `crop` is shrunk as the encoder would (antialiased; depth: nearest pixel). The result
is kept as parts, each a prism dataset, in PRISM_DATA or the user's cache: interrupted, the next call makes the parts
that are missing. The policy still takes the camera's own size: `as_recorded` is what it is built for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from prism.data.episodes import (
    Array,
    Episode,
    EpisodeSource,
    Names,
    read_in_parts,
    read_together,
    step_bytes,
    wanted_sensors,
)
from prism.data.formats.store import StoreSource, is_store
from prism.data.formats.store_writer import DatasetWriter
from prism.data.inspect import sample_frames
from prism.data.locate import data_folder
from prism.data.views import Respecified, SourceView, with_sensors
from prism.errors import PrismError
from prism.sensors import SensorSpec, action_spec_of

# A longer side above the first is brought to another, in data of one's own: what a small network is fast at, and what a
# frozen backbone was measured with.
BIG, DEFAULT_SIDE, FROZEN_SIDE = 160, 96, 160
_PART_BYTES = 64 * 2**20
_CHUNK_BYTES = 32 * 2**20  # of stored pictures, read together


def as_recorded(source: EpisodeSource) -> tuple[SensorSpec, ...]:
    """The sensors as a robot has them: with the size of its cameras, also where the dataset holds small pictures."""
    return getattr(source, "recorded", source.sensors)


def with_default_sizes(source: EpisodeSource, rgb_side: int = DEFAULT_SIDE) -> tuple[EpisodeSource, list[str]]:
    """Big pictures without a `resize` get one; a sentence for each."""
    specs, said = [], []
    for spec in source.sensors:
        longer = max(spec.shape[:2]) if spec.is_image else 0
        if longer > BIG and spec.crop is None and spec.resize is None:
            new = rgb_side if spec.kind == "rgb" else DEFAULT_SIDE
            height, width = (max(round(side * new / longer), 1) for side in spec.shape[:2])
            said.append(
                f"'{spec.name}': {spec.shape[0]} x {spec.shape[1]} is brought to {height} x {width}; "
                f"another size: --sensor {spec.name}.resize=HEIGHT,WIDTH"
            )
            spec = replace(spec, resize=(height, width))
        specs.append(spec)
    return (Respecified(source, tuple(specs), action_spec_of(source)), said) if said else (source, said)


def small(spec: SensorSpec) -> SensorSpec:
    """The sensor once its pictures have the size of `resize`; itself where there is nothing to shrink."""
    if spec.resize is None or spec.crop is not None or np.prod(spec.resize) >= np.prod(spec.shape[:2]):
        return spec
    shift = round(spec.random_shift * spec.resize[0] / spec.shape[0])
    return replace(spec, shape=(*spec.resize, *spec.shape[2:]), resize=None, random_shift=shift)


@dataclass(frozen=True)
class Resized(SourceView):
    """A source whose pictures are shrunk as they are read."""

    sensors: tuple[SensorSpec, ...]

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        part = self.source.read(episode, start, stop, streams)
        shapes = {spec.name: spec for spec in wanted_sensors(self, streams)}
        return replace(part, streams={name: shrunk(array, shapes[name]) for name, array in part.streams.items()})


def resized(source: EpisodeSource) -> EpisodeSource:
    """The source with small pictures, where a sensor says so."""
    specs = tuple(map(small, source.sensors))
    return source if specs == tuple(source.sensors) else Resized(source, specs)


def shrunk(values: Array, spec: SensorSpec) -> Array:
    if not spec.is_image or values.shape[1:] == spec.shape:
        return values
    if not len(values):
        return np.empty((0, *spec.shape), values.dtype)
    pixels = torch.from_numpy(np.ascontiguousarray(values))
    if spec.kind == "depth":
        return F.interpolate(pixels[:, None], spec.shape[:2], mode="nearest-exact")[:, 0].numpy()
    new = F.interpolate(pixels.permute(0, 3, 1, 2), spec.shape[:2], mode="bilinear", antialias=True)
    return np.ascontiguousarray(new.permute(0, 2, 3, 1).numpy())


@dataclass(frozen=True)
class CachedPictures(SourceView):
    """A source whose pictures come from parts in a cache folder, and everything else from itself."""

    sensors: tuple[SensorSpec, ...]
    recorded: tuple[SensorSpec, ...]
    parts: tuple[StoreSource, ...]
    first: tuple[int, ...]  # of each part, its first episode

    @property
    def read_together(self) -> int:
        return 0 if {s.name for s in self.sensors if s.is_image} <= set(self._names) else read_together(self.source)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(sensor.name for sensor in self.parts[0].sensors)

    def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Names = None) -> Episode:
        names = [sensor.name for sensor in wanted_sensors(self, streams)]
        here = [name for name in names if name in self._names]
        rest = self.source.read(episode, start, stop, [name for name in names if name not in here])
        if not here:
            return rest
        number = int(np.searchsorted(self.first, episode, side="right")) - 1
        found = self.parts[number].read(episode - self.first[number], start, stop, here)
        return replace(rest, streams={**rest.streams, **found.streams}, present={**rest.present, **found.present})


def cached_pictures(source: EpisodeSource, say: Callable[[str], None], folder: Path | None = None) -> EpisodeSource:
    """The source with its small pictures made and kept; itself where no sensor is shrunk, or where there is no room.

    `say` gets size, place and progress.
    """
    view = resized(source)
    if not isinstance(view, Resized):
        return source
    names = [new.name for new, old in zip(view.sensors, source.sensors, strict=True) if new != old]
    pictures = with_sensors(view, names)
    row = step_bytes(pictures.sensors)
    folder = folder or data_folder() / "pictures" / _fingerprint(pictures)
    groups = grouped(source.lengths.tolist(), max(_PART_BYTES // row, 1))
    places = [folder / f"part-{number:05d}" for number in range(len(groups))]
    missing = [number for number, place in enumerate(places) if not is_store(place)]
    if missing:
        needed = row * int(sum(source.lengths[group].sum() for group in (groups[n] for n in missing)))
        sizes = ", ".join(f"{s.name} {s.shape[0]} x {s.shape[1]}" for s in pictures.sensors)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise PrismError(f"{folder}: cannot be made ({error.strerror}); set PRISM_DATA to another folder") from None
        if free < 1.1 * needed + 10**8:
            say(f"no room for small pictures in {folder} ({needed / 1e6:.0f} MB): every step shrinks its own, slowly")
            return source
        say(f"small pictures ({sizes}) are made once: {needed / 1e6:.0f} MB in {folder}")
    for done, number in enumerate(missing):
        _write_part(pictures, groups[number], places[number])
        if done + 1 == len(missing) or (done + 1) % max(len(missing) // 10, 1) == 0:
            say(f"small pictures: {done + 1} of {len(missing)} parts")
    first = tuple(group[0] for group in groups)
    return CachedPictures(source, view.sensors, tuple(source.sensors), tuple(map(StoreSource, places)), first)


def _fingerprint(pictures: EpisodeSource) -> str:
    """A folder's name that is another one for other pictures: by path, sizes and content."""
    seen = hashlib.sha256(content(pictures, pictures.sensors).encode())
    path = Path(pictures.path).resolve()
    about = [str(path), path.stat().st_mtime_ns, [s.to_json() for s in pictures.sensors]]
    seen.update(json.dumps(about).encode())
    return f"{path.name}-{seen.hexdigest()[:16]}"


def content(source: EpisodeSource, pictures: Sequence[SensorSpec]) -> str:
    """A short name for what is recorded: all actions, and a few of the pictures, since --map may give the name of one
    camera to another."""
    seen = hashlib.sha256(json.dumps(source.lengths.tolist()).encode())
    for episode in range(len(source.lengths)):
        seen.update(source.read(episode, streams=()).actions.tobytes())
    for spec in pictures:
        seen.update(b"".join(frame.tobytes() for *_, frame in sample_frames(source, spec, 8, 2)))
    return seen.hexdigest()[:16]


def grouped(lengths: list[int], limit: int) -> list[list[int]]:
    """Episodes in order, in groups of at most `limit` steps, or of one episode."""
    groups: list[list[int]] = []
    steps = 0
    for episode, length in enumerate(lengths):
        if not groups or steps + length > limit:
            groups.append([])
            steps = 0
        groups[-1].append(episode)
        steps += length
    return groups


def _write_part(pictures: EpisodeSource, episodes: list[int], place: Path) -> None:
    stored = sum(int(np.prod(s.shape)) * 16 for s in pictures.sensors)  # a guess of what the camera's own size is
    chunk = max(1, _CHUNK_BYTES // max(stored, 1))
    with DatasetWriter(place, pictures.sensors, pictures.action_dim, pictures.fps, "pictures", True) as writer:
        for episode in episodes:
            for _, part in read_in_parts(pictures, episode, chunk):
                writer.extend(part.streams, part.actions, part.present)
            writer.end_episode()
