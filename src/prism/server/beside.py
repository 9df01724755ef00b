"""A server beside a robot's loop, in this process: the loop asks it for plans, and people watch its live page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prism.server.policy_server import PolicyServer

THREAD = "live page"


@contextmanager
def served(server: PolicyServer) -> Iterator[PolicyServer]:
    """A server in a thread with its own event loop."""
    started = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    failure: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await server.run(stop, started.set)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    started.wait()
    try:
        if failure:
            raise failure[0]
        yield server
    finally:
        if loops and thread.is_alive():
            loops[0][0].call_soon_threadsafe(loops[0][1].set)
        thread.join(timeout=30.0)
