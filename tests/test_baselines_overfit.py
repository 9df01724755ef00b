"""Every method can learn a handful of demonstrations by heart: open-loop error near zero."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism.methods import METHODS
from prism.methods.base import ContextPolicy
from prism.methods.diffusion import DiffusionPolicy
from prism.methods.presets import build_policy
from prism.methods.unet import Student, UNetConfig, step_features
from prism.rows import Random
from prism.types import Batch, Observation
from tests.baseline_fakes import build, small_method
from tests.policy_fakes import ACTION_DIM, VECTORS

CONTEXTS, COPIES, MANY = 4, 8, 32
NEAR_ZERO = 0.04
SLOW: dict[str, dict[str, Any]] = {  # methods that learn a whole path from noise, and what makes it quick
    "diffusion": {"clip": 3.0},
    "flow_matching": {"evaluations": 10},
    "consistency_fm": {"delta": 0.1},
    "adaflow": {},
}


def tiny_dataset(copies: int = COPIES) -> tuple[Batch, Batch]:
    """Four contexts, one smooth plan each; in training each several times, so that it is met with several noises."""
    rng = torch.Generator().manual_seed(0)
    streams = {s.name: torch.randn(CONTEXTS, 2, *s.shape, generator=rng) for s in VECTORS}
    start, speed = (torch.rand(2, CONTEXTS, 1, ACTION_DIM, generator=rng) * 2 - 1) * 0.45
    actions = start + speed * torch.linspace(-1, 1, 4)[:, None]

    def batch(copies: int) -> Batch:
        many = {name: stream.repeat(copies, 1, 1) for name, stream in streams.items()}
        present = {name: torch.ones(CONTEXTS * copies, 2, dtype=torch.bool) for name in many}
        valid = torch.ones(CONTEXTS * copies, 4, dtype=torch.bool)
        return Batch(Observation(many, present), actions.repeat(copies, 1, 1), valid)

    return batch(copies), batch(1)


def error(policy: ContextPolicy) -> float:
    """Open-loop error of eight plans a context."""
    _, asked = tiny_dataset()
    plans = policy.eval().sample(asked.observation, 8, Random(2))
    policy.train()
    return float((plans - asked.actions.unsqueeze(1)).abs().mean())


def learn(policy: ContextPolicy, steps: int, copies: int = COPIES) -> ContextPolicy:
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    training, _ = tiny_dataset(copies)
    rng = Random(1)
    for _ in range(steps):
        optimizer.zero_grad()
        policy.batch_loss(training, rng).loss.backward()
        optimizer.step()
        schedule.step()
    return policy


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[pytest.mark.slow] if method in ("adaflow", "consistency_fm") else [])
        for method in METHODS
        if METHODS[method].teacher is None  # below
    ],
)
def test_a_tiny_dataset_is_learned_by_heart(method: str) -> None:
    own: dict[str, Any] = {"kl_weight": 0.1, "dropout": 0.0} if method == "act" else {}
    if method in SLOW:
        own = {"unet": UNetConfig(dims=(32, 64), step_embedding=32, condition=0), "offset_scale": 0.5, **SLOW[method]}
    policy = build(small_method(method, **own))
    before = error(policy)
    after = error(learn(policy, 500 if method in SLOW else 350))
    assert after < NEAR_ZERO, f"{method}: {before:.3f} -> {after:.3f}"
    assert before > 0.15


# ------------------------------------------------------------- few-step methods, with a small network for the UNet


class SmallNet(nn.Module):
    """The UNet's interface over an MLP that sees the noisy plan, the time and the context: milliseconds a step. The
    UNet itself learns by heart above; here it is what a few-step method makes of its network. For one plan a context
    the answer is linear in the noisy plan at every time, hence the gate."""

    def __init__(self, condition: int) -> None:
        super().__init__()
        self.condition, size = condition, 4 * ACTION_DIM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(size + 16 + condition, 128), nn.Mish(), nn.Linear(128, 128), nn.Mish(), nn.Linear(128, size)
            )
            self.gate = nn.Sequential(nn.Linear(16, 32), nn.Mish(), nn.Linear(32, 1))

    def condition_films(self, condition: Tensor) -> tuple[Tensor, ...]:
        return (condition,)

    def step_films(self, step: Tensor) -> tuple[Tensor, ...]:
        return (step_features(step, 16).unsqueeze(1),)

    def forward(self, x: Tensor, films: tuple[Tensor, ...], step: tuple[Tensor, ...]) -> Tensor:
        clock = step[0].expand(*x.shape[:2], 16)
        condition = films[0].unsqueeze(1).expand(-1, x.shape[1], -1)
        out: Tensor = self.net(torch.cat([x.flatten(2), clock, condition], dim=2))
        return out.view_as(x) + self.gate(clock).unsqueeze(3) * x


def few_step(method: str, **own: Any) -> ContextPolicy:
    policy = build_policy(small_method(method, offset_scale=0.5, **own).spec(VECTORS, ACTION_DIM, 10.0), 0)
    assert isinstance(policy, ContextPolicy)
    policy.unet = SmallNet(policy.unet.condition)  # type: ignore[assignment, union-attr, arg-type]
    return policy


@functools.cache
def many_steps(method: str) -> ContextPolicy:
    """Trained once a process; whoever asks it does not change it."""
    return learn(few_step(method, evaluations=10, **({"clip": 3.0} if method == "diffusion" else {})), 500, MANY)


FEW_STEP: dict[str, dict[str, Any]] = {  # and how it is asked
    "rectified_flow": {"evaluations": 1, "teacher_evaluations": 4},
    "consistency": {"evaluations": 1, "clip": 3.0},
    "consistency_fm": {"evaluations": 2, "delta": 0.1},
    "adaflow": {"evaluations": 10},
    "diffusion": {"evaluations": 1, "clip": 3.0, "spacing": "trailing", "prediction": "sample"},  # DDIM, NFE 1
}


def test_no_method_is_left_out() -> None:
    assert {method for method in METHODS if METHODS[method].teacher} <= set(FEW_STEP)


@pytest.mark.parametrize("method", FEW_STEP)
def test_a_few_step_method_learns_by_heart_too(method: str) -> None:
    policy = few_step(method, **FEW_STEP[method])
    before = error(policy)
    steps = 500
    if isinstance(policy, Student):
        teacher = many_steps(str(METHODS[method].teacher))
        assert error(teacher) < NEAR_ZERO, "the teacher"
        fresh = {name: value.clone() for name, value in policy.state_dict().items()}
        policy.learn_from(teacher)
        if method == "rectified_flow":  # a copy of its teacher, which is straight here, would have nothing to learn
            policy.load_state_dict(fresh)
        assert error(policy) > 2 * NEAR_ZERO
        steps = 500 if method == "rectified_flow" else 300
    after = error(learn(policy, steps, MANY))
    assert after < NEAR_ZERO, f"{method}: {before:.3f} -> {after:.3f}"
    assert before > 0.15


def test_ddim_with_one_evaluation_as_documented() -> None:
    """The weights that give .02 in ten evaluations, asked once from where those start. The plan is the difference of
    noise and predicted noise times 1 / sqrt(ab_90) = 7, and so is the network's error: .12, from 1.2 untrained. (.11
    after 1,000 steps: NEAR_ZERO is not to be had in a test. To predict the plan itself, above, has no such factor.)"""
    policy = copy.deepcopy(many_steps("diffusion"))
    assert isinstance(policy, DiffusionPolicy)
    policy.config = replace(policy.config, evaluations=1, first_step=policy.config.visited()[0])
    assert policy.config.visited() == [90]
    assert error(policy) < 4 * NEAR_ZERO
    policy.config = replace(policy.config, first_step=99)  # times 2029: what first_step is for
    assert error(policy) > 0.5


def test_falcon_learns_by_heart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the remainder of a plan that is .06 beside the right one: three evaluations bring it back."""
    policy = many_steps("diffusion").eval()
    assert isinstance(policy, DiffusionPolicy)
    calls: list[int] = []
    predict = policy.predict

    def counted(noisy: Tensor, films: Any, step: Tensor) -> Tensor:
        calls.append(int(step[0]))
        return predict(noisy, films, step)

    monkeypatch.setattr(policy, "predict", counted)
    _, asked = tiny_dataset()
    plans = policy.sample_near(asked.observation, 8, Random(2), asked.actions + 0.06)
    assert calls == [20, 10, 0]  # no plan started anew
    assert float((plans - asked.actions.unsqueeze(1)).abs().mean()) < NEAR_ZERO
