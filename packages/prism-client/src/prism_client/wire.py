"""openpi's wire format, for the robot and for the server: msgpack, with numpy arrays as maps. Decoding trusts nothing.

    ndarray       {b"__ndarray__": True, b"data": bytes, b"dtype": dtype.str, b"shape": (...)}
    numpy scalar  {b"__npgeneric__": True, b"data": value, b"dtype": dtype.str}

A frame comes from anybody who can reach the port, so everything that could cost memory or time out of proportion to
its bytes is bounded before it is built: arrays are views of the frame, their dtypes are plain numbers, and a frame
may hold a limited number of small values. Nothing is pickled, so nothing that arrives can run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")  # what a sensor may send; np.dtype() would parse far more
_MAX_DIMS = 8
_MAX_KEYS = 512  # of one map
_MAX_LIST = 4096  # msgpack reserves what a header promises, at every depth
_MAX_VALUES = 100_000  # outside arrays: a vector may come as a list, a picture may not


class WireError(ValueError):
    """A frame that is no message, or a value that no message can hold, in one line."""


def pack(message: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(message, default=_pack_numpy)
    return data


def unpack(frame: bytes) -> dict[str, Any]:
    """One frame as a dict with str keys; its arrays are read-only views of the frame."""
    hooks = _Hooks()
    try:
        message = msgpack.unpackb(
            frame,
            object_hook=hooks.map,
            list_hook=hooks.list,
            ext_hook=_refuse_extension,
            strict_map_key=True,
            max_map_len=_MAX_KEYS,
            max_array_len=_MAX_LIST,
        )
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise WireError(f"the frame is not msgpack ({_reason(error)})") from None
    if not isinstance(message, dict):
        raise WireError(f"a message is a map, this frame holds a {type(message).__name__}")
    if any(not isinstance(key, str) for key in message):
        raise WireError("the keys of a message are text, this frame has bytes")
    return message


class _Hooks:
    """Called for every list and map when it is complete, innermost first: counts the small values of a frame."""

    def __init__(self) -> None:
        self._values = 0

    def _count(self, size: int) -> None:
        self._values += size + 1
        if self._values > _MAX_VALUES:
            raise WireError(f"the frame holds more than {_MAX_VALUES:,} values outside arrays; send numpy arrays")

    def list(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def map(self, values: dict[Any, Any]) -> Any:
        self._count(len(values))
        if b"__ndarray__" in values:
            return _array(values)
        if b"__npgeneric__" in values:
            return _scalar(values)
        return values


def _array(values: Mapping[Any, Any]) -> np.ndarray[Any, np.dtype[Any]]:
    data, dtype, shape = values.get(b"data"), _dtype(values), values.get(b"shape")
    if not isinstance(data, bytes):
        raise WireError("an array in the frame has no data")
    if not isinstance(shape, list | tuple) or len(shape) > _MAX_DIMS:
        raise WireError(f"an array in the frame has no shape of at most {_MAX_DIMS} dimensions")
    most = max(len(data), 2**16)  # an empty array has sizes too
    if any(type(size) is not int or not 0 <= size <= most for size in shape):
        raise WireError(f"an array in the frame has shape {_short(shape)} but only {len(data)} bytes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array in the frame has shape {_short(shape)} of {dtype} but {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _scalar(values: Mapping[Any, Any]) -> Any:
    value, dtype = values.get(b"data"), _dtype(values)
    if not isinstance(value, bool | int | float):
        raise WireError("a numpy scalar in the frame holds no number")
    try:
        return dtype.type(value)
    except (OverflowError, ValueError):
        raise WireError(f"a numpy scalar in the frame does not fit {dtype}") from None


def _dtype(values: Mapping[Any, Any]) -> np.dtype[Any]:
    name = values.get(b"dtype")
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise WireError(f"an array in the frame has dtype {_short(name)}; send bool, integers or floats")
    return np.dtype(name)


def _pack_numpy(value: object) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        if isinstance(value, np.ndarray):
            return {
                b"__ndarray__": True,
                b"data": value.tobytes(),
                b"dtype": value.dtype.str,
                b"shape": value.shape,
            }
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    kind = value.dtype if isinstance(value, np.ndarray | np.generic) else type(value).__name__
    raise WireError(f"a message holds numbers, text and arrays of them, not {kind}")


def _refuse_extension(code: int, data: bytes) -> Any:
    raise WireError(f"the frame holds msgpack extension {code}; send numbers, text, arrays, lists and maps")


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words[:80]


def _short(value: object) -> str:
    return repr(value)[:60]
