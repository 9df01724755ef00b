"""Methods x recipes x seeds at equal budgets: `prism compare` (docs/howto/comparison.md).

Each combination is a trial (experiments/trials.py), a run of its own (experiments/trial_process.py). Missing trials are
run, then everything that is there becomes one table: means over stated numbers of seeds, intervals, paired tests.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console

from prism.controller import check_controller
from prism.data.damage import remedies_as_settings
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.metrics import Difference, FloatArray, paired, success_interval
from prism.evaluation.results import run_info, write_json
from prism.experiments.demonstrations import open_demonstrations
from prism.experiments.recipes import Experiment, recipe, with_budget, with_method, with_preset
from prism.experiments.trial import (
    REMEDY,
    RESULT,
    EvaluationPlan,
    TrialId,
    TrialResult,
    TrialSpec,
    definition,
    spec_file,
    state_of,
)
from prism.experiments.trial_process import TRAINED_BY
from prism.experiments.trials import Trials, commits_of, refuse_other, several_versions
from prism.io import files
from prism.io.files import exclusive, new_folder
from prism.io.jsonconfig import to_json, with_settings
from prism.methods import METHODS
from prism.methods.presets import student_config
from prism.report.comparison_page import write_page
from prism.training.checkpoint import list_checkpoints
from prism.training.config import Clock

JSON, PAGE = "comparison.json", "comparison.html"
TRAININGS = 3  # of each contestant, before anything is said of a method
_OWN_OPTION = {  # settings that an option of the comparison decides
    **{f"train.{name}": f"--{name}" for name in ("minutes", "steps", "clock")},
    "train.seed": "--seeds",
    **dict.fromkeys(("train.threads", "train.workers", "train.keep_last"), ""),
}


@dataclass(frozen=True)
class Contestant:
    """A method, or a variation of one: its name, and what differs from the recipe."""

    name: str
    method: str
    settings: tuple[str, ...] = ()
    preset: str | None = None  # its own, in place of the comparison's

    @staticmethod
    def parse(text: str) -> Contestant:
        """METHOD, or NAME=METHOD:KEY=VALUE,KEY=VALUE for a variation: wide=prism:policy.generator.width=128; the key
        `preset` is that of `prism train`."""
        head, colon, rest = text.partition(":")
        name, equals, method = head.partition("=")
        if (equals and not method) or (colon and not rest) or not re.fullmatch(r"[\w.+-]+", name):
            raise PrismError(
                f"--methods {text}: write METHOD, or NAME=METHOD:KEY=VALUE,KEY=VALUE; "
                "for example wide=prism:policy.generator.width=128"
            )
        settings = tuple(re.split(r",(?=[\w.]+=)", rest)) if rest else ()  # a value may be a list
        presets = [setting.partition("=")[2] for setting in settings if setting.startswith("preset=")]
        own = tuple(setting for setting in settings if not setting.startswith("preset="))
        return Contestant(name, method or name, own, presets[-1] if presets else None)


@dataclass(frozen=True)
class CompareConfig:
    """A comparison. Every contestant gets the same budget, data, seeds and evaluation."""

    recipes: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    minutes: float | None = None
    steps: int | None = None
    clock: Clock = "wall"
    preset: str | None = None
    settings: tuple[str, ...] = ()
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    protocol: str = ""  # the written protocol that it keeps (docs/explanation/protocol.md); "": none
    chosen_on: tuple[str, ...] = ()  # episodes that settings were chosen on: "200000-200029"

    def __post_init__(self) -> None:
        for what, values in (
            ("recipe", self.recipes),
            ("method", tuple(contestant.name for contestant in self.contestants)),
            ("seed", self.seeds),
        ):
            if not values:
                raise PrismError(f"there is no {what} to compare")
            if repeated := [value for value in values if values.count(value) > 1]:
                raise PrismError(f"the {what} {repeated[0]} is named twice; give variations a name: NAME=METHOD:...")
        if (self.minutes is None) == (self.steps is None):
            raise PrismError("give --minutes or --steps, one of them: it is the budget of every training")
        if self.clock not in get_args(Clock):
            raise PrismError(f"clock is '{self.clock}'; use one of {', '.join(get_args(Clock))}")
        if min(self.seeds) < 0:
            raise PrismError(f"seed {min(self.seeds)} is out of range: use 0 or more")
        for setting in (*self.settings, *(s for contestant in self.contestants for s in contestant.settings)):
            if (option := _OWN_OPTION.get(setting.partition("=")[0])) is not None:
                remedy = f"use {option}" if option else "it is fixed"
                raise PrismError(f"{setting}: it must be the same for all methods of a comparison; {remedy}")
        self._check_protocol()
        for contestant in self.contestants:
            if data := [s for s in contestant.settings if s.startswith("demonstrations.")]:
                raise PrismError(f"{contestant.name}: {data[0]}: all methods have the same data; set it with --set")

    def _check_protocol(self) -> None:
        if self.protocol and len(self.seeds) < TRAININGS:
            raise PrismError(
                f"protocol {self.protocol}: {len(self.seeds)} training seeds; a verdict needs {TRAININGS}: add --seeds"
            )
        first, last = self.evaluation.first_seed, self.evaluation.first_seed + self.evaluation.episodes - 1
        for text in self.chosen_on:
            if not (ends := re.fullmatch(r"(\d+)-(\d+)", text)):
                raise PrismError(f"--chosen-on {text}: write FIRST-LAST, for example 200000-200029")
            if first <= int(ends[2]) and int(ends[1]) <= last:
                raise PrismError(
                    f"episodes {first}-{last}: settings were chosen on {text}; play others: "
                    f"--first-seed {int(ends[2]) + 1}"
                )

    @property
    def reference(self) -> str:
        """The contestant that the others are tested against: the first PRISM, or the first of all."""
        return next((c.name for c in self.contestants if c.method == "prism"), self.contestants[0].name)

    def spec(self, id: TrialId) -> TrialSpec:
        method = next(contestant.method for contestant in self.contestants if contestant.name == id.contestant)
        return TrialSpec(id, method, self.evaluation, self.protocol, self.chosen_on)

    @property
    def budget(self) -> str:
        if self.steps is not None:
            return f"{self.steps:,} steps"
        return f"{self.minutes:g} minutes" + (" of CPU time" if self.clock == "cpu" else "")


def trial_ids(config: CompareConfig) -> list[TrialId]:
    """Seed by seed: after a third of the time there is a first, complete comparison."""
    return [
        TrialId(name, contestant.name, seed)
        for seed in config.seeds
        for name in config.recipes
        for contestant in config.contestants
    ]


@dataclass(frozen=True)
class Row:
    """One contestant on one recipe, over the seeds that are done."""

    recipe: str
    contestant: str
    method: str
    seeds: tuple[int, ...]  # done
    of: int  # asked for
    score: float
    score_ci: tuple[float, float]
    success: float
    success_ci: tuple[float, float]
    difference: Difference | None  # score against the reference, on common seeds; None for itself or without any
    success_difference: Difference | None
    jerk: float
    mode_switches: float  # an episode
    latency_p50_ms: float  # median over seeds of the median replan, in rollouts
    latency_p99_ms: float
    steps: float  # mean
    train_seconds: float
    parameters: int
    candidates: int
    exec_horizon: int
    curve: tuple[dict[str, float], ...]  # means over the seeds: seconds, score, success
    verdict: str = ""  # against the reference; "" for itself

    @property
    def complete(self) -> bool:
        return len(self.seeds) == self.of


@dataclass(frozen=True)
class Missing:
    trial: TrialId
    reason: str


@dataclass(frozen=True)
class Comparison:
    config: CompareConfig
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...]
    trials: Mapping[TrialId, TrialResult]
    left_out: Mapping[str, TrialResult]  # by name: finished in this folder, and not asked for now
    info: Mapping[str, Any]

    @property
    def commits(self) -> list[str]:
        return commits_of(self.trials.values())

    @property
    def mixed(self) -> str:
        return several_versions(self.commits)

    @property
    def beside(self) -> str:
        """A line where the folder has trials that a command with fewer seeds or methods does not name."""
        names, count = ", ".join(self.left_out), len(self.left_out)
        return f"{count} finished trials of this folder are not named, so not in this table: {names}" if count else ""

    def table(self, recipe: str) -> tuple[list[str], list[list[str]]]:
        """Names of the columns, and a row a contestant that has a result; the same on the terminal and on the page."""
        names = ["method", "n", "score [95 %]", f"- {self.config.reference} [95 %]", "p", "success [95 %]", "plan ms"]
        rows = []
        for row in (row for row in self.rows if row.recipe == recipe):
            d = row.difference
            few = "" if d is None or d.seeds == len(row.seeds) else f" n={d.seeds}"
            rows.append(
                [
                    row.contestant,
                    str(len(row.seeds)) if row.complete else f"{len(row.seeds)} of {row.of}",
                    f"{row.score:.3f} [{row.score_ci[0]:.3f}, {row.score_ci[1]:.3f}]",
                    "" if d is None else f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]{few}",
                    "" if d is None else f"{d.p:.2g}",
                    f"{row.success:.0%} [{row.success_ci[0] * 100:.0f}, {row.success_ci[1] * 100:.0f}]",
                    f"{row.latency_p50_ms:.1f}",
                    f"{row.candidates}, {row.exec_horizon}",
                    f"{row.jerk:.4f}",
                    f"{row.mode_switches:.1f}",
                    f"{row.steps:,.0f}",
                    f"{row.parameters / 1e6:.2f} M",
                    row.verdict,
                ]
            )
        return [*names, "K, Ta", "jerk", "switches", "updates", "size", "verdict"], rows

    def to_json(self) -> dict[str, Any]:
        """comparison.json. scores.<contestant> has one number a seed, null where the trial is missing; with several
        recipes the mean over them, null where one of them is missing. table_by: only contestants that lack no trial."""
        config = self.config
        names = [contestant.name for contestant in config.contestants]
        return {
            "scores": {name: self._by_seed(name, "score") for name in names},
            "success": {name: self._by_seed(name, "success") for name in names},
            "seeds": list(config.seeds),
            "reference": config.reference,
            "test": "paired bootstrap of differences, training seeds and episodes drawn crossed; common seeds; "
            "verdicts from success and score, Holm-corrected over the contestants",
            "protocol": config.protocol,
            "chosen_on": list(config.chosen_on),
            "table": [{**asdict(row), "n": len(row.seeds)} for row in self.rows],
            "table_by": {name: figures for name in names if (figures := self._figures(name))},
            "missing": [{**asdict(one.trial), "reason": one.reason} for one in self.missing],
            "left_out": {name: trial["evaluation"]["score"] for name, trial in self.left_out.items()},
            "budget": {"minutes": config.minutes, "steps": config.steps, "clock": config.clock},
            "evaluation": to_json(config.evaluation),
            "settings": list(config.settings),
            "contestants": [to_json(contestant) for contestant in config.contestants],
            "commits": self.commits,
            **self.info,
        }

    def _figures(self, name: str) -> dict[str, float]:
        rows = [row for row in self.rows if row.contestant == name and row.complete]
        keys = {"score": "score", "success": "success", "jerk": "jerk", "switches": "mode_switches"}
        rows = rows if len(rows) == len(self.config.recipes) else []
        return {to: metrics.mean([float(getattr(row, key)) for row in rows]) for to, key in keys.items() if rows}

    def _by_seed(self, name: str, key: str) -> list[float | None]:
        values: list[float | None] = []
        for seed in self.config.seeds:
            done = [trial for recipe in self.config.recipes if (trial := self.trials.get(TrialId(recipe, name, seed)))]
            mean = metrics.mean([float(trial["evaluation"][key]) for trial in done])
            values.append(mean if len(done) == len(self.config.recipes) else None)
        return values


def folder_of(out: Path, id: TrialId) -> Path:
    return Trials(out).folder(id.name)


def compare(
    out: Path, config: CompareConfig, jobs: int, console: Console, ray: bool = False, trained: Path | None = None
) -> Comparison:
    """Run what is missing in `out`, `jobs` trials at a time; comparison.json and .html are renewed after each trial.

    Called again, it continues; more methods or seeds add to it. `trained`: another comparison's
    folder, whose finished trainings are taken, so that only evaluation is left.
    """
    if jobs < (least := 0 if ray else 1):
        raise PrismError(f"--jobs {jobs} is out of range: use {least} or more")
    with new_folder(out) as undo, exclusive(out), remedies_as_settings():
        folders = [folder_of(out, id) for id in trial_ids(config)]
        undo += [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
        trials = Trials(out, console)
        ids = {id.name: id for id in prepare(out, config, console, trained)}
        undo.clear()  # nothing was refused
        todo = [name for name in ids if state_of(trials.folder(name))[0] != "done"]
        kept = f", {len(ids) - len(todo)} done before" if len(todo) < len(ids) else ""
        at_once = f"{jobs} at a time" if jobs else "one per free processor of the cluster"
        trials.say(f"compare: {len(ids)} trials of {config.budget}{kept}, {at_once} -> {out}")
        failed: dict[str, str] = {}
        if todo:
            write_summary(out, config, {}, trials)
            after = waits_for(ids.values(), config)
            failed = trials.run(todo, jobs, lambda _: write_summary(out, config, {}, trials), after, ray)
        return write_summary(out, config, {ids[name]: reason for name, reason in failed.items()}, trials)


def waits_for(ids: Iterable[TrialId], config: CompareConfig) -> dict[str, str]:
    """Students after their teachers: the name of each trial that waits for another one, and of that one."""
    teachers = _teachers(config)
    return {id.name: replace(id, contestant=teachers[id.contestant]).name for id in ids if id.contestant in teachers}


def write_summary(out: Path, config: CompareConfig, failed: Mapping[TrialId, str], trials: Trials) -> Comparison:
    """Write comparison.json and comparison.html; a full disk does not end the comparison."""
    comparison = summarise(out, config, failed)
    try:
        write_json(out / JSON, comparison.to_json(), overwrite=True)
        write_page(out / PAGE, comparison)
    except PrismError as error:
        trials.say(f"warning: {error}")
    return comparison


def experiments_of(
    out: Path, config: CompareConfig, console: Console | None, trained: Path | None = None
) -> dict[TrialId, Experiment]:
    """The experiment of every trial. Demonstrations that are missing are recorded now, once; without a console they are
    not opened.

    A distilled method learns from the trial of its teacher, of the same recipe and seed.
    """
    teachers = _teachers(config)
    made: dict[TrialId, Experiment] = {}
    for name in config.recipes:
        plain = recipe(name)
        if plain.task is None:
            raise PrismError(f"{name} is a dataset without a simulator: a comparison needs a task to roll out in")
        if config.preset is not None:
            plain = with_preset(plain, config.preset)
        plain = with_settings(plain, [s for s in config.settings if s.startswith("demonstrations.")])
        source = None
        if console is not None:
            demonstrations, source, _ = open_demonstrations(plain.demonstrations, plain.task, console)
            if trained is not None:
                Trials(trained).check_data(name, source, keep=False)
            Trials(out).check_data(name, source)
            path = str(Path(demonstrations.path or "").resolve())  # processes of a cluster start in other folders
            plain = replace(plain, demonstrations=replace(demonstrations, path=path))
        for contestant in config.contestants:
            experiment = _experiment(plain, contestant, config)
            if source is not None:  # before hours of training, not after them
                spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps)
                check_controller(experiment.controller, spec)
            train = replace(experiment.train, clock=config.clock, threads=1, workers=0, keep_last=1)
            for seed in config.seeds:
                budgeted = with_budget(replace(experiment, train=train), config.minutes, config.steps, seed)
                if (teacher := teachers.get(contestant.name)) is not None:
                    budgeted = replace(budgeted, teacher=str(folder_of(out, TrialId(name, teacher, seed)).resolve()))
                made[TrialId(name, contestant.name, seed)] = budgeted
    return made


def _experiment(plain: Experiment, contestant: Contestant, config: CompareConfig) -> Experiment:
    """A contestant on a recipe: preset, method, what its teacher has, settings. A preset may have other targets
    (paper-literal: from the next step), never other episodes."""
    own = plain if contestant.preset is None else with_preset(plain, contestant.preset)
    experiment = with_method(own, contestant.method, contestant.preset or config.preset)
    if (teacher := _teachers(config).get(contestant.name)) is not None:
        learned = _experiment(plain, next(c for c in config.contestants if c.name == teacher), config).policy
        experiment = replace(experiment, policy=student_config(contestant.method, learned))
    experiment = with_settings(experiment, [*config.settings, *contestant.settings])
    return replace(experiment, demonstrations=own.demonstrations)


def _teachers(config: CompareConfig) -> dict[str, str]:
    """Whom each distilled contestant learns from: the plain one of that method, or the first of it."""
    teachers = {}
    for student in (c for c in config.contestants if METHODS[c.method].teacher):
        wanted = METHODS[student.method].teacher
        found = sorted((c.name for c in config.contestants if c.method == wanted), key=lambda name: name != wanted)
        if not found:
            raise PrismError(f"{student.name} is distilled from {wanted}: name {wanted} among the --methods too")
        teachers[student.name] = found[0]
    return teachers


def check_equal(out: Path, config: CompareConfig) -> None:
    """PrismError where a trial in this folder, also one that is not asked for now, has another budget or evaluation."""
    plan = to_json(config.evaluation)
    asked = {"minutes": config.minutes or 0.0, "steps": config.steps or 0, "clock": config.clock, "evaluation": plan}
    for folder in Trials(out).prepared():
        train, spec = Experiment.load(folder).train, TrialSpec.load(folder)
        there = {"minutes": train.minutes, "steps": train.steps, "clock": train.clock}
        refuse_other(folder, {**there, "evaluation": to_json(spec.evaluation)}, asked)


def check_trials(out: Path, config: CompareConfig) -> None:
    """PrismError where a trial that is there is not what is asked for now. Nothing is read but the trials."""
    check_equal(out, config)
    for id, experiment in experiments_of(out, config, None).items():
        if spec_file(folder_of(out, id)).exists():
            _refuse_changed(folder_of(out, id), experiment, config.spec(id))


def prepare(out: Path, config: CompareConfig, console: Console, trained: Path | None = None) -> list[TrialId]:
    """Write what each trial is; PrismError where a trial of another definition is in the way.

    `trained`: another comparison's folder, whose finished trainings are taken: the one of the same name, or the plain
    one of the method for a variation that differs in how it is executed.
    """
    check_equal(out, config)
    experiments = experiments_of(out, config, console, trained)
    ids = trial_ids(config)
    for id in ids:
        folder, experiment, spec = folder_of(out, id), experiments[id], config.spec(id)
        if known := spec_file(folder).exists():
            _refuse_changed(folder, experiment, spec)
            if Experiment.load(folder) == experiment:
                continue
        with files.explain_write_errors(folder, "Nothing was trained"):
            folder.mkdir(parents=True, exist_ok=True)
            if trained is not None and not known:
                own, plain = (folder_of(trained, one) for one in (id, replace(id, contestant=spec.method)))
                _take(own if own.exists() else plain, folder, experiment)
            experiment.save(folder)  # also of a trial that is there: where its teacher and demonstrations lie now
            spec.save(folder)
    return ids


def _take(source: Path, folder: Path, experiment: Experiment) -> None:
    """A copy of what was trained there; it may be executed in another way, but not have been trained in another."""
    if state_of(source)[0] != "done":
        raise PrismError(f"{source} is not finished: finish that comparison, or name only methods and seeds it has")

    def learned(one: Experiment) -> dict[str, Any]:
        return {k: v for k, v in definition(one).items() if k not in ("controller", "teacher")}

    refuse_other(source, learned(Experiment.load(source)), learned(experiment))
    kept = list_checkpoints(source)
    if not kept or not (source / "log.jsonl").is_file():
        raise PrismError(f"{source} has its result, but not its checkpoint and log any more: train it again")
    shutil.copytree(kept[-1], folder / kept[-1].relative_to(source), dirs_exist_ok=True)
    shutil.copy2(source / "log.jsonl", folder)
    result = files.read_json(source / RESULT, REMEDY)
    origin = result.get("trained_by") or {key: result["info"].get(key) for key in ("commit", "date")}
    files.replace_file(folder / TRAINED_BY, files.encode_json(origin))


def _refuse_changed(folder: Path, experiment: Experiment, spec: TrialSpec) -> None:
    there = {"experiment": definition(Experiment.load(folder)), "trial": to_json(TrialSpec.load(folder))}
    refuse_other(folder, there, {"experiment": definition(experiment), "trial": to_json(spec)})


def summarise(out: Path, config: CompareConfig, failed: Mapping[TrialId, str] | None = None) -> Comparison:
    """Read what is there; PrismError where that is not what is asked for now (`failed` given: it has been checked)."""
    if failed is None:
        check_trials(out, config)
    done, ids, reasons, rows = Trials(out).finished(), trial_ids(config), failed or {}, []
    trials = {id: done.pop(id.name) for id in ids if id.name in done}
    missing = [Missing(id, reasons.get(id, state_of(folder_of(out, id))[1])) for id in ids if id not in trials]
    for name in config.recipes:
        reference = _of(trials, name, config.reference)
        found = [(one.name, mine) for one in config.contestants if (mine := _of(trials, name, one.name))]
        rows += with_verdicts([_row(config, name, contestant, mine, reference) for contestant, mine in found])
    return Comparison(config, tuple(rows), tuple(missing), trials, done, run_info(min(config.seeds)))


def _of(trials: Mapping[TrialId, TrialResult], recipe: str, name: str) -> dict[int, TrialResult]:
    """By seed."""
    return {id.seed: trial for id, trial in trials.items() if (id.recipe, id.contestant) == (recipe, name)}


def _row(
    config: CompareConfig,
    recipe: str,
    name: str,
    trials: Mapping[int, TrialResult],
    reference: Mapping[int, TrialResult],
) -> Row:
    seeds = sorted(trials)
    score, success = table(trials, seeds, "score"), table(trials, seeds, "success")
    common = [seed for seed in seeds if seed in reference and name != config.reference]
    difference, success_difference = (
        paired(table(trials, common, key), table(reference, common, key)) if common else None
        for key in ("score", "success")
    )
    latency = [trials[seed]["evaluation"]["latency_ms"] for seed in seeds]
    first = trials[seeds[0]]
    return Row(
        recipe=recipe,
        contestant=name,
        method=str(first["method"]),
        seeds=tuple(seeds),
        of=len(config.seeds),
        score=float(score.mean()),
        score_ci=success_interval(score),
        success=float(success.mean()),
        success_ci=success_interval(success),
        difference=difference,
        success_difference=success_difference,
        jerk=float(table(trials, seeds, "jerk").mean()),
        mode_switches=float(table(trials, seeds, "mode_switches").mean()),
        latency_p50_ms=float(np.median([one["p50"] for one in latency])),
        latency_p99_ms=float(np.median([one["p99"] for one in latency])),
        steps=metrics.mean([float(trials[seed]["steps"]) for seed in seeds]),
        train_seconds=metrics.mean([float(trials[seed]["train_seconds"]) for seed in seeds]),
        parameters=int(first["parameters"]),
        candidates=int(first["controller"]["candidates"]),
        exec_horizon=int(first["controller"]["exec_horizon"]),
        curve=_mean_curve([trials[seed]["curve"] for seed in seeds]),
    )


def with_verdicts(rows: Sequence[Row]) -> list[Row]:
    """The rows of one recipe, each with its verdict against the reference.

    ahead, behind: in success and in score, beyond chance (p < 5 % after Holm's correction over the contestants).
    depends on the metric: the two disagree. not decided: neither is beyond chance. Fewer than TRAININGS: no verdict.
    """
    ways: dict[str, list[str]] = {}
    for key in ("difference", "success_difference"):
        tested = [(row.contestant, d) for row in rows if (d := getattr(row, key)) is not None]
        for (name, d), p in zip(tested, metrics.holm([d.p for _, d in tested]), strict=True):
            decided = p < 0.05 and not d.low <= 0 <= d.high
            ways.setdefault(name, []).append(("ahead" if d.mean > 0 else "behind") if decided else "not decided")
    return [replace(row, verdict=_verdict(row, ways.get(row.contestant, []))) for row in rows]


def _verdict(row: Row, ways: Sequence[str]) -> str:
    if not ways or row.difference is None:
        return ""
    if row.difference.seeds < TRAININGS:
        return f"needs {TRAININGS} trainings"
    return ways[0] if len(set(ways)) == 1 else "depends on the metric"


def table(trials: Mapping[int, TrialResult], seeds: Sequence[int], key: str) -> FloatArray:
    """(seeds, episodes) values; every trial met the same episodes in the same order (EvaluationPlan)."""
    return np.array([[float(episode[key]) for episode in trials[seed]["per_episode"]] for seed in seeds])


def _mean_curve(curves: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, float], ...]:
    keys = ("fraction", "seconds", "step", "score", "success")
    stages = zip(*curves, strict=True)  # every trial looked at the same fractions
    return tuple({key: metrics.mean([float(point[key]) for point in points]) for key in keys} for points in stages)
