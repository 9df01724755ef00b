"""The policies that are pinned, and what is pinned of each: small enough to read as a diff of numbers.

Inputs come from numpy with a fixed seed, weights from the policy's own seed. All of it in float64: CPUs round a
float32 sum differently, and a few training steps turn 1e-7 into 1e-2; in float64 they agree to far below TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from prism.attention import AttentionConfig
from prism.encoder import EncoderConfig
from prism.generator import GeneratorConfig
from prism.methods import METHODS
from prism.methods.presets import as_method, build_policy
from prism.methods.prism import PrismConfig
from prism.methods.unet import UNetConfig, UNetPolicyConfig
from prism.normalize import Normalizer, RunningStatistics, Statistics
from prism.objective import ObjectiveConfig
from prism.policy import Policy
from prism.rows import Random, derive_seed
from prism.sensors import SensorSpec
from prism.training.config import TrainConfig, ema_decay
from prism.training.trainer import Learner
from prism.types import Batch, Observation
from tests.baseline_fakes import with_teacher

FOLDER = Path(__file__).parent
SENSORS = (SensorSpec("proprio", "vector", (5,)), SensorSpec("state", "vector", (7,)))
CAMERA = SensorSpec("rgb_wrist", "rgb", (24, 24, 3), random_shift=2)
BATCH, ACTION_DIM, STEPS = 12, 3, 4
TOLERANCE = 1e-9  # of the largest entry. Measured between instruction sets, libraries and threads: 3e-13
_WHOLE, _SAMPLE = 32, 16  # entries of a gradient that are pinned: all of a small one, some of a large one

SMALL = PrismConfig(
    obs_horizon=2,
    pred_horizon=8,
    encoder=EncoderConfig(
        vector_hidden=16, vector_features=8, rgb="small", rgb_features=16, fusion_hidden=16, mix_blocks=1, mix_width=16
    ),
    generator=GeneratorConfig(
        width=16, blocks=2, attention=AttentionConfig(kind="softmax", heads=2, features=16), latent=4,
        actions_per_query=2,
    ),
    objective=ObjectiveConfig(candidates=4, scope="own", soft_weight=0.0),
)  # fmt: skip


def _attention(kind: str, **more: float) -> PrismConfig:
    attention = replace(SMALL.generator.attention, kind=kind, **more)  # type: ignore[arg-type]
    return replace(SMALL, generator=replace(SMALL.generator, attention=attention))


def _prism(config: PrismConfig, sensors: tuple[SensorSpec, ...] = SENSORS) -> Policy:
    return build_policy(config.spec(sensors, ACTION_DIM, 10.0), 3, _normalizer())


def _method(method: str) -> Policy:
    config = as_method(replace(SMALL, anchor="proprio"), method)
    if isinstance(config, UNetPolicyConfig):
        config = replace(config, unet=UNetConfig(dims=(16, 32), groups=4, step_embedding=16, condition=24))
    return with_teacher(build_policy(config.spec(SENSORS, ACTION_DIM, 10.0), 3, _normalizer()))


CASES: dict[str, Callable[[], Policy]] = {
    "prism": lambda: _prism(SMALL),
    "prism-batch-soft": lambda: _prism(
        replace(SMALL, objective=replace(SMALL.objective, scope="batch", soft_weight=0.1, soft_candidates=2))
    ),
    "prism-paper": lambda: _prism(replace(SMALL, objective=replace(SMALL.objective, rule="paper", soft_weight=0.02))),
    "prism-favor": lambda: _prism(_attention("favor")),
    "prism-favor-length": lambda: _prism(_attention("favor", length=1.0, length_bound=2.0)),
    "prism-favor-paper": lambda: _prism(_attention("favor_paper")),
    "prism-rgb": lambda: _prism(SMALL, (*SENSORS, CAMERA)),
    **{method: partial(_method, method) for method in METHODS if method != "prism"},
}


def make_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    streams = {s.name: torch.from_numpy(rng.normal(size=(BATCH, 2, *s.shape))) for s in SENSORS}
    streams[CAMERA.name] = torch.from_numpy(rng.integers(0, 256, (BATCH, 2, *CAMERA.shape), dtype=np.uint8))
    present = {name: torch.ones(BATCH, 2, dtype=torch.bool) for name in streams}
    present["state"][0, 0] = False  # a sensor that was missing once
    actions = torch.from_numpy(rng.normal(size=(BATCH, 8, ACTION_DIM)))
    valid = torch.from_numpy(np.arange(8) < rng.integers(2, 9, BATCH)[:, None])
    return Batch(Observation(streams, present), actions, valid)


def _normalizer() -> Normalizer:
    rng = np.random.default_rng(1)
    summaries = {}
    for name, size in (("proprio", 5), ("state", 7), ("actions", ACTION_DIM)):
        running = RunningStatistics(size)
        running.add(rng.normal(size=(200, size)).astype(np.float32))
        summaries[name] = running.result(name)
    return Normalizer.from_statistics(Statistics(actions=summaries.pop("actions"), vectors=summaries))


@contextmanager
def float64() -> Iterator[None]:
    """Weights, draws and arithmetic in float64. Where the library says `.float()` it means "not in half precision"."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)


def deviation(computed: Tensor, pinned: Tensor) -> float:
    """Largest difference, of the largest entry. A gradient that is 0 in exact arithmetic, as of a bias before a
    softmax, is a sum of rounding errors: an entry counts as at least 1e-6. Infinite where shapes or types differ."""
    if (computed.shape, computed.dtype) != (pinned.shape, pinned.dtype):
        return math.inf
    return float((computed - pinned).abs().max()) / max(float(pinned.abs().max()), 1e-6)


@float64()
def compute(name: str) -> dict[str, Tensor]:
    """Losses of a few training steps, the gradient of the first, logs of the last, actions of the average."""
    policy = CASES[name]()
    learner = Learner(policy, TrainConfig(steps=STEPS, learning_rate=1e-2))
    losses: list[float] = []
    pinned: dict[str, Tensor] = {}
    policy.train()
    for step in range(STEPS):
        output = learner.step(make_batch(step), derive_seed(0, 1, step), 1e-2, ema_decay(learner.config, step))
        losses += [output.loss, output.gradient_norm]
        if step == 0:
            for key, parameter in policy.named_parameters():
                if parameter.grad is not None:
                    pinned[f"gradient.{key}"] = _some(parameter.grad)
    learner.synchronise_buffers()
    pinned["losses_and_norms"] = torch.tensor(losses)
    pinned |= {f"logs.{key}": value.detach().double().reshape(1) for key, value in output.logs.items()}
    actions = learner.average.sample(make_batch(9).observation, 3, Random(5))
    pinned["actions"] = actions[:4].clone(memory_format=torch.contiguous_format)
    return pinned


def _some(gradient: Tensor) -> Tensor:
    flat = gradient.flatten()
    if len(flat) <= _WHOLE:
        return flat.clone()
    return flat[torch.linspace(0, len(flat) - 1, _SAMPLE).long()].clone()
