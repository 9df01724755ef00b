"""Windows: the time convention, padding and masks, and that none crosses from one episode into the next."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.data.episodes import Episode
from prism.data.views import draw, portion
from prism.data.windows import Windows, split_episodes
from prism.errors import PrismError
from prism.sensors import SensorSpec
from tests.data_fakes import MemorySource, counting_source
from tests.reference.windows import window

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def test_actions_that_are_their_own_index_start_at_the_current_step() -> None:
    windows = Windows(counting_source([10]), obs_horizon=2, pred_horizon=4)
    batch = windows.batch(np.array([5]))
    assert batch.actions[0, :, 1].tolist() == [5, 6, 7, 8]  # a[t] is the answer to o[t]
    assert batch.observation.streams["where"][0, :, 1].tolist() == [4, 5]
    assert batch.action_valid.all()


def test_edges_repeat_and_are_marked() -> None:
    windows = Windows(counting_source([3, 4]), obs_horizon=3, pred_horizon=4)
    batch = windows.batch(np.array([0, 2, 3, 6]))
    assert batch.observation.streams["where"][:, :, 1].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0], [1, 2, 3]]
    assert batch.actions[:, :, 1].tolist() == [[0, 1, 2, 2], [2, 2, 2, 2], [0, 1, 2, 3], [3, 3, 3, 3]]
    assert batch.action_valid.tolist() == [
        [True, True, True, False],
        [True, False, False, False],
        [True, True, True, True],
        [True, False, False, False],
    ]
    assert batch.observation.present["where"].all()


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.booleans(), st.data())
def test_every_window_matches_the_reference_and_stays_in_its_episode(
    lengths: list[int], obs_horizon: int, pred_horizon: int, cached: bool, data: st.DataObject
) -> None:
    source = counting_source(lengths, images=True)
    episodes = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    windows = Windows(source, obs_horizon, pred_horizon, episodes, cache_bytes=2**20 if cached else 0)
    assert len(windows) == sum(lengths[episode] for episode in episodes)
    steps = [(episode, step) for episode in episodes for step in range(lengths[episode])]
    indices = np.array(data.draw(st.lists(st.sampled_from(range(len(steps))), min_size=1, max_size=8)))
    batch = windows.batch(indices)
    for row, index in enumerate(indices.tolist()):
        episode, step = steps[index]
        whole = source.episodes[episode]
        for name, stream in whole.streams.items():
            seen, actions, valid = window(stream, whole.actions, step, obs_horizon, pred_horizon)
            np.testing.assert_array_equal(batch.observation.streams[name][row].numpy(), seen)
        np.testing.assert_array_equal(batch.actions[row].numpy(), actions)
        assert batch.action_valid[row].tolist() == valid
        assert set(batch.actions[row, :, 0].tolist()) == {episode}
        assert set(batch.observation.streams["where"][row, :, 0].tolist()) == {episode}
        assert set(batch.observation.streams["cam"][row, :, 0, 0, 0].tolist()) == {episode}


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_types_and_order(cache_bytes: int) -> None:
    batch = Windows(counting_source([4], images=True), 2, 3, cache_bytes=cache_bytes).batch(np.array([1, 0]))
    assert list(batch.observation.streams) == list(batch.observation.present) == ["where", "cam"]
    assert batch.observation.streams["cam"].dtype == torch.uint8
    assert batch.observation.streams["where"].dtype == batch.actions.dtype == torch.float32
    assert batch.action_valid.dtype == batch.observation.present["cam"].dtype == torch.bool
    assert batch.observation.streams["cam"].shape == (2, 2, 2, 2, 3)


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_absent_sensors_are_marked_where_they_were_absent(cache_bytes: int) -> None:
    length = 5
    here = {"a": np.array([False, True, True, False, True]), "cam": np.array([True, False, True, True, True])}
    streams = {"a": np.zeros((length, 1), np.float32), "cam": np.zeros((length, 2, 2, 3), np.uint8)}
    actions = np.zeros((length, 1), np.float32)
    sensors = [SensorSpec("a", "vector", (1,)), SensorSpec("cam", "rgb", (2, 2, 3))]
    source = MemorySource([Episode(streams, actions), Episode(streams, actions, here)], sensors)
    batch = Windows(source, 2, 3, cache_bytes=cache_bytes).batch(np.arange(10))
    assert batch.observation.present["a"][:5].all()
    assert batch.observation.present["cam"][:5].all()
    for name, mask in here.items():
        expected = [[mask[max(t - 1, 0)], mask[t]] for t in range(length)]
        assert batch.observation.present[name][5:].tolist() == expected


def test_pixels_are_read_as_one_slice_a_window_and_vectors_not_again() -> None:
    source = counting_source([6, 6], images=True)
    windows = Windows(source, 3, 4)
    assert {names for *_, names in source.reads} == {("where",)}
    source.reads.clear()
    windows.batch(np.array([4, 7]))
    assert source.reads == [(0, 2, 5, ("cam",)), (1, 0, 2, ("cam",))]


def test_a_batch_of_vectors_is_cut_at_once_not_a_window_at_a_time() -> None:
    windows = Windows(counting_source([130] * 20), 2, 16)

    def calls(size: int) -> int:
        """Functions called, of Python and of C, to make a batch."""
        indices, count = np.random.default_rng(0).integers(0, len(windows), size), 0

        def counted(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        windows.batch(indices)
        sys.setprofile(None)
        return count

    calls(1)  # what is made once
    assert calls(128) == calls(2)


def test_bad_requests() -> None:
    source = counting_source([3, 3])
    with pytest.raises(PrismError, match="obs_horizon"):
        Windows(source, 0, 4)
    with pytest.raises(PrismError, match="no episode was chosen"):
        Windows(source, 1, 4, episodes=[])
    with pytest.raises(PrismError, match=r"episodes 0\.\.1"):
        Windows(source, 1, 4, episodes=[2])
    for bad in (-1, 6):
        with pytest.raises(IndexError):
            Windows(source, 1, 4).batch(np.array([bad]))


@given(st.integers(1, 300), st.floats(0, 0.99), st.integers(0, 5))
def test_split_is_a_partition(n: int, fraction: float, seed: int) -> None:
    train, val = split_episodes(n, fraction, seed)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(n))
    assert len(train) >= 1
    assert len(val) == min(round(n * fraction), n - 1)  # of few episodes none
    again = split_episodes(n, fraction, seed)
    assert train.tolist() == again[0].tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 5), st.data())
def test_less_data_is_a_part_of_more(lengths: list[int], seed: int, data: st.DataObject) -> None:
    few = data.draw(st.integers(1, len(lengths)))
    many = data.draw(st.integers(few, len(lengths)))
    small, large = (draw(lengths, count=n, seed=seed) for n in (few, many))
    assert len(small[0]) == few
    assert set(small[0].tolist()) <= set(large[0].tolist())
    assert small[1].tolist() == [lengths[e] for e in small[0]]
    less = data.draw(st.floats(0.01, 1))
    part, more = (dict(zip(*draw(lengths, fraction=f, seed=seed), strict=True)) for f in (less, (1 + less) / 2))
    assert sum(part.values()) == max(round(less * sum(lengths)), 1)  # to the step
    assert all(1 <= steps <= more[episode] <= lengths[episode] for episode, steps in part.items())
    assert sum(steps < lengths[episode] for episode, steps in part.items()) <= 1


def test_a_portion_reads_only_its_own_steps() -> None:
    part = portion(counting_source([9, 14, 11]), [2, 0], np.array([11, 4]))
    assert part.lengths.tolist() == [11, 4]
    windows = Windows(part, 2, 4)
    assert windows.batch(np.array([10])).actions[0, 0].tolist() == [2, 10]
    assert windows.batch(np.array([14])).actions[0].tolist() == [[0, 3]] * 4
    assert windows.batch(np.array([14])).action_valid[0].tolist() == [True, False, False, False]
    with pytest.raises(PrismError, match="outside"):
        part.read(1, 0, 5)


def test_shares_out_of_range() -> None:
    for bad in ({"fraction": 0.0}, {"fraction": 1.5}, {"count": 0}, {"count": 11}, {"fraction": 0.5, "count": 2}):
        with pytest.raises(PrismError):
            draw([5] * 10, **bad)  # type: ignore[arg-type]
    with pytest.raises(PrismError):
        split_episodes(10, 1.0, 0)
    assert draw([5] * 4)[0].tolist() == [0, 1, 2, 3]
