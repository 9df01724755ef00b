"""A method whose head is the UNet: the context side, made once, for those that run it once or many times."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from prism.encoder import Encoder
from prism.methods.base import BaselineConfig, BaselinePolicy
from prism.methods.context import seeded
from prism.methods.unet import Films, UNet, UNetConfig
from prism.normalize import Normalizer
from prism.policy import PolicySpec


@dataclass(frozen=True)
class UNetPolicyConfig(BaselineConfig):
    unet: UNetConfig = field(default_factory=UNetConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unet.check_horizon(self.pred_horizon)


class UNetPolicy(BaselinePolicy):
    config: UNetPolicyConfig

    def __init__(
        self, spec: PolicySpec, config: UNetPolicyConfig, normalizer: Normalizer, seed: int, steps: bool = True
    ) -> None:
        super().__init__(spec, config, normalizer)
        with seeded(seed):
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, config.width, normalizer)
            features = self.encoder.tokens * config.width
            condition = config.unet.condition or features
            self.project: nn.Module = nn.Linear(features, condition) if config.unet.condition else nn.Identity()
            self.unet = UNet(config.unet, spec.action_dim, condition, steps)

    def films(self, context: Float[Tensor, "B S D"]) -> Films:
        """What the UNet needs of the contexts, for any number of candidates and steps."""
        return self.unet.condition_films(self.project(context.flatten(1)))
