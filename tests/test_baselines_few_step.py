"""The few-step methods do what they are for: straighter flows, one evaluation like many, few steps where all is clear.

A toy in place of the UNet, so that it trains in a second: one context, and plans that are all +0.8 or all -0.8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.inference.smoothing import ensemble
from prism.methods.adaflow import AdaFlowPolicy
from prism.methods.base import ContextPolicy, Encoded
from prism.methods.consistency import ConsistencyPolicy
from prism.methods.diffusion import DiffusionPolicy
from prism.methods.flow_matching import FlowMatchingPolicy, RectifiedFlowConfig, RectifiedFlowPolicy
from prism.methods.presets import build_policy, student_config
from prism.methods.unet import Student, step_features
from prism.rows import Random
from prism.selection import SelectionConfig
from prism.types import Batch, Observation
from tests.baseline_fakes import SMALL_UNET, build, small_method
from tests.policy_fakes import ACTION_DIM, VECTORS, random_batch

ROWS, SIZE = 256, 4 * ACTION_DIM


class Toy(nn.Module):
    """The UNet's interface over a small MLP that sees the noisy plan and the time."""

    condition = 24

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(SIZE + 16, 96), nn.Mish(), nn.Linear(96, 96), nn.Mish(), nn.Linear(96, SIZE)
            )

    def condition_films(self, condition: Tensor) -> tuple[Tensor, ...]:
        return ()

    def step_films(self, step: Tensor) -> tuple[Tensor, ...]:
        return (step_features(step, 16).unsqueeze(1),)

    def forward(self, x: Tensor, condition: Any, step: tuple[Tensor, ...]) -> Tensor:
        clock = step[0].expand(*x.shape[:2], 16) if step[0].shape[0] in (1, x.shape[0]) else step[0]
        out: Tensor = self.net(torch.cat([x.flatten(2), clock], dim=2))
        return out.view_as(x)


def toy_batch(modes: tuple[float, ...]) -> Batch:
    streams = {s.name: torch.zeros(ROWS, 2, *s.shape) for s in VECTORS}
    present = {s.name: torch.ones(ROWS, 2, dtype=torch.bool) for s in VECTORS}
    value = torch.tensor(modes).repeat(ROWS // len(modes))[:, None, None]
    valid = torch.ones(ROWS, 4, dtype=torch.bool)
    return Batch(Observation(streams, present), value.expand(ROWS, 4, ACTION_DIM).clone(), valid)


def train(
    method: str,
    modes: tuple[float, ...] = (-0.8, 0.8),
    teacher: ContextPolicy | None = None,
    steps: int = 500,
    **own: Any,
) -> ContextPolicy:
    config = small_method(method, **own)
    policy = build_policy(config.spec(VECTORS, ACTION_DIM, 10.0), 0)
    assert isinstance(policy, ContextPolicy)
    policy.unet = Toy()  # type: ignore[assignment]
    if teacher is not None:
        assert isinstance(policy, Student)
        policy.learn_from(teacher)
    batch, rng = toy_batch(modes), Random(1)
    context = policy.encoder(batch.observation).detach()  # the one context, encoded once
    policy.draw = lambda batch, rng: Encoded(batch, rng, batch.actions, context, None)  # type: ignore[method-assign]
    if isinstance(policy, Student):
        policy.teachers_films = lambda draw: ()  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    policy.train()
    for _ in range(steps):
        optimizer.zero_grad()
        policy.batch_loss(batch, rng).loss.backward()
        optimizer.step()
        schedule.step()
    return policy.eval()


def one_row() -> Observation:
    observation = toy_batch((0.0,)).observation
    return Observation(
        {k: v[:1] for k, v in observation.streams.items()}, {k: v[:1] for k, v in observation.present.items()}
    )


def _repeated(observation: Observation, rows: int) -> Observation:
    streams = {k: v.repeat(rows, *[1] * (v.ndim - 1)) for k, v in observation.streams.items()}
    return Observation(streams, {k: v.repeat(rows, 1) for k, v in observation.present.items()})


def draw(policy: ContextPolicy, seed: int = 5) -> Tensor:
    return policy.sample(one_row(), 100, Random(seed))[0]  # (100, 4, A)


def on_a_mode(plans: Tensor) -> float:
    """Share of plans that are on one of the two modes, on average over their entries."""
    return float(torch.stack([(plans - mode).abs().mean((1, 2)) < 0.25 for mode in (-0.8, 0.8)]).any(0).float().mean())


@pytest.fixture(scope="module")
def flow() -> FlowMatchingPolicy:
    policy = train("flow_matching", evaluations=10)
    assert isinstance(policy, FlowMatchingPolicy)
    return policy


@pytest.fixture(scope="module")
def diffusion() -> DiffusionPolicy:
    policy = train("diffusion", evaluations=10, steps=800)
    assert isinstance(policy, DiffusionPolicy)
    return policy


def _bend(policy: FlowMatchingPolicy) -> float:
    """How far one Euler step lands from ten, from the same noise."""
    noise = torch.randn(1, 100, 4, ACTION_DIM, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float((policy.integrate(noise, (), 1) - policy.integrate(noise, (), 10)).abs().mean())


def test_one_step_of_a_flow_is_a_mean_and_reflow_straightens_it(flow: FlowMatchingPolicy) -> None:
    assert on_a_mode(draw(flow)) > 0.8
    with torch.no_grad():
        once = flow.integrate(torch.randn(1, 100, 4, ACTION_DIM, generator=torch.Generator().manual_seed(3)), (), 1)
    assert on_a_mode(once[0]) < 0.5
    straight = train("rectified_flow", teacher=flow)
    assert isinstance(straight, RectifiedFlowPolicy)
    assert _bend(straight) < 0.5 * _bend(flow)
    plans = draw(straight)
    assert on_a_mode(plans) > on_a_mode(once[0]) + 0.2
    assert 0.2 < float((plans.mean((1, 2)) > 0).float().mean()) < 0.8  # still both modes


def test_consistency_lands_where_its_teacher_does(diffusion: DiffusionPolicy) -> None:
    assert on_a_mode(draw(diffusion)) > 0.8
    student = train("consistency", teacher=diffusion)
    assert isinstance(student, ConsistencyPolicy)
    assert student.config.evaluations == 1
    noise = torch.randn(1, 100, 4, ACTION_DIM, generator=torch.Generator().manual_seed(3))
    rng = Random()
    with torch.no_grad():
        slow = diffusion.denoise(noise, (), rng)
        before = diffusion.schedule.split(
            noise, diffusion.predict(noise, (), torch.tensor([90])), 90, "epsilon", diffusion.config.clip
        )[0]
        fast = student.jump(noise, (), rng)
    assert float((fast - slow).abs().mean()) < 0.6 * float((before - slow).abs().mean())
    assert float(((fast.mean((2, 3)) > 0) == (slow.mean((2, 3)) > 0)).float().mean()) > 0.85
    assert on_a_mode(fast[0]) > on_a_mode(before[0])


def test_consistency_flow_matching_needs_one_evaluation_a_segment(flow: FlowMatchingPolicy) -> None:
    policy = train("consistency_fm", delta=0.1)
    with torch.no_grad():
        twice = flow.integrate(torch.randn(1, 100, 4, ACTION_DIM, generator=torch.Generator().manual_seed(3)), (), 2)
    plans = draw(policy)
    away = (plans.abs() - 0.8).abs().mean()
    assert float(away) < float((twice.abs() - 0.8).abs().mean())
    assert 0.2 < float((plans.mean((1, 2)) > 0).float().mean()) < 0.8


def test_adaflow_takes_one_step_where_nothing_is_uncertain() -> None:
    taken = {}
    for name, modes in (("sure", (0.5,)), ("torn", (-0.8, 0.8))):
        policy = train("adaflow", modes, eta=0.2 * SIZE**0.5, evaluations=10)
        assert isinstance(policy, AdaFlowPolicy)
        with torch.no_grad():
            condition = policy.project(policy.encoder(one_row()).flatten(1))
            noise = torch.randn(1, 50, 4, ACTION_DIM, generator=torch.Generator().manual_seed(3))
            plans, steps = policy.adapt(noise, condition)
        taken[name] = float(steps.mean())
        if name == "sure":
            assert float((plans - 0.5).abs().mean()) < 0.2  # eta, an entry
    assert taken["sure"] < 1.5
    assert taken["torn"] > taken["sure"] + 1.0


def test_a_student_needs_the_right_teacher(flow: FlowMatchingPolicy) -> None:
    student = build_policy(small_method("rectified_flow").spec(VECTORS, ACTION_DIM, 10.0))
    with pytest.raises(PrismError, match="--teacher"):
        student.batch_loss(random_batch(4), Random())
    consistency = build_policy(small_method("consistency").spec(VECTORS, ACTION_DIM, 10.0))
    assert isinstance(consistency, ConsistencyPolicy)
    with pytest.raises(PrismError, match="--method diffusion"):
        consistency.learn_from(flow)
    assert isinstance(student, RectifiedFlowPolicy)
    with pytest.raises(PrismError, match="cannot learn from one of method 'mse'"):
        student.learn_from(build(small_method("mse")))
    with pytest.raises(PrismError, match="offset_scale"):
        student.learn_from(build(small_method("flow_matching", offset_scale=0.3)))
    for wrong in ("consistency_fm", "adaflow", "diffusion"):  # the same network, or nearly; not what it stands for
        with pytest.raises(PrismError, match=f"cannot learn from one of method '{wrong}'"):
            student.learn_from(build(small_method(wrong)))


def test_a_midpoint_teacher_has_a_student_that_takes_euler_steps() -> None:
    teacher = small_method("flow_matching", solver="midpoint", evaluations=6)
    config = student_config("rectified_flow", teacher)
    assert isinstance(config, RectifiedFlowConfig)
    assert (config.solver, config.evaluations, config.unet) == ("euler", 1, SMALL_UNET)
    learned = build_policy(teacher.spec(VECTORS, ACTION_DIM, 10.0))
    for asked in (1, 3):  # half a step of midpoint is none: the teacher's plan would be the noise
        student = build_policy(replace(config, teacher_evaluations=asked).spec(VECTORS, ACTION_DIM, 10.0))
        assert isinstance(student, RectifiedFlowPolicy)
        with pytest.raises(PrismError, match="use an even number"):
            student.learn_from(learned)
    student = build_policy(replace(config, teacher_evaluations=2).spec(VECTORS, ACTION_DIM, 10.0))
    assert isinstance(student, RectifiedFlowPolicy)
    student.learn_from(learned)


# --------------------------------------------------------------------------- what the controller does for a method


def test_falcon_starts_from_the_old_plan_until_the_world_disagrees(diffusion: DiffusionPolicy) -> None:
    """Near the +0.8 plan all plans stay there; a remainder that is nowhere near a mode is not believed."""
    calls: list[int] = []
    predict = diffusion.predict

    def counted(noisy: Tensor, films: Any, step: Tensor) -> Tensor:
        calls.append(int(step[0]))
        return predict(noisy, films, step)

    diffusion.predict = counted  # type: ignore[method-assign]
    try:
        old = torch.full((1, 2, ACTION_DIM), 0.8)
        plans = diffusion.sample_near(one_row(), 50, Random(1), old)[0]
        assert float((plans.mean((1, 2)) > 0.4).float().mean()) > 0.95
        assert calls == [20, 10, 0]  # the last three of ten
        calls.clear()
        anew = diffusion.sample_near(one_row(), 50, Random(1), -4.0 * old)
        assert calls == [20, *range(90, -1, -10)]  # one to see that, and then all ten
        assert torch.equal(anew, diffusion.sample(one_row(), 50, Random(1)))
        calls.clear()
        both = _repeated(one_row(), 2)
        plans = diffusion.sample_near(both, 50, Random(1), torch.cat([old, -4.0 * old]))
        assert calls == [20, 10, 0, *range(90, -1, -10)]  # each row has its own
        assert float((plans[0].mean((1, 2)) > 0.4).float().mean()) > 0.95
        assert on_a_mode(plans[1]) > 0.8
    finally:
        diffusion.predict = predict  # type: ignore[method-assign]


def test_the_controller_keeps_the_old_plan_for_falcon(diffusion: DiffusionPolicy) -> None:
    seen: list[Tensor] = []
    near = diffusion.sample_near

    def watch(observation: Observation, candidates: int, rng: Random, previous: Tensor) -> Tensor:
        seen.append(previous)
        return near(observation, candidates, rng, previous)

    diffusion.sample_near = watch  # type: ignore[method-assign]
    try:
        config = ControllerConfig(exec_horizon=2, candidates=3, warm_start=True, selection=SelectionConfig("first"))
        controller = Controller(diffusion, config)
        observation = {s.name: np.zeros(s.shape, np.float32) for s in VECTORS}
        for _ in range(2):
            controller.act(observation)
        assert not seen
        assert controller.last_plan is not None
        rest = controller.last_plan.actions[2:]
        controller.act(observation)
        np.testing.assert_allclose(seen[0][0].numpy(), rest)
    finally:
        diffusion.sample_near = near  # type: ignore[method-assign]
    with pytest.raises(PrismError, match="cannot start from an old plan"):
        Controller(build(small_method("act")), ControllerConfig(warm_start=True, exec_horizon=2))


def test_temporal_ensembling_is_the_weighted_mean_of_all_plans() -> None:
    rng = np.random.default_rng(0)
    plans = [(0, rng.normal(size=(5, 2))), (1, rng.normal(size=(5, 2))), (3, rng.normal(size=(5, 2)))]
    blended = ensemble(plans, 0.3)
    for offset in range(5):
        said = [plan[3 + offset - at] for at, plan in plans if 3 + offset < at + 5]
        weights = [np.exp(-0.3 * i) for i in range(len(said))]
        expected = sum(w * a for w, a in zip(weights, said, strict=True)) / sum(weights)
        np.testing.assert_allclose(blended[offset], expected)
    np.testing.assert_array_equal(ensemble(plans[:1], 0.3), plans[0][1])


def test_the_controller_ensembles() -> None:
    policy = build(small_method("flow_matching")).eval()
    observation = {s.name: np.zeros(s.shape, np.float32) for s in VECTORS}
    config = ControllerConfig(exec_horizon=1, candidates=1, selection=SelectionConfig("first"), ensemble=0.01)
    controller = Controller(policy, config)
    said: list[np.ndarray] = []
    for step in range(6):
        action = controller.act(observation)
        assert controller.last_plan is not None
        said.append(controller.last_plan.candidates[0])
        heard = [plan[step - at] for at, plan in enumerate(said) if step - at < 4]
        weight = np.exp(-0.01 * np.arange(len(heard)))
        np.testing.assert_allclose(action, weight @ np.stack(heard) / weight.sum(), rtol=1e-4, atol=1e-6)
    with pytest.raises(PrismError, match="both blend plans"):
        ControllerConfig(ensemble=0.01, smoothing=2)
