"""ONNX Runtime behind the interface of a back end, in float32 or int8.

int8: convolutions with ranges that were seen on real frames, matrix products with ranges of the moment.

    q = clamp(round(x / s) + z, 0, 255)         activations: one (s, z) a tensor, from calibration frames
    w = s_c q_c,  |q_c| <= 63                   weights: one scale an output channel, 7 bits

Seven bits, because without VNNI the AVX2 kernel adds two products of 8 bits in 16 (255 * 127 * 2 saturates). The
encoders are quantised statically: what a camera sees has a range. The generator's tokens are not pixels, and measuring
their range on the way costs little beside the product: dynamically.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prism.encoders.frozen import FrozenEncoder
from prism.errors import PrismError
from prism.inference.backends import Backend, Frame
from prism.inference.export_onnx import export_graphs, quiet, require
from prism.methods.base import ContextPolicy
from prism.methods.prism import PrismPolicy
from prism.rows import Random
from prism.sensors import SensorSpec

_CALIBRATION_FRAMES = 32
_LARGE = 256  # rows and columns of a matrix below which int8 saves nothing


class OnnxBackend(Backend):
    """Graphs made from the policy when this is built. Sound and text stay in PyTorch, and so does the plan of a method
    without a single pass.

    int8: image sensors by the ranges of `frames`, the generator dynamically; vectors and fusion stay float32, they
    cost nothing. Frozen backbones stay float32 too: in int8 EfficientNet-Lite0 is 1.7 half ranges of an action away,
    and with its depthwise layers left out .5 away and no faster (2.9 CPU ms a picture of 136x136 either way).
    """

    def __init__(self, policy: ContextPolicy, int8: bool, frames: Sequence[Frame] = ()) -> None:
        super().__init__(policy)
        require("onnxruntime")
        self.name = "onnx-int8" if int8 else "onnx"
        self._graphs = export_graphs(policy)
        if int8:
            for index, encoder in enumerate(self.encoders):
                if encoder.spec.is_image and not isinstance(encoder, FrozenEncoder):
                    name = f"sensor-{index}.onnx"
                    shown = calibration(encoder.spec, frames)
                    self._graphs[name] = quantise_encoder(self._graphs[name], shown)
            if "plan.onnx" in self._graphs:
                self._graphs["plan.onnx"] = quantise_plan(self._graphs["plan.onnx"])
        self.threads(1)

    def threads(self, count: int) -> None:
        """Sessions are made anew: ONNX Runtime fixes its threads then."""
        super().threads(count)
        self._sessions: dict[str, Any] = {name: session(graph, count) for name, graph in self._graphs.items()}

    def features(self, sensor: int, stream: Tensor) -> Float[Tensor, "N F"]:
        own = self._sessions.get(f"sensor-{sensor}.onnx")
        if own is None:
            return self.encoders[sensor].encode(stream, None)
        return _run(own, {"stream": stream})

    def fuse(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N W"]:
        own = self._sessions.get("fusion.onnx")
        return super().fuse(features) if own is None else _run(own, {"features": features})

    def plan(self, steps: Float[Tensor, "B To W"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        own = self._sessions.get("plan.onnx")
        if own is None or not isinstance(self.policy, PrismPolicy):
            return super().plan(steps, candidates, rng)
        return _run(own, {"steps": steps, "latents": self.policy.latents(len(steps), candidates, rng)})


def calibration(sensor: SensorSpec, frames: Sequence[Frame]) -> list[NDArray[np.generic]]:
    """Time steps of one sensor, evenly over the frames that have it; a history is of one reading."""
    readings = [np.asarray(frame[sensor.name]) for frame in frames if sensor.name in frame]
    if not readings:
        raise PrismError(
            f"int8 needs frames of sensor '{sensor.name}' to calibrate with: give data or observations that have it"
        )
    chosen = np.linspace(0, len(readings) - 1, min(len(readings), _CALIBRATION_FRAMES)).astype(int)
    return [np.ascontiguousarray(np.broadcast_to(readings[i], sensor.step_shape)) for i in chosen]


def session(graph: bytes, threads: int) -> Any:
    """An ONNX Runtime session on the CPU with a fixed number of threads, which sleep when there is nothing to do."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _run(own: Any, inputs: dict[str, Tensor]) -> Tensor:
    feed = {name: value.detach().contiguous().numpy() for name, value in inputs.items()}
    return torch.from_numpy(own.run(None, feed)[0])


def quantise_encoder(graph: bytes, frames: Sequence[NDArray[np.generic]]) -> bytes:
    """The convolutions of a sensor's graph in int8; `frames` (one time step each) say which range is usual."""
    if not frames:
        raise PrismError("int8 needs frames to calibrate with: give a dataset, or the first observations")
    require("onnx")
    require("onnxruntime")
    from onnxruntime.quantization import QuantType, quantize_static

    with quiet(), tempfile.TemporaryDirectory(prefix="prism-int8-") as folder:
        source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(graph)
        quantize_static(
            source,
            target,
            _Frames(frames),
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            op_types_to_quantize=["Conv"],
        )
        return target.read_bytes()


def quantise_plan(graph: bytes) -> bytes:
    """The large matrix products of the generator's blocks in int8, their inputs quantised as they come.

    Those run on every token of every candidate. The rest runs once a plan, or is small: it stays float32, exactly.
    """
    require("onnx")
    require("onnxruntime")
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(graph)
    weights = {weight.name: tuple(weight.dims) for weight in model.graph.initializer}
    large = [node.name for node in model.graph.node if _worth_it(node, weights)]
    if not large:
        return graph
    with quiet(), tempfile.TemporaryDirectory(prefix="prism-int8-") as folder:
        target = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, target, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8, nodes_to_quantize=large
        )
        return target.read_bytes()


def _worth_it(node: Any, weights: Mapping[str, tuple[int, ...]]) -> bool:
    shapes = [weights[name] for name in node.input if name in weights]
    large = any(len(shape) == 2 and min(shape) >= _LARGE for shape in shapes)
    return node.op_type in ("MatMul", "Gemm") and "/blocks." in node.name and large


class _Frames:
    """A CalibrationDataReader of onnxruntime: one input at a time, then None."""

    def __init__(self, frames: Sequence[NDArray[np.generic]]) -> None:
        self._frames: Iterator[NDArray[np.generic]] = iter(frames)

    def get_next(self) -> dict[str, Any] | None:
        frame = next(self._frames, None)
        return None if frame is None else {"stream": frame[None]}
