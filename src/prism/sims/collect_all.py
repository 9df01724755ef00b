"""Demonstrations of every task of a simulator, one dataset each, and the table of its experts' success.

A task is a job for one process. What is finished stays when the rest is interrupted: the same command goes on with it.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prism.data.formats.store import StoreSource, is_store
from prism.errors import PrismError
from prism.io.processes import end_with_parent
from prism.sims import metaworld
from prism.sims.collect import TooFewError, collect, cores, settings
from prism.sims.tasks import make_env, task_names

VARIANTS = ("-pixels", "-rgbd", "-keypoints", "-edge")  # other sensors or starts: only where they are asked for


def tasks_of(pattern: str) -> tuple[str, ...]:
    """The tasks of a simulator by its name ("metaworld"), or those that match a pattern ("metaworld-*-pixels")."""
    wanted = pattern if "*" in pattern else f"{pattern}-*"
    plain = not pattern.endswith(VARIANTS)
    names = [
        name
        for name in task_names()
        if (fnmatch.fnmatchcase(name, wanted) or name == pattern) and not (plain and name.endswith(VARIANTS))
    ]
    if not names:
        known = ", ".join(dict.fromkeys(name.partition("-")[0] for name in task_names()))
        raise PrismError(
            f"no task matches '{pattern}': give a simulator ({known}) or a pattern like 'metaworld-*-wall'"
        )
    return tuple(names)


@dataclass(frozen=True)
class ExpertRow:
    """One task: how often its expert succeeded."""

    task: str
    successes: int
    attempts: int
    path: Path | None  # None: too few successes for a dataset
    error: str | None = None

    @property
    def success(self) -> float:
        return self.successes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True)
class Recording:
    """What to record of each task."""

    episodes: int
    seed: int = 0
    noise: float = 0.0
    failures: bool = False
    other_episodes: tuple[tuple[str, int], ...] = ()  # TASK, episodes: of tasks that need more or fewer

    def episodes_of(self, task: str) -> int:
        return dict(self.other_episodes).get(task, self.episodes)


def parse_episodes(words: Sequence[str], tasks: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """("robosuite-transport=20", ...) for some of `tasks`, checked."""
    pairs = []
    for word in words:
        task, _, number = word.partition("=")
        if task not in tasks or not number.isdecimal() or int(number) < 1:
            raise PrismError(
                f"--episodes-of {word}: use TASK=NUMBER, with a task of those recorded: {', '.join(tasks)}"
            )
        pairs.append((task, int(number)))
    return tuple(pairs)


def collect_all(
    tasks: Sequence[str],
    recording: Recording,
    out: Path,
    *,
    console: Console | None = None,
    overwrite: bool = False,
    workers: int | None = None,
) -> list[ExpertRow]:
    """Records every task in out/TASK, in parallel processes; a row a task, in the order given.

    A dataset that is there and was recorded with the same settings is kept as it is. Any other is an error before
    anything is recorded, unless `overwrite`.
    """
    rows: dict[str, ExpertRow] = {}
    for task in tasks:
        if (out / task).exists() and not overwrite:
            rows[task] = _existing(task, recording, out / task)
    missing = [task for task in tasks if task not in rows]
    if missing:  # a missing package or library shows here
        make_env(missing[0]).close()
    if rows and console is not None:
        console.print(f"{len(rows)} of {len(tasks)} tasks are in {out} already", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=console is None) as bar:
        shown = bar.add_task("tasks", total=len(tasks), completed=len(rows))
        for row in _record(missing, recording, out, overwrite, min(workers or cores(), len(missing))):
            rows[row.task] = row
            bar.update(shown, completed=len(rows), description=f"{row.task}: {row.successes} of {row.attempts}")
    return [rows[task] for task in tasks]


def _record(
    tasks: Sequence[str], recording: Recording, out: Path, overwrite: bool, workers: int
) -> Generator[ExpertRow]:
    """Rows as they are done."""
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks and GL state half-way through
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    try:
        left = list(reversed(tasks))
        running: set[Future[ExpertRow]] = set()
        while left or running:
            while left and len(running) < workers:  # no more: after Ctrl-C a worker would begin with what is queued
                running.add(pool.submit(_record_one, left.pop(), recording, out, overwrite))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for job in done:
                yield job.result()
    except BrokenProcessPool:
        raise PrismError(
            f"a process that records demonstrations died; what is done is in {out}: the same command goes on with it"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _record_one(task: str, recording: Recording, out: Path, overwrite: bool) -> ExpertRow:
    """In a worker. Ctrl-C reaches it here, where the dataset is put away, and not while it waits for work."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = collect(
            task,
            recording.episodes_of(task),
            out / task,
            seed=recording.seed,
            noise=recording.noise,
            failures=recording.failures,
            overwrite=overwrite,
            workers=1,
        )
        return ExpertRow(task, done.successes, done.attempts, done.path)
    except TooFewError as error:
        return ExpertRow(task, error.successes, error.attempts, None, str(error))
    except PrismError as error:
        if "no scripted expert" not in str(error):
            raise
        return ExpertRow(task, 0, 0, None, str(error))  # the other tasks are recorded all the same
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _existing(task: str, recording: Recording, path: Path) -> ExpertRow:
    """The row of a dataset that is there, if it is the one that would be recorded."""
    wanted = settings(task, recording.episodes_of(task), recording.seed, recording.noise, recording.failures)
    if is_store(path):
        found = StoreSource(path).provenance
        if found.keys() >= {"successes", "attempts"} and all(found.get(key) == wanted[key] for key in wanted):
            return ExpertRow(task, int(found["successes"]), int(found["attempts"]), path)
    raise PrismError(f"{path} exists already and is another recording: choose another --out, or pass --overwrite")


def expert_table(rows: Sequence[ExpertRow]) -> dict[str, float]:
    """Flat: success.TASK, attempts.TASK, and the means (of the tasks' rates) of each split of MetaWorld and of all."""
    table: dict[str, float] = {f"success.{row.task}": row.success for row in rows}
    table |= {f"attempts.{row.task}": row.attempts for row in rows}
    for split, names in metaworld.SPLITS.items():
        members = [row for row in rows if metaworld.NAMES.get(row.task, ("",))[0] in names]
        if members:
            table[f"mean.{split}"] = sum(row.success for row in members) / len(members)
    table["mean.all"] = sum(row.success for row in rows) / len(rows)
    return table
