"""Any dataset into the project's own format, or into LeRobot v3. Atomic; nothing is overwritten unasked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prism.data.episodes import EpisodeSource, read_in_parts, step_bytes
from prism.data.formats.lerobot_writer import LeRobotWriter, feature_keys
from prism.data.formats.store_writer import DatasetWriter
from prism.data.formats.video import Codec
from prism.data.formats.writer import EpisodeWriter
from prism.data.inspect import size
from prism.data.pictures import Resized, resized
from prism.errors import PrismError
from prism.io.files import explain_write_errors
from prism.sensors import action_spec_of

Format = Literal["prism", "lerobot"]
Pictures = Literal["auto", "video", "pixels"]
Progress = Callable[[int, int], None]  # steps done, steps in all
_CHUNK_BYTES = 32 * 2**20  # read and written together
_VIDEO = 30  # times smaller than its pixels, about
_ROOM = 10**8  # bytes that stay free


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
    pictures: Pictures = "auto",
    say: Callable[[str], None] | None = None,
) -> Converted:
    """Writes `source` to the new folder `out`; `task` names it (default: the source's own name).

    `pictures`: of prism's own format. "auto": a camera that the source keeps as video stays one (h264, lossy), others
    keep every pixel. `say` gets the size before anything is written; PrismError if there is not enough space.
    """
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
    videos = _videos(source, to, pictures)
    _check_room(source, Path(out), int(source.lengths[chosen].sum()), videos, say)
    if to == "prism" and videos:
        notes.append(f"as h264 video, nearly the same pixels (--pictures pixels keeps all): {', '.join(videos)}")
    chunk = max(1, min(_CHUNK_BYTES // (4 * source.action_dim + step_bytes(source.sensors)), 8192))
    total, done = int(source.lengths[chosen].sum()), 0
    with (
        explain_write_errors(Path(out), "Nothing was written"),
        _writer(source, Path(out), to, name, codec, overwrite, notes, videos) as writer,
    ):
        for episode in chosen:
            for _, part in read_in_parts(source, episode, chunk):
                writer.extend(part.streams, part.actions, part.present)
                done += part.length
                if progress is not None:
                    progress(done, total)
            writer.end_episode()
    return Converted(Path(out), len(chosen), total, tuple(notes))


def _videos(source: EpisodeSource, to: Format, pictures: Pictures) -> list[str]:
    """The cameras that become video."""
    cameras = [sensor.name for sensor in source.sensors if sensor.kind == "rgb"]
    if to == "lerobot" or pictures == "video":
        return cameras
    kept: Collection[str] = getattr(source, "filmed", ()) if pictures == "auto" else ()
    shrunk = isinstance(source, Resized)  # small pictures are kept as they are trained on
    return [name for name in cameras if name in kept and not shrunk]


def _check_room(
    source: EpisodeSource, out: Path, steps: int, videos: Collection[str], say: Callable[[str], None] | None
) -> None:
    """Says how large it will be. The size of video is a guess, so it alone refuses nothing."""
    pixels = steps * (step_bytes(s for s in source.sensors if s.name not in videos) + 4 * source.action_dim)
    video = steps * step_bytes(s for s in source.sensors if s.name in videos) // _VIDEO
    there = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if say is not None:
        more = f", of it about {size(video)} of video" if video else ""
        say(f"{out}: {steps:,} steps, about {size(pixels + video)}{more}; {size(free)} are free there")
    if pixels + _ROOM > free:
        film = [s.name for s in source.sensors if s.kind == "rgb" and s.name not in videos]
        remedy = f"--pictures video is about {_VIDEO} times smaller, or choose" if film else "choose"
        raise PrismError(
            f"{out}: {size(pixels)} are needed, {size(free)} are free: {remedy} another disk, fewer --episodes, or "
            "smaller pictures (--sensor NAME.resize=HEIGHT,WIDTH)"
        )


def _writer(
    source: EpisodeSource, out: Path, to: Format, task: str, codec: Codec, overwrite: bool, notes: list[str],
    videos: Collection[str],
) -> EpisodeWriter:  # fmt: skip
    sensors, fps, action = source.sensors, source.fps, action_spec_of(source)
    if to == "prism":
        origins = [Path(path).name for path in getattr(source, "paths", (source.path,))]
        provenance = {"converted_from": ", ".join(origins), "notes": list(source.notes)}
        return DatasetWriter(out, sensors, source.action_dim, fps, task, overwrite, provenance, action, None, videos)
    if to != "lerobot":
        raise PrismError(f"--to {to}: use prism or lerobot")
    keys = feature_keys(sensors)
    notes.append("in LeRobot: " + ", ".join(f"{name} is {key}" for name, key in keys.items()))
    if any(key.startswith("observation.images.") for key in keys.values()):
        notes.append(f"pictures are compressed as {codec} video: they look the same and are not the same bytes")
    everything: Collection[str] = [sensor.name for sensor in sensors]
    absent: Collection[str] = getattr(source, "sometimes_absent", everything)
    return LeRobotWriter(out, sensors, source.action_dim, fps, task, overwrite, codec, absent, action)
