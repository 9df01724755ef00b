"""The main job: record demonstrations, train, evaluate, report. Safe to interrupt and to repeat.

    out/demo.json              what was asked for: the experiments, the number of test episodes
    out/data/TASK/             demonstrations
    out/TASK/                  a run: checkpoints, logs
    out/evaluation/TASK.npz    rollouts on unseen seeds
    out/metrics.json, out/report.html

Each task is recorded and trained in a process of its own with one thread: the networks are small, so two
processes on two cores learn almost twice as much as one process with two threads. A stage whose result is there
is not repeated; an interrupted training goes on from its checkpoint. If the folder holds a demo that was asked
for differently, it is moved aside, never overwritten.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from prism.errors import PrismError
from prism.io.jsonconfig import to_json
from prism.rollout.episodes import RecordConfig, evaluate
from prism.rollout.recording import load_result, recording_path, save_result
from prism.rollout.results import EvaluationResult, metrics_json, write_json
from prism.runs.recipes import Experiment, demo_tasks
from prism.training import files
from prism.training.monitor import read_log

_POLL_SECONDS = 0.5
_LOG = "output.txt"  # of each task's process, in its run
_STOPPED = 130  # exit status of a process that was asked to stop
_LINE_SECONDS = 20.0  # between lines where there is no terminal


@dataclass(frozen=True)
class DemoConfig:
    experiments: tuple[Experiment, ...]
    episodes: int = 20  # unseen seeds a task

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise PrismError(f"demo.episodes is {self.episodes}; it must be at least 1")
        if any(experiment.task != experiment.name for experiment in self.experiments):
            raise PrismError("a demo shows tasks: each experiment must have the name of its task")


def default_config(minutes: float | None = None) -> DemoConfig:
    experiments = demo_tasks()
    if minutes is not None:
        experiments = tuple(replace(e, train=replace(e.train, minutes=minutes, steps=0)) for e in experiments)
    return DemoConfig(experiments)


def run_demo(out: Path, config: DemoConfig, console: Console, fresh: bool = False) -> list[EvaluationResult]:
    """All of it; the results, one a task. The report is written by the caller's last step."""
    started = time.monotonic()
    _prepare(out, config, console, fresh)
    config = replace(config, experiments=tuple(_inside(out, e) for e in config.experiments))
    pending = [e for e in config.experiments if not recording_path(out, e.name).exists()]
    if pending:
        first = pending[0]
        console.print(
            f"prism demo: {len(pending)} tasks, each {first.demonstrations.episodes} demonstrations, "
            f"{first.train.minutes:g} minutes of training, {config.episodes} episodes on unseen seeds",
            highlight=False,
            soft_wrap=True,
        )
        _train_all(out, pending, console)
    results = []
    for experiment in config.experiments:
        path = recording_path(out, experiment.name)
        if not path.exists():
            result = evaluate(
                out / experiment.name,
                experiment.name,
                config.episodes,
                controller=experiment.controller,
                workers=max(1, min(os.cpu_count() or 1, config.episodes)),
                record=RecordConfig(),
            )
            save_result(path, result)
        results.append(load_result(path))
    if pending or not (out / "metrics.json").is_file():
        whole = len(pending) == len(config.experiments)
        told = {
            "minutes": (time.monotonic() - started) / 60 if whole else None,  # of the demo, where one call did it all
            "training": {e.name: {"seed": e.train.seed, "minutes": e.train.minutes} for e in config.experiments},
        }
        write_json(out / "metrics.json", {**metrics_json(results), **told}, overwrite=True)
    return results


def _prepare(out: Path, config: DemoConfig, console: Console, fresh: bool) -> None:
    """The folder of this very demo: new, or with what an earlier call has done; anything else is moved aside."""
    asked = files.encode_json(to_json(config))
    stamp = out / "demo.json"
    if out.exists() and any(out.iterdir()):
        if not stamp.is_file():
            raise PrismError(f"{out} holds something that is not a demo: choose another folder with --out")
        if stamp.read_bytes() == asked and not fresh:
            console.print(f"{out} was started before: what is done is kept (--fresh starts over)", highlight=False)
            return
        aside = out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(stamp.stat().st_mtime))}")
        while aside.exists():
            aside = aside.with_name(aside.name + "-1")
        os.rename(out, aside)
        console.print(f"an earlier demo was moved to {aside}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    files.replace_file(stamp, asked)


def _inside(out: Path, experiment: Experiment) -> Experiment:
    """Demonstrations of the demo are kept in its folder, so that it neither finds nor leaves any elsewhere."""
    path = str(out / "data" / experiment.name)
    return replace(experiment, demonstrations=replace(experiment.demonstrations, path=path))


def _train_all(out: Path, experiments: Sequence[Experiment], console: Console) -> None:
    """Record and train every task, each in its own process, with one bar a task."""
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    for experiment in experiments:
        worker = context.Process(target=_record_and_train, args=(experiment, out / experiment.name), daemon=False)
        worker.start()
        workers.append(worker)
    watch = _Watch(out, experiments, console)
    try:
        with watch.bar:
            while any(one.is_alive() for one in workers) and not any(one.exitcode for one in workers):
                time.sleep(_POLL_SECONDS)
                watch.update(workers)
    finally:  # Ctrl-C, or one has failed: the others save what they have learnt and end
        running = [one for one in workers if one.exitcode is None]
        for one in running:
            if one.pid is not None:
                os.kill(one.pid, signal.SIGTERM)
            one.join()
    for experiment, one in zip(experiments, workers, strict=True):
        stopped = one in running and one.exitcode == -signal.SIGTERM  # by us, before its training had begun
        if one.exitcode not in (0, _STOPPED) and not stopped:
            log = out / experiment.name / _LOG
            last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
            reason = last[0].removeprefix("error: ") if last else f"its process ended with {one.exitcode}"
            raise PrismError(f"{experiment.name}: {reason} (all its output: {log})")
    if any(one.exitcode for one in workers):
        raise KeyboardInterrupt


def _record_and_train(experiment: Experiment, run: Path) -> None:
    """In a process of its own: output to a file, the last line says what went wrong."""
    import sys

    from prism.runs.demonstrations import record_if_missing
    from prism.runs.workflow import train_experiment

    run.mkdir(parents=True, exist_ok=True)
    with open(run / _LOG, "a", encoding="utf-8", buffering=1) as file:
        console = Console(file=file, width=200)
        try:
            record_if_missing(experiment.demonstrations, experiment.name, console, workers=1)
            result = train_experiment(experiment, run, "auto", console, title=experiment.name)
        except PrismError as error:
            console.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(_STOPPED)
        sys.exit(_STOPPED if result.stopped_by else 0)


class _Watch:
    """A bar for each task, from what its process leaves on disk; lines where there is no terminal."""

    def __init__(self, out: Path, experiments: Sequence[Experiment], console: Console) -> None:
        self.out, self.experiments, self.console = out, experiments, console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f}% {task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._rows: list[TaskID] = [self.bar.add_task(e.name, total=1.0, text="starting") for e in experiments]
        self._last_line = time.monotonic()

    def update(self, workers: Sequence[BaseProcess]) -> None:
        lines = []
        for experiment, row, worker in zip(self.experiments, self._rows, workers, strict=True):
            fraction, text = self._state(experiment)
            if not worker.is_alive():
                text = "trained" if worker.exitcode == 0 else "stopped"
            self.bar.update(row, completed=fraction, text=text)
            lines.append(f"{experiment.name} {fraction:4.0%} {text}")
        if self.bar.disable and time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            for line in lines:
                self.console.print(line, highlight=False, soft_wrap=True)

    def _state(self, experiment: Experiment) -> tuple[float, str]:
        if not (self.out / "data" / experiment.name).exists():
            return 0.0, f"recording {experiment.demonstrations.episodes} demonstrations"
        log = read_log(self.out / experiment.name)
        if not log:
            return 0.0, "starting to train"
        last = log[-1]
        parts = [f"step {last['step']}"]
        if last.get("loss") is not None:
            parts.append(f"loss {last['loss']:.4f}")
        val = next((r["val_loss"] for r in reversed(log) if r.get("val_loss") is not None), None)
        if val is not None:
            parts.append(f"val {val:.4f}")
        if last.get("steps_per_second"):
            parts.append(f"{last['steps_per_second']:.1f} steps/s")
        left = 60 * experiment.train.minutes - last["seconds"]
        if experiment.train.minutes and left > 0:
            parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
        return experiment.train.fraction(last["step"], last["seconds"]), "  ".join(parts)
