"""Record demonstrations of a task's expert, or of every task of a simulator, in parallel processes.

Attempt i starts from seed + i. Only attempts that succeed are kept (unless failures are wanted too), in the order of
their seeds, until there are enough: a dataset does not depend on the number of processes. How many attempts were needed
is part of its provenance. Of several tasks, what is finished stays when the rest is interrupted: the same command goes
on with it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prism.data.formats.store import StoreSource, is_store
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.io.processes import end_with_parent
from prism.sensors import SensorSpec
from prism.sims.base import TEST_SEED, Array, Env, Expert, NoExpertError
from prism.sims.tasks import TASKS, make_env, make_expert, task_names

J = TypeVar("J")
R = TypeVar("R")
_PATIENCE = 10  # attempts allowed per wanted episode
VARIANTS = ("-pixels", "-rgbd", "-keypoints", "-edge")  # other sensors or starts: only where they are asked for


@dataclass(frozen=True)
class Collected:
    path: Path
    episodes: int
    attempts: int
    successes: int
    steps: int

    @property
    def success(self) -> float:
        """The expert's own success rate: the ceiling of what imitation can reach."""
        return self.successes / self.attempts


class TooFewError(PrismError):
    """The expert does not succeed often enough."""

    def __init__(self, task: str, successes: int, attempts: int, wanted: int) -> None:
        found = f"the expert succeeded in {successes} of {attempts} attempts"
        super().__init__(f"{task}: {found}, {wanted} were wanted; ask for fewer episodes")
        self.successes, self.attempts = successes, attempts


@dataclass(frozen=True)
class Attempt:
    seed: int
    success: bool
    streams: dict[str, Array]
    actions: NDArray[np.float32]


def recorded_sensors(env: Env) -> tuple[SensorSpec, ...]:
    """What is written: the environment's sensors, or those that it names (sims/base.py)."""
    sensors: tuple[SensorSpec, ...] = getattr(env, "recorded_sensors", env.sensors)
    return sensors


def _record(env: Env, observation: dict[str, Array]) -> dict[str, Array]:
    record: Callable[[dict[str, Array]], dict[str, Array]] | None = getattr(env, "record", None)
    return observation if record is None else record(observation)


def demonstrate(env: Env, expert: Expert, seed: int, noise: float = 0.0, failures: bool = False) -> Attempt:
    """One attempt; what was seen in a failure is kept only if `failures`.

    With noise, the disturbed action is executed and the expert's own is recorded, so that the demonstrations show how
    to recover; noise is in units of half the action range.
    """
    observation = env.reset(seed)
    expert.reset(seed)
    rng = np.random.default_rng([seed, 1])
    half = (env.action_high - env.action_low) / 2
    rows: list[dict[str, Array]] = []
    actions: list[NDArray[np.float32]] = []
    while True:
        action = np.clip(expert.act(), env.action_low, env.action_high)
        rows.append(_record(env, observation))
        actions.append(action)
        executed = action
        if noise > 0.0:
            executed = (action + noise * half * rng.standard_normal(env.action_dim)).astype(np.float32)
        result = env.step(executed)
        observation = result.observation
        if result.done:
            break
    keep = result.success or failures
    streams = {name: np.stack([row[name] for row in rows]) for name in rows[0]} if keep else {}
    return Attempt(seed, result.success, streams, np.stack(actions))


def parallel(
    run: Callable[[J], R], jobs: Iterable[J], workers: int, ahead: int, ordered: bool, died: str
) -> Generator[R]:
    """Results of run(job), computed in processes, at most `ahead` jobs before the reader; close() ends them."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks and GL state half-way through
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    left, waiting = iter(jobs), list[Future[R]]()
    try:
        while True:
            while len(waiting) < ahead and (job := next(left, None)) is not None:
                waiting.append(pool.submit(run, job))
            if not waiting:
                return
            for future in waiting[:1] if ordered else wait(waiting, return_when=FIRST_COMPLETED).done:
                waiting.remove(future)
                yield future.result()
    except BrokenProcessPool:
        raise PrismError(f"a process that records demonstrations died; {died}") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C reaches a worker while it works, where a dataset is put away, and not while it waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.cache
def _player(task: str) -> tuple[Env, Expert]:
    env = make_env(task)
    return env, make_expert(task, env)


def _attempt(seed: int, task: str, noise: float, failures: bool) -> Attempt:
    with _interruptible():
        return demonstrate(*_player(task), seed, noise, failures)


def _in_this_process(task: str, span: range, noise: float, failures: bool) -> Generator[Attempt]:
    env = make_env(task)
    try:
        expert = make_expert(task, env)
        for seed in span:
            yield demonstrate(env, expert, seed, noise, failures)
    finally:
        env.close()


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=console is None)


def collect(
    task: str, episodes: int, path: Path, *, seed: int = 0, console: Console | None = None, overwrite: bool = False,
    workers: int | None = None, noise: float = 0.0, failures: bool = False, go_on: bool = False,
) -> Collected:  # fmt: skip
    """Records `episodes` successful demonstrations of `task` in `path` (own format), with a progress bar.

    `failures`: records `episodes` attempts, whatever becomes of them. `go_on`: keeps those that are there, recorded
    from the same seed with the same noise, and adds what is missing: the dataset is the same as recorded at once.
    """
    if episodes < 1 or seed < 0 or noise < 0.0:
        raise PrismError(f"cannot record {episodes} episodes from seed {seed} with noise {noise}: use 1, 0, 0 or more")
    last = min(seed + _PATIENCE * episodes + _PATIENCE, TEST_SEED)
    if seed + episodes > TEST_SEED:
        raise PrismError(f"seeds from {TEST_SEED} on are for evaluation: start below {TEST_SEED - episodes}")
    quick = episodes <= 20 and TASKS[task].quick  # done before a second process has started
    workers = min(workers or (1 if quick else cores()), episodes)
    probe = make_env(task)  # a misspelt task or a missing package shows here, before anything is written
    sensors, action_dim, fps = recorded_sensors(probe), probe.action_dim, probe.fps
    make_expert(task, probe)
    probe.close()

    provenance = settings(task, episodes, seed, noise, failures)
    bar = _progress(console)
    attempts = successes = steps = 0
    with DatasetWriter(path, sensors, action_dim, fps, task, overwrite or go_on, provenance) as writer, bar:
        if go_on:
            there = StoreSource(path)
            attempts, successes = there.provenance["attempts"], there.provenance["successes"]
            for number in range(len(there.lengths)):
                episode = there.read(number)
                writer.add(episode.streams, episode.actions, episode.present)
        shown = bar.add_task(f"{task}: demonstrations", total=episodes, completed=writer.episodes)
        span = range(seed + attempts, last)
        if workers == 1:
            source = _in_this_process(task, span, noise, failures)
        else:
            play = functools.partial(_attempt, task=task, noise=noise, failures=failures)
            source = parallel(play, span, workers, 2 * workers, ordered=True, died="try again with one worker")
        try:
            for attempt in source:
                attempts += 1
                successes += attempt.success
                if attempt.success or failures:
                    writer.add(attempt.streams, attempt.actions)
                    steps += len(attempt.actions)
                    bar.update(shown, completed=writer.episodes)
                bar.update(shown, description=f"{task}: {successes} of {attempts} attempts succeeded")
                if writer.episodes == episodes:
                    break
        finally:
            source.close()  # stops the processes now, not when the garbage is collected
        if writer.episodes < episodes:
            raise TooFewError(task, successes, attempts, episodes)
        writer.provenance |= {"attempts": attempts, "successes": successes}
    return Collected(Path(path), episodes, attempts, successes, steps)


def settings(task: str, episodes: int, seed: int, noise: float, failures: bool) -> dict[str, Any]:
    """What determines a recording, as its provenance says it."""
    return {
        "by": "prism data collect",
        "command": f"prism data collect {task} --episodes {episodes} --seed {seed}"
        + (f" --noise {noise:g}" if noise else "")
        + (" --failures" if failures else ""),
        "first_seed": seed,
        "noise": noise,
        "failures": failures,
        "versions": _versions(task),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(task: str) -> dict[str, str]:
    found = {}
    for package in ("prism-policy", *TASKS[task].packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def other_simulator(task: str, provenance: dict[str, Any]) -> str | None:
    """What differs between the simulator of a recording and the one installed, where the same actions may lead
    elsewhere; None: nothing."""
    recorded, installed = provenance.get("versions", {}), _versions(task)
    for package in TASKS[task].packages:
        if recorded.get(package, installed[package]) != installed[package]:
            return f"recorded with {package} {recorded[package]}, installed is {installed[package]}"
    return None


# -- every task of a simulator


def tasks_of(pattern: str) -> tuple[str, ...]:
    """The tasks of a simulator by its name ("metaworld"), or those that match a pattern ("metaworld-*-pixels")."""
    wanted = pattern if "*" in pattern else f"{pattern}-*"
    plain = not pattern.endswith(VARIANTS)
    found = [name for name in task_names() if fnmatch.fnmatchcase(name, wanted) or name == pattern]
    names = [name for name in found if not (plain and name.endswith(VARIANTS))]
    if not names:
        known = ", ".join(dict.fromkeys(name.partition("-")[0] for name in task_names()))
        raise PrismError(f"no task matches '{pattern}': use a simulator ({known}) or a pattern like 'metaworld-*-wall'")
    return tuple(names)


@dataclass(frozen=True)
class ExpertRow:
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
            raise PrismError(f"--episodes-of {word}: use TASK=NUMBER, with a task recorded here: {', '.join(tasks)}")
        pairs.append((task, int(number)))
    return tuple(pairs)


def collect_all(
    tasks: Sequence[str], recording: Recording, out: Path, *,
    console: Console | None = None, overwrite: bool = False, workers: int | None = None,
) -> list[ExpertRow]:  # fmt: skip
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
    if not missing:
        return [rows[task] for task in tasks]
    record = functools.partial(_record_one, recording=recording, out=out, overwrite=overwrite)
    workers = min(workers or cores(), len(missing))
    died = f"what is done is in {out}: the same command goes on with it"
    # no job waits in the queue: after Ctrl-C a worker would begin with it
    source = parallel(record, missing, workers, workers, ordered=False, died=died)
    with _progress(console) as bar:
        shown = bar.add_task("tasks", total=len(tasks), completed=len(rows))
        try:
            for row in source:
                rows[row.task] = row
                bar.update(shown, completed=len(rows), description=f"{row.task}: {row.successes} of {row.attempts}")
        finally:
            source.close()
    return [rows[task] for task in tasks]


def _record_one(task: str, recording: Recording, out: Path, overwrite: bool) -> ExpertRow:
    """In a worker."""
    how: dict[str, Any] = {"seed": recording.seed, "noise": recording.noise, "failures": recording.failures}
    try:
        with _interruptible():
            done = collect(task, recording.episodes_of(task), out / task, overwrite=overwrite, workers=1, **how)
        return ExpertRow(task, done.successes, done.attempts, done.path)
    except TooFewError as error:
        return ExpertRow(task, error.successes, error.attempts, None, str(error))
    except NoExpertError as error:
        return ExpertRow(task, 0, 0, None, str(error))  # the other tasks are recorded all the same


def _existing(task: str, recording: Recording, path: Path) -> ExpertRow:
    """The row of a dataset that is there, if it is the one that would be recorded."""
    wanted = settings(task, recording.episodes_of(task), recording.seed, recording.noise, recording.failures)
    if is_store(path):
        found = StoreSource(path).provenance
        if found.keys() >= {"successes", "attempts"} and all(found.get(key) == wanted[key] for key in wanted):
            return ExpertRow(task, int(found["successes"]), int(found["attempts"]), path)
    raise PrismError(f"{path} exists already and is another recording: choose another --out, or pass --overwrite")


def expert_table(rows: Sequence[ExpertRow]) -> dict[str, float]:
    """Flat: success.TASK, attempts.TASK, and the means (of the tasks' rates) of each group and of all."""
    table: dict[str, float] = {f"success.{row.task}": row.success for row in rows}
    table |= {f"attempts.{row.task}": row.attempts for row in rows}
    for group in dict.fromkeys(TASKS[row.task].group for row in rows):
        members = [row for row in rows if TASKS[row.task].group == group]
        if group:
            table[f"mean.{group}"] = sum(row.success for row in members) / len(members)
    table["mean.all"] = sum(row.success for row in rows) / len(rows)
    return table
