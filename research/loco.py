"""Loco-manipulation on the Go2 twin: methods at 15, 25 and 35 demonstrations (Sec. 5, real world; Fig. 4).

Try:
    python -m research loco --json research/results/loco.json
    python -m research loco --status --json loco.json       nothing is run: what is there so far

Three tasks, each method at equal minutes of CPU time, 50 episodes on seeds on which nothing was chosen. The trainings
run in this order: PRISM with all demonstrations, the others with all, then PRISM with fewer, then the
others. Killed at any moment, the same command goes on where it was.

    success.METHOD.TASK, ci.METHOD.TASK     with the most demonstrations; the 95 % interval
    curve.METHOD.TASK.N                     with N; success, ci, seeds, commits (of the code that made it)
    mean.METHOD                             of the tasks, with the most demonstrations; only where all are there
    ahead.METHOD                            {mean, low, high, p}: PRISM minus this method, all tasks' episodes, paired
    gain.METHOD.TASK                        {mean, low, high, p}: with the most demonstrations minus with the fewest
    missing                                 trials that are not there, each with the reason
    commits                                 of the code that made the trials, all of them
State inputs and touch, in simulation; the paper's robot has cameras. Fewer demonstrations are a subset of more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.metrics import paired
from prism.evaluation.play import TEST_SEED
from prism.experiments.comparison import CompareConfig, Comparison, Contestant, compare, summarise
from prism.experiments.demonstrations import record_if_missing
from prism.experiments.recipes import recipe
from prism.experiments.stored_trials import contestant, successes
from prism.experiments.trial import EvaluationPlan
from prism.experiments.trials import commits_of
from research.report import Claim, Drawn, Study, decided, show_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "prism"
# Diffusion and flow matching draw one plan, as published: more cost 100 ms and change nothing where there is one way.
# IMLE Policy draws as many candidates in training as PRISM: with the published 20 it gets half the steps.
ONE = ("controller.candidates=1", "controller.selection.rule=first")
THEIRS = {"diffusion": ONE, "flow_matching": ONE, "imle": ("policy.candidates=8",)}


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    tasks: Annotated[tuple[str, ...], option("TASK ...")] = ("go2-park", "go2-insert", "go2-pick")
    """Tasks of the twin."""
    counts: Annotated[tuple[int, ...], option("N ...")] = (15, 25, 35)
    """Numbers of demonstrations, growing."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = (OURS, "diffusion", "flow_matching", "imle")
    """Methods, ours first, or variations: NAME=METHOD:KEY=VALUE."""
    minutes: float = 3.0
    """CPU minutes of every training."""
    clock: Literal["wall", "cpu"] = "cpu"
    """What the minutes count."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0,)
    """Seeds of the training."""
    episodes: int = 50
    """Trials of each evaluation."""
    first_seed: int = TEST_SEED
    """Of the first trial."""
    jobs: int = 1
    """Runs at the same time, one thread each."""
    status: bool = False
    """Run nothing: the figures of what is there."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-loco")
    """Where the runs and finished parts are kept; default: runs/study-loco."""

    def __post_init__(self) -> None:
        if min(self.counts, default=0) < 1 or list(self.counts) != sorted(set(self.counts)):
            raise PrismError(f"loco: counts {self.counts}: give them growing, from 1 on")
        if not self.methods or self.methods[0] != OURS:
            raise PrismError(f"loco: methods {self.methods}: the others are compared with {OURS}, which comes first")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(Contestant.parse(method).name for method in self.methods)

    def folder(self, task: str, count: int) -> Path:
        return self.work / task / str(count)

    def comparison(self, task: str, count: int, methods: tuple[str, ...]) -> CompareConfig:
        data = self.work / "data" / task
        return CompareConfig(
            recipes=(task,),
            contestants=tuple(contestant(method, THEIRS) for method in methods),
            seeds=self.seeds,
            minutes=self.minutes,
            clock=self.clock,
            settings=(
                f"demonstrations.episodes={self.counts[-1]}", f'demonstrations.path="{data}"',
                f"demonstrations.count={count}", "train.val_fraction=0.0",
            ),
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve=()),
        )  # fmt: skip

    def order(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """What is run when: count, task, methods."""
        *fewer, most = self.counts
        ours, each = self.methods[:1], [self.methods[: n + 1] for n in range(len(self.methods))]
        parts = [(most, methods) for methods in each]
        parts += [(count, methods) for methods in (ours, self.methods) for count in reversed(fewer)]
        return [(count, task, methods) for count, methods in parts for task in self.tasks]


def run(config: Config, console: Console) -> Study:
    for count, task, methods in () if config.status else config.order():
        record(config, task, console)
        compare(config.folder(task, count), config.comparison(task, count, methods), config.jobs, console)
    there = {
        (task, count): summarise(config.folder(task, count), config.comparison(task, count, config.methods))
        for task in config.tasks
        for count in config.counts
    }
    figures = figures_of(config, there)
    missing = tuple(
        f"{count} demonstrations, {one.trial}: {one.reason}"
        for (_, count), comparison in there.items()
        for one in comparison.missing
    )
    commits = commits_of(trial for comparison in there.values() for trial in comparison.trials.values())
    settings = {**config.settings("status", "jobs"), "exec_horizon": recipe(config.tasks[0]).controller.exec_horizon}
    return Study("loco", figures, tuple(claims(figures, config)), settings, config.seeds, missing, commits)


def record(config: Config, task: str, console: Console) -> None:
    """In one process: a study is to leave the machine usable."""
    asked = replace(recipe(task).demonstrations, episodes=config.counts[-1], path=str(config.work / "data" / task))
    record_if_missing(asked, task, console, workers=1)


def figures_of(config: Config, there: Mapping[tuple[str, int], Comparison]) -> dict[str, Any]:
    most, fewest = config.counts[-1], config.counts[0]
    curve: dict[str, dict[str, dict[str, Any]]] = {method: {} for method in config.names}
    for (task, count), comparison in there.items():
        for row in comparison.rows:
            point = {"success": row.success, "ci": list(row.success_ci), "seeds": len(row.seeds)}
            trials = [trial for id, trial in comparison.trials.items() if id.contestant == row.contestant]
            curve[row.contestant].setdefault(task, {})[str(count)] = {**point, "commits": commits_of(trials)}
    full = {m: {t: points[str(most)] for t, points in by.items() if str(most) in points} for m, by in curve.items()}
    gain: dict[str, dict[str, Any]] = {method: {} for method in config.names}
    for method in config.names:
        for task in config.tasks:
            few, many = (successes([there[task, count]], method) for count in (fewest, most))
            if few is not None and many is not None and few is not many and few.shape == many.shape:
                gain[method][task] = asdict(paired(many, few))
    ahead = {}
    whole = [there[task, most] for task in config.tasks]
    ours = successes(whole, OURS)
    for method in config.names[1:]:
        other = successes(whole, method)
        if ours is not None and other is not None and other.shape == ours.shape:
            ahead[method] = asdict(paired(ours, other))
    return {
        "success": {m: {t: point["success"] for t, point in by.items()} for m, by in full.items()},
        "ci": {m: {t: point["ci"] for t, point in by.items()} for m, by in full.items()},
        "mean": {
            m: float(np.mean([point["success"] for point in by.values()]))
            for m, by in full.items()
            if len(by) == len(config.tasks)
        },
        "ahead": ahead,
        "gain": gain,
        "curve": curve,
    }


def claims(figures: dict[str, Any], config: Config) -> list[Claim]:
    found = []
    seeds = f"{len(config.seeds)} training, {config.episodes} trials a task; the twin, state inputs and touch"
    for method, difference in figures["ahead"].items():
        verdict, chance = decided(difference)
        ours = (
            f"{difference['mean']:+.0%} [{difference['low']:+.0%}, {difference['high']:+.0%}] in the mean of the tasks"
        )
        found.append(Claim("Sec. 5, Fig. 4", f"10 to 25 points ahead of {method}", ours, verdict, seeds + chance))
    for task, difference in figures["gain"][OURS].items():
        verdict, chance = decided(difference)
        few, most = config.counts[0], config.counts[-1]
        ours = f"{difference['mean']:+.0%} [{difference['low']:+.0%}, {difference['high']:+.0%}] from {few} to {most}"
        paper = "+10 (parking), +20 (insertion), +30 points (pick-and-place) from 15 to 35 demonstrations"
        found.append(Claim("Sec. 5, Fig. 4", paper, f"{task}: {ours}", verdict, seeds + chance))
    return found


def show(study: Study, console: Console) -> None:
    rows = [
        [f"{method}, {task}", *(f"{100 * points[n]['success']:.0f}" if n in points else "" for n in _counts(study))]
        for method, by_task in study.figures["curve"].items()
        for task, points in by_task.items()
    ]
    show_rows("success, %", ("method, task", *_counts(study)), rows, console)
    for method, value in study.figures["mean"].items():
        console.print(f"mean of the tasks, {method}: {value:.1%}", highlight=False)


def _counts(study: Study) -> list[str]:
    return [str(count) for count in study.settings["counts"]]


def draw(study: Study) -> Figure:
    from matplotlib.figure import Figure

    tasks = study.settings["tasks"]
    figure = Figure(figsize=(3.2 * len(tasks), 3.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        for method, by_task in study.figures["curve"].items():
            points = by_task.get(task, {})
            counts = [n for n in _counts(study) if n in points]
            axes.plot([int(n) for n in counts], [100 * points[n]["success"] for n in counts], "o-", label=method)
        axes.set(title=task, xlabel="demonstrations", ylim=(-3, 103))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("success, %")
    figure.axes[0].legend(frameon=False)
    return figure
