"""Summary of a dataset in any format: episodes, lengths, sensors, ranges and possible problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prism.data.damage import damaged, described, remedy, whole
from prism.data.episodes import Array, Episode, EpisodeSource, IntArray, read_in_parts
from prism.data.guess_kind import described_kind
from prism.normalize import RunningStatistics, VectorStatistics
from prism.sensors import SensorSpec, decode_text

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[int, int], None]  # steps done, steps in all
_CHUNK = 1024  # steps held in memory at a time
_SAMPLED_EPISODES, _SAMPLED_STEPS = 6, 4  # pixels are too many to read them all
_INSTRUCTIONS = 5  # shown
_DARK = {"rgb": 8.0, "depth": 0.0}  # what no pixel of a picture exceeds where nothing is seen: levels, metres
_FAR = 30.0  # standard deviations: a value this far out is rarely meant


@dataclass(frozen=True)
class StreamSummary:
    """One sensor, or the actions. What is no vector has its range and presence from a few steps, no statistics."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    present: float  # share of the steps at which it was there
    fps: float  # readings a second, of the sensor itself where that is known
    sample_rate: int  # audio: samples a second
    statistics: VectorStatistics | None

    @property
    def rate(self) -> str:
        return f"{self.sample_rate:,} /s" if self.sample_rate else f"{self.fps:g} Hz"

    @property
    def constant_dims(self) -> list[int]:
        return [] if self.statistics is None else np.flatnonzero(self.statistics.constant).tolist()


@dataclass(frozen=True)
class Summary:
    path: Path
    format: str
    task: str  # "" where the format does not say
    fps: float
    lengths: IntArray  # (E,)
    bytes_on_disk: int
    actions: StreamSummary
    sensors: tuple[StreamSummary, ...]
    notes: tuple[str, ...]  # what the reader guessed or left out
    warnings: tuple[str, ...]  # what looks wrong

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    @property
    def seconds(self) -> float:
        return self.steps / self.fps


def readable(source: EpisodeSource) -> tuple[EpisodeSource, list[str]]:
    """The episodes that can be read, and what is wrong with each of the others."""
    bad = damaged(source, deep=True)
    if not bad:
        return source, []
    left, out = whole(source, bad), f"{len(bad)} of {len(source.lengths)} episodes are damaged and not in this summary"
    return left, [*described(source, bad), f"{out}; {remedy(source, bad, deep=True)}"]


def summarise(
    source: EpisodeSource, format: str, progress: Progress | None = None, problems: Sequence[str] = ()
) -> Summary:
    """`problems`: what is known to be wrong already, shown with the warnings."""
    actions = RunningStatistics(source.action_dim)
    vectors = {s.name: RunningStatistics(s.shape[0]) for s in source.sensors if s.kind == "vector"}
    heard = {s.name: 0 for s in source.sensors if s.kind == "audio"}
    for part in numbers(source, progress):
        for name in heard:
            heard[name] += int(part.present[name].sum()) if name in part.present else part.length
        actions.add(part.actions)
        for name, running in vectors.items():
            rows = part.streams[name]
            running.add(rows[part.present[name]] if name in part.present else rows)
    steps = int(source.lengths.sum())
    command = _vector_summary("actions", "action", actions, steps, source.fps)
    assert command is not None
    sensors, warnings, notes = [], [*problems, *_warnings(command)], list(source.notes)
    for sensor in source.sensors:
        if sensor.name in vectors:
            rate = sensor.fps or source.fps
            summary = _vector_summary(sensor.name, sensor.kind, vectors[sensor.name], steps, rate)
            if summary is None:
                warnings.append(f"'{sensor.name}' is absent from every step: leave it out")
                continue
            warnings += _warnings(summary)
        else:
            summary = _sampled_summary(source, sensor, notes)
            if sensor.name in heard:
                summary = replace(summary, present=heard[sensor.name] / steps)
            if summary.present > 0 and summary.high <= _DARK.get(sensor.kind, -1.0):
                dark = "black" if sensor.kind == "rgb" else "without a measured pixel"
                warnings.append(f"'{sensor.name}' is {dark} in every picture that was looked at: was the camera on?")
            if summary.present < 1:
                looked = "the steps" if sensor.name in heard else "the few steps that were looked at"
                warnings.append(f"'{sensor.name}' is absent from {1 - summary.present:.1%} of {looked}")
        if told := sensor.describe():
            notes.append(f"'{sensor.name}': {told}")
        sensors.append(summary)
    if (short := int((source.lengths < 8).sum())) > 0:
        warnings.append(f"{short} episodes have fewer than 8 steps: recordings broken off?")
    return Summary(
        path=source.path,
        format=f"{format} {getattr(source, 'version', '')}".strip(),
        task=str(getattr(source, "task", "")),
        fps=source.fps,
        lengths=source.lengths,
        bytes_on_disk=_size(source.path),
        actions=command,
        sensors=tuple(sensors),
        notes=(described_kind(source), *notes, *_range_note(command)),
        warnings=tuple(warnings),
    )


def numbers(source: EpisodeSource, progress: Progress | None = None) -> Iterator[Episode]:
    """All actions, vectors and audio, in bounded pieces; no pixels."""
    names = [sensor.name for sensor in source.sensors if sensor.kind in ("vector", "audio")]
    done, total = 0, int(source.lengths.sum())
    for episode in range(len(source.lengths)):
        for _, part in read_in_parts(source, episode, _CHUNK, names):
            yield part
            done += part.length
            if progress is not None:
                progress(done, total)


def sample_frames(source: EpisodeSource, sensor: SensorSpec, episodes: int, each: int) -> list[tuple[int, int, Array]]:
    """(episode, step, frame) from a few episodes spread over the dataset, each at evenly spread steps; steps at
    which the sensor was absent are left out."""
    frames = []
    for episode in np.unique(np.linspace(0, len(source.lengths) - 1, episodes).round().astype(int)).tolist():
        for step in np.unique(np.linspace(0, source.lengths[episode] - 1, each).round().astype(int)).tolist():
            part = source.read(episode, step, step + 1, streams=[sensor.name])
            if sensor.name not in part.present or part.present[sensor.name][0]:
                frames.append((episode, step, part.streams[sensor.name][0]))
    return frames


def as_picture(sensor: SensorSpec, frame: Array) -> Array:
    """(H, W, 3) uint8 of any image sensor: depth light where near and black where it was not measured, tactile channels
    by threes, side by side."""
    if sensor.kind == "depth":
        metres = np.nan_to_num(frame.astype(np.float64), posinf=0.0)
        known = metres > 0
        near, far = np.quantile(metres[known], [0.02, 0.98]) if known.any() else (0.0, 1.0)
        grey = 235 - 200 * np.clip((metres - near) / max(far - near, 1e-6), 0, 1)
        return np.repeat(np.where(known, grey, 0).astype(np.uint8)[:, :, None], 3, axis=2)
    if frame.shape[2] == 3:
        return frame
    padding = -frame.shape[2] % 3
    channels = np.concatenate([frame, np.repeat(frame[:, :, -1:], padding, axis=2)], axis=2)
    return np.concatenate([channels[:, :, i : i + 3] for i in range(0, channels.shape[2], 3)], axis=1)


def _vector_summary(name: str, kind: str, running: RunningStatistics, steps: int, fps: float) -> StreamSummary | None:
    if running.count == 0:
        return None
    stats = running.result(name)
    low, high = float(stats.min.min()), float(stats.max.max())
    share = running.count / steps
    return StreamSummary(name, kind, stats.mean.shape, "float32", low, high, share, fps, 0, stats)


def _sampled_summary(source: EpisodeSource, sensor: SensorSpec, notes: list[str]) -> StreamSummary:
    samples = sample_frames(source, sensor, _SAMPLED_EPISODES, _SAMPLED_STEPS)
    frames = [frame for *_, frame in samples]
    lengths = source.lengths[np.unique(np.linspace(0, len(source.lengths) - 1, _SAMPLED_EPISODES).round().astype(int))]
    asked = int(np.minimum(lengths, _SAMPLED_STEPS).sum())
    low = min((float(np.min(frame)) for frame in frames), default=0.0)
    high = max((float(np.max(frame)) for frame in frames), default=0.0)
    if sensor.kind == "text":
        texts = list(dict.fromkeys(decode_text(frame) for frame in frames))
        more = ", ..." if len(texts) > _INSTRUCTIONS else ""
        notes.append(f"'{sensor.name}' says, for example: {', '.join(map(repr, texts[:_INSTRUCTIONS]))}{more}")
    share = len(samples) / max(asked, 1)
    dtype = str(sensor.dtype)
    rates = (sensor.fps or source.fps, sensor.sample_rate)
    return StreamSummary(sensor.name, sensor.kind, sensor.shape, dtype, low, high, share, *rates, None)


def _warnings(stream: StreamSummary) -> list[str]:
    found = []
    if dims := stream.constant_dims:
        which = f"dimension {dims[0]} is" if len(dims) == 1 else f"dimensions {_listed(dims)} are"
        which = "all dimensions are" if len(dims) == stream.shape[0] else which
        found.append(f"'{stream.name}': {which} constant, without information")
    if stream.present < 1:
        found.append(f"'{stream.name}' is absent from {1 - stream.present:.1%} of the steps")
    stats = stream.statistics
    if stats is not None:
        far = np.maximum(stats.max - stats.mean, stats.mean - stats.min) / np.where(stats.constant, np.inf, stats.std)
        if (outliers := np.flatnonzero(far > _FAR)).size:
            found.append(
                f"'{stream.name}': dimensions {_listed(outliers.tolist())} have values more than {_FAR:g} standard "
                "deviations from the mean: a glitch of the sensor?"
            )
    return found


def _range_note(actions: StreamSummary) -> list[str]:
    if actions.low >= -1 and actions.high <= 1:
        return []
    return [f"actions go from {actions.low:.4g} to {actions.high:.4g}; training maps them to [-1, 1] by their range"]


def _listed(dims: list[int]) -> str:
    return ", ".join(map(str, dims[:8])) + (f" and {len(dims) - 8} more" if len(dims) > 8 else "")


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def duration(seconds: float) -> str:
    """3725 -> '1 h 2 min', 95 -> '1 min 35 s', 4.2 -> '4.2 s'"""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s" if seconds >= 60 else f"{seconds:.1f} s"


def size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"


def print_summary(summary: Summary, console: Console) -> None:
    """The summary as tables, for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    lengths = summary.lengths
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for key, value in {
        "dataset": str(summary.path),
        "format": f"{summary.format}, {size(summary.bytes_on_disk)}",
        "task": summary.task,
        "episodes": f"{len(lengths)}, of {lengths.min()} to {lengths.max()} steps (median {np.median(lengths):g})",
        "in all": f"{summary.steps:,} steps at {summary.fps:g} a second: {duration(summary.seconds)}",
    }.items():
        if value:
            facts.add_row(key, escape(value))
    console.print(facts)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("stream", "kind", "shape", "type"):
        table.add_column(column, no_wrap=column != "stream", overflow="fold")
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("range", justify="right")
    for stream in (summary.actions, *summary.sensors):
        shape = " x ".join(map(str, stream.shape))
        span = "" if stream.kind == "text" else f"{stream.low:.4g} .. {stream.high:.4g}"
        table.add_row(escape(stream.name), stream.kind, shape, stream.dtype, stream.rate, span)
    console.print()
    console.print(table)
    if summary.notes or summary.warnings:
        console.print()
    for note in summary.notes:
        console.print(f"[dim]note[/dim]     {escape(note)}", highlight=False)
    for warning in summary.warnings:
        console.print(f"[yellow]warning[/yellow]  {escape(warning)}", highlight=False)
