"""Broadcast, gather and reduce over ranks: thin wrappers over torch.distributed that do nothing in one process.

Every rank must come to every call, in the same order. `share_errors` makes an error of one rank the error of all, so
that no rank waits for one that has given up; a rank that died or hangs ends the wait of the others after `TIMEOUT`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from prism import rows
from prism.errors import PrismError, reason

TIMEOUT = "PRISM_TIMEOUT"  # environment variable: seconds that a rank waits for the others
_DEFAULT_TIMEOUT = 600.0
DEVICES = ("auto", "cpu", "cuda", "mps")
_LEFT: list[object] = []  # process groups of this process, kept to its end


class ReportedError(PrismError):
    """An error that rank 0 shows: the other ranks only have to end."""


@contextmanager
def collective() -> Iterator[None]:
    """Around a call to the other ranks: a RuntimeError from there means that one of them is gone or stuck."""
    try:
        yield
    except torch.OutOfMemoryError:  # ours, in a backward pass
        raise
    except RuntimeError as error:  # gloo has no type of its own for it; DistBackendError, ... are RuntimeErrors
        if world_size() == 1:
            raise
        raise PrismError(
            f"rank {rank()} lost another rank ({reason(error)}): the checkpoints are intact; "
            "see what ended that rank, then continue with --resume"
        ) from error


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def is_leader() -> bool:
    """Rank 0 writes the files and talks."""
    return rank() == 0


def choose_device(name: str = "auto") -> torch.device:
    """cpu, cuda or mps; `auto` is cuda where there is one, else the CPU. cuda is this rank's own device."""
    if name not in DEVICES:
        raise PrismError(f"--device {name} is unknown: use {', '.join(DEVICES)}")
    there = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise PrismError(f"--device {name}: PyTorch sees no {name} device here; use --device cpu")
    if name == "mps" and world_size() > 1:
        raise PrismError("--device mps is one device, and the ranks are several: train without torchrun")
    return torch.device(("cuda" if there["cuda"] else "cpu") if name == "auto" else name)


@contextmanager
def session() -> Iterator[None]:
    """Join the other ranks when torchrun started us (RANK, WORLD_SIZE, ... in the environment), and leave them at the
    end. gloo between CPUs, nccl between GPUs. Alone, or inside another session: nothing happens.

    The sockets of the group stay open until the process ends (_LEFT): a program of yours that works on after an error
    keeps the other ranks waiting, up to PRISM_TIMEOUT."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or world_size() > 1:
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, own, size = next(rendezvous("env://", timeout=timeout()))
        store = PrefixStore(_meet(store, own, size, timeout().total_seconds()), store)
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=timeout())
    except (RuntimeError, ValueError) as error:
        raise PrismError(f"the ranks did not find each other ({reason(error)}); start them with torchrun") from error
    # A group ends by joining its threads, and one of them may wait for Python's lock to drop its last tensors. The
    # Python object gives that lock away meanwhile; DistributedDataParallel's reducer, which an exception's traceback
    # keeps until later, does not, and the rank would never end (PyTorch 2.13). So the reducer must not be the last.
    _LEFT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meet(store: dist.Store, own: int, size: int, seconds: float) -> str:
    """A name for this meeting of the ranks that no earlier one had.

    torchrun restarts the ranks with the store of the attempt before, where the addresses of dead processes still are;
    PyTorch 2.13's gloo connects to those and waits without end, and the number of restarts is each machine's own. So
    every rank leaves a word of its own, rank 0 collects them until every rank has confirmed to be in the collection.
    """
    word = uuid4().hex
    store.set(f"prism/word/{own}", word)
    deadline = time.monotonic() + seconds
    published = ""
    while time.monotonic() < deadline:
        if own == 0 and _all_there(store, "word", size):
            words = "-".join(_read(store, "word", at) for at in range(size))
            if words != published:
                store.set("prism/words", words)
                published = words
        if store.check(["prism/words"]):
            words = store.get("prism/words").decode()
            if words.split("-")[own : own + 1] == [word]:
                store.set(f"prism/seen/{own}", words)
                seen = own == 0 and _all_there(store, "seen", size)
                if seen and all(_read(store, "seen", at) == words for at in range(size)):
                    store.set("prism/agreed", words)
                if store.check(["prism/agreed"]) and store.get("prism/agreed").decode() == words:
                    return hashlib.sha256(words.encode()).hexdigest()[:16]
        time.sleep(0.02)
    raise PrismError(f"rank {own} waited {seconds:g} s for the other {size - 1} ranks to start: see what ended them")


def _all_there(store: dist.Store, name: str, size: int) -> bool:
    return bool(store.check([f"prism/{name}/{at}" for at in range(size)]))


def _read(store: dist.Store, name: str, at: int) -> str:
    return str(store.get(f"prism/{name}/{at}").decode())


def timeout() -> timedelta:
    text = os.environ.get(TIMEOUT, str(_DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise PrismError(f"{TIMEOUT} is '{text}'; give a number of seconds above 0")
    return timedelta(seconds=seconds)


def rows_of(total: int, at: int, size: int) -> tuple[int, int]:
    """Rows start, stop of rank `at` of `size`: contiguous, in the order of the ranks, as equal as can be."""
    return at * total // size, (at + 1) * total // size


def gather_rows(own: Tensor, total: int) -> Tensor:
    """The `total` rows of all ranks in global order; each has its `rows_of`. Without gradient."""
    size = world_size()
    if size == 1:
        return own
    counts = [stop - start for start, stop in (rows_of(total, r, size) for r in range(size))]
    if own.shape[0] != counts[rank()]:
        raise PrismError(f"rank {rank()} has {own.shape[0]} of {total} rows, not its share of {counts[rank()]}")
    return torch.cat(_gather(own.detach(), counts))


def _gather(own: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of every rank, which has `counts` of them."""
    padded = own.new_zeros(max(1, *counts), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    with collective():
        dist.all_gather(parts, padded)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _counts(own: int) -> list[int]:
    return [int(part) for part in _gather(torch.tensor([own], dtype=torch.int64), [1] * world_size())]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise, in place."""
    if world_size() > 1:
        with collective():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Elementwise. A value that only rank 0 has set (others 0) is thereby broadcast."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    with collective():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    result: list[float] = tensor.tolist()
    return result


def broadcast(data: bytes) -> bytes:
    """Rank 0's bytes, on every rank."""
    if world_size() == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64)
    with collective():
        dist.broadcast(length, src=0)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if is_leader() and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(buffer):
        with collective():
            dist.broadcast(buffer, src=0)
    return data if is_leader() else buffer.numpy().tobytes()


def gather_text(text: str) -> list[str]:
    """One text a rank, on every rank."""
    if world_size() == 1:
        return [text]
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [part.numpy().tobytes().decode() for part in _gather(data, _counts(len(data)))]


@contextmanager
def share_errors() -> Iterator[None]:
    """An error on one rank ends all: rank 0 raises it and names the rank, the others raise ReportedError."""
    if world_size() == 1:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except ReportedError:
        raise  # all ranks know already
    except Exception as error:
        own = error
    name = "" if own is None or isinstance(own, PrismError) else f"{type(own).__name__}: "
    messages = gather_text("" if own is None else f"{name}{own}" or type(own).__name__)
    failed = [at for at, message in enumerate(messages) if message]
    if not failed:
        return
    if is_leader():
        if own is not None:
            raise own
        raise PrismError(f"rank {failed[0]}: {messages[failed[0]]}")
    raise ReportedError(f"rank {failed[0]}: {messages[failed[0]]}") from own


@dataclass(frozen=True)
class RankShare(rows.Share):
    """The rows of this rank. Every rank must ask the same."""

    def gather(self, own: Tensor) -> Tensor:
        return own if self.total is None else gather_rows(own, self.total)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        return quantile(values, q)


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of the values of all ranks. They are gathered: the objective bounds how many there are."""
    if world_size() == 1:
        return rows.quantile(values, q)
    flat = values.detach().flatten()
    return rows.quantile(torch.cat(_gather(flat, _counts(len(flat)))), q)
