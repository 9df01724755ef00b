"""A policy in this process as a planner: encoding and planning in a few threads ("lanes"), one core each.

Jobs are ordered by the observation they belong to, and within it sensors before the plan, the costliest sensor first:

    observation t:   [rgb_static][plan, if one was asked for at t]
                     [rgb_wrist][tactile][depth]...[observation t + 1 ...

so a plan starts as soon as its last token is there, on one lane, while the others go on with the frames that arrive
meanwhile. ONNX Runtime and PyTorch leave Python's lock while they compute: threads are enough.

    with steady(realtime=True), Executor(LocalPlanner(backend, config)) as executor:
        while True:
            robot.send(executor.act(robot.read()))
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from prism_client import PlanError, PolicyInfo, RefusedError, Reply, Step
from torch import Tensor

from prism.errors import PrismError
from prism.inference.about import about_policy
from prism.inference.backends import Backend
from prism.inference.chooser import Chooser, ControllerConfig, action_scale
from prism.inference.tokens import Arrival, Known, Token, encode_sensor, fuse, plan
from prism.inference.window import Reading, Window
from prism.rows import Random

Array = NDArray[np.generic]
_KEPT = 50_000  # latest values of a statistic: a robot may run for days
_NICE = 5  # added to what the lanes let others have: the loop that gives actions never queues behind a convolution
_KEEN = -10  # beside a real-time loop: a lane that is pushed aside while it holds Python's lock would hold the loop up
logger = logging.getLogger("prism.inference")


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
    at: float
    arrival: Arrival | None  # None: it is encoded, the frames are not needed any more
    features: list[Tensor | None]
    left: int
    token: Token | None = None
    error: str | None = None
    done: bool = False


@dataclass(frozen=True)
class _Request:
    ticket: int
    at: float
    window: tuple[_Pending, ...]
    candidates: int
    rng: Random


@dataclass(frozen=True)
class Sample:
    """The result of a request."""

    ticket: int
    candidates: NDArray[np.float32] | None  # (K, Tp, Da) robot units; None: it failed
    latency_ms: float  # from the request
    error: str | None = None


@dataclass(frozen=True)
class _Asked:
    """The request that is on its way, and what the choice needs of its observation."""

    ticket: int
    step: Step
    absent: tuple[str, ...]
    newest: Reading


@dataclass
class LaneStatistics:
    """Counts since the last reset; times in seconds, one entry an observation or plan."""

    frames: int = 0  # readings of present image sensors that arrived
    frames_encoded: int = 0
    steps: int = 0
    steps_dropped: int = 0
    backlog: int = 0  # the most observations that waited at once
    busy: float = 0.0  # thread-seconds of all lanes
    encode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # arrival -> token
    plan_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # the plan's own computation


class Lanes:
    """Takes every observation at once, gives candidates when they are ready.

    `max_backlog`: observations that may wait; beyond it a new one is dropped, counted and logged, because a queue that
    keeps growing ends with plans from the past; the one before stands in for it. Close it, or use it as a context
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
        self._known = Known()
        self._specs = [encoder.spec for encoder in backend.encoders]
        self._cost = [math.prod(spec.shape) if spec.is_image else 0 for spec in self._specs]  # a guess
        # observation, order within it, order of arrival, the job; None: the end
        self._jobs: queue.PriorityQueue[tuple[float, int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[Sample] = queue.SimpleQueue()
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

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put((math.inf, 0, next(self._order), None))
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
        while self.poll() is not None:
            pass

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
            arrival = Arrival(self._known, streams, present)
            features: list[Tensor | None] = [None] * len(self._specs)
            pending = _Pending(next(self._numbers), self._clock(), arrival, features, max(1, len(images)))
            for _ in range(1 if self._window else self._window.maxlen or 1):
                self._window.append(pending)
            self._unfinished += 1
            self.statistics.backlog = max(self.statistics.backlog, self._unfinished)
            epoch = self._epoch
        if not images:
            self._put(pending.number, 0, lambda: self._finish(pending, epoch))
        for index in sorted(images, key=lambda i: -self._cost[i]):
            self._put(pending.number, -self._cost[index], lambda i=index: self._encode(pending, i, epoch))  # type: ignore[misc]

    def request(self, candidates: int, rng: Random) -> int:
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

    def poll(self, timeout: float = 0.0) -> Sample | None:
        try:
            return self._results.get(timeout=timeout) if timeout > 0 else self._results.get_nowait()
        except queue.Empty:
            return None

    @property
    def unfinished(self) -> int:
        """Observations that arrived and are not encoded yet."""
        return self._unfinished

    # ------------------------------------------------------------------ lanes

    def _put(self, number: int, order: int, job: Callable[[], None]) -> None:
        self._jobs.put((number, order, next(self._order), job))

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have a priority: the control loop goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            job = self._jobs.get()[-1]
            if job is None:
                return
            start = time.thread_time()
            job()
            with self._lock:
                self.statistics.busy += time.thread_time() - start

    def _encode(self, pending: _Pending, sensor: int, epoch: int) -> None:
        if epoch != self._epoch or pending.arrival is None:
            return
        try:
            pending.features[sensor] = encode_sensor(self.backend, sensor, [pending.arrival])[0]
        except Exception as error:  # any failure of a back end: the loop must hear of it and go on
            pending.error = f"sensor '{self._specs[sensor].name}': {type(error).__name__}: {error}"
        with self._lock:
            pending.left -= 1
            last = pending.left == 0
            self.statistics.frames_encoded += pending.error is None
        if last:
            self._finish(pending, epoch)

    def _finish(self, pending: _Pending, epoch: int) -> None:
        """The other sensors, which cost nothing, and the fusion; then whoever waited for this observation."""
        if epoch != self._epoch or pending.arrival is None:
            return
        if pending.error is None:
            try:
                columns = [
                    encode_sensor(self.backend, i, [pending.arrival]) if own is None else [own]
                    for i, own in enumerate(pending.features)
                ]
                pending.token = fuse(self.backend, columns, [pending.arrival])[0]
            except Exception as error:
                pending.error = f"{type(error).__name__}: {error}"
        with self._lock:
            if epoch != self._epoch:
                return
            pending.arrival = None
            pending.done = True
            self._unfinished -= 1
            self.statistics.encode_seconds.append(self._clock() - pending.at)
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
            window = [p.token for p in request.window if p.token is not None]
            candidates = plan(self.backend, [window], request.candidates, request.rng)[0]
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        done = self._clock()
        with self._lock:
            if epoch != self._epoch:
                return
            self.statistics.plan_seconds.append(done - start)
            self._results.put(Sample(request.ticket, candidates, (done - request.at) * 1e3, error))


class LocalPlanner:
    """A policy in this process as a planner of `prism_client.Executor`: lanes draw, its chooser chooses.

    `watched`: sensors that a guard watches, so that they are not judged again here (prism.inference.window).
    """

    def __init__(
        self,
        backend: Backend,
        config: ControllerConfig,
        lanes: int = 2,
        max_backlog: int = 16,
        watched: Collection[str] = (),
    ) -> None:
        if config.warm_start:  # lanes sample each plan from noise
            raise PrismError("controller.warm_start is not for asynchronous control: use warm_start=False")
        policy, scale = backend.policy, action_scale(backend.policy)
        self.window = Window(policy.spec, watched)
        self.chooser = Chooser(policy.spec, config, scale)
        self.info: PolicyInfo = about_policy(policy, config, scale)
        self.lanes = Lanes(backend, lanes, max_backlog)
        self._clear(0)

    def _clear(self, seed: int) -> None:
        self.rng = Random(seed)  # a new one: a plan in progress still draws from the old one
        self.window.reset()
        self.chooser.reset()
        self._replies: deque[Reply] = deque()
        self._asked: _Asked | None = None
        self._sent: list[Array] = []  # commands since the last request
        self._done = 0  # actions executed before it
        self._blind = 0  # the latest observations that could not be used

    def submit(self, step: Step) -> None:
        self._sent += step.sent
        try:
            gained = self.window.observe(step.observation, step.ages, self._blind)
        except PrismError as error:
            self._blind += 1
            self._replies.append(Reply(step, is_plan=step.wants_plan, error=RefusedError(str(error))))
            return
        self._blind = 0
        for streams, present in gained:
            self.lanes.observe(streams, present)
        absent = self.window.absent
        self._replies.append(Reply(step, absent))
        if step.wants_plan:
            self.chooser.advance(step.done - self._done, self._sent)
            self._sent, self._done = [], step.done
            ticket = self.lanes.request(self.chooser.config.candidates, self.rng)
            self._asked = _Asked(ticket, step, absent, self.window.newest)

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if self._replies:
            return self._replies.popleft()
        sample, asked = self.lanes.poll(timeout), self._asked
        if sample is None or asked is None or sample.ticket != asked.ticket:
            return None
        self._asked = None
        if sample.candidates is None:
            return Reply(asked.step, asked.absent, is_plan=True, error=PlanError(sample.error or "no plan"))
        try:
            plan = self.chooser.choose(sample.candidates, asked.newest, sample.latency_ms)
        except PrismError as error:
            return Reply(asked.step, asked.absent, is_plan=True, error=PlanError(str(error)))
        return Reply(asked.step, asked.absent, plan, is_plan=True, latency_ms=sample.latency_ms)

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None:
        self._clear(0 if seed is None else seed)
        self.lanes.reset()

    def close(self) -> None:
        self.lanes.close()
