"""Cells as processes of this machine, a few at a time; the death of one is no reason to end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from prism.runs.comparison import worker
from prism.runs.comparison.grid import RESULT, CellId, next_ready
from prism.runs.recipes import Experiment
from prism.training.monitor import read_log

RETRIES = 2  # of a cell whose process died
_POLL_SECONDS = 0.5
_BAR_SECONDS = 3.0  # between looks at the logs
_LINE_SECONDS = 60.0


@dataclass
class _Running:
    id: CellId
    folder: Path
    process: subprocess.Popen[bytes]
    row: TaskID


def run_local(
    out: Path, ids: Sequence[CellId], jobs: int, console: Console, on_done: Callable[[CellId], object]
) -> dict[CellId, str]:
    """Run the cells, in this order, `jobs` at a time, students after their teachers; the reasons of those that came to
    nothing.

    A cell that fails for a reason (NaN, full disk) is given up; one whose process dies is started again, and goes on
    from its last checkpoint.
    """
    pending, running = deque(ids), list[_Running]()
    attempts = dict.fromkeys(ids, 0)
    failed: dict[CellId, str] = {}
    board = _Board(console, len(ids))
    try:
        with board.bar:
            while pending or running:
                while len(running) < jobs:
                    if (id := next_ready(out, pending, [one.id for one in running])) is None:
                        break
                    pending.remove(id)
                    running.append(_start(out, id, board))
                time.sleep(_POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    state, reason = outcome(one.folder, one.process)
                    if state == "crashed":
                        attempts[one.id] += 1
                        if attempts[one.id] <= RETRIES:
                            board.say(f"{one.id}: {reason}; it goes on from its last checkpoint")
                            pending.appendleft(one.id)
                        else:
                            state, reason = "failed", f"its process died {attempts[one.id]} times: {reason}"
                            worker.write_failed(one.folder, reason)
                    if state == "failed":
                        failed[one.id] = reason
                        board.say(f"{one.id} failed: {reason}")
                    board.ended(one, finished=state != "crashed")
                    if state == "done":
                        on_done(one.id)
                board.update(running)
    finally:  # Ctrl-C: each saves what it has learnt
        for one in running:
            if one.process.stdin is not None:
                one.process.stdin.close()
        for one in running:
            one.process.wait()
            if one.process.stdout is not None:
                one.process.stdout.close()
    return failed


def _start(out: Path, id: CellId, board: _Board) -> _Running:
    folder = id.folder(out)
    process = launch(folder)
    return _Running(id, folder, process, board.started(id))


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches the comparison alone, which then tells it through the pipe."""
    with open(folder / worker.LOG, "ab") as log:
        return subprocess.Popen(
            worker.command(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker.environment(),
            start_new_session=True,
        )


def outcome(folder: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """done | failed | crashed, and why, of a process that has ended."""
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
    return ("failed" if code == worker.EXIT_FAILED else "crashed"), reason


class _Board:
    """A bar over all cells and one for each that runs; where there is no terminal, lines now and then."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._all = self.bar.add_task("compare", total=total, text="")
        self._looked = time.monotonic()
        self._experiments: dict[CellId, Experiment] = {}

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def started(self, id: CellId) -> TaskID:
        return self.bar.add_task(str(id), total=1.0, text="starting")

    def ended(self, one: _Running, finished: bool) -> None:
        self.bar.remove_task(one.row)
        self.finished += finished

    def update(self, running: Sequence[_Running]) -> None:
        self.bar.update(self._all, completed=self.finished, text=f"{self.finished} of {self.total} cells")
        if time.monotonic() - self._looked < (_LINE_SECONDS if self.bar.disable else _BAR_SECONDS):
            return
        self._looked = time.monotonic()
        states = [(one, *self._state(one)) for one in running]
        for one, fraction, text in states:
            self.bar.update(one.row, completed=fraction, text=text)
        if self.bar.disable:
            now = "; ".join(f"{one.id} {fraction:.0%} {text}" for one, fraction, text in states)
            self.say(f"{self.finished} of {self.total} cells are over. {now}")

    def _state(self, one: _Running) -> tuple[float, str]:
        if one.id not in self._experiments:
            self._experiments[one.id] = Experiment.load(one.folder)
        log = read_log(one.folder)
        if not log:
            return 0.0, "starting"
        last = log[-1]
        fraction = self._experiments[one.id].train.fraction(last["step"], last["seconds"])
        loss = f"  loss {last['loss']:.4f}" if last.get("loss") is not None else ""
        return fraction, f"step {last['step']}{loss}" if fraction < 1 else "evaluating"
