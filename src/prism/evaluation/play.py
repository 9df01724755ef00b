"""Roll a policy out on fixed seeds, in parallel processes; the result does not depend on how many."""

from __future__ import annotations

import functools
import io
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from prism_client.messages import PlanInfo
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.ray_workers import RayPool, SentPolicy
from prism.evaluation.results import EpisodeResult, EvaluationResult, Fan, run_info
from prism.evaluation.workers import Inline, LostJobsError, Pool, WorkerPool
from prism.io.progress import Bar
from prism.policy import Policy, PolicySpec
from prism.sensors import decode_text
from prism.sims.environment import TEST_SEED as TEST_SEED  # the others know it from here
from prism.sims.environment import Array, Env, rendering_hint
from prism.sims.task_table import make_env
from prism.training.checkpoint import load_policy

logger = logging.getLogger("prism.evaluation")

PolicyFactory = Callable[[], Policy]
EnvFactory = Callable[[], Env]


@dataclass(frozen=True)
class RecordConfig:
    """Which episodes are run a second time with the camera on. The seeds are fixed: it is the same episode."""

    videos: int = 4  # failures first among them, at most half
    frames: int = 60  # a video, evenly over the episode
    size: int = 256  # longer side of a frame in pixels
    quality: int = 70  # JPEG


@dataclass(frozen=True)
class _Job:
    seed: int
    film_every: int | None = None  # steps between frames; None: no recording

    def __str__(self) -> str:
        return f"seed {self.seed}"


class IncompleteError(PrismError):
    """Episodes that crashed their process every time; `result` holds the others."""

    def __init__(self, result: EvaluationResult) -> None:
        kept, lost = len(result.episodes), len(result.lost)
        more = f" (and {lost - 1} more)" if lost > 1 else ""
        super().__init__(f"{result.task}: {result.lost[0]}{more}; {kept} of {kept + lost} episodes are kept")
        self.result = result


class Progress(Protocol):
    """Called after each episode, in the order in which they end."""

    def __call__(self, episode: EpisodeResult, done: int, total: int) -> None: ...


def evaluate(
    policy: Path | PolicyFactory,
    task: str,
    episodes: int = 50,
    first_seed: int = TEST_SEED,
    controller: ControllerConfig | None = None,
    workers: int = 2,
    record: RecordConfig | None = None,
    progress: Progress | bool = True,
    env: EnvFactory | None = None,
    ray: bool = False,
) -> EvaluationResult:
    """Episodes with seeds first_seed, first_seed + 1, ... of `task`, each by a controller seeded with the same number.

    `policy` is a run folder or checkpoint, or a picklable factory; `env` replaces the task's own environment (both are
    called once in every worker). `workers` 0: in this process. `ray`: the workers are on a Ray cluster; a policy that
    is a path is sent to them. `record=None` makes no pictures. Results do not depend on how many workers there are, or
    where. An episode whose process dies is run again in a new one; if it dies every time, the others are finished and
    IncompleteError brings them.
    """
    if episodes < 1:
        raise PrismError(f"episodes = {episodes} must be at least 1")
    if workers < 0 or (ray and workers < 1):
        raise PrismError(f"workers = {workers} must be at least 1, or 0 for this process")
    controller = controller or ControllerConfig()
    if isinstance(policy, Path):
        load: PolicyFactory = SentPolicy.read(policy) if ray else functools.partial(load_policy, policy)
        name = str(policy)
    else:
        load = policy
        name = getattr(load, "__qualname__", repr(load))
    setup = functools.partial(
        _Player, load, env or functools.partial(make_env, task), controller, record or RecordConfig()
    )
    kind: type[Pool[_Job, _Outcome]] = RayPool if ray else WorkerPool if workers else Inline
    with kind(setup, workers) as pool:
        start = time.perf_counter()
        outcomes, lost = _play(pool, task, range(first_seed, first_seed + episodes), progress)
        seconds = time.perf_counter() - start
        results = [outcome.episode for outcome in outcomes]
        hint = _film(pool, results, record) if record is not None and record.videos else None
    note = outcomes[0].rate_note
    result = EvaluationResult(
        task=task,
        policy=name,
        first_seed=first_seed,
        fps=outcomes[0].fps,
        controller=controller,
        episodes=tuple(results),
        seconds=seconds,
        crashes=tuple(pool.crashes),
        lost=lost,
        rendering_hint=hint,
        info=run_info(first_seed) | ({"note": note} if note else {}),
    )
    if lost:
        raise IncompleteError(result)
    return result


def _play(
    pool: Pool[_Job, _Outcome], task: str, seeds: Sequence[int], progress: Progress | bool
) -> tuple[list[_Outcome], tuple[str, ...]]:
    """One episode a seed, and a line for each that was lost; PrismError where all of them were."""
    done = 0
    with _progress_bar(task, progress) as report:

        def finished(outcome: _Outcome) -> None:
            nonlocal done
            done += 1
            report(outcome.episode, done, len(seeds))
            if done == 1 and outcome.rate_note is not None:
                logger.warning("%s", outcome.rate_note)

        try:
            return pool.run([_Job(seed) for seed in seeds], finished), ()
        except LostJobsError as error:
            if not error.results:
                raise PrismError(f"{task}: {error}") from error
            kept = [error.results[i] for i in sorted(error.results)]
            return kept, tuple(error.lost[i] for i in sorted(error.lost))


def _film(pool: Pool[_Job, _Outcome], results: list[EpisodeResult], record: RecordConfig) -> str | None:
    """Play some episodes again with pictures, and add these to `results`; returns the reason if there are none.

    Everything but the recording stays as first measured.
    """
    chosen = to_film(results, record.videos)
    films = [_Job(results[i].seed, max(1, -(-results[i].steps // record.frames))) for i in chosen]
    try:
        filmed = dict(zip(chosen, pool.run(films), strict=True))
    except LostJobsError as error:  # `crashes` has it; the episode itself is measured already
        filmed = {chosen[i]: outcome for i, outcome in error.results.items()}
    for i, outcome in filmed.items():
        film = outcome.episode
        results[i] = replace(results[i], fans=film.fans, frames=film.frames, frame_steps=film.frame_steps)
    return next((outcome.rendering_hint for outcome in filmed.values() if outcome.rendering_hint), None)


def to_film(episodes: list[EpisodeResult], count: int) -> list[int]:
    """Indices of the episodes worth looking at: up to half of them failures, the rest successes, lowest seeds first."""
    failures = [i for i, episode in enumerate(episodes) if not episode.success]
    successes = [i for i, episode in enumerate(episodes) if episode.success]
    shown = failures[: max(count // 2, count - len(successes))]
    return sorted(shown + successes[: count - len(shown)])


@dataclass(frozen=True)
class _Outcome:
    episode: EpisodeResult
    fps: float
    rendering_hint: str | None
    rate_note: str | None = None


class _Player:
    """The expensive objects of a worker, made there once and never sent."""

    def __init__(
        self, load: PolicyFactory, make_env: EnvFactory, config: ControllerConfig, record: RecordConfig
    ) -> None:
        self._env, self._record = make_env(), record
        policy = load()
        check_fits(self._env, policy.spec)
        self._controller = Controller(policy, config, look=False)  # sensors are lost, changed and noisy on purpose

    def __call__(self, job: _Job) -> _Outcome:
        env = self._env
        episode = run_episode(env, self._controller, job.seed, self._record, job.film_every)
        hint = None
        if job.film_every is not None and not episode.frames:
            hint = rendering_hint(env) or f"{env.name} draws no pictures"
        return _Outcome(episode, env.fps, hint, rate_note(env, self._controller.policy.spec))

    def close(self) -> None:
        self._env.close()


def check_fits(env: Env, spec: PolicySpec) -> None:
    """PrismError unless the environment has what the policy needs, and takes what it gives."""
    available = {sensor.name: sensor for sensor in env.sensors}
    remedy = "evaluate the policy on the task it was trained for"
    if missing := [sensor.name for sensor in spec.sensors if sensor.name not in available]:
        raise PrismError(
            f"task '{env.name}' has no sensor '{missing[0]}', which the policy needs (it has "
            f"{', '.join(sorted(available))}): {remedy}"
        )
    for sensor in spec.sensors:
        there = available[sensor.name]
        if (there.kind, there.shape) != (sensor.kind, sensor.shape) and sensor.kind != "text":
            raise PrismError(
                f"task '{env.name}' has '{sensor.name}' as {there.kind} {there.shape}, the policy was trained with "
                f"{sensor.kind} {sensor.shape}: {remedy}"
            )
    if spec.action_dim != env.action_dim:
        raise PrismError(
            f"task '{env.name}' takes {env.action_dim} action dimensions, the policy gives {spec.action_dim}: {remedy}"
        )


def rate_note(env: Env, spec: PolicySpec) -> str | None:
    """A line where policy and task differ in their steps a second.

    No error: where a format stores no rate (zarr, say) one is assumed, and the policy is right all the same.
    """
    if spec.fps <= 0 or math.isclose(spec.fps, env.fps, rel_tol=0.01):
        return None
    return (
        f"the policy was trained at {spec.fps:g} steps a second, task '{env.name}' takes {env.fps:g}: plans are "
        "executed at another speed than was shown; if only the dataset's rate was unknown, train with --fps"
    )


def run_episode(
    env: Env, controller: Controller, seed: int, record: RecordConfig | None = None, film_every: int | None = None
) -> EpisodeResult:
    """One episode; with `film_every`, also a picture every `film_every` steps and the candidates of every replan.

    An environment that gives one command after the other counts them in `goal_index`: with each the controller starts
    anew, as the robot would, without a memory of the last one.
    """
    start = time.perf_counter()
    known = {sensor.name: sensor.kind for sensor in controller.policy.spec.sensors}
    film = _Film(env, record or RecordConfig(), film_every)
    controller.reset(seed)
    observation = env.reset(seed)
    states, actions, replans = [env.state().astype(np.float32)], list[NDArray[np.float32]](), list[PlanInfo]()
    best, success_step, goal = 0.0, None, getattr(env, "goal_index", 0)
    film.picture(0)
    while True:
        planned = len(controller.replans)
        wanted = controller.act(_readable(observation, known))
        action = np.clip(wanted, env.action_low, env.action_high).astype(np.float32)
        controller.sent(action)
        if len(controller.replans) > planned:
            replans += controller.replans[planned:]
            film.plan(len(actions), controller)
        result = env.step(action)
        observation = result.observation
        actions.append(action)
        states.append(env.state().astype(np.float32))
        best = max(best, float(result.score))
        if result.success and success_step is None:
            success_step = len(actions)
        film.picture(len(actions), result.done)
        if result.done:
            break
        if getattr(env, "goal_index", goal) != goal:
            goal = getattr(env, "goal_index", goal)
            controller.reset(seed + goal)
    executed = np.stack(actions)
    return EpisodeResult(
        seed=seed,
        success=success_step is not None,
        score=best,
        steps=len(actions),
        success_step=success_step,
        jerk=metrics.jerk(executed, controller.scale),
        physical_jerk=metrics.physical_jerk(executed, env.fps),
        replans=len(replans),
        mode_switches=sum(replan.mode_switch for replan in replans),
        avoidable_switches=sum(replan.avoidable_switch for replan in replans),
        modes=metrics.mean([float(replan.modes) for replan in replans]),
        spread=metrics.mean([replan.spread for replan in replans]),
        latency_ms=[replan.latency_ms for replan in replans],
        seconds=time.perf_counter() - start,
        actions=executed,
        states=np.stack(states),
        fans=film.fans,
        frames=film.frames,
        frame_steps=film.steps,
    )


class _Film:
    """Pictures and candidates of an episode; `every` None: neither."""

    def __init__(self, env: Env, record: RecordConfig, every: int | None) -> None:
        self._env, self._record, self._every = env, record, every
        self.frames: list[bytes] = []
        self.steps: list[int] = []
        self.fans: list[Fan] = []

    def picture(self, step: int, last: bool = False) -> None:
        if self._every is None or (step % self._every and not last):
            return
        if (picture := self._env.render()) is not None:
            self.frames.append(encode_frame(picture, self._record))
            self.steps.append(step)

    def plan(self, step: int, controller: Controller) -> None:
        plan = controller.last_plan
        if self._every is not None and plan is not None:
            self.fans.append(Fan(step, plan.info.index, plan.candidates, plan.modes))


def _readable(observation: dict[str, Array], known: Mapping[str, str]) -> dict[str, Array | str]:
    """The sensors that the policy knows. Text as such: policies differ in how many bytes they reserve for it."""
    return {
        name: decode_text(observation[name]) if kind == "text" else observation[name]
        for name, kind in known.items()
        if name in observation
    }


def encode_frame(picture: NDArray[np.uint8], record: RecordConfig) -> bytes:
    image = Image.fromarray(picture)
    image.thumbnail((record.size, record.size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=record.quality, optimize=True)
    return buffer.getvalue()


@contextmanager
def _progress_bar(task: str, progress: Progress | bool) -> Iterator[Progress]:
    """A bar with the running success rate; or the caller's own; or none."""
    if callable(progress):
        yield progress
        return
    wins = 0
    columns = (
        TextColumn("evaluate [bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("success {task.fields[success]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, disable=not progress) as bar:
        row = bar.add_task(task, total=None, success="-")

        def update(episode: EpisodeResult, done: int, total: int) -> None:
            nonlocal wins
            wins += episode.success
            bar.update(row, completed=done, total=total, success=f"{wins}/{done}")

        yield update
