"""`prism eval --benchmark`: which runs play which tasks, what is already there, and the evaluation of the rest.

Everything that can be wrong is looked for before the first episode: the benchmark's name, the runs, the tasks, the
sensors and actions of every policy, the simulator. Each task's result is stored in its run as soon as it is there, so
that an interruption costs one task; `resume` takes stored results only where checkpoint, controller, task and seeds are
the very same.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prism.controller import ControllerConfig, check_controller
from prism.errors import PrismError
from prism.policy import PolicySpec
from prism.rollout.episodes import IncompleteError, RecordConfig, check_spec_fits, make_env_of
from prism.rollout.recording import load_result
from prism.rollout.results import EvaluationResult, metrics_json, write_json
from prism.runs.benchmark_page import write_benchmark
from prism.runs.benchmarks import Benchmark, BenchmarkResult, benchmark
from prism.runs.recipes import Experiment
from prism.runs.run import EvalOptions, Run, is_run
from prism.training.checkpoint import list_checkpoints
from prism.training.monitor import read_log

ALL = "all"


@dataclass(frozen=True)
class Cell:
    """One task played by one run."""

    base: str  # the benchmark's name of the task
    task: str  # with its variant
    path: Path  # the run, or one checkpoint in it
    spec: PolicySpec
    controller: ControllerConfig
    seed: int  # of the training


@dataclass(frozen=True)
class Plan:
    benchmark: Benchmark
    options: EvalOptions
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...] = ()  # runs in a folder that belong elsewhere
    expert: Mapping[str, float] = field(default_factory=dict)
    episodes: int | None = None  # the protocol's number unless told


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
) -> Plan:
    """Every task that the runs play; PrismError for whatever would go wrong later."""
    bench, options = benchmark(name), options or EvalOptions()
    if options.candidates is None and bench.candidates is not None:
        options = replace(options, candidates=bench.candidates)
    if options.record is not None and len(bench.tasks) > 10:
        options = replace(options, record=_SMALL)
    if options.task not in (None, ALL) and bench.base(options.task or "") is None:
        raise PrismError(f"{name} has no task '{options.task}': it has {_some(bench.tasks)}")
    cells: list[Cell] = []
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
            cells += _cells(bench, path, experiment, task, options)
    if not cells:
        raise PrismError(
            f"no run for {name} among {', '.join(map(str, paths))}: train one (prism train {bench.tasks[0]})"
        )
    _check_twice(cells)
    _check_fits(bench, cells)
    rates = read_expert(expert, bench) if expert else {}
    return Plan(bench, options, tuple(cells), tuple(skipped), rates, episodes)


def _cells(bench: Benchmark, path: Path, experiment: Experiment, task: str, options: EvalOptions) -> list[Cell]:
    spec = Run(path).spec
    controller = options.controller(experiment.controller)
    tasks = [_variant_for(bench, base, spec) for base in bench.tasks] if task == ALL else [task]
    return [Cell(bench.base(t) or t, t, path, spec, controller, experiment.train.seed) for t in tasks]


def _variant_for(bench: Benchmark, base: str, spec: PolicySpec) -> str:
    """The variant of a task that has the sensors of a policy that was not trained for one task; by name only."""
    variants = bench.variants(base)
    if len(variants) == 1:
        return base
    sensors = {sensor.name for sensor in spec.sensors}
    if sensors & {"depth_static", "depth_wrist"}:
        wanted = "-rgbd"
    else:
        wanted = "-pixels" if sensors & {"rgb_static", "rgb_wrist"} else ""
    return base + wanted if base + wanted in variants else base


def _check_twice(cells: Sequence[Cell]) -> None:
    """Several runs for a task are several trainings of the same thing, or a mistake."""
    for base, count in Counter(cell.base for cell in cells).items():
        same = [cell for cell in cells if cell.base == base]
        seeds = {cell.seed for cell in same}
        if count > 1 and (len(seeds) < count or len({cell.task for cell in same}) > 1):
            raise PrismError(
                f"{same[0].path} and {same[1].path} both play {base}: name the one that counts, or give runs that "
                "differ in their training seed and in nothing else"
            )


def _check_fits(bench: Benchmark, cells: Sequence[Cell]) -> None:
    """Make one environment for each kind of policy and task: the simulator is there, sensors and actions fit."""
    seen: set[object] = set()
    for cell in cells:
        try:
            check_controller(cell.controller, cell.spec)
        except PrismError as error:
            raise PrismError(f"{cell.path}: {error}") from None
        kind = (cell.spec.sensors, cell.spec.action_dim, cell.task.removeprefix(cell.base))
        if kind in seen:
            continue
        seen.add(kind)
        env = make_env_of(cell.task)
        try:
            check_spec_fits(env, cell.spec)
        except PrismError as error:
            raise PrismError(f"{cell.path}: {error}") from None
        finally:
            env.close()


def read_expert(path: Path, bench: Benchmark) -> dict[str, float]:
    """What `prism data collect --json` wrote: success.TASK, the demonstrator's own rate."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrismError(
            f"{path}: not readable as JSON ({error}): give what `prism data collect --json` wrote"
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
    plan: Plan,
    resume: bool = False,
    say: Callable[[str], None] = print,
    on_result: Callable[[BenchmarkResult], None] | None = None,
) -> BenchmarkResult:
    """Evaluate what is not there yet. `on_result` hears of the table after each task: keep it, and Ctrl-C is safe."""
    results: dict[str, tuple[EvaluationResult, ...]] = {}
    played: list[tuple[Cell, EvaluationResult]] = []
    reused: list[str] = []
    failed: dict[str, str] = {}

    def table() -> BenchmarkResult:
        return BenchmarkResult(plan.benchmark, dict(results), plan.episodes, plan.expert, tuple(reused), dict(failed))

    for number, cell in enumerate(plan.cells, start=1):
        options = _options(plan, cell)
        result = stored(cell, options) if resume else None
        if result is not None:
            reused.append(cell.base)
            say(f"{cell.task}: stored result of {result.info.get('date', '?')} reused ({cell.path})")
        else:
            say(f"{cell.task}: {options.episodes} episodes, {number} of {len(plan.cells)} ({cell.path})")
            try:
                result = Run(cell.path).evaluate(options)
            except IncompleteError as error:
                result = error.result  # stored, and told in the table
                say(str(error))
            except PrismError as error:
                failed[cell.base] = str(error)
                say(f"{cell.task}: {error}")
                continue
        results[cell.base] = (*results.get(cell.base, ()), result)
        played.append((cell, result))
        if on_result is not None:
            on_result(table())
    if plan.options.backend == "eager":
        _write_metrics(played)
    return table()


def _options(plan: Plan, cell: Cell) -> EvalOptions:
    return replace(plan.options, task=cell.task, episodes=plan.benchmark.planned(cell.base, plan.episodes))


def stored(cell: Cell, options: EvalOptions) -> EvaluationResult | None:
    """The result in the run, if it is of this very checkpoint, controller, task and seeds, whole, and readable.

    A run stores what its policy itself did, never what another back end made of it.
    """
    if options.backend != "eager":
        return None
    try:
        result = load_result(Run(cell.path).recording(cell.task))
    except PrismError:
        return None
    seeds = list(range(options.first_seed, options.first_seed + options.episodes))
    same = (
        result.task == cell.task
        and result.controller == cell.controller
        and [episode.seed for episode in result.episodes] == seeds
        and not result.lost
        and result.info.get("checkpoint") == Run(cell.path).weights_id()
        and (options.record is None or any(episode.frames for episode in result.episodes) or result.rendering_hint)
    )
    return result if same else None


def _write_metrics(played: Sequence[tuple[Cell, EvaluationResult]]) -> None:
    """metrics.json of runs that played several tasks: all of them, not the last, and the reused ones too."""
    by_run: dict[Path, list[EvaluationResult]] = {}
    for cell, result in played:
        by_run.setdefault(Run(cell.path).folder.resolve(), []).append(result)
    for run, several in by_run.items():
        if len(several) > 1:
            write_json(run / "metrics.json", metrics_json(several), overwrite=True)


def write_page(table: BenchmarkResult, plan: Plan, paths: Sequence[Path]) -> Path:
    """benchmark-NAME.html beside the runs: in the folder that was given, in the only run, or where all of them are."""
    folders = [path if path.is_dir() and not (path / "config.json").is_file() else Run(path).folder for path in paths]
    folder = folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.resolve() for folder in folders]))
    logs = {cell.task: read_log(Run(cell.path).folder) for cell in plan.cells}
    return write_benchmark(folder / f"benchmark-{table.benchmark.name}.html", table, logs)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
