"""Every method, small: its head on the encoder of the small PRISM policy."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

from prism.methods import METHODS
from prism.methods.base import ContextConfig, ContextPolicy
from prism.methods.presets import as_method, build_policy
from prism.methods.unet import Student, UNetConfig, UNetPolicyConfig
from prism.normalize import Normalizer
from prism.policy import Policy
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
    policy = with_teacher(build_policy(config.spec(sensors, ACTION_DIM, 10.0), seed, normalizer))
    assert isinstance(policy, ContextPolicy)
    return policy


def with_teacher(policy: Policy) -> Policy:
    """A distilled policy, with a teacher of its sizes and normaliser and other weights; other policies as they are."""
    if isinstance(policy, Student):
        kind = METHODS[str(METHODS[policy.spec.method].teacher)].config
        same = {f.name for f in fields(kind)} & {f.name for f in fields(policy.config)} - {"evaluations"}
        config = kind(**{name: getattr(policy.config, name) for name in same})
        spec = config.spec(policy.spec.sensors, policy.spec.action_dim, policy.spec.fps)
        policy.learn_from(build_policy(spec, 7, copy.deepcopy(policy.normalizer)))
    return policy
