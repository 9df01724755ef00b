"""Child processes: end with their parent, and limit their memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.context import SpawnContext, SpawnProcess


class _Worker(SpawnProcess):
    def start(self) -> None:
        main = sys.modules["__main__"]
        script = main.__dict__.pop("__file__", None) if main.__spec__ is None else None
        try:
            super().start()
        finally:
            if script is not None:
                main.__file__ = script


class _Workers(SpawnContext):
    """Starts processes that do not run the user's script again: without `if __name__ == "__main__":` they would train
    anew. A fork would copy the locks of torch and zarr, and GL's state, half-way through."""

    Process = _Worker


WORKERS = _Workers()


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


def sleep_at_barriers() -> None:
    """Have the threads of OpenMP sleep while they wait for each other; it reads this when torch is loaded. By default
    they spin, and where other programs are busy too, they spin away the time of the thread that they wait for: a step
    of two threads on two busy cores took 1.5 s, now 0.5. OMP_WAIT_POLICY stays where it is set."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_KEEP_BYTES, _TOP_PAD_BYTES = 512 * 2**20, 64 * 2**20


def keep_freed_memory() -> bool:
    """Have glibc keep freed blocks in the process; whether that was set. It gives every large block to the kernel, and
    a training step on a CPU frees hundreds: 1.08x to 3x a step, by the machine. PRISM_ALLOCATOR=system leaves it."""
    if os.environ.get("PRISM_ALLOCATOR") == "system" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl: no mallopt, nothing to set
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(option, value) == 1 for option, value in settings)
