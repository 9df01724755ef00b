"""Statistics and normalisation against float64, and round trips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from prism.data.episodes import Episode
from prism.distance import own_distance
from prism.errors import PrismError
from prism.normalize import LIMIT, Normalizer, RunningStatistics, compute_statistics
from prism.sensors import ActionSpec, SensorSpec
from tests.data_fakes import MemorySource, counting_source
from tests.reference.windows import to_unit_range, to_unit_variance

VALUES = st.floats(-1e3, 1e3, width=32)


def source_of(actions: NDArray[Any], vectors: NDArray[Any], cut: int) -> MemorySource:
    """Two episodes, cut at a step."""
    parts = [slice(0, cut), slice(cut, None)]
    episodes = [Episode({"s": vectors[part].astype(np.float32)}, actions[part].astype(np.float32)) for part in parts]
    return MemorySource(episodes, [SensorSpec("s", "vector", (vectors.shape[1],))])


@given(arrays(np.float32, (9, 3), elements=VALUES), st.lists(st.integers(0, 9), max_size=4))
def test_chunks_make_no_difference(values: NDArray[np.float32], cuts: list[int]) -> None:
    running = RunningStatistics(3)
    for part in np.split(values, sorted(cuts)):
        running.add(part)
    stats, exact = running.result("x"), values.astype(np.float64)
    assert stats.count == 9
    np.testing.assert_array_equal(stats.min, exact.min(axis=0))
    np.testing.assert_array_equal(stats.max, exact.max(axis=0))
    np.testing.assert_allclose(stats.mean, exact.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(stats.std, exact.std(axis=0), rtol=1e-9, atol=1e-10)


def test_no_cancellation_far_from_zero() -> None:
    values = 1e6 + np.random.default_rng(0).normal(size=(100_000, 1))
    running = RunningStatistics(1)
    for part in np.split(values, 50):
        running.add(part)
    np.testing.assert_allclose(running.result("x").std, values.std(axis=0), rtol=1e-9)


@given(arrays(np.float32, (8, 2), elements=VALUES), arrays(np.float32, (8, 3), elements=VALUES), st.integers(1, 7))
def test_matches_the_reference(actions: NDArray[np.float32], vectors: NDArray[np.float32], cut: int) -> None:
    for values in (actions, vectors):  # leave out dimensions at the border between moving and constant
        spread = np.ptp(values.astype(np.float64), axis=0)
        assume(np.all((spread == 0) | (spread > 1e-3 * np.abs(values).max(axis=0)) & (spread > 1e-3)))
    assume(np.ptp(actions.astype(np.float64), axis=0).any())
    normalizer = Normalizer.from_statistics(compute_statistics(source_of(actions, vectors, cut)))
    a64, v64 = actions.astype(np.float64), vectors.astype(np.float64)
    got = normalizer.normalize_actions(torch.from_numpy(actions)).numpy()
    np.testing.assert_allclose(got, to_unit_range(a64, a64), atol=2e-3)
    got = normalizer.normalize_vector("s", torch.from_numpy(vectors)).numpy()
    np.testing.assert_allclose(got, to_unit_variance(v64, v64), atol=2e-3)


@given(arrays(np.float32, (8, 3), elements=VALUES), arrays(np.float32, (4, 5, 3), elements=VALUES))
def test_round_trip_and_range(train: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    train = np.concatenate([train, np.arange(8, dtype=np.float32)[:, None]], axis=1)  # something moves
    values = np.concatenate([values, np.ones((4, 5, 1), np.float32)], axis=2)
    normalizer = Normalizer.from_statistics(compute_statistics(source_of(train, train, 3)))
    inside = normalizer.normalize_actions(torch.from_numpy(train))
    assert torch.isfinite(inside).all()
    assert inside.abs().max() <= 1 + 1e-2
    there = normalizer.normalize_actions(torch.from_numpy(values).double())
    back = normalizer.unnormalize_actions(there).numpy()
    moves = normalizer.action_moves.numpy() > 0
    np.testing.assert_allclose(back[..., moves], values[..., moves], rtol=1e-9, atol=1e-6)
    assert (back[..., ~moves] == normalizer.action_center.numpy()[~moves]).all()


def test_range_is_exactly_minus_one_to_one_where_it_matters() -> None:
    actions = np.array([[0.0, -2.0], [512.0, 6.0], [100.0, 0.0]], np.float32)
    normalizer = Normalizer.from_statistics(compute_statistics(source_of(actions, actions, 1)))
    got = normalizer.normalize_actions(torch.from_numpy(actions))
    assert got.min(dim=0).values.tolist() == [-1, -1]
    assert got.max(dim=0).values.tolist() == [1, 1]


def test_constant_dimensions_are_only_centred() -> None:
    train = np.stack([np.full(6, 3.0), 1.0 + 1e-6 * np.arange(6), np.arange(6)], axis=1).astype(np.float32)
    stats = compute_statistics(source_of(train, train, 2))
    assert stats.actions.constant.tolist() == [True, True, False]
    normalizer = Normalizer.from_statistics(stats)
    other = torch.tensor([[3.5, 1.25, 2.5]])
    np.testing.assert_allclose(normalizer.normalize_vector("s", other)[0, :2], [0.5, 0.25], atol=1e-5)


def noisy(scale: float, rows: int = 20_000) -> NDArray[np.float32]:
    """Two dimensions that move by about a metre, and one that is noise around 0."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.uniform(-0.5, 0.5, (rows, 2)), rng.normal(0, scale, (rows, 1))], 1).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-5])
def test_noise_around_zero_is_no_movement(scale: float) -> None:
    train = noisy(scale)
    normalizer = Normalizer.from_statistics(compute_statistics(source_of(train, train, 9)))
    off = normalizer.normalize_vector("s", torch.tensor([0.0, 0.0, 1e-3]))
    assert abs(float(off[2])) <= 1.1  # 1 mm, which was 996 standard deviations
    assert normalizer.action_moves.tolist() == [1, 1, 0]
    assert float(normalizer.normalize_actions(torch.from_numpy(train))[:, 2].abs().max()) == 0
    wild = normalizer.unnormalize_actions(torch.tensor([[0.25, 0.5, 7.0], [0.5, 1.0, -3.0]]))
    assert wild[:, 2].tolist() == [float(normalizer.action_center[2])] * 2
    alone = source_of(train[:, :1], train[:, 2:], 9)  # nothing beside it to compare with
    stats = compute_statistics(alone)
    assert float(Normalizer.from_statistics(stats).normalize_vector("s", torch.tensor([1e-3])).abs()) <= 11


def test_actions_that_never_move_are_refused() -> None:
    """They would train to a loss of 0: a wrong key, or kilometres."""
    still = np.full((20, 2), 0.3, np.float32)
    moving = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    for actions in (still, 1e-6 * moving):
        with pytest.raises(PrismError, match="nothing to learn"):
            compute_statistics(source_of(actions, moving, 9))


def test_small_movement_stays_movement() -> None:
    """Slow changes of a tenth of a millimetre a step beside a gripper; a gripper in metres beside encoder ticks."""
    rng = np.random.default_rng(0)
    slow = np.concatenate([rng.uniform(-1e-4, 1e-4, (500, 3)), rng.integers(0, 2, (500, 1))], axis=1)
    ticks = np.concatenate([rng.uniform(0, 4000, (500, 6)), rng.uniform(0, 0.04, (500, 1))], axis=1)
    for train in (slow, ticks):
        normalizer = Normalizer.from_statistics(compute_statistics(source_of(train, train, 9)))
        assert normalizer.action_moves.all()
        assert float(normalizer.normalize_actions(torch.from_numpy(train)).abs().amax(0).min()) > 0.99
    got = normalizer.normalize_vector("s", torch.from_numpy(ticks)).std(0, correction=0)
    np.testing.assert_allclose(got, np.ones(7), rtol=1e-4)


def test_inputs_are_bounded_and_training_data_are_not_cut() -> None:
    spike = np.zeros((100_000, 1), np.float32)
    spike[77] = 5.0
    normalizer = Normalizer.from_statistics(compute_statistics(source_of(spike, spike, 9)))
    assert 99 < float(normalizer.normalize_vector("s", torch.tensor([5.0]))) <= LIMIT
    assert float(normalizer.normalize_vector("s", torch.tensor([-1e9]))) == -LIMIT


# --------------------------------------------------------------------------- quaternions


def turning(flips: bool, rows: int = 40) -> MemorySource:
    """Position (1) and rotation about z (4, xyzw), in two episodes; `flips`: with signs that jump."""
    rng = np.random.default_rng(1)
    episodes = []
    for begin in (0.0, 0.3):
        angle = np.linspace(begin, begin + 3.0, rows)
        q = np.stack([0 * angle, 0 * angle, np.sin(angle / 2), np.cos(angle / 2)], axis=1)
        if flips:
            q *= rng.choice([-1, 1], rows)[:, None]
        actions = np.concatenate([angle[:, None], q], axis=1).astype(np.float32)
        episodes.append(Episode({"s": actions}, actions))
    source = MemorySource(episodes, [SensorSpec("s", "vector", (5,))])
    source.action_spec = ActionSpec(quaternions=(1,))
    return source


def test_a_quaternion_and_its_negative_are_one_action() -> None:
    plain, flipped = (Normalizer.from_statistics(compute_statistics(turning(flips))) for flips in (False, True))
    np.testing.assert_allclose(flipped.action_scale, plain.action_scale, atol=1e-6)
    windows = torch.from_numpy(np.stack([e.actions[:16] for e in turning(False).episodes]))
    random = torch.from_numpy(np.stack([e.actions[:16] for e in turning(True).episodes]))
    target = plain.normalize_actions(windows)
    torch.testing.assert_close(plain.normalize_actions(random), target)
    weights, valid = torch.full((5,), 0.2), torch.ones(2, 16, dtype=torch.bool)
    negative = windows * torch.tensor([1.0, -1, -1, -1, -1])
    distance = own_distance(plain.normalize_actions(negative).unsqueeze(1), target, valid, weights)
    assert float(distance.max()) <= 2e-6  # EPS of Eq. 4


def test_predicted_quaternions_have_unit_norm() -> None:
    normalizer = Normalizer.from_statistics(compute_statistics(turning(True)))
    plans = normalizer.unnormalize_actions(torch.randn(3, 4, 16, 5, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(plans[..., 1:].norm(dim=-1), torch.ones(3, 4, 16))
    assert ((plans[..., 1:, 1:] * plans[..., :-1, 1:]).sum(-1) >= 0).all()
    loaded = Normalizer.empty([SensorSpec("s", "vector", (5,))], 5, (1,))
    loaded.load_state_dict(normalizer.state_dict(), strict=True)
    assert torch.equal(loaded.quaternion_reference, normalizer.quaternion_reference)


def test_what_is_no_quaternion_is_refused() -> None:
    source = turning(False)
    source.episodes[1].actions[7, 1:] *= 2
    with pytest.raises(PrismError, match=r"episode 1, step 7: dimensions 1:5 .* norm 2, not a unit quaternion"):
        compute_statistics(source)


def test_only_the_chosen_episodes_and_present_steps_count_and_pixels_are_not_read() -> None:
    source = counting_source([4, 6, 8], images=True)
    stats = compute_statistics(source, [0, 2])
    assert stats.actions.count == stats.vectors["where"].count == 12
    assert stats.actions.max.tolist() == [2, 7]
    assert {names for *_, names in source.reads} == {("where",)}
    whole = source.episodes[1]
    masked = Episode(whole.streams, whole.actions, {"where": np.arange(6) < 2})
    source.episodes[1] = masked
    stats = compute_statistics(source, [1])
    assert stats.vectors["where"].count == 2
    assert stats.vectors["where"].max.tolist() == [1, 1]
    assert stats.actions.max.tolist() == [1, 5]


def test_state_travels_through_a_state_dict() -> None:
    sensors = [SensorSpec("observation.state", "vector", (3,)), SensorSpec("c", "rgb", (4, 4, 3))]
    sensors.append(SensorSpec("force", "vector", (2,)))
    rng = np.random.default_rng(0)
    streams = {"observation.state": rng.normal(size=(9, 3)), "force": 5 + rng.normal(size=(9, 2))}
    streams["c"] = np.zeros((9, 4, 4, 3), np.uint8)
    source = MemorySource([Episode(streams, rng.normal(size=(9, 4)).astype(np.float32))], sensors)
    trained = Normalizer.from_statistics(compute_statistics(source))
    loaded = Normalizer.empty(sensors, 4)
    loaded.load_state_dict(trained.state_dict(), strict=True)
    assert not list(loaded.parameters())
    x = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.normalize_vector("force", x), trained.normalize_vector("force", x))
    np.testing.assert_allclose(
        loaded.normalize_vector("observation.state", torch.from_numpy(streams["observation.state"])).std(
            0, correction=0
        ),
        np.ones(3),
        rtol=1e-5,
    )
    fewer = Normalizer.from_statistics(compute_statistics(source), sensors[1:])
    assert torch.equal(fewer.normalize_vector("force", x), trained.normalize_vector("force", x))
    with pytest.raises(PrismError, match="lidar"):
        trained.normalize_vector("lidar", x)
    with pytest.raises(PrismError, match="lidar"):
        Normalizer.from_statistics(compute_statistics(source), [SensorSpec("lidar", "vector", (3,))])


def test_a_sensor_that_was_never_there() -> None:
    source = counting_source([4])
    source.episodes[0].present["where"] = np.zeros(4, np.bool_)
    with pytest.raises(PrismError, match="where"):
        compute_statistics(source)
