"""PRISM itself through the loop: stop, resume and load, bit for bit."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prism.attention import Attention, AttentionConfig
from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.data.windows import Windows
from prism.methods.presets import build_policy
from prism.methods.prism import PrismPolicy
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Policy
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.training.checkpoint import load_policy
from prism.training.config import TrainConfig
from prism.training.trainer import TrainResult, train
from tests.pins.cases import ACTION_DIM, CAMERA, SENSORS, SMALL, float64, make_batch
from tests.test_training import files_of, numbers
from tests.training_fakes import quiet

CONFIG = TrainConfig(batch_size=8, steps=10, warmup_steps=2, log_every=1, val_every=5, checkpoint_minutes=0, threads=1)


@pytest.fixture(scope="module", params=["vectors", "pixels"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreSource:
    rng = np.random.default_rng(0)
    sensors: tuple[SensorSpec, ...] = SENSORS if request.param == "vectors" else (*SENSORS, CAMERA)
    path = tmp_path_factory.mktemp("data") / request.param
    with DatasetWriter(path, sensors, ACTION_DIM, 10.0, "walk") as writer:
        for _ in range(4):
            length = int(rng.integers(10, 20))
            streams: dict[str, Any] = {s.name: rng.normal(size=(length, *s.shape)) for s in SENSORS}
            if CAMERA in sensors:
                streams[CAMERA.name] = rng.integers(0, 256, (length, *CAMERA.shape), dtype=np.uint8)
            writer.add(streams, rng.normal(size=(length, ACTION_DIM)))
    return StoreSource(path)


def run(source: StoreSource, run_dir: Path, resume: bool = False, stop_at: int = 0) -> TrainResult:
    normalizer = Normalizer.from_statistics(compute_statistics(source, [0, 1, 2]))
    policy = build_policy(SMALL.spec(source.sensors, source.action_dim, source.fps), 0, normalizer)
    if stop_at:
        _stop_in_step(policy, 2 * stop_at)  # the generator runs twice a step: all candidates, the chosen ones
    windows, held_out = (Windows(source, 2, 8, episodes) for episodes in ([0, 1, 2], [3]))
    return train(policy, windows, held_out, CONFIG, run_dir, resume, quiet())


def _stop_in_step(policy: Policy, stop_at: int) -> None:
    """SIGTERM arrives in the middle of a training step."""
    calls = 0

    def hook(module: nn.Module, *_: object) -> None:
        nonlocal calls
        calls += module.training  # the average is a copy, hook included, in evaluation mode
        if module.training and calls == stop_at:
            signal.raise_signal(signal.SIGTERM)

    policy.get_submodule("generator").register_forward_pre_hook(hook)


def test_ten_steps_equal_five_and_resume_and_five(source: StoreSource, tmp_path: Path) -> None:
    whole = run(source, tmp_path / "whole")
    first = run(source, tmp_path / "parts", stop_at=5)
    assert (first.step, first.stopped_by) == (5, "SIGTERM")
    second = run(source, tmp_path / "parts", resume=True)
    assert second.step == 10
    assert files_of(whole.checkpoint) == files_of(second.checkpoint)
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")


def test_a_loaded_policy_acts_like_the_trained_one(source: StoreSource, tmp_path: Path) -> None:
    result = run(source, tmp_path / "run")
    loaded = load_policy(tmp_path / "run")
    assert loaded.spec == result.policy.spec
    observation = Windows(source, 2, 8).batch(np.arange(5)).observation
    rng = Random()
    expected = result.policy.sample(observation, 6, rng.manual_seed(1))
    actual = loaded.sample(observation, 6, rng.manual_seed(1))
    # Not to the last bit: oneDNN's convolutions depend on how the weights happen to be aligned in memory.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert bool(expected.isfinite().all())


def test_redrawn_features_are_those_of_the_step() -> None:
    """The same for every part of the batch and after a resume, others at the next step, none in use."""
    attention = AttentionConfig(kind="favor", heads=2, features=16, length=1.0, redraw=True)
    config = replace(SMALL, generator=replace(SMALL.generator, attention=attention))
    policy = build_policy(config.spec(SENSORS, ACTION_DIM, 10.0), 3)
    assert isinstance(policy, PrismPolicy)

    def features(seed: int, parts: int = 1) -> torch.Tensor:
        for part in batch.split(parts):
            policy.draw(part, part.random(seed))
        return torch.stack([layer.random_features.clone() for layer in layers])  # type: ignore[union-attr]

    with float64():
        batch, layers = make_batch(), [one for one in policy.double().modules() if isinstance(one, Attention)]
        assert len(layers) == 4
        policy.train()
        first, second = features(1), features(2)
        assert not torch.equal(first, second)
        assert torch.equal(first, features(1, parts=3))
        assert not torch.equal(first[0], first[1]), "every layer has its own"
        policy.eval()
        assert torch.equal(first, features(2))
