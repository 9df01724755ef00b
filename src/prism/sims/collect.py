"""Record demonstrations of a task's expert, in parallel processes; the dataset does not depend on how many.

Attempt i starts from seed + i. Only attempts that succeed are kept (unless failures are wanted too), in the order of
their seeds, until there are enough; how many were needed is part of the dataset's provenance.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prism.data.formats.store import DatasetWriter
from prism.errors import PrismError
from prism.io.processes import end_with_parent
from prism.sensors import SensorSpec
from prism.sims.base import TEST_SEED, Array, Env, Expert
from prism.sims.tasks import make_env, make_expert

_PATIENCE = 10  # attempts allowed per wanted episode


@dataclass(frozen=True)
class Collected:
    """What was recorded."""

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
        super().__init__(
            f"{task}: the expert succeeded in {successes} of {attempts} attempts, {wanted} were wanted; "
            "ask for fewer episodes"
        )
        self.successes, self.attempts = successes, attempts


@dataclass(frozen=True)
class _Attempt:
    seed: int
    success: bool
    streams: dict[str, Array]
    actions: NDArray[np.float32]


def recorded_sensors(env: Env) -> tuple[SensorSpec, ...]:
    """What is written: the environment's sensors; for Push-T the raw `state`, from which they all follow."""
    if not env.name.startswith("pusht"):
        return env.sensors
    state = SensorSpec("state", "vector", (5,))
    images = [sensor for sensor in env.sensors if sensor.kind == "rgb"]
    return (state, *(SensorSpec("img", "rgb", sensor.shape) for sensor in images))


def _record(env: Env, observation: dict[str, Array]) -> dict[str, Array]:
    if not env.name.startswith("pusht"):
        return observation
    record: dict[str, Array] = {"state": env.state().astype(np.float32)}
    if "rgb_static" in observation:
        record["img"] = observation["rgb_static"]
    return record


def demonstrate(env: Env, expert: Expert, seed: int, noise: float = 0.0, failures: bool = False) -> _Attempt:
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
    return _Attempt(seed, result.success, streams, np.stack(actions))


_worker: tuple[Env, Expert, float, bool] | None = None  # in a worker process: what it plays with


def _start_worker(task: str, noise: float, failures: bool) -> None:
    global _worker
    end_with_parent()
    env = make_env(task)
    _worker = env, make_expert(task, env), noise, failures


def _attempt_in_worker(seed: int) -> _Attempt:
    assert _worker is not None
    env, expert, noise, failures = _worker
    return demonstrate(env, expert, seed, noise, failures)


def _in_this_process(task: str, span: range, noise: float, failures: bool) -> Generator[_Attempt]:
    env = make_env(task)
    try:
        expert = make_expert(task, env)
        for seed in span:
            yield demonstrate(env, expert, seed, noise, failures)
    finally:
        env.close()


def _in_processes(task: str, span: range, noise: float, failures: bool, workers: int) -> Generator[_Attempt]:
    """Attempts in the order of their seeds, a few ahead of the reader."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks and GL state half-way through
    pool = ProcessPoolExecutor(workers, context, _start_worker, (task, noise, failures))
    try:
        seeds = iter(span)
        waiting: deque[Future[_Attempt]] = deque()
        while True:
            while len(waiting) < 2 * workers and (seed := next(seeds, None)) is not None:
                waiting.append(pool.submit(_attempt_in_worker, seed))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise PrismError(f"{task}: a process that records demonstrations died; try again with one worker") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def collect(
    task: str,
    episodes: int,
    path: Path,
    *,
    seed: int = 0,
    console: Console | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    noise: float = 0.0,
    failures: bool = False,
) -> Collected:
    """Records `episodes` successful demonstrations of `task` in `path` (own format), with a progress bar.

    `failures`: records `episodes` attempts, whatever becomes of them.
    """
    if episodes < 1 or seed < 0 or noise < 0.0:
        raise PrismError(f"cannot record {episodes} episodes from seed {seed} with noise {noise}: use 1, 0, 0 or more")
    last = min(seed + _PATIENCE * episodes + _PATIENCE, TEST_SEED)
    if seed + episodes > TEST_SEED:
        raise PrismError(f"seeds from {TEST_SEED} on are for evaluation: start below {TEST_SEED - episodes}")
    quick = episodes <= 20 and not task.startswith("pusht")  # done before a second process has started
    workers = min(workers or (1 if quick else cores()), episodes)
    probe = make_env(task)  # a misspelt task or a missing package shows here, before anything is written
    sensors, action_dim, fps = recorded_sensors(probe), probe.action_dim, probe.fps
    make_expert(task, probe)
    probe.close()

    provenance = settings(task, episodes, seed, noise, failures)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=console is None)
    attempts = successes = steps = 0
    with DatasetWriter(path, sensors, action_dim, fps, task, overwrite, provenance) as writer, bar:
        shown = bar.add_task(f"{task}: demonstrations", total=episodes)
        span = range(seed, last)
        source = (
            _in_this_process(task, span, noise, failures)
            if workers == 1
            else _in_processes(task, span, noise, failures, workers)
        )
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
        writer.provenance["attempts"] = attempts
        writer.provenance["successes"] = successes
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
        "versions": _versions(task),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PACKAGES = {
    "pusht": ("gym-pusht", "pymunk"),
    "metaworld": ("metaworld", "mujoco"),
    "robosuite": ("robosuite", "mujoco"),
    "tabletop": ("robosuite", "mujoco"),
}  # what determines the physics, by the first word of a task's name


def _versions(task: str) -> dict[str, str]:
    found = {}
    for package in ("prism-policy", *_PACKAGES.get(task.partition("-")[0], ())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def other_simulator(task: str, provenance: dict[str, Any]) -> str | None:
    """What differs between the simulator that a dataset says it was recorded with and the one installed; None: nothing.

    The same actions lead elsewhere in another version: a policy would be tested on a world that it has not seen.
    """
    recorded, installed = provenance.get("versions", {}), _versions(task)
    for package in _PACKAGES.get(task.partition("-")[0], ()):
        if recorded.get(package, installed[package]) != installed[package]:
            return f"recorded with {package} {recorded[package]}, installed is {installed[package]}"
    return None
