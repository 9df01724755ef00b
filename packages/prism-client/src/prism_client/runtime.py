"""Receding-horizon control over a network: the next plan is fetched while the current one is executed.

    step       0 1 2 3 4 5 6 7 8 9 ...
    plan A     A0 A1 A2 A3 A4 A5 .  .  .           asked for at step 0
    plan B                 B0 B1 B2 B3 B4 ...      asked for at step 4 with o[4], arrives at step 6
    executed   A0 A1 A2 A3 A4 A5 B2 B3 B4 ...      B0 and B1 are past: latency compensation

A plan that was asked for n actions ago is entered at its row n, and what lies between both plans there, A6 - B2, is
added to the new one and taken away in equal parts over `blend` steps: no jump. A plan that is later still never stops
the robot: it goes on with the old one to its end, then holds. Held steps are no actions, so a plan that comes after
them goes on where the robot stands.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism_client.client import Client, ConnectionLostError, ServerError

logger = logging.getLogger("prism_client")

Array = np.ndarray[Any, Any]
Hold = str | Array | Callable[[Array], Array]
Hook = Callable[[Mapping[str, Any]], str]  # the server's reply -> one of DECISIONS
DECISIONS = ("continue", "slow", "stop")
BLEND = 3  # steps


@dataclass
class Stats:
    """Of an episode so far."""

    steps: int = 0
    plans: int = 0
    late: int = 0  # plans that came after the actions meant for execution (exec_horizon) had run out
    held: int = 0  # steps without any planned action
    plan_age: int = 0  # steps since the observation of the plan in use
    latency_ms: float = 0.0  # of the last plan, from its observation to its reply
    spread: float = 0.0  # of the last plan: how far apart its candidates are
    modes: int = 0  # ... and in how many groups
    decision: str = "continue"  # what the hook says of it
    error: str = ""  # of the last request that failed, or why there is no connection


@dataclass(frozen=True)
class _Item:
    step: int
    done: int  # actions executed before it
    observation: Mapping[str, Any]
    ages: Mapping[str, float] | None
    time: float


@dataclass(frozen=True)
class _Plan:
    start: int  # the step of its observation
    done: int  # actions executed before that: row j is action done + j
    actions: Array  # (T, D)


class RecedingHorizon:
    """`act` at every control step, at the rate of metadata["fps"]; it never waits once the first plan is there.

    runtime = RecedingHorizon(Client("ws://robot-brain:8000"))
    while True:
        robot.send(runtime.act(robot.read()))

    `exec_horizon`: actions of a plan to execute before the next one takes over; the server's unless told.
    `hold`: what to do when no planned action is left: "last" repeats the last action (positions), "zero" sends zeros
    (changes, velocities), an array or a function of the last action; as the policy's kind of action asks unless told.
    `keep`: dimensions of the action that keep their last value even when the others are zero: a gripper.
    `blend`: steps over which the gap between two plans is closed; 3 unless told, 0 (jump) without `asynchronous`.
    `hook`: looks at every reply with a plan (spread, modes, ...) and says "continue", "slow" (the same path at
    `slow_factor` of the speed) or "stop" (hold until a plan may be executed). One that fails says stop.
    `asynchronous=False` waits for each plan: for simulators, whose time stands still meanwhile.
    """

    def __init__(
        self,
        client: Client,
        *,
        exec_horizon: int | None = None,
        hold: Hold | None = None,
        keep: tuple[int, ...] = (),
        blend: int | None = None,
        hook: Hook | None = None,
        slow_factor: float = 0.5,
        asynchronous: bool = True,
        first_timeout: float = 30.0,
    ) -> None:
        self.client = client
        metadata = client.metadata
        length = int(metadata.get("pred_horizon", 0))
        self.exec_horizon = int(metadata.get("exec_horizon") or 1) if exec_horizon is None else int(exec_horizon)
        if self.exec_horizon < 1 or (length and self.exec_horizon > length):
            raise ValueError(f"exec_horizon {self.exec_horizon} is out of range: plans have {length} actions")
        if isinstance(hold, str) and hold not in ("last", "zero"):
            raise ValueError(f"hold {hold!r} is unknown: use 'last', 'zero', an array or a function")
        if blend is not None and blend < 0:
            raise ValueError(f"blend {blend} is out of range: use 0 (off) or more")
        if not 0.0 < slow_factor <= 1.0:
            raise ValueError(f"slow_factor {slow_factor} is out of range: it must be in (0, 1]")
        self.fps = float(metadata.get("fps") or 0.0)
        self.stats = Stats()
        self._delta = metadata.get("action_kind") == "delta"
        self._hold: Hold = hold if hold is not None else ("zero" if self._delta else "last")
        self._keep = list(keep)
        self._blend = (BLEND if asynchronous else 0) if blend is None else int(blend)
        self._hook = hook
        self._slow_factor = slow_factor
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
        self._last: Array | None = None  # the last planned action
        self._commanded: Array | None = None  # what was commanded last, held or planned
        self._before: Array | None = None  # the last row that was executed to its end
        self._phase = 0.0  # how much of the present row is done, when slow
        self._step = 0
        self._done = 0  # rows executed
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
            # Copies: they are sent later, and a driver may fill the same buffer again.
            own = {name: copy.copy(value) for name, value in observation.items()}
            item = _Item(self._step, self._done, own, None if ages is None else dict(ages), time.monotonic())
            self._recent.append(item)
            if self._wanted is None and self._due():
                self._wanted = item.step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prism-client", daemon=True)
                self._thread.start()
            self._wake.notify_all()
            try:
                if self._plan is None or not self._asynchronous:
                    self._await(item)
                self.stats.error = self.client.trouble or self.stats.error
                return self._action()
            finally:  # after a failure too: the next observation is another one
                self._step += 1
                self.stats.steps = self._step

    def close(self) -> None:
        """Ends the thread and the connection, and gives up a request on its way."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.client.close()
        if self._thread is not None:
            self._thread.join()

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
        if self._plan is None or self.stats.decision == "stop":
            return True
        return self._step - self._plan.start >= self.exec_horizon - self.lead

    def _await(self, item: _Item) -> None:
        """Until the server has this observation and its plan, if one is due, is here."""

        def ready() -> bool:
            return self._failure is not None or (self._sent >= item.step and self._wanted is None)

        if not self._wake.wait_for(ready, self._first_timeout):
            raise ConnectionLostError(self.client.trouble or f"{self.client.uri}: no plan in {self._first_timeout:g} s")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _action(self) -> Array:
        assert self._plan is not None
        self.stats.plan_age = self._step - self._plan.start
        if (target := self._row()) is None:
            self.stats.held += 1
            action = self._held()
        else:
            action = self._last = self._paced(target)
        self._commanded = action
        return action.copy()

    def _row(self) -> Array | None:
        """The planned action that is next; None: there is none, or it may not be executed."""
        row = self._done - self._plan.done if self._plan is not None else 0
        if self._plan is None or row >= len(self._plan.actions) or self.stats.decision == "stop":
            return None
        return np.array(self._plan.actions[row])

    def _paced(self, target: Array) -> Array:
        """All of the way to the next action; slow: part of the way to a position, or part of a change."""
        pace = self._slow_factor if self.stats.decision == "slow" else 1.0
        start, end = self._phase, min(self._phase + pace, 1.0)
        action = target
        if pace < 1.0 or start > 0.0:
            before = target if self._before is None else self._before
            action = (end - start) * target if self._delta else before + end * (target - before)
            action[self._keep] = target[self._keep]
        self._phase = end
        if end >= 1.0 - 1e-9:
            self._phase, self._before = 0.0, target
            self._done += 1
        return action

    def _held(self) -> Array:
        assert self._last is not None
        if callable(self._hold):
            return np.asarray(self._hold(self._last.copy()))
        if not isinstance(self._hold, str):
            return np.array(self._hold)
        held = np.zeros_like(self._last) if self._hold == "zero" else self._last.copy()
        held[self._keep] = self._last[self._keep]
        return held

    # The other thread: everything that waits for the network.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._next() is not None)
                item = self._next()
                if self._closed or item is None:
                    return
                plan = self._wanted is not None and item.step >= self._wanted
                executed = None if self._plan is None else item.done - self._plan.done
                self._sending = True
            connections = self.client.connections
            reply: dict[str, Any] = {}
            decision = "continue"
            error: Exception | None = None
            try:
                reply = self.client.infer(item.observation, executed=executed, plan=plan, ages=item.ages)
                decision = self._decide(reply) if plan else decision
            except Exception as problem:  # the network, the server's no, an observation that cannot be packed
                error = problem
            with self._wake:
                self._sending = False
                self._sent = item.step
                if error is not None:
                    self._wanted = None if plan else self._wanted  # the next step asks again
                    self._fail(item, error)
                elif self.client.connections != connections and self._recent and self._recent[0].step < item.step:
                    self.client.reset()  # a new connection knows nothing: what is recent is sent again, in order
                    self._sent = self._recent[0].step - 1
                elif plan:
                    self._wanted = None
                    try:
                        self._take(item, reply, decision)
                    except Exception as problem:  # a reply that is no plan for this robot
                        self._fail(item, problem)
                self._wake.notify_all()

    def _next(self) -> _Item | None:
        """The oldest observation that the server lacks; nothing while it has them all."""
        return next((item for item in self._recent if item.step > self._sent), None)

    def _decide(self, reply: Mapping[str, Any]) -> str:
        """A hook that fails, or says what nobody understands, must not let the robot go on."""
        if self._hook is None:
            return "continue"
        try:
            decision = self._hook(reply)
        except Exception as problem:
            decision = f"{type(problem).__name__}: {problem}"
        if decision not in DECISIONS:
            logger.error("the hook says %r, not one of %s: stop", decision, ", ".join(DECISIONS))
            return "stop"
        return decision

    def _take(self, item: _Item, reply: Mapping[str, Any], decision: str) -> None:
        seconds = time.monotonic() - item.time
        actions = np.array(reply.get("actions"))
        if actions.ndim != 2 or not len(actions) or actions.dtype.kind not in "iuf":
            raise ServerError("the server's reply holds no plan: 'actions' must be numbers (T, D)")
        if self._plan is not None and actions.shape[1:] != self._plan.actions.shape[1:]:
            old, new = self._plan.actions.shape[1], actions.shape[1]
            raise ServerError(
                f"the server's plan has {new} numbers an action, the one before {old}: "
                "it serves another policy; reset() to go on with that"
            )
        self.stats.late += int(self._plan is not None and self._step - self._plan.start > self.exec_horizon)
        self.stats.spread, self.stats.modes = float(reply.get("spread", 0.0)), int(reply.get("modes", 0))
        self.stats.plans += 1
        self.stats.latency_ms = 1e3 * seconds
        self.stats.error = ""
        self._seconds = seconds if self.stats.plans == 1 else 0.8 * self._seconds + 0.2 * seconds
        if decision == "stop" and self._last is None:  # nothing moves and there is nothing to hold
            self._failure = RuntimeError("the hook says stop to the first plan: there is nothing to execute yet")
            return
        self._plan = _Plan(item.step, item.done, self._join(actions, self._done - item.done))
        self.stats.decision = decision
        self._phase, self._before = 0.0, self._commanded

    def _join(self, actions: Array, row: int) -> Array:
        """The new plan, starting at `row` where the robot would have gone on without it; see the top of this file."""
        if self._commanded is None or not self._blend or row >= len(actions):
            return actions
        old = self._row()
        gap = (self._commanded if old is None else old) - actions[row]
        steps = np.arange(1, len(actions) - row + 1)
        left = np.maximum(1.0 - steps / (self._blend + 1), 0.0)[:, None]
        actions[row:] = actions[row:] + left * gap
        return actions

    def _fail(self, item: _Item, error: Exception) -> None:
        if str(error) != self.stats.error and not self._closed:  # once, not at every step
            logger.warning("step %d: %s", item.step, error)
        self.stats.error = str(error)
        if self._plan is None or not self._asynchronous:
            self._failure = error
