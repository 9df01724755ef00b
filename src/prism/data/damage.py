"""Data as people have it: episodes whose files are missing, cut short, or Git-LFS pointers, or that hold NaN, and
leaving them out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from prism.data.episodes import EpisodeSource, read_in_parts
from prism.data.views import portion, with_sensors
from prism.errors import PrismError

_POINTER = b"version https://git-lfs.github.com/spec/"
REMEDY = "leave episodes out with --skip-damaged or --episodes 0-46,48-, a camera with --without CAMERA"
_CHUNK = 1024  # steps held in memory at a time


def file_problem(file: Path) -> str:
    """Why a file cannot hold data, without reading it; empty if it can."""
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_POINTER))
    except FileNotFoundError:
        return f"{file}: not found"
    except OSError as error:
        return f"{file}: not readable ({error.strerror})"
    if head == _POINTER:
        return f"{file}: is a Git-LFS pointer, not the file itself: run `git lfs pull` in the dataset's folder"
    return "" if head else f"{file}: is empty"


def damaged(source: EpisodeSource, deep: bool) -> dict[int, str]:
    """Episodes that cannot be read and why: by their files, and where `deep` by reading the last step of each, and all
    its numbers (who reads refuses NaN)."""
    files = getattr(source, "files", None)
    problems: dict[Path, str] = {}
    names = [sensor.name for sensor in source.sensors]
    numbers = [sensor.name for sensor in source.sensors if not sensor.is_image]
    found: dict[int, str] = {}
    for episode, length in enumerate(source.lengths.tolist()):
        for file in files(episode, names) if files is not None else ():
            if file not in problems:
                problems[file] = file_problem(file)
            if problems[file]:
                found[episode] = problems[file]
                break
        if deep and episode not in found:
            try:
                source.read(episode, length - 1, length)
                for _ in read_in_parts(source, episode, _CHUNK, numbers):
                    pass
            except PrismError as error:
                found[episode] = str(error)
    return found


def parse_episodes(text: str, count: int, where: str) -> list[int]:
    """'0-46,48-' -> the episodes, of `count`; a range without its end goes to the last."""
    chosen: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,9})(?:(-)(\d{1,9})?)?", part)
        first = int(match[1]) if match else count
        last = first if match and not match[2] else int(match[3]) if match and match[3] else count - 1
        if not first <= last < count:
            raise PrismError(f"--episodes {text}: {where} has episodes 0-{count - 1}; write for example 0-46,48-")
        chosen |= set(range(first, last + 1))
    if not chosen:
        raise PrismError(f"--episodes {text}: no episode; write for example 0-46,48-")
    return sorted(chosen)


def chosen(
    source: EpisodeSource, episodes: str = "", without: Sequence[str] = (), skip_damaged: bool | None = False
) -> EpisodeSource:
    """The source without some sensors, with some of its episodes, and those that are damaged refused or left out."""
    if without:
        names = [sensor.name for sensor in source.sensors]
        if unknown := [name for name in without if name not in names]:
            raise PrismError(f"--without {unknown[0]}: {source.path} has the sensors {', '.join(names)}")
        if not (kept := [name for name in names if name not in without]):
            raise PrismError(f"--without {' '.join(without)}: no sensor is left of {source.path}")
        source = with_sensors(source, kept)
    if episodes:
        kept_episodes = parse_episodes(episodes, len(source.lengths), str(source.path))
        source = portion(source, kept_episodes, source.lengths[kept_episodes])
    if skip_damaged is None:
        return source
    bad = damaged(source, deep=skip_damaged)
    if not bad:
        return source
    problem = f"{len(bad)} of {len(source.lengths)} episodes are damaged"
    if not skip_damaged:
        raise PrismError(f"{problem}, the first {_first(bad)}; {REMEDY}")
    return whole(source, bad, (*described(bad), f"{problem} and left out: {', '.join(map(str, bad))}"))


def described(bad: Mapping[int, str]) -> list[str]:
    return [f"episode {episode} is damaged: {problem}" for episode, problem in bad.items()]


def whole(source: EpisodeSource, bad: Mapping[int, str], remarks: tuple[str, ...] = ()) -> EpisodeSource:
    """The source without the episodes that are damaged; `remarks` are added to its notes."""
    left = [episode for episode in range(len(source.lengths)) if episode not in bad]
    if not left:
        raise PrismError(f"all {len(bad)} episodes are damaged, the first {_first(bad)}; {REMEDY}")
    return portion(source, left, source.lengths[left], remarks)


def _first(bad: Mapping[int, str]) -> str:
    episode, problem = next(iter(bad.items()))
    return f"(episode {episode}): {problem}"
