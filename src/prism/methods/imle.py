"""IMLE Policy (Rana et al. 2025), "UNet RS-IMLE": noise of a plan's shape becomes a plan in one pass.

    d_ik = |a_i - g(noise_k, context_i)|, Euclidean over the flattened sequence (its valid steps)
    loss = mean_i min_k { d_ik : d_ik > epsilon }                over the rows i that have such a candidate

Rejection is per sample, against the own target, with a fixed epsilon; rows without a valid candidate are dropped.
Execution is the rule `overlap` of prism.selection on 32 candidates (METHOD below).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prism.errors import check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import Method
from prism.methods.unet import SIZES, UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random
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


class ImlePolicy(UNetPolicy):
    config: ImleConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__(spec, from_json(ImleConfig, spec.config), normalizer, seed, steps=False)

    def loss(self, batch: Batch, rng: Random) -> LossOutput:
        """All candidates without gradient, then the chosen ones with it: the same gradient for less.

        The mean is over the kept rows of the global batch: that over all rows, divided by the fraction that was kept.
        """
        example = self.example(batch, rng)
        data, films, valid = self.data(example), self.films(example.context), batch.action_valid
        noise = rng.randn((len(data), self.config.candidates, *data.shape[1:])).to(data.device)
        scale, epsilon, moves = self.config.offset_scale, self.config.epsilon, self.normalizer.action_moves
        with torch.no_grad():
            squared = batch.share.once(lambda: flat_distance(self.unet(noise, films) * moves, data, valid) * scale**2)
            index, kept = choose(squared, epsilon)
            fraction = batch.share.gather(kept.float()).mean()
            rejected = (squared <= epsilon**2).float().mean()
        chosen = noise[torch.arange(len(data), device=index.device), index].unsqueeze(1)
        squared = flat_distance(self.unet(chosen, films) * moves, data, valid)[:, 0]
        distance = torch.where(kept, squared, 1.0).sqrt() * kept * scale  # no sqrt of 0 where a row is dropped
        loss = distance.mean() / fraction.clamp(min=1e-9)
        return LossOutput(loss, {"rejection_rate": rejected, "dropped_rows": 1.0 - kept.float().mean()})

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        plans: Tensor = self.unet(self.noise(context.shape[0], candidates, rng), self.films(context))
        return self.config.offset_scale * plans


METHOD = Method(ImleConfig, ImlePolicy, controller=("candidates=32", "selection.rule=overlap"))
