"""A policy server as a planner: a thread sends every observation and fetches the plans."""

from __future__ import annotations

import copy
import dataclasses
import math
import queue
import threading
import time
from collections import deque
from typing import Any

from prism_client.client import Client, ServerError
from prism_client.messages import Plan, PolicyInfo, Reply, Step, absent_of

# A server that says something else has another policy.
_IDENTITY = frozenset(("action_dim", "keep", "needs", "action", "fps", "policy"))


class RemotePlanner:
    """Plans of a server. `client`: a Client, or an address and the options of one.

    What is older than the server's window is not sent any more: a slow network makes plans late, not old. A connection
    that was lost starts anew on the server, so the latest observations are sent again, in order.

    `silence`: seconds without a sign of life of the server after which `trouble` says so, asked for four times as often
    (WebSocket pings); default: only a connection that is closed, or a reply that does not come, is noticed. Ten times
    as long while an observation is being sent: a ping waits behind it, and a large one takes its time.

    `all_candidates`: plans bring the candidates that were not chosen too, for a recording.
    """

    def __init__(
        self, client: Client | str, *, silence: float | None = None, all_candidates: bool = False, **options: Any
    ) -> None:
        self.client = Client(client, **options) if isinstance(client, str) else client
        self._all_candidates = all_candidates
        self._quiet, self._over = "", threading.Event()
        self._pinging, self._stuck = math.inf, math.inf if silence is None else 10 * silence  # since when; seconds
        self._beating = threading.Thread(target=self._beat, args=(silence,), name="prism-client-beat", daemon=True)
        if silence is not None:
            self._beating.start()
        self._wake = threading.Condition()  # guards everything below
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sending = False
        self._recent: deque[Step] = deque()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._clear()

    def _clear(self) -> None:
        self._info, self._connection = PolicyInfo.from_wire(self.client.metadata), self.client.connections
        self._recent = deque(maxlen=max(1, self._info.memory))
        self._sent = -1  # the latest step that the server has
        self._busy = -1  # the one that is on its way
        self._unheard: list[Any] = []  # commands since a step that was not sent
        self._wanted: int | None = None  # a plan is wanted for the first observation from this step on
        self._planned: int | None = None  # actions executed before the server's last plan
        self._replies = queue.SimpleQueue()

    @property
    def info(self) -> PolicyInfo:
        return self._info

    def submit(self, step: Step) -> None:
        # A copy: it is sent later, and a driver may fill the same buffers again.
        own = {name: copy.copy(value) for name, value in step.observation.items()}
        with self._wake:
            if len(self._recent) == self._recent.maxlen and self._recent[0].number > max(self._sent, self._busy):
                self._unheard += self._recent[0].sent
            self._recent.append(dataclasses.replace(step, observation=own))
            if step.wants_plan:
                self._wanted = step.number
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prism-client", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def poll(self, timeout: float = 0.0) -> Reply | None:
        try:
            return self._replies.get(timeout > 0, timeout) if timeout > 0 else self._replies.get_nowait()
        except queue.Empty:
            return None

    def trouble(self) -> str:
        gone = f"{self.client.uri}: the connection is lost" if self.client.is_closed else ""
        if time.monotonic() - self._pinging > self._stuck:
            gone = f"{self.client.uri}: the network accepts no data"
        return self.client.trouble or self._quiet or gone

    def reset(self, seed: int | None = None) -> None:
        with self._wake:
            self._recent.clear()
            self._wake.wait_for(lambda: not self._sending)
            self.client.reset(seed)
            self._clear()

    def close(self) -> None:
        """Ends the threads and the connection, and gives up a request on its way."""
        self._over.set()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.client.close()
        for thread in (self._thread, self._beating):
            if thread is not None and thread.is_alive():
                thread.join()

    def _beat(self, silence: float) -> None:
        """A thread of its own: is the server there?"""
        while not self._over.wait(silence / 4):
            self._pinging = time.monotonic()
            try:
                heard = self.client.ping()
            except OSError as error:
                self._quiet = str(error)
                continue
            finally:
                self._pinging = math.inf
            if not heard.wait(silence):
                self._quiet = f"{self.client.uri}: no sign of life for {silence:g} s"
                while not (self._over.wait(silence / 4) or heard.is_set() or self.client.is_closed):
                    pass
            self._quiet = "" if heard.is_set() else self._quiet

    # The other thread: everything that waits for the network.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._next() is not None)
                step = self._next()
                if self._closed or step is None:
                    return
                wants = self._wanted is not None and step.number >= self._wanted
                executed = None if self._planned is None else step.done - self._planned
                sent, self._unheard = [*self._unheard, *step.sent], []
                self._sending, self._busy = True, step.number
            connections = self.client.connections
            plan: Plan | None = None
            absent: tuple[str, ...] | None = None
            error: Exception | None = None
            try:
                message = self.client.infer(
                    step.observation,
                    executed=executed,
                    plan=wants,
                    ages=step.ages,
                    checked=True,
                    sent=sent,
                    all_candidates=self._all_candidates,
                )
                self._check_identity()
                absent = absent_of(message)
                plan = Plan.from_reply(message) if wants else None
            except Exception as problem:  # the network, the server's no, an observation that cannot be packed
                error = problem
            with self._wake:
                self._sending = False
                self._sent = step.number
                again = self.client.connections != connections and self._recent and self._recent[0].number < step.number
                if error is None and again:  # a new connection knows nothing
                    self.client.reset()
                    self._sent = self._recent[0].number - 1
                else:
                    if wants:
                        self._wanted = None
                        self._planned = step.done if error is None else self._planned
                    self._replies.put(Reply(step, absent, plan, wants, error))
                self._wake.notify_all()

    def _next(self) -> Step | None:
        """The oldest observation that the server lacks; nothing while it has them all."""
        return next((step for step in self._recent if step.number > self._sent), None)

    def _check_identity(self) -> None:
        if self._connection == self.client.connections:
            return
        now = PolicyInfo.from_wire(self.client.metadata)
        if changed := [key for key in self._info.differs(now) if key in _IDENTITY]:
            raise ServerError(
                f"the server came back with another policy ({changed[0]} {now.to_wire()[changed[0]]}, not "
                f"{self._info.to_wire()[changed[0]]}): call reset() to use it"
            )
        self._connection = self.client.connections
