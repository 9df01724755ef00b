"""AdaFlow (Hu et al. 2024): flow matching whose steps are as large as the flow is certain.

    log s^2(context, x, t) is trained by the likelihood of an entry's error,  E |v_theta - v|^2 / (Tp Da s^2) + log s^2
    step = clip(eta / (sqrt(Tp Da) s), 1 / max_evaluations, 1 - t)           the error of the whole plan, as published

Where demonstrations agree the velocity has no error, s tends to 0, and one step does it all: a regressor where that is
enough. The variance head is a small MLP on the condition, the noisy plan and the time; it sends no gradient back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.errors import PrismError, check_numbers
from prism.methods.base import Encoded, Method, seeded
from prism.methods.flow_matching import TIME_SCALE, FlowMatchingConfig, FlowMatchingPolicy
from prism.methods.unet import Films, step_features
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random

_TIME_FEATURES = 16
_LOG_VARIANCE = (-12.0, 4.0)  # bounds: exp of the head's output stays a number


@dataclass(frozen=True)
class AdaFlowConfig(FlowMatchingConfig):
    method: ClassVar[str] = "adaflow"

    evaluations: int = 10  # at most
    eta: float = 0.1  # error that a step may make, Euclidean over the whole plan, in its own units; published
    hidden: int = 64  # of the variance head

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "adaflow", {"(0, inf)": "eta", "[1, inf)": "hidden"})
        if self.solver != "euler":
            raise PrismError(f"adaflow.solver is '{self.solver}'; use euler")


class AdaFlowPolicy(FlowMatchingPolicy):
    config_type: ClassVar[type[FlowMatchingConfig]] = AdaFlowConfig
    config: AdaFlowConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__(spec, normalizer, seed)
        config = self.config
        features = self.unet.condition + config.pred_horizon * spec.action_dim + _TIME_FEATURES
        with seeded(seed + 1):
            self.uncertainty = nn.Sequential(
                nn.Linear(features, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.hidden), nn.ReLU(),
                nn.Linear(config.hidden, 1),
            )  # fmt: skip

    def log_variance(
        self, x: Float[Tensor, "B K Tp Da"], condition: Float[Tensor, "B C"], time: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        """log s^2 of an entry of the velocity, averaged over the plan."""
        rows, candidates = x.shape[:2]
        clock = step_features(TIME_SCALE * time.flatten(), _TIME_FEATURES).unflatten(0, (rows, candidates))
        repeated = condition.unsqueeze(1).expand(-1, candidates, -1)
        value: Tensor = self.uncertainty(torch.cat([repeated, x.flatten(2), clock], dim=2)).float()
        return value[..., 0].clamp(*_LOG_VARIANCE)

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        data = self.data(draw)
        time = draw.rng.rand((len(data),)).to(data.device)
        noise = draw.rng.randn(data.shape).to(data.device)
        condition = self.project(draw.context.flatten(1))
        films = self.unet.condition_films(condition)
        error = self.row_mean(self.path_error(data, noise, time, films), draw.batch.action_valid)  # (B,)
        x = torch.lerp(noise, data, time[:, None, None]).unsqueeze(1)
        log_variance = self.log_variance(x, condition.detach(), time.unsqueeze(1))[:, 0]
        likelihood = 0.5 * (error.detach() * (-log_variance).exp() + log_variance)
        return LossOutput(error.mean() + likelihood.mean(), {"velocity_error": error.mean().detach()})

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        condition = self.project(context.flatten(1))
        x = self.noise(context.shape[0], candidates, rng)
        return self.config.offset_scale * self.adapt(x, condition)[0]

    def adapt(
        self, x: Float[Tensor, "B K Tp Da"], condition: Float[Tensor, "B C"]
    ) -> tuple[Float[Tensor, "B K Tp Da"], Float[Tensor, "B K"]]:
        """Plans, and the number of steps of each. The batch runs until its last plan is done."""
        films = self.unet.condition_films(condition)
        time = x.new_zeros(x.shape[:2])
        taken = x.new_zeros(x.shape[:2])
        entries = self.config.pred_horizon * self.spec.action_dim
        for _ in range(self.config.evaluations):
            deviation = math.sqrt(entries) * (0.5 * self.log_variance(x, condition, time)).exp()  # of the whole plan
            step = (self.config.eta / deviation).clamp(min=1.0 / self.config.evaluations)
            step = torch.minimum(step, 1.0 - time)
            moving = self._films_at(time)
            velocity = self.unet(x, films, moving).float()
            x = x + step[..., None, None] * velocity
            taken += (step > 0).to(taken.dtype)
            time = time + step
            if bool((time >= 1.0 - 1e-6).all()):
                break
        return x, taken

    def _films_at(self, time: Float[Tensor, "B K"]) -> Films:
        flat = self.unet.step_films(TIME_SCALE * time.flatten())
        return tuple(film.reshape(*time.shape, -1) for film in flat)


METHOD = Method(AdaFlowConfig, AdaFlowPolicy)
