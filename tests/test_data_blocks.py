"""Windows in blocks: every window once, neighbours read together, batches from many places, little memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.data.loader import BatchOrder, read_batch
from prism.data.windows import BLOCK_BYTES, Blocks, Windows, plan_blocks
from prism.errors import PrismError
from tests.data_fakes import MemorySource, counting_source

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
few_examples = settings(max_examples=40)


@few_examples
@given(LENGTHS, st.integers(2, 9), st.integers(1, 4), st.integers(40, 400))
def test_blocks_cut_episodes_into_short_parts_that_fit(
    lengths: list[int], together: int, horizon: int, fit: int
) -> None:
    blocks = plan_blocks(lengths, 10, together, horizon, budget=10 * fit)
    if blocks is None:
        assert fit // 16 - (horizon - 1) < 2
        return
    sizes = np.diff(blocks.starts)
    assert set(np.cumsum(lengths).tolist()) <= set(blocks.starts.tolist())  # none crosses from one episode to the next
    assert 1 <= sizes.min() <= sizes.max() <= together
    assert blocks.kept * (int(sizes.max()) + horizon - 1) <= fit


def test_no_blocks_where_any_step_is_cheap_or_too_few_fit() -> None:
    assert plan_blocks([100], 10, 0, 2) is None
    assert plan_blocks([100], BLOCK_BYTES // 20, 32, 2) is None


@few_examples
@given(LENGTHS, st.integers(3, 9), st.integers(0, 3))
def test_an_epoch_has_every_window_once(lengths: list[int], kept: int, seed: int) -> None:
    planned = plan_blocks(lengths, 10, 4, 2)
    assert planned is not None
    order = Blocks(planned.starts, kept).shuffled(np.random.default_rng(seed), 0, np.arange(sum(lengths)))[0]
    assert sorted(order.tolist()) == list(range(sum(lengths)))


def test_what_fits_as_a_whole_is_shuffled_as_without_blocks() -> None:
    blocks = Blocks(np.arange(0, 101, 4), kept=40)
    assert BatchOrder(100, 8, 3, blocks=blocks).indices(5).tolist() == BatchOrder(100, 8, 3).indices(5).tolist()


def test_a_batch_is_from_many_places_and_a_block_is_needed_only_for_a_while() -> None:
    blocks = Blocks(np.arange(0, 32 * 500 + 1, 32), kept=66)
    order = BatchOrder(32 * 500, 64, 0, blocks=blocks)
    of = [order.indices(step) // 32 for step in range(order.steps_per_epoch)]
    # 64 draws from 64 blocks touch 64 (1 - 1/e) = 40 of them
    assert np.mean([len(set(batch.tolist())) for batch in of]) > 37
    assert min(len(set(batch.tolist())) for batch in of) > 28  # also the first and the last
    place = {int(b): i for i, b in enumerate(dict.fromkeys(np.concatenate(of[70:180]).tolist()))}
    far = [place[int(b)] for b in of[175]]
    assert max(far) - min(far) < 100  # of the 250 blocks begun since


@few_examples
@given(st.integers(0, 400), st.integers(1, 3))
def test_a_step_is_the_same_at_any_time_and_for_any_number_of_ranks(step: int, world: int) -> None:
    blocks = Blocks(np.arange(0, 121, 4), kept=7)
    whole = BatchOrder(120, 9, 2, blocks=blocks)
    for earlier in range(0, step, 5):
        whole.indices(earlier)
    ranks = [BatchOrder(120, 9, 2, rank, world, blocks) for rank in range(world)]
    assert np.concatenate([order.indices(step) for order in ranks]).tolist() == whole.indices(step).tolist()
    ends = [order.ends(step) for order in (whole, *ranks)]
    assert ends[0] is not None
    assert np.concatenate(ends[1:]).tolist() == ends[0].tolist()  # type: ignore[arg-type]


class Counted(MemorySource):
    """A format that decodes 8 steps to show one."""

    read_together = 8


def test_training_reads_each_block_about_once_and_gets_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(*arguments: Any) -> Blocks | None:
        planned = plan_blocks(*arguments)
        return planned and Blocks(planned.starts, kept=8)

    monkeypatch.setattr("prism.data.windows.plan_blocks", few)
    plain = counting_source([50, 33, 64, 21], images=True)
    source = Counted(plain.episodes, plain.sensors)
    windows = Windows(source, 3, 4)
    blocks = windows.blocks
    assert blocks is not None
    assert blocks.mixed < blocks.count
    order = BatchOrder(len(windows), 6, 1, blocks=blocks)
    source.reads.clear()
    batches = [read_batch(windows, order, step) for step in range(order.steps_per_epoch)]
    reads = [read for read in source.reads if read[3] == ("cam",)]
    assert len(reads) <= blocks.count + blocks.mixed  # twice only those that the end of the epoch goes through
    alone = Windows(plain, 3, 4)
    assert alone.blocks is None
    for step, batch in enumerate(batches):
        expected = alone.batch(order.indices(step))
        assert (batch.observation.streams["cam"] == expected.observation.streams["cam"]).all()


def test_blocks_of_another_dataset() -> None:
    with pytest.raises(PrismError, match="12 windows"):
        BatchOrder(10, 2, 0, blocks=Blocks(np.arange(0, 13, 4), 3))
