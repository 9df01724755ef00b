"""Success against the number of demonstrations (Sec. 5, real world; Fig. 4).

Try:
    python -m research demonstrations --task metaworld-pick-place --counts 2 5 10 20 --json demonstrations.json

A task with a scripted expert; N demonstrations each of their own folder, equal training steps, the same test episodes.
    success.METHOD.N, success_ci.METHOD.N, score.METHOD.N
    gain.METHOD = {mean, low, high, p, seeds, episodes}: success with the most demonstrations minus with the fewest
The paper's figures are of its hardware (15 to 35 demonstrations); here the trend is what can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.metrics import paired
from prism.experiments.comparison import CompareConfig, Contestant, compare, table
from prism.experiments.demonstrations import record_if_missing
from prism.experiments.recipes import recipe
from prism.experiments.trial import EvaluationPlan, TrialId, TrialResult
from prism.experiments.trials import commits_of
from research.report import Claim, Drawn, Study, decided, show_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    task: str = "metaworld-pick-place"
    """A task with a scripted expert."""
    counts: Annotated[tuple[int, ...], option("N ...")] = (2, 5, 10, 20)
    """Numbers of demonstrations, growing."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism",)
    """Methods to train."""
    steps: int = 1500
    """Training steps, whatever the number of demonstrations."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 20
    """Episodes of each evaluation."""
    jobs: int = 1
    """Runs at the same time, one thread each."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-demonstrations")
    """Where the runs and finished parts are kept; default: runs/study-demonstrations."""

    def __post_init__(self) -> None:
        if len(self.counts) < 2 or min(self.counts) < 1 or list(self.counts) != sorted(set(self.counts)):
            raise PrismError(f"demonstrations: counts {self.counts}: give at least two, growing")

    def comparison(self, count: int) -> CompareConfig:
        folder = self.work / "data" / f"{self.task}-{count}"
        return CompareConfig(
            recipes=(self.task,),
            contestants=tuple(Contestant(method, method) for method in self.methods),
            seeds=self.seeds,
            steps=self.steps,
            settings=(f"demonstrations.episodes={count}", f'demonstrations.path="{folder}"', "train.val_fraction=0.0"),
            evaluation=EvaluationPlan(self.episodes, curve=()),
        )


def run(config: Config, console: Console) -> Study:
    if recipe(config.task).demonstrations.kind != "expert":
        raise PrismError(f"demonstrations: {config.task} has no expert to record from; use a metaworld task")
    figures: dict[str, dict[str, dict[str, Any]]] = {
        key: {method: {} for method in config.methods} for key in ("success", "success_ci", "score", "seeds_done")
    }
    missing: list[str] = []
    trials: dict[int, Mapping[TrialId, TrialResult]] = {}
    for count in config.counts:
        record(config, count, console)
        comparison = compare(config.work / str(count), config.comparison(count), config.jobs, console)
        trials[count] = comparison.trials
        for row in comparison.rows:
            figures["success"][row.contestant][str(count)] = row.success
            figures["success_ci"][row.contestant][str(count)] = list(row.success_ci)
            figures["score"][row.contestant][str(count)] = row.score
            figures["seeds_done"][row.contestant][str(count)] = len(row.seeds)
        missing += [f"{count} demonstrations, {one.trial}: {one.reason}" for one in comparison.missing]
    gains = {"gain": gain(config, trials[config.counts[0]], trials[config.counts[-1]])}
    settings = {
        "task": config.task,
        "counts": list(config.counts),
        "methods": list(config.methods),
        "steps": config.steps,
        "episodes": config.episodes,
    }
    found, commits = {**figures, **gains}, commits_of(trial for part in trials.values() for trial in part.values())
    claimed = tuple(claims(found, config))
    return Study("demonstrations", found, claimed, settings, config.seeds, tuple(missing), commits)


def gain(
    config: Config, few: Mapping[TrialId, TrialResult], many: Mapping[TrialId, TrialResult]
) -> dict[str, dict[str, Any]]:
    """Success with many minus with few, on the training seeds that both have, episode by episode."""
    found = {}
    for method in config.methods:
        both = [{id.seed: trial for id, trial in trials.items() if id.contestant == method} for trials in (many, few)]
        if seeds := sorted(both[0].keys() & both[1].keys()):
            found[method] = asdict(paired(*(table(trials, seeds, "success") for trials in both)))
    return found


def record(config: Config, count: int, console: Console) -> None:
    """In one process: a study is to leave the machine usable."""
    folder = config.work / "data" / f"{config.task}-{count}"
    asked = replace(recipe(config.task).demonstrations, episodes=count, path=str(folder))
    record_if_missing(asked, config.task, console, workers=1)


def claims(figures: dict[str, Any], config: Config) -> list[Claim]:
    found = []
    for method, difference in figures["gain"].items():
        success, ci = figures["success"][method], figures["success_ci"][method]
        done = figures["seeds_done"][method]
        few = {n: f" ({done[n]} of {len(config.seeds)} seeds)" if done[n] < len(config.seeds) else "" for n in success}
        ours = ", ".join(f"{n}: {success[n]:.0%} [{ci[n][0]:.0%}, {ci[n][1]:.0%}]{few[n]}" for n in success)
        paper = "success grows with demonstrations: +10 to +30 points from 15 to 35 (three hardware tasks)"
        verdict, chance = decided(difference)
        note = (
            f"{method}, {config.task}, n = {difference['seeds']}: the trend; the paper's tasks need its robots{chance}"
        )
        found.append(Claim("Sec. 5, Fig. 4", paper, ours, verdict, note))
    return found


def show(study: Study, console: Console) -> None:
    rows = [
        [f"{method}, {count}", f"{value:.0%}", str(study.figures["seeds_done"][method][count])]
        for method, by_count in study.figures["success"].items()
        for count, value in by_count.items()
    ]
    show_rows(f"{study.settings['task']}", ("method, demonstrations", "success", "seeds"), rows, console)


def draw(study: Study) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = figure.subplots()
    for method, by_count in study.figures["success"].items():
        counts = [int(count) for count in by_count]
        ci = study.figures["success_ci"][method]
        axes.plot(counts, [100 * value for value in by_count.values()], "o-", label=method)
        axes.fill_between(counts, [100 * ci[n][0] for n in by_count], [100 * ci[n][1] for n in by_count], alpha=0.15)
    axes.set(xlabel="demonstrations", ylabel="success, %", ylim=(-3, 103))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
