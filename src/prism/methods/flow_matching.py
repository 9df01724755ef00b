"""Flow Matching (Lipman et al. 2023) on straight paths: a UNet that gives a velocity, integrated from noise to plan.

    x_t = (1 - t) noise + t plan,   v = plan - noise,   loss E |v_theta(x_t, t) - v|^2

One Euler step from noise lands on the mean of all plans: a regressor. Report it beside more steps.

Rectified Flow (Liu et al. 2023) is flow matching once more, on pairs that a teacher's flow has connected:

    x_1 = teacher's plan from noise x_0,   x_t = (1 - t) x_0 + t x_1,   loss E |v_theta(x_t, t) - (x_1 - x_0)|^2

Paths of such pairs cross less, so they are straighter, and one Euler step lands nearer where many would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from prism.errors import PrismError, check_choices, check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import Encoded, Method
from prism.methods.unet import Films, Student, UNetPolicy, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import LossOutput, Policy, PolicySpec
from prism.rows import Random

Solver = Literal["euler", "midpoint"]

TIME_SCALE = 100.0  # the step embedding was made for whole numbers of this size


@dataclass(frozen=True)
class FlowMatchingConfig(UNetPolicyConfig):
    method: ClassVar[str] = "flow_matching"

    solver: Solver = "euler"
    evaluations: int = 5  # NFE; a midpoint step takes two

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, self.method)
        check_numbers(self, self.method, {"[1, inf)": "evaluations"})
        if self.solver == "midpoint" and self.evaluations % 2:
            raise PrismError(f"{self.method}.evaluations is {self.evaluations}; it must be even for midpoint")


class FlowMatchingPolicy(UNetPolicy):
    config_type: ClassVar[type[FlowMatchingConfig]] = FlowMatchingConfig
    config: FlowMatchingConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__(spec, from_json(self.config_type, spec.config), normalizer, seed)

    def velocity(
        self, x: Float[Tensor, "B K Tp Da"], films: Films, time: Float[Tensor, " N"]
    ) -> Float[Tensor, "B K Tp Da"]:
        output: Tensor = self.unet(x, films, self.unet.step_films(TIME_SCALE * time))
        return output.float()

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        data = self.data(draw)
        time = draw.rng.rand((len(data),)).to(data.device)
        noise = draw.rng.randn(data.shape).to(data.device)
        error = self.path_error(data, noise, time, self.films(draw.context))
        return LossOutput(self.row_mean(error, draw.batch.action_valid).mean(), {})

    def path_error(
        self,
        data: Float[Tensor, "B Tp Da"],
        noise: Float[Tensor, "B Tp Da"],
        time: Float[Tensor, " B"],
        films: Films,
    ) -> Float[Tensor, "B Tp Da"]:
        """|v_theta(x_t, t) - (data - noise)|^2 on the straight path from noise to data."""
        x = torch.lerp(noise, data, time[:, None, None])
        output = self.velocity(x.unsqueeze(1), films, time)[:, 0]
        return (output - (data - noise)).square()

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        films = self.films(context)
        return self.config.offset_scale * self.integrate(self.noise(context.shape[0], candidates, rng), films)

    def integrate(
        self, x: Float[Tensor, "B K Tp Da"], films: Films, evaluations: int | None = None
    ) -> Float[Tensor, "B K Tp Da"]:
        """dx/dt = v(x, t) from t = 0 (noise) to t = 1 (plan); `evaluations`: not as many as the config says."""
        config = self.config
        steps = (evaluations or config.evaluations) // (2 if config.solver == "midpoint" else 1)
        for i in range(steps):
            now = x.new_tensor([i / steps])
            velocity = self.velocity(x, films, now)
            if config.solver == "midpoint":
                velocity = self.velocity(x + 0.5 / steps * velocity, films, now + 0.5 / steps)
            x = x + velocity / steps
        return x


@dataclass(frozen=True)
class RectifiedFlowConfig(FlowMatchingConfig):
    method: ClassVar[str] = "rectified_flow"

    evaluations: int = 1
    teacher_evaluations: int = 10  # of the teacher, by its own solver, for a pair

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "rectified_flow", {"[1, inf)": "teacher_evaluations"})


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

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        time = draw.rng.rand((len(draw.target),)).to(draw.target.device)
        noise = draw.rng.randn(draw.target.shape).to(draw.target.device)
        with torch.no_grad():
            asked = self.teacher.integrate(
                noise.unsqueeze(1), self.teachers_films(draw), self.config.teacher_evaluations
            )
            data = self.in_my_space(asked[:, 0], draw)
        error = self.path_error(data, noise, time, self.films(draw.context))
        return LossOutput(self.row_mean(error, draw.batch.action_valid).mean(), {})


METHOD = Method(FlowMatchingConfig, FlowMatchingPolicy)
RECTIFIED = Method(RectifiedFlowConfig, RectifiedFlowPolicy)
