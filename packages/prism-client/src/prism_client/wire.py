"""openpi's wire format: msgpack with numpy arrays as maps of dtype, shape and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np


def pack(message: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(message, default=_encode)
    return data


def unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, object_hook=_decode)


def _encode(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an observation holds booleans, integers, floats or text, not {value.dtype}")
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"an observation holds arrays, numbers or text, not {type(value).__name__}")


def _decode(values: Any) -> Any:
    if b"__ndarray__" in values:
        return np.frombuffer(values[b"data"], np.dtype(values[b"dtype"])).reshape(values[b"shape"])
    if b"__npgeneric__" in values:
        return np.dtype(values[b"dtype"]).type(values[b"data"])
    return values
