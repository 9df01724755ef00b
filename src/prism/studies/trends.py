"""`prism study trends`: do the baselines show what their own papers say of them? On Push-T.

    score.METHOD.SHARE.EVALUATIONS    mean score of rollouts: trained on this share of the demonstrations, asked with so
                                      many evaluations of the network a plan, the same weights for all of them
    success, score_ci                 likewise
Two trends: flow matching with one Euler step is worse than with five; more demonstrations are better.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.baselines.diffusion import DiffusionConfig
from prism.baselines.flow_matching import FlowMatchingConfig
from prism.context_policy import ContextPolicy
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.rollout import evaluate
from prism.experiments import Experiment, recipe, with_budget, with_method
from prism.jsonconfig import with_settings
from prism.policy import Policy
from prism.selection import SelectionConfig
from prism.studies.cells import Cells, Result, settings_of, train_quietly
from prism.studies.report import Claim, Study, confirmed, show_rows
from prism.training.checkpoint import load_policy


@dataclass(frozen=True)
class TrendsConfig:
    work: Path = Path("runs/study-trends")
    recipe: str = "pusht"
    methods: tuple[str, ...] = ("flow_matching",)
    shares: tuple[float, ...] = (0.1, 0.95)  # of the demonstrations; the rest is held out
    evaluations: tuple[int, ...] = (1, 5)
    steps: int = 1500
    episodes: int = 20
    first_seed: int = 200_000
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if any(not 0 < share < 1 for share in self.shares) or list(self.shares) != sorted(set(self.shares)):
            raise PrismError(f"study trends: shares {self.shares}: give growing numbers between 0 and 1")
        if list(self.evaluations) != sorted(set(self.evaluations)) or min(self.evaluations) < 1:
            raise PrismError(f"study trends: evaluations {self.evaluations}: give growing numbers from 1")

    def experiment(self, method: str, share: float) -> Experiment:
        experiment = with_budget(with_method(recipe(self.recipe), method), steps=self.steps, seed=self.seed)
        return with_settings(experiment, [f"train.val_fraction={1 - share:.4g}", "train.threads=1"])


def load_asked(run: Path, evaluations: int) -> Policy:
    """The policy of a run, to be asked so many times for a plan; one that is asked once anyway stays as it is."""
    policy = load_policy(run)
    assert isinstance(policy, ContextPolicy)
    if isinstance(policy.config, DiffusionConfig):
        policy.config = replace(policy.config, evaluations=evaluations, spacing="trailing")
    elif isinstance(policy.config, FlowMatchingConfig):
        policy.config = replace(policy.config, evaluations=evaluations, solver="euler")
    return policy


def run(config: TrendsConfig, console: Console | None = None) -> Study:
    cells = Cells(config.work, console)
    figures: dict[str, Any] = {key: {} for key in ("score", "success", "score_ci")}
    for method in config.methods:
        for share in config.shares:
            name = f"{method}-{share:g}"
            settings = {
                **settings_of(config.experiment(method, share)),
                "evaluations": list(config.evaluations),
                "episodes": config.episodes,
                "first_seed": config.first_seed,
            }
            result = cells.get(name, settings, functools.partial(_cell, config, cells, method, share))
            for key, by_evaluations in (result or {}).items():
                figures[key].setdefault(method, {})[f"{share:g}"] = by_evaluations
    settings = {
        "recipe": config.recipe,
        "methods": list(config.methods),
        "shares": list(config.shares),
        "evaluations": list(config.evaluations),
        "steps": config.steps,
        "episodes": config.episodes,
        "first_seed": config.first_seed,
    }
    return Study("trends", figures, tuple(claims(figures, config)), settings, (config.seed,), tuple(cells.missing))


def _cell(config: TrendsConfig, cells: Cells, method: str, share: float) -> Result:
    folder = cells.run(f"{method}-{share:g}")
    experiment = config.experiment(method, share)
    train_quietly(experiment, folder, cells.console)
    found: Result = {"score": {}, "success": {}, "score_ci": {}}
    controller = ControllerConfig(candidates=1, selection=SelectionConfig(rule="first"))  # one plan, and that is it
    for evaluations in config.evaluations:
        result = evaluate(
            functools.partial(load_asked, folder, evaluations),
            experiment.task or "pusht",
            config.episodes,
            config.first_seed,
            controller=controller,
            workers=config.workers,
        )
        scores = [episode.score for episode in result.episodes]
        found["score"][str(evaluations)] = metrics.mean(scores)
        found["score_ci"][str(evaluations)] = list(metrics.bootstrap_interval(scores))
        found["success"][str(evaluations)] = metrics.mean([float(episode.success) for episode in result.episodes])
    return found


def claims(figures: dict[str, Any], config: TrendsConfig) -> list[Claim]:
    found = []
    low, high = str(config.evaluations[0]), str(config.evaluations[-1])
    few, many = f"{config.shares[0]:g}", f"{config.shares[-1]:g}"
    note = f"{config.recipe}, {config.steps} steps, {config.episodes} episodes, one seed: a trend, no more"
    for method, by_share in figures["score"].items():
        if many in by_share and low != high:
            ours = f"{method}: {by_share[many][low]:.3f} with {low}, {by_share[many][high]:.3f} with {high}"
            verdict = confirmed(by_share[many][high] > by_share[many][low])
            found.append(
                Claim("the baselines' papers", "more evaluations of the network are better", ours, verdict, note)
            )
        if few in by_share and many in by_share and few != many:
            ours = f"{method}: {by_share[few][high]:.3f} with {few} of the data, {by_share[many][high]:.3f} with {many}"
            verdict = confirmed(by_share[many][high] > by_share[few][high])
            found.append(Claim("the baselines' papers", "more demonstrations are better", ours, verdict, note))
    return found


def show(study: Study, console: Console) -> None:
    rows = [
        [f"{method}, {share} of the data, {count} evaluations", f"{score:.3f}", f"[{ci[0]:.3f}, {ci[1]:.3f}]"]
        for method, by_share in study.figures["score"].items()
        for share, by_count in by_share.items()
        for count, score in by_count.items()
        for ci in [study.figures["score_ci"][method][share][count]]
    ]
    show_rows("trends", ("method", "score", "95 %"), rows, console)
