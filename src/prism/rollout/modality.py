"""What each sensor is worth: the same episodes with every sensor, without each one, without each pair.

The paper's figure "Modality robustness". A sensor that is dropped is missing from every observation of the episode;
the policy sees its absent vector, which is learned where training had such absences (encoder.dropout, or a dataset
with gaps) and random otherwise: `untrained` names the sensors that were never dropped. Seeds are the same under every
condition, so a change is measured on pairs of episodes; its interval is a bootstrap over these pairs.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.policy import PolicySpec
from prism.rollout import metrics
from prism.rollout.episodes import (
    TEST_SEED,
    EnvFactory,
    PolicyFactory,
    check_fits,
    load_policy_at,
    make_env_of,
    run_episode,
)
from prism.rollout.pool import WorkerPool
from prism.rollout.results import EpisodeResult, EvaluationResult, run_info
from prism.sims.base import Array, Env, EnvView

Dropped = tuple[str, ...]


class DropSensors(EnvView):
    """An environment whose named sensors say nothing; it still lists them, because the policy was trained with them."""

    def __init__(self, env: Env, names: Sequence[str]) -> None:
        known = [sensor.name for sensor in env.sensors]
        if unknown := [name for name in names if name not in known]:
            raise PrismError(f"task '{env.name}' has no sensor '{unknown[0]}' to drop; it has {', '.join(known)}")
        super().__init__(env, env.sensors)
        self._names = frozenset(names)

    def see(self, observation: dict[str, Array]) -> dict[str, Array]:
        return {name: value for name, value in observation.items() if name not in self._names}


def conditions(sensors: Sequence[str], most: int = 2) -> list[Dropped]:
    """Nothing dropped, each sensor, each pair; never all of them, for a robot without any sensor has no policy."""
    sets = itertools.chain.from_iterable(itertools.combinations(sensors, count) for count in range(most + 1))
    return [dropped for dropped in sets if len(dropped) < len(sensors)]


@dataclass(frozen=True)
class _Job:
    dropped: Dropped
    seed: int

    def __str__(self) -> str:
        return f"seed {self.seed} without {', '.join(self.dropped) or 'nothing'}"


@dataclass(frozen=True)
class ModalityStudy:
    sensors: tuple[str, ...]
    results: dict[Dropped, EvaluationResult]  # () is the baseline
    untrained: tuple[str, ...] = ()  # those that training never dropped

    @property
    def note(self) -> str | None:
        """What to know of the figures, in one line."""
        if not self.untrained:
            return None
        return (
            f"trained without dropout of {', '.join(self.untrained)}: unless the dataset had gaps, what stands in for "
            "an absent one was never learned; train with --set policy.encoder.dropout=0.3 to learn it"
        )

    @property
    def baseline(self) -> EvaluationResult:
        return self.results[()]

    @property
    def metric(self) -> Literal["success", "score"]:
        """What the charts show: success, as the paper, unless there is none to lose."""
        return "success" if any(episode.success for episode in self.baseline.episodes) else "score"

    def change(self, dropped: Dropped, metric: Literal["success", "score"]) -> tuple[float, float, float]:
        """Mean difference from the baseline over the same episodes, and its 95 % interval."""
        pairs = zip(self.results[dropped].episodes, self.baseline.episodes, strict=True)
        differences = [float(getattr(episode, metric)) - float(getattr(full, metric)) for episode, full in pairs]
        return metrics.mean(differences), *metrics.bootstrap_interval(differences)

    def to_json(self) -> dict[str, Any]:
        """{"baseline": row, "single": {sensor: row}, "pair": {"a + b": row}, ...}: rows with intervals and changes."""
        rows: dict[str, dict[str, Any]] = {"single": {}, "pair": {}}
        for dropped in self.results:
            if dropped:
                rows["single" if len(dropped) == 1 else "pair"][" + ".join(dropped)] = self._row(dropped)
        baseline = self.baseline
        return {
            "task": baseline.task,
            "policy": baseline.policy,
            "sensors": list(self.sensors),
            "episodes": len(baseline.episodes),
            "first_seed": baseline.first_seed,
            "metric": self.metric,
            "untrained": list(self.untrained),
            "note": self.note,
            "baseline": self._row(()),
            **rows,
            **baseline.info,
        }

    def _row(self, dropped: Dropped) -> dict[str, Any]:
        summary = self.results[dropped].summary()
        row = {key: summary[key] for key in ("success", "success_ci", "score", "score_ci", "jerk", "mode_switches")}
        for metric in ("success", "score"):
            mean, low, high = self.change(dropped, metric)
            row |= {f"{metric}_change": mean, f"{metric}_change_ci": [low, high]}
        return row


def study(
    policy: Path | PolicyFactory,
    task: str,
    episodes: int = 20,
    first_seed: int = TEST_SEED,
    controller: ControllerConfig | None = None,
    workers: int = 2,
    most: int = 2,
    env: EnvFactory | None = None,
    sensors: Sequence[str] | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> ModalityStudy:
    """Roll out under every condition; `sensors` limits which are dropped, `most` how many at once."""
    if episodes < 1 or workers < 1 or most < 1:
        raise PrismError(f"episodes = {episodes}, workers = {workers} and most = {most} must all be at least 1")
    controller = controller or ControllerConfig()
    load = functools.partial(load_policy_at, policy) if isinstance(policy, Path) else policy
    spec = _spec(policy, load)
    names = [sensor.name for sensor in spec.sensors]
    chosen = tuple(names if sensors is None else sensors)
    if unknown := [name for name in chosen if name not in names]:
        raise PrismError(f"the policy has no sensor '{unknown[0]}' to drop; it has {', '.join(names)}")
    sets = [dropped for dropped in conditions(chosen, most) if len(dropped) < len(names)]
    if len(sets) == 1:
        raise PrismError(f"the policy has one sensor, '{names[0]}': without it there is nothing to evaluate")
    jobs = [_Job(dropped, first_seed + i) for dropped in sets for i in range(episodes)]
    start, count = time.perf_counter(), itertools.count(1)
    setup = functools.partial(_setup, load, env or functools.partial(make_env_of, task), controller)
    with WorkerPool[_Job, tuple[EpisodeResult, float]](setup, workers) as pool:
        outcomes = pool.run(jobs, lambda _: on_done(next(count), len(jobs)) if on_done else None)
        crashes = tuple(pool.crashes)
    seconds, info = time.perf_counter() - start, run_info(first_seed)
    name = str(policy) if isinstance(policy, Path) else getattr(load, "__qualname__", repr(load))
    results = {}
    for i, dropped in enumerate(sets):
        part = outcomes[i * episodes : (i + 1) * episodes]
        results[dropped] = EvaluationResult(
            task=task,
            policy=name,
            first_seed=first_seed,
            fps=part[0][1],
            controller=controller,
            episodes=tuple(episode for episode, _ in part),
            seconds=seconds / len(sets),
            crashes=crashes,
            info=info,
        )
    return ModalityStudy(tuple(names), results, never_dropped(spec, chosen))


def _spec(policy: Path | PolicyFactory, load: PolicyFactory) -> PolicySpec:
    if isinstance(policy, Path):
        from prism.training.checkpoint import read_spec, resolve

        return read_spec(resolve(policy))
    return load().spec


def never_dropped(spec: PolicySpec, sensors: Sequence[str]) -> tuple[str, ...]:
    """Those of the sensors whose dropout was 0 in training; none where the policy's config says nothing of it."""
    encoder = spec.config.get("encoder")
    if encoder is None:
        return ()
    chances = encoder.get("sensor_dropout", {})
    return tuple(name for name in sensors if not chances.get(name, encoder.get("dropout", 0.0)))


def _setup(
    load: PolicyFactory, make_env: EnvFactory, config: ControllerConfig
) -> Callable[[_Job], tuple[EpisodeResult, float]]:
    env, policy = make_env(), load()
    check_fits(env, policy)
    return functools.partial(_run, env, Controller(policy, config))


def _run(env: Env, controller: Controller, job: _Job) -> tuple[EpisodeResult, float]:
    return run_episode(DropSensors(env, job.dropped), controller, job.seed), env.fps
