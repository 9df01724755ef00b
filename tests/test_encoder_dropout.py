"""Whole-modality dropout: per sample, the whole window, never everything, and only when asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from prism.distributed.rows import Random
from prism.errors import PrismError
from prism.methods.prism import PrismConfig
from prism.sensors import SensorSpec
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
    losses = [policy.loss(batch, _rng(4)).loss for policy in policies]
    assert torch.equal(losses[0], losses[1])
    losses[0].backward()
    assert all(e.absent.grad is not None and e.absent.grad.any() for e in policies[0].encoder.encoders)
    whole = small_policy(_with_dropout(0.5), THREE).eval()
    assert torch.equal(
        whole.loss(batch, _rng(4)).loss, small_policy(small_config(), THREE).eval().loss(batch, _rng(4)).loss
    )


def test_an_anchor_that_is_dropped_is_dropped_as_an_anchor_too() -> None:
    config = dataclasses.replace(_with_dropout(0.0, proprio=0.999, object_state=0.0), anchor="proprio")
    policy, batch = small_policy(config).train(), random_batch(8)
    far = {**batch.observation.streams, "proprio": batch.observation.streams["proprio"] + 1000.0}
    moved = dataclasses.replace(batch, observation=Observation(far, batch.observation.present))
    torch.testing.assert_close(policy.loss(moved, _rng()).loss, policy.loss(batch, _rng()).loss)


def test_dropout_of_a_sensor_that_is_not_there_is_refused() -> None:
    with pytest.raises(PrismError, match="sensor_dropout names 'camera'"):
        small_policy(_with_dropout(0.0, camera=0.1), THREE)
