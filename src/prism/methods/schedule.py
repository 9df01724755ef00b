"""The noise schedule of DDPM (Ho et al. 2020) with squared-cosine steps (Nichol and Dhariwal 2021), and two samplers.

    x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) eps,     ab_t = prod_{s <= t} (1 - beta_s)
    beta_s = min(1 - f((s + 1) / T) / f(s / T), 0.999),     f(u) = cos^2((u + 0.008) / 1.008 pi / 2)

A step goes from t to an earlier t'; `t' = -1` is the data, ab = 1. Agrees with diffusers' DDPMScheduler and
DDIMScheduler (squaredcos_cap_v2, fixed_small, clip_sample, set_alpha_to_one) to 1e-5: tests/test_baselines_math.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.errors import PrismError

Prediction = Literal["epsilon", "sample"]
Spacing = Literal["leading", "trailing"]
Step = int | Int[Tensor, " B"]  # of all rows, or one a row; -1: the data


def cosine_alphas(steps: int) -> Float[Tensor, " T"]:
    """ab_0 .. ab_{T-1}, float64."""

    def f(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1.0 - f((s + 1) / steps) / f(s / steps), 0.999) for s in range(steps)]
    return (1.0 - torch.tensor(betas, dtype=torch.float64)).cumprod(0)


def timesteps(total: int, evaluations: int, spacing: Spacing, first: int | None = None) -> list[int]:
    """Which steps are visited, noisiest first.

    leading: multiples of T // n from (n - 1) T // n down to 0, as published; it starts below full noise, and with one
    evaluation it would start at the data. trailing: from T - 1 down, T / n apart; at T - 1 the plan is the difference
    of noise and predicted noise times 1 / sqrt(ab) = 2029 (T = 100), so the network must be exact, or predict the plan
    itself. `first`: from there down, first / n apart.
    """
    if not 1 <= evaluations <= total:
        raise PrismError(f"{evaluations} evaluations of the network: use 1 to {total}, the steps it was trained with")
    if first is not None:
        if not evaluations <= first < total:
            raise PrismError(f"first_step is {first}; for {evaluations} evaluations use {evaluations} to {total - 1}")
        return [round(first * (1 - i / evaluations)) for i in range(evaluations)]
    if spacing == "leading":
        return [i * (total // evaluations) for i in reversed(range(evaluations))]
    return [round(total - i * total / evaluations) - 1 for i in range(evaluations)]


class NoiseSchedule(nn.Module):
    alphas: Tensor  # ab_0 .. ab_{T-1}, then 1: index -1 is the data

    def __init__(self, steps: int) -> None:
        super().__init__()
        alphas = torch.cat([cosine_alphas(steps), torch.ones(1, dtype=torch.float64)])
        self.register_buffer("alphas", alphas.float(), persistent=False)

    def add_noise(
        self, data: Float[Tensor, "B ..."], noise: Float[Tensor, "B ..."], step: Int[Tensor, " B"]
    ) -> Float[Tensor, "B ..."]:
        return self.ddim(data, noise, step)

    def split(
        self, x: Tensor, output: Tensor, step: Step, prediction: Prediction, clip: float
    ) -> tuple[Tensor, Tensor]:
        """The network's output -> (x_0 within +-clip, eps). The eps is the network's own, also where x_0 is clipped."""
        alpha = self._alpha(step, x)
        if prediction == "epsilon":
            data = (x - (1.0 - alpha).sqrt() * output) / alpha.sqrt()
            return data.clamp(-clip, clip), output
        return output.clamp(-clip, clip), (x - alpha.sqrt() * output) / (1.0 - alpha).sqrt()

    def ddim(self, data: Tensor, noise: Tensor, into: Step) -> Tensor:
        """x_t' = sqrt(ab') x_0 + sqrt(1 - ab') eps: no randomness of its own (eta = 0; Song et al. 2021)."""
        alpha = self._alpha(into, data)
        return alpha.sqrt() * data + (1.0 - alpha).sqrt() * noise

    def ddpm(self, x: Tensor, data: Tensor, step: int, into: int, fresh: Tensor) -> Tensor:
        """The posterior q(x_t' | x_t, x_0); `fresh` is standard normal, unused at the last step."""
        alpha, alpha_into = self.alphas[step], self.alphas[into]
        kept = alpha / alpha_into  # 1 - beta of the whole stride
        mean = (
            alpha_into.sqrt() * (1.0 - kept) / (1.0 - alpha) * data
            + kept.sqrt() * (1.0 - alpha_into) / (1.0 - alpha) * x
        )
        if into < 0:
            return mean
        return mean + ((1.0 - alpha_into) / (1.0 - alpha) * (1.0 - kept)).sqrt() * fresh

    def _alpha(self, step: Step, like: Tensor) -> Tensor:
        return self.alphas[step].view(-1, *[1] * (like.ndim - 1))
