"""prism train, step by step: demonstrations -> statistics -> policy -> the loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console

from prism.data.portion import draw, portion
from prism.data.windows import Windows, split_episodes
from prism.distributed import ranks
from prism.encoder import load_pretrained
from prism.errors import PrismError
from prism.io.jsonconfig import from_json, to_json
from prism.methods.student import Student
from prism.methods.table import CONFIGS, build_policy
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Policy
from prism.runs.demonstrations import open_demonstrations
from prism.runs.recipes import FILE, Experiment
from prism.runs.run import Run, is_run
from prism.sensors import action_spec_of
from prism.training.checkpoint import check_resume, list_checkpoints
from prism.training.loop import TrainResult, train


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
    opened, begun, asked = None, False, resume
    with ranks.together():
        if leader:
            resume = check_resume(run, resume)
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
        spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps, action_spec_of(source))
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
            if asked is False or not is_run(run):
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


def _teach(policy: Policy, teacher: str | None) -> None:
    """Give a distilled method the run that it learns from."""
    if isinstance(policy, Student):
        if teacher is None:
            raise PrismError(
                f"{policy.spec.method} is distilled from another method: say from which run with --teacher"
            )
        policy.learn_from(Run(teacher).policy(_device()))
    elif teacher is not None:
        raise PrismError(f"method '{policy.spec.method}' has no teacher: drop --teacher")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
