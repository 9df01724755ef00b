"""How often to look, and what a late plan costs: success and jerk against T_a and delay (Sec. 4.5).

Try:
    python -m research replan runs/prism runs/flow runs/diffusion --json replan.json --plot replan.svg
    python -m research replan compare/trials/*/*/seed-0 --exec-horizons 8 4 2 1 --delays

Trained policies of one task, of each method the same training with other seeds: a row is their mean. Two sweeps on the
same episodes (seeds from 200,000: those of the tests choose nothing):
    horizons   every policy at every T_a, in real time: a plan is used as many steps late as it takes to draw on this
               machine, so a method whose plan costs a second looks as rarely as it must
    delays     PRISM's policies at their own T_a, a plan up to 400 ms late, executed in four ways: `switch` to the first
               candidate drawn, `blend` (fade it in over 4 steps), `ensemble` (ACT's mean of all plans), `select` (the
               rule of the run: one candidate that goes on from what is executed)
    horizons = [{method, exec_horizon, delay, latency_ms, policies, success, success_ci, score, jerk, mode_switches}]
    delays = [{way, delay_ms, delay, policies, success, success_ci, score, jerk, mode_switches}]
`delay`: in steps, growing; several where the policies of a row differ (in results of 2026-11-18: the largest).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.console import Console
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.metrics import success_interval
from prism.evaluation.play import evaluate
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import Run
from prism.experiments.trial import definition
from prism.experiments.trials import refuse_other
from prism.io.jsonconfig import to_json
from research.report import ComputedTrials, Drawn, Result, Study, show_rows
from research.selection import TUNING_SEED, Subject, subjects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEPT = ("success", "score", "jerk", "mode_switches")
WAYS: dict[str, Callable[[ControllerConfig], ControllerConfig]] = {
    "switch": lambda config: replace(config, selection=replace(config.selection, rule="first")),
    "blend": lambda config: replace(config, smoothing=4, selection=replace(config.selection, rule="first")),
    "ensemble": lambda config: replace(config, ensemble=0.01, selection=replace(config.selection, rule="first")),
    "select": lambda config: config,
}


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders of one task, of one or several methods; several of a method differ in their seed alone."""
    exec_horizons: Annotated[tuple[int, ...], option("N ...")] = (8, 4, 2, 1)
    """Steps executed of each plan."""
    delays: Annotated[tuple[int, ...], option("MS ...")] = (0, 100, 200, 300, 400)
    """Milliseconds; none: leave this sweep out."""
    episodes: int = 50
    """Episodes of each."""
    first_seed: int = TUNING_SEED
    """Seed of the first of them."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-replan")
    """Where finished parts are kept; default: runs/study-replan."""

    def __post_init__(self) -> None:
        if not self.runs or self.episodes < 1 or min((*self.exec_horizons, 1)) < 1 or min((*self.delays, 0)) < 0:
            raise PrismError("replan: name a run; episodes and execution horizons are at least 1, delays 0")


def run(config: Config, console: Console) -> Study:
    found, task = subjects(config.runs)
    trials = ComputedTrials(config.work, console)
    play = functools.partial(_play, config, trials, task)
    horizons, delays = [], []
    for method, policies in by_method(found).items():
        pace = {one.sha256: _pace(config, trials, task, one) for one in policies}
        for count in config.exec_horizons:
            late = {one.sha256: round(pace[one.sha256][0] / pace[one.sha256][1]) for one in policies}
            results = [
                play(one, replace(Run(one.path).settings, exec_horizon=count, delay=late[one.sha256]))
                for one in policies
            ]
            more = {"latency_ms": float(np.median([ms for ms, _ in pace.values()])), "delay": _distinct(late)}
            horizons += _row(results, {"method": method, "exec_horizon": count, **more})
        for way, change in WAYS.items() if method == "prism" else ():
            for ms in config.delays:
                late = {one.sha256: round(ms / pace[one.sha256][1]) for one in policies}
                results = [
                    play(one, replace(change(Run(one.path).settings), delay=late[one.sha256])) for one in policies
                ]
                delays += _row(results, {"way": way, "delay_ms": ms, "delay": _distinct(late)})
    settings = config.settings("runs") | {"policies": [one.name for one in found], "task": task}
    figures = {"task": task, "horizons": horizons, "delays": delays}
    seeds = tuple(sorted({one.experiment.train.seed for one in found}))
    return Study("replan", figures, (), settings, seeds, tuple(trials.missing), trials.commits)


def by_method(found: Iterable[Subject]) -> dict[str, list[Subject]]:
    """PrismError for variations of a method, and for two of one seed: their mean would be of neither."""
    methods: dict[str, list[Subject]] = {}
    for one in found:
        mine = methods.setdefault(one.experiment.method, [])
        for other in mine:
            _refuse_other(one, other)
        mine.append(one)
    return methods


def _refuse_other(one: Subject, other: Subject) -> None:
    method, seed = one.experiment.method, one.experiment.train.seed
    try:
        refuse_other(one.path, _but_seed(one.experiment), _but_seed(other.experiment))
    except PrismError as error:
        said = f"replan takes of a method the same training with other seeds; beside {other.path} (now)"
        raise PrismError(f"{said}, {error}") from None
    if seed == other.experiment.train.seed:
        raise PrismError(f"{one.path} is a {method} of seed {seed}, as {other.path} is: give one of each seed")


def _but_seed(experiment: Experiment) -> dict[str, Any]:
    """What is trained, whatever the seed, which may be in the name of the run that it learns from or begins with."""
    seed = experiment.train.seed
    plain = definition(replace(experiment, train=replace(experiment.train, seed=0)))
    return {**plain, **{key: str(plain[key]).replace(f"seed-{seed}", "seed") for key in ("teacher", "init")}}


def _distinct(late: dict[str, int]) -> list[int]:
    return sorted(set(late.values()))


def _pace(config: Config, trials: ComputedTrials, task: str, one: Subject) -> tuple[float, float]:
    """Milliseconds: of drawing a plan and choosing (median), of a time step."""

    def measure() -> Result:
        result = evaluate(one.path, task, 1, config.first_seed, Run(one.path).settings, 0)
        ms = [value for episode in result.episodes for value in episode.latency_ms]
        return {"latency_ms": float(np.median(ms)), "step_ms": 1000.0 / (result.fps or 10.0)}

    found = trials.get(f"{one.label}/pace", {"policy": one.name}, measure)
    if found is None:
        raise PrismError(f"{one.path}: not one episode could be played: {trials.missing[-1]}")
    return found["latency_ms"], found["step_ms"]


def _play(
    config: Config, trials: ComputedTrials, task: str, one: Subject, controller: ControllerConfig
) -> Result | None:
    """One number an episode of each of _KEPT; None where this cannot be executed (a plan too short for the delay)."""
    spec = {
        "policy": one.name,
        "controller": to_json(controller),
        "episodes": config.episodes,
        "seed": config.first_seed,
    }
    way = f"{controller.selection.rule}-{controller.smoothing}-{controller.ensemble}"
    name = f"{one.label}/ta-{controller.exec_horizon}-late-{controller.delay}-{way}"

    def measure() -> Result:
        result = evaluate(one.path, task, config.episodes, config.first_seed, controller, 0)
        return {key: [float(getattr(episode, key)) for episode in result.episodes] for key in _KEPT}

    return trials.get(name, spec, measure)


def _row(results: list[Result | None], what: dict[str, Any]) -> list[dict[str, Any]]:
    """None where a policy of it is missing."""
    there = [one for one in results if one is not None]
    if len(there) < len(results):
        return []
    won = np.array([one["success"] for one in there])
    means = {key: float(np.mean([one[key] for one in there])) for key in _KEPT}
    return [{**what, "policies": len(there), **means, "success_ci": list(success_interval(won))}]


def show(study: Study, console: Console) -> None:
    for name, keys in (("horizons", ("method", "exec_horizon")), ("delays", ("way", "delay_ms"))):
        rows = [
            [
                *(str(row[key]) for key in (*keys, "policies")),
                ", ".join(str(steps) for steps in row["delay"]),
                f"{row['success']:.0%}",
                f"{row['jerk']:.4f}",
                f"{row['mode_switches']:.1f}",
            ]
            for row in study.figures[name]
        ]
        if rows:
            heads = (*keys, "policies", "delay", "success", "jerk", "mode switches")
            show_rows(f"{study.figures['task']}: {name}", heads, rows, console)


def draw(study: Study) -> Figure:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sweeps = (
        ("horizons", "method", "exec_horizon", "steps executed of a plan"),
        ("delays", "way", "delay_ms", "delay, ms"),
    )
    panels = [sweep for sweep in sweeps if study.figures[sweep[0]]] or sweeps[:1]  # all missing: an empty one
    figure, axes = plt.subplots(2, len(panels), figsize=(4.5 * len(panels), 6.5), layout="constrained", squeeze=False)
    for column, (name, by, across, label) in enumerate(panels):
        rows = study.figures[name]
        for line in dict.fromkeys(row[by] for row in rows):
            mine = sorted((row for row in rows if row[by] == line), key=lambda row: float(row[across]))
            label_n = f"{line} (n = {mine[0]['policies']})"
            for axis, key in zip(axes[:, column], ("success", "jerk"), strict=True):
                axis.plot([row[across] for row in mine], [row[key] for row in mine], marker="o", label=label_n)
        for axis, key in zip(axes[:, column], ("success", "jerk"), strict=True):
            axis.set(xlabel=label, ylabel=key, ylim=(0, 1.02) if key == "success" else (0, None))
            axis.grid(alpha=0.3)
        axes[0, column].set_title("how often it looks" if name == "horizons" else "a plan that comes late")
        if rows:
            axes[0, column].legend()
    return figure
