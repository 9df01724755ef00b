"""IMLE Policy (Rana et al. 2025), "UNet RS-IMLE": noise of a plan's shape becomes a plan in one pass.

    d_ik = |a_i - g(noise_k, context_i)|, Euclidean over the flattened sequence (its valid steps)
    loss = mean_i min_k { d_ik : d_ik > epsilon }                over the rows i that have such a candidate

Rejection is per sample, against the own target, with a fixed epsilon; rows without a valid candidate are dropped.
Execution is the rule `overlap` of prism.selection on 32 candidates (METHOD below).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prism.distributed import draws, ranks
from prism.errors import PrismError
from prism.io.jsonconfig import from_json
from prism.methods.context import Method
from prism.methods.unet import SIZES, Films, UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.types import Batch

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig


@dataclass(frozen=True)
class ImleConfig(UNetPolicyConfig):
    method: ClassVar[str] = "imle"

    candidates: int = 20  # a training row; published
    epsilon: float = 0.03  # published, on normalised actions

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        return cls.like(prism, unet=SIZES[size])  # offsets in their own units, as published

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 1 or self.epsilon < 0:
            raise PrismError("imle.candidates must be at least 1, imle.epsilon at least 0")


@dataclass(frozen=True)
class _Draft:
    data: Float[Tensor, "B Tp Da"]
    films: Films
    noise: Float[Tensor, "B K Tp Da"]


def flat_distance(
    plans: Float[Tensor, "B K Tp Da"], target: Float[Tensor, "B Tp Da"], valid: Bool[Tensor, "B Tp"]
) -> Float[Tensor, "B K"]:
    """Squared Euclidean distance over the valid steps of the flattened sequence."""
    gap = (plans.float() - target.float().unsqueeze(1)) * valid[:, None, :, None]
    return gap.square().sum((2, 3))


def choose(squared: Float[Tensor, "B K"], epsilon: float) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """The nearest candidate that is further than epsilon, and whether there is one."""
    far = squared > epsilon**2
    return squared.masked_fill(~far, math.inf).argmin(1), far.any(1)


class ImlePolicy(UNetPolicy):
    config: ImleConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__(spec, from_json(ImleConfig, spec.config), normalizer, seed, steps=False)

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        return next(self.losses([batch], rng))

    def losses(self, parts: Sequence[Batch], rng: torch.Generator) -> Iterator[LossOutput]:
        """All candidates without gradient, then the chosen ones with it: the same gradient for less.

        The mean is over the kept rows of the global batch, so all parts and ranks choose before any is trained.
        """
        single = len(parts) == 1
        begin = rng.get_state()
        scale, moves = self.config.offset_scale, self.normalizer.action_moves
        choices: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in parts:
            rng.set_state(begin)
            with torch.set_grad_enabled(single and torch.is_grad_enabled()):
                draft = self._draft(part, rng)
            with torch.no_grad():
                plans = self.unet(draft.noise, draft.films) * moves
                squared = flat_distance(plans, draft.data, part.action_valid) * scale**2
                choices.append((*choose(squared, self.config.epsilon), (squared <= self.config.epsilon**2).float()))
        kept_rows = torch.stack([kept.sum() for _, kept, _ in choices]).sum().float()
        if parts[0].share is not None:
            kept_rows = ranks.sum_over_ranks(kept_rows.reshape(1))[0]
        for part, (index, kept, rejected) in zip(parts, choices, strict=True):
            if not single:
                rng.set_state(begin)
                draft = self._draft(part, rng)
            rows = len(index)
            noise = draft.noise[torch.arange(rows, device=index.device), index].unsqueeze(1)
            squared = flat_distance(self.unet(noise, draft.films) * moves, draft.data, part.action_valid)[:, 0]
            distance = torch.where(kept, squared, 1.0).sqrt() * kept * scale  # no sqrt of 0 where a row is dropped
            total = rows if part.share is None else part.share.total
            # A rank's loss is weighted by its share of the rows (training/learner.py): weigh it back.
            loss = distance.sum() / kept_rows.clamp(min=1.0) * (total / rows)
            yield LossOutput(loss, {"rejection_rate": rejected.mean(), "dropped_rows": 1.0 - kept.float().mean()})

    def _draft(self, batch: Batch, rng: torch.Generator) -> _Draft:
        rng = draws.for_rows(rng, batch)
        example = self.example(batch, rng)
        data = self.data(example)
        noise = draws.randn((len(data), self.config.candidates, *data.shape[1:]), rng).to(data.device)
        return _Draft(data, self.films(example.context), noise)

    def plan(
        self, context: Float[Tensor, "B S D"], candidates: int, rng: torch.Generator
    ) -> Float[Tensor, "B K Tp Da"]:
        plans: Tensor = self.unet(self.noise(context.shape[0], candidates, rng), self.films(context))
        return self.config.offset_scale * plans


METHOD = Method(ImleConfig, ImlePolicy, controller=("candidates=32", "selection.rule=overlap"))
