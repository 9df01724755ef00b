"""Every method, small: its head on the encoder of the small PRISM policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prism.baselines.unet import UNetConfig
from prism.baselines.unet_policy import UNetPolicyConfig
from prism.context_policy import ContextConfig, ContextPolicy
from prism.normalize import Normalizer
from prism.presets import as_method, build_policy
from prism.sensors import SensorSpec
from tests.policy_fakes import ACTION_DIM, VECTORS, small_config

SMALL_UNET = UNetConfig(dims=(16, 32), groups=4, step_embedding=16, condition=24)


def small_method(method: str, shared: dict[str, Any] | None = None, **own: Any) -> ContextConfig:
    """`shared` changes what all methods have in common, `own` the method's config."""
    config = as_method(small_config(**(shared or {})), method)
    if isinstance(config, UNetPolicyConfig):
        own = {"unet": SMALL_UNET, **own}
    return replace(config, **own)


def build(
    config: ContextConfig,
    sensors: tuple[SensorSpec, ...] = VECTORS,
    seed: int = 0,
    normalizer: Normalizer | None = None,
) -> ContextPolicy:
    policy = build_policy(config.spec(sensors, ACTION_DIM, 10.0), seed, normalizer)
    assert isinstance(policy, ContextPolicy)
    return policy
