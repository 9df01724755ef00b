"""Every method at its number of evaluations, ready to plan: what `bench latency` times and `bench size` counts.

The paper's comparison: PRISM draws K = 8 plans in one pass; an iterative method draws one plan and needs NFE passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.distributed.rows import Random
from prism.errors import PrismError
from prism.methods import table
from prism.methods.context import ContextConfig, ContextPolicy
from prism.methods.table import build_policy
from prism.sensors import SensorSpec
from prism.types import Observation

CANDIDATES = 8  # paper: K at inference
ACTION_DIM = 7
SENSORS = (  # paper, App. A: a wrist camera, a static one, the robot's own state
    SensorSpec("rgb_wrist", "rgb", (84, 84, 3)),
    SensorSpec("rgb_static", "rgb", (200, 200, 3)),
    SensorSpec("proprio", "vector", (15,)),
)


@dataclass(frozen=True)
class Way:
    """A way to make plans: a method, and how many passes it takes."""

    key: str
    method: str
    changes: tuple[tuple[str, Any], ...] = ()


WAYS = (
    Way("prism", "prism"),
    Way("diffusion_nfe1", "diffusion", (("evaluations", 1), ("spacing", "trailing"))),
    Way("diffusion_nfe10", "diffusion", (("evaluations", 10),)),
    Way("diffusion_nfe100", "diffusion", (("evaluations", 100),)),
    Way("flow_matching_nfe1", "flow_matching", (("evaluations", 1),)),
    Way("flow_matching_nfe5", "flow_matching", (("evaluations", 5),)),
    Way("imle", "imle"),
    Way("act", "act"),
    Way("mse", "mse"),
)


def config_of(method: str, preset: str, obs_horizon: int | None = None, pred_horizon: int | None = None) -> Any:
    config: ContextConfig = table.method_config(method, preset)
    return replace(
        config,
        obs_horizon=obs_horizon or config.obs_horizon,
        pred_horizon=pred_horizon or config.pred_horizon,
    )


def build(config: ContextConfig) -> ContextPolicy:
    policy = build_policy(config.spec(SENSORS, ACTION_DIM, 10.0), seed=0)
    assert isinstance(policy, ContextPolicy)
    return policy.eval().requires_grad_(False)


def observation(obs_horizon: int, rng: np.random.Generator) -> Observation:
    """One window of random sensor readings."""
    streams: dict[str, Tensor] = {}
    for sensor in SENSORS:
        shape = (1, obs_horizon, *sensor.shape)
        if sensor.kind == "rgb":
            streams[sensor.name] = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
        else:
            streams[sensor.name] = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    return Observation(streams, {sensor.name: torch.ones(1, obs_horizon, dtype=torch.bool) for sensor in SENSORS})


@dataclass(frozen=True)
class Bench:
    """All methods of one size on one window."""

    policies: dict[str, ContextPolicy]  # by method
    window: Observation
    context: Tensor  # (1, S, D), the same for all: latency does not depend on values

    @staticmethod
    def make(preset: str, obs_horizon: int, pred_horizon: int, methods: tuple[str, ...]) -> Bench:
        policies = {method: build(config_of(method, preset, obs_horizon, pred_horizon)) for method in methods}
        window = observation(obs_horizon, np.random.default_rng(0))
        with torch.inference_mode():
            context = next(iter(policies.values())).encoder(window)
        return Bench(policies, window, context)

    def planner(self, way: Way, candidates: int) -> Callable[[], Tensor]:
        """From the encoded context to plans in robot units."""
        policy, config = self._configured(way)
        rng = Random(0)

        def call() -> Tensor:
            policy.config = config
            with torch.inference_mode():
                return policy.finish(policy.plan(self.context, candidates, rng), None)

        return call

    def sampler(self, way: Way, candidates: int) -> Callable[[], Tensor]:
        """From sensor readings to plans: the encoders included."""
        policy, config = self._configured(way)
        rng = Random(0)

        def call() -> Tensor:
            policy.config = config
            return policy.sample(self.window, candidates, rng)

        return call

    def encoder(self) -> Callable[[], Tensor]:
        policy = next(iter(self.policies.values()))

        def call() -> Tensor:
            with torch.inference_mode():
                encoded: Tensor = policy.encoder(self.window)
                return encoded

        return call

    def _configured(self, way: Way) -> tuple[ContextPolicy, ContextConfig]:
        if way.method not in self.policies:
            raise PrismError(f"{way.key}: the method '{way.method}' was not built")
        policy = self.policies[way.method]
        changes: dict[str, Any] = dict(way.changes)
        return policy, replace(policy.config, **changes)
