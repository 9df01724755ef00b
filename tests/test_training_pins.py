"""Same seed, same machine, same numbers; and the same to rounding everywhere (python -m tests.pins)."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from tests.pins.cases import CASES, FOLDER, compute

REMEDY = "meant to change? python -m tests.pins, and say why in the commit"


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_actions_are_the_pinned_ones(name: str) -> None:
    pinned = safetensors.torch.load_file(FOLDER / f"{name}.safetensors")
    computed = compute(name)
    assert computed.keys() == pinned.keys(), REMEDY
    for key, value in pinned.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(
            computed[key], value, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=lambda m, key=key: f"{key}: {m}; {REMEDY}"
        )


def test_the_same_numbers_twice() -> None:
    first, second = compute("prism-batch-soft"), compute("prism-batch-soft")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_no_pin_without_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(CASES)
