"""Small policies and batches for the tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from prism_client import ActionKind

from prism.attention import AttentionConfig
from prism.encoder import EncoderConfig
from prism.generator import GeneratorConfig
from prism.methods.presets import build_policy
from prism.methods.prism import PrismConfig, PrismPolicy
from prism.objective import RSIMLE, Choice, ObjectiveConfig
from prism.policy import Policy
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.training.checkpoint import TrainingState, save_checkpoint
from prism.types import Batch, Observation

VECTORS = (SensorSpec("proprio", "vector", (3,)), SensorSpec("object_state", "vector", (5,)))
CAMERA = SensorSpec("rgb_wrist", "rgb", (24, 24, 3), random_shift=2)
ACTION_DIM = 3


def small_config(**changes: object) -> PrismConfig:
    config = PrismConfig(
        obs_horizon=2,
        pred_horizon=4,
        encoder=EncoderConfig(
            vector_hidden=16,
            vector_features=8,
            rgb="small",
            rgb_features=8,
            fusion_hidden=16,
            mix_blocks=1,
            mix_width=16,
        ),
        generator=GeneratorConfig(
            width=16, blocks=2, attention=AttentionConfig("auto", heads=2, features=32), latent=4
        ),
        objective=ObjectiveConfig(candidates=6),
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def small_policy(
    config: PrismConfig | None = None,
    sensors: tuple[SensorSpec, ...] = VECTORS,
    seed: int = 0,
    kind: ActionKind | None = ActionKind.ABSOLUTE,
) -> PrismPolicy:
    config = config or small_config()
    policy = build_policy(config.spec(sensors, ACTION_DIM, 10.0, ActionSpec(kind=kind)), seed=seed)
    assert isinstance(policy, PrismPolicy)
    return policy


def save_run(folder: Path, policy: Policy) -> Path:
    """A run folder with this policy as its only checkpoint, as after one step."""
    state = TrainingState(1, 0.0, {}, "", None, None, 0, 0, {}, {}, {})
    save_checkpoint(folder, policy.spec, policy.state_dict(), state)
    return folder


def choose_among(
    objective: RSIMLE,
    candidates: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    update: bool = True,
    seed: int = 0,
) -> Choice:
    """Alg. 1, lines 8-14, on a whole batch."""
    distances = objective.distances(candidates, target, valid, objective.targets(target, valid))
    if update:
        objective.calibrate(distances.pool)
    return objective.choose(distances.own, objective.reject(distances.near, Random(seed)))


def random_batch(
    size: int, config: PrismConfig | None = None, sensors: tuple[SensorSpec, ...] = VECTORS, seed: int = 0
) -> Batch:
    config = config or small_config()
    rng = torch.Generator().manual_seed(seed)
    streams, present = {}, {}
    for spec in sensors:
        shape = (size, config.obs_horizon, *spec.shape)
        if spec.is_image:
            streams[spec.name] = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
        else:
            streams[spec.name] = torch.randn(shape, generator=rng)
        present[spec.name] = torch.ones(size, config.obs_horizon, dtype=torch.bool)
    actions = torch.randn(size, config.pred_horizon, ACTION_DIM, generator=rng)
    lengths = torch.randint(1, config.pred_horizon + 1, (size, 1), generator=rng)
    valid = torch.arange(config.pred_horizon)[None] < lengths
    return Batch(Observation(streams, present), actions, valid)
