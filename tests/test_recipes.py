"""Presets that change a whole experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from prism.data import open_dataset
from prism.data.formats.store_writer import DatasetWriter
from prism.data.views import LaterActions
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.experiments.options import customized
from prism.experiments.recipes import Experiment, recipe
from prism.experiments.workflow import train_experiment
from prism.io.jsonconfig import with_settings
from prism.methods.prism import PrismConfig
from prism.sensors import SensorSpec


def test_targets_from_the_next_step(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", (SensorSpec("proprio", "vector", (1,)),), 1, 10.0, "index") as writer:
        for length in (6, 3):
            index = np.arange(length, dtype=np.float32)[:, None]
            writer.add({"proprio": index}, index)
    source = open_dataset(tmp_path / "data")
    later = LaterActions(source)
    assert later.read(0).actions[:, 0].tolist() == [1, 2, 3, 4, 5, 5]
    assert later.read(0, 5, 6).actions[:, 0].tolist() == [5]
    assert later.read(0, 2, 4).actions[:, 0].tolist() == [3, 4]
    assert later.read(0, 2, 4).streams["proprio"][:, 0].tolist() == [2, 3]
    batch = Windows(later, 1, 3).batch(np.array([0, 6]))
    assert batch.actions[:, :, 0].tolist() == [[1, 2, 3], [1, 2, 2]]
    assert batch.observation.streams["proprio"][:, 0, 0].tolist() == [0, 0]


@pytest.mark.parametrize(("name", "rate"), [("pusht", 1e-4), ("calvin-open_drawer", 5e-5)])
def test_the_literal_paper_in_one_flag(name: str, rate: float) -> None:
    experiment = customized(recipe(name), preset="paper-literal")
    policy = experiment.policy
    assert isinstance(policy, PrismConfig)
    assert policy.generator.attention.kind == "favor_paper"
    assert (policy.generator.width, policy.generator.blocks, policy.obs_horizon) == (512, 6, 8)
    objective = policy.objective
    assert (objective.rule, objective.weights, objective.soft_weight) == ("paper", "inverse_std", 0.02)
    assert (experiment.train.batch_size, experiment.train.learning_rate, experiment.train.ema_power) == (128, rate, 0)
    assert experiment.demonstrations.next_actions
    assert experiment.controller.selection.rule == "proxy_score"


def test_a_preset_keeps_what_belongs_to_the_task() -> None:
    plain = recipe("tabletop-ball")
    larger = customized(plain, preset="base")
    assert larger.policy.encoder.text.things == plain.policy.encoder.text.things != {}
    assert (larger.policy.anchor, larger.policy.observation_noise) == (
        plain.policy.anchor,
        plain.policy.observation_noise,
    )


def test_the_literal_paper_trains(tmp_path: Path) -> None:
    experiment = customized(recipe("pusht"), preset="paper-literal", steps=2)
    small = ["policy.generator.width=32", "policy.generator.blocks=1", "policy.generator.attention.features=16"]
    experiment = with_settings(experiment, [*small, "train.batch_size=8", "policy.obs_horizon=2"])
    train_experiment(experiment, tmp_path / "run", False, Console(quiet=True))
    assert Experiment.load(tmp_path / "run").demonstrations.next_actions


def test_the_minutes_of_a_training_can_be_cpu_time() -> None:
    assert recipe("pusht").train.clock == "wall"
    assert customized(recipe("pusht"), minutes=1, clock="cpu").train.clock == "cpu"
    with pytest.raises(PrismError, match="clock"):
        customized(recipe("pusht"), clock="sundial")
