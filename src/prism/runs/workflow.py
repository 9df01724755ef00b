"""What the commands do, step by step: demonstrations -> training -> rollouts -> report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console

from prism.distributed import ranks
from prism.methods.student import Student
from prism.controller import Controller, ControllerConfig
from prism.data.portion import draw, portion
from prism.data.windows import Windows, split_episodes
from prism.runs.demonstrations import open_demonstrations
from prism.serve.backends import Frame, load_behind
from prism.encoder import load_pretrained
from prism.errors import PrismError
from prism.rollout import ray_pool
from prism.rollout.modality import ModalityStudy, study
from prism.report.modality import write_page
from prism.rollout.recording import load_results, recording_path, save_result
from prism.report.run import write_report
from prism.rollout.results import EvaluationResult, metrics_json, write_json
from prism.rollout.episodes import TEST_SEED, IncompleteError, PolicyFactory, RecordConfig, evaluate
from prism.runs.recipes import FILE, Experiment
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Policy
from prism.methods.table import CONFIGS, build_policy
from prism.sims.tasks import make_env
from prism.training.checkpoint import list_checkpoints, load_policy, resolve
from prism.training.files import read_sums
from prism.training.loop import TrainResult, train
from prism.training.monitor import read_log


def train_experiment(
    experiment: Experiment,
    run: Path,
    resume: bool | Literal["auto"] = False,
    console: Console | None = None,
    title: str = "train",
    until: float = 1.0,
) -> TrainResult:
    """Demonstrations -> statistics -> policy -> the loop, up to `until` of its budget; the run folder then explains
    itself.

    `resume` "auto": go on with a run that is there, start one that is not. On several ranks all do the same; rank 0
    records what has to be recorded, before the others look, and writes the files.
    """
    leader = ranks.is_leader()
    console = (console or Console(stderr=True)) if leader else Console(quiet=True)
    opened, begun = None, False
    with ranks.together():
        if leader:
            resume = _check_run(run, resume)
            begun = resume and bool(list_checkpoints(run))
            opened = open_demonstrations(experiment.demonstrations, experiment.task, console)
    told = ranks.max_over_ranks([float(leader and bool(resume)), float(begun)])
    resume, begun = (value > 0 for value in told)
    with ranks.together():
        opened = opened or open_demonstrations(experiment.demonstrations, experiment.task, console)
        demonstrations, source, copies = opened
        experiment = replace(experiment, demonstrations=demonstrations)
        config = experiment.train

        # A mirrored episode is no independent one: held out is held out with all its copies.
        originals = len(source.lengths) // copies
        held_in, held_out = split_episodes(originals, config.val_fraction, config.seed)
        taken, steps = draw(source.lengths[held_in], demonstrations.fraction, demonstrations.count, config.seed)
        training = np.concatenate([held_in[taken] + copy * originals for copy in range(copies)]).tolist()
        trained_on = source
        if demonstrations.fraction is not None:  # perhaps not to their ends
            trained_on = portion(source, training, np.tile(steps, copies))
            training = list(range(len(training)))

        reading = f"reading the actions and vectors of {len(training)} episodes"
        with console.status(reading):
            normalizer = Normalizer.from_statistics(compute_statistics(trained_on, training))
        spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps)
        policy = build_policy(spec, config.seed, normalizer)
        if not begun:
            load_pretrained(policy)
        _teach(policy, experiment.teacher)
        policy.to(_device())
        horizons = (experiment.policy.obs_horizon, experiment.policy.pred_horizon)
        with console.status(reading):
            windows = Windows(trained_on, *horizons, training)
            windows_val = Windows(source, *horizons, held_out.tolist()) if len(held_out) else None
    on = f", {ranks.world_size()} ranks" if ranks.world_size() > 1 else ""
    console.print(
        f"{title}: {len(training)} episodes, {len(windows)} windows, "
        f"{sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters{on} -> {run}",
        highlight=False,
        soft_wrap=True,
    )
    with ranks.together():
        if leader:
            run.mkdir(parents=True, exist_ok=True)
            if not (run / FILE).exists():
                experiment.save(run)
    return train(policy, windows, windows_val, config, run, resume=resume, console=console, title=title, until=until)


def tell_experiment(experiment: Experiment | None) -> Experiment | None:
    """Rank 0's, on every rank: the others need not see the run that it goes on with."""
    if ranks.world_size() == 1:
        return experiment
    text = "" if experiment is None else json.dumps([experiment.method, to_json(experiment)])
    told = ranks.from_leader(text.encode() if ranks.is_leader() else b"")
    if ranks.is_leader() or not told:
        return experiment
    method, data = json.loads(told)
    return from_json(Experiment, data, f"{FILE} of rank 0", {"policy": CONFIGS[method]})


def _check_run(run: Path, resume: bool | Literal["auto"]) -> bool:
    """Whether there is a run to go on with; what was asked for must fit what is there."""
    if resume == "auto":
        return (run / FILE).exists()
    if resume and not run.is_dir():
        raise PrismError(f"{run} does not exist, so there is nothing to resume: check the name, or drop --resume")
    if not resume and (run / FILE).exists():
        raise PrismError(f"{run} holds a run already: continue it with --resume, or choose another --out")
    return resume


def _teach(policy: Policy, teacher: str | None) -> None:
    """Give a distilled method the run that it learns from."""
    if isinstance(policy, Student):
        if teacher is None:
            raise PrismError(
                f"{policy.spec.method} is distilled from another method: say from which run with --teacher"
            )
        policy.learn_from(load_policy(Path(teacher)).to(_device()))
    elif teacher is not None:
        raise PrismError(f"method '{policy.spec.method}' has no teacher: drop --teacher")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_folder(path: Path) -> Path:
    """The run that a path belongs to: a run folder, or a checkpoint in it."""
    if not path.exists():
        raise PrismError(f"{path} does not exist: give the folder of a run (prism train says its name at the end)")
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / FILE).is_file():
            return folder
    raise PrismError(f"{path} is not a run of `prism train`: {FILE} is missing")


@dataclass(frozen=True)
class EvalOptions:
    """What may differ from the experiment when a run is evaluated; None: as the experiment says."""

    task: str | None = None
    episodes: int = 50
    first_seed: int = TEST_SEED
    candidates: int | None = None
    selection: str | None = None
    settings: tuple[str, ...] = ()  # of the controller, KEY=VALUE
    workers: int | None = None
    record: RecordConfig | None = None
    ray: bool = False
    backend: str = "eager"  # deploy/backends.py

    def parallel(self) -> int:
        """Workers: as asked, or one a core of the machine or cluster."""
        if self.workers is not None:
            return self.workers
        return max(1, min(ray_pool.cpus() if self.ray else os.cpu_count() or 1, self.episodes))

    def controller(self, config: ControllerConfig) -> ControllerConfig:
        if self.candidates is not None:
            config = replace(config, candidates=self.candidates)
        if self.selection is not None:
            config = replace(config, selection=replace(config.selection, rule=self.selection))  # type: ignore[arg-type]  # checked there
        return with_settings(config, self.settings)


def evaluate_run(path: Path, options: EvalOptions, progress: bool = True) -> EvaluationResult:
    """Roll the policy of a run (or of one checkpoint) out; the recording and metrics.json stay in the run."""
    run = run_folder(path)
    experiment = Experiment.load(run)
    task = options.task or experiment.task
    if task is None:
        raise PrismError(f"{run} was trained on a dataset alone: say where to roll it out with --task")
    lost: IncompleteError | None = None
    policy: Path | PolicyFactory = path
    if options.backend != "eager":
        policy = partial(load_behind, path, options.backend, first_observations(path, task))
    try:
        result = evaluate(
            policy,
            task,
            options.episodes,
            options.first_seed,
            controller=options.controller(experiment.controller),
            workers=options.parallel(),
            record=options.record,
            progress=progress,
            ray=options.ray,
        )
    except IncompleteError as error:  # what there is is worth keeping
        result, lost = error.result, error
    result = replace(result, info={**result.info, "checkpoint": checkpoint_id(path)})
    if options.backend != "eager":  # the recording and metrics.json of the run stay those of the policy itself
        result = replace(result, policy=str(path), info={**result.info, "backend": options.backend})
    else:
        save_result(recording_path(run, result.task), result, overwrite=True)
        write_json(run / "metrics.json", metrics_json([result]), overwrite=True)
    if lost is not None:
        raise IncompleteError(result) from lost
    return result


def first_observations(path: Path, task: str, count: int = 32, every: int = 4) -> list[Frame]:
    """What a policy's sensors see in its own first steps, on seeds that are no test seeds: calibrates int8."""
    policy, env = load_policy(path), make_env(task)
    names = [spec.name for spec in policy.spec.sensors]
    controller = Controller(policy, ControllerConfig(exec_horizon=1, candidates=1))
    frames: list[Frame] = []
    for seed in range(count):
        controller.reset(seed)
        observation = env.reset(seed)
        for step in range(8 * every):
            if step % every == 0:
                frames.append({name: np.asarray(observation[name]) for name in names if name in observation})
            result = env.step(np.clip(controller.act(observation), env.action_low, env.action_high))
            observation = result.observation
            if result.done or len(frames) == count:
                break
        if len(frames) == count:
            break
    return frames


def calibration_frames(path: Path, count: int = 32) -> list[Frame]:
    """Observations for int8's ranges: of the run's task, or of its dataset where it has none."""
    experiment = Experiment.load(run_folder(path))
    if experiment.task is not None:
        return first_observations(path, experiment.task, count)
    _, source, _ = open_demonstrations(experiment.demonstrations, None, Console(quiet=True))
    lengths = np.cumsum(source.lengths)
    frames: list[Frame] = []
    for step in np.linspace(0, lengths[-1] - 1, count).astype(int):
        number = int(np.searchsorted(lengths, step, side="right"))
        at = int(step - (lengths[number - 1] if number else 0))
        episode = source.read(number, at, at + 1)
        there = [name for name in episode.streams if name not in episode.present or episode.present[name][0]]
        frames.append({name: episode.streams[name][0] for name in there})
    return frames


def checkpoint_id(path: Path) -> dict[str, str]:
    """Which weights a run or a checkpoint stands for: what tells a stored result from a stale one."""
    folder = resolve(path)
    return {"name": folder.name, "sha256": str(read_sums(folder).get("model.safetensors", {}).get("sha256", ""))}


def drop_sensors(path: Path, options: EvalOptions, sensors: tuple[str, ...] | None = None) -> ModalityStudy:
    """Roll a run out without each sensor and each pair of them; modality.json and modality.html stay in the run."""
    from rich.progress import Progress, TimeRemainingColumn

    run = run_folder(path)
    experiment = Experiment.load(run)
    task = options.task or experiment.task
    if task is None:
        raise PrismError(f"{run} was trained on a dataset alone: say where to roll it out with --task")
    with Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"drop sensors of {task}", total=None)
        result = study(
            path,
            task,
            options.episodes,
            options.first_seed,
            controller=options.controller(experiment.controller),
            workers=options.workers or os.cpu_count() or 1,
            sensors=sensors,
            on_done=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    write_json(run / "modality.json", result.to_json(), overwrite=True)
    write_page(run / "modality.html", result)
    return result


def write_run_report(run: Path) -> Path:
    """report.html of a run or of a demo from its recordings; it can be made again at any time."""
    results = load_results(run)
    homes = {result.task: run / result.task if (run / result.task).is_dir() else run for result in results}
    logs = {task: read_log(home) for task, home in homes.items()}
    return write_report(run / "report.html", results, logs, title=f"PRISM: {run.resolve().name}")
