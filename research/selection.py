"""Which candidate to execute: success, jerk and mode switches of every rule, with the same policies (Sec. 4.5).

Try:
    python -m research selection runs/pusht-human --episodes 100 --json selection.json --plot selection.png
    python -m research selection compare/pusht/trials/pusht-human/prism/seed-* --json selection.json

Trained policies of one task (one a training seed, for example); every selection rule at every execution horizon on the
same episodes. Jerk, mode switch and avoidable switch: docs/reference/metrics.md. Seeds from 200,000: those of the
tests are not for choosing a rule.
    rows = [{rule, exec_horizon, policies, episodes, success, success_ci, score, score_ci, jerk, mode_switches,
             avoidable_switches, by_policy}]     means over policies and episodes; by_policy the same, one number each
    fewer_switches.TA.RULE = {mean, low, high, p, seeds, episodes}: switches an episode, `first` minus the rule
    flicker_left.TA = the same: avoidable switches an episode, `commit` minus half of `proxy_score`
`restless` is off: it would replace a rule just where it stands still. Intervals: bootstrap of policies and episodes
(docs/howto/comparison.md). A verdict is on rules of execution and holds of the given policies; it says how many.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from rich.console import Console
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.metrics import FloatArray, interval, paired, success_interval
from prism.evaluation.play import evaluate
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import Run
from prism.io.jsonconfig import to_json
from prism.selection import Rule
from research.report import Claim, ComputedTrials, Drawn, Result, Study, decided, settings_of, show_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNING_SEED = 200_000
RULES: tuple[Rule, ...] = get_args(Rule)
_KEPT = ("success", "score", "jerk", "mode_switches", "avoidable_switches")


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, or checkpoints in them; one a training seed, for example."""
    rules: Annotated[tuple[Rule, ...], option("RULE ...")] = RULES
    """Rules of prism.selection; default: all of them."""
    exec_horizons: Annotated[tuple[int, ...], option("N ...")] = (4, 8)
    """Steps executed of each plan."""
    episodes: int = 50
    """Episodes of each."""
    first_seed: int = TUNING_SEED
    """Seed of the first of them."""
    workers: int = 1
    """Processes that roll out in parallel."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-selection")
    """Where the runs and finished parts are kept; default: runs/study-selection."""

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise PrismError(f"selection: unknown rule '{unknown[0]}'; use {', '.join(RULES)}")
        if not self.runs or not self.rules or not self.exec_horizons or self.episodes < 1:
            raise PrismError("selection: name a run, a rule and an execution horizon, and at least one episode")


@dataclass(frozen=True)
class Subject:
    """A trained policy that a study rolls out."""

    path: Path
    experiment: Experiment
    name: str  # recipe, method, seed and step: what it is, without where it lies
    sha256: str  # of its weights

    @property
    def label(self) -> str:
        """Part of a file's name."""
        return f"seed-{self.experiment.train.seed}-{self.sha256[:8]}"


def subjects(runs: tuple[Path, ...], task: str | None = None) -> tuple[list[Subject], str]:
    """The policies of some runs (or checkpoints in them), and the one task that they are rolled out in."""
    found: list[Subject] = []
    for run in runs:
        experiment = Run(run).experiment
        if task is None and experiment.task is None:
            raise PrismError(f"{run} was trained on a dataset alone: there is no task to roll it out in")
        one = Subject(run, experiment, policy_name(run, experiment), Run(run).weights_id()["sha256"])
        if one.sha256 in [other.sha256 for other in found]:
            raise PrismError(f"{run} has the same weights as a run named before it: name each policy once")
        found.append(one)
    tasks = [task] if task is not None else sorted({str(one.experiment.task) for one in found})
    if len(tasks) > 1:
        raise PrismError(f"the runs are of the tasks {', '.join(tasks)}: give those of one task")
    return found, str(tasks[0])


def policy_name(run: Path, experiment: Experiment) -> str:
    steps = [checkpoint.name for checkpoint in Run(run).checkpoints]
    which = run.name if run.name in steps else (steps[-1] if steps else run.name)
    return f"{experiment.name}, {experiment.method}, seed {experiment.train.seed}, {which}"


def controller_of(config: ControllerConfig, rule: Rule, exec_horizon: int) -> ControllerConfig:
    """The rule itself: without `restless`, which replaces it where it stands still."""
    return replace(config, exec_horizon=exec_horizon, selection=replace(config.selection, rule=rule, restless=0))


def measure(config: Config, policy: Path, task: str, controller: ControllerConfig) -> Result:
    """One number an episode of each of _KEPT."""
    result = evaluate(policy, task, config.episodes, config.first_seed, controller, config.workers)
    return {key: [float(getattr(episode, key)) for episode in result.episodes] for key in _KEPT}


def run(config: Config, console: Console) -> Study:
    policies, task = subjects(config.runs)
    trials = ComputedTrials(config.work, console)
    found: dict[tuple[str, int], dict[int, Result]] = {}
    for at, policy in enumerate(policies):
        for exec_horizon in config.exec_horizons:
            for rule in config.rules:
                controller = controller_of(policy.experiment.controller, rule, exec_horizon)
                settings = {**settings_of(replace(policy.experiment, controller=controller)), "sha256": policy.sha256}
                settings |= {"episodes": config.episodes, "first_seed": config.first_seed}
                compute = functools.partial(measure, config, policy.path, task, controller)
                trial = trials.get(f"{policy.label}-{rule}-{exec_horizon}", settings, compute)
                if trial is not None:
                    found.setdefault((rule, exec_horizon), {})[at] = trial
    figures = summarise(found)
    settings = {
        "policies": [policy.name for policy in policies],
        "task": task,
        "controllers": [to_json(policy.experiment.controller) for policy in policies],
        "episodes": config.episodes,
        "first_seed": config.first_seed,
    }
    seeds = tuple(policy.experiment.train.seed for policy in policies)
    return Study("selection", figures, tuple(claims(figures)), settings, seeds, tuple(trials.missing), trials.commits)


def summarise(found: dict[tuple[str, int], dict[int, Result]]) -> dict[str, Any]:
    """`found`: (rule, exec_horizon) -> number of the policy -> what `measure` gave."""

    def table(trials: dict[int, Result], key: str, policies: list[int] | None = None) -> FloatArray:
        return np.array([trials[at][key] for at in policies or sorted(trials)])

    def both(one: str, other: str, exec_horizon: int, key: str, share: float = 1.0) -> dict[str, Any] | None:
        """One rule minus (a share of) another on the policies that both have, and the two means."""
        trials = [found.get((rule, exec_horizon), {}) for rule in (one, other)]
        if not (common := sorted(trials[0].keys() & trials[1].keys())):
            return None
        tables = [table(rule, key, common) for rule in trials]
        means = {rule: float(values.mean()) for rule, values in zip((one, other), tables, strict=True)}
        success = {
            rule: float(table(c, "success", common).mean()) for rule, c in zip((one, other), trials, strict=True)
        }
        return {**asdict(paired(tables[0], share * tables[1])), "means": means, "success": success}

    rows: list[Result] = []
    fewer: dict[str, dict[str, Any]] = {}
    left: dict[str, dict[str, Any]] = {}
    for (rule, exec_horizon), trials in found.items():
        values = {key: table(trials, key) for key in _KEPT}
        rows.append(
            {
                "rule": rule,
                "exec_horizon": exec_horizon,
                "policies": len(trials),
                "episodes": values["score"].shape[1],
                **{key: float(value.mean()) for key, value in values.items()},
                "success_ci": list(success_interval(values["success"])),
                "score_ci": list(interval(values["score"])),
                "by_policy": {key: value.mean(axis=1).tolist() for key, value in values.items()},
            }
        )
        if rule != "first" and (difference := both("first", rule, exec_horizon, "mode_switches")) is not None:
            fewer.setdefault(str(exec_horizon), {})[rule] = difference
        if rule == "commit" and (d := both(rule, "proxy_score", exec_horizon, "avoidable_switches", 0.5)) is not None:
            left[str(exec_horizon)] = d
    return {"rows": rows, "fewer_switches": fewer, "flicker_left": left}


def claims(figures: dict[str, Any]) -> list[Claim]:
    found = []
    for exec_horizon in sorted({row["exec_horizon"] for row in figures["rows"]}):
        fewer = figures["fewer_switches"].get(str(exec_horizon), {}).get("proxy_score")
        if fewer is not None:
            paper = "ProxyScore (nearest the current pose) reduces abrupt mode switches"
            switches, success = fewer["means"], fewer["success"]
            ours = (
                f"{switches['proxy_score']:.1f} switches an episode, success {success['proxy_score']:.0%}; "
                f"without a rule (the first drawn) {switches['first']:.1f}, {success['first']:.0%}"
            )
            verdict, chance = decided(fewer, trained=False)
            note = f"Ta = {exec_horizon}, given policies: {fewer['seeds']}{chance}"
            found.append(Claim("Sec. 4.5", paper, ours, verdict, note))
        if (left := figures["flicker_left"].get(str(exec_horizon))) is not None:
            paper = "flicker between two modes is what remains, and is hard to avoid"
            switches, success = left["means"], left["success"]
            ours = (
                f"avoidable switches an episode: {switches['proxy_score']:.1f} with ProxyScore, "
                f"{switches['commit']:.1f} with a rule that commits; "
                f"success {success['proxy_score']:.0%} and {success['commit']:.0%}"
            )
            verdict, chance = decided(left, trained=False)
            note = f"Ta = {exec_horizon}, given policies: {left['seeds']}; asked: more than half remain{chance}"
            found.append(Claim("App. E.5", paper, ours, verdict, note))
    return found


def show(study: Study, console: Console) -> None:
    keys = {"success": ".0%", "score": ".3f", "jerk": ".4f", "mode_switches": ".2f", "avoidable_switches": ".2f"}
    rows = [
        [
            f"{row['rule']}, Ta = {row['exec_horizon']}",
            *(format(row[key], form) for key, form in keys.items()),
            str(row["policies"]),
        ]
        for row in study.figures["rows"]
    ]
    heads = ("rule", "success", "score", "jerk", "switches", "avoidable", "policies")
    show_rows(f"{study.settings['task']}, {study.settings['episodes']} episodes a policy", heads, rows, console)


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
