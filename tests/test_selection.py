"""Selection rules against slow references, and the promises in their docstrings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError
from prism.experiments.recipes import recipe
from prism.selection import (
    SelectionConfig,
    SelectionState,
    commit,
    last_action,
    medoid,
    mode_labels,
    overlap,
    pairwise_distance,
    proxy_score,
    select,
)
from tests.reference import selection as reference

F64 = NDArray[np.float64]
ONE = np.ones(2)
ABSOLUTE, DELTA = ActionKind.ABSOLUTE, ActionKind.DELTA


def two_modes(left: int, right: int, gap: float = 2.0, noise: float = 0.01, seed: int = 0) -> F64:
    """`left` plans that go to -gap/2 and `right` that go to +gap/2, (K, 8, 2); left ones first."""
    rng = np.random.default_rng(seed)
    side = np.r_[-np.ones(left), np.ones(right)] * gap / 2
    ramp = np.linspace(0.2, 1, 8)
    plans = np.stack([side[:, None] * ramp, np.broadcast_to(ramp, (left + right, 8))], axis=-1)
    return np.asarray(plans + noise * rng.standard_normal(plans.shape))


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 6), st.integers(1, 4), st.floats(0.3, 1.0))
def test_distances_equal_the_reference(seed: int, k: int, tp: int, da: int, discount: float) -> None:
    rng = np.random.default_rng(seed)
    plans, scale = rng.standard_normal((k, tp, da)), rng.uniform(0.1, 3, da)
    remainder = rng.standard_normal((rng.integers(1, tp + 1), da))
    got = overlap(plans, remainder, scale, discount)
    want = [reference.plan_distance(p[: len(remainder)], remainder, scale, discount) for p in plans]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    got = pairwise_distance(plans, scale)
    want2 = [[reference.plan_distance(p, q, scale) for q in plans] for p in plans]
    np.testing.assert_allclose(got, want2, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        last_action(plans, plans[0, 0], scale),
        [reference.plan_distance(p[:1], plans[0, :1], scale) for p in plans],
        rtol=1e-12,
    )


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.05, 1.5))
def test_modes_equal_the_reference(seed: int, k: int, radius: float) -> None:
    plans = np.random.default_rng(seed).uniform(-1, 1, (k, 2, 2))
    labels = mode_labels(pairwise_distance(plans, ONE), radius)
    got = {frozenset(np.flatnonzero(labels == m).tolist()) for m in range(labels.max() + 1)}
    assert got == {frozenset(group) for group in reference.modes(plans, ONE, radius)}


@given(st.integers(0, 10_000), st.sampled_from(["last_action", "overlap", "commit", "medoid", "proxy_score"]))
def test_order_of_candidates_does_not_matter(seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    plans = rng.uniform(-1, 1, (7, 5, 2))
    state = SelectionState(rng.uniform(-1, 1, (3, 2)), rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2), rng.uniform(0, 3))
    config = SelectionConfig(rule=rule)  # type: ignore[arg-type]
    order = rng.permutation(7)
    straight = select(plans, ONE, state, config)
    shuffled = select(plans[order], ONE, state, config)
    if np.isclose(np.sort(straight.scores)[0], np.sort(straight.scores)[1]):
        return  # a tie goes to the lower index
    assert order[shuffled.index] == straight.index
    assert shuffled.doubt == straight.doubt


def test_units_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    plans, remainder, units = rng.uniform(-1, 1, (8, 6, 2)), rng.uniform(-1, 1, (3, 2)), np.array([1000.0, 0.01])
    plain = select(plans, ONE, SelectionState(remainder), SelectionConfig())
    scaled = select(plans * units, units, SelectionState(remainder * units), SelectionConfig())
    np.testing.assert_allclose(plain.scores, scaled.scores)


def test_proxy_score_is_literal() -> None:
    plans = np.array([[[3.0, 0.0]], [[1.0, 0.0]], [[-2.0, 1.0]]])
    pose = np.array([2.6, 0.0, 99.0])
    absolute = proxy_score(plans, pose, ONE, ABSOLUTE)
    np.testing.assert_allclose(absolute, [np.sqrt(0.4**2 / 2), np.sqrt(1.6**2 / 2), np.sqrt((4.6**2 + 1) / 2)])
    delta = proxy_score(plans, pose, ONE, DELTA)  # the current pose cancels: it prefers to stand still
    np.testing.assert_allclose(delta, np.sqrt(np.mean(plans[:, 0] ** 2, axis=-1)))
    np.testing.assert_allclose(proxy_score(plans, pose, ONE, ABSOLUTE, [0]), [0.4, 1.6, 4.6])
    with pytest.raises(PrismError, match="pose_dims"):
        proxy_score(plans, pose[:1], ONE, ABSOLUTE)


def test_a_gripper_is_no_motion() -> None:
    """The one that stands still with an open hand is nearer than the one that moves and closes half-way."""
    plans = np.array([[[0.0, 0.0, 1.0]], [[0.3, 0.0, 0.0]]])
    state = SelectionState(last_action=np.zeros(3), pose=np.zeros(3))
    unaware = SelectionConfig(rule="proxy_score")
    assert select(plans, np.ones(3), state, unaware, kind=DELTA).index == 1
    for aware in (replace(unaware, grippers=(2,)), replace(unaware, pose_dims=2)):
        assert select(plans, np.ones(3), state, aware, kind=DELTA).index == 0
    for task in ("metaworld-drawer-open", "robosuite-lift", "robosuite-transport", "tabletop-stack-blue"):
        selection = recipe(task).controller.selection
        assert selection.grippers, f"{task} counts its gripper as motion"
    assert SelectionConfig(grippers=(6, 13)).motion(14) == [*range(6), *range(7, 13)]
    with pytest.raises(PrismError, match="grippers"):
        SelectionConfig(grippers=(-1,))


def test_proxy_score_without_a_pose_is_the_last_action_rule() -> None:
    plans = two_modes(3, 3)
    state = SelectionState(last_action=plans[4, 0])
    assert select(plans, ONE, state, SelectionConfig(rule="proxy_score")).index == 4
    assert select(plans, ONE, SelectionState(), SelectionConfig(rule="proxy_score", initial="first")).index == 0


def test_medoid_is_typical_of_the_most_probable_mode() -> None:
    plans = two_modes(3, 5)
    scores = medoid(plans, ONE, 0.25)
    assert np.isinf(scores[:3]).all()
    assert int(np.argmin(scores)) == 3 + int(np.argmin(pairwise_distance(plans[3:], ONE).sum(axis=1)))


def test_overlap_needs_a_remainder() -> None:
    with pytest.raises(PrismError, match="exec_horizon"):
        overlap(two_modes(1, 1), np.empty((0, 2)), ONE)


def test_commit_keeps_the_mode_against_a_majority_for_a_while() -> None:
    plans = two_modes(2, 14)
    remainder, doubt, chosen = plans[0, 2:], 0.0, []
    for _ in range(6):
        selection = commit(plans, remainder, ONE, doubt, SelectionConfig())
        chosen.append(selection.index)
        doubt, remainder = selection.doubt, plans[selection.index, 2:]
    left = [k < 2 for k in chosen]
    assert left == [True, True, True, False, False, False]  # 14/16 a replan: patience 3 is exceeded at the fourth


@settings(max_examples=20)
@given(st.integers(1, 15), st.floats(0.5, 6.0))
def test_commit_never_locks_in(left: int, patience: float) -> None:
    """With a lasting rival of share s no mode is held longer than patience / s replans, and then one more."""
    plans = two_modes(left, 16 - left)
    config = SelectionConfig(patience=patience, min_share=0.0)
    remainder, doubt, held, longest, sides = plans[0, 2:], 0.0, 0, {True: 0, False: 0}, set()
    for _ in range(150):
        selection = commit(plans, remainder, ONE, doubt, config)
        side = selection.index < left
        same = remainder[-1, 0] < 0 if side else remainder[-1, 0] > 0
        held = held + 1 if same else 1
        longest[side] = max(longest[side], held)
        sides.add(side)
        doubt, remainder = selection.doubt, plans[selection.index, 2:]
    assert sides == {True, False}
    assert longest[True] <= patience / ((16 - left) / 16) + 2
    assert longest[False] <= patience / (left / 16) + 2


def test_commit_ignores_noise_and_forgets_doubt() -> None:
    alone = two_modes(1, 15)  # one stray candidate of 16 is below min_share: no rival
    selection = commit(alone, alone[1, 2:], ONE, 2.0, SelectionConfig())
    assert selection.index >= 1
    assert selection.doubt == 1.0


def test_commit_starts_afresh_when_nothing_is_near() -> None:
    plans = two_modes(3, 5)
    selection = commit(plans, plans[0, 2:] + 5.0, ONE, 2.0, SelectionConfig())
    assert selection.index == int(np.argmin(medoid(plans, ONE, 0.25)))
    assert selection.doubt == 0.0


def test_first_plan_uses_the_initial_rule() -> None:
    plans = two_modes(1, 5)
    assert select(plans, ONE, SelectionState(), SelectionConfig(rule="overlap", initial="first")).index == 0
    assert select(plans, ONE, SelectionState(), SelectionConfig(rule="commit")).index >= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("rule", "best"), ("mode_radius", 0.0), ("discount", 1.5), ("patience", -1.0), ("min_share", 2.0),
     ("centrality", -0.1), ("pose_dims", 0), ("initial", "overlap")],
)  # fmt: skip
def test_config_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(PrismError, match=f"selection.{field}"):
        SelectionConfig(**{field: value})  # type: ignore[arg-type]
