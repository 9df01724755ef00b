"""Encoders of every kind of sensor: shapes, preparation, presence, NaN, weights files, sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from prism.bench.realtime import CALVIN
from prism.encoder import Encoder, EncoderConfig, load_pretrained, make_sensor_encoder
from prism.encoders.audio import AudioConfig, LogMel
from prism.encoders.kinds import RgbEncoder
from prism.encoders.sentence import Gate, Picks
from prism.encoders.text import TextConfig
from prism.encoders.vision import ResNet18, cut, draw_shift, prepare_depth, prepare_image
from prism.errors import PrismError
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.methods.presets import build_policy, preset
from prism.normalize import Normalizer
from prism.rows import Random
from prism.sensors import SensorSpec, encode_text
from prism.types import Observation
from tests.policy_fakes import random_batch, small_config, small_policy
from tests.reference.audio import log_mel, triangles

KINDS = (
    SensorSpec("force", "vector", (6,)),
    SensorSpec("rgb", "rgb", (24, 30, 3), crop=(20, 20), resize=(18, 18), random_shift=2),
    SensorSpec("depth", "depth", (24, 30), clip=(0.1, 2.0), resize=(16, 16)),
    SensorSpec("digit", "tactile", (20, 16, 3)),
    SensorSpec("calvin_tactile", "tactile", (20, 16, 6)),
    SensorSpec("sound", "audio", (533,), sample_rate=16_000),
    SensorSpec("text", "text", (24,)),
)


def _rng(seed: int = 0) -> Random:
    return Random(seed)


def _stream(spec: SensorSpec, n: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if spec.kind == "text":
        texts = [encode_text(f"push {i % 3}", spec.shape[0]) for i in range(n)]
        return torch.from_numpy(np.stack(texts))
    if spec.dtype == np.uint8:
        return torch.from_numpy(rng.integers(0, 256, (n, *spec.shape), dtype=np.uint8))
    return torch.from_numpy(rng.uniform(0.0, 1.0, (n, *spec.shape)).astype(np.float32))


def _encoder(spec: SensorSpec, **changes: Any) -> Any:
    return make_sensor_encoder(spec, EncoderConfig(**{"rgb": "small", **changes}), Normalizer.empty((spec,), 2))


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: s.name)
def test_shape_gradient_and_rows_that_do_not_mix(spec: SensorSpec) -> None:
    encoder, stream = _encoder(spec), _stream(spec, 5)
    there = torch.ones(5, dtype=torch.bool)
    features = encoder(stream, there, None)
    assert features.shape == (5, encoder.features)
    assert torch.isfinite(features).all()
    torch.testing.assert_close(encoder(stream[2:3], there[:1], None), features[2:3], rtol=1e-4, atol=1e-5)
    features.square().sum().backward()
    idle = [n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.any()]
    assert set(idle) <= {"absent"} | ({"backbone.position"} if spec.kind == "text" else set())


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: s.name)
def test_what_is_absent_may_hold_anything(spec: SensorSpec) -> None:
    encoder, clean = _encoder(spec), _stream(spec, 4)
    dirty = clean.clone()
    dirty[1] = 255 if clean.dtype == torch.uint8 else float("nan")
    present = torch.tensor([True, False, True, True])
    first, second = (encoder(stream, present, None) for stream in (clean, dirty))
    assert torch.equal(first, second)
    assert torch.equal(first[1], encoder.absent)
    nothing = encoder(dirty, torch.zeros(4, dtype=torch.bool), None)
    assert torch.equal(nothing, encoder.absent.expand(4, -1))
    second.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters() if p.grad is not None)


def test_all_kinds_in_one_policy_train_and_sample() -> None:
    policy = small_policy(small_config(), KINDS)
    batch = random_batch(3, sensors=KINDS[:1])
    streams = {s.name: _stream(s, 6).unflatten(0, (3, 2)) for s in KINDS}
    present = {s.name: torch.ones(3, 2, dtype=torch.bool) for s in KINDS}
    batch = dataclasses.replace(batch, observation=Observation(streams, present))
    policy.train()
    policy.batch_loss(batch, _rng()).loss.backward()
    plans = [policy.eval().sample(batch.observation, 2, _rng()) for _ in range(2)]
    assert torch.equal(plans[0], plans[1])
    assert torch.isfinite(plans[0]).all()


def test_the_paper_preset_with_all_sensors_of_calvin_keeps_to_the_papers_size() -> None:
    policy = build_policy(preset("paper").spec(CALVIN, 7, 30.0))
    total = sum(p.numel() for p in policy.parameters())
    assert 43_000_000 < total <= 44_400_000  # paper, Table: 44.4 M; docs/reference/sensors.md says how they divide
    sizes = {s.name: e.features for s, e in zip(CALVIN, policy.encoder.encoders, strict=True)}  # type: ignore[arg-type]
    assert sizes == {
        "rgb_static": 512, "rgb_wrist": 512, "depth_static": 256, "depth_wrist": 256, "tactile": 256, "proprio": 64
    }  # fmt: skip


def test_depth_is_metres_clipped_and_0_where_nothing_was_measured() -> None:
    spec = SensorSpec("d", "depth", (2, 3), clip=(0.5, 2.0))
    metres = torch.tensor([[[0.0, 0.1, 1.0], [5.0, float("nan"), float("inf")]]])
    assert prepare_depth(metres, spec, None)[0, 0].tolist() == [[0.0, 0.5, 1.0], [2.0, 0.0, 0.0]]
    small = dataclasses.replace(spec, resize=(1, 1))
    near_far = torch.tensor([[[1.0, 1.0, 2.0], [2.0, 2.0, 2.0]]])
    assert float(prepare_depth(near_far, small, None)) in (1.0, 2.0)  # a pixel that exists, nothing between


def test_crop_is_the_middle_and_moves_in_training() -> None:
    spec = SensorSpec("c", "rgb", (10, 12, 3), crop=(6, 6), random_shift=2)
    image = torch.arange(120, dtype=torch.uint8).reshape(1, 10, 12, 1).expand(64, -1, -1, 3)
    assert cut(image, spec, None)[0, 0, 0, 0] == 2 * 12 + 3
    moved = cut(image, spec, draw_shift(64, spec, _rng()))
    assert moved.shape == (64, 6, 6, 3)
    corners = {(int(c) // 12, int(c) % 12) for c in moved[:, 0, 0, 0]}
    assert corners <= {(r, c) for r in range(5) for c in range(1, 6)}
    assert len(corners) > 15
    assert torch.equal(moved, cut(image, spec, draw_shift(64, spec, _rng())))
    assert all(torch.equal(m[1:, 0, 0] - m[:-1, 0, 0], torch.full((5,), 12, dtype=torch.uint8)) for m in moved)


def test_shift_without_a_crop_repeats_the_border() -> None:
    spec = SensorSpec("c", "tactile", (4, 4, 1), random_shift=3)
    image = torch.arange(16, dtype=torch.uint8).reshape(1, 4, 4, 1)
    padded = torch.nn.functional.pad(image.movedim(-1, 1).float(), (3, 3, 3, 3), mode="replicate")
    for seed in range(20):
        offset = torch.randint(0, 7, (2, 1), generator=_rng(seed).generator).flatten().tolist()
        expected = padded[:, :, offset[0] : offset[0] + 4, offset[1] : offset[1] + 4] / 255
        torch.testing.assert_close(prepare_image(image, spec, draw_shift(1, spec, _rng(seed))), expected)


def test_resize_keeps_a_flat_picture_flat() -> None:
    spec = SensorSpec("c", "rgb", (10, 12, 3), crop=(8, 8), resize=(5, 3))
    image = prepare_image(torch.full((2, 10, 12, 3), 51, dtype=torch.uint8), spec, None)
    assert image.shape == (2, 3, 5, 3)
    torch.testing.assert_close(image, torch.full_like(image, 0.2))


@pytest.mark.parametrize(
    ("rate", "samples", "config"),
    [
        (16_000, 533, AudioConfig()),
        (8_000, 100, AudioConfig(mels=20)),  # a control step shorter than the window
        (16_000, 1600, AudioConfig(mels=30, hop_ms=7)),
    ],
)
def test_log_mel_is_the_slow_one(rate: int, samples: int, config: AudioConfig) -> None:
    fast = LogMel(config, samples, rate)
    sound = np.random.default_rng(0).normal(size=(2, samples)) * [[0.3], [0.003]]
    result = fast(torch.from_numpy(sound.astype(np.float32)))
    assert result.shape == (2, config.mels, fast.frames)
    for i in range(2):
        slow = log_mel(
            sound[i].astype(np.float32).astype(np.float64), rate, fast.size, fast.hop, fast.points, config.mels
        )
        np.testing.assert_allclose(result[i].numpy(), slow, atol=2e-4)


@pytest.mark.parametrize("rate", [4_000, 16_000, 44_100, 48_000])
def test_no_band_is_empty_and_silence_is_finite(rate: int) -> None:
    fast = LogMel(AudioConfig(), rate // 30, rate)
    assert (fast.filters.sum(1) > 0).all()
    np.testing.assert_allclose(fast.filters.numpy(), triangles(rate, fast.points, 40), atol=1e-5)
    torch.testing.assert_close(fast(torch.zeros(1, rate // 30)), torch.full((1, 40, fast.frames), -1.0))
    tone = torch.sin(2 * torch.pi * 0.25 * torch.arange(rate // 30))  # half way up to the highest frequency
    band = int(fast(tone[None])[0].mean(-1).argmax())
    assert fast.filters[band, fast.points // 4] > 0


@pytest.mark.parametrize("gates", [False, True])
def test_a_sentence_gates_the_other_sensors(gates: bool) -> None:
    """How much a reading counts depends on what was said: with gates only."""
    sensors = (SensorSpec("text", "text", (24,)), SensorSpec("force", "vector", (3,)))
    config = EncoderConfig(vector_hidden=0, fusion_hidden=0, text=TextConfig(gates=gates))
    torch.manual_seed(0)
    encoder = Encoder(config, sensors, 1, 8, Normalizer.empty(sensors, 2))
    if isinstance(encoder.gate, Gate):
        torch.nn.init.normal_(encoder.gate.scale.weight)
    there = {spec.name: torch.ones(1, 1, dtype=torch.bool) for spec in sensors}

    def slope(words: str) -> torch.Tensor:
        """Of the fused step by the force; all is linear in it."""
        text = torch.from_numpy(encode_text(words, 24).copy())[None, None]
        still, pushed = (
            encoder.steps(Observation({"text": text, "force": torch.full((1, 1, 3), x)}, there)) for x in (0.0, 1.0)
        )
        return pushed - still

    assert torch.allclose(slope("push"), slope("pull"), atol=1e-5) != gates


def test_a_sentence_picks_among_things_and_each_counts_alike() -> None:
    """What follows sees the picked things only: two that change places, told the other's sentence, are the same."""
    sensors = tuple(SensorSpec(name, "vector", (size,)) for name, size in (("places", 6), ("hand", 2)))
    sensors = (SensorSpec("text", "text", (24,)), *sensors)
    config = EncoderConfig(vector_hidden=0, fusion_hidden=0, text=TextConfig(things={"places": 3}, picks=1))
    encoder = Encoder(config, sensors, 1, 8, Normalizer.empty(sensors, 2))
    picks = encoder.gate
    assert isinstance(picks, Picks)
    there = {spec.name: torch.ones(1, 1, dtype=torch.bool) for spec in sensors}
    cup, ball = torch.tensor([0.1, 0.2]), torch.tensor([0.3, -0.4])

    def fused(places: list[torch.Tensor]) -> torch.Tensor:
        text = torch.from_numpy(encode_text("the cup", 24).copy())[None, None]
        streams = {"text": text, "places": torch.cat(places)[None, None], "hand": torch.zeros(1, 1, 2)}
        return encoder.steps(Observation(streams, there))

    with torch.no_grad():
        picks.query.weight.zero_()
        picks.query.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))  # says: the first
        first = fused([cup, ball, ball])
        torch.testing.assert_close(first, fused([cup, cup, 9 * ball]))
        assert not torch.allclose(first, fused([ball, cup, ball]))
        picks.query.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
        torch.testing.assert_close(first, fused([ball, ball, cup]))


@pytest.mark.parametrize(
    ("things", "words"),
    [({"places": 4}, "not hold 4 things"), ({"place": 3}, "text.things names 'place'"), ({"places": 0}, "1 or more")],
)
def test_things_that_do_not_fit_are_refused(things: dict[str, int], words: str) -> None:
    sensors = (SensorSpec("text", "text", (24,)), SensorSpec("places", "vector", (6,)))
    with pytest.raises(PrismError, match=words):
        Encoder(EncoderConfig(text=TextConfig(things=things)), sensors, 1, 8, Normalizer.empty(sensors, 2))


def test_text_ignores_what_lies_behind_its_end_and_minds_the_order() -> None:
    short, long = SensorSpec("text", "text", (24,)), SensorSpec("text", "text", (40,))
    encoder, wide = _encoder(short), _encoder(long)
    wide.load_state_dict({k: v for k, v in encoder.state_dict().items() if "position" not in k}, strict=False)
    wide.backbone.position.data[:24] = encoder.backbone.position.data
    words = ["red onto blue", "blue onto red", "", "red onto blue"]

    def features(module: Any, size: int) -> torch.Tensor:
        stream = torch.from_numpy(np.stack([encode_text(w, size) for w in words]))
        found: torch.Tensor = module(stream, torch.ones(4, dtype=torch.bool), None)
        return found

    first = features(encoder, 24)
    torch.testing.assert_close(first, features(wide, 40), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first[0], first[3], rtol=1e-4, atol=1e-5)
    assert (first[0] - first[1]).abs().max() > 1e-3
    assert torch.isfinite(first).all()


def _weights(norm: str) -> dict[str, torch.Tensor]:
    """As torchvision names them, BatchNorm and all."""
    source = ResNet18(8, "frozen_batch")
    rng = _rng(5)
    tensors = {k: torch.rand(v.shape, generator=rng.generator) * 0.1 + 0.5 for k, v in source.state_dict().items()}
    tensors = {k: v for k, v in tensors.items() if not k.startswith("project")}
    return {**tensors, "fc.weight": torch.zeros(1000, 512), "bn1.num_batches_tracked": torch.zeros(1)}


@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_weights_are_read_when_training_starts_and_never_when_a_policy_is_built(tmp_path: Path, norm: Any) -> None:
    path = tmp_path / "resnet18.safetensors"
    tensors = _weights(norm)
    safetensors.torch.save_file(tensors, path)
    spec = SensorSpec("rgb", "rgb", (32, 32, 3))
    encoder = EncoderConfig(rgb="resnet18", rgb_features=8, rgb_norm=norm, rgb_weights=str(path), fusion_hidden=16)
    policy = small_policy(small_config(encoder=encoder), (spec,))
    camera = policy.encoder.encoders[0]
    assert isinstance(camera, RgbEncoder)
    assert not torch.equal(camera.backbone.conv1.weight, tensors["conv1.weight"])  # type: ignore[union-attr]
    load_pretrained(policy)
    assert torch.equal(camera.backbone.conv1.weight, tensors["conv1.weight"])  # type: ignore[union-attr]
    assert torch.equal(camera.backbone.layer4[1].bn2.bias, tensors["layer4.1.bn2.bias"])  # type: ignore[union-attr, index]
    path.unlink()
    again = build_policy(policy.spec)  # as load_policy does, on a machine without the file
    again.load_state_dict(policy.state_dict())
    with pytest.raises(PrismError, match=r"resnet18\.safetensors: cannot be read"):
        load_pretrained(again)


def test_frozen_batch_norm_is_batch_norm_in_evaluation_and_has_nothing_to_train() -> None:
    from prism.encoders.vision import FrozenBatchNorm

    ours, theirs = FrozenBatchNorm(4), torch.nn.BatchNorm2d(4).eval()
    rng = _rng(2)
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(4, generator=rng.generator) + 0.5
        getattr(ours, name).copy_(value)
        getattr(theirs, name).data.copy_(value)
    x = torch.randn(3, 4, 5, 5, generator=rng.generator)
    torch.testing.assert_close(ours.train()(x), theirs(x))
    assert not list(ours.parameters())


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = _weights("group")
    safetensors.torch.save_file({**tensors, "conv1.weight": torch.zeros(3)}, path)
    with pytest.raises(PrismError, match=r"w\.safetensors: key 'conv1\.weight'"):
        ResNet18(8).load_pretrained(path)
    safetensors.torch.save_file({**tensors, "bn1.bias": torch.full((64,), torch.nan)}, path)
    with pytest.raises(PrismError, match=r"'bn1\.bias' holds NaN"):
        ResNet18(8).load_pretrained(path)


def test_configs_are_written_whole_and_read_without_what_they_lack() -> None:
    written = to_json(EncoderConfig())
    assert set(written) == {field.name for field in dataclasses.fields(EncoderConfig)}
    assert from_json(EncoderConfig, json.loads(json.dumps(written))) == EncoderConfig()
    for added in ("depth_features", "audio", "text", "dropout", "rgb_norm"):  # a file from before them
        del written[added]
    assert from_json(EncoderConfig, written) == EncoderConfig()
    changed = with_settings(EncoderConfig(), ["dropout=0.3", "text.kind=clip", 'sensor_dropout={"a": 0.5}'])
    assert (changed.dropout, changed.text.kind, changed.sensor_dropout) == (0.3, "clip", {"a": 0.5})
    with pytest.raises(PrismError, match="sensor_dropout: expected an object"):
        with_settings(EncoderConfig(), ["sensor_dropout=0.3"])
    other = EncoderConfig(text=TextConfig(features=32), sensor_dropout={"a": 0.5}, depth_widths=(8, 16))
    assert from_json(EncoderConfig, json.loads(json.dumps(to_json(other)))) == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rgb_norm": "frozen_batch"}, "rgb_weights"),
        ({"rgb_norm": "batch"}, "rgb_norm"),
        ({"depth_widths": ()}, "depth_widths"),
        ({"tactile_features": 0}, "features"),
        ({"dropout": 1.0}, "dropout"),
        ({"sensor_dropout": {"proprio": -0.1}}, "proprio"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        EncoderConfig(**changes)
