"""Random numbers that belong to rows of the global batch, wherever those rows are computed.

One process draws for its batch. A rank, or one part of an accumulated batch, has only some of the rows: it draws for
the whole global batch from the same generator state and keeps its own rows, so that each row gets the numbers that one
process with the whole batch would have given it. Draw on the CPU: a seed then means the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prism.types import Batch


class RowGenerator(torch.Generator):
    """The generator of a step, for rows start .. start + rows of the `total` of the global batch."""

    start: int
    rows: int
    total: int
    spare: torch.Generator  # for draws that are not a whole number a row


class EachRow(torch.Generator):
    """A generator for every row: contexts of several robots in one batch, each with its own random numbers."""

    generators: Sequence[torch.Generator]


def each_row(generators: Sequence[torch.Generator]) -> EachRow:
    """Row i of what is drawn comes from generators[i], as if it had been drawn alone."""
    own = EachRow()
    own.generators = generators
    return own


def for_rows(rng: torch.Generator, batch: Batch) -> torch.Generator:
    """`rng` as it is now, for the rows of `batch`; `rng` itself where the batch is whole."""
    if batch.share is None or isinstance(rng, RowGenerator):
        return rng
    own = RowGenerator()
    own.set_state(rng.get_state())
    own.start, own.total, own.rows = batch.share.start, batch.share.total, len(batch.actions)
    own.spare = torch.Generator().manual_seed((rng.initial_seed() ^ (0x9E3779B97F4A7C15 * (own.start + 1))) % 2**64)
    return own


def randn(shape: Sequence[int], rng: torch.Generator, dim: int = 0) -> Tensor:
    """torch.randn; dimension `dim` runs over the rows of the batch (or over several entries a row)."""
    return _keep_rows(lambda size, generator: torch.randn(size, generator=generator), shape, rng, dim)


def rand(shape: Sequence[int], rng: torch.Generator, dim: int = 0) -> Tensor:
    """torch.rand, likewise."""
    return _keep_rows(lambda size, generator: torch.rand(size, generator=generator), shape, rng, dim)


def randint(high: int, shape: Sequence[int], rng: torch.Generator, dim: int = 0) -> Tensor:
    """torch.randint(0, high, ...), likewise."""
    return _keep_rows(lambda size, generator: torch.randint(0, high, size, generator=generator), shape, rng, dim)


def _keep_rows(
    draw: Callable[[Sequence[int], torch.Generator], Tensor], shape: Sequence[int], rng: torch.Generator, dim: int
) -> Tensor:
    if isinstance(rng, EachRow):
        single = [*shape]
        single[dim] = shape[dim] // len(rng.generators)
        return torch.cat([draw(single, generator) for generator in rng.generators], dim)
    if not isinstance(rng, RowGenerator):
        return draw(shape, rng)
    entries, rest = divmod(shape[dim], rng.rows)
    if rest:  # rows were left out, because a sensor was missing: no number of these belongs to a row
        return draw(shape, rng.spare)
    whole = [*shape]
    whole[dim] = entries * rng.total
    return draw(whole, rng).narrow(dim, entries * rng.start, shape[dim])
