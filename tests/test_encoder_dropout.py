"""Whole-modality dropout: per sample, the whole window, never everything, and only when asked for; and which sensors a
policy was trained without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prism_client import ActionKind

from prism import cli
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.inference.about import needed_sensors
from prism.methods.prism import PrismConfig
from prism.policy import PolicySpec
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Observation
from tests.policy_fakes import VECTORS, random_batch, small_config, small_policy

THREE = (*VECTORS, SensorSpec("force", "vector", (2,)))


def _rng(seed: int = 0) -> Random:
    return Random(seed)


def _with_dropout(dropout: float, **sensors: float) -> PrismConfig:
    config = small_config()
    return dataclasses.replace(
        config, encoder=dataclasses.replace(config.encoder, dropout=dropout, sensor_dropout=sensors)
    )


def _kept(config: PrismConfig, observation: Observation, seed: int = 0) -> torch.Tensor:
    """(M, B, To)"""
    dropped = small_policy(config, THREE).encoder.drop(observation, _rng(seed))
    assert dropped.streams is observation.streams
    return torch.stack([dropped.present[s.name] for s in THREE])


def test_each_sensor_with_its_own_chance_over_whole_windows() -> None:
    observation = random_batch(4000, sensors=THREE).observation
    kept = _kept(_with_dropout(0.3, force=0.0, proprio=0.6), observation)
    assert torch.equal(kept[..., 0], kept[..., 1])  # the whole window
    assert (~kept[:, :, 0]).float().mean(1).tolist() == pytest.approx([0.6, 0.3, 0.0], abs=0.03)
    both = (~kept[:2, :, 0]).all(0).float().mean()
    assert float(both) == pytest.approx(0.18, abs=0.03)  # independent of each other


def test_never_all_sensors_at_once() -> None:
    observation = random_batch(2000, sensors=THREE).observation
    kept = _kept(_with_dropout(0.9), observation)
    assert kept.any(0).all()
    assert (kept.any(-1).sum(0) == 1).float().mean() > 0.9
    spared = kept[:, kept.any(-1).sum(0) == 1, 0].float().mean(1)
    assert spared.tolist() == pytest.approx([1 / 3] * 3, abs=0.05)  # none is the favourite


def test_a_sensor_that_is_absent_anyway_does_not_count_as_kept() -> None:
    observation = random_batch(500, sensors=THREE).observation
    present = {**observation.present, "force": torch.zeros(500, 2, dtype=torch.bool)}
    present["proprio"] = torch.tensor([[True, False]]).expand(500, 2)
    kept = _kept(_with_dropout(0.8), Observation(observation.streams, present))
    assert not kept[2].any()
    assert not kept[0, :, 1].any()  # presence is never invented
    assert kept.flatten(2).any(-1).any(0).all()
    nothing = {name: torch.zeros(500, 2, dtype=torch.bool) for name in present}
    assert not _kept(_with_dropout(0.8), Observation(observation.streams, nothing)).any()


def test_the_generator_decides_and_nothing_is_drawn_without_dropout() -> None:
    observation = random_batch(64, sensors=THREE).observation
    config = _with_dropout(0.5)
    assert torch.equal(_kept(config, observation, 1), _kept(config, observation, 1))
    assert not torch.equal(_kept(config, observation, 1), _kept(config, observation, 2))
    rng = _rng(3)
    before = rng.generator.get_state()
    assert small_policy(small_config(), THREE).encoder.drop(observation, rng) is observation
    assert torch.equal(rng.generator.get_state(), before)


def test_training_with_dropout_is_deterministic_and_teaches_the_absent_vectors() -> None:
    batch = random_batch(16, sensors=THREE)
    policies = [small_policy(_with_dropout(0.5), THREE).train() for _ in range(2)]
    losses = [policy.batch_loss(batch, _rng(4)).loss for policy in policies]
    assert torch.equal(losses[0], losses[1])
    losses[0].backward()
    assert all(e.absent.grad is not None and e.absent.grad.any() for e in policies[0].encoder.encoders)
    whole = small_policy(_with_dropout(0.5), THREE).eval()
    assert torch.equal(
        whole.batch_loss(batch, _rng(4)).loss,
        small_policy(small_config(), THREE).eval().batch_loss(batch, _rng(4)).loss,
    )


def test_an_anchor_that_is_dropped_is_dropped_as_an_anchor_too() -> None:
    config = dataclasses.replace(_with_dropout(0.0, proprio=0.999, object_state=0.0), anchor="proprio")
    policy, batch = small_policy(config).train(), random_batch(8)
    far = {**batch.observation.streams, "proprio": batch.observation.streams["proprio"] + 1000.0}
    moved = dataclasses.replace(batch, observation=Observation(far, batch.observation.present))
    torch.testing.assert_close(policy.batch_loss(moved, _rng()).loss, policy.batch_loss(batch, _rng()).loss)


def test_dropout_of_a_sensor_that_is_not_there_is_refused() -> None:
    with pytest.raises(PrismError, match="sensor_dropout names 'camera'"):
        small_policy(_with_dropout(0.0, camera=0.1), THREE)


STEPS, ALWAYS = 20, np.ones((3, 20), np.bool_)
GAPS, EVERY_OTHER, NOT_ONE = ALWAYS.copy(), ALWAYS.copy(), ALWAYS.copy()
GAPS[:, 8:], EVERY_OTHER[:, 1::2], NOT_ONE[1] = False, False, False


def _record(path: Path, present: Mapping[str, NDArray[np.bool_]]) -> str:
    rng = np.random.default_rng(0)
    sensors = tuple(SensorSpec(name, "vector", (3,)) for name in present)
    with DatasetWriter(path, sensors, 2, 10.0, "reach", action=ActionSpec(kind=ActionKind.ABSOLUTE)) as writer:
        for episode in range(3):
            masks = {name: mask[episode] for name, mask in present.items()}
            writer.add({name: rng.normal(size=(STEPS, 3)) for name in present}, rng.normal(size=(STEPS, 2)), masks)
    return str(path)


@pytest.mark.parametrize(
    ("datasets", "needed"),
    [
        ([{"pose": ALWAYS, "force": ALWAYS}], ["pose", "force"]),
        ([{"pose": ALWAYS, "force": GAPS}], ["pose"]),
        ([{"pose": ALWAYS, "force": EVERY_OTHER}], ["pose", "force"]),  # every window has a reading of it
        ([{"pose": ALWAYS, "force": NOT_ONE}], ["pose"]),
        ([{"pose": ALWAYS, "force": ALWAYS}, {"pose": ALWAYS}], ["pose"]),
    ],
)
def test_what_the_training_data_lack_can_be_lost(
    tmp_path: Path,
    datasets: Sequence[Mapping[str, NDArray[np.bool_]]],
    needed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [_record(tmp_path / f"data{number}", present) for number, present in enumerate(datasets)]
    run = tmp_path / "run"
    command = ["train", *paths, "--preset", "tiny", "--out", str(run)]
    assert cli.main([*command, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "sensors: not measured, which needs held-out episodes (--set train.val_fraction=0.2)" in said
    assert f"requires {', '.join(needed)}: never absent in training" in said
    assert needed_sensors(Run(run).policy()) == needed
    assert cli.main([*command, "--steps", "3", "--resume"]) == 0
    assert Run(run).weights().name == "step-00000003"
    assert needed_sensors(Run(run).policy()) == needed


def test_what_was_absent_is_kept_with_the_policy() -> None:
    spec = small_policy(small_config()).spec
    assert "absent" not in spec.to_json()  # as earlier versions write it, and read it
    assert PolicySpec.from_json(spec.to_json()) == spec
    counts = dict.fromkeys([sensor.name for sensor in spec.sensors], 0)
    assert spec.trained_on({**counts, "": 640, "proprio": 63}) == spec, "fewer than a tenth teach little"
    gone = spec.trained_on({**counts, "": 640, "proprio": 64})
    assert gone.absent == ("proprio",)
    assert gone.trained_on({**counts, "": 641, "proprio": 64}) == spec, "it is of the whole training"
    assert PolicySpec.from_json(gone.to_json()) == gone
