"""Which windows make up training step s, and having them ready in time.

The order is a function of (seed, step) alone: a resumed run asks for step s and gets the batch that an
uninterrupted one would have got.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from prism.data.episodes import FloatArray, IntArray
from prism.data.mixture import drawn, epoch_size
from prism.data.windows import Blocks, LazyStreams, Windows
from prism.errors import PrismError
from prism.io.processes import end_with_parent, leave_signals_to_parent
from prism.ranks import RankShare
from prism.types import Batch


@dataclass(frozen=True)
class BatchOrder:
    """Shuffled windows, epoch after epoch. No window comes twice in an epoch; the windows that do not
    fill a last batch are left out of that epoch (each epoch leaves out others).

    With several ranks, `batch_size` is the global batch and each rank takes its contiguous share, as equal as can be:
    the order of an epoch is the same for every number of ranks. `blocks` (Windows.blocks): shuffled so that neighbours
    can be read together. `weights` (Windows.weights): an epoch has a share of the windows, drawn anew for each.
    """

    num_windows: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    blocks: Blocks | None = field(default=None, repr=False, compare=False)
    weights: FloatArray | None = field(default=None, repr=False, compare=False)
    _last: dict[int, tuple[IntArray, IntArray | None]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_windows < 1 or self.batch_size < 1 or self.seed < 0:
            raise PrismError(
                f"batches need windows ({self.num_windows}), a size ({self.batch_size}) and a seed ({self.seed}) >= 0"
            )
        if self.blocks is not None and int(self.blocks.starts[-1]) != self.num_windows:
            raise PrismError(f"the blocks are of {self.blocks.starts[-1]} windows, the order of {self.num_windows}")
        if not 0 <= self.rank < self.world_size:
            raise PrismError(f"rank {self.rank} is not one of {self.world_size}")
        if min(self.batch_size, self.epoch_size) < self.world_size:
            raise PrismError(
                f"{self.world_size} ranks cannot share a batch of {self.batch_size} of {self.epoch_size} windows: "
                "each needs at least one; use fewer ranks or a larger batch"
            )

    @cached_property
    def epoch_size(self) -> int:
        return self.num_windows if self.weights is None else epoch_size(self.weights)

    @property
    def steps_per_epoch(self) -> int:
        return max(self.epoch_size // self.batch_size, 1)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def share(self) -> RankShare:
        """Which rows of the global batch this rank has; a dataset smaller than a batch is one batch."""
        size = min(self.batch_size, self.epoch_size)
        return RankShare(self.rank * size // self.world_size, size)

    def indices(self, step: int) -> IntArray:
        """The windows of training step `step` (from 0) for this rank."""
        return self._order(self.epoch(step))[0][self._rows(step)]

    def ends(self, step: int) -> IntArray | None:
        """When the block of each of these windows can be forgotten (Windows.read_lazy); None: there are no blocks."""
        ends = self._order(self.epoch(step))[1]
        return None if ends is None else ends[self._rows(step)]

    def views(self, step: int) -> IntArray:
        """A random number for each of these windows: which view of kept features it shows (prism.data.features)."""
        size = min(self.batch_size, self.epoch_size)
        drawn = np.random.default_rng([self.seed, step, 1]).integers(2**31, size=size)
        return drawn[slice(*(at * size // self.world_size for at in (self.rank, self.rank + 1)))]

    def _rows(self, step: int) -> slice:
        size = min(self.batch_size, self.epoch_size)
        first = step % self.steps_per_epoch * self.batch_size
        return slice(*(first + at * size // self.world_size for at in (self.rank, self.rank + 1)))

    def _order(self, epoch: int) -> tuple[IntArray, IntArray | None]:
        order = self._last.get(epoch)
        if order is None:
            rng = np.random.default_rng([self.seed, epoch])
            windows = np.arange(self.num_windows) if self.weights is None else drawn(self.weights, rng)
            if self.blocks is None:
                order = rng.permutation(windows), None
            else:
                order = self.blocks.shuffled(rng, epoch, windows)
            while len(self._last) > 1:  # two: a prefetching reader is at most one epoch ahead
                self._last.pop(next(iter(self._last)))
            self._last[epoch] = order
        return order


_worker_windows: Windows | None = None  # in a worker process: what it reads from


def _start_worker(windows: Windows) -> None:
    global _worker_windows
    leave_signals_to_parent()  # the training stops politely, and needs its batches until then
    end_with_parent()
    _worker_windows = windows


def _work(indices: IntArray, ends: IntArray | None) -> LazyStreams:
    assert _worker_windows is not None
    return _worker_windows.read_lazy(indices, ends)


def read_batch(windows: Windows, order: BatchOrder, step: int) -> Batch:
    """The batch of a step, for those who ask for one step after the other."""
    indices = order.indices(step)
    lazy = windows.read_lazy(indices, order.ends(step)) if windows.lazy_sensors else None
    return windows.batch(indices, lazy, order.views(step))


class Loader:
    """Batches of `order`, from `start_step` on, without end, prepared ahead of their use.

    Windows that are in memory are cut at once, in the caller's thread: that takes less than handing
    them over. Where pixels must be read, one thread keeps `depth` batches ready, or `workers`
    processes do, each its part of every batch. Either way the batches come in the order of the steps.
    """

    def __init__(
        self, windows: Windows, order: BatchOrder, start_step: int = 0, workers: int = 0, depth: int = 3
    ) -> None:
        if workers < 0 or depth < 1 or start_step < 0:
            raise PrismError(f"workers ({workers}) and start_step ({start_step}) must be >= 0, depth ({depth}) >= 1")
        if order.num_windows != len(windows):
            raise PrismError(f"the order is over {order.num_windows} windows, the dataset has {len(windows)}")
        self._windows, self._order, self._step = windows, order, start_step
        self._thread: threading.Thread | None = None
        self._pools: list[ProcessPoolExecutor] = []  # of one process each: a block has its reader
        self._pending: deque[list[tuple[IntArray, Future[LazyStreams]]]] = deque()
        self._ahead = depth + workers
        self._closed = threading.Event()
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        if not windows.lazy_sensors:
            return
        if workers:
            spawn = multiprocessing.get_context("spawn")  # imports a dataset's class from the user's script
            self._pools = [ProcessPoolExecutor(1, spawn, _start_worker, (windows,)) for _ in range(workers)]
        else:
            self._thread = threading.Thread(target=self._fill, args=(start_step,), daemon=True, name="prism-loader")
            self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        batch = self._from_pools() if self._pools else self._from_thread() if self._thread else self._make(self._step)
        self._step += 1
        return batch

    def close(self) -> None:
        self._closed.set()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            pool.shutdown(wait=True)
        if self._thread is not None:
            while self._thread.is_alive():
                with suppress(queue.Empty):  # it may be waiting for a free place
                    self._ready.get_nowait()
                self._thread.join(timeout=0.05)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, step: int) -> Batch:
        return read_batch(self._windows, self._order, step)

    def _fill(self, step: int) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(self._make(step))
            except BaseException as error:  # handed to the caller, who raises it
                self._ready.put(error)
                return
            step += 1

    def _from_thread(self) -> Batch:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def _from_pools(self) -> Batch:
        try:
            while len(self._pending) < self._ahead:
                self._pending.append(self._submit(self._step + len(self._pending)))
            parts = [(rows, future.result()) for rows, future in self._pending.popleft()]
        except BrokenProcessPool:
            raise PrismError(
                f"{self._windows.source.path}: a process that reads the dataset was killed (out of memory?); use "
                f"fewer: --set train.workers={len(self._pools) - 1}"
            ) from None
        indices = self._order.indices(self._step)
        return self._windows.batch(indices, _joined(parts, len(indices)), self._order.views(self._step))

    def _submit(self, step: int) -> list[tuple[IntArray, Future[LazyStreams]]]:
        """Rows of the batch and who reads them: always the same process for a block, so that it is read once."""
        indices, ends, blocks = self._order.indices(step), self._order.ends(step), self._windows.blocks
        unit = indices if blocks is None else np.searchsorted(blocks.starts, indices, side="right")
        shares = [np.flatnonzero(unit % len(self._pools) == number) for number in range(len(self._pools))]
        return [
            (rows, pool.submit(_work, indices[rows], None if ends is None else ends[rows]))
            for rows, pool in zip(shares, self._pools, strict=True)
            if len(rows)
        ]


def _joined(parts: Sequence[tuple[IntArray, LazyStreams]], count: int) -> LazyStreams:
    """The rows that several processes have read, in one place."""
    if len(parts) == 1:
        return parts[0][1]
    first_values, first_masks = parts[0][1]
    values = {name: np.empty((count, *part.shape[1:]), part.dtype) for name, part in first_values.items()}
    masks = {name: np.empty((count, *part.shape[1:]), np.bool_) for name, part in first_masks.items()}
    for rows, (read, present) in parts:
        for name, array in values.items():
            array[rows] = read[name]
            masks[name][rows] = present[name]
    return values, masks
