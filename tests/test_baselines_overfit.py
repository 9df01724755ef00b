"""Every method can learn a handful of demonstrations by heart: open-loop error near zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prism.baselines.unet import UNetConfig
from prism.presets import METHODS, TEACHERS
from prism.types import Batch, Observation
from tests.baseline_fakes import build, small_method
from tests.policy_fakes import ACTION_DIM, VECTORS

CONTEXTS, COPIES = 4, 8
SLOW: dict[str, dict[str, Any]] = {  # methods that learn a whole path from noise, and what makes it quick
    "diffusion": {"clip": 3.0},
    "flow_matching": {"evaluations": 10},
    "consistency_fm": {"delta": 0.1},
    "adaflow": {},
}


def tiny_dataset() -> tuple[Batch, Batch]:
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

    return batch(COPIES), batch(1)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[pytest.mark.slow] if method in ("adaflow", "consistency_fm") else [])
        for method in METHODS
        if method not in TEACHERS  # what they learn is the teacher: tests/test_baselines_few_step.py
    ],
)
def test_a_tiny_dataset_is_learned_by_heart(method: str) -> None:
    own: dict[str, Any] = {"kl_weight": 0.1, "dropout": 0.0} if method == "act" else {}
    if method in SLOW:
        own = {"unet": UNetConfig(dims=(32, 64), step_embedding=32, condition=0), "offset_scale": 0.5, **SLOW[method]}
    policy = build(small_method(method, **own))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    steps = 500 if method in SLOW else 350
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    training, asked = tiny_dataset()
    rng = torch.Generator().manual_seed(1)

    def error() -> float:
        plans = policy.eval().sample(asked.observation, 8, torch.Generator().manual_seed(2))
        policy.train()
        return float((plans - asked.actions.unsqueeze(1)).abs().mean())

    before = error()
    for _ in range(steps):
        optimizer.zero_grad()
        policy.loss(training, rng).loss.backward()
        optimizer.step()
        schedule.step()
    after = error()
    assert after < 0.04, f"{method}: {before:.3f} -> {after:.3f}"
    assert before > 0.15
