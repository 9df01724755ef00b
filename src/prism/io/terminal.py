"""The terminal of a program, and its loss: a window that is closed, a cable or an ssh connection that is cut."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

STATUS = 129  # of a program that ends by SIGHUP, as shells report it


class TerminalLost(KeyboardInterrupt):
    """As Ctrl-C: clean up and end."""

    def __init__(self) -> None:
        super().__init__("the terminal was lost")


def end_by_signals() -> None:
    """From now on SIGTERM and SIGHUP end the program as Ctrl-C does. Under nohup it continues without its terminal."""
    signal.signal(signal.SIGTERM, lambda number, frame: _end(KeyboardInterrupt()))
    on_hangup(lambda: _end(TerminalLost()))


def on_hangup(call: Callable[[], None]) -> None:
    """SIGHUP calls `call`, once: a shell passes it on, and the kernel sends another one when the shell ends."""

    def hung_up(number: int, frame: object) -> None:
        _ignore_hangups()
        call()

    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


def _end(how: KeyboardInterrupt) -> None:
    _ignore_hangups()  # the one that is ending saves what it has
    drop_lost_outputs()
    raise how


def _ignore_hangups() -> None:
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def drop_lost_outputs() -> None:
    """What is printed from now on is discarded if the terminal is gone."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            number = -1 if stream is None else stream.fileno()
        except (OSError, ValueError):
            continue
        if number >= 0 and _is_lost(number):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def _is_lost(number: int) -> bool:
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
