"""Consistency Policy (Prasad et al. 2024): distilled from a Diffusion Policy to answer in one evaluation, or a few.

    f(x_t, t) = x_0 as the network sees it;  on the teacher's DDIM grid t_0 > t_1 > ... > t_n = 0, then the data
    x' = teacher's DDIM step from x_{t_i} to t_{i+1}
    loss = E |f(x_{t_i}, t_i) - f(x', t_{i+1})|^2 + w |f(x_{t_i}, t_i) - plan|^2        no gradient in the second f

The last target is the teacher's own x_0, so all points of a trajectory of the teacher learn where it ends. The second
term is the paper's denoising score matching. Its consistency trajectories may stop between two times; here, as in
consistency distillation (Song et al. 2023), they all go to the end, and a second evaluation starts from new noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prism.errors import PrismError, check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import Encoded, Method
from prism.methods.diffusion import DenoiserConfig, DiffusionConfig, DiffusionPolicy, NoiseSchedule, timesteps
from prism.methods.unet import Films, Student, UNetPolicy
from prism.normalize import Normalizer
from prism.policy import LossOutput, Policy, PolicySpec
from prism.rows import Random


@dataclass(frozen=True)
class ConsistencyConfig(DenoiserConfig):  # train_steps and clip are the teacher's
    method: ClassVar[str] = "consistency"

    grid: int = 10  # DDIM steps of the teacher
    evaluations: int = 1
    denoising_weight: float = 0.1  # w

    def __post_init__(self) -> None:
        super().__post_init__()
        timesteps(self.train_steps, self.grid, "leading")
        numbers = {"[2, inf)": "grid", "(0, inf)": "clip", "[0, inf)": "denoising_weight"}
        check_numbers(self, "consistency", {**numbers, f"[1, {self.grid}]": "evaluations"})


class ConsistencyPolicy(Student[DiffusionPolicy], UNetPolicy):
    config: ConsistencyConfig
    teacher_method: ClassVar[str] = DiffusionConfig.method

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(ConsistencyConfig, spec.config)
        super().__init__(spec, config, normalizer, seed)
        self.schedule = NoiseSchedule(config.train_steps)
        self.grid = timesteps(config.train_steps, config.grid, "leading")

    def learn_from(self, teacher: Policy) -> None:
        if not isinstance(teacher, DiffusionPolicy) or teacher.config.prediction != "epsilon":
            raise PrismError("consistency is distilled from a run of --method diffusion that predicts epsilon")
        if (teacher.config.train_steps, teacher.config.clip) != (self.config.train_steps, self.config.clip):
            raise PrismError("consistency: train_steps and clip must be the teacher's")
        super().learn_from(teacher)

    def end_of(
        self, x: Float[Tensor, "B K Tp Da"], films: Films, step: Int[Tensor, " N"]
    ) -> Float[Tensor, "B K Tp Da"]:
        """f(x, t): where the trajectory through x ends, unbounded: beyond a bound there is no gradient."""
        output: Tensor = self.unet(x, films, self.unet.step_films(step.float()))
        return self.schedule.split(x, output.float(), step, "epsilon", math.inf)[0]

    def bounded_end_of(
        self, x: Float[Tensor, "B K Tp Da"], films: Films, step: Int[Tensor, " N"]
    ) -> Float[Tensor, "B K Tp Da"]:
        """The same within +-clip: in use, and what is learned from."""
        return self.end_of(x, films, step).clamp(-self.config.clip, self.config.clip)

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        data, films = self.data(draw), self.films(draw.context)
        place = draw.rng.randint(self.config.grid, (len(data),))
        noise = draw.rng.randn(data.shape).to(data.device)
        times = torch.tensor([*self.grid, -1])
        step, into = times[place].to(data.device), times[place + 1].to(data.device)
        x = self.schedule.add_noise(data, noise, step).unsqueeze(1)
        landed = self.end_of(x, films, step)
        with torch.no_grad():
            teachers_films = self.teachers_films(draw)
            shift = self.in_my_space(torch.zeros_like(data), draw).unsqueeze(1)
            seen = self.schedule.add_noise((data.unsqueeze(1) - shift), noise.unsqueeze(1), step)  # in its own space
            said = self.teacher.predict(seen, teachers_films, step)
            found, found_noise = self.schedule.split(seen, said, step, "epsilon", self.config.clip)
            moved = self.schedule.ddim(found + shift, found_noise, into)
            further = self.bounded_end_of(moved, films, into.clamp(min=0))
            target = torch.where((into < 0).view(-1, 1, 1, 1), moved, further)
        consistency = self.row_mean((landed - target)[:, 0].square(), draw.batch.action_valid).mean()
        denoising = self.row_mean((landed[:, 0] - data).square(), draw.batch.action_valid).mean()
        logs = {"consistency": consistency.detach(), "denoising": denoising.detach()}
        return LossOutput(consistency + self.config.denoising_weight * denoising, logs)

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        films = self.films(context)
        return self.config.offset_scale * self.jump(self.noise(len(context), candidates, rng), films, rng)

    def jump(self, x: Float[Tensor, "B K Tp Da"], films: Films, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        """One evaluation from noise; each further one from new noise on the last answer, at an earlier time."""
        for i in range(self.config.evaluations):
            step = torch.tensor([self.grid[i * self.config.grid // self.config.evaluations]], device=x.device)
            if i:
                fresh = self.noise(x.shape[0], x.shape[1], rng)
                x = self.schedule.add_noise(x, fresh, step)
            x = self.bounded_end_of(x, films, step)
        return x


METHOD = Method(ConsistencyConfig, ConsistencyPolicy)
