"""PRISM itself: encoder, generator and objective behind the two verbs (Sec. 4, Alg. 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from prism.distributed import draws
from prism.encoder import Encoder
from prism.errors import PrismError
from prism.generator import Generator, GeneratorConfig, Prepared
from prism.io.jsonconfig import from_json
from prism.methods.context import ContextConfig, ContextPolicy, Method, seeded
from prism.normalize import Normalizer
from prism.objective import RSIMLE, Crowd, Distances, ObjectiveConfig
from prism.policy import LossOutput, PolicySpec
from prism.types import Batch


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
class Draft:
    """What Alg. 1 has of some rows before it chooses among their candidates."""

    target: Float[Tensor, "B Tp Da"]
    prepared: Prepared
    latent: Float[Tensor, "B K Z"]
    anchor: Float[Tensor, "B 1 1 Da"] | None


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

    def latents(self, batch: int, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Z"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        device = self.normalizer.action_center.device
        return draws.randn((batch, candidates, self.config.generator.latent), rng).to(device)

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        """Alg. 1: draw K without gradient, choose, draw the chosen ones again with gradient.

        The gradient reaches only the chosen candidates, so it equals that of back-propagating all K (a test
        shows it) at a fraction of the time and memory.
        """
        return next(self.losses([batch], rng))

    def losses(self, parts: Sequence[Batch], rng: torch.Generator) -> Iterator[LossOutput]:
        """Alg. 1 on a batch in parts: measure all of them, move the threshold, then train the chosen ones of each.

        Several parts are encoded twice, the first time without gradient: only distances outlive the measuring.
        """
        single = len(parts) == 1
        begin = rng.get_state()
        crowd = self._crowd(parts)
        measured: list[Distances] = []
        for part in parts:
            rng.set_state(begin)
            with torch.set_grad_enabled(single and torch.is_grad_enabled()):
                draft = self._draft(part, rng)
            with torch.no_grad():
                candidates = self._generate(draft.prepared, draft.latent, draft.anchor)
                measured.append(self.objective.measure(candidates, draft.target, part.action_valid, crowd, part.share))
        if self.training:
            self.objective.calibrate(measured, parts[0].share)
        for part, distances in zip(parts, measured, strict=True):
            if not single:
                rng.set_state(begin)
                draft = self._draft(part, rng)
            choice = self.objective.decide(distances)
            index = choice.index.unsqueeze(-1).expand(-1, -1, draft.latent.shape[-1])
            chosen = self._generate(draft.prepared, draft.latent.gather(1, index), draft.anchor)
            loss, terms = self.objective.loss(chosen, choice, draft.target, part.action_valid)
            yield LossOutput(loss, {**terms, **choice.logs})

    def _draft(self, batch: Batch, rng: torch.Generator) -> Draft:
        rng = draws.for_rows(rng, batch)
        example = self.example(batch, rng)
        latent = self.latents(example.target.shape[0], self.config.objective.candidates, rng)
        return Draft(example.target, self.generator.prepare(example.context), latent, example.anchor)

    def _crowd(self, parts: Sequence[Batch]) -> Crowd | None:
        """The targets of the global batch, where these rows are not all of it."""
        share = parts[0].share
        if share is None or not self.objective.needs_crowd:
            return None
        target = torch.cat([self.normalizer.normalize_actions(part.actions) for part in parts])
        return self.objective.gather(target, torch.cat([part.action_valid for part in parts]), share)

    def plan(
        self, context: Float[Tensor, "B S D"], candidates: int, rng: torch.Generator
    ) -> Float[Tensor, "B K Tp Da"]:
        latent = self.latents(context.shape[0], candidates, rng)
        return self._generate(self.generator.prepare(context), latent, None)


METHOD = Method(PrismConfig, PrismPolicy)
