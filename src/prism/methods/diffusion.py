"""Diffusion Policy (Chi et al. 2023): a UNet that removes noise, asked many times for one plan.

Training: a random step t, noise on the plan, the network says which noise. Sampling: from noise, `evaluations` steps of
DDIM (deterministic given the first noise) or DDPM, all K candidates in one batch. The schedule is that of DDPM (Ho et
al. 2020) with squared-cosine steps (Nichol and Dhariwal 2021):

    x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) eps,     ab_t = prod_{s <= t} (1 - beta_s)
    beta_s = min(1 - f((s + 1) / T) / f(s / T), 0.999),     f(u) = cos^2((u + 0.008) / 1.008 pi / 2)

A step goes from t to an earlier t'; `t' = -1` is the data, ab = 1. Agrees with diffusers' DDPMScheduler and
DDIMScheduler (squaredcos_cap_v2, fixed_small, clip_sample, set_alpha_to_one) to 1e-5: tests/test_baselines_math.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.errors import PrismError, check_choices, check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import Encoded, Method
from prism.methods.unet import Films, UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random
from prism.types import Observation

Sampler = Literal["ddim", "ddpm"]

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig


@dataclass(frozen=True)
class DenoiserConfig(UNetPolicyConfig):
    """Config of denoising methods: Diffusion Policy, and those distilled from it."""

    train_steps: int = 100  # T; published
    clip: float = 1.0  # bound on the denoised plan, in its own units; published: 1 on actions within [-1, 1]

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        config = super().sized(prism, size)  # bounded by the way from one position in [-1, 1] to another
        return config if prism.anchor is None else replace(config, clip=2.0 / config.offset_scale)


@dataclass(frozen=True)
class DiffusionConfig(DenoiserConfig):
    method: ClassVar[str] = "diffusion"

    prediction: Prediction = "epsilon"  # published; sample: the network gives the plan itself
    sampler: Sampler = "ddim"
    evaluations: int = 10  # NFE: forward passes a plan
    spacing: Spacing = "leading"  # published; use trailing, or first_step, for one evaluation
    # Falcon (Chen et al. 2025), with controller.warm_start: how many of the last evaluations are left where a plan
    # starts from the old one; how far (mean, normalised) the network may want to leave it before it starts anew.
    warm_evaluations: int = 3
    warm_tolerance: float = 0.1
    first_step: int | None = None  # where sampling starts; None: by the spacing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "diffusion")
        numbers = {"[1, inf)": "warm_evaluations", "[0, inf)": "warm_tolerance", "(0, inf)": "clip"}
        check_numbers(self, "diffusion", numbers)
        if self.evaluations == 1 and self.spacing == "leading" and self.first_step is None:
            raise PrismError(
                "diffusion: one evaluation with spacing 'leading' would start at the data: use 'trailing' or first_step"
            )
        self.visited()

    def visited(self) -> list[int]:
        """The steps at which the network is asked for a plan."""
        return timesteps(self.train_steps, self.evaluations, self.spacing, self.first_step)


class DiffusionPolicy(UNetPolicy):
    config: DiffusionConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(DiffusionConfig, spec.config)
        super().__init__(spec, config, normalizer, seed)
        self.schedule = NoiseSchedule(config.train_steps)

    def predict(
        self, noisy: Float[Tensor, "B K Tp Da"], films: Films, step: Int[Tensor, " N"]
    ) -> Float[Tensor, "B K Tp Da"]:
        output: Tensor = self.unet(noisy, films, self.unet.step_films(step.float()))
        return output.float()

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        """E |eps - eps_theta(sqrt(ab_t) a + sqrt(1 - ab_t) eps, t, context)|^2 over the steps that exist."""
        data = self.data(draw)
        step = draw.rng.randint(self.config.train_steps, (len(data),)).to(data.device)
        noise = draw.rng.randn(data.shape).to(data.device)
        noisy = self.schedule.add_noise(data, noise, step)
        output = self.predict(noisy.unsqueeze(1), self.films(draw.context), step)[:, 0]
        goal = noise if self.config.prediction == "epsilon" else data
        return LossOutput(self.row_mean((output - goal).square(), draw.batch.action_valid).mean(), {})

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        films = self.films(context)
        x = self.noise(context.shape[0], candidates, rng)
        return self.config.offset_scale * self.denoise(x, films, rng)

    @torch.inference_mode()
    def sample_near(
        self, observation: Observation, candidates: int, rng: Random, previous: Float[Tensor, "B R Da"]
    ) -> Float[Tensor, "B K Tp Da"]:
        """Falcon: noise the old plan's remainder (its last action held) to where few evaluations are left, and go on.

        The first of them says where the plan would end. Rows in which that is further from the remainder than
        `warm_tolerance` start from pure noise, as `sample` does: the old plan is no longer believed.
        """
        config = self.config
        films, anchor = self.films(self.encoder(observation)), self.anchor(observation)
        steps = min(previous.shape[1], config.pred_horizon)
        held = previous[:, -1:].expand(-1, config.pred_horizon - steps, -1)
        old = self.normalizer.normalize_actions(torch.cat([previous[:, :steps], held], dim=1)).unsqueeze(1)
        old = (old if anchor is None else old - anchor) / config.offset_scale
        noise = self.noise(old.shape[0], candidates, rng)
        first, *rest = config.visited()[-config.warm_evaluations :]
        step = torch.tensor([first], device=old.device)
        x = self.schedule.add_noise(old.expand_as(noise), noise, step)
        output = self.predict(x, films, step)
        ends, _ = self.schedule.split(x, output, first, config.prediction, config.clip)
        gap = config.offset_scale * (ends - old)[:, :, :steps].abs().mean((1, 2, 3))  # (B,)
        anew = gap > config.warm_tolerance
        if bool(anew.all()):
            return self.finish(config.offset_scale * self.denoise(noise, films, rng), anchor)
        x = self._step(x, output, first, rest[0] if rest else -1, rng)
        plans = self.denoise(x, films, rng, rest)
        if bool(anew.any()):
            plans = torch.where(anew.view(-1, 1, 1, 1), self.denoise(noise, films, rng), plans)
        return self.finish(config.offset_scale * plans, anchor)

    def denoise(
        self, x: Float[Tensor, "B K Tp Da"], films: Films, rng: Random, visited: list[int] | None = None
    ) -> Float[Tensor, "B K Tp Da"]:
        """From noise, or from the first of the steps `visited`, to plans in the method's own space."""
        visited = self.config.visited() if visited is None else visited
        for step, into in pairwise([*visited, -1]):
            output = self.predict(x, films, torch.tensor([step], device=x.device))
            x = self._step(x, output, step, into, rng)
        return x

    def _step(self, x: Tensor, output: Tensor, step: int, into: int, rng: Random) -> Tensor:
        """Take x from `step` to the earlier step `into`, with the network's output."""
        config, schedule = self.config, self.schedule
        data, noise = schedule.split(x, output, step, config.prediction, config.clip)
        if config.sampler == "ddim":
            return schedule.ddim(data, noise, into)
        fresh = self.noise(x.shape[0], x.shape[1], rng) if into >= 0 else noise
        return schedule.ddpm(x, data, step, into, fresh)


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


METHOD = Method(DiffusionConfig, DiffusionPolicy)
