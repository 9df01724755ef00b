"""The wire format, one for robot and server: round trips and hostile frames."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from prism_client import wire

from prism.server.sessions import Reader, Request, RequestError
from research.server import damaged_frame
from tests.policy_fakes import VECTORS

DTYPES = st.sampled_from([np.dtype(name) for name in ("?", "u1", "<i4", ">i2", "<f4", "<f8", ">f4", "<f2", "<u8")])
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(ARRAYS)
def test_arrays_survive(array: np.ndarray) -> None:
    back = wire.unpack(wire.pack({"a": array}))["a"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert not back.flags.writeable or back.size == 0


def test_scalars_text_and_nesting_survive() -> None:
    message = {"a": np.float32(1.5), "b": "text", "c": [1, 2.5, None, True], "d": {"e": np.int64(-3)}, "f": b"x"}
    assert wire.unpack(wire.pack(message)) == message
    for value in (np.array([1j]), np.array(["x"]), np.array([object()]), object(), {1, 2}):
        with pytest.raises(wire.WireError):
            wire.pack({"a": value})


def array_map(**changes: object) -> dict[bytes, object]:
    good = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    return {**good, **{key.encode(): value for key, value in changes.items()}}


HOSTILE = {
    "object dtype": array_map(dtype="|O"),
    "complex": array_map(dtype="<c8", shape=[1]),
    "dates": array_map(dtype="<M8[s]", shape=[1]),
    "a dtype that is a program": array_map(dtype="i4,(1000000,)f8"),
    "no dtype": array_map(dtype=None),
    "negative": array_map(shape=[-2]),
    "overflow": array_map(shape=[2**62, 2**62, 4]),
    "zero times huge": array_map(shape=[0, 2**62], data=b""),
    "too short": array_map(shape=[3]),
    "not numbers": array_map(shape=["2"]),
    "many dimensions": array_map(shape=[1] * 40),
    "text as data": array_map(data="12345678"),
    "scalar text": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"},
    "scalar too large": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused(name: str) -> None:
    with pytest.raises(wire.WireError) as error:
        wire.unpack(msgpack.packb({"a": HOSTILE[name]}))
    assert len(str(error.value)) < 200


def test_frames_cost_memory_in_proportion_to_their_bytes() -> None:
    frames = [
        b"\xdc\x10\x00" * 1000,  # lists of 4,096, each the first of the one around it
        b"\xdd\x00\x01\x86\xa0" * 1000,
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb([[1] * 4000] * 2000),
        msgpack.packb({"a": {str(i): i for i in range(5000)}}),
        b"\x91" * 500_000,
    ]
    for frame in frames:
        tracemalloc.start()
        with pytest.raises(wire.WireError):
            wire.unpack(frame)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64e6 + 4 * len(frame)


def test_thousands_of_damaged_frames_are_refused_or_understood() -> None:
    """In-process, so quick: nothing but a request or one of the two errors ever comes out."""
    rng = np.random.default_rng(0)
    sensors = [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype.name} for s in VECTORS]
    reader = Reader(VECTORS, 2)
    understood = 0
    for _ in range(1500):
        frame = damaged_frame(sensors, rng)
        if isinstance(frame, str):
            continue
        try:
            assert isinstance(reader.read(wire.unpack(frame)), Request)
            understood += 1
        except (wire.WireError, RequestError):
            continue
    assert 0 < understood < 750


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(frame: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.unpack(frame)
