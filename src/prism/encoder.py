"""Sec. 4.1, Eq. 2: one encoder per sensor, fused per time step into tokens, mixed over time into the context.

    v_t^(m) = norm_m(encoder_m(o_t^(m))), or a learned "absent" vector if the sensor is missing
    c_t     = MLP([v_t^(m)]_m)                      per time step, so a token can be kept as the window slides
    context = mix(c_1 .. c_To) + positions          (B, S, D)

The norm of each sensor is ours (`sensor_norm`): without it, an untrained network's features of a picture hardly
vary compared with those of the joints, so the camera is ignored.

Mixing is ours (`mix_blocks` > 0): a residual MLP over the window gives S context tokens. The encoder runs once a
context and the generator K times, so this is the cheap place for computation: docs/explanation/learning-fast.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.data.history import feels_events
from prism.encoders.audio import AudioConfig, AudioNet
from prism.encoders.frozen import FROZEN, Backbone, FrozenConfig, FrozenEncoder, load_backbone_weights, make_backbone
from prism.encoders.kinds import NetworkEncoder, RgbEncoder, SensorEncoder, VectorEncoder, mlp
from prism.encoders.sentence import ThingsEncoder, join
from prism.encoders.text import ByteText, ClipText, TextConfig
from prism.encoders.vision import Drawn, NormKind, PooledCNN, prepare_depth, prepare_image
from prism.errors import PrismError, check_choices, check_numbers
from prism.normalize import Normalizer
from prism.rows import Random
from prism.sensors import KINDS, SensorSpec
from prism.types import Observation

RgbBackbone = Literal["resnet18", "small", "efficientnet-lite0", "resnet18-frozen", "transformers"]


@dataclass(frozen=True)
class EncoderConfig:
    vector_hidden: int = 128  # paper, App. A.2: proprioception input-128-64; 0: one linear layer
    vector_features: int = 64
    rgb: RgbBackbone = "resnet18"
    rgb_features: int = 512  # paper, App. A.2
    # a safetensors file with torchvision's ResNet-18 names (load_pretrained); rgb = transformers: a folder of one
    rgb_weights: str | None = None
    frozen: FrozenConfig = field(
        default_factory=FrozenConfig
    )  # rgb = efficientnet-lite0, resnet18-frozen, transformers
    sensor_norm: bool = False  # with a camera every sensor enters the fusion at one scale; off: the paper, older runs
    fusion_hidden: int = 1024  # Eq. 2; 0: one linear layer, when mixing does the work
    mix_blocks: int = 0  # 0: the paper's encoder, one token a time step
    mix_width: int = 512
    context_tokens: int = 4  # S, with mixing
    rgb_norm: NormKind = "group"  # frozen_batch: as pretrained, needs rgb_weights
    # paper, App. A.2: convolutions of depth and of tactile images
    depth_widths: tuple[int, ...] = (64, 128, 256)
    depth_features: int = 256  # paper, App. A.2
    tactile_features: int = 256  # paper, App. A.2
    audio: AudioConfig = field(default_factory=AudioConfig)
    text: TextConfig = field(default_factory=TextConfig)
    rgb_focus: float = 1.0  # small: sharpness of its spatial softmax
    # Training: the chance that a sensor is absent from a whole window; and of a single sensor, by its name.
    dropout: float = 0.0
    sensor_dropout: dict[str, float] = field(default_factory=dict)
    # the same of each vector that describes the robot's state (not of touch or force), where there is a camera
    state_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, "encoder")
        numbers = {
            "[0, inf)": "vector_hidden fusion_hidden mix_blocks",
            "(0, inf)": "rgb_focus",
            "[0, 1)": "dropout state_dropout",
        }
        sizes = "vector_features rgb_features depth_features tactile_features mix_width context_tokens"
        check_numbers(self, "encoder", {**numbers, "[1, inf)": sizes})
        if self.rgb_norm == "frozen_batch" and (self.rgb != "resnet18" or self.rgb_weights is None):
            raise PrismError("encoder.rgb_norm 'frozen_batch' needs rgb = 'resnet18' and rgb_weights to be frozen at")
        if not self.depth_widths or min(self.depth_widths) < 1:
            raise PrismError(f"encoder.depth_widths is {self.depth_widths}; it needs at least one width of at least 1")
        for name, chance in self.sensor_dropout.items():
            if not 0 <= chance < 1:
                raise PrismError(f"encoder: the dropout of '{name}' is {chance}; it must be in [0, 1)")


def make_sensor_encoder(
    spec: SensorSpec,
    config: EncoderConfig,
    normalizer: Normalizer,
    told: bool = False,
    backbone: Backbone | None = None,
) -> SensorEncoder:
    """`told`: there is a text sensor. `backbone`: the frozen network that all cameras share, if any."""
    if told and spec.name in config.text.things:
        return ThingsEncoder(spec, config.text.things[spec.name], normalizer)
    if spec.kind == "vector":
        return VectorEncoder(spec, config.vector_hidden, config.vector_features, normalizer)
    if spec.kind == "rgb" and config.rgb in FROZEN:
        return FrozenEncoder(spec, config.frozen, backbone or make_backbone(config.rgb, config.frozen))
    if spec.kind == "rgb":
        small = config.rgb == "small"
        weights = None if small else config.rgb_weights
        return RgbEncoder(spec, small, config.rgb_features, config.rgb_norm, weights, config.rgb_focus)
    if spec.kind == "depth":
        features = config.depth_features
        return NetworkEncoder(spec, features, PooledCNN(1, config.depth_widths, features), prepare_depth)
    if spec.kind == "tactile":
        features = config.tactile_features
        channels = spec.steps * spec.shape[2]
        return NetworkEncoder(spec, features, PooledCNN(channels, config.depth_widths, features), prepare_image)
    if spec.kind == "audio":
        sound = AudioNet(config.audio, spec.shape[0], spec.sample_rate, spec.steps)
        return NetworkEncoder(spec, config.audio.features, sound)
    if spec.kind == "text":
        text = ByteText(config.text, spec.shape[0]) if config.text.kind == "learned" else ClipText(config.text)
        return NetworkEncoder(spec, config.text.features, text)
    made = KINDS[spec.kind].encoder  # of another package
    if made is None:
        raise PrismError(f"sensor '{spec.name}': the kind '{spec.kind}' has no encoder; give its Kind one")
    encoder: SensorEncoder = made(spec, normalizer)
    return encoder


def load_pretrained(policy: nn.Module) -> None:
    """Read the weights files that the config names: once, when training starts from nothing.

    Building a policy never reads them, so a checkpoint loads without the file.
    """
    for module in policy.modules():
        if isinstance(module, RgbEncoder):
            module.load_pretrained()
        elif isinstance(module, Encoder) and module.backbone is not None:
            load_backbone_weights(module.backbone, module.config.rgb_weights)


def _chance(spec: SensorSpec, sensors: tuple[SensorSpec, ...], config: EncoderConfig) -> float:
    """Probability that a sensor is absent from a window in training."""
    state = spec.kind == "vector" and not feels_events(spec) and any(other.kind == "rgb" for other in sensors)
    return config.sensor_dropout.get(spec.name, max(config.dropout, config.state_dropout if state else 0.0))


def _norm(encoder: SensorEncoder) -> nn.Module:
    """None for descriptions of objects: zero means "here" in them, and their units are common."""
    return nn.Identity() if isinstance(encoder, ThingsEncoder) else nn.LayerNorm(encoder.features, eps=1e-8)


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
        y: Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return y


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
        told = any(spec.kind == "text" for spec in sensors)
        sees = config.rgb in FROZEN and any(spec.kind == "rgb" for spec in sensors)
        self.backbone = make_backbone(config.rgb, config.frozen) if sees else None
        encoders = [make_sensor_encoder(spec, config, normalizer, told, self.backbone) for spec in sensors]
        for setting, named in (("sensor_dropout", config.sensor_dropout), ("text.things", config.text.things)):
            if unknown := set(named) - {spec.name for spec in sensors}:
                known = ", ".join(spec.name for spec in sensors)
                raise PrismError(f"encoder.{setting} names '{min(unknown)}', which is not a sensor here: {known}")
        self.dropout = [_chance(spec, sensors, config) for spec in sensors]
        self.encoders = nn.ModuleList(encoders)  # in the order of `sensors`: names may hold dots
        step_width = config.mix_width // obs_horizon if config.mix_blocks else width
        if step_width < 1:  # the mixer would see nothing
            raise PrismError(
                f"encoder.mix_width {config.mix_width} is less than obs_horizon {obs_horizon}, which leaves no number "
                "for a time step: use a larger mix_width, or mix_blocks = 0"
            )
        camera = any(spec.kind == "rgb" for spec in sensors)
        self.norms = nn.ModuleList(map(_norm, encoders)) if config.sensor_norm and camera else None
        self.gate = join(config.text, encoders)
        total = sum(encoder.features for encoder in encoders) if self.gate is None else self.gate.features
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

    def drop(self, observation: Observation, rng: Random) -> Observation:
        """Whole-modality dropout in training: each sensor is removed from a sample's window with its probability.

        A sample that would lose all sensors keeps the one with the largest draw. A
        policy calls this first, so that whatever it does with a sensor outside the encoder sees the same absence.
        """
        if not any(self.dropout):  # draws nothing then: the random numbers of a run without dropout stay as they are
            return observation
        names = [spec.name for spec in self.sensors]
        present = torch.stack([observation.present[name] for name in names])  # (M, B, To)
        draw = rng.rand(present.shape[:2], dim=1)  # on the CPU: a seed means the same on every device
        keep = draw >= torch.tensor(self.dropout)[:, None]
        there = present.any(-1).cpu()
        lost = ~(keep & there).any(0)  # (B,)
        spared = F.one_hot(draw.masked_fill(~there, -1.0).argmax(0), len(names)).T.bool()  # (M, B)
        keep |= spared & lost
        kept = present & keep.unsqueeze(-1).to(present.device)
        return Observation(observation.streams, {**observation.present, **dict(zip(names, kept, strict=True))})

    def steps(self, observation: Observation, rng: Random | None = None) -> Float[Tensor, "B To F"]:
        """Eq. 2: fuse each time step separately."""
        parts, drawn = [], dict[str, Drawn]()  # shifts by camera: its colours and its depth move together
        shape: tuple[int, int] | None = None
        for spec, encoder in zip(self.sensors, self.encoders, strict=True):
            if spec.name not in observation.streams:
                raise PrismError(f"the observation has no sensor '{spec.name}'; it has {sorted(observation.streams)}")
            stream, present = observation.streams[spec.name], observation.present[spec.name]
            shape = (stream.shape[0], stream.shape[1])
            parts.append(encoder(stream.flatten(0, 1), present.flatten(), rng, drawn))
        assert shape is not None
        steps: Tensor = self.fuse(torch.cat(parts, dim=-1)).unflatten(0, shape)
        return steps

    def fuse(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N W"]:
        """Concatenates the features of all sensors into one vector per time step."""
        sizes = [encoder.features for encoder in self.encoders]
        if self.norms is not None:
            parts = zip(self.norms, features.split(sizes, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        if self.gate is not None:
            features = self.gate(features.split(sizes, dim=-1))
        fused: Tensor = self.fusion(features)
        return fused

    def mix(self, steps: Float[Tensor, "B To F"]) -> Float[Tensor, "B S D"]:
        tokens = steps if self.mixer is None else self.mixer(steps.flatten(1)).view(-1, self.tokens, self.width)
        context: Tensor = self.norm(tokens + self.position)
        return context

    def forward(self, observation: Observation, rng: Random | None = None) -> Float[Tensor, "B S D"]:
        return self.mix(self.steps(observation, rng))
