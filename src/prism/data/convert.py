"""Any dataset into the project's own format, or into LeRobot v3. Atomic; nothing is overwritten unasked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prism.data.episodes import EpisodeSource, read_in_parts, step_bytes
from prism.data.formats.lerobot_writer import LeRobotWriter, feature_keys
from prism.data.formats.store_writer import DatasetWriter
from prism.data.formats.video import Codec
from prism.data.formats.writer import EpisodeWriter
from prism.data.pictures import resized
from prism.errors import PrismError
from prism.io.files import explain_write_errors
from prism.sensors import action_spec_of

Format = Literal["prism", "lerobot"]
Progress = Callable[[int, int], None]  # steps done, steps in all
_CHUNK_BYTES = 32 * 2**20  # read and written together


@dataclass(frozen=True)
class Converted:
    path: Path
    episodes: int
    steps: int
    notes: tuple[str, ...]  # of the reader, and what the new format changes


def convert(
    source: EpisodeSource,
    out: Path,
    to: Format = "prism",
    task: str | None = None,
    codec: Codec = "h264",
    episodes: Sequence[int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes `source` to the new folder `out`; `task` names it (default: the source's own name)."""
    if Path(out).resolve() == Path(source.path).resolve():
        raise PrismError(f"{out}: is the dataset itself; choose another folder")
    small = resized(source)
    notes = [
        f"'{new.name}' is stored small: {new.shape[0]} x {new.shape[1]}, not {old.shape[0]} x {old.shape[1]}"
        for new, old in zip(small.sensors, source.sensors, strict=True)
        if new.shape != old.shape
    ]
    source = small
    chosen = list(range(len(source.lengths)) if episodes is None else episodes)
    name = str(getattr(source, "task", "")) if task is None else task
    notes = [*source.notes, *notes]
    chunk = max(1, min(_CHUNK_BYTES // (4 * source.action_dim + step_bytes(source.sensors)), 8192))
    total, done = int(source.lengths[chosen].sum()), 0
    with (
        explain_write_errors(Path(out), "Nothing was written"),
        _writer(source, Path(out), to, name, codec, overwrite, notes) as writer,
    ):
        for episode in chosen:
            for _, part in read_in_parts(source, episode, chunk):
                writer.extend(part.streams, part.actions, part.present)
                done += part.length
                if progress is not None:
                    progress(done, total)
            writer.end_episode()
    return Converted(Path(out), len(chosen), total, tuple(notes))


def _writer(
    source: EpisodeSource, out: Path, to: Format, task: str, codec: Codec, overwrite: bool, notes: list[str]
) -> EpisodeWriter:
    sensors, fps, action = source.sensors, source.fps, action_spec_of(source)
    if to == "prism":
        origins = [Path(path).name for path in getattr(source, "paths", (source.path,))]
        provenance = {"converted_from": ", ".join(origins), "notes": list(source.notes)}
        return DatasetWriter(out, sensors, source.action_dim, fps, task, overwrite, provenance, action)
    if to != "lerobot":
        raise PrismError(f"--to {to}: use prism or lerobot")
    keys = feature_keys(sensors)
    notes.append("in LeRobot: " + ", ".join(f"{name} is {key}" for name, key in keys.items()))
    if any(key.startswith("observation.images.") for key in keys.values()):
        notes.append(f"pictures are compressed as {codec} video: they look the same and are not the same bytes")
    everything: Collection[str] = [sensor.name for sensor in sensors]
    absent: Collection[str] = getattr(source, "sometimes_absent", everything)
    return LeRobotWriter(out, sensors, source.action_dim, fps, task, overwrite, codec, absent, action)
