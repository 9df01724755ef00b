"""A small pool of processes that survives the death of its members.

A simulator can take its process down (a segmentation fault, the out-of-memory killer), and
concurrent.futures gives up the whole pool then. Here the dead worker is replaced, its job is run again,
and the caller learns of it. A job that keeps dying is given up, alone: the others are finished first.
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Self, TypeVar

from prism.errors import PrismError
from prism.io.processes import WORKERS

HOPELESS = 2  # jobs given up before any was done: it is not the jobs
LOSSES = 10  # nodes that a job may lose beside its crashes; workers in a row that may fail to start

Job = TypeVar("Job")
Result = TypeVar("Result")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class _Slot:
    process: SpawnProcess
    connection: Connection
    job: int | None = None


class LostJobsError(PrismError):
    """Jobs that were given up, after everything else was done."""

    def __init__(self, results: Mapping[int, Any], lost: Mapping[int, str]) -> None:
        first, *more = lost.values()
        super().__init__(first + (f" (and {len(more)} more)" if more else ""))
        self.results = dict(results)  # by the number of the job
        self.lost = dict(lost)  # the reason, by the number of the job


class NoWorkersError(PrismError):
    """There is no place for a worker, and none came."""


class Pool(ABC, Generic[Job, Result]):
    """`setup` (picklable) runs once in each worker and returns the function that does a job.

    Workers start when there is work and stay until `close`; use it as a context manager.
    """

    def __init__(self, setup: Callable[[], Callable[[Job], Result]], workers: int = 1, retries: int = 2) -> None:
        self.crashes: list[str] = []  # a line for each worker that died
        self._setup = setup
        self._workers = workers
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End every worker; the next `run` starts new ones."""

    @abstractmethod
    def _assign(self, pending: deque[int], jobs: Sequence[Job]) -> None:
        """Give waiting jobs, by number, to workers that are free."""

    @abstractmethod
    def _ended(self) -> list[tuple[int, str, Any]]:
        """Wait; then (job, done | crashed | lost, result or reason). "lost" is a death by no fault of the job."""

    def run(self, jobs: Sequence[Job], on_done: Callable[[Result], None] | None = None) -> list[Result]:
        """Results in the order of `jobs`.

        A job that raises PrismError stops everything with that error: running it again would not help. Any other
        exception, or the death of the process, is a crash; after `retries` repetitions of the same job it is given
        up, the others are done, and LostJobsError carries their results. Where nothing succeeds, the rest of the
        jobs is not tried. An error, and Ctrl-C, ends the workers before it is passed on.
        """
        results: dict[int, Result] = {}
        lost: dict[int, str] = {}
        deaths = {"crashed": Counter[int](), "lost": Counter[int]()}
        pending = deque(range(len(jobs)))
        try:
            while len(results) + len(lost) < len(jobs):
                self._assign(pending, jobs)
                for job, how, value in self._ended():
                    if how == "done":
                        results[job] = value
                        if on_done is not None:
                            on_done(value)
                        continue
                    self.crashes.append(f"{jobs[job]}: {value}")
                    deaths[how][job] += 1
                    crashes, losses = deaths["crashed"][job], deaths["lost"][job]
                    if crashes <= self._retries and losses <= LOSSES:
                        pending.appendleft(job)
                        continue
                    lost[job] = f"a worker died {crashes + losses} times at {jobs[job]}: {value}"
                    if len(lost) >= HOPELESS and not results:
                        raise LostJobsError(results, lost)
        except NoWorkersError as error:
            self.close()
            raise LostJobsError(results, {i: str(error) for i in range(len(jobs)) if i not in results}) from None
        except BaseException:
            self.close()
            raise
        if lost:
            raise LostJobsError(results, lost)
        return [results[job] for job in range(len(jobs))]


class Inline(Pool[Job, Result]):
    """No workers: the jobs are done in this process, one after the other; its death is the caller's."""

    _do: Callable[[Job], Result] | None = None

    def close(self) -> None:
        if (close := getattr(self._do, "close", None)) is not None:
            close()
        self._do = None

    def _assign(self, pending: deque[int], jobs: Sequence[Job]) -> None:
        self._next = pending[0], jobs[pending.popleft()]

    def _ended(self) -> list[tuple[int, str, Any]]:
        self._do = self._do or self._setup()
        number, job = self._next
        return [(number, "done", self._do(job))]


class WorkerPool(Pool[Job, Result]):
    """Processes of this machine, one thread each."""

    def __init__(self, setup: Callable[[], Callable[[Job], Result]], workers: int = 1, retries: int = 2) -> None:
        super().__init__(setup, workers, retries)
        self._slots: list[_Slot] = []

    def close(self) -> None:
        for slot in self._slots:
            _stop(slot)
        self._slots = []

    def _assign(self, pending: deque[int], jobs: Sequence[Job]) -> None:
        while pending and len(self._slots) < min(self._workers, len(jobs)):
            self._slots.append(_start(self._setup))
        for slot in self._slots:
            if slot.job is None and pending:
                slot.job = pending.popleft()
                _send(slot.connection, jobs[slot.job])

    def _ended(self) -> list[tuple[int, str, Any]]:
        ended = []
        ready = wait([slot.connection for slot in self._slots])
        for slot in [slot for slot in self._slots if slot.connection in ready]:
            how, value = _receive(slot)
            if how == "refused":
                raise PrismError(value)
            if slot.job is not None:
                ended.append((slot.job, how, value))
            if how == "done":
                slot.job = None
            else:  # a new one starts when there is work
                self._slots.remove(slot)
                _stop(slot)
        return ended


def _start(setup: Callable[[], Callable[[Job], Result]]) -> _Slot:
    ours, theirs = WORKERS.Pipe()
    process = WORKERS.Process(target=_work, args=(theirs, setup), daemon=True)
    saved = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # read by the child when it imports numpy
    try:
        process.start()
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    theirs.close()  # so that the death of the child is an end of file here
    return _Slot(process, ours)


def _send(connection: Connection, message: object) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):  # already dead: the end of file tells us in a moment
        return


def _receive(slot: _Slot) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = slot.connection.recv()
        return message
    except (EOFError, OSError):
        slot.process.join(timeout=30)
        code = slot.process.exitcode
        reason = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return "crashed", f"the process ended with {reason}"


def _stop(slot: _Slot) -> None:
    slot.connection.close()
    if slot.process.is_alive():
        slot.process.terminate()
        slot.process.join(timeout=2)
    if slot.process.is_alive():
        slot.process.kill()
        slot.process.join()


def _work(connection: Connection, setup: Callable[[], Callable[[Any], Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, for all of us
    try:
        run = setup()
        if (torch := sys.modules.get("torch")) is not None:  # what it was linked with may not read the variables
            torch.set_num_threads(1)
        while True:
            try:
                job = connection.recv()
            except (EOFError, OSError):  # the parent is gone
                return
            connection.send(("done", run(job)))
    except PrismError as error:
        _send(connection, ("refused", str(error)))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]  # people get one line
        _send(connection, ("crashed", f"{type(error).__name__}: {reason}"))
