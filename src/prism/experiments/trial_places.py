"""The place where trials run: this machine, or a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from prism.evaluation.ray_workers import LOST_NODE, Processors, connect, is_node_loss, last_line
from prism.experiments.trial import EXIT_FAILED, LOG, RESULT, spec_file

_POLL_SECONDS = 0.5


class Places(Protocol):
    """A place where the processes of trials run."""

    def start(self, name: str, folder: Path) -> None: ...
    def ended(self) -> list[tuple[str, str, str]]: ...  # after a while: name, done | failed | crashed | lost, why
    def stop(self) -> None: ...  # each saves and ends


class Processes:
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


class Cluster:
    """A Ray cluster. The folder has to be visible to every node (a shared disk).

    A task starts the same process as on this machine. When its node is lost, the trial is started again on another and
    continues from the checkpoint on the shared disk.
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
    """On a node: the trial's process, until it ends. When this task is killed, the pipe closes and the trial saves."""
    path = Path(folder)
    if not spec_file(path).is_file():
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
    """The process of a trial: one thread, in a session of its own, so that Ctrl-C reaches the caller alone.

    Its standard input is a pipe that the caller holds open. When the caller ends, the process saves and ends too."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read only when libraries are loaded
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "prism.experiments.trial_process",
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
