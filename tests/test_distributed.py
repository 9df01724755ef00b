"""Two ranks at B/2 are one process at B, three with unequal shares too: losses, gradients, threshold, choices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from prism import ranks
from prism.methods import METHODS
from prism.methods.presets import build_policy
from prism.objective import RSIMLE, ObjectiveConfig
from prism.policy import Policy
from prism.ranks import rows_of
from prism.rows import derive_seed, quantile
from prism.training.config import TrainConfig
from prism.training.trainer import Learner
from prism.types import Batch, Observation
from tests.baseline_fakes import small_method, with_teacher
from tests.pins.cases import TOLERANCE, float64
from tests.policy_fakes import CAMERA, VECTORS, random_batch, small_config
from tests.ranks import run_all, run_ranks

STEPS = 20
CONFIG = TrainConfig(batch_size=13, steps=STEPS, learning_rate=1e-3, warmup_steps=0, threads=1)
OBJECTIVES = {
    "own": ObjectiveConfig(candidates=6),
    "batch-soft": ObjectiveConfig(candidates=6, scope="batch", soft_weight=0.1, soft_candidates=2),
    "paper": ObjectiveConfig(candidates=6, rule="paper", soft_weight=0.02, clamp=(1e-4, 50.0)),
}


def make_policy(objective: ObjectiveConfig) -> Policy:
    config = small_config(objective=objective, observation_noise=0.1)
    config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, dropout=0.2))
    return build_policy(config.spec(VECTORS, 3, 10.0), seed=0)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    streams = {name: value[start:stop] for name, value in batch.observation.streams.items()}
    present = {name: value[start:stop] for name, value in batch.observation.present.items()}
    share = ranks.RankShare(start, len(batch.actions))
    return Batch(Observation(streams, present), batch.actions[start:stop], batch.action_valid[start:stop], share)


def train_steps(rank: int, name: str, size: int, accumulate: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """Losses, gradients, thresholds and choices of some steps, on this rank's rows of the same global batches."""
    torch.set_num_threads(1)
    policy = make_policy(OBJECTIVES[name])
    learner = Learner(policy, dataclasses.replace(CONFIG, accumulate=accumulate))
    policy.train()
    chosen: list[torch.Tensor] = []
    objective = policy.get_submodule("objective")
    assert isinstance(objective, RSIMLE)
    choose = objective.choose

    def watch(own: torch.Tensor, rejected: torch.Tensor) -> Any:
        choice = choose(own, rejected)
        chosen.append(torch.cat([rejected.float(), choice.index.float()], dim=1))
        return choice

    objective.choose = watch  # type: ignore[method-assign]
    found: dict[str, list[Any]] = {"loss": [], "gradient": [], "threshold": [], "chosen": [], "rejection_rate": []}
    for step in range(steps):
        batch = random_batch(size, small_config(), seed=step)
        if ranks.world_size() > 1:
            batch = rows(batch, *rows_of(size, rank, ranks.world_size()))
        output = learner.step(batch, derive_seed(0, 1, step), 1e-3, 0.5)
        # A parameter that no row used has no gradient, on any rank: AdamW must leave it alone, as one process does.
        gradients = [torch.full_like(p, 99.0) if p.grad is None else p.grad for p in policy.parameters()]
        found["loss"].append(output.loss)
        found["gradient"].append(torch.cat([g.flatten() for g in gradients]).numpy())
        found["threshold"].append(float(objective.threshold))
        found["rejection_rate"].append(float(output.logs["rejection_rate"]))
        found["chosen"].append(torch.cat(chosen).numpy())
        chosen.clear()
    return {key: np.stack(value) if key != "chosen" else value for key, value in found.items()}


def assert_same(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    gradient = alone["gradient"]
    scale = np.abs(np.where(gradient == 99.0, 0.0, gradient)).max(1, keepdims=True)
    for other in ranks:
        assert isinstance(other, dict), other
        np.testing.assert_allclose(other["loss"], alone["loss"], rtol=1e-5)
        assert np.abs((other["gradient"] - gradient) / scale).max() < 1e-5
        np.testing.assert_allclose(other["threshold"], alone["threshold"], rtol=1e-5)
        np.testing.assert_allclose(other["rejection_rate"], alone["rejection_rate"], atol=1e-6)
    for step, expected in enumerate(alone["chosen"]):
        together = np.concatenate([other["chosen"][step] for other in ranks])
        assert together.tolist() == expected.tolist()  # every mask bit, every index


def test_ranks_equal_one_process() -> None:
    """20 steps of each rule: 12 rows on two ranks, 13 on three; and 13 rows on two ranks, each in three parts."""
    parts = {f"{name} in parts": (train_steps, name, 13, 3, 6) for name in ("batch-soft", "paper")}
    two = run_ranks(2, run_all, {name: (train_steps, name, 12) for name in OBJECTIVES} | parts)
    three = run_ranks(3, run_all, {name: (train_steps, name, 13) for name in OBJECTIVES})
    for size, found in ((12, two), (13, three)):
        assert all(isinstance(rank, dict) for rank in found), found
        for name in OBJECTIVES:
            alone, ranks = train_steps(0, name, size), [rank[name] for rank in found]
            assert_same(alone, ranks)
            assert all(rank["threshold"].tolist() == ranks[0]["threshold"].tolist() for rank in ranks)  # bit for bit
            assert all(np.array_equal(rank["gradient"], ranks[0]["gradient"]) for rank in ranks)
            assert len(set(alone["threshold"].tolist())) > 1  # the clamp does not hide it
            if size == 13 and f"{name} in parts" in parts:  # the global batch stays what it is
                few = {key: value[:6] for key, value in alone.items()}
                assert_same(few, [train_steps(0, name, 13, accumulate=4, steps=6)])
                assert_same(few, [rank[f"{name} in parts"] for rank in two])


QUICK = {"rectified_flow": {"teacher_evaluations": 2}}  # the teacher's steps take most of the time


@float64()
def method_steps(rank: int, size: int, accumulate: int = 1, steps: int = STEPS) -> dict[str, list[Any]]:
    """Losses and gradients of every baseline, on this rank's rows of the same global batches."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    for method in METHODS:
        if method == "prism":
            continue
        own = {"epsilon": 1.9, "candidates": 4} if method == "imle" else QUICK.get(method, {})  # imle drops some rows
        config = small_method(method, {"observation_noise": 0.1, "anchor": "proprio"}, **own)
        config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, dropout=0.2))
        policy = with_teacher(build_policy(config.spec(VECTORS, 3, 10.0), seed=0))
        learner = Learner(policy, dataclasses.replace(CONFIG, accumulate=accumulate))
        policy.train()
        found[method] = []
        for step in range(steps):
            batch = random_batch(size, small_config(), seed=step)
            if ranks.world_size() > 1:
                batch = rows(batch, *rows_of(size, rank, ranks.world_size()))
            output = learner.step(batch, derive_seed(0, 1, step), 1e-3, 0.5)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
            flat = torch.cat([g.flatten() for g in gradients]).numpy().copy()
            logs = [float(output.logs[name]) for name in sorted(output.logs)]
            found[method].append((output.loss, logs, flat))
    return found


def assert_same_methods(alone: dict[str, list[Any]], others: list[Any]) -> None:
    for other in others:
        assert isinstance(other, dict), other
        for method, steps in alone.items():
            for here, there in zip(steps, other[method], strict=True):
                (loss, logs, gradient), (loss2, logs2, gradient2) = here, there
                assert loss2 == pytest.approx(loss, rel=TOLERANCE), method
                np.testing.assert_allclose(logs2, logs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=method)
                assert np.abs(gradient2 - gradient).max() < TOLERANCE * np.abs(gradient).max(), method


@pytest.mark.parametrize(
    ("world", "size", "steps"), [(2, 12, STEPS), (3, 13, 2), pytest.param(3, 13, STEPS, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_process_for_every_baseline(world: int, size: int, steps: int) -> None:
    alone = method_steps(0, size, 1, steps)
    assert_same_methods(alone, run_ranks(world, method_steps, size, 1, steps, timeout=400.0))
    if steps == STEPS:  # dropped_rows: the mean over kept rows is tested
        assert 0 < np.mean([logs[0] for _, logs, _ in alone["imle"]]) < 1
    else:
        assert_same_methods(alone, [method_steps(0, size, 4, steps)])  # nor does accumulation change a baseline


def quantiles(rank: int, values: torch.Tensor, qs: list[float]) -> list[float]:
    part = values[slice(*rows_of(len(values), rank, ranks.world_size()))]
    return [float(ranks.quantile(part, q)) for q in qs]


def exact_quantiles() -> tuple[list[float], dict[str, torch.Tensor]]:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 1001)
    holes = torch.where(torch.arange(1001) % 7 == 0, torch.nan, values)
    return [0.0, 0.001, 0.2, 0.35, 0.5, 0.999, 1.0], {"spread": values, "ties": values.round(), "nan": holes}


def half_precision(rank: int) -> list[Any]:
    torch.set_num_threads(1)
    policy = make_policy(OBJECTIVES["batch-soft"]).train()
    learner = Learner(policy, dataclasses.replace(CONFIG, precision="bfloat16"))
    objective = policy.get_submodule("objective")
    assert isinstance(objective, RSIMLE)
    kinds: list[str] = []
    distances = objective.distances

    def watch(*values: Any) -> Any:
        found = distances(*values)
        kinds.append(f"{found.own.dtype} {found.near.dtype}")
        return found

    objective.distances = watch  # type: ignore[method-assign]
    batch = random_batch(12, small_config())
    if ranks.world_size() > 1:
        batch = rows(batch, *rows_of(12, rank, ranks.world_size()))
    output = learner.step(batch, 1, 1e-3, 0.5)
    return [output.loss, float(objective.threshold), *kinds]


def with_camera(rank: int, missing: bool = False, accumulate: int = 1) -> tuple[float, np.ndarray]:
    torch.set_num_threads(1)
    sensors = (*VECTORS, CAMERA)  # with random shifts
    policy = build_policy(small_config().spec(sensors, 3, 10.0), seed=0).train()
    batch = random_batch(7, small_config(), sensors)
    present = batch.observation.present
    if missing:  # rank 0 has no image at all, rank 1 lacks some
        present[CAMERA.name][:3] = False
        present[CAMERA.name][5, 0] = False
    if ranks.world_size() > 1:
        batch = rows(batch, *rows_of(7, rank, ranks.world_size()))
    config = dataclasses.replace(CONFIG, accumulate=accumulate)
    output = Learner(policy, config).step(batch, 1, 1e-3, 0.5)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return output.loss, torch.cat([g.flatten() for g in gradients]).numpy()


def test_quantiles_half_precision_and_shifted_images_over_ranks() -> None:
    qs, kinds = exact_quantiles()
    calls = {kind: (quantiles, values, qs) for kind, values in kinds.items()}
    first, second = run_ranks(
        2, run_all, {**calls, "half": (half_precision,), "camera": (with_camera,), "missing": (with_camera, True)}
    )
    assert isinstance(first, dict), first
    for kind, values in kinds.items():
        expected = np.array([float(quantile(values, q)) for q in qs])
        for found in (quantiles(0, values, qs), first[kind], second[kind]):
            np.testing.assert_array_equal(np.array(found), expected, err_msg=kind)

    alone = half_precision(0)
    for found in (first["half"], second["half"]):
        assert found[2:] == ["torch.float32 torch.float32"] == alone[2:]  # distances and what they are compared with
        assert found[:2] == pytest.approx(alone[:2], rel=2e-2)

    loss, gradient = with_camera(0)
    others = {
        "whole": (loss, gradient, [first["camera"], second["camera"], with_camera(0, accumulate=3)]),
        "missing": (*with_camera(0, True), [first["missing"], second["missing"], with_camera(0, True, 7)]),
    }
    assert others["missing"][0] != loss
    for loss, gradient, found in ((a, b, one) for a, b, many in others.values() for one in many):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(found[1], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max())
