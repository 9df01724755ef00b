"""WorkerPool's interface on a Ray cluster: a worker is an actor with one CPU, on whatever node has one free.

The same setup, the same jobs, one thread each: results are those of WorkerPool, bit for bit on equal machines. An
actor that dies, alone or with its node, is replaced and its job is run again elsewhere. The node of the command itself
must stay: it holds the results.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prism.errors import PrismError
from prism.rollout.pool import HOPELESS, LostJobsError

if TYPE_CHECKING:
    from prism.policy import Policy

Job = TypeVar("Job")
Result = TypeVar("Result")

LOSSES = 10  # nodes that a job may lose beside its crashes; workers in a row that may fail to start
PATIENCE = 600.0  # seconds that a cluster may be without any processor
LOST_NODE = "its node was lost, or does not answer"
_LOOK_SECONDS = 5.0


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


class NoProcessorsError(PrismError):
    """No node is left, and none came."""


class Processors:
    """Waits for Ray, but not for a cluster without a processor: PATIENCE seconds for new nodes, then an error."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._gone: float | None = None  # since when

    def wait(self, references: list[Any], timeout: float = _LOOK_SECONDS) -> list[Any]:
        """Those that are ready, at least one of them; none of them after `timeout` seconds."""
        ready: list[Any] = self._ray.wait(references, num_returns=1, timeout=timeout)[0]
        if ready or self._ray.cluster_resources().get("CPU", 0) >= 1:
            self._gone = None
        elif self._gone is None:
            self._gone = time.monotonic()
        elif time.monotonic() - self._gone > PATIENCE:
            raise NoProcessorsError(
                f"the Ray cluster has had no processor for {PATIENCE / 60:g} minutes: add a node (ray start "
                "--address=...), then run the same command again"
            )
        return ready


def is_node_loss(ray: Any, error: Exception, home: str = "") -> bool:
    """Whether a worker went with its node, or fell silent, rather than by what it did. `home`: the node's id."""
    kinds = (ray.exceptions.NodeDiedError, ray.exceptions.ActorUnavailableError)
    return isinstance(error, kinds) or any(node["NodeID"] == home and not node["Alive"] for node in ray.nodes())


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True)
class SentPolicy:
    """A checkpoint as bytes: nodes need not share a disk. Calling it loads the policy, verified as from a disk."""

    files: dict[str, bytes]

    @staticmethod
    def read(path: Path) -> SentPolicy:
        from prism.io.files import CHECKSUMS
        from prism.training.checkpoint import resolve

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

    def where(self) -> str:
        """The answer is the sign that the actor has found a place."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

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


@dataclass(frozen=True)
class _Hired:
    actor: Any
    node: str  # its id


class RayPool(Generic[Job, Result]):
    """As prism.rollout.pool.WorkerPool, which says what `run` promises.

    A job is given to an actor that answers, never to one that Ray still seeks a place for: when a node is lost, the
    others take over its jobs. The loss of a node is not the fault of the job, which has LOSSES further trials then.
    """

    def __init__(self, setup: Callable[[], Callable[[Job], Result]], workers: int, retries: int = 2) -> None:
        self.crashes: list[str] = []
        self._ray = connect()
        self._setup = self._ray.put(setup)
        self._workers = workers
        self._retries = retries
        self._starting: dict[Any, Any] = {}  # reference of its first answer -> actor
        self._idle: list[_Hired] = []
        self._stillborn = 0  # actors in a row that died before they answered

    def __enter__(self) -> RayPool[Job, Result]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for actor in (*self._starting.values(), *(one.actor for one in self._idle)):
            self._ray.kill(actor)
        self._starting, self._idle = {}, []

    def run(self, jobs: Sequence[Job], on_done: Callable[[Result], None] | None = None) -> list[Result]:
        ray = self._ray
        results: dict[int, Result] = {}
        lost: dict[int, str] = {}
        crashes, losses = [0] * len(jobs), [0] * len(jobs)
        pending = deque(range(len(jobs)))
        busy: dict[Any, tuple[_Hired, int]] = {}  # reference -> who does which job
        processors = Processors(ray)
        try:
            while len(results) + len(lost) < len(jobs):
                while pending and self._idle:
                    one, index = self._idle.pop(), pending.popleft()
                    busy[one.actor.do.remote(jobs[index])] = one, index
                while len(pending) > len(self._starting) and len(busy) + len(self._starting) < self._workers:
                    self._start()
                for reference in processors.wait([*busy, *self._starting]):
                    if reference in self._starting:
                        self._welcome(reference)
                        continue
                    one, index = busy.pop(reference)
                    try:
                        kind, value = ray.get(reference)
                    except ray.exceptions.RayError as error:  # the actor or its node is gone, or the job raised
                        ray.kill(one.actor)
                        if is_node_loss(ray, error, one.node):
                            reason, count = LOST_NODE, losses
                            self._idle = [other for other in self._idle if other.node != one.node]
                        else:
                            reason, count = last_line(error), crashes
                        self.crashes.append(f"{jobs[index]}: {reason}")
                        count[index] += 1
                        if crashes[index] <= self._retries and losses[index] <= LOSSES:
                            pending.appendleft(index)
                            continue
                        times = crashes[index] + losses[index]
                        lost[index] = f"a worker died {times} times at {jobs[index]}: {reason}"
                        if len(lost) >= HOPELESS and not results:
                            raise LostJobsError(results, lost) from None
                        continue
                    self._idle.append(one)
                    if kind == "refused":
                        raise PrismError(value)
                    results[index] = value
                    if on_done is not None:
                        on_done(value)
        except NoProcessorsError as error:
            raise LostJobsError(results, {i: str(error) for i in range(len(jobs)) if i not in results}) from None
        finally:  # an error, or Ctrl-C
            for one, _ in busy.values():
                ray.kill(one.actor)
        if lost:
            raise LostJobsError(results, lost)
        return [results[index] for index in range(len(jobs))]

    def _start(self) -> None:
        # One CPU also makes Ray set OMP_NUM_THREADS to 1 in the actor.
        actor = self._ray.remote(_Worker).options(num_cpus=1, max_restarts=0).remote(self._setup)
        self._starting[actor.where.remote()] = actor

    def _welcome(self, reference: Any) -> None:
        """An actor has answered: it has work now. Or it died before it could, with its node or of what it lacks."""
        actor = self._starting.pop(reference)
        try:
            node = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._stillborn += 1
            if self._stillborn > LOSSES:
                raise PrismError(
                    f"{self._stillborn} workers in a row did not start on the Ray cluster ({last_line(error)}); "
                    "every node needs the same prism as this machine"
                ) from None
            return
        self._stillborn = 0
        self._idle.append(_Hired(actor, node))
