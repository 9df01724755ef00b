"""One cell: train in stretches, look on the way, evaluate at the end. Killed at any moment, it goes on when run again.

Evaluations are not on the training's clock. They run in this process, one thread, so that its kill is the only kill.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.controller import Controller
from prism.errors import PrismError
from prism.io.jsonconfig import to_json
from prism.rollout.episodes import check_fits, load_policy_at, make_env_of, run_episode
from prism.rollout.recording import recording_path, save_result
from prism.rollout.results import EvaluationResult, metrics_json, run_info, write_json
from prism.runs.comparison.grid import CURVE, FAILED, REMEDY, RESULT, TRAINED_BY, CellSpec, teacher_folder
from prism.runs.recipes import Experiment
from prism.runs.workflow import train_experiment
from prism.training import files
from prism.training.checkpoint import list_checkpoints
from prism.training.loop import TrainResult

FORMAT_VERSION = 1
_LINE_SECONDS = 15.0


class StoppedError(KeyboardInterrupt):
    """A signal ended the training; all is saved."""


def run_cell(folder: Path, console: Console) -> None:
    """Until result.json is there. Raises PrismError for what will not get better by trying again."""
    experiment, spec = Experiment.load(folder), CellSpec.load(folder)
    if (folder / RESULT).is_file():
        return
    if (teacher := teacher_folder(folder)) is not None and not (teacher / RESULT).is_file():
        raise PrismError(f"its teacher, {CellSpec.load(teacher).id}, is not finished: run the same command again")
    (folder / FAILED).unlink(missing_ok=True)
    plan = spec.evaluation
    curve = _read_curve(folder)
    for fraction in plan.curve:
        if any(point["fraction"] == fraction for point in curve):
            continue
        trained = _train(experiment, folder, console, str(spec.id), fraction)
        shown = rollouts(folder, experiment, plan.looked_at, plan.first_seed, console)
        curve.append(_point(fraction, trained, shown))
        write_json(folder / CURVE, {"points": curve}, overwrite=True)
    trained = _train(experiment, folder, console, str(spec.id), 1.0)
    result = rollouts(folder, experiment, plan.episodes, plan.first_seed, console)
    curve.append(_point(1.0, trained, _first(result, plan.looked_at)))
    save_result(recording_path(folder, result.task), result, overwrite=True)
    write_json(folder / "metrics.json", metrics_json([result]), overwrite=True)
    for old in list_checkpoints(folder):
        if old.resolve() != trained.checkpoint.resolve():
            files.remove_folder(old)
    write_json(folder / RESULT, _record(folder, spec, experiment, trained, result, curve), overwrite=True)


def rollouts(
    policy: Path, experiment: Experiment, episodes: int, first_seed: int, console: Console
) -> EvaluationResult:
    """What prism.rollout.episodes.evaluate does with one worker, in this process."""
    assert experiment.task is not None  # grid.experiments_of
    start = time.perf_counter()
    env = make_env_of(experiment.task)
    try:
        loaded = load_policy_at(policy)
        check_fits(env, loaded)
        controller = Controller(loaded, experiment.controller)
        done = []
        said = start
        for seed in range(first_seed, first_seed + episodes):
            done.append(run_episode(env, controller, seed))
            if time.perf_counter() - said > _LINE_SECONDS:
                said = time.perf_counter()
                wins = sum(episode.success for episode in done)
                console.print(f"evaluate: {len(done)} of {episodes} episodes, {wins} succeeded", highlight=False)
    finally:
        env.close()
    return EvaluationResult(
        task=experiment.task,
        policy=str(policy),
        first_seed=first_seed,
        fps=env.fps,
        controller=experiment.controller,
        episodes=tuple(done),
        seconds=time.perf_counter() - start,
        info=run_info(first_seed),
    )


def _train(experiment: Experiment, folder: Path, console: Console, title: str, until: float) -> TrainResult:
    result = train_experiment(experiment, folder, resume="auto", console=console, title=title, until=until)
    if result.stopped_by:
        raise StoppedError(result.stopped_by)
    return result


def _read_curve(folder: Path) -> list[dict[str, Any]]:
    if not (folder / CURVE).is_file():
        return []
    points = files.read_json(folder / CURVE).get("points")
    if not isinstance(points, list):
        raise PrismError(f"{folder / CURVE} has no list 'points': remove the file")
    return points


def _first(result: EvaluationResult, count: int) -> EvaluationResult:
    return replace(result, episodes=result.episodes[:count])


def _point(fraction: float, trained: TrainResult, result: EvaluationResult) -> dict[str, Any]:
    summary = result.summary()
    return {
        "fraction": fraction,
        "seconds": trained.seconds,
        "step": trained.step,
        "val_loss": trained.val_loss,
        "episodes": len(result.episodes),
        "score": summary["score"],
        "success": summary["success"],
    }


def _record(
    folder: Path,
    spec: CellSpec,
    experiment: Experiment,
    trained: TrainResult,
    result: EvaluationResult,
    curve: list[dict[str, Any]],
) -> dict[str, Any]:
    """result.json: everything that the summary needs, one row an episode."""
    summary = result.summary()
    kept = ("success", "score", "jerk", "mode_switches", "modes", "spread", "latency_ms", "replans", "seconds")
    info = run_info(experiment.train.seed)
    info.pop("command", None)  # of the worker; the comparison's own is in comparison.json
    origin = folder / TRAINED_BY
    trained_by = files.read_json(origin, REMEDY) if origin.is_file() else {k: info.get(k) for k in ("commit", "date")}
    return {
        "format_version": FORMAT_VERSION,
        "recipe": spec.id.recipe,
        "contestant": spec.id.contestant,
        "method": spec.method,
        "task": result.task,
        "seed": spec.id.seed,
        "steps": trained.step,
        "train_seconds": trained.seconds,
        "clock": experiment.train.clock,
        "val_loss": trained.val_loss,
        "skipped_steps": trained.skipped_steps,
        "parameters": sum(parameter.numel() for parameter in trained.policy.parameters()),
        "controller": to_json(experiment.controller),
        "evaluation": {name: summary[name] for name in kept},
        "per_episode": [episode.row() for episode in result.episodes],
        "curve": curve,
        "info": info,
        "trained_by": trained_by,
    }
