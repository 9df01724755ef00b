"""The order of batches is a function of the step, and the loader keeps it."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.data import open_dataset
from prism.data.loader import BatchOrder, Loader
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.types import Batch
from tests.data_fakes import counting_source
from tests.data_files import write_calvin


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 3))
def test_an_epoch_never_repeats_a_window_and_drops_only_the_ragged_end(windows: int, batch: int, seed: int) -> None:
    order = BatchOrder(windows, batch, seed)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = np.concatenate([order.indices(step) for step in steps])
        assert len(set(seen.tolist())) == len(seen) == (windows // batch * batch if windows >= batch else windows)
        assert seen.min() >= 0
        assert seen.max() < windows


@given(st.integers(1, 500))
def test_a_step_can_be_asked_for_at_any_time(step: int) -> None:
    straight = BatchOrder(50, 8, seed=3)
    for earlier in range(step):
        straight.indices(earlier)
    assert straight.indices(step).tolist() == BatchOrder(50, 8, seed=3).indices(step).tolist()


def test_epochs_and_seeds_differ() -> None:
    order = BatchOrder(100, 100, seed=0)
    assert order.indices(0).tolist() != order.indices(1).tolist()
    assert order.indices(0).tolist() != BatchOrder(100, 100, seed=1).indices(0).tolist()
    assert order.indices(0).tolist() != list(range(100))


@given(st.integers(1, 4), st.integers(4, 60), st.integers(0, 20))
def test_ranks_share_the_global_batch(world: int, windows: int, step: int) -> None:
    whole = BatchOrder(windows, 8, seed=1).indices(step)
    orders = [BatchOrder(windows, 8, seed=1, rank=rank, world_size=world) for rank in range(world)]
    parts = [order.indices(step) for order in orders]
    assert np.concatenate(parts).tolist() == whole.tolist()  # the same epoch for any number of ranks, nothing twice
    sizes = [len(part) for part in parts]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    assert [order.share().start for order in orders] == np.cumsum([0, *sizes[:-1]]).tolist()
    assert {order.share().total for order in orders} == {len(whole)}


@pytest.mark.parametrize("bad", [(0, 4, 0), (4, 0, 0), (4, 4, -1), (9, 4, 0, 2, 2), (9, 1, 0, 0, 2), (1, 4, 0, 0, 2)])
def test_orders_out_of_range(bad: tuple[int, ...]) -> None:
    with pytest.raises(PrismError):
        BatchOrder(*bad)


def equal(a: Batch, b: Batch) -> bool:
    assert list(a.observation.streams) == list(b.observation.streams) == list(a.observation.present)
    streams = [(a.observation.streams[k], b.observation.streams[k]) for k in a.observation.streams]
    present = [(a.observation.present[k], b.observation.present[k]) for k in a.observation.streams]
    pairs = [*streams, *present, (a.actions, b.actions), (a.action_valid, b.action_valid)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("images", [False, True])
def test_loader_gives_the_steps_in_order_from_any_start(images: bool) -> None:
    windows = Windows(counting_source([9, 14], images=images), 2, 4)
    order = BatchOrder(len(windows), 4, seed=5)
    with Loader(windows, order, start_step=7) as loader:
        for step, batch in zip(range(7, 25), loader, strict=False):
            assert equal(batch, windows.batch(order.indices(step)))


def test_worker_processes_give_the_same(tmp_path: Path) -> None:
    """Of a format that is read in blocks: each process has its own. Instructions are there at some steps only."""
    windows = Windows(open_dataset(write_calvin(tmp_path / "set")), 2, 4)
    assert windows.blocks is not None
    order = BatchOrder(len(windows), 4, seed=5, blocks=windows.blocks)
    instructed = set()
    with Loader(windows, order, start_step=2, workers=2) as loader:
        for step, batch in zip(range(2, 12), loader, strict=False):
            assert equal(batch, windows.batch(order.indices(step)))
            instructed |= set(batch.observation.present["text"].flatten().tolist())
    assert instructed == {True, False}


def test_a_worker_that_is_killed_is_one_line(tmp_path: Path) -> None:
    windows = Windows(open_dataset(write_calvin(tmp_path / "set")), 2, 4)
    with Loader(windows, BatchOrder(len(windows), 4, seed=5), workers=2) as loader:
        next(loader)
        for process in loader._pools[0]._processes.values():
            process.kill()
        with pytest.raises(PrismError, match=r"set: a process .* was killed .*train\.workers=1") as error:
            list(islice(loader, 100))
    assert "\n" not in str(error.value)


def test_an_error_in_the_background_reaches_the_caller_and_threads_end() -> None:
    source = counting_source([9, 14], images=True)
    windows = Windows(source, 2, 4)
    real, calls = source.read, []

    def read(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) > 10:
            raise PrismError("memory: broken frame")
        return real(*args, **options)  # type: ignore[arg-type]

    source.read = read  # type: ignore[assignment, method-assign]
    with Loader(windows, BatchOrder(len(windows), 4, 0)) as loader, pytest.raises(PrismError, match="broken frame"):
        list(islice(loader, 20))
    assert not [thread for thread in threading.enumerate() if thread.name == "prism-loader"]


def test_closing_early_ends_the_thread() -> None:
    windows = Windows(counting_source([9, 14], images=True), 2, 4)
    loader = Loader(windows, BatchOrder(len(windows), 4, 0))
    next(loader)
    loader.close()
    assert list(loader) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "prism-loader"]


def test_order_of_another_dataset() -> None:
    with pytest.raises(PrismError, match="23"):
        Loader(Windows(counting_source([9, 14]), 2, 4), BatchOrder(5, 2, 0))
