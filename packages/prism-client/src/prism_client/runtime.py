"""Receding-horizon control over a network: the next plan is fetched while the current one is executed.

    step       0 1 2 3 4 5 6 7 8 9 ...
    plan A     A0 A1 A2 A3 A4 A5 .  .  .           asked for at step 0
    plan B                 B0 B1 B2 B3 B4 ...      asked for at step 4 with o[4], arrives at step 6
    executed   A0 A1 A2 A3 A4 A5 B2 B3 B4 ...      B0 and B1 are past: latency compensation

Row j of a plan belongs to the step of its observation plus j, so a late plan is entered at the row that is due. A plan
that is later still never stops the robot: it goes on with the old one to its end, then holds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism_client.client import Client, ConnectionLostError

logger = logging.getLogger("prism_client")

Array = np.ndarray[Any, Any]
Hold = str | Array | Callable[[Array], Array]


@dataclass
class Stats:
    """Of an episode so far."""

    steps: int = 0
    plans: int = 0
    late: int = 0  # plans that came after the actions meant for execution (exec_horizon) had run out
    held: int = 0  # steps without any planned action
    plan_age: int = 0  # steps since the observation of the plan in use
    latency_ms: float = 0.0  # of the last plan, from its observation to its reply
    error: str = ""  # of the last request that failed


@dataclass(frozen=True)
class _Item:
    step: int
    observation: Mapping[str, Any]
    ages: Mapping[str, float] | None
    time: float


@dataclass(frozen=True)
class _Plan:
    start: int  # the step of its observation
    actions: Array  # (T, D)


class RecedingHorizon:
    """`act` at every control step, at the rate of metadata["fps"]; it never waits once the first plan is there.

    runtime = RecedingHorizon(Client("ws://robot-brain:8000"))
    while True:
        robot.send(runtime.act(robot.read()))

    `exec_horizon`: actions of a plan to execute before the next one takes over; the server's unless told.
    `hold`: what to do when no planned action is left: "last" repeats the last action (positions), "zero" sends zeros
    (changes, velocities), an array or a function of the last action; as the policy's kind of action asks unless told.
    `asynchronous=False` waits for each plan: for simulators, whose time stands still meanwhile.
    """

    def __init__(
        self,
        client: Client,
        *,
        exec_horizon: int | None = None,
        hold: Hold | None = None,
        asynchronous: bool = True,
        first_timeout: float = 30.0,
    ) -> None:
        self.client = client
        metadata = client.metadata
        length = int(metadata.get("pred_horizon", 0))
        self.exec_horizon = int(exec_horizon or metadata.get("exec_horizon") or 1)
        if self.exec_horizon < 1 or (length and self.exec_horizon > length):
            raise ValueError(f"exec_horizon {self.exec_horizon} is out of range: plans have {length} actions")
        if isinstance(hold, str) and hold not in ("last", "zero"):
            raise ValueError(f"hold {hold!r} is unknown: use 'last', 'zero', an array or a function")
        self.fps = float(metadata.get("fps") or 0.0)
        self.stats = Stats()
        self._hold: Hold = hold if hold is not None else ("zero" if metadata.get("action_kind") == "delta" else "last")
        self._asynchronous = asynchronous
        self._first_timeout = first_timeout
        # What is older than the server's window need not be sent any more.
        self._recent: deque[_Item] = deque(maxlen=max(1, int(metadata.get("obs_horizon") or 1)))
        self._seconds = 0.0  # slow average of how long a plan takes
        self._wake = threading.Condition()  # guards everything below
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sending = False
        self._clear()

    def _clear(self) -> None:
        self._recent.clear()
        self._plan: _Plan | None = None
        self._last: Array | None = None
        self._step = 0
        self._sent = -1  # step of the latest observation that the server has
        self._wanted: int | None = None  # a plan is wanted for the first observation from this step on
        self._failure: Exception | None = None

    def reset(self, seed: int | None = None) -> None:
        """Start an episode."""
        with self._wake:
            self._recent.clear()
            self._wake.wait_for(lambda: not self._sending)
            self.client.reset(seed)
            self._clear()
            self.stats = Stats()

    def act(self, observation: Mapping[str, Any], ages: Mapping[str, float] | None = None) -> Array:
        """The action (D,) for this step. Waits for the first plan of an episode, afterwards for none."""
        with self._wake:
            item = _Item(self._step, observation, ages, time.monotonic())
            self._recent.append(item)
            if self._wanted is None and self._due():
                self._wanted = item.step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prism-client", daemon=True)
                self._thread.start()
            self._wake.notify_all()
            if self._plan is None or not self._asynchronous:
                self._await(item)
            action = self._action()
            self._step += 1
            self.stats.steps = self._step
            return action

    def close(self) -> None:
        """Ends the thread, after the request on its way, and the connection."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.client.close()

    def __enter__(self) -> RecedingHorizon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lead(self) -> int:
        """How many steps before its actions are needed a plan is asked for: as long as plans have been taking."""
        if not self._asynchronous or not self.fps:
            return 0
        return min(self.exec_horizon - 1, math.ceil(1.2 * self._seconds * self.fps))

    def _due(self) -> bool:
        return self._plan is None or self._step - self._plan.start >= self.exec_horizon - self.lead

    def _await(self, item: _Item) -> None:
        """Until the server has this observation and its plan, if one is due, is here."""

        def ready() -> bool:
            return self._failure is not None or (self._sent >= item.step and self._wanted is None)

        if not self._wake.wait_for(ready, self._first_timeout):
            raise ConnectionLostError(f"{self.client.uri}: no plan within {self._first_timeout:g} s")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _action(self) -> Array:
        assert self._plan is not None
        row = self._step - self._plan.start
        self.stats.plan_age = row
        if row < len(self._plan.actions):
            self._last = np.array(self._plan.actions[row])
            return self._last.copy()
        self.stats.held += 1
        last = self._plan.actions[-1] if self._last is None else self._last
        if callable(self._hold):
            return np.asarray(self._hold(last.copy()))
        if isinstance(self._hold, str):
            return np.zeros_like(last) if self._hold == "zero" else np.array(last)
        return np.array(self._hold)

    # The other thread: everything that waits for the network.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._next() is not None)
                item = self._next()
                if self._closed or item is None:
                    return
                plan = self._wanted is not None and item.step >= self._wanted
                executed = None if self._plan is None else item.step - self._plan.start
                self._sending = True
            actions: Array | None = None
            error: Exception | None = None
            try:
                reply = self.client.infer(item.observation, executed=executed, plan=plan, ages=item.ages)
                actions = np.asarray(reply["actions"]) if plan else None
            except Exception as problem:  # the network, the server's no, an observation that cannot be packed
                error = problem
            with self._wake:
                self._sending = False
                self._sent = item.step
                if plan:
                    self._wanted = None  # after a failure the next step asks again
                if error is not None:
                    self._fail(item, error)
                elif actions is not None:
                    self._take(item, actions)
                self._wake.notify_all()

    def _next(self) -> _Item | None:
        """The oldest observation that the server lacks; nothing while it has them all."""
        return next((item for item in self._recent if item.step > self._sent), None)

    def _take(self, item: _Item, actions: Array) -> None:
        seconds = time.monotonic() - item.time
        self.stats.late += int(self._plan is not None and self._step - self._plan.start > self.exec_horizon)
        self._plan = _Plan(item.step, actions)
        self._seconds = seconds if not self.stats.plans else 0.8 * self._seconds + 0.2 * seconds
        self.stats.plans += 1
        self.stats.latency_ms = 1e3 * seconds
        self.stats.error = ""

    def _fail(self, item: _Item, error: Exception) -> None:
        if str(error) != self.stats.error:  # once, not at every step
            logger.warning("step %d: %s", item.step, error)
        self.stats.error = str(error)
        if self._plan is None or not self._asynchronous:
            self._failure = error
