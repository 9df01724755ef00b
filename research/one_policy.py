"""One policy for MetaWorld's 50 tasks by their sentence, against a policy for each.

Try:
    python -m research one-policy --json research/results/metaworld_one_policy.json
    python -m research one-policy --tasks metaworld-push metaworld-soccer --minutes 2
    python -m research one-policy --status --json F         runs nothing: the figures of what is there

The same demonstrations and the same test episodes as `python -m research tables metaworld`, whose results file says
what the separate policies reach; with one minute each they had as long as this one in all. State inputs and the name of
the task in words. Killed, the same command goes on.
    mean, tasks.TASK       success of the one policy; tasks_ci.TASK its interval over episodes
    separate.TASK          success of the policy of that task alone; separate_mean
    difference             one minus separate, over the tasks that both have: {mean, low, high, p}
    by_split               {SPLIT: [one, separate]}, of the splits of which both have every task
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.metrics import mean, paired, success_interval
from prism.experiments.combined_recipe import mixed
from prism.experiments.options import customized
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import EvalOptions, Run
from prism.io import files
from research import tables
from research.report import Claim, ComputedTrials, Result, Study, Written, decided, show_rows, train_run

# What 50 tasks need beyond one: room, and features that the sentence scales.
WIDER = ("policy.encoder.mix_width=512", "policy.encoder.text.gates=true")


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    tasks: Annotated[tuple[str, ...], option("TASK ...")] = ()
    """Only these of the 50 tasks."""
    minutes: float = 50.0
    """CPU minutes of the training, one core."""
    demonstrations: int = 10
    """Of each task."""
    seed: int = 0
    """Of the training."""
    episodes: int = 20
    """Test episodes of each task."""
    first_seed: int = tables.FRESH_SEED
    """Seed of the first of them; tune on 200000."""
    separate: Annotated[Path, option("FILE")] = tables.EXPERTS / "metaworld_state_1min.json"
    """Figures of the separate policies."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of the recipe."""
    status: bool = False
    """Run nothing: the figures of what is there."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/table-metaworld")
    """Where runs and recordings are kept, those of `tables metaworld` too; default: runs/table-metaworld."""

    def table(self) -> tables.Config:
        return tables.Config(table="metaworld", tasks=self.tasks, demonstrations=self.demonstrations)

    def experiment(self) -> Experiment:
        one = mixed(self.table().rows)
        parts = tuple(
            replace(
                part, demonstrations=replace(part.demonstrations, path=str(self.table().data(self.work, part.task)))
            )
            for part in one.demonstrations.parts
            if part.task
        )
        one = replace(one, demonstrations=replace(one.demonstrations, parts=parts))
        timed = ("train.clock=cpu", "train.threads=1", "train.val_fraction=0.0")
        return customized(one, minutes=self.minutes, seed=self.seed, set=(*timed, *WIDER, *self.set))


def run(config: Config, console: Console) -> Study:
    if not config.separate.is_file():
        raise PrismError(f"--separate {config.separate} is not there: python -m research tables metaworld --json F")
    table, trials = config.table(), ComputedTrials(config.work / "one-policy", console)
    settings = config.settings("status", "separate", "tasks")
    folder = trials.training(f"seed-{config.seed}")
    if not config.status:
        for task in table.rows:
            tables.record(table, config.work, task, console)
        train_run(config.experiment(), folder, console)
    won: dict[str, list[bool]] = {}
    for task in table.rows:
        compute = None if config.status else functools.partial(play, config, folder, task)
        result = trials.get(f"seed-{config.seed}/{task}", {**settings, "task": task}, compute)
        if result is not None:
            won[tables.short(task)] = result["success"]
    figures = summary(won, files.read_json(config.separate), tables.groups_of(table.rows))
    missing = tuple(trials.missing)
    return Study("one-policy", figures, tuple(claims(figures)), settings, (config.seed,), missing, trials.commits)


def play(config: Config, folder: Path, task: str) -> Result:
    how = EvalOptions(task, config.episodes, config.first_seed, workers=0)
    return {"success": [bool(one.success) for one in Run(folder).play(how, progress=False).episodes]}


def summary(
    won: Mapping[str, list[bool]], separate: Mapping[str, Any], groups: Mapping[str, list[str]]
) -> dict[str, Any]:
    ours = {task: mean([float(one) for one in episodes]) for task, episodes in won.items()}
    alone = {task: value for task, value in separate["tasks"].items() if task in ours}
    both = sorted(alone)
    figures: dict[str, Any] = {
        "mean": mean(list(ours.values())) if ours else None,
        "tasks": ours,
        "tasks_ci": {task: list(success_interval(np.array([one], np.float64))) for task, one in won.items()},
        "separate": alone,
        "separate_mean": mean(list(alone.values())) if alone else None,
        "separate_minutes": separate["settings"]["minutes"],
        "tasks_done": f"{len(both)} of {len(groups['all'])}",
        "difference": None,
        "by_split": {},
    }
    if both:
        rates = [np.array([[of[task] for task in both]]) for of in (ours, alone)]
        figures["difference"] = asdict(paired(*rates))
        figures["by_split"] = {
            split: [mean([of[task] for task in members]) for of in (ours, alone)]
            for split, members in groups.items()
            if all(task in alone for task in members)
        }
    return figures


def claims(figures: Mapping[str, Any]) -> list[Claim]:
    if figures["difference"] is None:
        return []
    alone, ahead = figures["separate_mean"], figures["difference"]["mean"]  # of the tasks that both have
    ours = f"{alone + ahead:.1%} with one policy, {alone:.1%} with one for each"
    verdict, chance = decided(figures["difference"], -0.10)
    note = f"{figures['tasks_done']} tasks; our bar: within 10 points{chance}"
    return [Claim("beyond the paper", "one policy does what its sentence says", ours, verdict, note)]


def show(study: Study, console: Console) -> None:
    figures = study.figures
    lines = [
        [task, f"{value:.0%}", tables.rate(figures["separate"].get(task))] for task, value in figures["tasks"].items()
    ]
    lines += [[f"mean, {split}", *(f"{value:.1%}" for value in both)] for split, both in figures["by_split"].items()]
    show_rows("success", ("task", "one policy", "one for each"), lines, console)
