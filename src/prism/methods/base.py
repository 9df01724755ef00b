"""What the baselines share beyond the encoder: the space they work in, and how an error becomes a loss.

    data = (normalised actions - anchor) / offset_scale          what a method models
    plan = offset_scale * data                                   what `plan` returns; the anchor is added later

`offset_scale` brings offsets from an anchor, which are small, to the unit scale that noise has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prism.distributed import draws
from prism.errors import PrismError
from prism.methods.context import ContextConfig, ContextPolicy, Example


@dataclass(frozen=True)
class BaselineConfig(ContextConfig):
    width: int = 512  # D of the context: PRISM's generator.width
    offset_scale: float = 1.0  # plans are modelled in this unit of the normalised action

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1 or self.offset_scale <= 0:
            raise PrismError(f"{self.method}: width {self.width} must be at least 1, offset_scale above 0")

    @classmethod
    def like(cls, shared: ContextConfig, width: int, **own: Any) -> Self:
        """A config whose shared part is that of another method, field by field."""
        return cls(**{f.name: getattr(shared, f.name) for f in fields(ContextConfig)}, width=width, **own)


class BaselinePolicy(ContextPolicy):
    config: BaselineConfig

    def data(self, example: Example) -> Float[Tensor, "B Tp Da"]:
        """The target in the method's own space."""
        target = example.target if example.anchor is None else example.target - example.anchor[:, 0]
        return target / self.config.offset_scale

    def noise(self, rows: int, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Tp Da"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        shape = (rows, candidates, self.config.pred_horizon, self.spec.action_dim)
        return draws.randn(shape, rng).to(self.normalizer.action_center.device)

    def row_mean(self, error: Float[Tensor, "B Tp Da"], valid: Bool[Tensor, "B Tp"]) -> Float[Tensor, " B"]:
        """Mean over the valid steps of each row and the action dimensions that move: the mean of these over ranks is
        that of the global batch."""
        moves = self.normalizer.action_moves
        mask = valid.unsqueeze(-1).to(torch.float32)
        return (error.float() * (mask * moves)).sum((1, 2)) / (mask.sum((1, 2)) * moves.sum()).clamp(min=1.0)
