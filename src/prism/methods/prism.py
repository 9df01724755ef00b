"""PRISM itself: encoder, generator and objective behind the two verbs (Sec. 4, Alg. 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encoder import Encoder
from prism.errors import PrismError
from prism.generator import Generator, GeneratorConfig, Prepared
from prism.io.jsonconfig import from_json
from prism.methods.base import ContextConfig, ContextPolicy, Encoded, Method, seeded
from prism.normalize import Normalizer
from prism.objective import RSIMLE, Choice, ObjectiveConfig
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random, Share, derive_seed
from prism.types import Batch

_FEATURES = 9  # the stream of random features among those of a step


@dataclass(frozen=True)
class PrismConfig(ContextConfig):
    method: ClassVar[str] = "prism"

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> PrismConfig:
        return prism

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pred_horizon % self.generator.actions_per_query:
            raise PrismError(
                f"pred_horizon {self.pred_horizon} is not a multiple of "
                f"generator.actions_per_query {self.generator.actions_per_query}"
            )


@dataclass(frozen=True)
class PrismDraw(Encoded):
    prepared: Prepared  # with gradient
    latent: Float[Tensor, "B K Z"]


class PrismPolicy(ContextPolicy):
    config: PrismConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(PrismConfig, spec.config)
        super().__init__(spec, config, normalizer)
        with seeded(seed) as rng:
            width = config.generator.width
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, width, normalizer)
            self.generator = Generator(config.generator, config.pred_horizon, spec.action_dim, rng)
        self.objective = RSIMLE(config.objective, spec.action_dim)
        self.objective.set_action_std(normalizer.action_std)

    def _generate(self, prepared: Prepared, latent: Tensor, anchor: Tensor | None) -> Float[Tensor, "B K Tp Da"]:
        actions: Tensor = self.generator(prepared, latent)
        return actions if anchor is None else actions + anchor

    def latents(self, batch: int, candidates: int, rng: Random) -> Float[Tensor, "B K Z"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        device = self.normalizer.action_center.device
        return rng.randn((batch, candidates, self.config.generator.latent)).to(device)

    def draw(self, batch: Batch, rng: Random) -> PrismDraw:
        """Targets, context and K latents a row."""
        shared = super().draw(batch, rng)
        if self.training and self.config.generator.attention.redraw:
            step = rng.generator.initial_seed()  # of the step: the same features for every part of the batch
            self.generator.redraw(torch.Generator().manual_seed(derive_seed(step, _FEATURES, 0)))
        prepared = self.generator.prepare(shared.context)
        latent = self.latents(len(shared.target), self.config.objective.candidates, rng)
        return PrismDraw(**vars(shared), prepared=prepared, latent=latent)

    @torch.no_grad()
    def choose(self, draws: Iterable[PrismDraw], share: Share) -> Choice:
        """K candidates a row, the threshold, rejection, and the nearest candidates that are left (objective.py)."""
        objective = self.objective
        parts = [(self._generate(d.prepared, d.latent, d.anchor), d.target, d.batch.action_valid, d.rng) for d in draws]
        *rows, sources = zip(*parts, strict=True)
        candidates, target, valid = (torch.cat(own) for own in rows)
        distances = objective.distances(candidates, target, valid, objective.targets(target, valid, share))
        if self.training:
            objective.calibrate(distances.pool, share)  # the threshold follows the quantile
        near = distances.near.split([len(own) for own in rows[0]])
        rejected = torch.cat([objective.reject(*part) for part in zip(near, sources, strict=True)])
        return objective.choose(distances.own, rejected)  # the nearest that is left, and K' for the soft term

    def loss(self, draw: PrismDraw, choice: Choice) -> LossOutput:
        """The chosen candidates again, with gradient.

        The gradient equals that of back-propagating all K (a test shows it) at a fraction of the time and memory.
        """
        index = choice.index.unsqueeze(-1).expand(-1, -1, draw.latent.shape[-1])
        chosen = self._generate(draw.prepared, draw.latent.gather(1, index), draw.anchor)
        loss, logs = self.objective.loss(chosen, choice, draw.target, draw.batch.action_valid)
        return LossOutput(loss, {**logs, **self.generator.attention_logs()})

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        latent = self.latents(context.shape[0], candidates, rng)
        return self._generate(self.generator.prepare(context), latent, None)


METHOD = Method(PrismConfig, PrismPolicy)
