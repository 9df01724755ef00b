"""An order of windows that is random and yet reads neighbouring steps together.

To show one step, most formats decode many: a chunk of zarr, the frames since the last key frame, a file an episode. So
the windows of neighbouring steps form a block, which is read once and kept while its windows are drawn, and many
blocks are drawn from at a time. Each epoch gives block b of N a random place p(b), and a window of it the time

    t = (p(b) + A u) mod N,    u uniform in [0, 1)

Windows come in the order of t. At any time those of A blocks are mixed, also across the end of the epoch, and block b
can be forgotten at t = p(b) + A. The memory is that of A blocks, whatever the size of the dataset; one that fits as a
whole (A >= N) is shuffled without blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prism.data.episodes import Episode, IntArray

BLOCK_BYTES = 64 * 2**20  # of decoded blocks, kept by each process that reads
_MIXED = (32, 16)  # blocks that should be mixed at least; the second where a step is large


@dataclass(frozen=True)
class Blocks:
    """Which windows are read together: block b is windows starts[b] .. starts[b + 1] - 1, all of one episode."""

    starts: IntArray  # (N + 1,)
    kept: int  # blocks that are held in memory

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def mixed(self) -> int:
        """A: blocks that are drawn from at any time; one more is about to begin or to end."""
        return max(self.kept - 1, 1)

    def shuffled(self, rng: np.random.Generator, epoch: int) -> tuple[IntArray, IntArray]:
        """Every window once, in the order of an epoch, and when the block of each can be forgotten: the later, the
        larger, also from one epoch to the next."""
        windows = int(self.starts[-1])
        if self.count <= self.mixed:
            return rng.permutation(windows).astype(np.int64), np.zeros(windows, np.int64)
        places = np.repeat(rng.permutation(self.count), np.diff(self.starts))
        times = places + self.mixed * rng.random(windows)
        # Past the end of the epoch is its beginning: a block there is needed twice.
        ends = places + self.mixed
        ends = np.where(times >= self.count, ends - self.count, np.minimum(ends, self.count)) + epoch * self.count
        order = np.argsort(times % self.count, kind="stable")
        return order.astype(np.int64), ends[order].astype(np.int64)


def plan_blocks(
    lengths: Sequence[int], step_bytes: int, together: int, obs_horizon: int, budget: int = BLOCK_BYTES
) -> Blocks | None:
    """Blocks of at most `together` steps of episodes of these lengths, so short that enough of them fit `budget`.

    A block also holds the obs_horizon - 1 steps before it. None: single windows may as well be read, because any step
    is cheap (together < 2), or because so few steps fit that a batch would be from a few places only.
    """
    steps = budget // max(step_bytes, 1)
    sizes = [min(steps // mixed - (obs_horizon - 1), together) for mixed in _MIXED]
    size = next((size for size in sizes if size >= 2), 0)
    if not size:
        return None
    starts = [0]
    for length in lengths:
        parts = -(-length // size)
        first = starts[-1]
        starts += [first + length * (part + 1) // parts for part in range(parts)]
    return Blocks(np.array(starts, np.int64), steps // (size + obs_horizon - 1))


class BlockCache:
    """Blocks that will be asked for again; where there are too many, the one that is needed for the shortest time
    goes. (Which was used or read first says little: draws are random.)"""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._blocks: dict[int, tuple[int, Episode]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[BlockCache], tuple[int]]:
        return BlockCache, (self._kept,)  # another process reads for itself

    def get(self, block: int, end: int, read: Callable[[], Episode]) -> Episode:
        """`end`: when it can be forgotten (Blocks.shuffled)."""
        with self._lock:
            found = self._blocks.pop(block, None)
            while found is None and len(self._blocks) >= self._kept:  # first: there are never more than these
                del self._blocks[min(self._blocks, key=lambda known: self._blocks[known][0])]
            content = read() if found is None else found[1]
            self._blocks[block] = end, content
            return content
