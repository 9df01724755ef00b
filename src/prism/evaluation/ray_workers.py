"""WorkerPool's interface on a Ray cluster: a worker is an actor with one CPU, on whatever node has one free.

The same setup, the same jobs, one thread each: results are those of WorkerPool, bit for bit on equal machines. An
actor that dies, alone or with its node, is replaced and its job is run again elsewhere.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prism.errors import PrismError
from prism.evaluation.workers import HOPELESS, LostJobsError

if TYPE_CHECKING:
    from prism.policy import Policy

Job = TypeVar("Job")
Result = TypeVar("Result")


def connect() -> Any:
    """The module `ray`, connected: to RAY_ADDRESS or the cluster that runs on this machine, else to a new local one."""
    try:
        import ray
    except ImportError:
        raise PrismError("--ray needs Ray: pip install 'prism-policy[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            if os.environ.get("RAY_ADDRESS"):
                raise PrismError(f"no Ray cluster answers at RAY_ADDRESS {os.environ['RAY_ADDRESS']}") from error
            try:
                ray.init(address="local", include_dashboard=False, log_to_driver=False)
            except Exception as failure:  # Ray has no class of its own for this: a machine too busy, no shared memory
                reason = (str(failure).splitlines() or [""])[0]
                raise PrismError(f"Ray did not start on this machine ({reason}); try again, or without --ray") from None
    return ray


def cpus() -> int:
    """Of the whole cluster."""
    return max(1, int(connect().cluster_resources().get("CPU", 1)))


@dataclass(frozen=True)
class SentPolicy:
    """A checkpoint as bytes: nodes need not share a disk. Calling it loads the policy, verified as from a disk."""

    files: dict[str, bytes]

    @staticmethod
    def read(path: Path) -> SentPolicy:
        from prism.training.checkpoint import resolve
        from prism.training.files import CHECKSUMS

        folder = resolve(path)
        names = ("config.json", "model.safetensors", CHECKSUMS)
        return SentPolicy({name: (folder / name).read_bytes() for name in names})

    def __call__(self) -> Policy:
        from prism.training.checkpoint import load_policy

        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            return load_policy(Path(folder))


class _Worker:
    """In the actor: `setup` once, then jobs. PrismErrors come back as values: Ray would wrap them."""

    def __init__(self, setup: Callable[[], Callable[[Any], Any]]) -> None:
        self._setup: Callable[[], Callable[[Any], Any]] | None = setup
        self._run: Callable[[Any], Any] | None = None

    def do(self, job: Any) -> tuple[str, Any]:
        try:
            if self._run is None and self._setup is not None:
                self._run = self._setup()
                if (torch := sys.modules.get("torch")) is not None:
                    torch.set_num_threads(1)
            assert self._run is not None
            return "done", self._run(job)
        except PrismError as error:
            return "refused", str(error)


class RayPool(Generic[Job, Result]):
    """As prism.evaluation.workers.WorkerPool, which says what `run` promises."""

    def __init__(self, setup: Callable[[], Callable[[Job], Result]], workers: int, retries: int = 2) -> None:
        self.crashes: list[str] = []
        self._ray = connect()
        self._setup = self._ray.put(setup)
        self._workers = workers
        self._retries = retries
        self._idle: list[Any] = []

    def __enter__(self) -> RayPool[Job, Result]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)
        self._idle = []

    def run(self, jobs: Sequence[Job], on_done: Callable[[Result], None] | None = None) -> list[Result]:
        ray = self._ray
        results: dict[int, Result] = {}
        lost: dict[int, str] = {}
        attempts = [0] * len(jobs)
        pending = deque(range(len(jobs)))
        busy: dict[Any, tuple[Any, int]] = {}  # reference -> actor, job
        try:
            while len(results) + len(lost) < len(jobs):
                while pending and len(busy) < self._workers:
                    actor = self._idle.pop() if self._idle else self._start()
                    index = pending.popleft()
                    busy[actor.do.remote(jobs[index])] = actor, index
                for reference in ray.wait(list(busy), num_returns=1)[0]:
                    actor, index = busy.pop(reference)
                    try:
                        kind, value = ray.get(reference)
                    except ray.exceptions.RayError as error:  # the actor or its node is gone, or the job raised
                        ray.kill(actor)
                        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                        self.crashes.append(f"{jobs[index]}: {reason}")
                        attempts[index] += 1
                        if attempts[index] <= self._retries:
                            pending.appendleft(index)
                            continue
                        lost[index] = f"a worker died {attempts[index]} times at {jobs[index]}: {reason}"
                        if len(lost) >= HOPELESS and not results:
                            raise LostJobsError(results, lost) from None
                        continue
                    self._idle.append(actor)
                    if kind == "refused":
                        raise PrismError(value)
                    results[index] = value
                    if on_done is not None:
                        on_done(value)
        finally:  # an error, or Ctrl-C
            for actor, _ in busy.values():
                ray.kill(actor)
        if lost:
            raise LostJobsError(results, lost)
        return [results[index] for index in range(len(jobs))]

    def _start(self) -> Any:
        # One CPU also makes Ray set OMP_NUM_THREADS to 1 in the actor.
        return self._ray.remote(_Worker).options(num_cpus=1, max_restarts=0).remote(self._setup)
