"""Variants of one recipe side by side, trial by trial: what the studies of rejection and of attention share.

Every variant differs from the first in its settings and in nothing else; the same budget, data, training seeds and
episodes; intervals and the paired test are those of `prism compare`. A study can be stopped and called again, and goes
on from its results file on another machine (--add). With --status it trains nothing and writes what is there.

    table.RECIPE.VARIANT       success and score with intervals over seeds and episodes, jerk, steps, CPU seconds
    difference.RECIPE.A - B    success and score, paired over seeds and episodes: mean, low, high, p, seeds, episodes
    logged.RECIPE.VARIANT      of the training log, the mean over the second half of the steps and over the seeds
    trials                     every trial with its episodes, and `log`: ten lines of its training log
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError, check_numbers
from prism.evaluation.metrics import paired
from prism.experiments.comparison import CompareConfig, Comparison, Contestant, compare, folder_of, summarise, table
from prism.experiments.stored_trials import put_back, trials_of
from prism.experiments.trial import TrialId
from prism.experiments.trials import commits_of
from prism.io import files
from prism.training.log import read_log
from research.report import Claim, Result, Study, Written, defaults, show_rows

LOG = "logged.json"  # what a results file keeps of a training log, beside a trial that was put back from it
LINES = 10
Pair = tuple[str, str]  # (one, other): one - other


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    """Options of every such study."""

    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 200
    """Episodes of each trial."""
    first_seed: int = 2_700_000
    """Seed of the first of them."""
    add: Annotated[tuple[Path, ...], option("FILE ...")] = ()
    """Results files of this study, of whatever machine: their trials are put into --work and count as if run here."""
    jobs: int = 1
    """Trials at the same time, one thread each."""
    status: bool = False
    """Run nothing: the figures of what is there."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-variants")
    """Where the runs and finished parts are kept."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "episodes jobs", "[0, inf)": "first_seed"})
        if not self.seeds:
            raise PrismError("--seeds: name at least one")


def chosen(named: Sequence[str], known: Mapping[str, tuple[str, ...]], study: str) -> tuple[Contestant, ...]:
    """The variants that a call names, in its order."""
    if unknown := [name for name in named if name not in known]:
        raise PrismError(f"{study}: unknown variant '{unknown[0]}'; use {', '.join(known)}")
    return tuple(Contestant.parse(f"{name}=prism" + f":{','.join(known[name])}" * bool(known[name])) for name in named)


def play(
    name: str,
    config: Options,
    asked: Mapping[str, CompareConfig],
    pairs: Iterable[Pair],
    watched: Sequence[str],
    console: Console,
) -> Study:
    """Run what is missing. `asked`: a comparison a recipe. `watched`: keys of the training log."""
    work = {config.work / recipe: plan for recipe, plan in asked.items()}
    settings = config.settings("jobs", "status", "add", "seeds") | {
        "budget": {recipe: {"minutes": plan.minutes, "steps": plan.steps} for recipe, plan in asked.items()},
        **defaults(),
    }
    same = {key: value for key, value in settings.items() if key not in ("variants", "tasks")}
    contestants = {one.name: one for plan in asked.values() for one in plan.contestants}
    for file in config.add:
        put_back(file, same, work)
        _put_back_logs(file, config.work)
    done: dict[str, Comparison] = {}
    for (folder, wanted), recipe in zip(work.items(), asked, strict=True):
        there = summarise(folder, wanted)
        done[recipe] = there if config.status or not there.missing else compare(folder, wanted, config.jobs, console)
    logs = {
        id: log for folder, one in zip(work, done.values(), strict=True) for id in one.trials
        if (log := log_of(folder_of(folder, id), watched)) is not None
    }  # fmt: skip
    figures: dict[str, Any] = {
        "table": {recipe: _table(one) for recipe, one in done.items()},
        "difference": {
            recipe: {f"{a} - {b}": both for a, b in pairs if (both := _difference(one, a, b))}
            for recipe, one in done.items()
        },
        "logged": {recipe: _logged(one, logs, watched) for recipe, one in done.items()},
        "trials": [
            {**trial, "log": logs.get(TrialId(trial["recipe"], trial["contestant"], trial["trial"]["seed"]))}
            for trial in trials_of(done.values())
        ],
    }
    settings["methods"] = [_text(one) for one in contestants.values()]
    missing = tuple(f"{one.trial}: {one.reason}" for comparison in done.values() for one in comparison.missing)
    commits = commits_of(trial for one in done.values() for trial in one.trials.values())
    return Study(name, figures, (), settings, config.seeds, missing, commits)


def _text(one: Contestant) -> str:
    settings = (*([f"preset={one.preset}"] if one.preset else []), *one.settings)
    return f"{one.name}={one.method}" + f":{','.join(settings)}" * bool(settings)


def _table(one: Comparison) -> dict[str, Result]:
    keys = ("success", "success_ci", "score", "score_ci", "seeds", "jerk", "mode_switches", "steps", "train_seconds")
    return {row.contestant: {key: asdict(row)[key] for key in keys} for row in one.rows}


def _of(one: Comparison, name: str) -> dict[int, Any]:
    return {id.seed: trial for id, trial in one.trials.items() if id.contestant == name}


def _difference(one: Comparison, first: str, second: str) -> dict[str, Result]:
    """On the training seeds that both have."""
    a, b = _of(one, first), _of(one, second)
    seeds = sorted(a.keys() & b.keys())
    keys = ("success", "score") if seeds else ()
    return {key: asdict(paired(table(a, seeds, key), table(b, seeds, key))) for key in keys}


def log_of(folder: Path, watched: Sequence[str]) -> dict[str, list[float]] | None:
    """Ten lines of a training log, evenly spread, the last one among them: {"step": [...], key: [...]}. A line stands
    for itself, not for those that are left out. None where there is no log."""
    lines = [line for line in read_log(folder) if any(key in line for key in watched)]
    if not lines:
        kept = folder / LOG
        return files.read_json(kept) if kept.is_file() else None
    places = sorted({round((i + 1) * len(lines) / LINES) - 1 for i in range(LINES)} - {-1})
    keys = [key for key in ("step", *watched) if all(key in lines[place] for place in places)]
    return {key: [float(f"{lines[place][key]:.5g}") for place in places] for key in keys}


def _put_back_logs(file: Path, work: Path) -> None:
    for trial in files.read_json(file)["trials"]:
        id = TrialId(trial["recipe"], trial["contestant"], trial["trial"]["seed"])
        folder = folder_of(work / id.recipe, id)
        if trial.get("log") and folder.is_dir() and not (folder / "log.jsonl").exists():
            files.replace_file(folder / LOG, files.encode_json(trial["log"]))


def _logged(
    one: Comparison, logs: Mapping[TrialId, dict[str, list[float]]], watched: Sequence[str]
) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for name in dict.fromkeys(id.contestant for id in one.trials):
        mine = [logs[id] for id in one.trials if id.contestant == name and id in logs]
        halves = {key: [v for log in mine if key in log for v in log[key][len(log[key]) // 2 :]] for key in watched}
        found[name] = {key: sum(values) / len(values) for key, values in halves.items() if values}
    return found


def said(d: Mapping[str, Any]) -> str:
    return f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}], n = {d['seeds']}"


def with_claims(study: Study, claims: Sequence[Claim]) -> Study:
    return replace(study, claims=tuple(claims))


def show(study: Study, console: Console) -> None:
    for recipe, rows in study.figures["table"].items():
        shown = []
        for name, row in rows.items():
            low, high = row["success_ci"]
            logged = study.figures["logged"][recipe].get(name, {})
            words = ", ".join(f"{key} {value:.3g}" for key, value in logged.items())
            shown.append(
                [name, str(len(row["seeds"])), f"{row['success']:.3f} [{low:.3f}, {high:.3f}]", f"{row['score']:.3f}",
                 f"{row['steps']:,.0f}", words]
            )  # fmt: skip
        show_rows(
            f"{study.name}: {recipe}", ("variant", "n", "success [95 %]", "score", "steps", "logged"), shown, console
        )
        for pair, both in study.figures["difference"][recipe].items():
            console.print(f"  {pair}: success {said(both['success'])}; score {said(both['score'])}", highlight=False)
