"""One conformance suite for every method: the two verbs, and that it is interchangeable with PRISM."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.cli.train import Train
from prism.errors import PrismError
from prism.experiments.recipes import Experiment, recipe, with_method, with_preset
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.methods import METHODS, presets
from prism.methods.base import ContextConfig
from prism.methods.consistency import ConsistencyConfig
from prism.methods.diffusion import DiffusionConfig
from prism.methods.presets import (
    PRESETS,
    as_method,
    build_policy,
    method_config,
    preset,
    size_of,
)
from prism.methods.unet import SIZES
from prism.normalize import Normalizer, compute_statistics
from prism.objective import ObjectiveConfig
from prism.rows import EachRandom, Random
from prism.training.checkpoint import load_policy
from prism.training.config import TrainConfig
from prism.training.trainer import Learner, train
from prism.types import Batch, Observation
from tests.baseline_fakes import SMALL_UNET, build, small_method, with_teacher
from tests.policy_fakes import ACTION_DIM, VECTORS, random_batch, small_config
from tests.training_fakes import MemorySource, make_windows, quiet

DETERMINISTIC = ("act", "mse")  # one plan a context, K times


def _rng(seed: int = 0) -> Random:
    return Random(seed)


def _rows(observation: Observation, rows: slice) -> Observation:
    return Observation(
        {k: v[rows] for k, v in observation.streams.items()}, {k: v[rows] for k, v in observation.present.items()}
    )


@pytest.mark.parametrize("method", METHODS)
def test_loss_is_finite_and_reaches_the_weights(method: str) -> None:
    policy = build(small_method(method))
    policy.train()
    output = policy.batch_loss(random_batch(9), _rng())
    assert output.loss.ndim == 0
    output.loss.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in gradients.values())
    without = {name for name, _ in policy.named_parameters()} - set(gradients)
    assert all("absent" in name for name in without), without
    assert any(g.abs().max() > 0 for name, g in gradients.items() if name.startswith("encoder"))
    assert all(not value.requires_grad and value.ndim == 0 for value in output.logs.values())


# With noise on the whole plan the network sees what is padded; it is only not asked for it.
@pytest.mark.parametrize("method", ["prism", "imle", "act", "mse"])
@torch.no_grad()
def test_loss_does_not_see_padded_actions(method: str) -> None:
    policy = build(small_method(method))
    batch = random_batch(9)
    other = torch.where(batch.action_valid.unsqueeze(-1), batch.actions, batch.actions + 7.0)
    assert not torch.equal(other, batch.actions)
    first, second = (
        policy.batch_loss(Batch(batch.observation, a, batch.action_valid), _rng()) for a in (batch.actions, other)
    )
    assert float(first.loss) == float(second.loss)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", ["prism", "imle"])
def test_half_precision_trains_the_weights_that_float32_does(method: str, accumulate: int) -> None:
    """Candidates are drawn without gradient, then with it: weights must not be half copies from where there was none
    (a cache of autocast did that before 2026; it is off, which is all that a newer PyTorch lets a test see)."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for precision in ("float32", "bfloat16"):
        one = {"objective": ObjectiveConfig(candidates=1, soft_candidates=1)}  # of several, rounding may choose another
        policy = build(small_method(method, one, **({"candidates": 1} if method == "imle" else {})))
        policy.train()
        learner = Learner(policy, TrainConfig(steps=1, precision=precision, accumulate=accumulate, grad_clip=0))
        assert learner.step(random_batch(16), 1, 0.0, 0.0).finite
        gradients[precision] = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        with learner.autocast:
            assert torch.is_autocast_enabled("cpu") == (precision == "bfloat16")
            assert precision == "float32" or not torch.is_autocast_cache_enabled()
    assert len(gradients["float32"]) > 10
    for name, exact in gradients["float32"].items():
        if exact.abs().max() > 0:
            near = gradients["bfloat16"][name]
            assert near.abs().max() > 0, name
            assert torch.cosine_similarity(near.flatten(), exact.flatten(), dim=0) > 0.97, name


@pytest.mark.parametrize("method", METHODS)
def test_sample_has_the_shape_and_obeys_the_seed(method: str) -> None:
    policy = build(small_method(method)).eval()
    observation = random_batch(3).observation
    plans = policy.sample(observation, 5, _rng(1))
    assert plans.shape == (3, 5, 4, ACTION_DIM)
    assert plans.dtype == torch.float32
    assert plans.isfinite().all()
    assert torch.equal(plans, policy.sample(observation, 5, _rng(1)))
    differs = not torch.equal(plans, policy.sample(observation, 5, _rng(2)))
    assert differs == (method not in DETERMINISTIC)
    assert torch.equal(plans[:, 0], plans[:, 1]) == (method in DETERMINISTIC)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_contexts_is_each_context_alone(method: str) -> None:
    policy = build(small_method(method)).eval()
    observation = random_batch(3).observation
    together = policy.sample(observation, 4, EachRandom([_rng(i) for i in range(3)]))
    alone = torch.cat([policy.sample(_rows(observation, slice(i, i + 1)), 4, _rng(i)) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_robot_units_outside_and_plans_start_from_the_anchor(method: str) -> None:
    """Moving the actions' origin, and with it the anchor's, moves the plans by as much."""
    config = small_method(method, {"anchor": "proprio"})
    plans = []
    for shift in (0.0, 100.0):
        normalizer = Normalizer.empty(VECTORS, ACTION_DIM)
        normalizer.action_center.fill_(shift)
        normalizer.action_scale.fill_(10.0)
        normalizer.vector_center[:3] = shift
        policy = build(config, normalizer=normalizer).eval()
        observation = random_batch(2).observation
        observation.streams["proprio"] = observation.streams["proprio"] + shift
        plans.append(policy.sample(observation, 3, _rng()))
    torch.testing.assert_close(plans[1] - 100.0, plans[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_trains_in_the_loop_and_loads_from_its_checkpoint(method: str, tmp_path: Path) -> None:
    config = small_method(method, {"pred_horizon": 8})
    source = MemorySource()
    normalizer = Normalizer.from_statistics(compute_statistics(source, [0, 1, 2, 3]))
    policy = with_teacher(build_policy(config.spec(source.sensors, source.action_dim, 10.0), 0, normalizer))
    training, held_out = make_windows()
    settings = TrainConfig(steps=3, batch_size=8, val_every=2, val_batches=1, threads=1)
    result = train(policy, training, held_out, settings, tmp_path / "run", console=quiet())
    assert result.val_loss is not None
    loaded = load_policy(tmp_path / "run")
    assert loaded.spec == policy.spec
    observation = training.batch([0, 5, 9]).observation
    assert torch.equal(loaded.sample(observation, 3, _rng()), result.policy.sample(observation, 3, _rng()))


# --------------------------------------------------------------------------- configs, presets, experiments


def test_the_command_knows_every_method() -> None:
    for name, method in METHODS.items():
        assert method.config.method == name
        assert re.search(rf"\b{name}\b", inspect.getsource(Train)), f"prism train --help does not name {name}"
        assert method.teacher is None or METHODS[method.teacher].teacher is None


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_what_methods_share_is_equal_by_construction(method: str, name: str) -> None:
    config = method_config(method, name)
    assert config.method == method
    for field in fields(ContextConfig):
        assert getattr(config, field.name) == getattr(preset(name), field.name)
    assert from_json(type(config), json.loads(json.dumps(to_json(config)))) == config
    encoders = [c.spec(VECTORS, ACTION_DIM, 10.0) for c in (config, preset(name))] if name == "tiny" else []
    shapes = [[p.shape for p in build_policy(spec).get_submodule("encoder").parameters()] for spec in encoders]
    assert not shapes or shapes[0] == shapes[1]


@pytest.mark.parametrize("method", METHODS)
def test_an_experiment_of_any_method_is_saved_and_changed(method: str, tmp_path: Path) -> None:
    own = recipe("pusht-human")
    experiment = own if method == "prism" else with_method(own, method)
    assert (experiment.train.minutes, experiment.train.seed) == (own.train.minutes, own.train.seed)
    assert experiment.policy.anchor == own.policy.anchor
    experiment.save(tmp_path)
    assert Experiment.load(tmp_path) == experiment
    changed = with_settings(experiment, ["policy.encoder.dropout=0.1", "train.batch_size=8"])
    assert type(changed.policy) is type(experiment.policy)
    assert changed.policy.encoder == replace(own.policy.encoder, dropout=0.1)
    larger = with_preset(experiment, "base")
    assert larger.method == method
    assert larger.policy.anchor == own.policy.anchor
    assert larger.policy.encoder == preset("base").encoder


@pytest.mark.parametrize("name", ["pusht-human", "metaworld-reach"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_executed_as_published(method: str, name: str) -> None:
    """Two have an execution of their own; the others are executed as PRISM is."""
    own = recipe(name).controller
    controller = with_method(recipe(name), method).controller
    changed: dict[str, Any] = {}
    if method == "imle":
        changed = {"candidates": 32, "selection": replace(own.selection, rule="overlap")}
    if method == "act":
        changed = {"candidates": 1, "exec_horizon": 1, "ensemble": 0.01}
        changed["selection"] = replace(own.selection, rule="first")
    assert controller == replace(own, **changed)
    assert (controller == own) == (not changed)


@pytest.mark.parametrize("method", ["diffusion", "consistency"])
def test_every_offset_from_an_anchor_is_within_the_clip(method: str, tmp_path: Path) -> None:
    for anchor, furthest in ((None, 1.0), ("proprio", 2.0)):  # positions in [-1, 1], and from one to another
        config = small_method(method, {"anchor": anchor})
        assert isinstance(config, DiffusionConfig | ConsistencyConfig)
        assert config.clip * config.offset_scale == furthest
    experiment = with_method(recipe("pusht-human"), method)
    older = replace(experiment, policy=replace(experiment.policy, clip=3.0))  # type: ignore[call-arg]
    older.save(tmp_path)
    assert Experiment.load(tmp_path) == older  # a run keeps what it was made with


def test_a_method_is_as_large_as_what_it_stands_beside() -> None:
    for size in ("tiny", "base"):
        policy = with_method(with_preset(recipe("pusht-human"), size), "diffusion").policy
        assert isinstance(policy, DiffusionConfig)
        assert policy.unet == SIZES[size]
    assert [size_of(preset(name)) for name in presets.SIZES] == list(presets.SIZES)
    assert {size_of(preset(name)) for name in PRESETS} == set(presets.SIZES)


def test_a_run_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe("pusht-human").save(tmp_path)
    path = tmp_path / "experiment.json"
    data = json.loads(path.read_text())
    for change, words in (
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"method": None}, "unknown method 'None'"),
        ({"format_version": 0}, "train again"),
        ({"teachr": 1}, "unknown key 'teachr'; it was written by another version of prism: use that one"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(PrismError, match=words):
            Experiment.load(tmp_path)
    path.write_text(json.dumps({key: value for key, value in data.items() if key != "demonstrations"}))
    with pytest.raises(PrismError, match="key 'demonstrations' is missing"):
        Experiment.load(tmp_path)


def test_bad_configs_are_refused() -> None:
    with pytest.raises(PrismError, match="unknown method"):
        as_method(small_config(), "magic")
    with pytest.raises(PrismError, match="is of method 'diffusion' already"):
        with_method(with_method(recipe("pusht-human"), "diffusion"), "act")
    with pytest.raises(PrismError, match="not a multiple of 4"):
        as_method(small_config(pred_horizon=6), "diffusion")
    for method, own, match in (
        ("diffusion", {"evaluations": 101}, "use 1 to 100"),
        ("diffusion", {"evaluations": 1}, "use 'trailing'"),
        ("diffusion", {"evaluations": 5, "first_step": 3}, "use 5 to 99"),
        ("diffusion", {"first_step": 100}, "use 10 to 99"),
        ("diffusion", {"sampler": "euler"}, "sampler"),
        ("flow_matching", {"solver": "midpoint", "evaluations": 3}, "even"),
        ("consistency_fm", {"solver": "midpoint"}, "solver euler"),
        ("consistency_fm", {"evaluations": 3}, "multiple of segments 2"),
        ("imle", {"candidates": 0}, r"imle\.candidates"),
        ("act", {"heads": 3}, "multiple of heads"),
        ("mse", {"width": 32}, "width"),
    ):
        with pytest.raises(PrismError, match=match):
            small_method(method, **own)
    with pytest.raises(PrismError, match=r"unet\.dims"):
        replace(SMALL_UNET, dims=(10, 20))


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_action_stays_exactly_constant_and_costs_nothing(method: str) -> None:
    """Dimension 1 never moved in the demonstrations (its std is 0)."""
    losses = []
    for target in (0.0, 5.0):
        normalizer = Normalizer.empty(VECTORS, ACTION_DIM)
        normalizer.action_std[1], normalizer.action_center[1] = 0.0, 0.25
        policy = build(small_method(method), normalizer=normalizer)
        batch = random_batch(4)
        batch.actions[..., 1] = target
        losses.append(float(policy.batch_loss(batch, _rng()).loss.detach()))
        plans = policy.eval().sample(batch.observation, 3, _rng())
        assert (plans[..., 1] == 0.25).all()
        assert plans[..., 0].std() > 0
    assert losses[0] == losses[1]
