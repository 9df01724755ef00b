"""Eq. 5-9: threshold, rejection, fallback, hard and soft terms, against the slow reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import objective as module
from prism.errors import PrismError
from prism.objective import RSIMLE, Distances, ObjectiveConfig, Targets, choose_hard, soft_coverage
from prism.rows import PartRandom, Random, quantile
from tests.policy_fakes import choose_among
from tests.reference import rsimle

B, K, T, A = 5, 7, 4, 3


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    valid = torch.arange(T)[None] < torch.randint(1, T + 1, (B, 1), generator=rng)
    return torch.randn(B, K, T, A, generator=rng), torch.randn(B, T, A, generator=rng), valid


@given(values=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40), q=st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_quantile_equals_numpy(values: list[float], q: float) -> None:
    expected = np.quantile(np.array(values, dtype=np.float64), q)
    assert float(quantile(torch.tensor(values), q)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rule", ["calibrated", "paper", "random", "none"])
@pytest.mark.parametrize("scope", ["own", "batch"])
def test_choice_over_three_steps_equals_the_reference(rule: str, scope: str) -> None:
    config = ObjectiveConfig(candidates=K, rule=rule, scope=scope, quantile=0.3, soft_weight=0.0)  # type: ignore[arg-type]
    objective = RSIMLE(config, A)
    weights = np.ones(A) if rule == "paper" else np.full(A, 1 / A)
    threshold: float | None = None
    for seed in range(3):
        candidates, target, valid = _batch(seed)
        choice = choose_among(objective, candidates, target, valid, seed=seed)
        args = (candidates.double().numpy(), target.double().numpy(), valid.numpy(), weights, 1e-6)
        own, pairs = rsimle.own(*args), rsimle.all_pairs(*args)
        if rule == "paper":
            threshold = rsimle.ema_threshold(threshold, float(np.quantile(pairs, 0.3)), 0.9, (1e-4, 0.2))
            rejected = pairs.min(2) < threshold
        elif rule == "calibrated":
            near = own if scope == "own" else pairs.min(2)
            threshold = rsimle.ema_threshold(threshold, float(np.quantile(near, 0.3)), 0.9, None)
            rejected = near < threshold
        elif rule == "random":
            rejected = rsimle.reject_at_random(Random(seed).rand((B, K)).double().numpy(), 0.3)
        else:
            rejected = np.zeros_like(own, dtype=bool)
        expected_loss, expected_index = rsimle.hard_loss(own, rejected)
        assert choice.index[:, 0].tolist() == expected_index
        assert float(choice.logs["rejection_rate"]) == pytest.approx(rejected.mean(), abs=1e-6)
        assert float(choice.logs["fallback_rate"]) == pytest.approx(rejected.all(1).mean(), abs=1e-6)
        assert float(choice.logs["nearest_distance"]) == pytest.approx(own.min(1).mean(), rel=1e-4)
        chosen = candidates.gather(1, choice.index[:, :, None, None].expand(-1, -1, T, A))
        loss, _ = objective.loss(chosen, choice, target, valid)
        assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
        if threshold is not None:
            assert float(objective.threshold) == pytest.approx(threshold, rel=1e-4)


def test_calibrated_rule_rejects_about_q_whatever_the_scale() -> None:
    for scale in (1e-3, 1.0, 50.0):
        objective = RSIMLE(ObjectiveConfig(candidates=K, quantile=0.25), A)
        rates = []
        for seed in range(60):
            candidates, target, valid = _batch(seed)
            rates.append(
                float(choose_among(objective, candidates * scale, target * scale, valid).logs["rejection_rate"])
            )
        assert np.mean(rates[20:]) == pytest.approx(0.25, abs=0.05)


def test_the_placebo_rejects_a_fraction_at_random_whatever_the_distance() -> None:
    objective = RSIMLE(ObjectiveConfig(candidates=K, rule="random", quantile=0.25), A)
    near, order = torch.rand(4000, K), torch.rand(4000, K)
    rejected = objective.reject(near, Random(1))
    assert float(rejected.float().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(rejected, objective.reject(order, Random(1)))
    assert torch.equal(rejected[:1000], objective.reject(near[:1000], PartRandom(1, 0, 1000, 4000)))
    assert float(objective.threshold) == 0.0


def test_paper_rule_sits_on_its_clamp_for_data_of_order_one() -> None:
    objective = RSIMLE(ObjectiveConfig(candidates=K, rule="paper"), A)
    choice = choose_among(objective, *_batch(0))
    assert float(choice.logs["threshold"]) == pytest.approx(0.2)
    assert float(choice.logs["threshold_clamped"]) == 1.0


def test_fallback_takes_the_nearest_of_all() -> None:
    own = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    rejected = torch.tensor([[True, True, True], [False, True, False]])
    index, fallback = choose_hard(own, rejected)
    assert index.tolist() == [1, 2]
    assert fallback.tolist() == [True, False]


def test_validation_does_not_move_the_threshold() -> None:
    objective = RSIMLE(ObjectiveConfig(candidates=K), A)
    choose_among(objective, *_batch(0))
    before = objective.threshold.clone()
    choose_among(objective, *_batch(1), update=False)
    assert torch.equal(before, objective.threshold)


@pytest.mark.parametrize("scaled", [True, False])
def test_soft_term_equals_the_reference(scaled: bool) -> None:
    candidates, target, valid = _batch(1)
    config = ObjectiveConfig(
        candidates=K, rule="none", soft_weight=1.0, soft_candidates=3, temperature=0.3, soft_scaled=scaled
    )
    objective = RSIMLE(config, A)
    choice = choose_among(objective, candidates, target, valid)
    chosen = candidates.gather(1, choice.index[:, :, None, None].expand(-1, -1, T, A))
    _, parts = objective.loss(chosen, choice, target, valid)
    args = (candidates.double().numpy(), target.double().numpy(), valid.numpy(), np.full(A, 1 / A), 1e-6)
    assert float(parts["soft"]) == pytest.approx(rsimle.soft_loss(rsimle.own(*args), 3, 0.3, scaled), rel=1e-4)


def test_soft_term_tends_to_the_minimum_only_when_scaled() -> None:
    distance = torch.tensor([[0.5, 0.7, 0.9]], dtype=torch.float64)
    valid = torch.ones(1, 3, dtype=torch.bool)
    scaled = [float(soft_coverage(distance, valid, tau, True)) for tau in (0.5, 0.05, 0.005)]
    literal = [float(soft_coverage(distance, valid, tau, False)) for tau in (0.5, 0.05, 0.005)]
    assert scaled[-1] == pytest.approx(0.5, abs=1e-6)
    assert literal[-1] == pytest.approx(0.5 / 0.005, rel=1e-3)  # diverges: Lemma E.3 as printed does not hold


def test_soft_candidates_respect_rejection_by_choice() -> None:
    candidates, target, valid = _batch(2)
    for respects in (True, False):
        config = ObjectiveConfig(candidates=K, scope="own", quantile=0.4, soft_respects_rejection=respects)
        objective = RSIMLE(config, A)
        choice = choose_among(objective, candidates, target, valid)
        args = (candidates.double().numpy(), target.double().numpy(), valid.numpy(), np.full(A, 1 / A), 1e-6)
        own = rsimle.own(*args)
        rejected = own < float(objective.threshold)
        assert choice.index.shape[1] == (3 if respects else 4)
        assert choice.soft_valid is not None
        for row in range(B):
            soft = choice.index[row, -3:][choice.soft_valid[row]].tolist()
            allowed = [k for k in range(K) if not rejected[row, k]] if respects else list(range(K))
            allowed = allowed or list(range(K))
            assert soft == sorted(allowed, key=lambda k: own[row, k])[:3]


@pytest.mark.parametrize(
    "bad",
    [
        {"candidates": 0},
        {"quantile": 1.0},
        {"momentum": 1.0},
        {"rule": "papr"},
        {"clamp": (0.3, 0.2)},
        {"temperature": 0.0},
        {"soft_candidates": 99},
        {"scope": "global"},
        {"max_targets": 0},
    ],
)
def test_config_out_of_range_is_one_clear_line(bad: dict[str, object]) -> None:
    with pytest.raises(PrismError, match="objective") as error:
        ObjectiveConfig(**bad)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_inverse_std_weights_sum_to_one() -> None:
    objective = RSIMLE(ObjectiveConfig(weights="inverse_std"), A)
    objective.set_action_std(torch.tensor([0.1, 0.2, 0.4]))
    assert float(objective.weights.sum()) == pytest.approx(1.0)
    assert math.isclose(float(objective.weights[0] / objective.weights[2]), 4.0, rel_tol=1e-5)


def _large(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(9)
    valid = torch.arange(T)[None] < torch.randint(1, T + 1, (rows, 1), generator=rng)
    return torch.randn(rows, K, T, A, generator=rng), torch.randn(rows, T, A, generator=rng), valid


def _distances(objective: RSIMLE) -> Distances:
    candidates, target, valid = _large()
    return objective.distances(candidates, target, valid, objective.targets(target, valid))


def test_a_bounded_number_of_targets_keeps_the_own_one_and_never_rejects_more() -> None:
    exact = _distances(RSIMLE(ObjectiveConfig(candidates=K), A))
    bounded = _distances(RSIMLE(ObjectiveConfig(candidates=K, max_targets=8), A))
    assert torch.equal(bounded.own, exact.own)
    assert bool((bounded.near >= exact.near - 1e-5).all())
    assert bool((bounded.near <= exact.own).all())
    assert float((bounded.near < exact.own).float().mean()) > 0.3  # others count too


def test_sampled_quantile_keeps_its_bound_and_does_not_depend_on_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, target, valid = _large()
    objective = RSIMLE(ObjectiveConfig(candidates=K, rule="paper", quantile=0.3, clamp=(1e-4, 50.0)), A)
    pairs = _distances(objective).pool.flatten()
    monkeypatch.setattr(module, "EXACT_PAIRS", 100)
    monkeypatch.setattr(module, "SAMPLED_PAIRS", 5000)
    module._places.cache_clear()
    sampled = _distances(objective)
    assert sampled.pool.shape == (5000,)
    bound = math.sqrt(math.log(2 / 0.05) / (2 * 5000))
    low, high = (float(quantile(pairs, 0.3 + sign * bound)) for sign in (-1, 1))
    assert low <= float(quantile(sampled.pool, 0.3)) <= high
    parts = [
        objective.distances(candidates[a:b], target[a:b], valid[a:b], Targets(target, valid, a)).pool
        for a, b in ((0, 13), (13, 14), (14, 40))
    ]
    module._places.cache_clear()
    torch.testing.assert_close(torch.cat(parts).sort().values, sampled.pool.sort().values)
