"""Eq. 4: the fast distances against the slow float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.distance import batch_distance, nearest_distance, own_distance
from tests.reference import rsimle


def _problem(seed: int, b: int, k: int, g: int, t: int, a: int) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, size=g)
    lengths[rng.random(g) < 0.5] = t  # about half of the targets are whole
    valid = np.arange(t)[None, :] < lengths[:, None]
    weights = rng.random(a) + 0.1
    arrays = (rng.normal(size=(b, k, t, a)), rng.normal(size=(g, t, a)))
    return (
        *(torch.from_numpy(x.astype(np.float32)) for x in arrays),
        torch.from_numpy(valid),
        torch.from_numpy(weights),
    )


@given(
    seed=st.integers(0, 2**31), eps=st.sampled_from([1e-6, 1e-3, 0.5]), t=st.integers(1, 6), a=st.integers(1, 4),
    discount=st.sampled_from([1.0, 0.8]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_own_and_all_pairs_agree_with_the_reference(seed: int, eps: float, t: int, a: int, discount: float) -> None:
    candidates, target, valid, weights = _problem(seed, 3, 2, 3, t, a)
    args = [x.double().numpy() for x in (candidates, target)]
    own = own_distance(candidates, target, valid, weights.float(), eps, discount)
    pairs = batch_distance(candidates, target, valid, weights.float(), eps, discount)
    expected_own = rsimle.own(*args, valid.numpy(), weights.numpy(), eps, discount)
    expected = rsimle.all_pairs(*args, valid.numpy(), weights.numpy(), eps, discount)
    np.testing.assert_allclose(own.numpy(), expected_own, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(pairs.numpy(), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.diagonal(pairs.numpy(), axis1=0, axis2=2).T, own.numpy(), rtol=2e-5, atol=2e-5)


def test_own_distance_has_finite_gradients_at_zero_and_in_half_precision_inputs() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        candidates = torch.zeros(2, 3, 4, 2, dtype=dtype, requires_grad=True)
        target = torch.zeros(2, 4, 2, dtype=dtype)
        distance = own_distance(candidates, target, torch.ones(2, 4, dtype=torch.bool), torch.ones(2))
        assert distance.dtype == torch.float32
        distance.sum().backward()
        assert candidates.grad is not None
        assert torch.isfinite(candidates.grad).all()


def test_padded_steps_never_count() -> None:
    candidates, target, _, weights = _problem(0, 2, 2, 2, 5, 3)
    valid = torch.tensor([[True, True, False, False, False], [True] * 5])
    garbage = target.clone()
    garbage[0, 2:] = 1e6
    for distance in (own_distance, batch_distance):
        before = distance(candidates, target, valid, weights.float())
        torch.testing.assert_close(before, distance(candidates, garbage, valid, weights.float()))


def test_chunked_broadcast_equals_unchunked(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, target, valid, weights = _problem(3, 4, 3, 9, 5, 2)
    whole = batch_distance(candidates, target, valid, weights.float(), eps=0.1)
    monkeypatch.setattr("prism.distance._CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(whole, batch_distance(candidates, target, valid, weights.float(), eps=0.1))


def test_nearest_equals_the_minimum_of_all_pairs_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, target, valid, weights = _problem(4, 5, 3, 9, 4, 2)
    expected = batch_distance(candidates, target, valid, weights.float()).amin(2)
    for elements in (1, 60, 10**9):
        monkeypatch.setattr("prism.distance._CHUNK_ELEMENTS", elements)
        found = nearest_distance(candidates, target, valid, weights.float())
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_pairs_row_by_row_equal_all_pairs() -> None:
    candidates, target, valid, weights = _problem(5, 4, 3, 6, 4, 2)
    expected = batch_distance(candidates, target, valid, weights.float())
    row, k, j = torch.tensor([0, 3, 2, 0]), torch.tensor([2, 0, 1, 2]), torch.tensor([5, 1, 2, 0])
    found = own_distance(candidates[row, k].unsqueeze(1), target[j], valid[j], weights.float()).squeeze(1)
    torch.testing.assert_close(found, expected[row, k, j], rtol=2e-5, atol=2e-5)


def test_autocast_does_not_reach_the_distances() -> None:
    candidates, target, valid, weights = _problem(6, 4, 3, 4, 5, 2)
    for distance in (own_distance, batch_distance, nearest_distance):
        expected = distance(candidates, target, valid, weights.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(distance(candidates, target, valid, weights.float()), expected)
