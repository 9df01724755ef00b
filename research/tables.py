"""The field's own tables: MetaWorld's 50 tasks and Robomimic's five, PRISM beside the baselines, trained here; two of
Robomimic's from cameras.

Try:
    python -m research tables metaworld --json research/results/metaworld_state.json
    python -m research tables robomimic --methods prism diffusion flow_matching imle --json F
    python -m research tables robomimic-cameras --seeds 0 --json F
    python -m research tables metaworld --tasks metaworld-push metaworld-soccer --seeds 0 --work runs/look
    python -m research tables robomimic --status --json F      runs nothing: the figures of what is there
    python -m research tables robomimic --trained runs/table-robomimic --first-seed 600000 --work runs/again
    python -m research tables metaworld --add OLD.json --methods prism act --json F     goes on with a results file

State inputs (in robomimic-cameras two cameras, force and proprioception), the last weights, on each task equal CPU time
for every method, episodes on seeds on which nothing was chosen. The recipes make a plan at every step; diffusion, flow
matching and IMLE Policy execute 8 actions of 16, as published, where no variation says otherwise. It can be stopped and
called again; more methods or seeds add to what is there.
    mean.SPLIT                 PRISM's mean over the tasks of a split (easy, medium, hard, very_hard; or all) that are
                               complete; `tasks_done` says how many of how many; mean_ci.SPLIT its interval over seeds
                               and episodes (the tasks are given)
    tasks.TASK                 PRISM's success; tasks_ci.TASK its interval over seeds and episodes
    success.METHOD.TASK        of every method; jerk and mode_switches likewise
    common.mean.METHOD         over the tasks that every method has (common.tasks); common.ci.METHOD its interval over
                               seeds and episodes, common.ahead.METHOD how far PRISM is ahead there, paired;
                               common.jerk.METHOD
    expert.TASK                how often the scripted expert itself succeeds
    processors                 empty, or the processors if there are several: their CPU times cannot be compared
    trials                     every training with its episodes: what --add goes on with (experiments/stored_trials.py)
TASK is the simulator's own name for it (pick-place, lift).
A task without all its seeds is under `missing`, never in a mean; so are finished seeds and methods of the folder that
this call does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional

from prism.cli.style import option
from prism.errors import PrismError, check_numbers
from prism.evaluation.metrics import paired, success_interval
from prism.experiments.comparison import CompareConfig, Comparison, Contestant, Row, compare, summarise
from prism.experiments.demonstrations import record_if_missing
from prism.experiments.recipes import recipe
from prism.experiments.stored_trials import contestant, put_back, several_processors, successes, trials_of
from prism.experiments.trial import EvaluationPlan
from prism.experiments.trials import commits_of
from prism.io import files
from prism.methods import METHODS
from prism.sims.task_table import TASKS
from research.report import SEEDS, Claim, Study, Verdict, Written, decided, defaults, show_rows

FRESH_SEED = 400_000  # 100,000 are the test seeds, 200,000 those of tuning, 300,000 led to selection.restless
AS_PUBLISHED = dict.fromkeys(
    ("diffusion", "flow_matching", "imle"), ("policy.pred_horizon=16", "controller.exec_horizon=8")
)
EXPERTS = Path(__file__).parent / "results"
SPLITS = ("easy", "medium", "hard", "very_hard")


@dataclass(frozen=True)
class Protocol:
    """One table: its tasks and what the field agrees on."""

    tasks: tuple[str, ...]
    demonstrations: int
    minutes: float | None  # None: as long as the recipe of each task
    bars: Mapping[str, float]  # of a split, or of a task
    experts: str  # file with the experts' own rates
    paper: Mapping[str, float]


def protocol(name: str) -> Protocol:
    if name == "metaworld":
        tasks = [task for task, row in TASKS.items() if split_of(task) in SPLITS and row.recipe == "state"]
        return Protocol(
            tuple(sorted(tasks, key=lambda task: (SPLITS.index(split_of(task)), task))),
            demonstrations=10,
            minutes=2.0,
            bars={"easy": 0.95, "medium": 0.90, "hard": 0.90, "very_hard": 0.85},
            experts="metaworld_experts.json",
            paper={"easy": 0.964, "medium": 0.855, "hard": 0.580, "very_hard": 0.858},
        )
    if name == "robomimic-cameras":
        names: tuple[str, ...] = ("lift-pixels", "can-pixels")
        bars: dict[str, float] = {}
    else:
        names = ("lift", "can", "square", "transport", "tool-hang")
        bars = dict(zip(names, (1.0, 0.95, 0.90, 0.80, 0.75), strict=True))
    return Protocol(
        tuple(f"robosuite-{one}" for one in names),
        demonstrations=200,
        minutes=None,
        bars=bars,
        experts="robosuite_experts.json",
        paper={},
    )


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    table: Positional[Literal["metaworld", "robomimic", "robomimic-cameras"]]
    """Which table."""
    tasks: Annotated[tuple[str, ...], option("TASK ...")] = ()
    """Only these of its tasks."""
    a_split: Annotated[int | None, option("N")] = None
    """Only so many tasks of each split, evenly spread over its alphabet."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism",)
    """Methods, or variations: NAME=METHOD:KEY=VALUE."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    minutes: Annotated[float | None, option("M")] = None
    """CPU minutes of one core for each training; default: 2 for metaworld, 5 and for the two long tasks 12 for
    robomimic, 25 for robomimic-cameras."""
    demonstrations: Annotated[int | None, option("N")] = None
    """Demonstrations of a task; default: 10 for metaworld, 200 for the others."""
    episodes: int = 20
    """Episodes of each evaluation."""
    first_seed: int = FRESH_SEED
    """Seed of the first of them; tune on 200000."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of the recipes, for every method."""
    jobs: int = 1
    """Trainings at the same time, one thread each."""
    work: Annotated[Path | None, option("FOLDER")] = None
    """Where runs and recordings are kept; default: runs/table-NAME."""
    trained: Annotated[Path | None, option("FOLDER")] = None
    """The work folder of another table: its policies play again, with this --first-seed. Nothing is trained twice."""
    add: Annotated[tuple[Path, ...], option("FILE ...")] = ()
    """Results files of this table, of whatever machine: their trials are put into --work and count as if run here."""
    status: bool = False
    """Run nothing: the figures of what is there."""

    def __post_init__(self) -> None:
        ranges = {"[1, inf)": "a_split demonstrations episodes jobs", "(0, inf)": "minutes", "[0, inf)": "first_seed"}
        check_numbers(self, "--", ranges)
        if self.trained is not None and not (self.trained / "data").is_dir():
            raise PrismError(f"--trained {self.trained}: no work folder of a table (it would have a folder 'data')")
        if self.trained is not None and self.trained.resolve() == self.folder.resolve():
            raise PrismError(f"--trained {self.trained} is --work itself: name another folder for what is new")
        for method in self.methods:  # before anything is recorded
            METHODS[Contestant.parse(method).method]
        if unknown := [task for task in self.tasks if task not in protocol(self.table).tasks]:
            raise PrismError(
                f"--tasks {unknown[0]}: no task of {self.table}; for example {protocol(self.table).tasks[0]}"
            )

    @property
    def folder(self) -> Path:
        return self.work or Path("runs") / f"table-{self.table}"

    @property
    def rows(self) -> tuple[str, ...]:
        every = tuple(dict.fromkeys(self.tasks)) or protocol(self.table).tasks
        return every if self.a_split is None else spread(every, self.a_split)

    @property
    def count(self) -> int:
        return self.demonstrations or protocol(self.table).demonstrations

    @property
    def departures(self) -> str:
        """In what the field's protocol is not kept: such a table does not judge the paper's."""
        asked = protocol(self.table).demonstrations
        other = [f"{self.count} demonstrations, not {asked}"] * (self.count != asked)
        return "; ".join((*other, *self.set))

    def data(self, work: Path, task: str) -> Path:
        """Where the demonstrations of a task are."""
        return (self.trained or work) / "data" / f"{task}-{self.count}"

    def minutes_of(self, task: str) -> float | None:
        return self.minutes or protocol(self.table).minutes or recipe(task).train.minutes

    def protocol_settings(self) -> dict[str, Any]:
        """What every trial of a table has in common, but for its method and seed."""
        minutes = {short(task): self.minutes_of(task) for task in self.rows}
        same = {"table": self.table, "episodes": self.episodes, "first_seed": self.first_seed, "set": self.set}
        return {**same, **defaults(), "demonstrations": self.count, "minutes": minutes, "clock": "cpu"}

    def comparison(self, work: Path, task: str) -> CompareConfig:
        return CompareConfig(
            recipes=(task,),
            contestants=tuple(contestant(method, AS_PUBLISHED) for method in self.methods),
            seeds=self.seeds,
            minutes=self.minutes_of(task),
            clock="cpu",
            settings=(
                f"demonstrations.episodes={self.count}",
                f'demonstrations.path="{self.data(work, task)}"',
                "train.val_fraction=0.0",  # ten demonstrations are ten, not nine
                *self.set,
            ),
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve=()),
        )


def run(config: Config, console: Console) -> Study:
    work = config.folder
    for file in config.add:
        configs = {work / task: config.comparison(work, task) for task in config.rows}
        put_back(file, config.protocol_settings(), configs, lambda text: contestant(text, AS_PUBLISHED))
    done = {}
    for task in config.rows:
        comparison_config = config.comparison(work, task)
        done[task] = summarise(work / task, comparison_config)
        if done[task].missing and not config.status:  # demonstrations are for what has to be trained
            record(config, work, task, console)
            trained = config.trained and config.trained / task
            done[task] = compare(work / task, comparison_config, config.jobs, console, trained=trained)
    return summary(config, done)


def record(config: Config, work: Path, task: str, console: Console) -> None:
    asked = replace(recipe(task).demonstrations, episodes=config.count, path=str(config.data(work, task)))
    record_if_missing(asked, task, console, workers=config.jobs)


def summary(config: Config, done: Mapping[str, Comparison]) -> Study:
    rows: dict[str, dict[str, Row]] = {}  # method, task
    for task, comparison in done.items():
        for row in comparison.rows:
            if row.complete:
                rows.setdefault(row.contestant, {})[short(task)] = row
    missing = [
        f"{one.trial.recipe}, {one.trial.contestant}, seed {one.trial.seed}: {one.reason}"
        for comparison in done.values()
        for one in comparison.missing
    ]
    missing += [f"{task}: {comparison.beside}" for task, comparison in done.items() if comparison.beside]
    plan = protocol(config.table)
    ours = rows.get("prism", {})
    groups = groups_of(config.rows)
    means, counted = split_means({task: row.success for task, row in ours.items()}, groups)
    expert_rates = files.read_json(EXPERTS / plan.experts, "it is in the repository")
    figures: dict[str, Any] = {
        "mean": means,
        "mean_ci": mean_intervals(ours, groups, {short(task): comparison for task, comparison in done.items()}),
        "tasks_done": counted,
        "tasks": {task: row.success for task, row in ours.items()},
        "tasks_ci": {task: list(row.success_ci) for task, row in ours.items()},
        "mean_by_method": {method: whole_means(found, groups, ours or found) for method, found in rows.items()},
        "common": common_figures(rows, {short(task): comparison for task, comparison in done.items()}),
        **{
            key: {method: {task: getattr(row, key) for task, row in found.items()} for method, found in rows.items()}
            for key in ("success", "jerk", "mode_switches")
        },
        "expert": {short(task): expert_rates.get(f"success.{task}") for task in config.rows},
        "bars": dict(plan.bars),
    }
    figures["processors"] = several_processors(done.values())
    figures["trials"] = trials_of(done.values())
    settings = {**config.settings("jobs", "status", "trained", "add"), **config.protocol_settings()}
    commits = commits_of(trial for comparison in done.values() for trial in comparison.trials.values())
    claimed = tuple(claims(figures, plan, len(config.seeds), config.departures))
    return Study(config.table, figures, claimed, settings, config.seeds, tuple(missing), commits)


def short(task: str) -> str:
    """metaworld-pick-place -> pick-place"""
    return task.partition("-")[2]


def split_of(task: str) -> str:
    return TASKS[task].group.replace("-", "_")


def groups_of(tasks: tuple[str, ...]) -> dict[str, list[str]]:
    """The tasks of each split, and all."""
    groups = {"all": [short(task) for task in tasks]}
    for task in tasks:
        if (split := split_of(task)) in SPLITS:
            groups.setdefault(split, []).append(short(task))
    return groups


def split_means(
    success: Mapping[str, float], groups: Mapping[str, list[str]]
) -> tuple[dict[str, float], dict[str, str]]:
    """Over the tasks of each split that are done, and how many of how many that is."""
    found = {group: [success[task] for task in members if task in success] for group, members in groups.items()}
    means = {group: fmean(values) for group, values in found.items() if values}
    return means, {group: f"{len(found[group])} of {len(members)}" for group, members in groups.items()}


def spread(tasks: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` of each split, from the middle of as many equal stretches of its alphabet: a choice without a chooser."""
    members: dict[str, list[str]] = {}
    for task in tasks:
        members.setdefault(split_of(task), []).append(task)
    taken = [(sorted(found), min(count, len(found))) for found in members.values()]
    return tuple(found[len(found) * (2 * at + 1) // (2 * n)] for found, n in taken for at in range(n))


def whole_means(found: Mapping[str, Row], groups: Mapping[str, list[str]], ours: Mapping[str, Row]) -> dict[str, float]:
    """A method's means of the splits in which it has the same tasks as PRISM: others would be of easier tasks."""
    means, _ = split_means({task: row.success for task, row in found.items()}, groups)
    same = found.keys() & ours.keys()
    return {s: mean for s, mean in means.items() if all(t in same for t in groups[s] if t in found or t in ours)}


def common_figures(rows: Mapping[str, Mapping[str, Row]], done: Mapping[str, Comparison]) -> dict[str, Any]:
    """Over the tasks that every method has; the tasks are given, seeds and episodes are drawn."""
    common = common_means(rows)
    tasks = common["tasks"]
    shared = [done[task] for task in tasks]
    won = {method: values for method in rows if shared and (values := successes(shared, method)) is not None}
    common["jerk"] = {method: fmean(found[task].jerk for task in tasks) for method, found in rows.items() if tasks}
    common["ci"] = {method: list(success_interval(values)) for method, values in won.items()}
    if (ours := won.pop("prism", None)) is not None:
        common["ahead"] = {method: asdict(paired(ours, theirs)) for method, theirs in won.items()}
    return common


def common_means(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Over the tasks that every method has."""
    tasks = [task for task in next(iter(rows.values()), {}) if all(task in found for found in rows.values())]
    means = {method: fmean(found[task].success for task in tasks) for method, found in rows.items() if tasks}
    return {"tasks": tasks, "mean": means}


def mean_intervals(
    ours: Mapping[str, Row], groups: Mapping[str, list[str]], done: Mapping[str, Comparison]
) -> dict[str, list[float]]:
    """Of PRISM's mean over those tasks of a split that are complete."""
    found = {}
    for group, members in groups.items():
        whole = [done[task] for task in members if task in ours]
        if whole and (won := successes(whole, "prism")) is not None:
            found[group] = list(success_interval(won))
    return found


def claims(figures: Mapping[str, Any], plan: Protocol, seeds: int, departures: str) -> list[Claim]:
    whole = {split: len(members) for split, members in groups_of(plan.tasks).items()}
    found = []
    for split, value in plan.paper.items():
        if split in figures["mean"]:
            low, high = figures["mean_ci"][split]
            verdict: Verdict = "confirmed" if low > value else "not confirmed"
            apart = figures["tasks_done"][split] != f"{whole[split]} of {whole[split]}"
            if apart or departures or seeds < SEEDS or low <= value <= high:
                verdict = "cannot be tested here"
            done = f"{figures['tasks_done'][split]} tasks, {seeds} training seed(s)"
            ours = f"{figures['mean'][split]:.1%} [{low:.1%}, {high:.1%}] ({done})"
            note = "state inputs and the last weights here, pictures and the best checkpoint there"
            found.append(Claim(f"Table 1, {split}", f"success {value:.1%}", ours, verdict, departures or note))
    inputs = "two cameras" if all(task.endswith("-pixels") for task in plan.tasks) else "state"
    for method, difference in figures["common"].get("ahead", {}).items():
        verdict, chance = decided(difference)
        mean, low, high = (100 * difference[key] for key in ("mean", "low", "high"))
        ours = f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}]"
        tasks = f"{len(figures['common']['tasks'])} tasks from {inputs}"
        note = f"{difference['seeds']} training seeds, {tasks}, equal CPU time{chance}"
        found.append(Claim("Tables 1, 3", f"success above {method}", ours, verdict, note))
    return found


def show(study: Study, console: Console) -> None:
    figures = study.figures
    methods = list(figures["success"])
    lines = [
        [
            task,
            *(trial(figures, method, task) for method in methods),
            rate(figures["expert"].get(task)),
        ]
        for task in figures["expert"]
    ]
    for split in figures["tasks_done"]:
        values = [figures["mean_by_method"][method].get(split) for method in methods]
        lines.append([f"mean, {split} ({figures['tasks_done'][split]})", *(rate(value) for value in values), ""])
    if len(methods) > 1 and (common := figures["common"])["tasks"]:
        row = [f"mean of the {len(common['tasks'])} that all have", *(rate(common["mean"][name]) for name in methods)]
        lines.append([*row, ""])
        ahead = [difference_words(common.get("ahead", {}).get(name)) for name in methods]
        lines.append(["PRISM ahead there by [95 %]", *ahead, ""])
    show_rows("success (jerk, mode switches)", ("task", *methods, "expert"), lines, console)
    if several := figures.get("processors"):
        console.print(several, markup=False)


def trial(figures: Mapping[str, Any], method: str, task: str) -> str:
    if task not in figures["success"][method]:
        return "missing"
    jerk, switches = (figures[key][method][task] for key in ("jerk", "mode_switches"))
    return f"{figures['success'][method][task]:.0%} ({jerk:.3f}, {switches:.1f})"


def difference_words(difference: Mapping[str, float] | None) -> str:
    if difference is None:
        return ""
    return "{mean:+.1%} [{low:+.1%}, {high:+.1%}]".format(**difference)


def rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
