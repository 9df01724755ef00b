"""`prism study selection`: which of the K candidates to execute (Sec. 4.5; App. E.5's flicker).

One trained policy; every selection rule at every execution horizon on the same episodes. Jerk, mode switch and
avoidable switch are defined in docs/metrics.md. Seeds from 200,000: those of the tests are not for choosing a rule.
    rows = [{rule, exec_horizon, success, success_ci, score, jerk, mode_switches, avoidable_switches, episodes}]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.rollout import evaluate
from prism.experiments import Experiment
from prism.selection import Rule
from prism.studies.cells import Cells, Result, settings_of
from prism.studies.report import Claim, Study, confirmed, show_rows
from prism.training.checkpoint import list_checkpoints
from prism.workflow import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNING_SEED = 200_000
RULES: tuple[Rule, ...] = get_args(Rule)
_KEPT = ("success", "success_ci", "score", "jerk", "mode_switches", "avoidable_switches", "episodes")


@dataclass(frozen=True)
class SelectionStudyConfig:
    run: Path
    work: Path = Path("runs/study-selection")
    rules: tuple[Rule, ...] = RULES
    exec_horizons: tuple[int, ...] = (4, 8)
    episodes: int = 50
    first_seed: int = TUNING_SEED
    workers: int = 1

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise PrismError(f"study selection: unknown rule '{unknown[0]}'; use {', '.join(RULES)}")
        if not self.rules or not self.exec_horizons or self.episodes < 1:
            raise PrismError("study selection: name a rule and an execution horizon, and at least one episode")


def policy_name(run: Path, experiment: Experiment) -> str:
    """Recipe, method, seed and step: what the policy is, without where it lies."""
    steps = [checkpoint.name for checkpoint in list_checkpoints(run_folder(run))]
    which = run.name if run.name in steps else (steps[-1] if steps else run.name)
    return f"{experiment.name}, {experiment.method}, seed {experiment.train.seed}, {which}"


def controller_of(config: ControllerConfig, rule: Rule, exec_horizon: int) -> ControllerConfig:
    return replace(config, exec_horizon=exec_horizon, selection=replace(config.selection, rule=rule))


def measure(config: SelectionStudyConfig, task: str, controller: ControllerConfig) -> Result:
    result = evaluate(config.run, task, config.episodes, config.first_seed, controller, config.workers, progress=False)
    summary = result.summary()
    return {key: summary[key] for key in _KEPT}


def run(config: SelectionStudyConfig, console: Console | None = None) -> Study:
    experiment = Experiment.load(run_folder(config.run))
    if experiment.task is None:
        raise PrismError(f"{config.run} was trained on a dataset alone: there is no task to roll it out in")
    cells = Cells(config.work, console)
    name = policy_name(config.run, experiment)
    rows: list[Result] = []
    for exec_horizon in config.exec_horizons:
        for rule in config.rules:
            controller = controller_of(experiment.controller, rule, exec_horizon)
            settings = {**settings_of(replace(experiment, controller=controller)), "policy_name": name}
            settings |= {"episodes": config.episodes, "first_seed": config.first_seed}
            compute = functools.partial(measure, config, experiment.task, controller)
            if (cell := cells.get(f"{rule}-{exec_horizon}", settings, compute)) is not None:
                rows.append({"rule": rule, "exec_horizon": exec_horizon, **cell})
    settings = {
        "policy": name,
        "task": experiment.task,
        "candidates": experiment.controller.candidates,
        "episodes": config.episodes,
        "first_seed": config.first_seed,
    }
    return Study("selection", {"rows": rows}, tuple(claims(rows)), settings, (config.first_seed,), tuple(cells.missing))


def claims(rows: list[Result]) -> list[Claim]:
    found = []
    by = {(row["rule"], row["exec_horizon"]): row for row in rows}
    for exec_horizon in sorted({row["exec_horizon"] for row in rows}):
        proxy, first, commit = (by.get((rule, exec_horizon)) for rule in ("proxy_score", "first", "commit"))
        if proxy is not None and first is not None:
            paper = "ProxyScore (nearest the current pose) reduces abrupt mode switches"
            ours = (
                f"{proxy['mode_switches']:.1f} switches an episode, success {proxy['success']:.0%}; "
                f"without a rule (the first drawn) {first['mode_switches']:.1f}, {first['success']:.0%}"
            )
            held = proxy["mode_switches"] < first["mode_switches"]
            found.append(Claim("Sec. 4.5", paper, ours, confirmed(held), f"Ta = {exec_horizon}"))
        if proxy is not None and commit is not None:
            paper = "flicker between two modes is what remains, and is hard to avoid"
            ours = (
                f"avoidable switches an episode: {proxy['avoidable_switches']:.1f} with ProxyScore, "
                f"{commit['avoidable_switches']:.1f} with a rule that commits; "
                f"success {proxy['success']:.0%} and {commit['success']:.0%}"
            )
            held = commit["avoidable_switches"] > 0.5 * proxy["avoidable_switches"]
            found.append(Claim("App. E.5", paper, ours, confirmed(held), f"Ta = {exec_horizon}"))
    return found


def show(study: Study, console: Console) -> None:
    keys = {"success": ".0%", "score": ".3f", "jerk": ".4f", "mode_switches": ".2f", "avoidable_switches": ".2f"}
    rows = [
        [f"{row['rule']}, Ta = {row['exec_horizon']}", *(format(row[key], form) for key, form in keys.items())]
        for row in study.figures["rows"]
    ]
    heads = ("rule", "success", "score", "jerk", "switches", "avoidable")
    show_rows(f"{study.settings['task']}, {study.settings['episodes']} episodes", heads, rows, console)


def draw(study: Study) -> Figure:
    """Success against switches: the rules that switch least succeed most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    shapes: dict[Any, str] = dict(
        zip(sorted({r["exec_horizon"] for r in study.figures["rows"]}), "osD^v", strict=False)
    )
    for row in study.figures["rows"]:
        at = row["mode_switches"], 100 * row["success"]
        axes.plot(*at, shapes.get(row["exec_horizon"], "o"), color="#0072b2")
        axes.annotate(
            f"{row['rule']}, {row['exec_horizon']}", at, fontsize=6, xytext=(3, 3), textcoords="offset points"
        )
    axes.set(xlabel="mode switches an episode", ylabel="success, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
