"""Data as people have it: episodes whose files are missing, cut short, or Git-LFS pointers, or that hold NaN, and
leaving them out."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from prism.data.episodes import DamagedDataError, EpisodeSource, read_in_parts
from prism.data.views import portion, with_sensors
from prism.errors import PrismError
from prism.io.files import LFS_POINTER

_POINTER_SIZE = 1024  # bytes; they have about 130
_FILES = 20_000  # that are looked at
_RUNS = 8  # ranges of episodes that an error lists
_CHUNK = 1024  # steps held in memory at a time


def file_problem(file: Path) -> str:
    """Why a file cannot hold data, without reading it; empty if it can."""
    try:
        with file.open("rb") as opened:
            head = opened.read(len(LFS_POINTER))
    except FileNotFoundError:
        return f"{file}: not found"
    except OSError as error:
        return f"{file}: not readable ({error.strerror})"
    if head == LFS_POINTER:
        return f"{file}: is a Git-LFS pointer, not the file itself: run `git lfs pull` in the dataset's folder"
    return "" if head else f"{file}: is empty"


def pointers(path: Path) -> list[Path]:
    """Files of a dataset that are Git-LFS pointers; not all of a dataset of very many files are looked at."""
    files = [path] if path.is_file() else itertools.islice((f for f in path.rglob("*") if f.is_file()), _FILES)
    return [file for file in files if file.stat().st_size < _POINTER_SIZE and "Git-LFS" in file_problem(file)]


def named_pointers(path: Path) -> PrismError | None:
    """The message for a dataset whose files are Git-LFS pointers; None if they are not."""
    if not (found := pointers(path)):
        return None
    others = f" (and {len(found) - 1} other files)" if len(found) > 1 else ""
    folder = path if path.is_dir() else path.parent
    return PrismError(f"{found[0]}: is a Git-LFS pointer, not the file itself{others}: run `git lfs pull` in {folder}")


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
                found[episode] = str(error.args[0])
    return found


def parse_episodes(text: str, count: int, where: str) -> list[int]:
    """'0-46,48-' -> the episodes, of `count`; a range without its end goes to the last."""
    chosen: set[int] = set()
    example = "0,2-" if count > 2 else "0"
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,9})(?:(-)(\d{1,9})?)?", part)
        first = int(match[1]) if match else count
        last = first if match and not match[2] else int(match[3]) if match and match[3] else count - 1
        if not first <= last < count:
            raise PrismError(f"--episodes {text}: {where} has episodes 0-{count - 1}; write for example {example}")
        chosen |= set(range(first, last + 1))
    if not chosen:
        raise PrismError(f"--episodes {text}: no episode; write for example {example}")
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
    if not skip_damaged:
        raise refusal(source, bad, deep=False)
    total = f"{len(bad)} of {len(source.lengths)} episodes are damaged and left out"
    return whole(source, bad, (*described(source, bad, " is damaged and left out"), *[total] * (len(bad) > 1)))


def numbers(source: EpisodeSource) -> list[int]:
    """The dataset's numbers of a source's episodes: --episodes may have left some out."""
    return list(map(int, getattr(source, "episodes", range(len(source.lengths)))))


def described(source: EpisodeSource, bad: Mapping[int, str], how: str = " is damaged") -> list[str]:
    """A sentence for each of them, without the number of the episode and the path of the dataset in it again."""
    called = {e: f"episode {number}" for e, number in enumerate(numbers(source)) if e in bad}
    short = {e: bad[e].removeprefix(f"{name}: ").replace(f": {name}", "", 1) for e, name in called.items()}
    return [f"{called[e]}{how}: {problem.removeprefix(f'{source.path}/')}" for e, problem in short.items()]


def whole(source: EpisodeSource, bad: Mapping[int, str], remarks: tuple[str, ...] = ()) -> EpisodeSource:
    """The source without the episodes that are damaged; `remarks` are added to its notes."""
    left = [episode for episode in range(len(source.lengths)) if episode not in bad]
    if not left:
        raise refusal(source, bad, deep=True)
    return portion(source, left, source.lengths[left], remarks)


def refusal(source: EpisodeSource, bad: Mapping[int, str], deep: bool) -> DamagedDataError:
    """How many are damaged, what is wrong with the first of them, and what helps."""
    some = f"{len(bad)} of {len(source.lengths)}" if len(bad) < len(source.lengths) else f"all {len(bad)}"
    first, helps = described(source, bad, "")[0], remedy(source, bad, deep)
    return DamagedDataError(f"{source.path}: {some} episodes are damaged ({first})", helps)


def remedy(source: EpisodeSource, bad: Mapping[int, str], deep: bool) -> str:
    """Leaving them out, where others are left; or a sensor, where the first of them is whole without it."""
    left = np.delete(numbers(source), list(bad))
    runs = np.split(left, np.flatnonzero(np.diff(left) > 1) + 1) if left.size else []
    kept = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    ways = ["the episodes with --skip-damaged" + f" or --episodes {kept}" * (len(runs) <= _RUNS)] if runs else []
    first, names = portion(source, [min(bad)], source.lengths[[min(bad)]]), [sensor.name for sensor in source.sensors]
    others = {name: [other for other in names if other != name] for name in names if len(names) > 1}
    blamed = next((name for name, rest in others.items() if not damaged(with_sensors(first, rest), deep)), "")
    if blamed:
        ways.append(f"that sensor with --without {blamed}")
    elif names != (sound := [name for name in names if not damaged(with_sensors(first, [name]), deep)]) and sound:
        ways.append(f"these sensors with --without {' '.join(name for name in names if name not in sound)}")
    return f"leave out {', or '.join(ways)}" if ways else "fix the dataset, or record it again"


@contextmanager
def remedies_as_settings() -> Iterator[None]:
    """For `prism compare`, which has --set in place of the options that leave data out."""
    try:
        yield
    except DamagedDataError as error:
        problem, helps = error.args
        helps = helps.replace("--skip-damaged", "--set demonstrations.skip_damaged=true")
        helps = re.sub(r"--episodes ([\d,-]*[\d-])", r"""--set 'demonstrations.only="\1"'""", helps)
        quoted = lambda match: f"""--set 'demonstrations.without={json.dumps(match[1].split())}'"""  # noqa: E731
        helps = re.sub(r"--without (.+)$", quoted, helps)
        raise PrismError(f"{problem}; {helps}") from None
