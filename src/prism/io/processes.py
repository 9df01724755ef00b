"""What a process that works for another one owes it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """In a worker: stops it when the process that started it is gone, killed perhaps. It would go on working, and get
    in the way of the same command started again."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave_signals_to_parent() -> None:
    """In a worker: Ctrl-C and a group's SIGTERM reach every process, but the one that started it decides what follows:
    it may need the worker to finish what it has begun."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
