"""The floor: PRISM's own encoder and generator, trained to the mean squared error. It cannot be in two minds.

The latent is zero, so all K plans are one plan; where demonstrations disagree it is their average.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from jaxtyping import Float
from torch import Tensor

from prism.encoder import Encoder
from prism.errors import PrismError
from prism.generator import Generator, GeneratorConfig
from prism.io.jsonconfig import from_json
from prism.methods.base import BaselineConfig, BaselinePolicy, Encoded, Method, seeded
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig


@dataclass(frozen=True)
class RegressorConfig(BaselineConfig):
    method: ClassVar[str] = "mse"

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)  # PRISM's

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        return cls.like(prism, generator=prism.generator)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator.width != self.width:
            raise PrismError(f"mse: generator.width {self.generator.width} must be the context's width {self.width}")


class RegressorPolicy(BaselinePolicy):
    config: RegressorConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(RegressorConfig, spec.config)
        super().__init__(spec, config, normalizer)
        with seeded(seed) as rng:
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, config.width, normalizer)
            self.generator = Generator(config.generator, config.pred_horizon, spec.action_dim, rng)

    def _plan(self, context: Float[Tensor, "B S D"]) -> Float[Tensor, "B 1 Tp Da"]:
        latent = context.new_zeros(context.shape[0], 1, self.config.generator.latent)
        plan: Tensor = self.generator(self.generator.prepare(context), latent)
        return plan.float()

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        error = self._plan(draw.context)[:, 0] - self.data(draw)
        return LossOutput(self.row_mean(error.square(), draw.batch.action_valid).mean(), {})

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        return self.config.offset_scale * self._plan(context).expand(-1, candidates, -1, -1)


METHOD = Method(RegressorConfig, RegressorPolicy)
