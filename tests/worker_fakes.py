"""Jobs for the worker pool that import nothing heavy: a spawned process is up in a moment."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from prism.errors import PrismError


def _square(job: int, counter: Path, deaths: int, how: str) -> tuple[int, int]:
    """job squared and the process that did it; job 2 goes wrong `deaths` times first, counted in a folder."""
    if job == 2 and (count := len(list(counter.iterdir()))) < deaths:
        (counter / str(count)).touch()
        if how == "exit":
            os._exit(17)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuse":
            raise PrismError("job 2 is not for us")
        raise ZeroDivisionError("division by a job\nand more lines of it")
    return job * job, os.getpid()


def setup(counter: Path, deaths: int, how: str) -> Callable[[int], tuple[int, int]]:
    return functools.partial(_square, counter=counter, deaths=deaths, how=how)


def hopeless(counter: Path) -> Callable[[int], None]:
    """A worker that dies before it can do anything."""
    (counter / str(os.getpid())).touch()
    os._exit(3)


def forever(folder: Path) -> Callable[[int], None]:
    """Jobs that leave their process number in the folder and then wait."""
    return functools.partial(_wait, folder)


def _wait(folder: Path, job: int) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(600)
