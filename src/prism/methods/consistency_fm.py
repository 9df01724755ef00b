"""Consistency Flow Matching (Yang et al. 2024), FlowPolicy (Zhang et al. 2025): velocities that agree along a path.

    f(x, t) = x + (e - t) v(x, t)          where the path ends in its segment of [0, 1], e = the segment's end
    loss = E |f(x_t, t) - f(x_r, r)|^2 + alpha |v(x_t, t) - v(x_r, r)|^2,     r = min(t + delta, e), no gradient at r

At r = e the second f is x_e itself: the path's own end, where the chain of targets starts. The velocity there is the
next segment's, or at 1 none: the second term is left out. No teacher. One evaluation a segment is what it is made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prism.errors import PrismError, check_numbers
from prism.methods.base import Encoded, Method
from prism.methods.flow_matching import FlowMatchingConfig, FlowMatchingPolicy
from prism.policy import LossOutput


@dataclass(frozen=True)
class ConsistencyFmConfig(FlowMatchingConfig):
    method: ClassVar[str] = "consistency_fm"

    evaluations: int = 2
    segments: int = 2  # published
    delta: float = 0.01  # published
    velocity_weight: float = 1e-5  # alpha; published

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = {"[1, inf)": "segments", "(0, 1]": "delta", "[0, inf)": "velocity_weight"}
        check_numbers(self, "consistency_fm", numbers)
        if self.solver != "euler" or self.evaluations % self.segments:
            raise PrismError(
                f"consistency_fm: evaluations {self.evaluations} must be a multiple of segments {self.segments}, "
                "solver euler"
            )


class ConsistencyFmPolicy(FlowMatchingPolicy):
    config_type: ClassVar[type[FlowMatchingConfig]] = ConsistencyFmConfig
    config: ConsistencyFmConfig

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        data, films = self.data(draw), self.films(draw.context)
        time = draw.rng.rand((len(data),)).to(data.device)
        noise = draw.rng.randn(data.shape).to(data.device)
        end = ((time * self.config.segments).floor() + 1.0) / self.config.segments
        later = torch.minimum(time + self.config.delta, end)

        def jump(at: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.lerp(noise, data, at[:, None, None])
            velocity = self.velocity(x.unsqueeze(1), films, at)[:, 0]
            return x + (end - at)[:, None, None] * velocity, velocity

        landed, velocity = jump(time)
        with torch.no_grad():
            target, target_velocity = jump(later)
        inside = (later < end).to(data.dtype)[:, None, None]
        apart = inside * (velocity - target_velocity).square()
        error = (landed - target).square() + self.config.velocity_weight * apart
        return LossOutput(self.row_mean(error, draw.batch.action_valid).mean(), {})


METHOD = Method(ConsistencyFmConfig, ConsistencyFmPolicy)
