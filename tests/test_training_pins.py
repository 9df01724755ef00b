"""Same seed, same numbers, on every CPU; and a changed formula, however slightly, is noticed (python -m tests.pins)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn import functional

from prism import attention, distance, objective, rows
from prism.methods import diffusion
from prism.methods.flow_matching import FlowMatchingPolicy
from prism.training.trainer import Learner
from tests.pins import cases
from tests.pins.cases import CASES, FOLDER, TOLERANCE, compute, deviation

REMEDY = "meant to change? python -m tests.pins, and say why in the commit"


def deviations(name: str) -> dict[str, float]:
    """Of every pinned tensor of a case, from what the code computes now."""
    pinned = safetensors.torch.load_file(FOLDER / f"{name}.safetensors")
    computed = compute(name)
    assert computed.keys() == pinned.keys(), REMEDY
    return {key: deviation(computed[key], value) for key, value in pinned.items()}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_actions_are_the_pinned_ones(name: str) -> None:
    wrong = {key: value for key, value in deviations(name).items() if not value <= TOLERANCE}  # also NaN
    assert not wrong, REMEDY


CHANGES: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "Charbonnier eps 1e-5": ("prism", distance, "_charbonnier", lambda f: lambda gap, _: f(gap, 1e-5)),
    "threshold at another quantile": ("prism", rows, "quantile", lambda f: lambda values, q: f(values, q + 1e-4)),
    "soft term of 0.1 % more weight": ("prism-batch-soft", objective, "soft_coverage", lambda f: (
        lambda *args, **settings: 1.001 * f(*args, **settings)
    )),
    "LayerNorm eps 1 % larger": ("prism", functional, "layer_norm", lambda f: (
        lambda x, shape, weight, bias, eps: f(x, shape, weight, bias, 1.01 * eps)
    )),
    "FAVOR+ eps 10 % larger": ("prism-favor", attention, "_FEATURE_EPS", lambda eps: 1.1 * eps),
    "Euler steps 1e-6 late": ("flow_matching", FlowMatchingPolicy, "velocity", lambda f: (
        lambda self, x, films, time: f(self, x, films, time + 1e-6)
    )),
    "noise schedule off by 1e-7": ("diffusion", diffusion, "cosine_alphas", lambda f: lambda t: f(t) * (1 - 1e-7)),
    "EMA decay off by 1e-6": ("mse", cases, "ema_decay", lambda f: lambda config, step: f(config, step) + 1e-6),
    "learning rate 1e-6 larger": ("act", Learner, "step", lambda f: (
        lambda self, batch, seed, rate, decay: f(self, batch, seed, rate * (1 + 1e-6), decay)
    )),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_slightly_different_formula_is_caught(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, where, attribute, changed = CHANGES[change]
    monkeypatch.setattr(where, attribute, changed(getattr(where, attribute)))
    worst = max(deviations(name).values())
    print(f"{change}: {worst:.1e}")
    assert worst > 100 * TOLERANCE


def test_the_same_numbers_twice() -> None:
    first, second = compute("prism-batch-soft"), compute("prism-batch-soft")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_no_pin_without_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(CASES)
