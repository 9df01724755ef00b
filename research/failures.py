"""Why failed episodes failed, sorted into the paper's classes by measured signals (App. E.5).

Try:
    python -m research failures runs/pusht-human --episodes 100 --json failures.json --plot failures.png
    python -m research failures compare/pusht/trials/pusht-human/prism/seed-* --rule proxy_score --json failures.json

The paper's classes, and what we measure for each (definitions of jerk and switches: docs/reference/metrics.md):
    invalid     share of commanded actions outside the environment's limits, before clipping, above INVALID
    occlusion   share of steps at which a sensor was not believed (prism.inference.health) above ABSENT
    flicker     at least FLICKERS avoidable switches within WINDOW consecutive replans: the robot could have gone on
    jerk        jerk above JERK_FACTOR times the median of the successful episodes (the paper's 0.5 has no unit)
    near_miss   none of these, and the best score within NEAR of success        } the paper's "other":
    other       none of these: the time ran out                                 } collision, timeout
An episode belongs to the first class that fits, in this order; `signals` counts every class that fits.

    success, failures, classes.NAME, signals.NAME, usual_jerk, jerk_above_half   over all policies and episodes
    per_episode = [{policy, seed, success, score, jerk, invalid, absent, flicker, switches}]
Rolled out PART episodes at a time, each part a file: killed, the same command goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from prism_client.messages import PlanInfo
from rich.console import Console
from rich.progress import Progress
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.play import TEST_SEED, check_fits, run_episode
from prism.evaluation.results import EpisodeResult
from prism.experiments.recipes import Experiment
from prism.io.jsonconfig import to_json
from prism.policy import Policy
from prism.sims.task_table import make_env
from prism.training.checkpoint import load_policy
from research.report import Claim, ComputedTrials, Drawn, Result, Study, Verdict, settings_of, show_rows
from research.selection import subjects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = ("invalid", "occlusion", "flicker", "jerk", "near_miss", "other")
INVALID, ABSENT = 0.01, 0.05
FLICKERS, WINDOW = 2, 4
JERK_FACTOR, NEAR = 2.0, 0.95
PAPER_JERK = 0.5
PART = 10
FEW = 30  # failures, below which a share says little
PAPER = {"flicker": (0.10, 0.15), "jerk": (0.05, 0.10), "occlusion": (0.08, 0.12)}


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, or checkpoints in them; one a training seed, for example."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to roll out in; default: the one the policy was trained for."""
    episodes: int = 100
    """How many of each policy."""
    first_seed: int = TEST_SEED
    """Seed of the first of them."""
    rule: Annotated[str | None, option("RULE")] = None
    """Selection rule (proxy_score is the paper's); default: the run's own."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-failures")
    """Where the runs and finished parts are kept; default: runs/study-failures."""

    def __post_init__(self) -> None:
        if not self.runs or self.episodes < 1:
            raise PrismError(f"failures: name a run, and at least one episode ({self.episodes} asked)")

    def controller(self, experiment: Experiment) -> ControllerConfig:
        if self.rule is None:
            return experiment.controller
        # The rule itself: `restless` would replace it where it stands still.
        selection = replace(experiment.controller.selection, rule=self.rule, restless=0)  # type: ignore[arg-type]
        return replace(experiment.controller, selection=selection)


@dataclass(frozen=True)
class Signals:
    """What is measured of an episode."""

    seed: int
    success: bool
    score: float
    jerk: float
    invalid: float  # share of the actions
    absent: float  # share of the steps
    flicker: int  # most avoidable switches within WINDOW replans
    switches: int


class WatchedController(Controller):
    """Remembers every action as the policy gave it, and how often a sensor was not believed; over a whole episode,
    also one of several commands, between which the controller is reset."""

    def __init__(self, policy: Policy, config: ControllerConfig) -> None:
        self.begin()
        super().__init__(policy, config, look=False)

    def begin(self) -> None:
        """A new episode."""
        self.commanded: list[NDArray[np.float32]] = []
        self.unbelieved = 0
        self.earlier: list[PlanInfo] = []  # of the commands before this one
        self.replans = []

    def reset(self, seed: int = 0) -> None:
        self.earlier += self.replans
        super().reset(seed)

    def act(
        self, observation: Mapping[str, NDArray[np.generic] | str], ages: Mapping[str, float] | None = None
    ) -> NDArray[np.float32]:
        action = super().act(observation, ages)
        self.commanded.append(action.copy())
        self.unbelieved += bool(self.planner.window.absent)
        return action


def flicker(replans: list[PlanInfo]) -> int:
    """The most avoidable switches within WINDOW consecutive replans."""
    marks = [int(replan.avoidable_switch) for replan in replans]
    return max((sum(marks[i : i + WINDOW]) for i in range(len(marks))), default=0)


def signals_of(episode: EpisodeResult, controller: WatchedController, low: Any, high: Any) -> Signals:
    commanded = np.stack(controller.commanded)
    outside = ((commanded < low - 1e-6) | (commanded > high + 1e-6)).any(axis=1)
    return Signals(
        seed=episode.seed,
        success=episode.success,
        score=episode.score,
        jerk=episode.jerk,
        invalid=float(outside.mean()),
        absent=controller.unbelieved / len(commanded),
        flicker=flicker([*controller.earlier, *controller.replans]),
        switches=episode.mode_switches,
    )


def fitting(signals: Signals, usual_jerk: float) -> list[str]:
    """Every class that fits a failed episode, in the order of CLASSES."""
    found = [
        name
        for name, there in (
            ("invalid", signals.invalid > INVALID),
            ("occlusion", signals.absent > ABSENT),
            ("flicker", signals.flicker >= FLICKERS),
            ("jerk", signals.jerk > JERK_FACTOR * usual_jerk),
        )
        if there
    ]
    return found or (["near_miss"] if signals.score >= NEAR else ["other"])


def measure(path: Path, task: str, controller: ControllerConfig, seeds: range, console: Console) -> Result:
    env = make_env(task)
    try:
        policy = load_policy(path)
        check_fits(env, policy.spec)
        watched = WatchedController(policy, controller)
        rows = []
        with Progress(console=console, transient=True) as progress:
            for seed in progress.track(seeds, description=f"{task}, seeds {seeds[0]} to {seeds[-1]}"):
                watched.begin()
                episode = run_episode(env, watched, seed)
                rows.append(asdict(signals_of(episode, watched, env.action_low, env.action_high)))
    finally:
        env.close()
    return {"rows": rows}


def run(config: Config, console: Console) -> Study:
    policies, task = subjects(config.runs, config.task)
    trials = ComputedTrials(config.work, console)
    rows: list[tuple[int, Signals]] = []
    stop = config.first_seed + config.episodes
    for at, policy in enumerate(policies):
        controller = config.controller(policy.experiment)
        for start in range(config.first_seed, stop, PART):
            seeds = range(start, min(start + PART, stop))
            settings = {**settings_of(replace(policy.experiment, controller=controller)), "sha256": policy.sha256}
            settings |= {"task": task, "seeds": [seeds[0], seeds[-1]]}
            name = f"{policy.label}-{controller.selection.rule}-{seeds[0]}-{len(seeds)}"
            compute = functools.partial(measure, policy.path, task, controller, seeds, trials.console)
            rows += [(at, Signals(**row)) for row in (trials.get(name, settings, compute) or {"rows": []})["rows"]]
    if not rows:
        raise PrismError(f"failures: no episode could be rolled out: {trials.missing[0]}")
    figures = sort_failures([row for _, row in rows])
    settings = {
        "task": task,
        "policies": [policy.name for policy in policies],
        "episodes": config.episodes,
        "first_seed": config.first_seed,
        "rule": config.controller(policies[0].experiment).selection.rule,
        "controllers": [to_json(config.controller(policy.experiment)) for policy in policies],
        "limits": {"invalid": INVALID, "absent": ABSENT, "flickers": FLICKERS, "window": WINDOW}
        | {"jerk_factor": JERK_FACTOR, "near": NEAR},
    }
    figures["per_episode"] = [{"policy": at, **asdict(row)} for at, row in rows]
    training = tuple(policy.experiment.train.seed for policy in policies)
    return Study("failures", figures, tuple(claims(figures)), settings, training, tuple(trials.missing), trials.commits)


def sort_failures(rows: list[Signals]) -> dict[str, Any]:
    """success, failures, classes.NAME and signals.NAME as shares of the failures, jerk_above_half of all episodes."""
    won = [row.jerk for row in rows if row.success]
    usual = float(np.median(won)) if won else float(np.median([row.jerk for row in rows]))
    failed = [fitting(row, usual) for row in rows if not row.success]
    count = max(1, len(failed))
    return {
        "success": 1.0 - len(failed) / len(rows),
        "failures": len(failed),
        "classes": {name: sum(found[0] == name for found in failed) / count for name in CLASSES},
        "signals": {name: sum(name in found for found in failed) / count for name in CLASSES},
        "usual_jerk": usual,
        "jerk_above_half": float(np.mean([row.jerk > PAPER_JERK for row in rows])),
    }


def judged(count: int, failures: int, low: float, high: float) -> tuple[Verdict, str]:
    """The verdict on a share that the paper puts between low and high, and what to add to the note: not confirmed where
    Wilson's interval of ours lies outside; confirmed where ours lies inside, with enough failures; else it is open."""
    interval = metrics.wilson_interval(count, failures)
    if interval[0] > high or interval[1] < low:
        return "not confirmed", ""
    if failures < FEW:
        return "cannot be tested here", "; too few for a share to mean much"
    if not low <= count / failures <= high:
        return "cannot be tested here", "; outside, but within the chance of so many"
    return "confirmed", ""


def claims(figures: dict[str, Any]) -> list[Claim]:
    failures, classes, signals = figures["failures"], figures["classes"], figures["signals"]
    if failures == 0:
        return [Claim("App. E.5", "classes of failures", "no episode failed", "cannot be tested here", "roll out more")]
    found = []

    def add(paper: str, ours: str, share: float, low: float, high: float, note: str) -> None:
        verdict, chance = judged(round(share * failures), failures, low, high)
        found.append(Claim("App. E.5", paper, ours, verdict, f"{note}; {failures} failures{chance}"))

    for name, words in (("flicker", "mode-switching instability"), ("jerk", "high jerk"), ("occlusion", "occlusion")):
        low, high = PAPER[name]
        paper = f"{words}: {low:.0%} to {high:.0%} of failures"
        if name == "occlusion" and signals["occlusion"] == 0:
            note = "no sensor of this simulator is ever hidden"
            found.append(Claim("App. E.5", paper, "0%", "cannot be tested here", note))
            continue
        ours = f"{signals[name]:.0%} show it, {classes[name]:.0%} are sorted there"
        add(paper, ours, signals[name], low, high, "another task")
    paper = "below 1 % of failures stem from invalid actions"
    ours = f"{signals['invalid']:.0%} of the failed episodes have more than {INVALID:.0%} of their actions out of range"
    add(paper, ours, signals["invalid"], 0.0, 0.01, "another task")
    rest = classes["near_miss"] + classes["other"]
    paper = "other factors (collision, timeout): 1 to 2 % of failures"
    ours = f"{rest:.0%}: {classes['near_miss']:.0%} near misses, {classes['other']:.0%} ran out of time"
    add(paper, ours, rest, 0.01, 0.02, "the paper's classes add up to at most 39 % of its failures")
    paper = "jerk above 0.5 in 5 to 10 % of episodes"
    ours = f"{figures['jerk_above_half']:.0%} of episodes in our units"
    found.append(Claim("App. E.5", paper, ours, "cannot be tested here", "the paper does not define its jerk"))
    return found


def show(study: Study, console: Console) -> None:
    found = study.figures
    rows = [[name, f"{found['classes'][name]:.0%}", f"{found['signals'][name]:.0%}"] for name in CLASSES]
    title = f"{found['failures']} failures of {len(found['per_episode'])} episodes, {study.settings['task']}"
    show_rows(title, ("class", "sorted there", "show the signal"), rows, console)


def draw(study: Study) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.subplots()
    shares = [100 * study.figures["classes"][name] for name in CLASSES]
    axes.barh(CLASSES, shares, color="#0072b2")
    for name, (low, high) in PAPER.items():
        axes.plot([100 * low, 100 * high], [name, name], color="#d55e00", linewidth=3)
    axes.invert_yaxis()
    axes.set_xlabel("% of failures (orange: the paper's, on CALVIN)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
