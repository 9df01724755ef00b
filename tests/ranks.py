"""Several gloo ranks in processes of a test: `run_ranks(2, function, ...)` -> what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from prism import ranks

# Imported once, for all ranks: what they need, and what torch imports with its first optimiser (seconds, each).
PRELOAD = [
    *("torch._dynamo", "prism.training.trainer", "prism.experiments.workflow"),
    *("tests.test_training", "tests.test_distributed", "tests.test_distributed_training"),
]


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 300.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """function(rank, *arguments) on every rank; an exception comes back as (type name, message)."""
    # Not forked from here: other tests leave threads behind, and a lock that one holds is held for ever in a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # As under torchrun the store is not of a rank: a port that is free now may be another's when rank 0 has started.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        variables = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"},
            **{"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            **{ranks.TIMEOUT: "240", **(environment or {})},  # a busy machine is slow, a hang is for ever
        }
        process = context.Process(target=_rank, args=(theirs, variables, function, rank, arguments))
        process.start()
        theirs.close()
        started.append((process, mine))
    results = []
    for process, pipe in started:
        try:
            results.append(pipe.recv() if pipe.poll(timeout) else ("hung", ""))
        except EOFError:
            results.append(("died", ""))
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
    return results


def run_all(rank: int, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Several functions, one after the other, in one group of ranks: most of the time of a small one is its start."""
    return {name: function(rank, *arguments) for name, (function, *arguments) in calls.items()}


def _rank(
    pipe: Connection, variables: dict[str, str], function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    try:
        with ranks.session():
            result = function(rank, *arguments)
    except Exception as error:
        if os.environ.get("PRISM_DEBUG"):
            traceback.print_exc()
        result = (type(error).__name__, str(error))
    pipe.send(result)
    pipe.close()
