"""Presets by name, and policies from their specs: the one place that knows every method."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Literal, get_args

from prism.attention import AttentionConfig
from prism.encoder import EncoderConfig
from prism.errors import PrismError
from prism.generator import GeneratorConfig
from prism.methods.act import ActConfig, ActPolicy
from prism.methods.adaflow import AdaFlowConfig, AdaFlowPolicy
from prism.methods.consistency import ConsistencyConfig, ConsistencyPolicy
from prism.methods.consistency_fm import ConsistencyFmConfig, ConsistencyFmPolicy
from prism.methods.context import ContextConfig
from prism.methods.diffusion import DiffusionConfig, DiffusionPolicy
from prism.methods.flow_matching import FlowMatchingConfig, FlowMatchingPolicy
from prism.methods.imle import ImleConfig, ImlePolicy
from prism.methods.prism import PrismConfig, PrismPolicy
from prism.methods.rectified_flow import RectifiedFlowConfig, RectifiedFlowPolicy
from prism.methods.regressor import RegressorConfig, RegressorPolicy
from prism.methods.unet import UNetConfig
from prism.methods.unet_policy import UNetPolicyConfig
from prism.normalize import Normalizer
from prism.objective import ObjectiveConfig
from prism.policy import Policy, PolicySpec

RELATIVE = 0.5  # ObjectiveConfig.relative: fallback below 5 %, scores no lower (docs/deviations.md)


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
        objective=ObjectiveConfig(candidates=8, relative=RELATIVE),
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
        objective=ObjectiveConfig(candidates=16, relative=RELATIVE),
    )


def paper() -> PrismConfig:
    """The paper's sizes (Sec. 5, App. A.2, A.3): d = 512, L = 6, 8 heads, ResNet-18 a camera, To = 8, Tp = 16."""
    return PrismConfig(
        generator=GeneratorConfig(mlp_ratio=1.25), objective=ObjectiveConfig(soft_weight=0.02, relative=RELATIVE)
    )


PRESETS = {"tiny": tiny, "base": base, "paper": paper}


def preset(name: str) -> PrismConfig:
    if name not in PRESETS:
        raise PrismError(f"unknown preset '{name}'; use one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def size_of(config: PrismConfig) -> str:
    """The preset whose generator is nearest in width: what a method that takes its place should be as large as."""
    return min(PRESETS, key=lambda name: abs(math.log(config.generator.width / preset(name).generator.width)))


# --------------------------------------------------------------------------- methods

Method = Literal[
    "prism", "diffusion", "flow_matching", "imle", "act", "mse", "rectified_flow", "consistency", "consistency_fm",
    "adaflow",
]  # fmt: skip
METHODS: tuple[str, ...] = get_args(Method)
TEACHERS = {  # distilled methods, and from which
    "rectified_flow": RectifiedFlowPolicy.teacher_method,
    "consistency": ConsistencyPolicy.teacher_method,
}

CONFIGS: dict[str, type[ContextConfig]] = {
    config.method: config
    for config in (
        *(PrismConfig, DiffusionConfig, FlowMatchingConfig, ImleConfig, ActConfig, RegressorConfig),
        *(RectifiedFlowConfig, ConsistencyConfig, ConsistencyFmConfig, AdaFlowConfig),
    )
}

UNETS = {
    "tiny": UNetConfig(dims=(32, 64, 128), step_embedding=64, condition=0),
    "base": UNetConfig(dims=(128, 256, 512), step_embedding=128, condition=512),
    "paper": UNetConfig(),  # 79.9 M parameters
}


def method_config(method: str, name: str = "tiny") -> ContextConfig:
    """A method in one of the sizes; what all methods share is PRISM's of that size."""
    return as_method(preset(name), method, name)


def as_method(config: PrismConfig, method: str, name: str | None = None) -> ContextConfig:
    """The head of a method, in the size `name` (or the config's own), on its encoder, horizons, anchor and noise."""
    name = size_of(config) if name is None else name
    if method not in METHODS:
        raise PrismError(f"unknown method '{method}'; use one of {', '.join(METHODS)}")
    if name not in PRESETS:
        raise PrismError(f"unknown preset '{name}'; use one of {', '.join(PRESETS)}")
    width, generator = config.generator.width, config.generator
    if method == "prism":
        return config
    if method == "mse":
        return RegressorConfig.like(config, width, generator=generator)
    if method == "act":
        sizes = {} if name == "paper" else {"feedforward": int(generator.mlp_ratio * width)}
        if name == "tiny":
            sizes |= {"style_layers": 2, "encoder_layers": 2, "latent": 16}
        return ActConfig.like(config, width, heads=generator.attention.heads, **sizes)
    unet = UNETS[name]
    if method == "imle":
        return ImleConfig.like(config, width, unet=unet)
    # Offsets from an anchor reach beyond [-1, 1] in their own unit: docs/baselines.md.
    offset_scale = 1.0 if config.anchor is None else 0.5
    own: dict[str, Any] = {"unet": unet, "offset_scale": offset_scale}
    if method in ("diffusion", "consistency"):
        own["clip"] = 1.0 if config.anchor is None else 2.0 / offset_scale  # from one position in [-1, 1] to another
    kind = CONFIGS[method]
    assert issubclass(kind, UNetPolicyConfig)
    return kind.like(config, width, **own)


def student_config(method: str, teacher: ContextConfig) -> ContextConfig:
    """A distilled method for a teacher: what both have is the teacher's, the sampling is the student's own."""
    if TEACHERS.get(method) != teacher.method:
        wanted = TEACHERS.get(method)
        need = f"one of method '{wanted}'" if wanted else "no teacher"
        raise PrismError(f"'{method}' learns from {need}; the teacher's method is '{teacher.method}'")
    kind = CONFIGS[method]
    sampling = {"evaluations", "solver"}
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(teacher)} - sampling
    return kind(**{name: getattr(teacher, name) for name in shared})


def build_policy(spec: PolicySpec, seed: int = 0, normalizer: Normalizer | None = None) -> Policy:
    """A policy with fresh weights; without `normalizer` the identity, for loading a state dict into it."""
    normalizer = normalizer or Normalizer.empty(spec.sensors, spec.action_dim, spec.action.quaternions)
    policies: dict[str, type[Policy]] = {
        "prism": PrismPolicy,
        "diffusion": DiffusionPolicy,
        "flow_matching": FlowMatchingPolicy,
        "imle": ImlePolicy,
        "act": ActPolicy,
        "mse": RegressorPolicy,
        "rectified_flow": RectifiedFlowPolicy,
        "consistency": ConsistencyPolicy,
        "consistency_fm": ConsistencyFmPolicy,
        "adaflow": AdaFlowPolicy,
    }
    if spec.method not in policies:
        raise PrismError(f"unknown method '{spec.method}'; this version of prism knows: {', '.join(policies)}")
    return policies[spec.method](spec, normalizer, seed)
