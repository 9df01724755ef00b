"""Export to ONNX and the back ends on it: parity with eager, absence, int8 within its limit, damaged folders."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from prism.errors import PrismError
from prism.inference import tokens
from prism.inference.backends import BackendPolicy, CompiledBackend, compare, load_backend, make_backend
from prism.inference.backends_onnx import OnnxBackend, quantise_encoder, session
from prism.inference.export_onnx import export_onnx
from prism.inference.window import Window, batched
from prism.io import files
from prism.methods.prism import PrismPolicy
from prism.sensors import SensorSpec
from prism.types import Observation
from tests.policy_fakes import VECTORS, small_config, small_policy
from tests.test_deploy_runtime import _rng

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SENSORS = (
    VECTORS[0],
    SensorSpec("rgb", "rgb", (24, 26, 3), crop=(20, 20), resize=(17, 18)),
    SensorSpec("depth", "depth", (20, 24), clip=(0.1, 2.0), resize=(15, 9)),
    SensorSpec("touch", "tactile", (16, 20, 6)),
    SensorSpec("text", "text", (8,)),
)
RGB = 1


@pytest.fixture(scope="module")
def policy() -> PrismPolicy:
    return small_policy(small_config(anchor="proprio"), SENSORS).eval()


@pytest.fixture(scope="module")
def exported(policy: PrismPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "policy"
    told: list[str] = []
    export_onnx(policy, folder, progress=told.append)
    assert told[1] == "sensor-1.onnx (rgb)"
    assert told[-1] == "plan.onnx"
    return folder


def _frames(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            s.name: rng.integers(0, 255, s.shape, dtype=np.uint8)
            if s.dtype == np.uint8
            else rng.uniform(0.2, 1.5, s.shape).astype(np.float32)
            for s in SENSORS
        }
        for _ in range(count)
    ]


def _observation(batch: int, absent: float, seed: int = 0) -> Observation:
    frames = _frames(batch * 2, seed)
    rng = np.random.default_rng(seed)
    streams = {
        s.name: torch.from_numpy(np.stack([f[s.name] for f in frames])).unflatten(0, (batch, 2)) for s in SENSORS
    }
    present = {s.name: torch.from_numpy(rng.random((batch, 2)) >= absent) for s in SENSORS}
    return Observation(streams, present)


@pytest.mark.parametrize(("batch", "candidates", "absent"), [(1, 1, 0.0), (1, 8, 0.5), (3, 5, 0.3)])
def test_onnx_equals_eager_for_any_batch_and_number_of_candidates(
    policy: PrismPolicy, exported: Path, batch: int, candidates: int, absent: float
) -> None:
    backend = OnnxBackend(policy, int8=False)
    observation = _observation(batch, absent)
    ours = BackendPolicy(backend).sample(observation, candidates, _rng())
    torch.testing.assert_close(ours, policy.sample(observation, candidates, _rng()), rtol=1e-4, atol=1e-5)
    assert compare(backend, observation, candidates).max_difference_scaled < 1e-4


@pytest.mark.parametrize("kind", ["favor", "uniform"])
def test_linear_attention_is_the_same_in_an_export_and_from_kept_tokens(kind: str) -> None:
    config = small_config()
    attention = replace(config.generator.attention, kind=kind, length=1.0, length_bound=2.0)
    config = replace(config, generator=replace(config.generator, attention=attention))
    policy = small_policy(config, SENSORS[:1]).eval()
    for name, parameter in policy.named_parameters():
        if name.endswith("attention.length"):
            parameter.data.uniform_(-1.0, 1.0)
    rng = np.random.default_rng(0)
    readings = rng.uniform(-1.0, 1.0, (2, 2, *SENSORS[0].shape)).astype(np.float32)
    present = {SENSORS[0].name: torch.ones(2, 2, dtype=torch.bool)}
    observation = Observation({SENSORS[0].name: torch.from_numpy(readings)}, present)
    expected = policy.sample(observation, 5, _rng())
    ours = BackendPolicy(OnnxBackend(policy, int8=False)).sample(observation, 5, _rng())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    kept = tokens.Tokens(make_backend("eager", policy))
    for frame in readings[0]:
        kept.observe({SENSORS[0].name: frame}, {SENSORS[0].name: True})
    alone = Observation({SENSORS[0].name: torch.from_numpy(readings[:1])}, {SENSORS[0].name: torch.ones(1, 2).bool()})
    np.testing.assert_allclose(kept.plan(5, _rng()), policy.sample(alone, 5, _rng())[0], rtol=1e-4, atol=1e-5)


def test_int8_is_near_eager_and_says_how_near(
    policy: PrismPolicy, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a program that logs by a handler of its own
    backend, agreement = load_backend("onnx-int8", policy, _frames(16))
    assert logging.root.handlers == []  # the quantiser's own is gone: our lines would come twice
    assert 1e-5 < agreement.max_difference_scaled < 0.15 < agreement.limit  # it is int8, and near
    assert agreement.mean_difference_scaled < agreement.max_difference_scaled
    held_out = compare(backend, _observation(4, 0.0, seed=9))
    assert held_out.max_difference_scaled < 0.2
    with pytest.raises(PrismError, match="int8 needs frames of sensor 'rgb'"):
        make_backend("onnx-int8", policy, [{"proprio": np.zeros(3, np.float32)}])
    with pytest.raises(PrismError, match="int8 needs frames"):
        quantise_encoder((exported / "sensor-1.onnx").read_bytes(), [])


def test_a_back_end_that_differs_is_refused(policy: PrismPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxBackend, "fuse", lambda self, features: 2 * self.policy.encoder.fusion(features))
    with pytest.raises(PrismError, match=r"back end 'onnx' is .* away from eager"):
        load_backend("onnx", policy)


def test_the_export_explains_itself(policy: PrismPolicy, exported: Path) -> None:
    from safetensors.torch import load_file

    metadata = json.loads((exported / "metadata.json").read_text())
    assert metadata["graphs"] == ["fusion.onnx", "plan.onnx", *(f"sensor-{i}.onnx" for i in range(4))]
    assert [s["graph"] for s in metadata["sensors"]][-1] is None  # text has none
    assert metadata["action_scale"] == policy.normalizer.action_scale.tolist()
    absent = load_file(exported / "absent.safetensors")
    assert torch.equal(absent["rgb"], policy.encoder.encoders[RGB].absent)  # type: ignore[arg-type]
    graph = session((exported / "sensor-1.onnx").read_bytes(), 1)
    assert (graph.get_inputs()[0].name, graph.get_outputs()[0].name) == ("stream", "features")
    assert graph.get_inputs()[0].type == "tensor(uint8)"  # pixels as the camera gives them: preprocessing is inside
    plan = session((exported / "plan.onnx").read_bytes(), 1)
    assert [i.name for i in plan.get_inputs()] == ["steps", "latents"]


def test_nothing_is_overwritten_unless_asked_and_only_exports_are(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_policy(small_config(), VECTORS[:1]).eval()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").write_bytes(b"x")
    with pytest.raises(PrismError, match="exists already"):
        export_onnx(small, tmp_path / "mine")
    with pytest.raises(PrismError, match="not an export of prism"):
        export_onnx(small, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "photo.jpg").exists()
    shutil.copytree(exported, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            export_onnx(small, tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]  # the old one, and no leftovers
    export_onnx(small, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "sensor-0.onnx").exists()
    assert not (tmp_path / "out" / "sensor-1.onnx").exists()  # nothing of the old one is left


def test_resnet_in_int8_follows_the_pixels() -> None:
    """The paper's backbone with GroupNorm: quantised features correlate with the exact ones, frame by frame."""
    from prism.encoder import EncoderConfig, make_sensor_encoder
    from prism.inference.export_onnx import export_sensor
    from prism.normalize import Normalizer

    spec = SensorSpec("rgb", "rgb", (40, 40, 3))
    encoder = make_sensor_encoder(spec, EncoderConfig(rgb_features=64), Normalizer.empty((spec,), 2)).eval()
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, spec.shape, dtype=np.uint8) for _ in range(6)]
    graph = session(quantise_encoder(export_sensor(encoder), frames[:4]), 1)
    for frame in frames:
        exact = encoder.encode(torch.from_numpy(frame[None]), None).detach().numpy()[0]
        ours = graph.run(None, {"stream": frame[None]})[0][0]
        assert np.corrcoef(exact, ours)[0, 1] > 0.99


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    policy = small_policy(small_config(), SENSORS).eval()
    assert compare(CompiledBackend(policy), _observation(2, 0.3)).max_difference_scaled < 1e-4


ALONE = """
import importlib.util, sys
from types import SimpleNamespace


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("prism", "prism_client", "torch"):
            raise ImportError(f"{name} is not on this robot")


sys.meta_path.insert(0, Blocked())
import numpy as np

example, folder, given, out = sys.argv[1:]
spec = importlib.util.spec_from_file_location("onnx_robot", example)
robot = importlib.util.module_from_spec(spec)
spec.loader.exec_module(robot)
held = np.load(given)
policy = robot.Exported(robot.Path(folder))
policy.rng = SimpleNamespace(standard_normal=lambda shape, dtype: held["latents"].astype(dtype))
steps = max(int(key.partition("/")[0]) for key in held if "/" in key) + 1
for step in range(steps):
    policy.observe({key.partition("/")[2]: held[key] for key in held if key.startswith(f"{step}/")})
np.save(out, policy.candidates(held["latents"].shape[1]))
policy.act({key.partition("/")[2]: held[key] for key in held if key.startswith("0/")}, held["latents"].shape[1])
assert not {"torch", "prism"} & set(sys.modules)
"""


@pytest.mark.parametrize("case", ["anchor, absence", "history"])
def test_the_example_acts_without_prism_and_torch_as_the_policy_does(case: str, tmp_path: Path) -> None:
    """Order of sensors and of time steps, absent sensors, anchor and history, from what is in the folder alone."""
    force = SensorSpec("force", "vector", (2,), history=3)
    config, sensors = (small_config(anchor="proprio"), SENSORS) if case != "history" else (
        small_config(), (force, VECTORS[0]),
    )  # fmt: skip
    policy = small_policy(config, sensors).eval()
    export_onnx(policy, tmp_path / "policy", exec_horizon=2)
    rng = np.random.default_rng(1)
    window = Window(policy.spec)
    given: dict[str, np.ndarray] = {}
    for step in range(4):
        frame = {
            s.name: rng.integers(0, 255, s.shape, dtype=np.uint8)
            if s.dtype == np.uint8
            else rng.uniform(0.2, 1.5, s.shape).astype(np.float32)
            for s in sensors
            if s.kind != "text" and not (step in (1, 3) and s.name in ("depth", "force"))
        }
        window.observe(frame)
        given |= {f"{step}/{name}": value for name, value in frame.items()}
    given["latents"] = rng.standard_normal((1, 3, policy.config.generator.latent)).astype(np.float32)
    policy.latents = lambda rows, count, rng: torch.from_numpy(given["latents"])  # type: ignore[method-assign,assignment]
    expected = policy.sample(batched([window], torch.device("cpu")), 3, _rng())[0].numpy()
    np.savez(tmp_path / "given.npz", **given)
    example = Path(__file__).resolve().parent.parent / "examples/onnx_robot.py"
    words = [sys.executable, "-c", ALONE, example, tmp_path / "policy", tmp_path / "given.npz", tmp_path / "plans.npy"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "plans.npy"), expected, rtol=1e-4, atol=1e-5)
    about = json.loads((tmp_path / "policy/metadata.json").read_text())
    assert "the oldest time step first" in about["steps"]
    assert "in the order of `sensors`" in about["features"]
    assert about["exec_horizon"] == 2
    assert {"absent", "choice"} <= set(about)
