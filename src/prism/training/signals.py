"""SIGTERM and Ctrl-C end a run politely: the step is finished and saved. And one run folder has one trainer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prism.errors import PrismError


class StopRequest:
    """Inside `with`, the first SIGTERM or SIGINT sets `.number`; a second Ctrl-C interrupts at once, as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def exclusive(folder: Path, name: str = ".lock", patience: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock; it goes with the process, however that ends, so a killed run leaves none behind.

    `patience`: seconds to wait for a process that is still saving.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks; the user sees to it
        yield
        return
    deadline = time.monotonic() + patience
    with open(folder / name, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise PrismError(
                        f"{folder} is in use by another prism process: wait for it, or stop it first"
                    ) from None
                time.sleep(0.5)
        yield
