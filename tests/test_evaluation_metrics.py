"""Metrics against slow references, and cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.evaluation import metrics
from tests.reference import selection as reference


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 4))
def test_jerk_equals_the_reference(seed: int, steps: int, da: int) -> None:
    rng = np.random.default_rng(seed)
    actions, scale = rng.standard_normal((steps, da)), rng.uniform(0.1, 5, da)
    assert metrics.jerk(actions, scale) == pytest.approx(reference.jerk(actions, scale), rel=1e-12)
    assert metrics.physical_jerk(actions, 20.0) == pytest.approx(
        reference.jerk(actions, np.ones(da)) * 20.0**3, rel=1e-12
    )


def test_jerk_of_known_motions() -> None:
    t = np.arange(30.0)[:, None]
    assert metrics.jerk(3 * t**2 - t + 5, np.ones(1)) == pytest.approx(0.0, abs=1e-9)
    assert metrics.jerk(t**3, np.ones(1)) == pytest.approx(6.0)
    assert metrics.jerk((-1.0) ** t, np.ones(1)) == pytest.approx(8.0)
    assert metrics.jerk((-1.0) ** t, np.full(1, 4.0)) == pytest.approx(2.0)
    assert metrics.physical_jerk((t * 0.1) ** 3, fps=10.0) == pytest.approx(6.0)  # d3/dt3 of t^3, in seconds


@given(st.integers(1, 200), st.data())
def test_wilson_equals_its_definition(trials: int, data: st.DataObject) -> None:
    wins = data.draw(st.integers(0, trials))
    low, high = metrics.wilson_interval(wins, trials)
    want_low, want_high = reference.wilson(wins, trials)
    assert low == pytest.approx(want_low, abs=1e-9)
    assert high == pytest.approx(want_high, abs=1e-9)
    assert 0 <= low <= wins / trials <= high <= 1


def test_wilson_published_example() -> None:
    low, high = metrics.wilson_interval(20, 20)
    assert high == 1.0
    assert low == pytest.approx(0.8389, abs=1e-4)
    assert metrics.wilson_interval(0, 0) == (0.0, 1.0)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_bootstrap_is_repeatable_and_brackets_the_mean(values: list[float]) -> None:
    low, high = metrics.bootstrap_interval(values)
    assert (low, high) == metrics.bootstrap_interval(values)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_bootstrap_width_is_that_of_the_mean() -> None:
    values = list(np.random.default_rng(1).standard_normal(400))
    low, high = metrics.bootstrap_interval(values)
    assert high - low == pytest.approx(2 * 1.96 * np.std(values) / 20, rel=0.05)


def test_percentiles() -> None:
    assert metrics.percentile([1, 2, 3, 4, 5], 50) == 3
    assert metrics.percentile([0, 10], 99) == pytest.approx(9.9)
    assert metrics.percentile([], 50) == 0.0


def test_the_bootstrap_draws_seeds_and_episodes_apart() -> None:
    table = np.random.default_rng(0).normal(size=(3, 20)) + np.array([[0.0], [1.0], [2.0]])
    fast = metrics.bootstrap_means(table)
    rng = np.random.default_rng(1)
    slow = [table[rng.integers(3, size=3)][:, rng.integers(20, size=20)].mean() for _ in range(4000)]
    assert fast.mean() == pytest.approx(table.mean(), abs=0.02)
    assert fast.std() == pytest.approx(np.std(slow), rel=0.05)
    low, high = metrics.interval(table)
    assert low < table.mean() < high
    assert high - low > 2 * 1.96 * table.std() / np.sqrt(60), "seeds that differ count: wider than 60 single episodes"


def test_the_paired_test_sees_what_the_intervals_hide() -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(size=(1, 50))  # episodes differ a lot, the methods by little but always
    one, other = np.clip(hard + 0.05, 0, 2) * np.ones((3, 1)), hard * np.ones((3, 1))
    apart = metrics.paired(one, other)
    assert apart.p < 0.001
    assert apart.low > 0.04
    assert metrics.interval(one)[0] < metrics.interval(other)[1]
    same = metrics.paired(one, one)
    assert (same.mean, same.p) == (0.0, 1.0)
    assert metrics.paired(one[:, :3], other[:, :3]).p == 0.25, "three episodes cannot prove much"
    back = metrics.paired(other, one)
    assert (back.mean, back.p) == (pytest.approx(-apart.mean), apart.p)


def test_success_of_all_is_not_certainty() -> None:
    low, high = metrics.success_interval(np.ones((3, 50)))
    assert 0.9 < low < 0.95
    assert high == 1.0
