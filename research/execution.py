"""How each method is best executed: one grid for all methods, on tuning episodes (docs/explanation/protocol.md).

Try:
    python -m research execution compare/tuning/trials/pusht-human/*/seed-0 --json execution.json
    python -m research execution runs/pusht-human runs/pusht-human-diffusion --episodes 30

T_a {2, 4, 8} x jerk_weight {0, 16} x {one draw, commit with K = 16, ensemble}: 18 executions of each policy.

    best.METHOD    the settings of the best execution, as `prism compare --methods NAME=METHOD:SETTINGS` takes them:
                   highest success, then score, then the lower jerk
    rows           every execution of every policy: success, score, jerk
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.errors import PrismError, check_numbers
from prism.evaluation.play import evaluate
from prism.io.jsonconfig import with_settings
from research.report import ComputedTrials, Result, Study, Written, settings_of, show_rows
from research.selection import TUNING_SEED, Subject, subjects

HORIZONS, JERK_WEIGHTS = (2, 4, 8), (0.0, 16.0)
PICKS: dict[str, tuple[str, ...]] = {
    "one draw": ("candidates=1", "selection.rule=first", "ensemble=null"),
    "commit": ("candidates=16", "selection.rule=commit", "ensemble=null"),
    "ensemble": ("candidates=1", "selection.rule=first", "ensemble=0.01"),
}
_KEPT = ("success", "score", "jerk")


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, one policy of each method."""
    episodes: int = 30
    """Tuning episodes of each execution."""
    first_seed: int = TUNING_SEED
    """Seed of the first of them."""
    workers: int = 1
    """Processes that roll out in parallel."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-execution")
    """Where finished parts are kept; default: runs/study-execution."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "episodes workers", "[0, inf)": "first_seed"})
        if not self.runs:
            raise PrismError("execution: name at least one run")


def executions() -> list[tuple[str, tuple[str, ...]]]:
    """The grid: a name, and settings of the controller."""
    return [
        (f"{pick}, T_a {steps}, jerk {weight:g}", (f"exec_horizon={steps}", f"jerk_weight={weight:g}", *settings))
        for (pick, settings), weight, steps in product(PICKS.items(), JERK_WEIGHTS, HORIZONS)
    ]


def run(config: Config, console: Console) -> Study:
    policies, task = subjects(config.runs)
    trials, rows = ComputedTrials(config.work, console), list[Result]()
    for policy in policies:
        for name, settings in executions():
            played = play(config, trials, policy, task, name, settings)
            if played is not None:
                means = {key: fmean(played[key]) for key in _KEPT}
                rows.append({"policy": policy.name, "method": policy.experiment.method, "execution": name, **means})
    told = {"task": task, "episodes": config.episodes, "first_seed": config.first_seed}
    seeds = tuple(policy.experiment.train.seed for policy in policies)
    figures = {"best": best(rows), "rows": rows}
    return Study("execution", figures, (), told, seeds, tuple(trials.missing), trials.commits)


def play(
    config: Config, trials: ComputedTrials, policy: Subject, task: str, name: str, settings: tuple[str, ...]
) -> Result | None:
    """One number an episode of each of _KEPT; None where this policy cannot be executed so."""
    controller = with_settings(policy.experiment.controller, settings)
    spec = {**settings_of(replace(policy.experiment, controller=controller)), "sha256": policy.sha256}
    spec |= {"episodes": config.episodes, "first_seed": config.first_seed}

    def measure() -> Result:
        result = evaluate(policy.path, task, config.episodes, config.first_seed, controller, config.workers)
        return {key: [float(getattr(episode, key)) for episode in result.episodes] for key in _KEPT}

    slug = name.replace(", ", "-").replace(" ", "-")
    return trials.get(f"{policy.experiment.method}-{policy.label}/{slug}", spec, measure)


def best(rows: list[Result]) -> dict[str, str]:
    """Of each method: the settings of its best execution, means over its policies."""
    grid = dict(executions())
    found: dict[str, dict[str, list[Result]]] = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["execution"], []).append(row)

    def quality(played: list[Result]) -> tuple[float, float, float]:
        return fmean(r["success"] for r in played), fmean(r["score"] for r in played), -fmean(r["jerk"] for r in played)

    return {
        method: ",".join(f"controller.{one}" for one in grid[max(by, key=lambda name: quality(by[name]))])
        for method, by in found.items()
    }


def show(study: Study, console: Console) -> None:
    figures: dict[str, Any] = study.figures
    rows = [
        [row["policy"], row["execution"], f"{row['success']:.0%}", f"{row['score']:.3f}", f"{row['jerk']:.4f}"]
        for row in figures["rows"]
    ]
    show_rows("Executions on tuning episodes", ("policy", "execution", "success", "score", "jerk"), rows, console)
    for method, settings in figures["best"].items():
        console.print(f"best of {method}: {settings}", highlight=False, soft_wrap=True)
