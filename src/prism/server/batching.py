"""One thread that thinks for all robots: what has arrived is encoded and sampled in one pass of the network.

While a batch is computed, the next requests gather; so the batch grows with the load, and a single robot never waits
for company. Every observation is encoded once (tokens.py); a plan needs only the kept tokens. Each row has the random
numbers of its own controller (`EachRandom`): a robot gets the plan that it would have got alone, up to the rounding
of a larger matrix product.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client import wire

from prism.errors import PrismError
from prism.inference import tokens
from prism.inference.backends import Backend
from prism.inference.window import batched
from prism.policy import Policy
from prism.rows import EachRandom
from prism.server.prometheus import Metrics
from prism.server.sessions import WHO, Request, RequestError, Session

_MAX_BATCH = 64  # requests

logger = logging.getLogger("prism.server")


@dataclass
class Job:
    session: Session
    request: Request
    future: asyncio.Future[bytes]
    arrived: float  # time.perf_counter()
    previous_ms: float | None = None  # what the request before took in all; openpi reports it
    error: Exception | None = None
    reply: bytes = b""
    row: NDArray[np.float32] | None = field(default=None, repr=False)  # (K, Tp, Da)


class Batcher:
    """`submit` from the network loop, the answer through the job's future; `close` ends the thread."""

    def __init__(self, policy: Policy, backend: Backend | None, threads: int | None, metrics: Metrics) -> None:
        self._policy = policy
        self._device = next((weights.device for weights in policy.parameters()), torch.device("cpu"))
        self._backend = backend  # None: the policy has no encoder whose tokens could be kept
        self._threads, self._metrics = threads, metrics
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="prism-inference", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """After the batch at work; jobs that still wait are cancelled."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while (batch := self._gather()) is not None:
                start = time.perf_counter()
                try:
                    plans = self._work(batch)
                except Exception as error:  # out of memory, a bug: these requests fail, the next ones are served
                    logger.exception("a batch of %d requests failed", len(batch))
                    plans = 0
                    for job in batch:
                        job.error = job.error or error
                self._loop.call_soon_threadsafe(self._deliver, batch, time.perf_counter() - start, plans)

    def _gather(self) -> list[Job] | None:
        """Waits for one job and takes all that are there; None: the end."""
        job = self._queue.get()
        batch: list[Job] = []
        while job is not None:
            batch.append(job)
            if len(batch) == _MAX_BATCH:
                return batch
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # seen too early
            return batch
        return None

    def _work(self, batch: Sequence[Job]) -> int:
        start = time.perf_counter()
        for job in batch:
            self._guarded(job, lambda job: job.session.begin(job.request))
        self._for_all([job for job in batch if job.error is None], self._encode)
        plans = [job for job in batch if job.error is None and job.request.plan]
        self._for_all(plans, self._sample)
        for job in batch:
            if job.error is None:
                self._guarded(job, lambda job: self._answer(job, start, len(plans)))
        return len(plans)

    def _for_all(self, jobs: Sequence[Job], step: Callable[[Sequence[Job]], None]) -> None:
        """One pass of the network for several requests; what fails there fails for all of them."""
        try:
            if jobs:
                step(jobs)
        except Exception as error:
            logger.exception("the policy failed on %d requests", len(jobs))
            for job in jobs:
                job.error = error

    def _encode(self, jobs: Sequence[Job]) -> None:
        if self._backend is not None:
            kept = [(job.session.tokens, job.session.gained) for job in jobs]
            rows = [(own, *step) for own, gained in kept if own is not None for step in gained]
            tokens.observe(self._backend, rows)

    def _sample(self, jobs: Sequence[Job]) -> None:
        candidates = jobs[0].session.config.candidates  # all sessions have one config
        rng = EachRandom([job.session.rng for job in jobs])
        if self._backend is not None:
            windows = [job.session.tokens.window for job in jobs if job.session.tokens is not None]
            sample = tokens.plan(self._backend, windows, candidates, rng)
        else:
            observation = batched([job.session.window for job in jobs], self._device)
            sample = self._policy.sample(observation, candidates, rng).float().cpu().numpy()
        for job, row in zip(jobs, sample, strict=True):
            job.row = row

    def _answer(self, job: Job, start: float, plans: int) -> None:
        if job.row is not None:
            reply = job.session.finish(job.request, job.row, (time.perf_counter() - start) * 1e3)
        else:
            reply = job.session.observed()
        timing: dict[str, Any] = {
            "infer_ms": (time.perf_counter() - start) * 1e3,
            "queue_ms": (start - job.arrived) * 1e3,
            "batch": plans,
        }
        if job.previous_ms is not None:
            timing["prev_total_ms"] = job.previous_ms
        reply["server_timing"] = timing
        job.reply = wire.pack(reply)

    def _guarded(self, job: Job, step: Callable[[Job], None]) -> None:
        """A request that fails fails alone."""
        token = WHO.set(job.session.who)
        try:
            step(job)
        except PrismError as error:
            job.error = error if isinstance(error, RequestError) else RequestError(str(error))
        except Exception as error:
            logger.exception("a request failed")
            job.error = error
        finally:
            WHO.reset(token)

    def _deliver(self, batch: Sequence[Job], seconds: float, plans: int) -> None:
        """On the network loop, which counts."""
        self._metrics.inference.add(seconds)
        if plans:
            self._metrics.batch_size.add(plans)
        for job in batch:
            if job.future.done():  # its connection is gone
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.reply)
