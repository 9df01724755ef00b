"""Sec. 4.1, Eq. 2: one encoder a sensor, fused per time step into tokens, mixed over time into the context.

    v_t^(m) = encoder_m(o_t^(m)), or a learned "absent" vector where the sensor is missing
    c_t     = MLP([v_t^(m)]_m)                      per time step, so a token can be kept as the window slides
    context = mix(c_1 .. c_To) + positions          (B, S, D)

Mixing is ours (`mix_blocks` > 0): a residual MLP over the window gives S context tokens. The encoder runs once a
context and the generator K times, so this is the cheap place for computation: docs/learning-fast.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.errors import PrismError
from prism.normalize import Normalizer
from prism.sensors import SensorSpec
from prism.types import Observation
from prism.vision import ResNet18, SmallCNN, prepare_image

RgbBackbone = Literal["resnet18", "small"]


@dataclass(frozen=True)
class EncoderConfig:
    vector_hidden: int = 128  # paper, App. A.2: proprioception input-128-64; 0: one linear layer
    vector_features: int = 64
    rgb: RgbBackbone = "resnet18"
    rgb_features: int = 512  # paper, App. A.2
    rgb_weights: str | None = None  # a safetensors file with torchvision's ResNet-18 names
    fusion_hidden: int = 1024  # Eq. 2; 0: one linear layer, when mixing does the work
    mix_blocks: int = 0  # 0: the paper's encoder, one token a time step
    mix_width: int = 512
    context_tokens: int = 4  # S, with mixing

    def __post_init__(self) -> None:
        if self.rgb not in get_args(RgbBackbone):
            raise PrismError(f"encoder.rgb is '{self.rgb}'; use one of {', '.join(get_args(RgbBackbone))}")
        if min(self.vector_features, self.rgb_features, self.mix_width, self.context_tokens) < 1:
            raise PrismError("encoder: vector_features, rgb_features, mix_width and context_tokens must be at least 1")
        if min(self.vector_hidden, self.fusion_hidden, self.mix_blocks) < 0:
            raise PrismError("encoder: vector_hidden, fusion_hidden and mix_blocks must be at least 0")


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """One hidden layer, or none."""
    if hidden == 0:
        return nn.Linear(inputs, outputs)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class SensorEncoder(nn.Module, ABC):
    """One sensor, one time step: (N, ...) -> features (N, d_m). Absence is handled here, for every kind alike."""

    def __init__(self, spec: SensorSpec, features: int) -> None:
        super().__init__()
        self.spec = spec
        self.features = features
        self.absent = nn.Parameter(torch.randn(features, generator=torch.Generator().manual_seed(0)) * 0.02)

    @abstractmethod
    def encode(self, stream: Tensor, rng: torch.Generator | None) -> Float[Tensor, "N F"]:
        """`rng` is given in training only, and drives augmentation."""

    def forward(
        self, stream: Tensor, present: Bool[Tensor, "N"], rng: torch.Generator | None
    ) -> tuple[Float[Tensor, "N F"], Bool[Tensor, "N"]]:
        if bool(present.all()):
            return self.encode(stream, rng), present
        features = self.absent.expand(present.shape[0], -1)
        if bool(present.any()):  # what is absent may hold anything, NaN included: never let it in
            rows = present.nonzero().squeeze(1)
            features = features.index_copy(0, rows, self.encode(stream[rows], rng).to(features.dtype))
        return features, present


class VectorEncoder(SensorEncoder):
    """Vectors, z-normalised with the training statistics: a two-layer MLP (paper, App. A.2)."""

    def __init__(self, spec: SensorSpec, config: EncoderConfig, normalizer: Normalizer) -> None:
        super().__init__(spec, config.vector_features)
        self.normalizer = [normalizer]  # in a list: shared, not a submodule twice
        self.mlp = mlp(spec.shape[0], config.vector_hidden, config.vector_features)

    def encode(self, stream: Tensor, rng: torch.Generator | None) -> Tensor:
        x: Tensor = self.mlp(self.normalizer[0].normalize_vector(self.spec.name, stream.float()))
        return x


class RgbEncoder(SensorEncoder):
    """RGB: uint8 until here, resized, randomly shifted in training, to [0, 1], through a convolutional network."""

    def __init__(self, spec: SensorSpec, config: EncoderConfig) -> None:
        super().__init__(spec, config.rgb_features)
        height, width = spec.resize or (spec.shape[0], spec.shape[1])
        self.backbone: nn.Module
        if config.rgb == "resnet18":
            self.backbone = ResNet18(config.rgb_features, weights=config.rgb_weights)
        else:
            self.backbone = SmallCNN(config.rgb_features, (height, width))

    def encode(self, stream: Tensor, rng: torch.Generator | None) -> Tensor:
        x: Tensor = self.backbone(prepare_image(stream, self.spec, rng))
        return x


def make_sensor_encoder(spec: SensorSpec, config: EncoderConfig, normalizer: Normalizer) -> SensorEncoder:
    if spec.kind == "vector":
        return VectorEncoder(spec, config, normalizer)
    if spec.kind == "rgb":
        return RgbEncoder(spec, config)
    raise PrismError(f"sensor '{spec.name}': kind '{spec.kind}' has no encoder yet; drop the sensor or convert it")


class ResidualBlock(nn.Module):
    """Pre-norm residual MLP; the second layer starts at zero, so a deep stack starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """Observation -> context (B, S, D). `steps` can be cached per observation; `mix` runs per window."""

    def __init__(
        self,
        config: EncoderConfig,
        sensors: tuple[SensorSpec, ...],
        obs_horizon: int,
        width: int,
        normalizer: Normalizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.sensors = sensors
        self.width = width
        encoders = [make_sensor_encoder(spec, config, normalizer) for spec in sensors]
        self.encoders = nn.ModuleList(encoders)  # in the order of `sensors`: names may hold dots
        total = sum(encoder.features for encoder in encoders)
        step_width = config.mix_width // obs_horizon if config.mix_blocks else width
        self.fusion = mlp(total, config.fusion_hidden, step_width)
        self.mixer: nn.Module | None = None
        self.tokens = obs_horizon
        if config.mix_blocks:
            self.tokens = config.context_tokens
            self.mixer = nn.Sequential(
                nn.Linear(obs_horizon * step_width, config.mix_width),
                *(ResidualBlock(config.mix_width) for _ in range(config.mix_blocks)),
                nn.LayerNorm(config.mix_width),
                nn.Linear(config.mix_width, config.context_tokens * width),
            )
        self.position = nn.Parameter(torch.zeros(self.tokens, width))
        self.norm = nn.LayerNorm(width)

    def steps(self, observation: Observation, rng: torch.Generator | None = None) -> Float[Tensor, "B To F"]:
        """Eq. 2: fuse each time step by itself."""
        parts = []
        shape: tuple[int, int] | None = None
        for spec, encoder in zip(self.sensors, self.encoders, strict=True):
            if spec.name not in observation.streams:
                raise PrismError(f"the observation has no sensor '{spec.name}'; it has {sorted(observation.streams)}")
            stream, present = observation.streams[spec.name], observation.present[spec.name]
            shape = (stream.shape[0], stream.shape[1])
            features, _ = encoder(stream.flatten(0, 1), present.flatten(), rng)
            parts.append(features)
        assert shape is not None
        fused: Tensor = self.fusion(torch.cat(parts, dim=-1))
        return fused.unflatten(0, shape)

    def mix(self, steps: Float[Tensor, "B To F"]) -> Float[Tensor, "B S D"]:
        tokens = steps if self.mixer is None else self.mixer(steps.flatten(1)).unflatten(1, (self.tokens, self.width))
        context: Tensor = self.norm(tokens + self.position)
        return context

    def forward(self, observation: Observation, rng: torch.Generator | None = None) -> Float[Tensor, "B S D"]:
        return self.mix(self.steps(observation, rng))
