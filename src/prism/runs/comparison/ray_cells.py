"""Cells as tasks of a Ray cluster. The folder of the comparison has to be visible to every node (a shared disk).

A task starts the same process as local.py, so a cell is the same anywhere. When its node is lost, the cell is started
again on another and goes on from the checkpoint on the shared disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.rollout.ray_pool import LOSSES, LOST_NODE, Processors, connect, is_node_loss, last_line
from prism.runs.comparison.grid import CELL, CellId, next_ready
from prism.runs.comparison.local import RETRIES, launch, outcome
from prism.runs.comparison.worker import write_failed
from prism.training.monitor import read_log

_LINE_SECONDS = 60.0


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


def _progress(out: Path, over: int, total: int, running: Iterable[CellId]) -> str:
    """How far the cells are, by their logs; Ray has not found a place yet for those that have none."""
    steps = {id: log[-1]["step"] for id in running if (log := read_log(id.folder(out)))}
    return f"{over} of {total} cells are over. " + "; ".join(f"{id} step {step}" for id, step in steps.items())


def run_on_ray(
    out: Path, ids: Sequence[CellId], jobs: int, console: Console, on_done: Callable[[CellId], object]
) -> dict[CellId, str]:
    """As local.run_local; `jobs` 0: as many as the cluster has CPUs."""
    ray = connect()
    task: Any = ray.remote(_work).options(num_cpus=1, max_retries=0)
    pending, running = deque(ids), dict[Any, CellId]()
    attempts, losses = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
    failed: dict[CellId, str] = {}
    processors, told = Processors(ray), time.monotonic()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    try:
        while pending or running:
            while not jobs or len(running) < jobs:
                if (ready := next_ready(out, pending, running.values())) is None:
                    break
                id = ready
                pending.remove(id)
                running[task.remote(str(id.folder(out).resolve()))] = id
            if time.monotonic() - told > _LINE_SECONDS:
                told = time.monotonic()
                say(_progress(out, len(ids) - len(pending) - len(running), len(ids), running.values()))
            for reference in processors.wait(list(running)):
                id = running.pop(reference)
                try:
                    state, reason = ray.get(reference)
                except ray.exceptions.RayError as error:
                    node = is_node_loss(ray, error)
                    state, reason = ("lost", LOST_NODE) if node else ("crashed", last_line(error))
                if state in ("crashed", "lost"):
                    attempts[id] += state == "crashed"
                    losses[id] += state == "lost"
                    if attempts[id] <= RETRIES and losses[id] <= LOSSES:
                        say(f"{id}: {reason}; it goes on from its last checkpoint")
                        pending.appendleft(id)
                        continue
                    state, reason = "failed", f"its process died {attempts[id] + losses[id]} times: {reason}"
                    write_failed(id.folder(out), reason)
                if state == "failed":
                    failed[id] = reason
                    say(f"{id} failed: {reason}")
                else:
                    on_done(id)
                    say(f"{id} is done; {len(pending) + len(running)} of {len(ids)} to go")
    finally:  # Ctrl-C: each saves what it has learnt
        for reference in running:
            ray.cancel(reference)
    return failed
