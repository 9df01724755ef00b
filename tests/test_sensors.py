"""Sensor specs: what they refuse, and that they survive JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from prism.errors import PrismError
from prism.io.plugins import Table
from prism.sensors import Kind, SensorSpec, decode_text, encode_text

SPECS = (
    SensorSpec("proprio", "vector", (15,), limits=(-4.0, 4.0)),
    SensorSpec("rgb", "rgb", (200, 200, 3), 30.0, crop=(180, 180), resize=(84, 84), random_shift=4, max_repeats=5),
    SensorSpec("depth", "depth", (84, 84), clip=(0.1, 2.5), max_age=0.2),
    SensorSpec("tactile", "tactile", (160, 120, 6)),
    SensorSpec("audio", "audio", (533,), sample_rate=16_000),
    SensorSpec("text", "text", (64,)),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_json_round_trip(spec: SensorSpec) -> None:
    assert SensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_specs_from_before_a_key_existed_are_read() -> None:
    data = SPECS[1].to_json()
    for key in ("crop", "limits", "max_repeats", "max_age"):
        data.pop(key)
    assert SensorSpec.from_json(data).crop is None
    with pytest.raises(PrismError, match="newer version"):
        SensorSpec.from_json({**data, "smell": 1})


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "message"),
    [
        ("rgb", (8, 8, 3), {"crop": (9, 8)}, "larger than the image"),
        ("rgb", (8, 8, 3), {"resize": (0, 8)}, "resize is"),
        ("rgb", (8, 8, 3), {"random_shift": -1}, "random_shift"),
        ("vector", (3,), {"crop": (1, 1)}, "for images"),
        ("vector", (3,), {"limits": (1.0, 1.0)}, "limits"),
        ("vector", (3,), {"max_repeats": -1}, "max_repeats"),
        ("vector", (3,), {"max_age": float("nan")}, "max_age"),
        ("depth", (8, 8), {"clip": (2.0, 1.0)}, "clip"),
        ("depth", (8, 8, 1), {}, "a depth image has shape"),
        ("rgb", (8, 8, 4), {}, r"an RGB image has shape \(H, W, 3\)"),
        ("audio", (8,), {}, "sample_rate"),
    ],
)
def test_impossible_specs_name_the_sensor_and_the_key(
    kind: Any, shape: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrismError, match=f"sensor 'it'.*{message}"):
        SensorSpec("it", kind, shape, **changes)


def test_a_number_in_the_shape_of_a_kind_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = Table("prism.sensors", "kind of sensor", {"imu": Kind("a burst of an IMU", ("S", "6"))})
    monkeypatch.setattr("prism.sensors.KINDS", kinds)
    assert SensorSpec("it", "imu", (10, 6)).shape == (10, 6)
    with pytest.raises(PrismError, match=r"a burst of an IMU has shape \(S, 6\), not \(10, 5\)"):
        SensorSpec("it", "imu", (10, 5))


def test_picture_size_is_what_the_network_sees() -> None:
    assert SPECS[1].picture_size == (84, 84)
    assert SensorSpec("a", "rgb", (20, 30, 3), crop=(10, 12)).picture_size == (10, 12)
    assert SPECS[2].picture_size == (84, 84)


def test_text_round_trip() -> None:
    assert decode_text(encode_text("häng den Becher auf", 64)) == "häng den Becher auf"
    assert encode_text("", 4).tolist() == [0, 0, 0, 0]
    with pytest.raises(PrismError, match="does not fit"):
        encode_text("too long", 4)
    assert encode_text("ab", 3).dtype == np.uint8
