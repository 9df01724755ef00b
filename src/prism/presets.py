"""Presets by name, and policies from their specs: the one place that knows every method."""

from __future__ import annotations

from prism.attention import AttentionConfig
from prism.encoder import EncoderConfig
from prism.errors import PrismError
from prism.generator import GeneratorConfig
from prism.normalize import Normalizer
from prism.objective import ObjectiveConfig
from prism.policy import Policy, PolicySpec
from prism.prism_policy import PrismConfig, PrismPolicy


def tiny() -> PrismConfig:
    """Learns in minutes on a CPU: a deep encoder on the window, a light generator (docs/learning-fast.md)."""
    return PrismConfig(
        obs_horizon=2,
        pred_horizon=16,
        encoder=EncoderConfig(
            vector_hidden=0,
            vector_features=64,
            rgb="small",
            rgb_features=128,
            fusion_hidden=0,
            mix_blocks=3,
            mix_width=512,
        ),
        generator=GeneratorConfig(
            width=64,
            blocks=2,
            attention=AttentionConfig(kind="auto", heads=2),
            latent=16,
            mlp_ratio=2.0,
            actions_per_query=4,
        ),
        objective=ObjectiveConfig(candidates=8),
    )


def base() -> PrismConfig:
    """Between the two: images on a small GPU, or on a patient CPU."""
    return PrismConfig(
        obs_horizon=2,
        pred_horizon=16,
        encoder=EncoderConfig(rgb="small", rgb_features=256, fusion_hidden=512, mix_blocks=3, mix_width=512),
        generator=GeneratorConfig(
            width=256, blocks=4, attention=AttentionConfig(kind="auto", heads=8), latent=32, actions_per_query=1
        ),
        objective=ObjectiveConfig(candidates=16),
    )


def paper() -> PrismConfig:
    """The paper's sizes (Sec. 5, App. A.2, A.3): d = 512, L = 6, 8 heads, ResNet-18 a camera, To = 8, Tp = 16."""
    return PrismConfig(generator=GeneratorConfig(mlp_ratio=1.25), objective=ObjectiveConfig(soft_weight=0.02))


PRESETS = {"tiny": tiny, "base": base, "paper": paper}


def preset(name: str) -> PrismConfig:
    if name not in PRESETS:
        raise PrismError(f"unknown preset '{name}'; use one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def build_policy(spec: PolicySpec, seed: int = 0, normalizer: Normalizer | None = None) -> Policy:
    """A policy with fresh weights; without `normalizer` the identity, for loading a state dict into it."""
    normalizer = normalizer or Normalizer.empty(spec.sensors, spec.action_dim)
    if spec.method == "prism":
        return PrismPolicy(spec, normalizer, seed)
    raise PrismError(f"unknown method '{spec.method}'; this version of prism knows: prism")
