"""Kept tokens, lanes, absence: the same actions as the policy on whole windows."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from prism_client import Executor, Step
from torch import Tensor

from prism.controller import ControllerConfig
from prism.encoders.text import TextConfig
from prism.encoders.vision import ResNet18
from prism.errors import PrismError
from prism.inference.backends import BackendPolicy, EagerBackend, compare, load_backend, make_backend
from prism.inference.lanes import Lanes, LocalPlanner, is_realtime, steady
from prism.inference.tokens import Tokens, observe, plan
from prism.methods.prism import PrismPolicy
from prism.rows import EachRandom, Random
from prism.sensors import SensorSpec, encode_text
from prism.types import Observation
from tests.policy_fakes import CAMERA, VECTORS, random_batch, small_config, small_policy

SENSORS = (
    *VECTORS,
    CAMERA,
    SensorSpec("depth", "depth", (20, 24), clip=(0.1, 2.0)),
    SensorSpec("touch", "tactile", (16, 20, 6)),
    SensorSpec("text", "text", (24,)),
)
K = 3


def _policy(**changes: Any) -> PrismPolicy:
    return small_policy(small_config(obs_horizon=4, **changes), SENSORS).eval()


def _reading(spec: SensorSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.kind == "text":
        return encode_text("push the block", spec.shape[0])
    if spec.dtype == np.uint8:
        return rng.integers(0, 256, spec.shape, dtype=np.uint8)
    return rng.uniform(0.2, 1.5, spec.shape).astype(np.float32)


def _stream(steps: int, seed: int = 0, absent: float = 0.0) -> list[dict[str, np.ndarray]]:
    """Readings of `steps` time steps; each sensor but the first is left out with the chance `absent`."""
    rng = np.random.default_rng(seed)
    return [
        {s.name: _reading(s, rng) for i, s in enumerate(SENSORS) if i == 0 or rng.random() >= absent}
        for _ in range(steps)
    ]


def _split(frame: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, bool]]:
    filled = {s.name: frame.get(s.name, np.zeros(s.shape, s.dtype)) for s in SENSORS}
    return filled, {s.name: s.name in frame for s in SENSORS}


def _window(frames: list[dict[str, np.ndarray]]) -> Observation:
    pairs = [_split(frame) for frame in frames]
    streams = {s.name: torch.from_numpy(np.stack([p[0][s.name] for p in pairs])[None]) for s in SENSORS}
    return Observation(streams, {s.name: torch.tensor([[p[1][s.name] for p in pairs]]) for s in SENSORS})


def _rng(seed: int = 0) -> Random:
    return Random(seed)


@pytest.mark.parametrize("anchor", [None, "proprio"])
@pytest.mark.parametrize("absent", [0.0, 0.4])
def test_kept_tokens_give_the_plans_of_the_whole_window(anchor: str | None, absent: float) -> None:
    policy = _policy(anchor=anchor)
    kept = Tokens(EagerBackend(policy))
    frames = _stream(7, absent=absent)
    for t, frame in enumerate(frames):
        kept.observe(*_split(frame))
        padded = [frames[0]] * max(0, 3 - t) + frames[max(0, t - 3) : t + 1]
        whole = policy.sample(_window(padded), K, _rng(t))[0]
        np.testing.assert_allclose(kept.plan(K, _rng(t)), whole.numpy(), rtol=1e-5, atol=1e-5)


def test_an_anchor_that_comes_and_goes_is_the_policys() -> None:
    policy = _policy(anchor="proprio")
    kept = Tokens(EagerBackend(policy))
    frames = _stream(10)
    for t, frame in enumerate(frames):
        if t in (1, 3, 4, 5, 6, 7):  # one reading missed, then more than a window of them
            del frame["proprio"]
    anchors = []
    for t, frame in enumerate(frames):
        kept.observe(*_split(frame))
        window = _window([frames[0]] * max(0, 3 - t) + frames[max(0, t - 3) : t + 1])
        whole = policy.sample(window, K, _rng(t))[0]
        np.testing.assert_allclose(kept.plan(K, _rng(t)), whole.numpy(), rtol=1e-5, atol=1e-5)
        anchor = policy.anchor(window)
        assert anchor is not None
        anchors.append(anchor.flatten().numpy())
    np.testing.assert_array_equal(anchors[1], frames[0]["proprio"])
    np.testing.assert_array_equal(anchors[5], frames[2]["proprio"])
    assert not anchors[6].any()  # none in the window


def test_every_observation_is_encoded_once() -> None:
    policy = _policy()
    backend = EagerBackend(policy)
    seen: list[int] = []
    original = backend.features

    def counting(sensor: int, stream: Tensor) -> Tensor:
        assert len(stream) == 1
        seen.append(sensor)
        return original(sensor, stream)

    backend.features = counting  # type: ignore[method-assign]
    kept = Tokens(backend)
    for frame in _stream(6):
        kept.observe(*_split(frame))
        kept.plan(K, _rng())
    text = len(SENSORS) - 1
    assert sorted(seen) == sorted([*range(text)] * 6 + [text])  # the instruction did not change: once


def test_a_plan_needs_an_observation() -> None:
    with pytest.raises(PrismError, match="call observe first"):
        Tokens(EagerBackend(_policy())).plan(K, _rng())


def test_a_back_end_as_a_policy_is_the_policy() -> None:
    policy = _policy()
    window = _window(_stream(4, absent=0.4))
    batch = Observation(
        {k: torch.cat([v, v.flip(1)]) for k, v in window.streams.items()},
        {k: torch.cat([v, v.flip(1)]) for k, v in window.present.items()},
    )
    ours = BackendPolicy(EagerBackend(policy)).sample(batch, K, _rng())
    torch.testing.assert_close(ours, policy.sample(batch, K, _rng()), rtol=1e-5, atol=1e-5)
    with pytest.raises(PrismError, match="cannot be trained"):
        BackendPolicy(EagerBackend(policy)).batch_loss(random_batch(2), _rng())


class Broken(EagerBackend):
    """Off by half a range; or it raises."""

    fail = False

    def plan(self, steps: Tensor, candidates: int, rng: Random) -> Tensor:
        if self.fail:
            raise RuntimeError("out of memory")
        return super().plan(steps, candidates, rng) + 0.5


@pytest.mark.parametrize("text", [TextConfig(gates=True), TextConfig(things={"places": 3}, picks=1)])
@pytest.mark.parametrize("name", ["eager", "onnx"])
def test_a_sentence_counts_behind_a_back_end_too(text: TextConfig, name: str) -> None:
    """What it makes of the other sensors is part of the fusion: a server that left it out would plan something else."""
    if name == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    sensors = (SensorSpec("places", "vector", (6,)), SensorSpec("text", "text", (16,)))
    config = small_config()
    policy = small_policy(dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, text=text)), sensors)
    assert policy.encoder.gate is not None
    with torch.no_grad():  # as after training: it starts as the identity
        for parameter in policy.encoder.gate.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    _, agreement = load_backend(name, policy)
    assert agreement.max_difference_scaled < 1e-3
    plain = EagerBackend(policy)
    features = torch.randn(4, sum(encoder.features for encoder in plain.encoders))
    if policy.encoder.gate.features == features.shape[1]:
        assert not torch.allclose(plain.fuse(features), policy.encoder.fusion(features), atol=1e-3)


def test_eager_lays_the_weights_out_as_the_pictures_and_changes_only_rounding() -> None:
    net = ResNet18(8).eval()
    image = torch.rand(2, 3, 40, 40).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        before = net(image)
        after = net.to(memory_format=torch.channels_last)(image)  # type: ignore[call-overload]
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
    policy = small_policy(small_config(), (*VECTORS, CAMERA))
    EagerBackend(policy)
    weights = [parameter for parameter in policy.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1]
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_a_back_end_that_is_another_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy()
    assert compare(Broken(policy), _window(_stream(4)), K).max_difference_scaled == pytest.approx(0.5, abs=1e-3)
    monkeypatch.setattr("prism.inference.backends.EagerBackend", Broken)
    with pytest.raises(PrismError, match=r"back end 'eager' is 0\.5 half ranges"):
        load_backend("eager", policy, candidates=K)
    with pytest.raises(PrismError, match="unknown back end 'tpu'"):
        make_backend("tpu", policy)


@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes_give_the_plans_of_one_thread(lanes: int) -> None:
    policy = _policy(anchor="proprio")
    frames = _stream(9, absent=0.3)
    kept = Tokens(EagerBackend(policy))
    with Lanes(EagerBackend(policy), lanes) as planner:
        for t, frame in enumerate(frames):
            kept.observe(*_split(frame))
            planner.observe(*_split(frame))
            if t % 2 == 0:
                ticket = planner.request(K, _rng(t))
                result = planner.poll(30.0)
                assert result is not None
                assert result.ticket == ticket
                assert result.candidates is not None, result.error
                np.testing.assert_allclose(result.candidates, kept.plan(K, _rng(t)), rtol=1e-5, atol=1e-5)
        images = sum(s.is_image and s.name in frame for frame in frames for s in SENSORS)
        assert planner.statistics.frames == planner.statistics.frames_encoded == images
        assert planner.statistics.steps_dropped == 0


def test_a_failing_back_end_is_an_error_of_the_plan_and_the_lanes_live_on() -> None:
    backend = Broken(_policy())
    with Lanes(backend, 2) as planner:
        planner.observe(*_split(_stream(1)[0]))
        backend.fail = True
        planner.request(K, _rng())
        failed = planner.poll(30.0)
        assert failed is not None
        assert failed.candidates is None
        assert failed.error == "RuntimeError: out of memory"
        backend.fail = False
        planner.request(K, _rng())
        fine = planner.poll(30.0)
        assert fine is not None
        assert fine.error is None


class Slow(EagerBackend):
    """Encodes when it is let."""

    def __init__(self, policy: PrismPolicy) -> None:
        super().__init__(policy)
        self.gate = threading.Event()

    def features(self, sensor: int, stream: Tensor) -> Tensor:
        self.gate.wait(30.0)
        return super().features(sensor, stream)


def test_what_cannot_be_encoded_in_time_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    backend = Slow(_policy())
    frames = _stream(8)
    with Lanes(backend, 1, max_backlog=3) as planner:
        for frame in frames:
            planner.observe(*_split(frame))
        assert planner.statistics.steps_dropped == 5  # had it waited, none would be
        assert caplog.text.count("encoding cannot keep up") == 1
        planner.request(K, _rng())
        assert planner.poll() is None
        backend.gate.set()
        result = planner.poll(30.0)
        assert result is not None
        assert result.error is None
        assert planner.unfinished == 0
    kept = Tokens(EagerBackend(_policy()))
    for frame in (*frames[:3], *[frames[2]] * 5):  # a window is of consecutive steps: the last one that was taken
        kept.observe(*_split(frame))
    np.testing.assert_allclose(result.candidates, kept.plan(K, _rng()), rtol=1e-5, atol=1e-5)


def test_results_of_an_episode_that_is_over_are_thrown_away() -> None:
    backend = Slow(_policy())
    with Lanes(backend, 2) as planner:
        planner.observe(*_split(_stream(1)[0]))
        planner.request(K, _rng())
        planner.reset()
        backend.gate.set()
        assert planner.poll(0.3) is None
        planner.observe(*_split(_stream(1)[0]))
        ticket = planner.request(K, _rng())
        result = planner.poll(30.0)
        assert result is not None
        assert result.ticket == ticket


def test_a_plan_under_way_draws_nothing_of_the_next_episode() -> None:
    policy = _policy()
    backend, began, go = EagerBackend(policy), threading.Event(), threading.Event()
    planner = LocalPlanner(backend, ControllerConfig(exec_horizon=2, candidates=K))
    plans = backend.plan

    def late(*args: Any) -> Any:
        began.set()
        assert go.wait(30)
        return plans(*args)

    backend.plan = late  # type: ignore[method-assign]
    try:
        planner.submit(Step(0, 0, _stream(1)[0], None, wants_plan=True, at=0.0))
        assert began.wait(30)
        planner.reset(7)
        go.set()
        planner.lanes.close()  # waits for it
        assert torch.equal(planner.rng.randn((4,)), _rng(7).randn((4,)))
    finally:
        go.set()
        planner.close()


def test_the_whole_loop_with_sensors_that_come_and_go() -> None:
    policy = _policy(encoder=dataclasses.replace(small_config().encoder, dropout=0.5))
    planner = LocalPlanner(EagerBackend(policy), ControllerConfig(exec_horizon=2, candidates=K))
    with Executor(planner, max_held=0, look=False) as control:
        frames = _stream(12, absent=0.5)
        for step in range(15_000):  # half a minute on a busy machine; four plans usually take a moment
            command = control.step(frames[step % 12])
            assert command.action.shape == (3,)
            assert np.isfinite(command.action).all()
            if control.stats.plans >= 4:
                break
            time.sleep(2e-3)
        assert control.stats.errors == 0
        assert control.stats.plans >= 4
        assert control.stats.absent_steps


def test_a_warm_start_that_nobody_would_do_is_refused() -> None:
    with pytest.raises(PrismError, match=r"controller\.warm_start"):
        LocalPlanner(EagerBackend(_policy()), ControllerConfig(exec_horizon=2, warm_start=True))


def test_robots_in_one_batch_get_the_plans_that_each_would_get_alone() -> None:
    """Windows of different robots, one of them with steps filled in between: cameras are not encoded twice."""
    policy = _policy(anchor="proprio")
    backend = EagerBackend(policy)
    seen: list[int] = []
    original = backend.features
    backend.features = lambda sensor, stream: seen.append(len(stream)) or original(sensor, stream)  # type: ignore[method-assign,func-returns-value]
    frames = [_stream(3, seed=i, absent=0.3 * i) for i in range(3)]
    batch = [Tokens(backend) for _ in frames]
    for t in range(3):
        observe(backend, [(tokens, *_split(stream[t])) for tokens, stream in zip(batch, frames, strict=True)])
    together = plan(backend, [tokens.window for tokens in batch], K, EachRandom([_rng(i) for i in range(3)]))
    for i, stream in enumerate(frames):
        alone = Tokens(EagerBackend(policy))
        for frame in stream:
            alone.observe(*_split(frame))
        np.testing.assert_allclose(together[i], alone.plan(K, _rng(i)), rtol=1e-4, atol=1e-5)
    seen.clear()
    last, new = _split(frames[0][-1]), _split(_stream(1, seed=9)[0])
    between = [({**side[0], "proprio": np.full(3, v, np.float32)}, new[1]) for v, side in ((0.1, last), (0.2, new))]
    observe(backend, [(batch[0], *step) for step in (*between, new)])
    assert max(seen[1:]) == 1  # proprio, of three steps, comes first; every other reading is one that is known, or new
    assert seen[0] == 3


def test_a_steady_loop_leaves_the_process_as_it_was() -> None:
    before = is_realtime()
    with steady(realtime=True):
        found: list[bool] = []
        helper = threading.Thread(target=lambda: found.append(is_realtime()))
        helper.start()
        helper.join()
        assert found == [before]  # threads that the loop starts are ordinary ones
        assert not gc.isenabled()
    assert is_realtime() == before
    assert gc.isenabled()
