"""Pretrained weights in a whole run: read once at its start, needed neither to load nor to resume it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from prism_client import ActionKind
from rich.console import Console

from prism.data.formats.store_writer import DatasetWriter
from prism.encoder import EncoderConfig
from prism.encoders.vision import ResNet18
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations
from prism.experiments.recipes import Experiment
from prism.experiments.workflow import train_experiment
from prism.methods.prism import PrismPolicy
from prism.sensors import ActionSpec, SensorSpec
from prism.training.checkpoint import load_policy
from prism.training.config import TrainConfig
from tests.policy_fakes import small_config

SENSORS = (SensorSpec("rgb", "rgb", (16, 16, 3), crop=(14, 14), random_shift=1), SensorSpec("depth", "depth", (8, 8)))


def test_a_run_needs_its_weights_file_only_once(tmp_path: Path) -> None:
    weights, data, run = tmp_path / "resnet18.safetensors", tmp_path / "data", tmp_path / "run"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = {k: v for k, v in ResNet18(4).state_dict().items() if not k.startswith("project")}
    safetensors.torch.save_file(state, weights)
    rng = np.random.default_rng(0)
    with DatasetWriter(data, SENSORS, 2, 10.0, "none", action=ActionSpec(kind=ActionKind.ABSOLUTE)) as writer:
        frames = rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
        writer.add({"rgb": frames, "depth": rng.random((6, 8, 8), np.float32)}, rng.random((6, 2), np.float32))
    encoder = EncoderConfig(rgb_features=4, rgb_weights=str(weights), depth_widths=(4, 8), fusion_hidden=8, dropout=0.3)
    experiment = Experiment(
        name="t",
        task=None,
        demonstrations=Demonstrations("path", path=str(data)),
        policy=small_config(obs_horizon=1, encoder=encoder),
        train=TrainConfig(steps=1, batch_size=2, learning_rate=1e-9, val_fraction=0.0),
    )
    quiet = Console(quiet=True)
    train_experiment(experiment, run, console=quiet)
    weights.unlink()
    policy = load_policy(run)
    assert isinstance(policy, PrismPolicy)
    loaded = policy.encoder.encoders[0].backbone.layer3[0].conv1.weight  # type: ignore[union-attr, index]
    torch.testing.assert_close(loaded, state["layer3.0.conv1.weight"], rtol=0, atol=1e-6)
    assert [s.crop for s in policy.spec.sensors] == [(14, 14), None]
    train_experiment(Experiment.load(run), run, resume=True, console=quiet)
    with pytest.raises(PrismError, match=r"resnet18\.safetensors: cannot be read"):
        train_experiment(experiment, tmp_path / "other", console=quiet)
    assert not (tmp_path / "other" / "experiment.json").exists()
