"""What is compared: contestants x recipes x seeds. Each combination is a cell with a folder of its own.

OUT/cells/RECIPE/CONTESTANT/seed-S/
    experiment.json   everything that determines the training
    cell.json         who it is, and how it is evaluated
    checkpoints/ ...  a run of `prism train`
    curve.json        evaluations on the way
    result.json       there when the cell is done: all that the summary reads
    failed.json       why it is not
    trained_by.json   commit and date of the training, where it was taken from another comparison
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from prism.errors import PrismError
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.methods.table import TEACHERS, student_config
from prism.rollout.episodes import TEST_SEED
from prism.runs.comparison.worker import LOG
from prism.runs.demonstrations import open_demonstrations
from prism.runs.recipes import FILE, Experiment, recipe, with_budget, with_method, with_preset
from prism.training import files
from prism.training.checkpoint import list_checkpoints
from prism.training.config import Clock

_OWN_OPTION = {  # settings that an option of the comparison decides
    **{f"train.{name}": f"--{name}" for name in ("minutes", "steps", "clock")},
    "train.seed": "--seeds",
    **dict.fromkeys(("train.threads", "train.workers", "train.keep_last"), ""),
}
CELLS, CELL, CURVE, RESULT, FAILED = "cells", "cell.json", "curve.json", "result.json", "failed.json"
TRAINED_BY = "trained_by.json"  # commit and date of a training that was taken from another comparison
REMEDY = "remove it, and run the same command again"  # where a file of a cell is damaged
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Contestant:
    """A method, or a variation of one: its name, and what differs from the recipe."""

    name: str
    method: str
    settings: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Contestant:
        """METHOD, or NAME=METHOD:KEY=VALUE,KEY=VALUE for a variation: wide=prism:policy.generator.width=128."""
        head, colon, rest = text.partition(":")
        name, equals, method = head.partition("=")
        if (equals and not method) or (colon and not rest) or not re.fullmatch(r"[\w.+-]+", name):
            raise PrismError(
                f"--methods {text}: write METHOD, or NAME=METHOD:KEY=VALUE,KEY=VALUE; "
                "for example wide=prism:policy.generator.width=128"
            )
        return Contestant(name, method or name, tuple(rest.split(",")) if rest else ())


@dataclass(frozen=True)
class EvaluationPlan:
    """Which episodes a cell is judged by; nothing is chosen by them, the last weights are what counts."""

    episodes: int = 50
    first_seed: int = TEST_SEED
    curve: tuple[float, ...] = (0.1, 0.25, 0.5)  # fractions of the budget at which to look on the way
    curve_episodes: int = 20  # the first so many of the episodes; not more than there are

    @property
    def looked_at(self) -> int:
        """Episodes of a look on the way."""
        return min(self.curve_episodes, self.episodes)

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.curve_episodes < 1:
            raise PrismError(f"episodes {self.episodes} and curve_episodes {self.curve_episodes} must be at least 1")
        if any(not 0 < fraction < 1 for fraction in self.curve) or list(self.curve) != sorted(set(self.curve)):
            raise PrismError(f"curve {self.curve}: give growing fractions between 0 and 1, for example 0.1 0.25 0.5")


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
                raise PrismError(f"{setting}: that is the same for everybody in a comparison; {remedy}")
        for contestant in self.contestants:
            if data := [s for s in contestant.settings if s.startswith("demonstrations.")]:
                raise PrismError(f"{contestant.name}: {data[0]}: all methods have the same data; set it with --set")

    @property
    def reference(self) -> str:
        """The contestant that the others are tested against: the first PRISM, or the first of all."""
        return next((c.name for c in self.contestants if c.method == "prism"), self.contestants[0].name)

    @property
    def budget(self) -> str:
        if self.steps is not None:
            return f"{self.steps:,} steps"
        return f"{self.minutes:g} minutes" + (" of CPU time" if self.clock == "cpu" else "")


@dataclass(frozen=True)
class CellId:
    recipe: str
    contestant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.recipe} {self.contestant} seed {self.seed}"

    def folder(self, out: Path) -> Path:
        return out / CELLS / self.recipe / self.contestant / f"seed-{self.seed}"


@dataclass(frozen=True)
class CellSpec:
    """cell.json; with experiment.json beside it, all that its process needs."""

    id: CellId
    method: str
    evaluation: EvaluationPlan

    def save(self, folder: Path) -> None:
        files.replace_file(folder / CELL, files.encode_json({"format_version": FORMAT_VERSION, **to_json(self)}))

    @staticmethod
    def load(folder: Path) -> CellSpec:
        data = files.read_json(folder / CELL)
        if (version := data.pop("format_version", None)) != FORMAT_VERSION:
            raise PrismError(f"{folder / CELL} has format_version {version}, this prism reads {FORMAT_VERSION}")
        return from_json(CellSpec, data, str(folder / CELL))


State = Literal["done", "failed", "open"]


def state_of(folder: Path) -> tuple[State, str]:
    """What is on disk: done, failed (and why; also a file that cannot be read), or still to do."""
    for name, state in ((RESULT, "done"), (FAILED, "failed")):
        if (folder / name).is_file():
            try:
                reason = str(files.read_json(folder / name, REMEDY).get("reason", "no reason given"))
            except PrismError as error:
                return "failed", str(error)
            return ("done", "") if state == "done" else ("failed", reason)
    return "open", "not finished yet" if (folder / LOG).exists() else "not started yet"


def cell_ids(config: CompareConfig) -> list[CellId]:
    """Seed by seed: after a third of the time there is a first, complete comparison."""
    return [
        CellId(name, contestant.name, seed)
        for seed in config.seeds
        for name in config.recipes
        for contestant in config.contestants
    ]


def experiments_of(out: Path, config: CompareConfig, console: Console | None) -> dict[CellId, Experiment]:
    """The experiment of every cell, with demonstrations that are there (recorded now, once, where they are not; without
    a console nobody looks for them).

    A distilled method learns from the cell of its teacher, of the same recipe and seed.
    """
    teachers = {c.name: _teacher_of(c, config.contestants) for c in config.contestants if c.method in TEACHERS}
    made: dict[CellId, Experiment] = {}
    for name in config.recipes:
        plain = recipe(name)
        if plain.task is None:
            raise PrismError(f"{name} is a dataset without a simulator: a comparison needs a task to roll out in")
        if config.preset is not None:
            plain = with_preset(plain, config.preset)
        plain = with_settings(plain, [s for s in config.settings if s.startswith("demonstrations.")])
        if console is not None:
            demonstrations, _, _ = open_demonstrations(plain.demonstrations, plain.task, console)
            # Processes of a cluster start in other folders.
            demonstrations = replace(demonstrations, path=str(Path(demonstrations.path or "").resolve()))
            plain = replace(plain, demonstrations=demonstrations)

        def with_contestant(contestant: Contestant, plain: Experiment = plain) -> Experiment:
            experiment = with_method(plain, contestant.method, config.preset)
            if (teacher := teachers.get(contestant.name)) is not None:
                learned = with_contestant(teacher).policy
                experiment = replace(experiment, policy=student_config(contestant.method, learned))
            experiment = with_settings(experiment, [*config.settings, *contestant.settings])
            return replace(experiment, demonstrations=plain.demonstrations)

        for contestant in config.contestants:
            experiment = with_contestant(contestant)
            train = replace(experiment.train, clock=config.clock, threads=1, workers=0, keep_last=1)
            for seed in config.seeds:
                budgeted = with_budget(replace(experiment, train=train), config.minutes, config.steps, seed)
                if (teacher := teachers.get(contestant.name)) is not None:
                    budgeted = replace(budgeted, teacher=str(CellId(name, teacher.name, seed).folder(out).resolve()))
                made[CellId(name, contestant.name, seed)] = budgeted
    return made


def _teacher_of(student: Contestant, contestants: tuple[Contestant, ...]) -> Contestant:
    """The contestant that a distilled one learns from: the plain one of that method, or the first."""
    wanted = TEACHERS[student.method]
    found = sorted((c for c in contestants if c.method == wanted), key=lambda c: c.name != wanted)
    if not found:
        raise PrismError(f"{student.name} is distilled from {wanted}: name {wanted} among the --methods too")
    return found[0]


def next_ready(out: Path, pending: Sequence[CellId], running: Collection[CellId]) -> CellId | None:
    """The first cell that can start: one whose teacher is neither waiting nor running."""
    busy = {id.folder(out).resolve() for id in (*pending, *running)}
    return next((id for id in pending if (t := teacher_folder(id.folder(out))) is None or t not in busy), None)


def teacher_folder(cell: Path) -> Path | None:
    """Where the cell that a distilled method learns from is."""
    if not (cell / FILE).is_file():
        return None
    teacher = Experiment.load(cell).teacher
    return None if teacher is None else Path(teacher)


def check_equal(out: Path, config: CompareConfig) -> None:
    """PrismError where a cell in this folder, also one that is not asked for now, has another budget or evaluation."""
    asked = {"minutes": config.minutes or 0.0, "steps": config.steps or 0, "clock": config.clock}
    for file in sorted(out.glob(f"{CELLS}/*/*/seed-*/{CELL}")):
        train = Experiment.load(file.parent).train
        there = {"minutes": train.minutes, "steps": train.steps, "clock": train.clock}
        _refuse(
            file.parent,
            {**there, "evaluation": to_json(CellSpec.load(file.parent).evaluation)},
            {**asked, "evaluation": to_json(config.evaluation)},
        )


def check_cells(out: Path, config: CompareConfig) -> None:
    """PrismError where a cell that is there is not what is asked for now. Nothing is read but the cells."""
    check_equal(out, config)
    methods = {contestant.name: contestant.method for contestant in config.contestants}
    for id, experiment in experiments_of(out, config, None).items():
        folder = id.folder(out)
        if (folder / CELL).exists():
            path = Experiment.load(folder).demonstrations.path
            found = replace(experiment, demonstrations=replace(experiment.demonstrations, path=path))
            spec = CellSpec(id, methods[id.contestant], config.evaluation)
            _refuse_other(folder, {"experiment": to_json(found), "cell": to_json(spec)})


def prepare(out: Path, config: CompareConfig, console: Console, trained: Path | None = None) -> list[CellId]:
    """Write what each cell is; PrismError where a cell of another definition is in the way.

    `trained`: another comparison's folder, whose finished trainings are taken: the one of the same name, or the plain
    one of the method for a variation that differs in how it is executed.
    """
    check_equal(out, config)
    methods = {contestant.name: contestant.method for contestant in config.contestants}
    experiments = experiments_of(out, config, console)
    ids = cell_ids(config)
    for id in ids:
        folder = id.folder(out)
        experiment = experiments[id]
        spec = CellSpec(id, methods[id.contestant], config.evaluation)
        if (folder / CELL).exists():
            _refuse_other(folder, {"experiment": to_json(experiment), "cell": to_json(spec)})
            continue
        with files.explain_write_errors(folder, "Nothing was trained"):
            folder.mkdir(parents=True, exist_ok=True)
            if trained is not None:
                own, plain = id.folder(trained), replace(id, contestant=spec.method).folder(trained)
                _take(own if own.exists() else plain, folder, experiment)
            experiment.save(folder)
            spec.save(folder)
    return ids


def _take(source: Path, folder: Path, experiment: Experiment) -> None:
    """A copy of what was trained there; it may be executed in another way, but not have been trained in another."""
    if state_of(source)[0] != "done":
        raise PrismError(f"{source} is not finished: finish that comparison, or name only methods and seeds it has")

    def learned(one: Experiment) -> dict[str, Any]:
        return {k: v for k, v in to_json(one).items() if k not in ("controller", "teacher")}

    _refuse(source, learned(Experiment.load(source)), learned(experiment))
    kept = list_checkpoints(source)
    if not kept or not (source / "log.jsonl").is_file():
        raise PrismError(f"{source} has its result, but not its checkpoint and log any more: train it again")
    shutil.copytree(kept[-1], folder / kept[-1].relative_to(source), dirs_exist_ok=True)
    shutil.copy2(source / "log.jsonl", folder)
    result = files.read_json(source / RESULT, REMEDY)
    origin = result.get("trained_by") or {key: result["info"].get(key) for key in ("commit", "date")}
    files.replace_file(folder / TRAINED_BY, files.encode_json(origin))


def _refuse_other(folder: Path, asked: dict[str, Any]) -> None:
    _refuse(folder, {"experiment": to_json(Experiment.load(folder)), "cell": to_json(CellSpec.load(folder))}, asked)


def _refuse(folder: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    before, now = _flat(there), _flat(asked)
    if different := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        changes = ", ".join(f"{key} = {before.get(key)} there, {now.get(key)} now" for key in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise PrismError(f"{folder} was made with other settings ({changes}{more}): remove it, or choose another --out")


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {key: value for k, v in data.items() for key, value in _flat(v, f"{path}.{k}" if path else k).items()}
    return {path: data}
