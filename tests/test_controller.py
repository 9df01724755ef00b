"""The controller, its window and its chooser: replanning, presence, repeatability, what is recorded."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from prism_client import ActionKind
from torch import Tensor

from prism.controller import Controller, ControllerConfig, act_together, action_scale, check_controller
from prism.errors import PrismError
from prism.inference.chooser import Chooser
from prism.inference.smoothing import ensemble, least_jerk
from prism.inference.window import Window
from prism.normalize import Normalizer
from prism.rows import Random
from prism.selection import SelectionConfig, Standstill
from prism.sensors import ActionSpec
from prism.types import Observation
from tests.evaluation_fakes import PointPolicy


class IndexPolicy(PointPolicy):
    """Candidate k of the n-th call is n, n + .01, n + .02, ... shifted by k: easy to recognise."""

    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        self.seen.append(observation)
        steps = torch.arange(self.spec.pred_horizon) * 0.01 + len(self.seen)
        return (steps[None, None, :, None] + torch.arange(candidates)[None, :, None, None]).expand(1, -1, -1, 2).clone()


def see(t: float) -> dict[str, np.ndarray]:
    return {"proprio": np.array([t, t], dtype=np.float32), "goal": np.array([1.0, 1.0], dtype=np.float32)}


FIRST = SelectionConfig(rule="first")
ABSOLUTE, DELTA = ActionKind.ABSOLUTE, ActionKind.DELTA


def of_kind(policy: PointPolicy, kind: ActionKind) -> PointPolicy:
    policy.spec = replace(policy.spec, action=ActionSpec(kind=kind))
    return policy


def test_executes_the_first_actions_of_each_plan_and_then_replans() -> None:
    policy = IndexPolicy(pred_horizon=8)
    controller = Controller(policy, ControllerConfig(exec_horizon=3, candidates=2, selection=FIRST))
    actions = [float(controller.act(see(t))[0]) for t in range(7)]
    np.testing.assert_allclose(actions, [1.0, 1.01, 1.02, 2.0, 2.01, 2.02, 3.0], rtol=1e-6)
    assert [replan.step for replan in controller.replans] == [0, 3, 6]
    assert controller.last_plan is not None
    assert controller.last_plan.candidates.shape == (2, 8, 2)
    np.testing.assert_allclose(
        controller.last_plan.remainder, np.repeat([[2.03], [2.04], [2.05], [2.06], [2.07]], 2, axis=1), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("horizon", "delay", "expected", "steps"),
    [
        # asked for after 3 steps, there 2 steps later: it begins with its third action
        (3, 2, [1.0, 1.01, 1.02, 1.03, 1.04, 2.02, 2.03, 2.04, 3.02], [0, 3, 6]),
        # later than T_a: the next one is asked for at once, the old one goes on until it is there
        (1, 3, [1.0, 1.01, 1.02, 1.03, 2.03, 2.04, 2.05, 3.03, 3.04], [0, 1, 4]),
    ],
)
def test_a_late_plan_begins_where_time_has_gone_on(
    horizon: int, delay: int, expected: list[float], steps: list[int]
) -> None:
    policy = IndexPolicy(pred_horizon=8)
    config = ControllerConfig(exec_horizon=horizon, candidates=2, selection=FIRST, delay=delay)
    controller = Controller(policy, config)
    actions = [float(controller.act(see(t))[0]) for t in range(9)]
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    assert [replan.step for replan in controller.replans] == steps
    controller.reset()
    first = len(policy.seen) + 1
    assert float(controller.act(see(0))[0]) == first  # nothing of the last episode comes late
    with pytest.raises(PrismError, match="is over before the next one is there"):
        Controller(policy, replace(config, delay=5))


@pytest.mark.parametrize("kind", [ABSOLUTE, DELTA])
@pytest.mark.parametrize(("restless", "moves_at"), [(0, None), (2, 2), (3, 3)])
def test_a_robot_that_waits_takes_the_plan_that_goes_farthest(
    kind: ActionKind, restless: int, moves_at: int | None
) -> None:
    class Waiting(PointPolicy):
        """All candidates wait but two: the third goes a way, the last one half of it."""

        def sample(self, observation: Observation, candidates: int, rng: Random) -> Tensor:
            plans = torch.zeros(1, candidates, self.spec.pred_horizon, 2)
            plans[0, 2], plans[0, -1] = 1.0, 0.5
            return plans

    selection = SelectionConfig(rule="medoid", restless=restless, pose_dims=2)
    controller = Controller(
        of_kind(Waiting(pred_horizon=8), kind), ControllerConfig(exec_horizon=4, selection=selection)
    )
    actions = [float(controller.act(see(0.0))[0]) for _ in range(20)]
    moved = [at for at in range(5) if actions[4 * at] > 0.5]
    assert moved[:1] == ([] if moves_at is None else [moves_at])
    if moves_at is not None:
        assert actions[4 * moves_at + 4] < 0.5, "having moved, it is patient again"
        controller.reset()
        assert controller.act(see(0.0))[0] < 0.5


def test_a_plan_that_moves_on_is_no_rest() -> None:
    rest = Standstill(SelectionConfig(mode_radius=0.2), np.ones(2))
    counts = []
    for place in (0.0, 0.09, 0.18, 0.27, 0.27):  # slow, but on its way; then it stays
        rest.executed(np.full((4, 2), place))
        counts.append(rest.replans)
    assert counts == [1, 2, 0, 1, 2]


def test_a_gripper_that_is_held_is_no_way_gone() -> None:
    rest = Standstill(SelectionConfig(pose_dims=1, restless=2), np.ones(2), DELTA)
    counts = []
    for change, gripper in ((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, -1.0), (0.0, -1.0), (0.2, -1.0)):
        rest.executed(np.tile([change, gripper], (4, 1)))
        counts.append(rest.replans)
    assert counts == [1, 2, 3, 0, 1, 0]  # closing it is something else
    with pytest.raises(PrismError, match=r"restless = 2.*pose_dims"):
        check_controller(ControllerConfig(selection=SelectionConfig(restless=2)), of_kind(PointPolicy(), DELTA).spec)


def test_random_numbers_are_drawn_on_the_cpu_wherever_the_policy_is() -> None:
    class Elsewhere(PointPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))

        def sample(self, observation: Observation, candidates: int, rng: Random) -> Tensor:
            assert observation.streams["proprio"].device.type == "meta"
            return rng.randn((1, candidates, self.spec.pred_horizon, 2))

    controller = Controller(Elsewhere(), ControllerConfig(exec_horizon=2, candidates=2))
    assert controller.planner.rng.generator.device.type == "cpu"
    assert np.isfinite(controller.act(see(0))).all()


def test_window_is_edge_padded_and_then_slides() -> None:
    policy = IndexPolicy(obs_horizon=3)
    controller = Controller(policy, ControllerConfig(exec_horizon=1, candidates=1, selection=FIRST))
    for t in range(4):
        controller.act(see(t))
    windows = [seen.streams["proprio"][0, :, 0].tolist() for seen in policy.seen]
    assert windows == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert policy.seen[0].present["proprio"].shape == (1, 3)


def test_missing_and_nan_sensors_are_absent_and_come_back() -> None:
    policy = IndexPolicy(obs_horizon=2)
    controller = Controller(policy, ControllerConfig(exec_horizon=1, candidates=1, selection=FIRST))
    controller.act(see(1))
    broken = see(2)
    broken["goal"] = np.array([np.nan, 0.0], dtype=np.float32)
    controller.act(broken)
    controller.act({"proprio": see(3)["proprio"]})
    controller.act(see(4))
    present = [seen.present["goal"][0].tolist() for seen in policy.seen]
    assert present == [[True, True], [True, False], [False, False], [False, True]]
    assert all(bool(seen.present["proprio"].all()) for seen in policy.seen)
    assert policy.seen[1].streams["goal"][0, 1].tolist() == [0.0, 0.0]
    assert all(bool(torch.isfinite(seen.streams["goal"]).all()) for seen in policy.seen)


def test_no_sensor_at_all_is_an_error() -> None:
    controller = Controller(IndexPolicy(), ControllerConfig(candidates=1, exec_horizon=2))
    with pytest.raises(PrismError, match="none of the policy's sensors"):
        controller.act({})
    with pytest.raises(PrismError, match="none of the policy's sensors"):
        controller.act({"proprio": np.full(2, np.nan), "goal": np.full(2, np.inf)})


def test_a_sensor_that_the_policy_does_not_know_is_an_error() -> None:
    controller = Controller(IndexPolicy(), ControllerConfig(candidates=1, exec_horizon=2))
    with pytest.raises(PrismError, match=r"no sensor 'camera'; it knows proprio, goal.*counts as absent"):
        controller.act({**see(0), "camera": np.zeros(2)})
    controller.act(see(0))  # nothing of the refused observation was taken in


def test_a_new_controller_has_been_reset() -> None:
    actions = []
    for reset in (False, True):
        controller = Controller(PointPolicy(noise=0.5), ControllerConfig(exec_horizon=2, candidates=4), seed=7)
        if reset:
            controller.reset(7)
        actions.append([controller.act(see(0.1 * t)).tolist() for t in range(5)])
    assert actions[0] == actions[1]


def test_wrong_shape_is_named() -> None:
    controller = Controller(IndexPolicy(), ControllerConfig(candidates=1, exec_horizon=2))
    with pytest.raises(PrismError, match=r"sensor 'goal' is 3, the policy's 2"):
        controller.act({"proprio": np.zeros(2, dtype=np.float32), "goal": np.zeros(3, dtype=np.float32)})


def test_same_seed_same_actions() -> None:
    controller = Controller(PointPolicy(noise=0.5), ControllerConfig(exec_horizon=2, candidates=4), seed=7)

    def episode() -> list[list[float]]:
        return [controller.act(see(0.1 * t)).tolist() for t in range(9)]

    first = episode()
    controller.reset(7)
    assert controller.replans == []
    assert episode() == first
    controller.reset(8)
    assert episode() != first


def test_records_switches_and_modes() -> None:
    class Flipping(PointPolicy):
        def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
            self.seen.append(observation)
            side = torch.tensor([1.0, -1.0]) * (-1) ** len(self.seen)  # the first candidate changes sides
            return side[None, :, None, None].expand(1, 2, self.spec.pred_horizon, 2).clone()

    flickers = Controller(Flipping(), ControllerConfig(exec_horizon=2, candidates=2, selection=FIRST))
    stays = Controller(Flipping(), ControllerConfig(exec_horizon=2, candidates=2))
    for t in range(8):
        flickers.act(see(t))
        stays.act(see(t))
    assert [replan.mode_switch for replan in flickers.replans] == [False, True, True, True]
    assert [replan.avoidable_switch for replan in flickers.replans] == [False, True, True, True]
    assert not any(replan.mode_switch for replan in stays.replans)
    assert {replan.modes for replan in stays.replans} == {2}
    assert stays.replans[0].spread == pytest.approx(2.0)
    assert stays.replans[0].overlap_distance is None
    assert flickers.replans[1].overlap_distance == pytest.approx(2.0)
    assert all(replan.latency_ms > 0 for replan in stays.replans)


def test_smoothing_fades_from_the_old_plan_within_a_mode_only() -> None:
    class Stepping(PointPolicy):
        jump = 0.1

        def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
            self.seen.append(observation)
            return torch.full((1, candidates, self.spec.pred_horizon, 2), self.jump * len(self.seen))

    policy = Stepping()
    config = ControllerConfig(exec_horizon=4, candidates=1, smoothing=3)
    controller = Controller(policy, config)
    actions = [float(controller.act(see(t))[0]) for t in range(8)]
    np.testing.assert_allclose(actions, [0.1] * 4 + [0.125, 0.15, 0.175, 0.2], rtol=1e-6)
    policy = Stepping()
    policy.jump = 1.0
    controller = Controller(policy, config)
    assert [float(controller.act(see(t))[0]) for t in range(5)][-1] == 2.0


def test_scale_comes_from_the_normaliser() -> None:
    policy = PointPolicy()
    np.testing.assert_allclose(action_scale(policy), [1.0, 1.0])


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(PrismError, match="exceeds the policy's pred_horizon"):
        Controller(PointPolicy(pred_horizon=4), ControllerConfig(exec_horizon=5))
    with pytest.raises(PrismError, match="exec_horizon < 4"):
        Controller(PointPolicy(pred_horizon=4), ControllerConfig(exec_horizon=4))
    Controller(PointPolicy(pred_horizon=4), ControllerConfig(exec_horizon=4, selection=FIRST))
    bad_ensembles = [{"ensemble": value} for value in (math.nan, math.inf, -800.0)]
    for bad in ({"exec_horizon": 0}, {"candidates": 0}, {"smoothing": -1}, *bad_ensembles):
        with pytest.raises(PrismError, match=next(iter(bad))):
            ControllerConfig(**bad)  # type: ignore[arg-type]


def test_the_papers_rule_needs_a_pose_that_the_policy_has() -> None:
    def make(**settings: object) -> Controller:
        selection = SelectionConfig(rule="proxy_score", **settings)  # type: ignore[arg-type]
        return Controller(PointPolicy(), ControllerConfig(exec_horizon=2, selection=selection))

    with pytest.raises(PrismError, match=r"no vector sensor 'robot_obs'.*proprio \(2\), goal \(2\).*pose_sensor"):
        make(pose_sensor="robot_obs")
    with pytest.raises(PrismError, match=r"pose_dims = 3 and grippers .* do not fit the 2 entries"):
        make(pose_dims=3)
    controller = make(pose_sensor="goal")
    controller.act({"proprio": see(0)["proprio"]})  # absent for a step: the last-action rule


def test_actions_that_are_not_finite_never_reach_the_robot() -> None:
    class Broken(PointPolicy):
        def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
            return torch.full((1, candidates, self.spec.pred_horizon, 2), torch.nan)

    with pytest.raises(PrismError, match="not finite"):
        Controller(Broken(), ControllerConfig(exec_horizon=2)).act(see(0))


def test_nor_do_blended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism.inference.chooser.ensemble", lambda plans, decay: np.full_like(plans[-1][1], np.nan))
    controller = Controller(PointPolicy(), ControllerConfig(exec_horizon=2, ensemble=0.01))
    with pytest.raises(PrismError, match="blended plan is not finite"):
        controller.act(see(0))


@pytest.mark.parametrize("decay", [-10.0, 0.0, 10.0])
def test_plans_blend_at_any_weight(decay: float) -> None:
    plans = [(at, np.full((100, 2), float(at))) for at in range(100)]
    blended = ensemble(plans, decay)
    assert np.isfinite(blended).all()
    assert blended[0, 0] == pytest.approx({-10.0: 99.0, 0.0: 49.5, 10.0: 0.0}[decay], abs=1e-3)


def test_several_robots_get_the_actions_that_each_would_get_alone() -> None:
    config = ControllerConfig(exec_horizon=3, candidates=4)
    alone, together = ([Controller(PointPolicy(noise=0.5), config, seed) for seed in range(3)] for _ in "ab")
    shared = together[0].policy
    together = [Controller(shared, config, seed) for seed in range(3)]
    for t in range(8):
        seen = [see(0.1 * t + robot) for robot in range(3)]
        expected = [controller.act(shown) for controller, shown in zip(alone, seen, strict=True)]
        np.testing.assert_allclose(act_together(together, seen), expected, rtol=1e-6)
    assert [one.replans[-1].index for one in together] == [one.replans[-1].index for one in alone]
    assert len(shared.seen) == 3, "one pass for all"


NOTHING = ({"proprio": np.zeros(2, np.float32)}, {"proprio": True})


def ramps(start: float, count: int = 2) -> NDArray[np.float32]:
    rows = start + 0.01 * np.arange(8)[None, :, None] + np.arange(count)[:, None, None]
    return np.repeat(rows, 2, axis=2).astype(np.float32)


def chooser(**settings: object) -> Chooser:
    config = ControllerConfig(**{"exec_horizon": 3, "selection": FIRST, **settings})  # type: ignore[arg-type]
    return Chooser(PointPolicy().spec, config, np.ones(2))


def test_actions_executed_elsewhere_are_counted() -> None:
    one = chooser()
    one.advance(2)  # nothing to count yet
    one.choose(ramps(1.0), NOTHING, 0.0)
    one.advance(5)
    plan = one.choose(ramps(2.0), NOTHING, 50.0)
    assert plan.info.step == 5
    assert plan.info.latency_ms > 50.0
    np.testing.assert_allclose(plan.remainder, np.repeat([[1.05], [1.06], [1.07]], 2, axis=1), rtol=1e-6)
    one.advance(100)
    assert one.remainder is None


@pytest.mark.parametrize("reported", [False, True])
def test_a_choice_goes_on_from_the_commands_that_were_sent(reported: bool) -> None:
    """What the robot really got, after a limit or a takeover, and not what the plan said."""
    one = chooser(candidates=2, selection=SelectionConfig(rule="last_action"))
    one.choose(np.stack([ramps(0.0, 1)[0], ramps(5.0, 1)[0]]), NOTHING, 0.0)
    first = 0 if float(one.plan.actions[0, 0]) < 1 else 1  # type: ignore[union-attr]
    one.advance(2, [np.full(2, 5.0), np.full(2, 5.1)] if reported else None)
    plan = one.choose(np.stack([ramps(0.0, 1)[0], ramps(5.0, 1)[0]]), NOTHING, 0.0)
    assert plan.info.index == (1 if reported else first)


def test_what_is_clipped_is_not_what_the_next_plan_goes_on_from() -> None:
    config = ControllerConfig(exec_horizon=1, candidates=2, selection=SelectionConfig(rule="last_action"))
    told, silent = Controller(IndexPolicy(), config), Controller(IndexPolicy(), config)
    for step in range(2):
        found = told.act(see(step)), silent.act(see(step))
        told.sent(np.full(2, 3.0, np.float32))
    assert [float(one[0]) for one in found] == [3.0, 2.0]


def test_steps_that_nobody_sent_are_filled_in() -> None:
    window = Window(IndexPolicy(obs_horizon=4).spec)

    def seen(name: str = "proprio") -> list[float]:
        return [round(float(streams[name][0]), 6) for streams, _ in window.steps]

    window.observe(see(0), missed=7)  # nothing before it: padded
    assert seen() == [0, 0, 0, 0]
    window.observe(see(8), missed=7)
    assert seen() == [5, 6, 7, 8]
    window.observe(see(10), missed=1)
    assert seen() == [7, 8, 9, 10]
    window.observe({"goal": see(0)["goal"]}, missed=3)  # one sensor is absent now
    assert [present["proprio"] for _, present in window.steps] == [True, True, True, False]
    assert seen()[:3] == [10, 10, 10]
    window.observe(see(20), missed=2)
    assert seen()[1:] == [20, 20, 20]  # absent before: the nearest that is there


def test_blended_rotations_keep_unit_norm_and_do_not_jump() -> None:
    """Plans of one rotation with either sign: the mean of q and -q would be 0."""

    class Turning(PointPolicy):
        def __init__(self) -> None:
            super().__init__(pred_horizon=8)
            action = ActionSpec(quaternions=(0,))
            self.spec = replace(self.spec, action_dim=4, action=action)
            self.normalizer = Normalizer.empty(self.spec.sensors, 4, (0,))
            self.sign = 1.0

        def sample(self, observation: Observation, candidates: int, rng: Random) -> torch.Tensor:
            self.sign = -self.sign
            angle = torch.linspace(0.1, 0.2, 8)
            plan = torch.stack([0 * angle, 0 * angle, angle.sin(), angle.cos()], dim=1)
            return self.sign * plan.expand(1, candidates, 8, 4)

    for config in (
        ControllerConfig(exec_horizon=4, candidates=2, smoothing=3),
        ControllerConfig(exec_horizon=2, candidates=2, ensemble=0.1),
    ):
        controller = Controller(Turning(), config)
        actions = np.stack([controller.act(see(t)) for t in range(12)])
        np.testing.assert_allclose(np.linalg.norm(actions, axis=1), 1.0, rtol=1e-5)
        assert (np.abs(np.diff(actions, axis=0)) < 0.2).all()
        assert not any(replan.mode_switch for replan in controller.replans)


@pytest.mark.parametrize("past", [0, 1, 3])
@pytest.mark.parametrize("weight", [0.1, 10.0])
def test_least_jerk_minimises_what_it_says(past: int, weight: float) -> None:
    rng = np.random.default_rng(0)
    plan, before = rng.normal(size=(16, 2)), rng.normal(size=(past, 2))

    def cost(u: NDArray[np.float64]) -> float:
        joined = np.concatenate([before, u])
        jerk = joined[3:] - 3 * joined[2:-1] + 3 * joined[1:-2] - joined[:-3]
        return float(((u - plan) ** 2).sum() + weight * (jerk**2).sum())

    best = least_jerk(plan, before, weight)
    for _ in range(50):
        assert cost(best) <= cost(best + 1e-3 * rng.normal(size=plan.shape))
    line = np.linspace(0, 1, 16 + past)[:, None] * np.array([[1.0, -2.0]])
    np.testing.assert_allclose(least_jerk(line[past:], line[:past], weight), line[past:], atol=1e-12)


def test_jerk_weight_smooths_what_is_executed_and_spares_grippers() -> None:
    rng = np.random.default_rng(0)
    noisy = np.cumsum(rng.normal(size=(30, 4, 16, 2)), axis=2).astype(np.float32)

    def executed(weight: float) -> NDArray[np.float32]:
        selection = SelectionConfig(rule="first", grippers=(1,))
        config = ControllerConfig(exec_horizon=4, selection=selection, jerk_weight=weight)
        one = Chooser(PointPolicy(pred_horizon=16).spec, config, np.ones(2))
        actions = []
        for plans in noisy:
            actions += list(one.choose(plans, NOTHING, 0.0).actions[:4])
            one.advance(4)
        return np.array(actions)

    plain, smooth = executed(0.0), executed(100.0)
    jerk = [np.abs(np.diff(one[:, 0], n=3)).mean() for one in (plain, smooth)]
    assert jerk[1] < 0.2 * jerk[0]
    np.testing.assert_array_equal(plain[:, 1], smooth[:, 1])


@pytest.mark.parametrize("kind", [ABSOLUTE, DELTA])
@pytest.mark.parametrize("size", [0.02, 0.1, 0.3])
def test_a_nudge_gives_way_by_the_square_of_its_reach(size: float, kind: ActionKind) -> None:
    away = np.zeros((1, 16, 2), np.float32)
    away[0, 4:8, 0] = size  # there and back again
    plan = np.diff(away, axis=1, prepend=0.0).astype(np.float32) if kind is DELTA else away
    selection = SelectionConfig(rule="first", pose_dims=2, mode_radius=0.15)
    config = ControllerConfig(exec_horizon=4, selection=selection, jerk_weight=10.0)
    policy = of_kind(PointPolicy(pred_horizon=16), kind)
    chosen = Chooser(policy.spec, config, np.ones(2)).choose(plan, NOTHING, 0.0)
    weight = 10.0 * min(1.0, size / np.sqrt(2) / 0.15) ** 2  # a distance is a mean over the two entries
    expected = least_jerk(plan[0].astype(np.float64), np.zeros((0, 2)), weight)
    np.testing.assert_allclose(chosen.actions, expected, atol=1e-6)
