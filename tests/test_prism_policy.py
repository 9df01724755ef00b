"""The method as a whole: gradients, candidates, missing sensors, configs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from prism.encoder import EncoderConfig
from prism.errors import PrismError
from prism.generator import smoother
from prism.io.jsonconfig import from_json, to_json
from prism.methods.presets import PRESETS, build_policy, preset
from prism.methods.prism import PrismConfig, PrismPolicy
from prism.objective import ObjectiveConfig
from prism.policy import PolicySpec
from prism.rows import Random
from prism.training.checkpoint import load_policy
from prism.types import Batch, Observation
from tests.policy_fakes import (
    ACTION_DIM,
    CAMERA,
    VECTORS,
    choose_among,
    random_batch,
    save_run,
    small_config,
    small_policy,
)


def _rng(seed: int = 0) -> Random:
    return Random(seed)


def _gradients(policy: PrismPolicy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def _back_propagate_all(policy: PrismPolicy, batch: Batch, rng: Random) -> torch.Tensor:
    """Alg. 1 as printed: every candidate is drawn with gradient, then the loss picks."""
    target = policy.normalizer.normalize_actions(batch.actions)
    prepared = policy.generator.prepare(policy.encoder(batch.observation, None))
    latent = policy.latents(target.shape[0], policy.config.objective.candidates, rng)
    candidates = policy._generate(prepared, latent, policy.anchor(batch.observation))
    choice = choose_among(policy.objective, candidates.detach(), target, batch.action_valid)
    index = choice.index[:, :, None, None].expand(-1, -1, *candidates.shape[2:])
    return policy.objective.loss(candidates.gather(1, index), choice, target, batch.action_valid)[0]


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(candidates=6),
        ObjectiveConfig(candidates=6, soft_weight=0.5),
        ObjectiveConfig(candidates=6, soft_weight=0.5, soft_respects_rejection=False),
        ObjectiveConfig(candidates=6, rule="paper", soft_weight=0.5, soft_scaled=False),
        ObjectiveConfig(candidates=6, scope="batch"),
    ],
    ids=["hard", "soft", "soft_all", "paper", "batch"],
)
@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper", "auto", "uniform"])
def test_training_the_chosen_gives_the_gradients_of_training_all(objective: ObjectiveConfig, kind: str) -> None:
    config = small_config(objective=objective)
    attention = dataclasses.replace(config.generator.attention, kind=kind)
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, attention=attention))
    batch = random_batch(7, config)
    ours, all_k = small_policy(config), small_policy(config)
    loss = ours.batch_loss(batch, _rng()).loss
    loss.backward()
    expected = _back_propagate_all(all_k, batch, _rng())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in _gradients(all_k).items():
        torch.testing.assert_close(_gradients(ours)[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_reaches_only_the_chosen_candidates() -> None:
    policy, batch = small_policy(), random_batch(5)
    target = policy.normalizer.normalize_actions(batch.actions)
    prepared = policy.generator.prepare(policy.encoder(batch.observation))
    latent = policy.latents(5, 6, _rng()).requires_grad_()
    candidates = policy._generate(prepared, latent, None)
    choice = choose_among(policy.objective, candidates.detach(), target, batch.action_valid)
    index = choice.index[:, :, None, None].expand(-1, -1, *candidates.shape[2:])
    policy.objective.loss(candidates.gather(1, index), choice, target, batch.action_valid)[0].backward()
    assert latent.grad is not None
    touched = latent.grad.abs().sum(-1) > 0
    expected = torch.zeros(5, 6, dtype=torch.bool).scatter(1, choice.index, True)
    assert torch.equal(touched, expected)


def test_keys_and_values_are_computed_once_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from prism.attention import Attention

    calls: list[tuple[int, ...]] = []
    original = Attention.keys_values

    def counted(self: Attention, context: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tuple(context.shape))
        return original(self, context, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Attention, "keys_values", counted)
    policy, batch = small_policy(), random_batch(5)
    policy.batch_loss(batch, _rng())
    assert len(calls) == policy.config.generator.blocks  # drawing and training share them
    assert all(shape[0] == 5 for shape in calls)  # contexts, not contexts times candidates
    calls.clear()
    policy.sample(batch.observation, 9, _rng())
    assert len(calls) == policy.config.generator.blocks
    assert all(shape[0] == 5 for shape in calls)


def test_sample_is_in_robot_units_deterministic_and_diverse() -> None:
    policy, batch = small_policy(), random_batch(3)
    policy.normalizer.action_center.fill_(100.0)
    policy.normalizer.action_scale.fill_(10.0)
    plans = policy.sample(batch.observation, 5, _rng(1))
    assert plans.shape == (3, 5, 4, ACTION_DIM)
    assert (plans - 100.0).abs().max() < 100.0
    assert plans.mean() > 50
    assert torch.equal(plans, policy.sample(batch.observation, 5, _rng(1)))
    assert (plans[:, 0] - plans[:, 1]).abs().max() > 0


def test_batch_rows_do_not_mix_in_sampling() -> None:
    policy, batch = small_policy(sensors=(*VECTORS, CAMERA)), random_batch(4, sensors=(*VECTORS, CAMERA))
    latent = policy.latents(4, 3, _rng())
    context = policy.encoder(batch.observation)
    whole = policy.generator(policy.generator.prepare(context), latent)
    for i in range(4):
        row = policy.generator(policy.generator.prepare(context[i : i + 1]), latent[i : i + 1])
        torch.testing.assert_close(whole[i : i + 1], row, rtol=1e-4, atol=1e-5)


def test_context_is_fused_per_time_step() -> None:
    """Eq. 2: changing one time step changes that token alone."""
    policy, batch = small_policy(), random_batch(2)
    before = policy.encoder.steps(batch.observation)
    streams = {k: v.clone() for k, v in batch.observation.streams.items()}
    streams["proprio"][:, 0] += 1.0
    after = policy.encoder.steps(Observation(streams, batch.observation.present))
    assert torch.equal(before[:, 1], after[:, 1])
    assert (before[:, 0] - after[:, 0]).abs().min(dim=-1).values.min() >= 0
    assert not torch.equal(before[:, 0], after[:, 0])


def test_an_absent_sensor_may_hold_anything() -> None:
    sensors = (*VECTORS, CAMERA)
    policy, batch = small_policy(sensors=sensors), random_batch(3, sensors=sensors)
    present = {k: v.clone() for k, v in batch.observation.present.items()}
    present["object_state"][1] = False
    present["rgb_wrist"][:, 0] = False
    clean = {k: v.clone() for k, v in batch.observation.streams.items()}
    dirty = {k: v.clone() for k, v in clean.items()}
    dirty["object_state"][1] = float("nan")
    dirty["rgb_wrist"][:, 0] = 255
    out = [policy.encoder(Observation(s, present)) for s in (clean, dirty)]
    assert torch.isfinite(out[0]).all()
    assert torch.equal(out[0], out[1])
    full = policy.encoder(batch.observation)
    assert not torch.allclose(out[0][1], full[1])
    loss = policy.batch_loss(Batch(Observation(dirty, present), batch.actions, batch.action_valid), _rng()).loss
    loss.backward()
    assert all(torch.isfinite(g).all() for g in _gradients(policy).values())
    absent = [e.absent.grad for e in policy.encoder.encoders]
    assert absent[0] is None or absent[0].abs().sum() == 0  # proprio was never missing
    assert absent[1] is not None
    assert absent[1].abs().sum() > 0


def test_a_window_that_is_too_long_to_be_mixed_is_refused() -> None:
    config = small_config(obs_horizon=16)
    assert small_policy(config).encoder.steps(random_batch(1, config).observation).shape == (1, 16, 1)
    with pytest.raises(PrismError, match="mix_width 16 is less than obs_horizon 17"):
        small_policy(small_config(obs_horizon=17))


def test_missing_stream_names_the_sensor() -> None:
    policy, batch = small_policy(), random_batch(2)
    observation = Observation({"proprio": batch.observation.streams["proprio"]}, batch.observation.present)
    with pytest.raises(PrismError, match="object_state"):
        policy.sample(observation, 2, _rng())


def test_anchor_makes_plans_follow_the_sensor() -> None:
    config = small_config(anchor="proprio")
    policy, batch = small_policy(config), random_batch(2, config)
    plans = policy.sample(batch.observation, 2, _rng())
    free = small_policy().sample(batch.observation, 2, _rng())
    expected = batch.observation.streams["proprio"][:, -1][:, None, None, :]
    torch.testing.assert_close(plans - free, expected.expand_as(plans), rtol=1e-4, atol=1e-5)
    with pytest.raises(PrismError, match="anchor"):
        small_policy(small_config(anchor="rgb_wrist"), (*VECTORS, CAMERA))


def test_anchor_is_the_newest_reading_that_is_there() -> None:
    config = small_config(anchor="proprio", obs_horizon=3)
    policy, batch = small_policy(config), random_batch(4, config)
    there = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    streams, present = dict(batch.observation.streams), dict(batch.observation.present)
    streams["proprio"] = streams["proprio"].masked_fill(~there[..., None], torch.nan)
    anchor = policy.anchor(Observation(streams, {**present, "proprio": there}))
    readings = batch.observation.streams["proprio"]
    newest = torch.stack([readings[0, 2], readings[1, 1], readings[2, 0], torch.zeros(3)])
    assert anchor is not None
    assert torch.equal(anchor[:, 0, 0], newest)  # the normaliser is the identity here


def test_policy_learns_two_modes() -> None:
    """One context, two equally likely answers: a regressor gives their mean, PRISM gives both."""
    config = small_config(objective=ObjectiveConfig(candidates=12))
    policy = small_policy(config)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rng = _rng(3)
    streams = {s.name: torch.zeros(32, 2, *s.shape) for s in VECTORS}
    present = {s.name: torch.ones(32, 2, dtype=torch.bool) for s in VECTORS}
    sign = torch.tensor([-1.0, 1.0]).repeat(16)[:, None, None]
    batch = Batch(
        Observation(streams, present), sign.expand(32, 4, ACTION_DIM) * 0.8, torch.ones(32, 4, dtype=torch.bool)
    )
    for _ in range(250):
        optimizer.zero_grad()
        policy.batch_loss(batch, rng).loss.backward()
        optimizer.step()
    observation = Observation({k: v[:1] for k, v in streams.items()}, {k: v[:1] for k, v in present.items()})
    plans = policy.sample(observation, 200, _rng(4))[0]  # (200, 4, A)
    near = [(plans - mode).abs().amax((1, 2)) < 0.2 for mode in (-0.8, 0.8)]
    assert near[0].float().mean() > 0.15
    assert near[1].float().mean() > 0.15
    assert (near[0] | near[1]).float().mean() > 0.8


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_json(name: str) -> None:
    config = preset(name)
    assert from_json(PrismConfig, json.loads(json.dumps(to_json(config)))) == config


def test_spec_round_trip_and_errors() -> None:
    spec = small_config().spec((*VECTORS, CAMERA), ACTION_DIM, 20.0)
    assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    data = json.loads(json.dumps(spec.to_json()))
    data["config"]["encoder"]["colour"] = "small"
    with pytest.raises(PrismError, match=r"config\.encoder: unknown key 'colour'"):
        build_policy(PolicySpec.from_json(data))
    data = json.loads(json.dumps(spec.to_json()))
    data["config"]["generator"]["width"] = "wide"
    with pytest.raises(PrismError, match=r"config\.generator\.width: expected int"):
        build_policy(PolicySpec.from_json(data))
    data = json.loads(json.dumps(spec.to_json()))
    data["method"] = "diffusion2"
    with pytest.raises(PrismError, match="diffusion2"):
        build_policy(PolicySpec.from_json(data))
    with pytest.raises(PrismError, match="huge"):
        preset("huge")


def test_paper_preset_has_the_papers_sizes() -> None:
    config = preset("paper")
    assert (config.generator.width, config.generator.blocks, config.generator.attention.heads) == (512, 6, 8)
    assert config.encoder == EncoderConfig(rgb="resnet18", rgb_features=512, fusion_hidden=1024, mix_blocks=0)
    assert (config.obs_horizon, config.pred_horizon) == (8, 16)


@pytest.mark.parametrize("weight", [0.5, 10.0])
def test_smoother_gives_the_least_jerky_plan_near_the_answers(weight):
    """argmin |a - u|^2 + w |third differences|^2, by its gradient; a parabola has no third difference."""
    answers = torch.randn(12, 2, dtype=torch.float64)
    plan = (smoother(12, weight).double() @ answers).requires_grad_()
    cost = ((plan - answers) ** 2).sum() + weight * (plan.diff(n=3, dim=0) ** 2).sum()
    assert torch.autograd.grad(cost, plan)[0].abs().max() < 1e-4
    parabola = torch.stack([torch.arange(12.0), torch.arange(12.0) ** 2], 1)
    assert torch.allclose(smoother(12, weight) @ parabola, parabola, atol=1e-3)


def test_smooth_generator_trains_and_is_loaded_again(tmp_path):
    config = small_config()
    plain = small_policy(config)
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, smooth=3.0))
    policy = small_policy(config)
    policy.batch_loss(random_batch(4, config), Random(0)).loss.backward()
    assert policy.generator.head.weight.grad is not None
    observation = random_batch(2, config).observation
    rough, smooth = (one.sample(observation, 3, Random(1)) for one in (plain, policy))
    assert smooth.diff(n=3, dim=2).abs().mean() < 0.5 * rough.diff(n=3, dim=2).abs().mean()
    again = load_policy(save_run(tmp_path / "run", policy))
    assert torch.equal(policy.sample(observation, 3, Random(1)), again.sample(observation, 3, Random(1)))
