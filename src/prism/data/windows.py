"""Episodes cut into training windows: observations and the actions to predict.

A window at step t of an episode of length T (time convention: prism.types):

    observations  t-To+1 .. t      before the first step: the first observation, repeated
    actions       t .. t+Tp-1      after the last step: the last action, repeated, action_valid False;
                                   where another sentence holds than at t, too: they answer to that one

There is one window per step, and no window crosses episodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from prism.data.episodes import (
    Array,
    BoolArray,
    Episode,
    EpisodeSource,
    FloatArray,
    IntArray,
    read_in_parts,
    read_together,
    step_bytes,
)
from prism.data.features import Kept
from prism.data.history import stacked
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.types import Batch, Observation

# ---------------------------------------------------------------------------
# An order of windows that is random and yet reads neighbouring steps together.
#
# To show one step, most formats decode many: a chunk of zarr, the frames since a key frame, a file an episode. So
# the windows of neighbouring steps form a block, which is read once and kept while its windows are drawn, and many
# blocks are drawn from at a time. Each epoch gives block b of N a random place p(b), and a window of it the time
#
#     t = (p(b) + A u) mod N,    u uniform in [0, 1)
#
# Windows come in the order of t. At any time those of A blocks are mixed, also across the end of the epoch, and block b
# can be forgotten at t = p(b) + A. The memory is that of A blocks, whatever the size of the dataset; one that fits as a
# whole (A >= N) is shuffled without blocks.

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

    def shuffled(self, rng: np.random.Generator, epoch: int, windows: IntArray) -> tuple[IntArray, IntArray]:
        """The given windows in the order of an epoch, and when the block of each can be forgotten: the later, the
        larger, also from one epoch to the next."""
        if self.count <= self.mixed:
            return rng.permutation(windows), np.zeros(len(windows), np.int64)
        places = np.repeat(rng.permutation(self.count), np.diff(self.starts))[windows]
        times = places + self.mixed * rng.random(len(windows))
        # Past the end of the epoch is its beginning: a block there is needed twice.
        ends = places + self.mixed
        ends = np.where(times >= self.count, ends - self.count, np.minimum(ends, self.count)) + epoch * self.count
        order = np.argsort(times % self.count, kind="stable")
        return windows[order], ends[order].astype(np.int64)


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


DEFAULT_CACHE_BYTES = 256 * 2**20
LazyStreams = tuple[dict[str, Array], dict[str, BoolArray]]  # values and presence by sensor name
_CHUNK = 8192  # steps read together when filling the cache


class Windows:
    """All windows of the chosen episodes, fetched a batch at a time.

    Window i is step i of the chosen episodes laid end to end, in the order given. Actions and vectors
    are kept in memory when all of them together fit `cache_bytes`; pixels never are: for each window
    one contiguous slice of its episode is read. Training reads them in `blocks` of neighbouring windows where the
    format decodes many steps to show one (prism.data.windows); None where it does not, or nothing is left to read.
    `weights` of the chosen episodes: how often their windows are drawn (prism.data.mixture); None: all alike.
    `history`: of sensors with one, how many readings a time step holds (prism.data.history).
    `kept`: of cameras whose features are computed already, those: their streams are (B, To, values) float16.
    """

    def __init__(
        self,
        source: EpisodeSource,
        obs_horizon: int,
        pred_horizon: int,
        episodes: Sequence[int] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        weights: FloatArray | None = None,
        history: Mapping[str, int] | None = None,
        kept: Mapping[str, Kept] | None = None,
    ) -> None:
        if obs_horizon < 1 or pred_horizon < 1:
            raise PrismError(f"obs_horizon ({obs_horizon}) and pred_horizon ({pred_horizon}) must be at least 1")
        self.source, self.obs_horizon, self.pred_horizon = source, obs_horizon, pred_horizon
        chosen = np.arange(len(source.lengths)) if episodes is None else np.asarray(episodes, dtype=np.int64)
        if chosen.size == 0:
            raise PrismError(f"{source.path}: no episode was chosen; raise the training fraction or add demonstrations")
        if chosen.min() < 0 or chosen.max() >= len(source.lengths):
            raise PrismError(f"{source.path}: has episodes 0..{len(source.lengths) - 1}, {chosen.max()} was asked for")
        self.episodes: IntArray = chosen.astype(np.int64)
        self._ends: IntArray = np.cumsum(source.lengths[self.episodes], dtype=np.int64)
        self._starts: IntArray = self._ends - source.lengths[self.episodes]
        self.weights = None if weights is None else np.repeat(weights, source.lengths[self.episodes])
        self._obs_offsets = np.arange(1 - obs_horizon, 1)
        self._history = {name: steps for name, steps in (history or {}).items() if steps > 1}
        self._action_offsets = np.arange(pred_horizon)
        vectors = [s for s in source.sensors if s.kind == "vector"]
        row_bytes = 4 * (source.action_dim + sum(s.shape[0] for s in vectors))
        self._cached = len(self) * row_bytes <= cache_bytes
        self._texts = [s.name for s in source.sensors if s.kind == "text"]
        self._told: IntArray = np.empty(0, np.int64)  # of every step: the number of its sentence; -1: no sentence
        self._actions: FloatArray = np.empty((0, source.action_dim), np.float32)
        self._vectors: dict[str, FloatArray] = {}
        self._present: dict[str, BoolArray] = {}
        if self._cached:
            self._fill_cache(vectors)
        self.kept = dict(kept or {})
        here = {*self._vectors, *self.kept}
        self.lazy_sensors: tuple[SensorSpec, ...] = tuple(s for s in source.sensors if s.name not in here)
        self.blocks: Blocks | None = None
        if self.lazy_sensors:
            lengths = source.lengths[self.episodes].tolist()
            self._span = obs_horizon + max(self._history.get(s.name, 1) for s in self.lazy_sensors) - 1
            self.blocks = plan_blocks(lengths, step_bytes(self.lazy_sensors), read_together(source), self._span)
        self._read_blocks = BlockCache(self.blocks.kept if self.blocks else 0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def episode_of(self, indices: IntArray) -> IntArray:
        """The episodes of the source that windows `indices` belong to."""
        which: IntArray = self.episodes[np.searchsorted(self._ends, indices, side="right")]
        return which

    def __getstate__(self) -> dict[str, object]:
        # A worker process only ever calls read_lazy: it gets no copy of what is in memory here.
        return {**self.__dict__, "_vectors": {}, "_present": {}, "_actions": None, "_told": None, "kept": {}}

    def batch(self, indices: IntArray, lazy: LazyStreams | None = None, views: IntArray | None = None) -> Batch:
        """Windows `indices` (B,), in that order: streams (B, To, ...), actions (B, Tp, Da).

        `lazy` is what `read_lazy` gave for the same indices, where another process has read it. `views` (B,): a random
        number for each window, which picks a view of kept features (BatchOrder.views); None: the frames as they are.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"window indices must be in 0..{len(self) - 1}")
        which = np.searchsorted(self._ends, indices, side="right")  # (B,) position in self.episodes
        first, last = self._starts[which, None], self._ends[which, None] - 1
        obs_rows = np.maximum(indices[:, None] + self._obs_offsets, first)  # (B, To)
        action_rows = indices[:, None] + self._action_offsets  # (B, Tp)
        valid = action_rows <= last
        streams: dict[str, Tensor] = {}
        present: dict[str, Tensor] = {}
        if self._cached:
            actions = self._actions[np.minimum(action_rows, last)]
            if self._texts:
                valid &= same_sentence(self._told[np.minimum(action_rows, last)])
            for name, values in self._vectors.items():
                rows = self._readings(name, obs_rows, first)
                mask = self._present.get(name)
                found, here = values[rows], np.ones(rows.shape, np.bool_) if mask is None else mask[rows]
                if name in self._history:
                    found, here = stacked(found, here)  # type: ignore[assignment]
                streams[name], present[name] = torch.from_numpy(found), torch.from_numpy(here)
        else:
            actions, same = self._read_actions(which, indices - first[:, 0])
            valid &= same
        if self.lazy_sensors:
            read, read_present = self.read_lazy(indices) if lazy is None else lazy
            streams |= {name: torch.from_numpy(array) for name, array in read.items()}
            present |= {name: torch.from_numpy(mask) for name, mask in read_present.items()}
        chosen = np.zeros(len(indices), np.int64) if views is None else views
        for name, table in self.kept.items():
            features, here = table.rows(self.episodes[which], obs_rows - first, chosen)
            streams[name], present[name] = torch.from_numpy(features), torch.from_numpy(here)
            chosen = chosen // table.views  # the cameras are moved independently
        order = [sensor.name for sensor in self.source.sensors]
        observation = Observation({n: streams[n] for n in order}, {n: present[n] for n in order})
        return Batch(observation, torch.from_numpy(actions), torch.from_numpy(valid))

    def _readings(self, name: str, steps: IntArray, first: IntArray | int) -> IntArray:
        """Time steps (B, To) -> the rows of their readings: (B, To), with a history (B, To, H); none before `first`."""
        if name not in self._history:
            return steps
        back = np.arange(1 - self._history[name], 1)
        rows: IntArray = np.maximum(steps[..., None] + back, np.asarray(first)[..., None])
        return rows

    def _fill_cache(self, vectors: list[SensorSpec]) -> None:
        names = [sensor.name for sensor in vectors]
        self._actions = np.empty((len(self), self.source.action_dim), np.float32)
        self._vectors = {s.name: np.empty((len(self), s.shape[0]), np.float32) for s in vectors}
        self._told, known = np.empty(len(self), np.int64), dict[bytes, int]()
        for episode, row in zip(self.episodes.tolist(), self._starts.tolist(), strict=True):
            for steps, part in read_in_parts(self.source, episode, _CHUNK, [*names, *self._texts]):
                rows = slice(row + steps.start, row + steps.stop)
                self._actions[rows] = part.actions
                for name in names:
                    self._vectors[name][rows] = part.streams[name]
                self._told[rows] = sentences(part, self._texts, known)
                for name, mask in ((name, part.present[name]) for name in names if name in part.present):
                    self._present.setdefault(name, np.ones(len(self), np.bool_))[rows] = mask

    def _read_actions(self, which: IntArray, steps: IntArray) -> tuple[FloatArray, BoolArray]:
        """Actions (B, Tp, Da), and (B, Tp) where the sentence is that of the first step."""
        actions = np.empty((len(steps), self.pred_horizon, self.source.action_dim), np.float32)
        told = np.full((len(steps), self.pred_horizon), -1)
        for row, (position, step) in enumerate(zip(which.tolist(), steps.tolist(), strict=True)):
            episode = int(self.episodes[position])
            stop = min(step + self.pred_horizon, int(self.source.lengths[episode]))
            part = self.source.read(episode, step, stop, streams=self._texts)
            actions[row, : part.length] = part.actions
            actions[row, part.length :] = part.actions[-1]
            told[row, : part.length] = sentences(part, self._texts, {})
        return actions, same_sentence(told)

    def read_lazy(self, indices: IntArray, ends: IntArray | None = None) -> LazyStreams:
        """The streams of those windows that are not in memory: values (B, To, ...) and presence (B, To).

        With `ends` (BatchOrder.ends) whole blocks are read and kept for the windows to come; without, each window.
        """
        names = [sensor.name for sensor in self.lazy_sensors]
        shapes = {s.name: (len(indices), self.obs_horizon, *self._stack(s.name)) for s in self.lazy_sensors}
        values: dict[str, Array] = {s.name: np.empty((*shapes[s.name], *s.shape), s.dtype) for s in self.lazy_sensors}
        masks = {name: np.ones(shapes[name], np.bool_) for name in names}
        groups = [names] if self.blocks is not None and ends is not None else self._spans(names)
        which = np.searchsorted(self._ends, indices, side="right")
        steps = indices - self._starts[which]
        for row, (position, step) in enumerate(zip(which.tolist(), steps.tolist(), strict=True)):
            window = np.maximum(step + self._obs_offsets, 0)
            for group in groups:
                if self.blocks is not None and ends is not None:
                    part, first = self._block(self.blocks, position, int(indices[row]), int(ends[row]), names)
                else:
                    first = int(self._readings(group[0], window, 0).min())
                    part = self.source.read(int(self.episodes[position]), first, step + 1, streams=group)
                for name in group:
                    rows = self._readings(name, window, 0) - first
                    np.take(part.streams[name], rows, axis=0, out=values[name][row], mode="clip")  # copies once
                    if name in part.present:
                        masks[name][row] = part.present[name][rows]
        for name in self._history.keys() & values.keys():
            values[name], masks[name] = stacked(values[name], masks[name])
        return values, masks

    def _stack(self, name: str) -> tuple[int, ...]:
        return (self._history[name],) if name in self._history else ()

    def _spans(self, names: list[str]) -> list[list[str]]:
        """Sensors with the same history: those are read together, so that no picture is read for a long sound."""
        lengths = sorted({self._history.get(name, 1) for name in names})
        return [[name for name in names if self._history.get(name, 1) == length] for length in lengths]

    def _block(self, blocks: Blocks, position: int, index: int, end: int, names: list[str]) -> tuple[Episode, int]:
        """The block of window `index`, with the steps before it that its windows see, and its first step."""
        block = int(np.searchsorted(blocks.starts, index, side="right")) - 1
        offset = int(self._starts[position])
        first = max(int(blocks.starts[block]) - offset + 1 - self._span, 0)
        stop, episode = int(blocks.starts[block + 1]) - offset, int(self.episodes[position])
        return self._read_blocks.get(block, end, lambda: self.source.read(episode, first, stop, streams=names)), first


def sentences(part: Episode, texts: Sequence[str], known: dict[bytes, int]) -> IntArray:
    """(T,) a number for every different sentence, counted on in `known`; -1 where no text sensor was there."""
    told = np.full(part.length, -1, np.int64)
    for name in texts:
        rows, there = np.asarray(part.streams[name]), part.present.get(name, np.ones(part.length, np.bool_))
        changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
        for start, stop in pairwise([0, *changes.tolist(), part.length]):
            number = known.setdefault(name.encode() + rows[start].tobytes(), len(known))
            told[start:stop] = np.where(there[start:stop], number, told[start:stop])
    return told


def same_sentence(told: IntArray) -> BoolArray:
    """(B, Tp): up to the first action that answers to another sentence than the window's own; without one, all."""
    own = told[:, :1]
    same: BoolArray = np.logical_and.accumulate((told == own) | (own < 0), axis=1)
    return same


def split_episodes(n: int, val_fraction: float, seed: int) -> tuple[IntArray, IntArray]:
    """Episodes 0..n-1 for training and for validation, both sorted; at least one stays for training.

    round(n * val_fraction) are held out: of few episodes none (at 0.05, of ten or fewer), where each one counts.
    """
    if n < 1 or not 0 <= val_fraction < 1:
        raise PrismError(f"val_fraction {val_fraction} must be in [0, 1), and {n} episodes at least 1")
    held_out = min(round(n * val_fraction), n - 1)
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)
