"""Rectified Flow (Liu et al. 2023): flow matching once more, on pairs that the teacher's flow has connected.

    x_1 = teacher's plan from noise x_0,   x_t = (1 - t) x_0 + t x_1,   loss E |v_theta(x_t, t) - (x_1 - x_0)|^2

Paths of such pairs cross less, so they are straighter, and one Euler step lands nearer where many would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from prism.distributed import draws
from prism.errors import PrismError
from prism.methods.flow_matching import FlowMatchingConfig, FlowMatchingPolicy
from prism.methods.student import Student
from prism.policy import LossOutput, Policy
from prism.types import Batch


@dataclass(frozen=True)
class RectifiedFlowConfig(FlowMatchingConfig):
    method: ClassVar[str] = "rectified_flow"

    evaluations: int = 1
    teacher_evaluations: int = 10  # of the teacher, by its own solver, for a pair

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_evaluations < 1:
            raise PrismError("rectified_flow.teacher_evaluations must be at least 1")


class RectifiedFlowPolicy(Student[FlowMatchingPolicy], FlowMatchingPolicy):
    config_type: ClassVar[type[FlowMatchingConfig]] = RectifiedFlowConfig
    config: RectifiedFlowConfig
    teacher_method: ClassVar[str] = FlowMatchingConfig.method

    def learn_from(self, teacher: Policy) -> None:
        asked = self.config.teacher_evaluations
        if isinstance(teacher, FlowMatchingPolicy) and teacher.config.solver == "midpoint" and asked % 2:
            raise PrismError(
                f"rectified_flow.teacher_evaluations is {asked}; the teacher's solver, midpoint, takes two a step: "
                "use an even number"
            )
        super().learn_from(teacher)

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        rng = draws.for_rows(rng, batch)
        example = self.example(batch, rng)
        time = draws.rand((len(example.target),), rng).to(example.target.device)
        noise = draws.randn(example.target.shape, rng).to(example.target.device)
        with torch.no_grad():
            asked = self.teacher.integrate(
                noise.unsqueeze(1), self.teachers_films(batch), self.config.teacher_evaluations
            )
            data = self.in_my_space(asked[:, 0], batch, example)
        error = self.path_error(data, noise, time, self.films(example.context))
        return LossOutput(self.row_mean(error, batch.action_valid).mean(), {})
