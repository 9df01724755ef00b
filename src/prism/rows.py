"""Rows of the global batch, wherever they are computed: their random numbers, and what they need of the others.

One process holds the whole batch. A rank, or one part of an accumulated batch, holds some of its rows. `Random` draws
for the whole global batch and keeps the rows at hand, so that a row gets the same numbers in every split. `Share`
answers for the whole batch what cannot be seen in some of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

Distribution = Callable[..., Tensor]  # (shape, generator=...)
T = TypeVar("T")
_MASK = (1 << 64) - 1


def derive_seed(seed: int, stream: int, index: int) -> int:
    """A 64-bit seed from (seed, stream, index): three rounds of splitmix64.

    The generator of a step depends on nothing but its number, so a resumed run needs no generator state.
    """
    value = 0
    for part in (seed, stream, index):
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


class Random:
    """Random numbers for the rows of a batch; every draw is on the CPU, so a seed means the same on every device.

    Dimension `dim` of a shape runs over the rows (or over the same number of entries a row).
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def manual_seed(self, seed: int) -> Self:
        self.generator.manual_seed(seed)
        return self

    def randn(self, shape: Sequence[int], dim: int = 0) -> Tensor:
        return self.draw(torch.randn, shape, dim)

    def rand(self, shape: Sequence[int], dim: int = 0) -> Tensor:
        return self.draw(torch.rand, shape, dim)

    def randint(self, high: int, shape: Sequence[int], dim: int = 0) -> Tensor:
        return self.draw(partial(torch.randint, 0, high), shape, dim)

    def draw(self, draw: Distribution, shape: Sequence[int], dim: int) -> Tensor:
        return draw(tuple(shape), generator=self.generator)


class PartRandom(Random):
    """The numbers of rows start .. start + rows of a global batch of `total` rows."""

    def __init__(self, seed: int, start: int, rows: int, total: int) -> None:
        super().__init__(seed)
        self.start, self.rows, self.total = start, rows, total

    def draw(self, draw: Distribution, shape: Sequence[int], dim: int) -> Tensor:
        entries, rest = divmod(shape[dim], self.rows)
        if rest:
            raise ValueError(f"dimension {dim} of {tuple(shape)} is not a multiple of the {self.rows} rows at hand")
        whole = [*shape]
        whole[dim] = entries * self.total
        return super().draw(draw, whole, dim).narrow(dim, entries * self.start, shape[dim])


class EachRandom(Random):
    """A source for every row: row i draws from sources[i], as if it were alone. For contexts of several robots."""

    def __init__(self, sources: Sequence[Random]) -> None:
        super().__init__()
        self.sources = sources

    def draw(self, draw: Distribution, shape: Sequence[int], dim: int) -> Tensor:
        single = [*shape]
        single[dim] = shape[dim] // len(self.sources)
        return torch.cat([source.draw(draw, single, dim) for source in self.sources], dim)


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of all entries, linearly interpolated; torch.quantile refuses more than 16 M of them."""
    flat = values.flatten()
    position = q * (flat.numel() - 1)
    low = math.floor(position)
    lower = flat.kthvalue(low + 1).values
    if low + 1 >= flat.numel():
        return lower
    return torch.lerp(lower, flat.kthvalue(low + 2).values, position - low)


def cut_rows(value: T, start: int, stop: int) -> T:
    """Rows start .. stop of a dataclass of tensors (or None). Its numbers and its logs concern all rows: they stay."""
    if value is None:
        return value
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
    cut: dict[str, Any] = {k: v[start:stop] for k, v in tensors.items() if isinstance(v, Tensor) and v.ndim}
    return replace(value, **cut)  # type: ignore[type-var]


@dataclass(frozen=True)
class Share:
    """Rows start .. start + B of a global batch of `total`, and what the choice of candidates asks about all of it.

    Here the rows at hand are all there are; ranks.RankShare answers over ranks.
    """

    start: int = 0
    total: int | None = None  # G; None: the rows at hand are all

    def random(self, seed: int, rows: int) -> Random:
        """The random numbers of the first `rows` rows of this share, the same in every split of the global batch."""
        return Random(seed) if self.total is None else PartRandom(seed, self.start, rows, self.total)

    def gather(self, own: Tensor) -> Tensor:
        """(B, ...) -> (G, ...), in global order, without gradient."""
        return own

    def quantile(self, values: Tensor, q: float) -> Tensor:
        """The q-quantile of the values of the whole batch."""
        return quantile(values, q)


WHOLE = Share()
