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
from typing import TYPE_CHECKING, Any

from prism.errors import PrismError
from prism.evaluation.workers import LOSSES, Job, NoWorkersError, Pool, Result

if TYPE_CHECKING:
    from prism.policy import Policy

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
            raise NoWorkersError(
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
        from prism.io.old_keys import EXPERIMENT, experiment_of
        from prism.training.checkpoint import resolve

        folder = resolve(path)
        found = {name: folder / name for name in ("config.json", "model.safetensors", CHECKSUMS)}
        if (experiment := experiment_of(folder)) is not None:  # policies of earlier versions do not say all themselves
            found[EXPERIMENT] = experiment
        return SentPolicy({name: file.read_bytes() for name, file in found.items()})

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


class RayPool(Pool[Job, Result]):
    """Actors of a Ray cluster.

    A job is given to an actor that answers, never to one that Ray still seeks a place for: when a node is lost, the
    others take over its jobs. The loss of a node is not the fault of the job, which has LOSSES further trials then.
    """

    def __init__(self, setup: Callable[[], Callable[[Job], Result]], workers: int = 1, retries: int = 2) -> None:
        super().__init__(setup, workers, retries)
        self._ray = connect()
        self._sent = self._ray.put(setup)
        self._starting: dict[Any, Any] = {}  # reference of its first answer -> actor
        self._idle: list[_Hired] = []
        self._busy: dict[Any, tuple[_Hired, int]] = {}  # reference -> who does which job
        self._stillborn = 0  # actors in a row that died before they answered
        self._processors = Processors(self._ray)

    def close(self) -> None:
        hired = (*self._idle, *(one for one, _ in self._busy.values()))
        for actor in (*self._starting.values(), *(one.actor for one in hired)):
            self._ray.kill(actor)
        self._starting, self._idle, self._busy = {}, [], {}

    def _assign(self, pending: deque[int], jobs: Sequence[Job]) -> None:
        while pending and self._idle:
            one, job = self._idle.pop(), pending.popleft()
            self._busy[one.actor.do.remote(jobs[job])] = one, job
        while len(pending) > len(self._starting) and len(self._busy) + len(self._starting) < self._workers:
            self._start()

    def _ended(self) -> list[tuple[int, str, Any]]:
        ended = []
        for reference in self._processors.wait([*self._busy, *self._starting]):
            if reference in self._starting:
                self._welcome(reference)
                continue
            one, job = self._busy.pop(reference)
            try:
                how, value = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:  # the actor or its node is gone, or the job raised
                self._ray.kill(one.actor)
                how, value = "crashed", last_line(error)
                if is_node_loss(self._ray, error, one.node):
                    how, value = "lost", LOST_NODE
                    self._idle = [other for other in self._idle if other.node != one.node]
            else:
                self._idle.append(one)
            if how == "refused":
                raise PrismError(value)
            ended.append((job, how, value))
        return ended

    def _start(self) -> None:
        # One CPU also makes Ray set OMP_NUM_THREADS to 1 in the actor.
        actor = self._ray.remote(_Worker).options(num_cpus=1, max_restarts=0).remote(self._sent)
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
