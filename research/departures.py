"""Each departure from the paper without a figure, against the paper's setting, on tasks that nothing is tuned on.

Try:
    python -m research departures --json departures.json                         about 6 core hours
    python -m research departures --variants ours context_in_queries --json F
    python -m research departures --add F --json F --overwrite                   goes on where F ends

Recipes of pick-place, stick-pull and a peg by touch, equal CPU minutes. `ours` is the recipe; every other variant has
one setting as the paper has it (docs/explanation/deviations.md).

    pooled.VARIANT    success of ours minus the variant's, over the episodes of all tasks and the seeds that all have

A departure stays where the lower bound is above 0 over three trainings, and is set to the paper's otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.evaluation.metrics import FloatArray, paired
from prism.experiments.comparison import CompareConfig
from prism.experiments.trial import EvaluationPlan
from research import variants
from research.report import Claim, Study, decided
from research.variants import said

_ENCODER, _GENERATOR = "policy.encoder", "policy.generator"
OURS = "ours"
VARIANTS: dict[str, tuple[str, ...]] = {
    OURS: (),
    "context_in_queries": (f"{_GENERATOR}.context_in_queries=false",),
    # the paper's encoder: fusion per time step, one token a step
    "mix_blocks": (f"{_ENCODER}.mix_blocks=0", f"{_ENCODER}.vector_hidden=128", f"{_ENCODER}.fusion_hidden=1024"),
    "actions_per_query": (f"{_GENERATOR}.actions_per_query=1",),
    "candidates": ("policy.objective.candidates=16",),
    "pred_horizon": ("policy.pred_horizon=16",),
    "obs_horizon": ("policy.obs_horizon=8",),
    "ema_power": ("train.ema_power=0",),
    "batch_size": ("train.batch_size=128",),
    "learning_rate": ("train.learning_rate=0.0001", "train.weight_decay=0.01"),
    "exec_horizon": ("policy.pred_horizon=16", "controller.exec_horizon=8"),
    "draws": ("controller.candidates=8",),
}
TASKS = ("metaworld-pick-place", "metaworld-stick-pull", "tabletop-insert-left")


@dataclass(frozen=True, kw_only=True)
class Config(variants.Options):
    tasks: Annotated[tuple[str, ...], option("RECIPE ...")] = TASKS
    """Recipes to train on."""
    variants: Annotated[tuple[str, ...], option("NAME ...")] = tuple(VARIANTS)
    """ours, and the settings that are as the paper has them; default: all of them."""
    episodes: int = 50
    """Episodes of each trial."""
    minutes: float = 3.0
    """CPU minutes of each training."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-departures")
    """Where the runs and finished parts are kept; default: runs/study-departures."""

    def comparison(self, task: str) -> CompareConfig:
        return CompareConfig(
            recipes=(task,),
            contestants=variants.chosen(self.variants, VARIANTS, "departures"),
            seeds=self.seeds,
            minutes=self.minutes,
            clock="cpu",
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve=()),
        )


def run(config: Config, console: Console) -> Study:
    asked = {task: config.comparison(task) for task in config.tasks}
    pairs = [(OURS, name) for name in config.variants if name != OURS]
    study = variants.play("departures", config, asked, pairs, ("loss", "nearest_distance"), console)
    study.figures["pooled"] = pooled(study, config)
    return variants.with_claims(study, claims(study))


def successes(study: Study, name: str, task: str) -> dict[int, list[float]]:
    """By training seed, a number an episode."""
    return {
        one["trial"]["seed"]: [float(word) for word in one["trial"]["per_episode"]["success"].split()]
        for one in study.figures["trials"]
        if (one["contestant"], one["recipe"]) == (name, task)
    }


def pooled(study: Study, config: Config) -> dict[str, Any]:
    """Only of variants that have a seed on every task."""
    found = {}
    for name in config.variants:
        both = [[successes(study, one, task) for task in config.tasks] for one in (OURS, name)]
        seeds = set.intersection(*(set(table) for tables in both for table in tables))
        if name != OURS and seeds:
            ours, theirs = (_joined(tables, sorted(seeds)) for tables in both)
            found[name] = asdict(paired(ours, theirs))
    return found


def _joined(tables: list[dict[int, list[float]]], seeds: list[int]) -> FloatArray:
    return np.array([[value for table in tables for value in table[seed]] for seed in seeds])


def claims(study: Study) -> list[Claim]:
    def claim(name: str, difference: Mapping[str, Any]) -> Claim:
        verdict, note = decided(difference)
        paper = f"ours is better than the paper's {', '.join(VARIANTS[name])}"
        return Claim("deviations.md", paper, f"success {said(difference)}", verdict, note.removeprefix("; "))

    return [claim(name, difference) for name, difference in study.figures["pooled"].items()]


show = variants.show
