"""The one thread that talks to a device: vendors' clients are not made for two, and may block."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prism.errors import reason

_ACKNOWLEDGES = 0.06  # seconds that a stop waits until it is sent


class Talker:
    """Calls `cycle` `hz` times a second, and at once when it is woken.

    While `stopping`, a cycle tells the device to stand, and sets `standing` when it has. `fault`: why a cycle failed.
    """

    def __init__(self, hz: float, cycle: Callable[[], None]) -> None:
        self._hz, self._cycle = hz, cycle
        self.stopping, self.fault = True, ""
        self.standing = threading.Event()
        self._alive, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        self.fault = ""
        self._alive.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        self.stopping = False
        self.standing.clear()

    def wake(self) -> None:
        self._wake.set()

    def halt(self) -> None:
        self.stopping = True
        self.wake()

    def stop(self) -> None:
        self.halt()
        if self._thread is not None:
            self.standing.wait(_ACKNOWLEDGES)

    def close(self) -> None:
        if self._thread is not None:
            self.stop()
            self._alive.clear()
            self.wake()
            self._thread.join(2.0)
            self._thread = None

    def _run(self) -> None:
        while self._alive.is_set():
            try:
                self._cycle()
            except Exception as error:  # the vendor's; the robot is stopped for it
                self.fault = reason(error)
            self._wake.wait(1.0 / self._hz)
            self._wake.clear()
