"""Sizes by name, any method in one of them, and policies from their specs."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from prism.attention import AttentionConfig
from prism.encoder import EncoderConfig
from prism.errors import PrismError
from prism.generator import GeneratorConfig
from prism.methods import METHODS
from prism.methods.base import ContextConfig
from prism.methods.prism import PrismConfig
from prism.normalize import Normalizer
from prism.objective import ObjectiveConfig
from prism.policy import Policy, PolicySpec


def tiny() -> PrismConfig:
    """Learns in minutes on a CPU: a deep encoder on the window, a light generator."""
    return PrismConfig(
        obs_horizon=2,
        pred_horizon=16,
        encoder=EncoderConfig(
            vector_hidden=0,
            vector_features=64,
            rgb="small",
            rgb_features=128,
            sensor_norm=True,
            fusion_hidden=0,
            mix_blocks=3,
            mix_width=512,
        ),
        generator=GeneratorConfig(
            width=64,
            blocks=2,
            attention=AttentionConfig(kind="auto", heads=2, length=1.0),
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
        encoder=EncoderConfig(
            rgb="small", rgb_features=256, sensor_norm=True, fusion_hidden=512, mix_blocks=3, mix_width=512
        ),
        generator=GeneratorConfig(
            width=256,
            blocks=4,
            attention=AttentionConfig(kind="auto", heads=8, length=1.0),
            latent=32,
            actions_per_query=1,
        ),
        objective=ObjectiveConfig(candidates=16),
    )


def paper() -> PrismConfig:
    """The paper's sizes (Sec. 5, App. A.2, A.3): d = 512, L = 6, 8 heads, ResNet-18 a camera, To = 8, Tp = 16."""
    attention = AttentionConfig(kind="auto", heads=8, length=1.0)
    return PrismConfig(generator=GeneratorConfig(mlp_ratio=1.25, attention=attention))


def fast(size: str = "paper") -> PrismConfig:
    """`paper` with one query for eight actions: an eighth of the tokens, so eight plans cost less than ACT's one."""
    config = SIZES[size]()
    return replace(config, generator=replace(config.generator, actions_per_query=8))


def literal(size: str = "paper") -> PrismConfig:
    """The paper to the letter, also where it does not do what it says (docs/explanation/deviations.md): attention as
    written, the batch-global quantile of all pairs, weights on top of normalised actions, the soft term unscaled."""
    config = SIZES[size]()
    attention = replace(config.generator.attention, kind="favor_paper", features=256, length=0.0)
    return replace(
        config,
        encoder=replace(config.encoder, mix_blocks=0),
        generator=replace(config.generator, attention=attention, context_in_queries=False, actions_per_query=1),
        objective=replace(
            config.objective,
            rule="paper",
            weights="inverse_std",
            soft_scaled=False,
            soft_respects_rejection=False,
        ),
    )


SIZES = {"tiny": tiny, "base": base, "paper": paper}  # every method has these
PRESETS = {**SIZES, "fast": fast, "paper-literal": literal}


def preset(name: str) -> PrismConfig:
    if name not in PRESETS:
        raise PrismError(f"unknown preset '{name}'; use one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def size_of(config: PrismConfig) -> str:
    """The preset whose generator is nearest in width: what a method that takes its place should be as large as."""
    return min(SIZES, key=lambda name: abs(math.log(config.generator.width / preset(name).generator.width)))


def method_config(method: str, size: str = "tiny") -> ContextConfig:
    """A method in one of the sizes; what all methods share is PRISM's of that size."""
    return as_method(preset(size), method, size)


def as_method(config: PrismConfig, method: str, size: str | None = None) -> ContextConfig:
    """The head of a method, of that size (or of the config's own), on its encoder, horizons, anchor and noise."""
    size = size_of(config if size is None else preset(size))
    return METHODS[method].config.sized(config, size)


def student_config(method: str, teacher: ContextConfig) -> ContextConfig:
    """A distilled method for a teacher: what both have is the teacher's, the sampling is the student's own."""
    wanted = METHODS[method].teacher
    if wanted != teacher.method:
        need = f"one of method '{wanted}'" if wanted else "no teacher"
        raise PrismError(f"'{method}' learns from {need}; the teacher's method is '{teacher.method}'")
    kind = METHODS[method].config
    sampling = {"evaluations", "solver"}
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(teacher)} - sampling
    return kind(**{name: getattr(teacher, name) for name in shared})


def build_policy(spec: PolicySpec, seed: int = 0, normalizer: Normalizer | None = None) -> Policy:
    """A policy with fresh weights; without `normalizer` the identity, for loading a state dict into it."""
    normalizer = normalizer or Normalizer.empty(spec.sensors, spec.action_dim, spec.action.quaternions)
    return METHODS[spec.method].policy(spec, normalizer, seed)
