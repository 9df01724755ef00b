"""Encoding and planning beside the control loop: a few worker threads ("lanes"), one core each.

Jobs are ordered by the observation they belong to, and within it sensors before the plan, the costliest sensor first:

    observation t:   [rgb_static][plan, if one was asked for at t]
                     [rgb_wrist][tactile][depth]...[observation t + 1 ...

so a plan starts as soon as its last token is there, on one lane, while the others go on with the frames that arrive
meanwhile. ONNX Runtime and PyTorch leave Python's lock while they compute: threads are enough.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prism.errors import PrismError
from prism.serve.async_control import PlanResult, keep_latest
from prism.serve.backends import Backend
from prism.serve.runtime import Runtime, Step, StepEncoder, plan

Array = NDArray[np.generic]
_STOP = float("inf")
_NICE = 5  # added to what the lanes let others have: the loop that gives actions never queues behind a convolution
_KEEN = -10  # beside a real-time loop: a lane that is pushed aside while it holds Python's lock would hold the loop up
logger = logging.getLogger("prism.runtime")


@contextlib.contextmanager
def steady(realtime: bool = False) -> Iterator[None]:
    """Around a control loop: no pause of Python's own making, and with `realtime` none of other programs'.

    Its cyclic garbage collector looks through every object of torch and onnxruntime when it likes to, for tens of
    milliseconds; what exists now is left out of that, and nothing is collected until the loop ends. Python's lock is
    handed over after 0.5 ms instead of 5.

    `realtime` puts the calling thread, and no thread that it starts, before all ordinary ones (Linux, SCHED_RR), where
    the system allows that (root, or `ulimit -r`); `is_realtime` tells. For a loop that sleeps between its actions.
    """
    switch, collecting = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(5e-4)
    raised = realtime and not is_realtime() and _take_precedence()
    try:
        yield
    finally:
        if raised:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        sys.setswitchinterval(switch)
        gc.unfreeze()
        if collecting:
            gc.enable()


def is_realtime() -> bool:
    """Whether the calling thread goes before all ordinary ones."""
    if not hasattr(os, "sched_getscheduler"):
        return False
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_FIFO, os.SCHED_RR)


def _take_precedence() -> bool:
    if not hasattr(os, "sched_setscheduler"):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:  # not allowed here: the loop runs as any other
        return False
    return True


@dataclass
class _Pending:
    """An observation on its way to a token."""

    number: int
    arrived: float
    streams: Mapping[str, Array]
    present: Mapping[str, bool]
    features: list[Tensor | None]
    left: int
    step: Step | None = None
    error: str | None = None
    done: bool = False


@dataclass(frozen=True)
class _Request:
    ticket: int
    at: float
    window: tuple[_Pending, ...]
    candidates: int
    rng: torch.Generator


@dataclass
class LaneStatistics:
    """Counts since the last reset; times in seconds, one entry an observation or plan."""

    frames: int = 0  # readings of present image sensors that arrived
    frames_encoded: int = 0
    steps: int = 0
    steps_dropped: int = 0
    backlog: int = 0  # the most observations that waited at once
    busy: float = 0.0  # thread-seconds of all lanes
    encode_seconds: list[float] = field(default_factory=list)  # arrival -> token
    plan_seconds: list[float] = field(default_factory=list)  # the plan's own computation


class LanePlanner:
    """The planner of an AsyncController: takes every observation at once, gives plans when they are ready.

    `max_backlog`: observations that may wait; beyond it a new one is dropped, counted and told, because a queue that
    grows for ever ends with plans from the past; the one before stands in for it. Close it, or use it as a context
    manager.
    """

    def __init__(
        self, backend: Backend, lanes: int = 2, max_backlog: int = 16, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if lanes < 1 or max_backlog < 1:
            raise PrismError(f"lanes = {lanes} and max_backlog = {max_backlog} must be at least 1")
        self.backend = backend
        self._clock = clock
        self._max_backlog = max_backlog
        self._encoder = StepEncoder(backend)
        self._specs = [encoder.spec for encoder in backend.encoders]
        self._cost = [_pixels(spec.shape) if spec.is_image else 0 for spec in self._specs]
        self._jobs: queue.PriorityQueue[tuple[float, int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[PlanResult] = queue.SimpleQueue()
        self._tickets = itertools.count(1)
        self._numbers = itertools.count()
        self._epoch = 0
        self._waiting: list[_Request] = []
        self._nice = _KEEN if is_realtime() else _NICE
        backend.threads(1)  # a lane is a core: more threads inside would fight over them
        self.reset()
        self._threads = [threading.Thread(target=self._work, name=f"lane-{i}", daemon=True) for i in range(lanes)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> LanePlanner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put((_STOP, 0, next(self._order), _nothing))
        for thread in self._threads:
            thread.join(timeout=30.0)
        self._threads = []

    def reset(self) -> None:
        """Start an episode: what is still under way belongs to the old one, and its result is thrown away."""
        with self._lock:
            self._epoch += 1
            self._waiting = []
            self._window: deque[_Pending] = deque(maxlen=self.backend.policy.spec.obs_horizon)
            self._unfinished = 0
            self.statistics = LaneStatistics()
        while self._take(None) is not None:
            pass

    def warm_up(self, candidates: int) -> None:
        Runtime(self.backend).warm_up(candidates)

    def observe(self, streams: Mapping[str, Array], present: Mapping[str, bool]) -> None:
        """Queue one time step for encoding. Returns at once."""
        with self._lock:
            self.statistics.steps += 1
            images = [i for i, spec in enumerate(self._specs) if spec.is_image and present[spec.name]]
            self.statistics.frames += len(images)
            if self._unfinished >= self._max_backlog:
                if not self.statistics.steps_dropped:
                    logger.warning("encoding cannot keep up: %d observations wait, one is dropped", self._unfinished)
                self.statistics.steps_dropped += 1
                self._window.append(self._window[-1])  # it is of consecutive steps: the one before stands in
                return
            pending = _Pending(
                next(self._numbers), self._clock(), streams, present, [None] * len(self._specs), max(1, len(images))
            )
            for _ in range(1 if self._window else self._window.maxlen or 1):
                self._window.append(pending)
            self._unfinished += 1
            self.statistics.backlog = max(self.statistics.backlog, self._unfinished)
            epoch = self._epoch
        if not images:
            self._put(pending.number, 0, lambda: self._finish(pending, epoch))
        for index in sorted(images, key=lambda i: -self._cost[i]):
            self._put(pending.number, -self._cost[index], lambda i=index: self._encode(pending, i, epoch))  # type: ignore[misc]

    def request(self, candidates: int, rng: torch.Generator) -> int:
        """Ask for a plan from the window as it is now; the number that its result will carry."""
        with self._lock:
            if not self._window:
                raise PrismError("there is no observation to plan from: call observe first")
            request = _Request(next(self._tickets), self._clock(), tuple(self._window), candidates, rng)
            epoch = self._epoch
            if not all(pending.done for pending in request.window):
                self._waiting.append(request)
                return request.ticket
        self._put(request.window[-1].number, 1, lambda: self._plan(request, epoch))
        return request.ticket

    def poll(self) -> PlanResult | None:
        return self._take(None)

    def wait(self, timeout: float) -> PlanResult | None:
        return self._take(timeout)

    @property
    def unfinished(self) -> int:
        """Observations that arrived and are not encoded yet."""
        return self._unfinished

    # ------------------------------------------------------------------ lanes

    def _take(self, timeout: float | None) -> PlanResult | None:
        try:
            return self._results.get(block=timeout is not None, timeout=timeout)
        except queue.Empty:
            return None

    def _put(self, number: int, order: int, job: Callable[[], None]) -> None:
        self._jobs.put((number, order, next(self._order), job))

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have a priority: the control loop goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            number, _, _, job = self._jobs.get()
            if number == _STOP:
                return
            start = time.thread_time()
            job()
            with self._lock:
                self.statistics.busy += time.thread_time() - start

    def _encode(self, pending: _Pending, sensor: int, epoch: int) -> None:
        if epoch != self._epoch:
            return
        name = self._specs[sensor].name
        try:
            pending.features[sensor] = self._encoder.features(sensor, pending.streams[name], True)
        except Exception as error:  # any failure of a back end: the loop must hear of it and go on
            pending.error = f"sensor '{name}': {type(error).__name__}: {error}"
        with self._lock:
            pending.left -= 1
            last = pending.left == 0
            self.statistics.frames_encoded += pending.error is None
        if last:
            self._finish(pending, epoch)

    def _finish(self, pending: _Pending, epoch: int) -> None:
        """The rest of the sensors, which cost nothing, and the fusion; then whoever waited for this observation."""
        if epoch != self._epoch:
            return
        if pending.error is None:
            try:
                for i, spec in enumerate(self._specs):
                    if pending.features[i] is None:
                        own = pending.present[spec.name]
                        pending.features[i] = self._encoder.features(i, pending.streams[spec.name], own)
                parts = [part for part in pending.features if part is not None]
                pending.step = self._encoder.finish(parts, pending.streams, pending.present)
            except Exception as error:
                pending.error = f"{type(error).__name__}: {error}"
        with self._lock:
            if epoch != self._epoch:
                return
            pending.streams = {}  # the frames are not needed any more
            pending.done = True
            self._unfinished -= 1
            keep_latest(self.statistics.encode_seconds, self._clock() - pending.arrived)
            ready = [r for r in self._waiting if all(p.done for p in r.window)]
            self._waiting = [r for r in self._waiting if r not in ready]
        for request in ready:
            self._put(request.window[-1].number, 1, lambda r=request: self._plan(r, epoch))  # type: ignore[misc]

    def _plan(self, request: _Request, epoch: int) -> None:
        if epoch != self._epoch:
            return
        start = self._clock()
        candidates, error = None, None
        try:
            failed = [p.error for p in request.window if p.error is not None]
            if failed:
                raise PrismError(failed[-1])
            steps = [p.step for p in request.window if p.step is not None]
            candidates = plan(self.backend, steps, request.candidates, request.rng)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        done = self._clock()
        with self._lock:
            if epoch != self._epoch:
                return
            keep_latest(self.statistics.plan_seconds, done - start)
            self._results.put(PlanResult(request.ticket, candidates, (done - request.at) * 1e3, error))


def _pixels(shape: tuple[int, ...]) -> int:
    """A guess at what encoding costs: colour goes through a deeper network than depth."""
    return int(np.prod(shape))


def _nothing() -> None:
    return None
