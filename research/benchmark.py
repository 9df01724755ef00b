"""The protocol of metaworld, robomimic, pusht, calvin or tabletop, played by trained policies (research/BENCHMARKS.md).

Try:
    python -m research benchmark metaworld runs --json metaworld.json
    python -m research benchmark calvin runs/calvin --task all --work benchmarks/calvin

Everything that can be wrong is looked for before the first episode: the benchmark's name, the runs, the tasks, the
sensors and actions of every policy, the simulator. Each task played by each run is a trial. Killed at
any moment, the same command goes on; a trial whose checkpoint, controller, seeds or back end have changed is refused,
never mixed in. WORK has the trials, benchmark.json and benchmark.html.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.controller import ControllerConfig, check_controller
from prism.errors import PrismError
from prism.evaluation.play import IncompleteError, RecordConfig, check_fits
from prism.evaluation.results import (
    EvaluationResult,
    load_result,
    recording_path,
    save_result,
    write_json,
)
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import EvalOptions, Run, is_run
from prism.experiments.trial import RESULT
from prism.io.jsonconfig import to_json
from prism.policy import PolicySpec
from prism.report.charts import interval_bar
from prism.report.run_page import Log, write_report
from prism.sims.task_table import make_env
from prism.training.checkpoint import list_checkpoints
from prism.training.log import read_log
from research.benchmark_protocols import OTHERS, Benchmark, BenchmarkResult, Row, benchmark
from research.report import ComputedTrials, Result, Written

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    name: Annotated[str, Positional, arg(metavar="NAME")]
    """metaworld, robomimic, pusht, calvin or tabletop."""
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, checkpoints in them, or a folder of runs."""
    work: Path | None = None
    """Where the trials and the page go; default: benchmark-NAME beside the runs."""
    task: str | None = None
    """The task that the runs play, or "all"; default: the one that each was trained for."""
    episodes: int | None = None
    """Episodes a task; default: the protocol's number."""
    candidates: int | None = None
    """Candidates a plan; default: the run's own, or the benchmark's."""
    selection: str | None = None
    """Selection rule; default: the run's own."""
    success_at: Annotated[int | None, option("K")] = None
    """Success@K as the paper has it: of K candidates the best by ProxyScore is executed."""
    set: tuple[str, ...] = ()
    """Settings of the controller: KEY=VALUE."""
    expert: Path | None = None
    """Show the demonstrator's own success beside it, from what `python -m research experts --json FILE` wrote."""
    workers: int | None = None
    """Processes that roll out in parallel; default: one a core."""
    backend: str = "eager"
    """What computes the policy: eager, compile, onnx, onnx-int8."""
    ray: bool = False
    """Roll out on a Ray cluster."""
    videos: bool = True
    """Record a few episodes of each task for the page."""


def run(config: Config, console: Console) -> BenchmarkResult:
    options = EvalOptions(
        task=config.task,
        candidates=config.candidates,
        selection=config.selection,
        set=config.set,
        workers=config.workers,
        ray=config.ray,
        backend=config.backend,
        record=RecordConfig() if config.videos else None,
    )
    plan = make_plan(config.name, config.runs, options, config.expert, config.episodes, config.success_at)
    for line in plan.skipped:
        print(f"not for {config.name}: {line}", file=sys.stderr)
    work = config.work or _beside(config.runs) / f"benchmark-{config.name}"
    table = run_plan(plan, ComputedTrials(work, console), lambda table: write_files(work, table, plan))
    console.print(f"page: {work / 'benchmark.html'}", highlight=False, soft_wrap=True)
    return table


def check(table: BenchmarkResult) -> None:
    """After the figures are written: a table with holes is an error."""
    if table.failed or any(r.lost for several in table.results.values() for r in several):
        raise PrismError(f"{table.benchmark.name}: {table.departures()[0]}; the table says what there is")


def _beside(paths: Sequence[Path]) -> Path:
    """The folder that was given, or the one that all runs are in."""
    folders = [Run(path).folder.parent if is_run(path) or (path / "config.json").is_file() else path for path in paths]
    return folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.resolve() for folder in folders]))


def write_files(work: Path, table: BenchmarkResult, plan: Plan) -> None:
    """After each task: what is there now."""
    write_json(work / "benchmark.json", table.to_json(), overwrite=True)
    write_benchmark(work / "benchmark.html", table, {c.task: read_log(Run(c.path).folder) for c in plan.trials})


@dataclass(frozen=True)
class TrialResult:
    """One task played by one run."""

    base: str  # the benchmark's name of the task
    task: str  # with its variant
    path: Path  # the run, or one checkpoint in it
    spec: PolicySpec
    controller: ControllerConfig
    seed: int  # of the training

    @property
    def name(self) -> str:
        return f"{self.task}/seed-{self.seed}"


@dataclass(frozen=True)
class Plan:
    benchmark: Benchmark
    options: EvalOptions
    trials: tuple[TrialResult, ...]
    skipped: tuple[str, ...] = ()  # runs in a folder that belong elsewhere
    expert: Mapping[str, float] = field(default_factory=dict)
    episodes: int | None = None  # default: the protocol's number


def find_runs(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Runs and checkpoints that were named, and the runs directly in a folder; with whether they were named."""
    found: list[tuple[Path, bool]] = []
    for path in paths:
        if path.is_dir() and not is_run(path) and not (path / "config.json").is_file():
            inside = sorted(folder for folder in path.iterdir() if is_run(folder))
            if not inside:
                raise PrismError(f"{path} holds no run of `prism train`, and is none: check the name")
            found += [(folder, False) for folder in inside if list_checkpoints(folder)]
        else:
            Run(path)
            found.append((path, True))
    return found


_SMALL = RecordConfig(videos=2, frames=30, size=192)  # a page of 50 tasks stays below some 20 MB


def make_plan(
    name: str,
    paths: Sequence[Path],
    options: EvalOptions | None = None,
    expert: Path | None = None,
    episodes: int | None = None,
    success_at: int | None = None,
) -> Plan:
    """Every task that the runs play; PrismError for whatever would go wrong later."""
    bench, options = benchmark(name), options or EvalOptions()
    if success_at is not None:
        options = at_k(options, success_at, [Run(path).spec for path, _ in find_runs(paths)])
        rule = f"{bench.rule}; Success@{success_at}: of {success_at} candidates the best by ProxyScore is executed"
        bench = replace(bench, rule=rule, success_at=success_at)
    if options.candidates is None and bench.candidates is not None:
        options = replace(options, candidates=bench.candidates)
    if options.record is not None and len(bench.tasks) > 10:
        options = replace(options, record=_SMALL)
    if options.task not in (None, ALL) and bench.base(options.task or "") is None:
        raise PrismError(f"{name} has no task '{options.task}': it has {_some(bench.tasks)}")
    trials: list[TrialResult] = []
    skipped: list[str] = []
    for path, named in find_runs(paths):
        experiment = Run(path).experiment
        task = options.task or experiment.task
        if bench.one_policy and options.task is None and (task is None or bench.base(task) is not None):
            task = ALL
        if task is None:
            if named:
                hint = f"say which with --task {bench.tasks[0]}, or --task all for every one"
                raise PrismError(f"{path} was trained on a dataset, not on a task of {name}: {hint}")
            skipped.append(f"{path}: trained on a dataset alone")
        elif task != ALL and bench.base(task) is None:
            if named:
                raise PrismError(f"{path} was trained for '{task}', which is no task of {name}: leave it out")
            skipped.append(f"{path}: trained for {task}")
        else:
            trials += _trials(bench, path, experiment, task, options)
    if not trials:
        raise PrismError(
            f"no run for {name} among {', '.join(map(str, paths))}: train one (prism train {bench.tasks[0]})"
        )
    _check_twice(trials)
    _check_fits(trials)
    rates = read_expert(expert, bench) if expert else {}
    return Plan(bench, options, tuple(trials), tuple(skipped), rates, episodes)


def at_k(options: EvalOptions, k: int, specs: Sequence[PolicySpec]) -> EvalOptions:
    """The paper's Success@K: K candidates, and of them the one whose first induced pose scores best."""
    if options.candidates is not None or options.selection is not None:
        raise PrismError("give --success-at, or --candidates and --selection: the first sets both others")
    if k < 1:
        raise PrismError(f"--success-at {k} is out of range: use 1 or more")
    shapes = {sensor.name: sensor.shape for spec in specs for sensor in spec.sensors}
    settings: tuple[str, ...] = ()
    if "robot_obs" in shapes:  # CALVIN's own sensors: the hand's pose comes first
        settings = ("selection.pose_sensor=robot_obs", "selection.pose_dims=6")
    elif shapes.get("proprio") == (11,):  # CALVIN's state variants: a position, then sines and cosines
        settings = ("selection.pose_dims=3",)
    return replace(options, candidates=k, selection="proxy_score", set=(*settings, *options.set))


def _trials(bench: Benchmark, path: Path, experiment: Experiment, task: str, options: EvalOptions) -> list[TrialResult]:
    spec = Run(path).spec
    controller = options.controller(experiment.controller)
    tasks = [_variant_for(bench, base, spec) for base in bench.tasks] if task == ALL else [task]
    return [TrialResult(bench.base(t) or t, t, path, spec, controller, experiment.train.seed) for t in tasks]


def _variant_for(bench: Benchmark, base: str, spec: PolicySpec) -> str:
    """The variant of a task that has the sensors of a policy that was not trained for one task; by name only."""
    variants = bench.variants(base)
    if len(variants) == 1:
        return base
    sensors = {sensor.name for sensor in spec.sensors}
    if sensors & {"depth_static", "depth_wrist"}:
        wanted = "-rgbd"
    else:
        wanted = "-pixels" if sensors & {"rgb_static", "rgb_wrist"} else "-state" if "object_state" in sensors else ""
    return base + wanted if base + wanted in variants else base


def _check_twice(trials: Sequence[TrialResult]) -> None:
    """Several runs for a task are several trainings of the same thing, or a mistake."""
    for base, count in Counter(trial.base for trial in trials).items():
        same = [trial for trial in trials if trial.base == base]
        seeds = {trial.seed for trial in same}
        if count > 1 and (len(seeds) < count or len({trial.task for trial in same}) > 1):
            raise PrismError(
                f"{same[0].path} and {same[1].path} both play {base}: name the one that counts, or give runs that "
                "differ in their training seed and in nothing else"
            )


def _check_fits(trials: Sequence[TrialResult]) -> None:
    """Make one environment for each kind of policy and task: the simulator is there, sensors and actions fit."""
    seen: set[object] = set()
    for trial in trials:
        try:
            check_controller(trial.controller, trial.spec)
        except PrismError as error:
            raise PrismError(f"{trial.path}: {error}") from None
        kind = (trial.spec.sensors, trial.spec.action_dim, trial.task.removeprefix(trial.base))
        if kind in seen:
            continue
        seen.add(kind)
        env = make_env(trial.task)
        try:
            check_fits(env, trial.spec)
        except PrismError as error:
            raise PrismError(f"{trial.path}: {error}") from None
        finally:
            env.close()


def read_expert(path: Path, bench: Benchmark) -> dict[str, float]:
    """What `python -m research experts --json` wrote: success.TASK, the demonstrator's own rate."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrismError(
            f"{path}: not readable as JSON ({error}): give what `python -m research experts --json` wrote"
        ) from None
    rates: dict[str, float] = {}
    for key, value in data.items() if isinstance(data, dict) else ():
        task = key.removeprefix("success.")
        for name in (task, f"{bench.name}-{task}", f"robosuite-{task}"):
            if key.startswith("success.") and (base := bench.base(name)) and isinstance(value, int | float):
                rates.setdefault(base, float(value))
    if not rates:
        raise PrismError(f"{path}: no key 'success.TASK' of a task of {bench.name}: give another file")
    return rates


def run_plan(
    plan: Plan, trials: ComputedTrials, on_result: Callable[[BenchmarkResult], None] = lambda table: None
) -> BenchmarkResult:
    """Play what is not there yet. `on_result` hears of the table after each task."""
    results: dict[str, tuple[EvaluationResult, ...]] = {}
    failed: dict[str, str] = {}
    reused: list[str] = []
    table = BenchmarkResult(plan.benchmark, {}, plan.episodes, plan.expert)
    for trial in plan.trials:
        options = replace(plan.options, task=trial.task, episodes=plan.benchmark.planned(trial.base, plan.episodes))
        recording = recording_path(trials.folder(trial.name), trial.task)
        if (trials.folder(trial.name) / RESULT).exists():
            reused.append(trial.base)
        if trials.get(trial.name, spec_of(trial, options), lambda: _play(trial, options, recording)) is None:  # noqa: B023
            failed[trial.base] = trials.missing[-1].partition(": ")[2]
        else:
            results[trial.base] = (*results.get(trial.base, ()), load_result(recording))
        table = BenchmarkResult(plan.benchmark, dict(results), plan.episodes, plan.expert, tuple(reused), dict(failed))
        on_result(table)
    return table


def spec_of(trial: TrialResult, options: EvalOptions) -> dict[str, Any]:
    """Everything that determines the result of a trial."""
    return {
        "task": trial.task,
        "checkpoint": Run(trial.path).weights_id(),
        "controller": to_json(trial.controller),
        "first_seed": options.first_seed,
        "episodes": options.episodes,
        "backend": options.backend,
    }


def _play(trial: TrialResult, options: EvalOptions, recording: Path) -> Result:
    try:
        result = Run(trial.path).play(options)
    except IncompleteError as error:
        result = error.result  # the table says what was lost
    save_result(recording, result, overwrite=True)
    return result.summary()


def write_benchmark(path: Path, table: BenchmarkResult, logs: Mapping[str, Log] | None = None) -> Path:
    """`logs` by task, as for write_report."""
    results = [result for task in table.benchmark.tasks for result in table.results.get(task, ())]
    return write_report(path, results, logs, title=f"PRISM on {table.benchmark.title}", overview=overview(table))


def overview(table: BenchmarkResult) -> str:
    rows = "".join(_row(row, table) for row in table.rows())
    head = "".join(f'<th scope="col">{name}</th>' for name in columns(table))
    departures = "".join(f"<li>{escape(line)}</li>" for line in table.departures())
    warning = f'<p class="hint">Not the whole protocol:</p><ul class="hint">{departures}</ul>' if departures else ""
    published = OTHERS.get(table.benchmark.name, "")
    note = f'<p class="hint">{escape(published)}.</p>' if published else ""
    return (
        f"<p>Protocol: {escape(table.benchmark.rule)}. Inputs: {escape(', '.join(table.settings))}.</p>{warning}"
        '<div class="panel scroll" tabindex="0" role="region" aria-label="Table of the benchmark">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def columns(table: BenchmarkResult) -> list[str]:
    names = ["Task", "Success", "95 % interval", "Episodes", "Score"]
    return [*names, *["Expert"] * bool(table.expert), "Paper's", "Note"]


def _row(row: Row, table: BenchmarkResult) -> str:
    label = f"<b>{escape(row.label)}</b>" if row.is_mean else escape(row.label)
    bar = ""
    if row.success is not None and row.interval is not None:
        bar = interval_bar(row.success, *row.interval, f"{row.label}: {row.success:.0%}")
    columns = [
        percent(row.success) + bar,
        "" if row.interval is None else f"{100 * row.interval[0]:.0f} to {100 * row.interval[1]:.0f}",
        str(row.episodes or ""),
        "" if row.score is None else f"{row.score:.3f}",
        *([percent(row.expert)] if table.expert else []),
        percent(row.paper),
        escape(row.note),
    ]
    return f'<tr><th scope="row">{label}</th>{"".join(f"<td>{column}</td>" for column in columns)}</tr>'


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}".removesuffix(".0") + " %"


def show(table: BenchmarkResult, console: Console) -> None:
    """One row a task, means below their group; the paper's numbers are marked as such, what is missing is named."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    rows = table.rows()
    absent = [row for row in rows if row.success is None and not row.is_mean and row.note == "missing"]
    line(f"{table.benchmark.title}: {table.benchmark.rule}; inputs: {', '.join(table.settings) or 'none'}")
    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("task", no_wrap=True)
    names = ("success [95 %]", "of", "score", *(["expert"] if table.expert else []), "paper's")
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for row in rows:
        if row in absent:  # listed below: 47 empty lines help nobody
            continue
        success = ""
        if row.success is not None and row.interval is not None:
            success = f"{percent(row.success)} [{100 * row.interval[0]:.0f}, {100 * row.interval[1]:.0f}]"
        score = "" if row.score is None else f"{row.score:.3f}"
        columns = [success, str(row.episodes or ""), score, *([percent(row.expert)] if table.expert else [])]
        style = "bold" if row.is_mean else None
        shown.add_row(row.label, *columns, percent(row.paper), row.note, style=style)
    console.print(shown)
    if absent:
        line(f"missing ({len(absent)}): {', '.join(row.label.partition('-')[2] or row.label for row in absent)}")
    for departure in table.departures():
        if not departure.startswith("missing"):
            line(f"not the protocol: {departure}")
    for crash in (crash for several in table.results.values() for result in several for crash in result.crashes):
        line(f"a rollout process died and was replaced: {crash}")
    if published := OTHERS.get(table.benchmark.name):
        line(f"published: {published}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
