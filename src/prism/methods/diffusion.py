"""Diffusion Policy (Chi et al. 2023): a UNet that removes noise, asked many times for one plan.

Training: a random step t, noise on the plan, the network says which noise. Sampling: from noise, `evaluations` steps of
DDIM (deterministic given the first noise) or DDPM, all K candidates in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prism.distributed import draws
from prism.errors import PrismError
from prism.io.jsonconfig import ADDED_LATER, from_json
from prism.methods.schedule import NoiseSchedule, Prediction, Spacing, timesteps
from prism.methods.unet import Films
from prism.methods.unet_policy import UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.types import Batch, Observation

Sampler = Literal["ddim", "ddpm"]


@dataclass(frozen=True)
class DiffusionConfig(UNetPolicyConfig):
    method: ClassVar[str] = "diffusion"

    train_steps: int = 100  # T; published
    prediction: Prediction = "epsilon"  # published; sample: the network gives the plan itself
    sampler: Sampler = "ddim"
    evaluations: int = 10  # NFE: forward passes a plan
    spacing: Spacing = "leading"  # published; use trailing, or first_step, for one evaluation
    clip: float = 1.0  # bound on the denoised plan, in its own units; published: 1 on actions within [-1, 1]
    # Falcon (Chen et al. 2025), with controller.warm_start: how many of the last evaluations are left where a plan
    # starts from the old one; how far (mean, normalised) the network may want to leave it before it starts anew.
    warm_evaluations: int = field(default=3, metadata=ADDED_LATER)
    warm_tolerance: float = field(default=0.1, metadata=ADDED_LATER)
    first_step: int | None = field(default=None, metadata=ADDED_LATER)  # where sampling starts; None: by the spacing

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, kind in (
            ("prediction", self.prediction, Prediction),
            ("sampler", self.sampler, Sampler),
            ("spacing", self.spacing, Spacing),
        ):
            if value not in get_args(kind):
                raise PrismError(f"diffusion.{name} is '{value}'; use one of {', '.join(get_args(kind))}")
        if self.evaluations == 1 and self.spacing == "leading" and self.first_step is None:
            raise PrismError(
                "diffusion: one evaluation with spacing 'leading' would start at the data: use 'trailing' or first_step"
            )
        self.visited()
        if self.warm_evaluations < 1 or self.warm_tolerance < 0:
            raise PrismError("diffusion.warm_evaluations must be at least 1, diffusion.warm_tolerance at least 0")
        if self.clip <= 0:
            raise PrismError(f"diffusion.clip is {self.clip}; it must be above 0")

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

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        """E |eps - eps_theta(sqrt(ab_t) a + sqrt(1 - ab_t) eps, t, context)|^2 over the steps that exist."""
        rng = draws.for_rows(rng, batch)
        example = self.example(batch, rng)
        data = self.data(example)
        step = draws.randint(self.config.train_steps, (len(data),), rng).to(data.device)
        noise = draws.randn(data.shape, rng).to(data.device)
        noisy = self.schedule.add_noise(data, noise, step)
        output = self.predict(noisy.unsqueeze(1), self.films(example.context), step)[:, 0]
        goal = noise if self.config.prediction == "epsilon" else data
        return LossOutput(self.row_mean((output - goal).square(), batch.action_valid).mean(), {})

    def plan(
        self, context: Float[Tensor, "B S D"], candidates: int, rng: torch.Generator
    ) -> Float[Tensor, "B K Tp Da"]:
        films = self.films(context)
        x = self.noise(context.shape[0], candidates, rng)
        return self.config.offset_scale * self.denoise(x, films, rng)

    @torch.inference_mode()
    def sample_near(
        self, observation: Observation, candidates: int, rng: torch.Generator, previous: Float[Tensor, "B R Da"]
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
        self, x: Float[Tensor, "B K Tp Da"], films: Films, rng: torch.Generator, visited: list[int] | None = None
    ) -> Float[Tensor, "B K Tp Da"]:
        """From noise, or from the first of the steps `visited`, to plans in the method's own space."""
        visited = self.config.visited() if visited is None else visited
        for step, into in pairwise([*visited, -1]):
            output = self.predict(x, films, torch.tensor([step], device=x.device))
            x = self._step(x, output, step, into, rng)
        return x

    def _step(self, x: Tensor, output: Tensor, step: int, into: int, rng: torch.Generator) -> Tensor:
        """What the network said at `step` takes x to the earlier step `into`."""
        config, schedule = self.config, self.schedule
        data, noise = schedule.split(x, output, step, config.prediction, config.clip)
        if config.sampler == "ddim":
            return schedule.ddim(data, noise, into)
        fresh = self.noise(x.shape[0], x.shape[1], rng) if into >= 0 else noise
        return schedule.ddpm(x, data, step, into, fresh)
