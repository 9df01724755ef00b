"""Record demonstrations of a task's expert, in parallel processes.

Attempt i starts from seed + i. Only attempts that succeed are kept (unless failures are wanted too), in the order of
their seeds, until there are enough: a dataset does not depend on the number of processes. How many attempts were needed
is part of its provenance.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.io.processes import WORKERS, end_with_parent
from prism.io.progress import Bar
from prism.sensors import ActionSpec, SensorSpec
from prism.sims.environment import TEST_SEED, Array, Env, Expert
from prism.sims.task_table import TASKS, make_env, make_expert

_PATIENCE = 10  # attempts allowed per wanted episode


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


def demonstrate(
    env: Env, expert: Expert, seed: int, noise: float = 0.0, failures: bool = False, beyond: int = 0
) -> Attempt:
    """One attempt, with `beyond` more steps after success. The data of a failure are kept only if `failures`.

    With noise, the disturbed action is executed and the expert's own is recorded, so that the demonstrations show how
    to recover. Noise is in units of half the action range; an environment may do otherwise (`Env.disturb`).
    """
    env.beyond = beyond  # type: ignore[attr-defined]  # a third party's environment may end at success
    observation = env.reset(seed)
    expert.reset(seed)
    rng = np.random.default_rng([seed, 1])
    half = (env.action_high - env.action_low) / 2
    disturb: Callable[..., NDArray[np.float32]] = getattr(
        env, "disturb", lambda action, noise, rng: action + noise * half * rng.standard_normal(env.action_dim)
    )
    record: Callable[[dict[str, Array]], dict[str, Array]] = getattr(env, "record", lambda shown: shown)
    rows: list[dict[str, Array]] = []
    actions: list[NDArray[np.float32]] = []
    success = False
    while True:
        action = np.clip(expert.act(), env.action_low, env.action_high)
        rows.append(record(observation))
        actions.append(action)
        result = env.step(disturb(action, noise, rng).astype(np.float32) if noise > 0.0 else action)
        observation = result.observation
        success |= result.success
        if result.done:
            break
    keep = success or failures
    streams = {name: np.stack([row[name] for row in rows]) for name in rows[0]} if keep else {}
    return Attempt(seed, success, streams, np.stack(actions))


def _attempts(task: str, seeds: range, workers: int, *how: Any) -> Generator[Attempt]:
    """One a seed, in their order. With several workers a few are computed ahead, in processes; close() ends them."""
    if workers == 1:
        env = make_env(task)
        try:
            expert = make_expert(task, env)
            for seed in seeds:
                yield demonstrate(env, expert, seed, *how)
        finally:
            env.close()
        return
    pool = ProcessPoolExecutor(workers, WORKERS, _start_worker)
    left, waiting = iter(seeds), deque[Future[Attempt]]()
    try:
        while True:
            for seed in itertools.islice(left, 2 * workers - len(waiting)):
                waiting.append(pool.submit(_attempt, task, seed, *how))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise PrismError("a process that records demonstrations died; try again with one worker") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@functools.cache
def _player(task: str) -> tuple[Env, Expert]:
    env = make_env(task)
    return env, make_expert(task, env)


def _attempt(task: str, seed: int, *how: Any) -> Attempt:
    """In a worker. Ctrl-C reaches it while it plays, and not while it waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return demonstrate(*_player(task), seed, *how)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def collect(
    task: str, episodes: int, path: Path, *, seed: int = 0, console: Console | None = None, overwrite: bool = False,
    workers: int | None = None, noise: float = 0.0, failures: bool = False, beyond: int = 0, go_on: bool = False,
) -> Collected:  # fmt: skip
    """Records `episodes` successful demonstrations of `task` in `path` (own format), with a progress bar.

    `failures`: records `episodes` attempts, whatever becomes of them. `beyond`: each goes on for as many steps after
    its success. `go_on`: keeps those that are there, recorded from the same seed in the same way, and adds what is
    missing: the dataset is the same as recorded at once.
    """
    if episodes < 1 or min(seed, noise, beyond) < 0:
        what = f"{episodes} episodes from seed {seed} with noise {noise}, {beyond} steps beyond success"
        raise PrismError(f"cannot record {what}: use 1, 0, 0, 0 or more")
    last = min(seed + _PATIENCE * episodes + _PATIENCE, TEST_SEED)
    if seed + episodes > TEST_SEED:
        raise PrismError(f"seeds from {TEST_SEED} on are for evaluation: start below {TEST_SEED - episodes}")
    quick = episodes <= 20 and TASKS[task].quick  # done before a second process has started
    workers = min(workers or (1 if quick else cores()), episodes)
    probe = make_env(task)  # a misspelt task or a missing package shows here, before anything is written
    sensors: tuple[SensorSpec, ...] = getattr(probe, "recorded_sensors", probe.sensors)
    action = replace(getattr(probe, "action_spec", None) or ActionSpec(), kind=TASKS[task].actions)
    make_expert(task, probe)
    probe.close()

    provenance = settings(task, episodes, seed, noise, failures, beyond)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=console, disable=console is None)
    attempts = successes = steps = 0
    written = (path, sensors, probe.action_dim, probe.fps, task, overwrite or go_on, provenance, action)
    with DatasetWriter(*written) as writer, bar:
        if go_on:
            there = StoreSource(path)
            attempts, successes = there.provenance["attempts"], there.provenance["successes"]
            for number in range(len(there.lengths)):
                episode = there.read(number)
                writer.add(episode.streams, episode.actions, episode.present)
        shown = bar.add_task(f"{task}: demonstrations", total=episodes, completed=writer.episodes)
        source = _attempts(task, range(seed + attempts, last), workers, noise, failures, beyond)
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


def settings(task: str, episodes: int, seed: int, noise: float, failures: bool, beyond: int = 0) -> dict[str, Any]:
    """What determines a recording, as its provenance says it."""
    return {
        "by": "prism data collect",
        "command": f"prism data collect {task} --episodes {episodes} --seed {seed} --noise {noise:g} --beyond {beyond}"
        + (" --failures" if failures else ""),
        "first_seed": seed,
        "noise": noise,
        "failures": failures,
        "beyond": beyond,
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
