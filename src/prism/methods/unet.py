"""The 1-D UNet of Diffusion Policy (Chi et al. 2023): convolutions over time, FiLM by the context in every block.

    block:  h = Mish(GroupNorm(conv(x)));  h = s * h + b;  h = Mish(GroupNorm(conv(h)));  h + residual(x)
            (s, b) = W Mish([step embedding, condition]) + bias

    x (Tp) -> 2 blocks -> down -> 2 blocks -> down -> 2 blocks -> 2 middle -> 2 blocks -> up -> 2 blocks -> up -> conv
                 |                   +--------------------------------skip----^          |
                 +---------------------------(not used, as published)

W acts on each entry of its input alone, so it is stored as two matrices, one for the step and one for the condition:
the same function and number of parameters, but the condition's half is computed once a context and shared by all
candidates and steps, and the step's half once for all contexts. UNetPolicy is a method with this head; Student is one
that is distilled from another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.encoder import Encoder
from prism.errors import PrismError, check_numbers
from prism.methods.base import BaselineConfig, BaselinePolicy, Encoded, seeded
from prism.normalize import Normalizer
from prism.policy import Policy, PolicySpec

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig

Films = tuple[Tensor, ...]  # (B or 1, 1, 2 C) a block: scale and bias of its C channels


@dataclass(frozen=True)
class UNetConfig:
    dims: tuple[int, ...] = (256, 512, 1024)  # published
    kernel: int = 5
    groups: int = 8
    step_embedding: int = 256
    condition: int = 1024  # the context is projected to this; 0: taken as it is, all tokens side by side

    def __post_init__(self) -> None:
        if len(self.dims) < 2 or any(dim < 1 or dim % self.groups for dim in self.dims):
            raise PrismError(f"unet.dims {self.dims}: give two or more, each a multiple of unet.groups {self.groups}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PrismError(f"unet.kernel is {self.kernel}; it must be odd")
        check_numbers(self, "unet", {"[4, inf)": "step_embedding", "[0, inf)": "condition"})
        if self.step_embedding % 2:
            raise PrismError(f"unet.step_embedding is {self.step_embedding}; it must be even")


def step_features(step: Float[Tensor, " N"], width: int) -> Float[Tensor, "N width"]:
    """Sines and cosines of the step at geometric frequencies from 1 to 1/10,000."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=step.device) * (-math.log(10_000.0) / (half - 1)))
    angle = step[:, None].float() * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class ConvBlock(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int, config: UNetConfig) -> None:
        super().__init__(
            nn.Conv1d(channels_in, channels_out, config.kernel, padding=config.kernel // 2),
            nn.GroupNorm(config.groups, channels_out),
            nn.Mish(),
        )


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, condition: int, step: int, config: UNetConfig) -> None:
        super().__init__()
        self.first = ConvBlock(channels_in, channels_out, config)
        self.second = ConvBlock(channels_out, channels_out, config)
        self.condition_film = nn.Linear(condition, 2 * channels_out)
        self.step_film = nn.Linear(step, 2 * channels_out, bias=False) if step else None
        same = channels_in == channels_out
        self.residual: nn.Module = nn.Identity() if same else nn.Conv1d(channels_in, channels_out, 1)

    def forward(self, x: Float[Tensor, "N C T"], film: Float[Tensor, "N F 1"]) -> Float[Tensor, "N O T"]:
        scale, bias = film.chunk(2, dim=1)
        h = torch.addcmul(bias, scale, self.first(x))
        y: Tensor = self.second(h) + self.residual(x)
        return y


class UNet(nn.Module):
    """Sequences (B, K, Tp, Da) of K candidates a context, to sequences of the same shape.

    `steps=False` leaves the step embedding out: a network that answers in one pass (IMLE Policy).
    """

    def __init__(self, config: UNetConfig, channels: int, condition: int, steps: bool = True) -> None:
        super().__init__()
        self.config = config
        self.condition = condition
        width = config.step_embedding if steps else 0
        self.embed_step: nn.Module | None = None
        if steps:
            self.embed_step = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))

        def block(inside: int, out: int) -> ResidualBlock:
            return ResidualBlock(inside, out, condition, width, config)

        dims = config.dims
        pairs = list(zip((channels, *dims[:-1]), dims, strict=True))
        self.down = nn.ModuleList(nn.ModuleList([block(inside, out), block(out, out)]) for inside, out in pairs)
        self.shrink = nn.ModuleList(nn.Conv1d(dim, dim, 3, stride=2, padding=1) for dim in dims[:-1])
        self.middle = nn.ModuleList([block(dims[-1], dims[-1]), block(dims[-1], dims[-1])])
        back = list(reversed(pairs[1:]))
        self.up = nn.ModuleList(nn.ModuleList([block(2 * out, into), block(into, into)]) for into, out in back)
        self.grow = nn.ModuleList(nn.ConvTranspose1d(into, into, 4, stride=2, padding=1) for into, _ in back)
        self.final = nn.Sequential(ConvBlock(dims[0], dims[0], config), nn.Conv1d(dims[0], channels, 1))
        self._blocks = [m for m in self.modules() if isinstance(m, ResidualBlock)]  # down, middle, up

    def condition_films(self, condition: Float[Tensor, "B C"]) -> Films:
        active = F.mish(condition)
        return tuple(block.condition_film(active).unsqueeze(1) for block in self._blocks)

    def step_films(self, step: Float[Tensor, " B"]) -> Films:
        assert self.embed_step is not None
        active = F.mish(self.embed_step(step_features(step, self.config.step_embedding)))
        return tuple(block.step_film(active).unsqueeze(1) for block in self._blocks if block.step_film is not None)

    def forward(
        self, x: Float[Tensor, "B K Tp Da"], condition: Films, step: Films | None = None
    ) -> Float[Tensor, "B K Tp Da"]:
        rows, candidates = x.shape[:2]
        joint = condition if step is None else tuple(c + s for c, s in zip(condition, step, strict=True))
        films = iter([f.expand(rows, candidates, -1).reshape(rows * candidates, -1, 1) for f in joint])
        h = x.flatten(0, 1).transpose(1, 2)
        skips: list[Tensor] = []
        for level, pair in enumerate(self.down):
            for block in pair:  # type: ignore[attr-defined]
                h = block(h, next(films))
            skips.append(h)
            if level < len(self.shrink):
                h = self.shrink[level](h)
        for block in self.middle:
            h = block(h, next(films))
        for pair, grow in zip(self.up, self.grow, strict=True):
            h = torch.cat([h, skips.pop()], dim=1)
            for block in pair:  # type: ignore[attr-defined]
                h = block(h, next(films))
            h = grow(h)
        out: Tensor = self.final(h).transpose(1, 2).unflatten(0, (rows, candidates))
        return out


SIZES = {
    "tiny": UNetConfig(dims=(32, 64, 128), step_embedding=64, condition=0),
    "base": UNetConfig(dims=(128, 256, 512), step_embedding=128, condition=512),
    "paper": UNetConfig(),  # 79.9 M parameters
}


@dataclass(frozen=True)
class UNetPolicyConfig(BaselineConfig):
    unet: UNetConfig = field(default_factory=UNetConfig)

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        # Offsets from an anchor reach beyond [-1, 1] in their own unit: docs/explanation/baselines.md.
        return cls.like(prism, unet=SIZES[size], offset_scale=1.0 if prism.anchor is None else 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        halvings = len(self.unet.dims) - 1
        if self.pred_horizon % 2**halvings:
            raise PrismError(
                f"pred_horizon {self.pred_horizon} is not a multiple of {2**halvings}: "
                f"the UNet halves time {halvings} times"
            )


class UNetPolicy(BaselinePolicy):
    """The context side is computed once, for methods that run the head once or many times."""

    config: UNetPolicyConfig

    def __init__(
        self, spec: PolicySpec, config: UNetPolicyConfig, normalizer: Normalizer, seed: int, steps: bool = True
    ) -> None:
        super().__init__(spec, config, normalizer)
        with seeded(seed):
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, config.width, normalizer)
            features = self.encoder.tokens * config.width
            condition = config.unet.condition or features
            self.project: nn.Module = nn.Linear(features, condition) if config.unet.condition else nn.Identity()
            self.unet = UNet(config.unet, spec.action_dim, condition, steps)

    def films(self, context: Float[Tensor, "B S D"]) -> Films:
        """The UNet's features of the contexts, for any number of candidates and steps."""
        return self.unet.condition_films(self.project(context.flatten(1)))


T = TypeVar("T", bound=UNetPolicy)


class _Held(Generic[T]):
    """Keeps the teacher out of the student's modules, and out of copies of the student."""

    def __init__(self, policy: T) -> None:
        self.policy = policy.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Student(BaselinePolicy, Generic[T]):
    """A policy of its teacher's architecture: it starts as a copy, and asks the teacher while it trains.

    The teacher is no part of the student: it is not saved, not averaged, and not needed to use what was learned.
    """

    teacher_method: ClassVar[str]
    _held: _Held[T] | None = None

    def learn_from(self, teacher: Policy) -> None:
        """Take over the teacher's weights and normaliser; ask it from now on. Call before training."""
        config = getattr(teacher, "config", None)
        if (
            not isinstance(config, BaselineConfig)
            or not isinstance(teacher, UNetPolicy)
            or teacher.spec.method != self.teacher_method
        ):
            raise PrismError(f"a {self.spec.method} policy cannot learn from one of method '{teacher.spec.method}'")
        mine = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        for name in ("obs_horizon", "pred_horizon", "encoder", "anchor", "offset_scale", "width", "unet"):
            if mine[name] != getattr(config, name):
                raise PrismError(f"the teacher's {name} is {getattr(config, name)}, the student's {mine[name]}")
        if teacher.spec.sensors != self.spec.sensors or teacher.spec.action_dim != self.spec.action_dim:
            raise PrismError("the teacher was trained on other sensors or actions: train both on the same data")
        self.load_state_dict(teacher.state_dict())
        self._held = _Held(teacher)  # type: ignore[arg-type]

    @property
    def teacher(self) -> T:
        if self._held is None:
            raise PrismError(f"{self.spec.method} is distilled: train it with --teacher RUN")
        return self._held.policy

    @torch.no_grad()
    def teachers_films(self, draw: Encoded) -> Films:
        """The teacher sees the observation as it is; only the student is disturbed."""
        return self.teacher.films(self.teacher.encoder(draw.batch.observation))

    def in_my_space(self, plans: Float[Tensor, "B Tp Da"], draw: Encoded) -> Float[Tensor, "B Tp Da"]:
        """The teacher's plans as offsets from the student's anchor, which is 0 where its sensor was dropped."""
        anchor = self.teacher.anchor(draw.batch.observation)
        if anchor is None or draw.anchor is None:
            return plans
        return plans + (anchor - draw.anchor)[:, 0] / self.config.offset_scale
