"""A grid of cells that goes on after being killed at any moment: comparisons, the demo, studies, benchmark tables.

OUT/cells/NAME/        a cell; NAME may have slashes: pusht/prism/seed-0
    cell.json          its spec: everything that determines the result
    result.json        there when the cell is done, written whole or not at all
    failed.json        why it is not
    output.txt         what its process printed

`Grid.run` starts a process for each cell (experiments/cell.py), here or on a Ray cluster. A cell that is done is never
computed again, and one with another spec is an error, not a surprise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import TaskID

from prism.data import EpisodeSource
from prism.errors import PrismError
from prism.evaluation.ray_workers import LOST_NODE, Processors, connect, is_node_loss, last_line
from prism.evaluation.workers import LOSSES
from prism.experiments.recipes import Experiment
from prism.io import files
from prism.io.progress import short_bar
from prism.training.log import read_log

CELL, RESULT, FAILED, LOG, DATA = "cell.json", "result.json", "failed.json", "output.txt", "data.json"
REMEDY = "remove it, and run the same command again"  # where a file of a cell is damaged
RETRIES = 2  # of a cell whose process died
EXIT_FAILED, EXIT_STOPPED = 2, 130
_POLL_SECONDS = 0.5
_BAR_SECONDS = 3.0  # between looks at the logs

State = Literal["done", "failed", "open"]
Cell = Mapping[str, Any]  # a result.json


def state_of(folder: Path) -> tuple[State, str]:
    """What is on disk: done, failed (and why; also a file that cannot be read), or still to do. Writes nothing."""
    for name, state in ((RESULT, "done"), (FAILED, "failed")):
        if (folder / name).is_file():
            try:
                reason = str(files.read_json(folder / name, REMEDY).get("reason", "no reason given"))
            except PrismError as error:
                return "failed", str(error)
            return ("done", "") if state == "done" else ("failed", reason)
    return "open", "not finished yet" if (folder / LOG).exists() else "not started yet"


def write_failed(folder: Path, reason: str) -> None:
    """For whoever looks at the folder later; a disk that is full does not take it, and the caller has heard it."""
    with suppress(OSError):
        files.replace_file(folder / FAILED, files.encode_json({"reason": reason}))


def commits_of(cells: Iterable[Cell]) -> list[str]:
    """Of the code: "A + B" where a training went on with another version, "A, played by B" where that evaluated it."""
    found = set()
    for cell in cells:
        origins = (cell.get("trained_by") or cell["info"], cell["info"])
        trained, played = (str(one.get("commit", "unknown")) for one in origins)
        found.add(trained if trained.split(" + ")[-1] == played else f"{trained}, played by {played}")
    return sorted(found)


def several_versions(commits: Sequence[str]) -> str:
    """A line where the cells are of several versions of prism."""
    several = len(commits) > 1 or any("+" in commit for commit in commits)
    return f"the cells are of several versions of prism: {'; '.join(commits)}" * several


def refuse_other(folder: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """PrismError that names the settings in which what is in a folder differs from what is asked for now."""
    before, now = _flat(there), _flat(asked)
    if different := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        changes = ", ".join(f"{key} = {before.get(key)} there, {now.get(key)} now" for key in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise PrismError(f"{folder} was made with other settings ({changes}{more}): give the same, or another folder")


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping):
        return {key: value for k, v in data.items() for key, value in _flat(v, f"{path}.{k}" if path else k).items()}
    return {path: list(data) if isinstance(data, tuple) else data}  # as JSON has it


def next_ready(pending: Sequence[str], running: Collection[str], after: Mapping[str, str]) -> str | None:
    """The first cell that can start: one that waits for none of the others."""
    busy = {*pending, *running}
    return next((name for name in pending if after.get(name) not in busy), None)


class Grid:
    """The cells of one study, comparison or demo, in the folder `out`."""

    def __init__(
        self, out: Path, console: Console | None = None, cells: str = "cells", line_seconds: float = 60.0
    ) -> None:
        self._cells = out / cells
        self.console = console or Console(stderr=True)
        self._line_seconds = line_seconds  # between lines where there is no terminal

    def folder(self, name: str) -> Path:
        return self._cells / name

    def finished(self) -> dict[str, Cell]:
        """The cells of a comparison that are done, by name: also those that nobody asks for now."""
        found = {"/".join(file.parts[-4:-1]): file for file in sorted(self._cells.glob(f"*/*/seed-*/{RESULT}"))}
        return {name: files.read_json(file) for name, file in found.items() if state_of(file.parent)[0] == "done"}

    def check_data(self, name: str, source: EpisodeSource, keep: bool = True) -> None:
        """PrismError where the cells below NAME had another dataset, or a smaller one; `keep`: note the first one."""
        now, path = {"episodes": len(source.lengths), "steps": int(source.lengths.sum())}, self.folder(name) / DATA
        if keep and not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace_file(path, files.encode_json(now))
        refuse_other(path.parent, files.read_json(path, REMEDY) if path.is_file() else now, now)

    def run(
        self,
        names: Sequence[str],
        jobs: int,
        on_done: Callable[[str], object] = lambda name: None,
        after: Mapping[str, str] | None = None,
        ray: bool = False,
    ) -> dict[str, str]:
        """Run prepared cells in this order, `jobs` at a time (0: all that find a processor), each in a process of its
        own; the reasons of those that came to nothing. `after`: which cell waits for which other one.

        A cell that fails for a reason (NaN, full disk) is given up; one whose process dies is started again, and goes
        on from its last checkpoint. Ctrl-C: each saves what it has learnt.
        """
        pending, running = deque(names), list[str]()
        deaths, losses = Counter[str](), Counter[str]()
        failed: dict[str, str] = {}
        places: _Places = _Cluster() if ray else _Processes()
        board = _Board(self, len(names))
        with board.bar:
            try:
                while pending or running:
                    while len(running) < (jobs or len(names)):
                        if (name := next_ready(pending, running, after or {})) is None:
                            break
                        pending.remove(name)
                        running.append(name)
                        places.start(name, self.folder(name))
                    for name, state, reason in places.ended():
                        running.remove(name)
                        deaths[name] += state == "crashed"
                        losses[name] += state == "lost"
                        if state in ("crashed", "lost"):
                            if deaths[name] <= RETRIES and losses[name] <= LOSSES:
                                self.say(f"{name}: {reason}; it goes on from its last checkpoint")
                                pending.appendleft(name)
                                continue
                            reason = f"its process died {deaths[name] + losses[name]} times: {reason}"
                            write_failed(self.folder(name), reason)
                        if state == "done":
                            on_done(name)
                        else:
                            failed[name] = reason
                            self.say(f"{name} failed: {reason}")
                    board.update(running, len(names) - len(pending) - len(running))
            finally:
                places.stop()
        return failed

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Places(Protocol):
    """Where processes of cells run."""

    def start(self, name: str, folder: Path) -> None: ...
    def ended(self) -> list[tuple[str, str, str]]: ...  # after a while: name, done | failed | crashed | lost, why
    def stop(self) -> None: ...  # each saves and ends


class _Processes:
    """This machine."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}

    def start(self, name: str, folder: Path) -> None:
        self._running[name] = folder, launch(folder)

    def ended(self) -> list[tuple[str, str, str]]:
        time.sleep(_POLL_SECONDS)
        over = [name for name, (_, process) in self._running.items() if process.poll() is not None]
        return [(name, *outcome(*self._running.pop(name))) for name in over]

    def stop(self) -> None:
        for _, process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
        for _, process in self._running.values():
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class _Cluster:
    """A Ray cluster. The grid's folder has to be visible to every node (a shared disk).

    A task starts the same process as on this machine. When its node is lost, the cell is started again on another and
    goes on from the checkpoint on the shared disk.
    """

    def __init__(self) -> None:
        self._ray = connect()
        self._task: Any = self._ray.remote(_work).options(num_cpus=1, max_retries=0)
        self._running: dict[Any, str] = {}
        self._processors = Processors(self._ray)

    def start(self, name: str, folder: Path) -> None:
        self._running[self._task.remote(str(folder.resolve()))] = name

    def ended(self) -> list[tuple[str, str, str]]:
        return [self._outcome(reference) for reference in self._processors.wait(list(self._running))]

    def _outcome(self, reference: Any) -> tuple[str, str, str]:
        name = self._running.pop(reference)
        try:
            return name, *self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lost = is_node_loss(self._ray, error)
            return (name, "lost", LOST_NODE) if lost else (name, "crashed", last_line(error))

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)


def _work(folder: str) -> tuple[str, str]:
    """On a node: the cell's process, until it ends. When this task is killed, the pipe closes and the cell saves."""
    path = Path(folder)
    if not (path / CELL).is_file():
        return "failed", f"{path} is not there on this node: --out must be on a disk that all nodes share"
    process = launch(path)
    try:
        process.wait()
    except BaseException:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
        raise
    return outcome(path, process)


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """The process of a cell: one thread, in a session of its own, so that Ctrl-C reaches the caller alone. Its standard
    input is a pipe that the caller holds open: when that ends, however it ends, the process saves and ends too."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read only when libraries are loaded
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "prism.experiments.cell",
                "prism compare",
                str(folder),
            ],  # its title: pgrep -f finds it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **dict.fromkeys(names, "1")},
            start_new_session=True,
        )


def outcome(folder: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """done | failed | crashed, and why, of a process that has ended; its last line of output says it in JSON."""
    said = b""
    if process.stdout is not None:
        said = process.stdout.read()
        process.stdout.close()
    if process.stdin is not None:
        process.stdin.close()
    code = process.returncode
    if (folder / RESULT).is_file():
        return "done", ""
    try:
        message = json.loads(said.splitlines()[-1])
        reason = str(message["reason"]) or f"its process ended with status {code}"
    except (ValueError, IndexError, KeyError, TypeError):
        reason = f"its process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"
    return ("failed" if code == EXIT_FAILED else "crashed"), reason


class _Board:
    """A bar over all cells and one for each that runs; where there is no terminal, lines now and then."""

    def __init__(self, grid: Grid, total: int) -> None:
        self._grid, self._total = grid, total
        self.bar = short_bar(grid.console)
        self._all = self.bar.add_task("all", total=total, text="")
        self._rows: dict[str, TaskID] = {}
        self._looked = time.monotonic()

    def update(self, running: Sequence[str], over: int) -> None:
        for name in [name for name in self._rows if name not in running]:
            self.bar.remove_task(self._rows.pop(name))
        for name in [name for name in running if name not in self._rows]:
            self._rows[name] = self.bar.add_task(name, total=1.0, text="starting")
        self.bar.update(self._all, completed=over, text=f"{over} of {self._total} cells")
        if time.monotonic() - self._looked < (self._grid._line_seconds if self.bar.disable else _BAR_SECONDS):
            return
        self._looked = time.monotonic()
        states = [(name, *progress_of(self._grid.folder(name))) for name in running]
        for name, fraction, text in states:
            self.bar.update(self._rows[name], completed=fraction, text=text)
        if self.bar.disable:
            now = "; ".join(f"{name} {fraction:.0%} {text}" for name, fraction, text in states)
            self._grid.say(f"{over} of {self._total} cells are over. {now}")


EVALUATE = "evaluate: "  # begins a cell's lines while it plays


def progress_of(folder: Path) -> tuple[float, str]:
    """How far the training of a cell is, from what its process leaves on disk: the fraction, and a few words."""
    log = read_log(folder)
    lines = (folder / LOG).read_text(errors="replace").strip().splitlines() if (folder / LOG).exists() else []
    said = lines[-1][:80] if lines else "starting"
    if not log:
        return 0.0, said
    train, last = Experiment.load(folder).train, log[-1]
    fraction = train.fraction(last["step"], last["seconds"])
    if said.startswith(EVALUATE):
        return min(fraction, 1.0), said
    parts = [f"step {last['step']}"]
    if last.get("loss") is not None:
        parts.append(f"loss {last['loss']:.4f}")
    if (val := next((r["val_loss"] for r in reversed(log) if r.get("val_loss") is not None), None)) is not None:
        parts.append(f"val {val:.4f}")
    if train.minutes:
        left = max(0, int(60 * train.minutes - last["seconds"]))
        parts.append(f"{left // 60}:{left % 60:02d} left")
    return fraction, "  ".join(parts)
