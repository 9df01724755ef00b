"""Graphs in int8: convolutions with ranges that were seen on real frames, matrix products with ranges of the moment.

    q = clamp(round(x / s) + z, 0, 255)         activations: one (s, z) a tensor, from calibration frames
    w = s_c q_c,  |q_c| <= 63                   weights: one scale an output channel, 7 bits

Seven bits, because without VNNI the AVX2 kernel adds two products of 8 bits in 16 (255 * 127 * 2 saturates). The
encoders are quantised statically: what a camera sees has a range. The generator's tokens are not pixels, and measuring
their range on the way costs little beside the product: dynamically.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.deploy.export_onnx import quiet, require
from prism.errors import PrismError

Array = NDArray[np.generic]


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
    """The matrix products with weights in int8, their inputs quantised as they come."""
    require("onnx")
    require("onnxruntime")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet(), tempfile.TemporaryDirectory(prefix="prism-int8-") as folder:
        source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(graph)
        quantize_dynamic(source, target, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
        return target.read_bytes()


class _Frames:
    """What onnxruntime calls a CalibrationDataReader: one input at a time, then None."""

    def __init__(self, frames: Sequence[Array]) -> None:
        self._frames: Iterator[Array] = iter(frames)

    def get_next(self) -> dict[str, Any] | None:
        frame = next(self._frames, None)
        return None if frame is None else {"stream": frame[None]}
