"""Graphs in int8: convolutions with ranges that were seen on real frames, matrix products with ranges of the moment.

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
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.serve.export_onnx import quiet, require

Array = NDArray[np.generic]
_LARGE = 256  # rows and columns of a matrix below which int8 saves nothing


def quantise_encoder(graph: bytes, frames: Sequence[Array]) -> bytes:
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
    """What onnxruntime calls a CalibrationDataReader: one input at a time, then None."""

    def __init__(self, frames: Sequence[Array]) -> None:
        self._frames: Iterator[Array] = iter(frames)

    def get_next(self) -> dict[str, Any] | None:
        frame = next(self._frames, None)
        return None if frame is None else {"stream": frame[None]}
