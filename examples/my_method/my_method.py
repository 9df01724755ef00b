"""A method of your own: a linear map from what the sensors say to a plan, trained to the mean absolute error.

    pip install --no-deps -e examples/my_method
    prism train pusht --method linear --steps 2000 && prism eval runs/pusht-linear --episodes 10

This file and the entry point in pyproject.toml are all of it. Encoder, normalisation, data, training, evaluation,
checkpoints and the server are PRISM's; a config says what is stored, a policy has two verbs: loss and plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from prism.encoder import Encoder
from prism.io.jsonconfig import from_json
from prism.methods.base import BaselineConfig, BaselinePolicy, Encoded, Method, seeded
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random


@dataclass(frozen=True)
class LinearConfig(BaselineConfig):
    method: ClassVar[str] = "linear"
    bias: bool = True  # any setting of yours: --set policy.bias=false


class LinearPolicy(BaselinePolicy):
    config: LinearConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(LinearConfig, spec.config)
        super().__init__(spec, config, normalizer)
        with seeded(seed):  # a seed gives the same weights everywhere
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, config.width, normalizer)
            self.head = nn.Linear(
                self.encoder.tokens * config.width, config.pred_horizon * spec.action_dim, config.bias
            )

    def _plan(self, context: Tensor) -> Tensor:  # (B, S, D) -> (B, Tp, Da)
        return self.head(context.flatten(1)).float().unflatten(1, (self.config.pred_horizon, -1))

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        error = (self._plan(draw.context) - self.data(draw)).abs()
        return LossOutput(self.row_mean(error, draw.batch.action_valid).mean(), {})

    def plan(self, context: Tensor, candidates: int, rng: Random) -> Tensor:  # (B, K, Tp, Da), normalised
        return self.config.offset_scale * self._plan(context).unsqueeze(1).expand(-1, candidates, -1, -1)


METHOD = Method(LinearConfig, LinearPolicy, controller=("candidates=1", "selection.rule=first"))
