"""IMLE Policy (Rana et al. 2025), "UNet RS-IMLE": noise of a plan's shape becomes a plan in one pass.

    d_ik = |a_i - g(noise_k, context_i)|, Euclidean over the flattened sequence (its valid steps)
    loss = mean_i min_k { d_ik : d_ik > epsilon }                over the rows i that have such a candidate

Rejection is per sample, against the own target, with a fixed epsilon; rows without a valid candidate are dropped.
Execution is the rule `overlap` of prism.selection on 32 candidates (METHOD below).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prism.errors import check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import Encoded, Method
from prism.methods.unet import SIZES, Films, UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random, Share
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
        check_numbers(self, "imle", {"[1, inf)": "candidates", "[0, inf)": "epsilon"})


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


@dataclass(frozen=True)
class ImleDraw(Encoded):
    data: Float[Tensor, "B Tp Da"]
    films: Films
    noise: Float[Tensor, "B K Tp Da"]


@dataclass(frozen=True)
class ImleChoice:
    index: Int[Tensor, " B"]
    kept: Bool[Tensor, " B"]  # rows that have a valid candidate
    fraction: Float[Tensor, ""]  # of such rows in the global batch
    logs: dict[str, Tensor]


class ImlePolicy(UNetPolicy):
    config: ImleConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__(spec, from_json(ImleConfig, spec.config), normalizer, seed, steps=False)

    def draw(self, batch: Batch, rng: Random) -> ImleDraw:
        shared = super().draw(batch, rng)
        data, films = self.data(shared), self.films(shared.context)
        noise = rng.randn((len(data), self.config.candidates, *data.shape[1:])).to(data.device)
        return ImleDraw(**vars(shared), data=data, films=films, noise=noise)

    @torch.no_grad()
    def choose(self, draws: Iterable[ImleDraw], share: Share) -> ImleChoice:
        squared = torch.cat([self._squared(draw, draw.noise) * self.config.offset_scale**2 for draw in draws])
        index, kept = choose(squared, self.config.epsilon)
        rejected = (squared <= self.config.epsilon**2).float().mean()
        logs = {"rejection_rate": rejected, "dropped_rows": 1.0 - kept.float().mean()}
        return ImleChoice(index, kept, share.gather(kept.float()).mean(), logs)

    def loss(self, draw: ImleDraw, choice: ImleChoice) -> LossOutput:
        """The chosen candidates again, with gradient: that of all of them, for less.

        The mean is over the kept rows of the global batch: that over all rows, divided by the fraction that was kept.
        """
        rows = torch.arange(len(choice.index), device=choice.index.device)
        squared = self._squared(draw, draw.noise[rows, choice.index].unsqueeze(1))[:, 0]
        kept = choice.kept
        distance = torch.where(kept, squared, 1.0).sqrt() * kept * self.config.offset_scale  # no sqrt of 0
        return LossOutput(distance.mean() / choice.fraction.clamp(min=1e-9), choice.logs)

    def _squared(self, draw: ImleDraw, noise: Float[Tensor, "B C Tp Da"]) -> Float[Tensor, "B C"]:
        plans = self.unet(noise, draw.films) * self.normalizer.action_moves
        return flat_distance(plans, draw.data, draw.batch.action_valid)

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        plans: Tensor = self.unet(self.noise(context.shape[0], candidates, rng), self.films(context))
        return self.config.offset_scale * plans


METHOD = Method(ImleConfig, ImlePolicy, controller=("candidates=32", "selection.rule=overlap"))
