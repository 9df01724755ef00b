"""The baselines' equations against slow float64 versions, diffusers' schedulers, and published sizes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.methods.act import ActPolicy
from prism.methods.adaflow import AdaFlowPolicy
from prism.methods.base import ContextPolicy
from prism.methods.consistency import ConsistencyPolicy
from prism.methods.diffusion import DiffusionPolicy, NoiseSchedule, cosine_alphas, timesteps
from prism.methods.flow_matching import TIME_SCALE, FlowMatchingPolicy
from prism.methods.imle import ImlePolicy, choose, flat_distance
from prism.methods.unet import SIZES, Student, UNet, UNetConfig, step_features
from prism.rows import Random
from prism.types import Batch
from tests.baseline_fakes import build, small_method
from tests.policy_fakes import random_batch
from tests.reference import generative as reference


def _rng(seed: int = 0) -> Random:
    return Random(seed)


# --------------------------------------------------------------------------- the UNet


@pytest.mark.parametrize(("action_dim", "expected"), [(2, 79_889_922), (7, 79_898_887), (14, 79_911_438)])
def test_the_published_unet_has_79_9_million_parameters(action_dim: int, expected: int) -> None:
    with torch.device("meta"):
        unet = UNet(SIZES["paper"], action_dim, 1024)
    assert sum(p.numel() for p in unet.parameters()) == expected
    assert round(expected / 1e6, 1) == 79.9


def test_splitting_film_is_the_published_film() -> None:
    """One matrix on Mish([step embedding, condition]), as published, from our two."""
    torch.manual_seed(0)
    unet = UNet(UNetConfig(dims=(8, 16), groups=4, step_embedding=6, condition=0), 3, 5)
    condition, step = torch.randn(2, 5), torch.tensor([3.0, 70.0])
    ours = [c + s for c, s in zip(unet.condition_films(condition), unet.step_films(step), strict=True)]
    assert unet.embed_step is not None
    embedding = unet.embed_step(step_features(step, 6))
    for film, block in zip(ours, unet._blocks, strict=True):
        assert block.step_film is not None
        weight = torch.cat([block.step_film.weight, block.condition_film.weight], dim=1)
        whole = F.linear(F.mish(torch.cat([embedding, condition], dim=1)), weight, block.condition_film.bias)
        torch.testing.assert_close(film[:, 0], whole)


def test_the_unet_treats_candidates_alike_and_sees_all_time() -> None:
    torch.manual_seed(0)
    unet = UNet(UNetConfig(dims=(8, 16, 16), groups=4, step_embedding=6, condition=0), 2, 5)
    films = unet.condition_films(torch.randn(2, 5))
    x = torch.randn(2, 3, 8, 2, requires_grad=True)
    out = unet(x, films, unet.step_films(torch.tensor([4.0])))
    flipped = unet(x.flip(1), films, unet.step_films(torch.tensor([4.0, 4.0])))
    torch.testing.assert_close(out, flipped.flip(1))
    (gradient,) = torch.autograd.grad(out[1, 2, 0].sum(), x)
    assert (gradient[1, 2].abs().amax(1) > 0).all()  # the first action depends on the noise of all steps
    assert gradient[0].abs().max() == 0
    assert gradient[1, :2].abs().max() == 0


# --------------------------------------------------------------------------- diffusion


def test_the_schedule_in_float64() -> None:
    np.testing.assert_allclose(cosine_alphas(100).numpy(), reference.alphas(100), rtol=1e-12)


def _toy(x: Any, t: int) -> Any:
    """A 'network' that works on numpy and torch alike."""
    return 0.7 * x + 0.002 * t - 0.1


class _Toy(nn.Module):
    def predict(self, noisy: Tensor, films: Any, step: Tensor) -> Tensor:
        result: Tensor = _toy(noisy, int(step))
        return result


def _sample(evaluations: int, spacing: str, sampler: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    own = {"evaluations": evaluations, "spacing": spacing, "sampler": sampler}
    policy = build(small_method("diffusion", **own))
    assert isinstance(policy, DiffusionPolicy)
    monkeypatch.setattr(policy, "predict", _Toy().predict)
    return policy.denoise(x, (), _rng(5))


@pytest.mark.parametrize(
    ("evaluations", "spacing"), [(10, "leading"), (100, "leading"), (7, "trailing"), (1, "trailing")]
)
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_sampling_is_the_slow_one(
    evaluations: int, spacing: Any, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, 4, 3, generator=_rng().generator)
    ours = _sample(evaluations, spacing, sampler, x, monkeypatch)
    visited, start = timesteps(100, evaluations, spacing), x.double().numpy()
    assert len(visited) == evaluations
    assert visited[0] == (99 if spacing == "trailing" else 100 - 100 // evaluations)
    rng = _rng(5)
    fresh = [torch.randn(2, 3, 4, 3, generator=rng.generator).double().numpy() for _ in visited]
    slow = (
        reference.ddim(_toy, start, visited, 100, 1.0)
        if sampler == "ddim"
        else reference.ddpm(_toy, start, visited, 100, 1.0, fresh)
    )
    np.testing.assert_allclose(ours.numpy(), slow, atol=1e-3)  # at full noise x_0 is a difference times 2029


def test_sampling_can_start_lower() -> None:
    assert timesteps(100, 1, "leading", 90) == [90]
    assert timesteps(100, 5, "leading", 90) == [90, 72, 54, 36, 18]
    assert timesteps(100, 10, "leading", 10) == list(range(10, 0, -1))


@pytest.mark.parametrize("evaluations", [100, 20, 10, 5])
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_schedulers_agree_with_diffusers(sampler: str, evaluations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers = pytest.importorskip("diffusers")
    shared = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    if sampler == "ddim":
        theirs = diffusers.DDIMScheduler(**shared, set_alpha_to_one=True, steps_offset=0)
    else:
        theirs = diffusers.DDPMScheduler(**shared, variance_type="fixed_small")
    schedule = NoiseSchedule(100)
    torch.testing.assert_close(schedule.alphas[:100], theirs.alphas_cumprod.float(), rtol=1e-5, atol=1e-7)
    data, noise = torch.randn(6, 4, 2, generator=_rng(1).generator), torch.randn(6, 4, 2, generator=_rng(2).generator)
    step = torch.tensor([0, 1, 30, 60, 98, 99])
    torch.testing.assert_close(schedule.add_noise(data, noise, step), theirs.add_noise(data, noise, step))

    x = torch.randn(2, 3, 4, 3, generator=_rng(3).generator)
    ours = _sample(evaluations, "leading", sampler, x, monkeypatch)
    theirs.set_timesteps(evaluations)
    assert theirs.timesteps.tolist() == timesteps(100, evaluations, "leading")
    rng = _rng(5)
    for t in theirs.timesteps:
        options = {} if sampler == "ddim" else {"generator": rng.generator}
        x = theirs.step(_toy(x, int(t)), t, x, **options).prev_sample
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
def test_a_network_that_knows_the_noise_gives_the_plan_back(prediction: Any) -> None:
    schedule, steps = NoiseSchedule(100), torch.tensor([0, 40, 90])
    data, noise = (
        torch.randn(3, 1, 4, 3, generator=_rng(1).generator),
        torch.randn(3, 1, 4, 3, generator=_rng(2).generator),
    )
    noisy = schedule.add_noise(data, noise, steps)
    output = noise if prediction == "epsilon" else data
    found, found_noise = schedule.split(noisy, output, steps, prediction, 10.0)  # a step a row
    torch.testing.assert_close(found, data, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found_noise, noise, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(schedule.ddim(found, found_noise, -1), found)
    for row, step in enumerate(steps.tolist()):  # one for all
        one = slice(row, row + 1)
        split = schedule.split(noisy[one], output[one], step, prediction, 10.0)
        torch.testing.assert_close(split[0], found[one], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(split[1], found_noise[one], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------- losses, with a known function in place of the network


class Known(nn.Module):
    """The UNet's interface over a x + b t + c; of numbers too."""

    def __init__(self, a: float, b: float, c: float) -> None:
        super().__init__()
        self.a, self.b, self.c = a, b, c

    def condition_films(self, condition: Tensor) -> tuple[Tensor, ...]:
        return ()

    def step_films(self, step: Tensor) -> tuple[Tensor, ...]:
        return (step.view(-1, 1, 1),)

    def forward(self, x: Tensor, films: Any, step: tuple[Tensor, ...]) -> Tensor:
        result: Tensor = self.at(x, step[0].unsqueeze(-1))
        return result

    def at(self, x: Any, step: Any) -> Any:
        return self.a * x + self.b * step + self.c


MINE, TEACHERS_OWN = Known(0.7, 0.002, -0.1), Known(0.4, 0.004, 0.2)


def _known(method: str, **own: Any) -> ContextPolicy:
    policy = build(small_method(method, offset_scale=0.5, **own)).eval()
    policy.unet = MINE  # type: ignore[assignment]
    if isinstance(policy, Student):
        policy.teacher.unet = TEACHERS_OWN  # type: ignore[assignment]
    return policy


def _padded(rows: int) -> tuple[Batch, Tensor]:
    """A batch with the ends of episodes in it, and its plans in the method's own space, float64."""
    batch = random_batch(rows)
    assert not batch.action_valid.all()
    return batch, batch.actions.double() / 0.5


def _mean_of_rows(error: Tensor, batch: Batch) -> float:
    return float(np.mean([float(row[valid].mean()) for row, valid in zip(error, batch.action_valid, strict=True)]))


def _on_path(noise: Tensor, data: Tensor, time: Tensor) -> Tensor:
    return (1 - time)[:, None, None] * noise + time[:, None, None] * data


def _loss(policy: ContextPolicy, batch: Batch) -> float:
    return float(policy.batch_loss(batch, _rng(3)).loss)


@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
def test_diffusion_loss_is_its_equation(prediction: str) -> None:
    policy = _known("diffusion", prediction=prediction)
    batch, data = _padded(8)
    rng = _rng(3)
    step = torch.randint(0, 100, (8,), generator=rng.generator)
    noise = torch.randn(8, 4, 3, generator=rng.generator).double()
    alpha = torch.from_numpy(reference.alphas(100))[step][:, None, None]
    said = MINE.at(alpha.sqrt() * data + (1 - alpha).sqrt() * noise, step[:, None, None])
    goal = noise if prediction == "epsilon" else data
    assert _loss(policy, batch) == pytest.approx(_mean_of_rows((said - goal).square(), batch), rel=1e-5)


def test_consistency_loss_is_its_equation() -> None:
    policy = _known("consistency", denoising_weight=0.3)
    batch, data = _padded(24)
    rng = _rng(3)
    place = torch.randint(0, 10, (24,), generator=rng.generator)
    noise = torch.randn(24, 4, 3, generator=rng.generator).double()
    step, into = 10 * (9 - place), 10 * (8 - place)  # the last goes to the data
    assert 0 < int((into < 0).sum()) < 24
    table = torch.from_numpy(np.append(reference.alphas(100), 1.0))
    alpha, alpha_into = table[step][:, None, None], table[into.clamp(min=-1)][:, None, None]

    def end(x: Tensor, said: Tensor, alpha: Tensor) -> Tensor:
        return (x - (1 - alpha).sqrt() * said) / alpha.sqrt()

    x = alpha.sqrt() * data + (1 - alpha).sqrt() * noise
    landed = end(x, MINE.at(x, step[:, None, None]), alpha)
    assert (landed.abs() > 1).any()  # beyond the clip: what is trained is not clipped
    said = TEACHERS_OWN.at(x, step[:, None, None])
    moved = alpha_into.sqrt() * end(x, said, alpha).clamp(-1, 1) + (1 - alpha_into).sqrt() * said
    further = end(moved, MINE.at(moved, into[:, None, None]), alpha_into).clamp(-1, 1)
    target = torch.where((into < 0)[:, None, None], moved, further)
    slow = _mean_of_rows((landed - target).square(), batch) + 0.3 * _mean_of_rows((landed - data).square(), batch)
    assert _loss(policy, batch) == pytest.approx(slow, rel=1e-4)


def test_consistency_learns_where_it_is_beyond_the_clip() -> None:
    class Says(Known):
        def __init__(self) -> None:
            super().__init__(0.0, 0.0, 0.0)
            self.said = nn.Parameter(torch.full((6, 1, 4, 3), 500.0))

        def forward(self, x: Tensor, films: Any, step: tuple[Tensor, ...]) -> Tensor:
            return self.said

    policy = _known("consistency")
    assert isinstance(policy, ConsistencyPolicy)
    policy.unet = Says()  # type: ignore[assignment]
    batch, _ = _padded(6)
    policy.batch_loss(batch, _rng(3)).loss.backward()
    gradient = policy.unet.said.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    assert (gradient[:, 0][batch.action_valid] > 0).all()  # all entries are beyond it
    assert (gradient[:, 0][~batch.action_valid] == 0).all()
    with torch.no_grad():
        noise = torch.zeros(6, 1, 4, 3)
        assert float(policy.jump(noise, (), _rng()).abs().max()) == policy.config.clip  # in use it is clipped


def test_consistency_fm_loss_is_its_equation() -> None:
    policy = _known("consistency_fm", delta=0.2, velocity_weight=0.5)
    batch, data = _padded(12)
    rng = _rng(3)
    time = torch.rand(12, generator=rng.generator).double()
    noise = torch.randn(12, 4, 3, generator=rng.generator).double()
    end = torch.where(time < 0.5, 0.5, 1.0).double()
    later = torch.minimum(time + 0.2, end)
    assert 0 < int((later == end).sum()) < 12

    def jump(at: Tensor) -> tuple[Tensor, Tensor]:
        x = _on_path(noise, data, at)
        velocity = MINE.at(x, 100 * at[:, None, None])
        return x + (end - at)[:, None, None] * velocity, velocity

    (landed, velocity), (target, target_velocity) = jump(time), jump(later)
    apart = (velocity - target_velocity).square()
    apart[later == end] = 0  # the velocity there is that of the next segment
    slow = _mean_of_rows((landed - target).square() + 0.5 * apart, batch)
    assert _loss(policy, batch) == pytest.approx(slow, rel=1e-5)


def test_adaflow_loss_is_its_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _known("adaflow")
    assert isinstance(policy, AdaFlowPolicy)

    def log_variance(x: Tensor, condition: Tensor, time: Tensor) -> Tensor:
        return 0.3 * time - x.mean((2, 3))

    monkeypatch.setattr(policy, "log_variance", log_variance)
    batch, data = _padded(8)
    rng = _rng(3)
    time = torch.rand(8, generator=rng.generator).double()
    noise = torch.randn(8, 4, 3, generator=rng.generator).double()
    x = _on_path(noise, data, time)
    error = (MINE.at(x, 100 * time[:, None, None]) - (data - noise)).square()
    logs = log_variance(x.unsqueeze(1), x, time[:, None])[:, 0]
    rows = []
    for row, log, valid in zip(error, logs, batch.action_valid, strict=True):
        mean = float(row[valid].mean())
        rows.append(mean + 0.5 * (mean * float((-log).exp()) + float(log)))
    assert _loss(policy, batch) == pytest.approx(np.mean(rows), rel=1e-5)


def test_adaflow_steps_are_as_large_as_the_error_of_the_whole_plan_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published error is summed over the plan, and so is eta: a plan of 12 entries, each with deviation s."""
    policy = _known("adaflow", eta=0.1, evaluations=10)
    assert isinstance(policy, AdaFlowPolicy)
    x, condition = torch.zeros(1, 2, 4, 3), torch.zeros(1, 24)
    for deviation, steps in ((0.1 / 12**0.5, 1), (0.4 / 12**0.5, 4), (3.0 / 12**0.5, 10)):  # the last: at most
        said = 2.0 * float(np.log(deviation)) - 1e-4  # a hair more than a whole number of steps is that number
        monkeypatch.setattr(policy, "log_variance", lambda x, c, t, said=said: torch.full_like(t, said))
        assert policy.adapt(x, condition)[1].tolist() == [[steps, steps]]


def test_rectified_flow_loss_is_its_equation() -> None:
    policy = _known("rectified_flow", teacher_evaluations=4)
    batch, _ = _padded(8)
    rng = _rng(3)
    time = torch.rand(8, generator=rng.generator).double()
    noise = torch.randn(8, 4, 3, generator=rng.generator).double()
    end = reference.euler(lambda x, t: TEACHERS_OWN.at(x, 100 * t), noise.numpy(), 4)
    data = torch.from_numpy(end)
    said = MINE.at(_on_path(noise, data, time), 100 * time[:, None, None])
    assert _loss(policy, batch) == pytest.approx(_mean_of_rows((said - (data - noise)).square(), batch), rel=1e-5)


# --------------------------------------------------------------------------- flow matching


@pytest.mark.parametrize(("solver", "evaluations"), [("euler", 1), ("euler", 5), ("midpoint", 2), ("midpoint", 10)])
def test_integration_is_the_slow_one(solver: str, evaluations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build(small_method("flow_matching", solver=solver, evaluations=evaluations))
    assert isinstance(policy, FlowMatchingPolicy)
    monkeypatch.setattr(policy, "velocity", lambda x, films, time: torch.sin(3 * x) + float(time))
    x = torch.randn(2, 3, 4, 3, generator=_rng().generator)

    def velocity(y: Any, time: float) -> Any:
        return np.sin(3 * y) + time

    slow = {"euler": reference.euler, "midpoint": reference.midpoint}[solver]
    steps = evaluations // (2 if solver == "midpoint" else 1)
    np.testing.assert_allclose(policy.integrate(x, ()).numpy(), slow(velocity, x.double().numpy(), steps), atol=1e-5)


def test_flow_matching_loss_is_its_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build(small_method("flow_matching", offset_scale=0.5)).eval()
    assert isinstance(policy, FlowMatchingPolicy)
    seen: list[Tensor] = []

    def velocity(x: Tensor, films: Any, time: Tensor) -> Tensor:
        seen.extend([x[:, 0], time])
        return torch.zeros_like(x)

    monkeypatch.setattr(policy, "velocity", velocity)
    batch = random_batch(5)
    loss = float(policy.batch_loss(batch, _rng(3)).loss)
    rng = _rng(3)
    time = torch.rand(5, generator=rng.generator).double()
    noise = torch.randn(5, 4, 3, generator=rng.generator).double()
    data = batch.actions.double() / 0.5
    path = (1 - time)[:, None, None] * noise + time[:, None, None] * data
    torch.testing.assert_close(seen[0].double(), path, rtol=1e-5, atol=1e-6)
    rows = [float((data[i] - noise[i])[batch.action_valid[i]].square().mean()) for i in range(5)]
    assert loss == pytest.approx(np.mean(rows), rel=1e-5)
    assert TIME_SCALE == 100


# --------------------------------------------------------------------------- IMLE Policy


@pytest.mark.parametrize("epsilon", [0.0, 1.5, 2.2, 50.0])
def test_imle_loss_and_gradient_are_the_slow_ones(epsilon: float) -> None:
    policy = build(small_method("imle", epsilon=epsilon, candidates=6)).train()
    assert isinstance(policy, ImlePolicy)
    batch = random_batch(8)
    batch = Batch(batch.observation, batch.actions * 0.6, batch.action_valid)
    output = policy.batch_loss(batch, _rng(1))
    rng = _rng(1)
    encoded = ContextPolicy.draw(policy, batch, rng)
    data = policy.data(encoded)
    noise = rng.randn((8, policy.config.candidates, *data.shape[1:]))
    plans = policy.unet(noise, policy.films(encoded.context))
    slow = reference.imle_loss(
        plans.detach().double().numpy(), batch.actions.double().numpy(), batch.action_valid.numpy(), epsilon
    )
    assert float(output.loss.detach()) == pytest.approx(slow, rel=1e-4)
    # All K with gradient, through the same choice: the gradient is that of the chosen ones alone.
    squared = flat_distance(plans, data, batch.action_valid)
    index, kept = choose(squared.detach(), epsilon)
    assert kept.any() == (epsilon < 50)
    assert kept.all() == (epsilon == 0)
    whole = squared[torch.arange(8), index][kept].sqrt().sum() / max(1, int(kept.sum()))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    expected = torch.autograd.grad(whole + 0.0 * squared.sum(), parameters, allow_unused=True)
    found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            assert a is not None
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------- ACT


def test_act_loss_is_l1_and_kl() -> None:
    policy = build(small_method("act", kl_weight=3.0)).eval()
    assert isinstance(policy, ActPolicy)
    batch = random_batch(5)
    with torch.no_grad():
        loss = policy.batch_loss(batch, _rng(1)).loss
        context = policy.encoder(batch.observation)
        mean, log_variance = policy.style_of(batch.actions, batch.action_valid, context, None)
        normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
        z = mean + normal.stddev * torch.randn(mean.shape, generator=_rng(1).generator)
        gap = (policy.actions(z, context, None) - batch.actions).abs()
    rows = torch.stack([gap[i][batch.action_valid[i]].mean() for i in range(5)])
    kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    torch.testing.assert_close(loss, rows.mean() + 3.0 * kl)


def test_act_dropout_belongs_to_rows_and_is_off_in_use() -> None:
    policy = build(small_method("act", dropout=0.5))
    batch = random_batch(6)
    with torch.no_grad():
        trained = [float(policy.train().batch_loss(batch, _rng(seed)).loss) for seed in (1, 1, 2)]
        used = [policy.eval().sample(batch.observation, 2, _rng(seed)) for seed in (1, 2)]
    assert trained[0] == trained[1]
    assert trained[0] != trained[2]
    assert torch.equal(used[0], used[1])
