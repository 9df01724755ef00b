"""ROS 2 messages as numbers: the few types that robots' sensors and commands come in."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism.data.episodes import Array

_RATES = np.array([8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000])
_RGB = {"rgb8": (3, (0, 1, 2)), "bgr8": (3, (2, 1, 0)), "rgba8": (4, (0, 1, 2)), "bgra8": (4, (2, 1, 0)),
        "8UC3": (3, (2, 1, 0)), "mono8": (1, (0, 0, 0)), "8UC1": (1, (0, 0, 0))}  # fmt: skip
_DEPTH: dict[str, np.dtype[Any]] = {"16UC1": np.dtype("<u2"), "mono16": np.dtype("<u2"), "32FC1": np.dtype("<f4")}


class NotReadError(ValueError):
    """Not damaged, but of a type, an encoding or a rate that is not read here."""


@dataclass(frozen=True)
class Field:
    """The sample in a message, and the positions of its quaternions."""

    name: str  # "" for the message as a whole, else the part of the key behind the last dot
    get: Callable[[Any], Array]
    quaternions: tuple[int, ...] = ()
    skip: str = ""  # why a guess leaves it out


def _numbers(*parts: Any) -> Array:
    return np.concatenate([np.atleast_1d(np.asarray(part, np.float64)).reshape(-1) for part in parts])


def _xyz(v: Any) -> Array:
    return np.array([v.x, v.y, v.z], np.float64)


def _xyzw(q: Any) -> Array:
    return np.array([q.x, q.y, q.z, q.w], np.float64)


def _pose(p: Any) -> Array:
    return _numbers(_xyz(p.position), _xyzw(p.orientation))


def _whole(get: Callable[[Any], Array], quaternions: tuple[int, ...] = ()) -> tuple[Field, ...]:
    return (Field("", get, quaternions),)


def _data(message: Any) -> Array:
    return _numbers(message.data)


FIELDS: dict[str, tuple[Field, ...]] = {
    "sensor_msgs/msg/JointState": (
        Field("position", lambda m: _numbers(m.position)),
        Field("velocity", lambda m: _numbers(m.velocity), skip="joint velocities: map them if you want them"),
        Field("effort", lambda m: _numbers(m.effort), skip="joint efforts: map them if you want them"),
    ),
    "geometry_msgs/msg/Pose": _whole(_pose, (3,)),
    "geometry_msgs/msg/PoseStamped": _whole(lambda m: _pose(m.pose), (3,)),
    "geometry_msgs/msg/PoseWithCovariance": _whole(lambda m: _pose(m.pose), (3,)),
    "geometry_msgs/msg/PoseWithCovarianceStamped": _whole(lambda m: _pose(m.pose.pose), (3,)),
    "geometry_msgs/msg/Point": _whole(_xyz),
    "geometry_msgs/msg/PointStamped": _whole(lambda m: _xyz(m.point)),
    "geometry_msgs/msg/Vector3": _whole(_xyz),
    "geometry_msgs/msg/Vector3Stamped": _whole(lambda m: _xyz(m.vector)),
    "geometry_msgs/msg/Quaternion": _whole(_xyzw, (0,)),
    "geometry_msgs/msg/QuaternionStamped": _whole(lambda m: _xyzw(m.quaternion), (0,)),
    "geometry_msgs/msg/Twist": _whole(lambda m: _numbers(_xyz(m.linear), _xyz(m.angular))),
    "geometry_msgs/msg/TwistStamped": _whole(lambda m: _numbers(_xyz(m.twist.linear), _xyz(m.twist.angular))),
    "geometry_msgs/msg/Wrench": _whole(lambda m: _numbers(_xyz(m.force), _xyz(m.torque))),
    "geometry_msgs/msg/WrenchStamped": _whole(lambda m: _numbers(_xyz(m.wrench.force), _xyz(m.wrench.torque))),
    "sensor_msgs/msg/Imu": _whole(
        lambda m: _numbers(_xyzw(m.orientation), _xyz(m.angular_velocity), _xyz(m.linear_acceleration)), (0,)
    ),
    **{
        f"std_msgs/msg/{name}": _whole(_data)
        for kind in ("Float32", "Float64", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
        for name in (kind, f"{kind}MultiArray")
    },
    "std_msgs/msg/Bool": _whole(_data),
}
IMAGES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
TEXT = "std_msgs/msg/String"


def is_read(msgtype: str) -> bool:
    return msgtype in FIELDS or msgtype in IMAGES or msgtype == TEXT or is_audio(msgtype)


def is_audio(msgtype: str) -> bool:
    return msgtype.endswith(("/AudioData", "/AudioDataStamped"))


def audio_samples(message: Any) -> Array:
    """16-bit little-endian samples, as the audio capture node sends them."""
    content = np.asarray(message.audio.data if hasattr(message, "audio") else message.data, np.uint8).tobytes()
    return np.frombuffer(content[: len(content) // 2 * 2], "<i2")


def audio_rate(samples: int, seconds: float) -> int:
    """The usual sample rate nearest to what was recorded, which must be near it: messages do not say theirs."""
    measured = max(samples / max(seconds, 1e-3), 1.0)
    rate = int(_RATES[np.argmin(np.abs(np.log(_RATES / measured)))])
    if not 0.9 <= measured / rate <= 1.1:
        raise NotReadError(f"{measured:.0f} values a second is an unusual sample rate for one channel (stereo? gaps?)")
    return rate


def decode_image(message: Any) -> Array:
    """(H, W, 3) uint8, or (H, W) depth as stored (uint16 or float32). ValueError for what is no such image."""
    if hasattr(message, "encoding"):
        return _raw_image(message)
    from PIL import Image, UnidentifiedImageError

    content = np.asarray(message.data, np.uint8).tobytes()
    try:
        opened = Image.open(io.BytesIO(content), formats=("PNG", "JPEG"))
    except UnidentifiedImageError:  # compressedDepth among them: a PNG behind a header of its own
        raise NotReadError(f"the format '{message.format:.40}' is not read; known are PNG and JPEG") from None
    with opened as image:
        if image.width * image.height > 1 << 26:
            raise ValueError(f"an image of {image.width} x {image.height}")
        if image.mode.startswith("I"):
            return np.asarray(image).astype(np.uint16)
        return np.asarray(image.convert("RGB"))


def _raw_image(message: Any) -> Array:
    height, width, step = int(message.height), int(message.width), int(message.step)
    encoding, content = str(message.encoding), np.asarray(message.data, np.uint8)
    dtype: np.dtype[Any]
    if encoding in _DEPTH:
        dtype = _DEPTH[encoding].newbyteorder(">") if message.is_bigendian else _DEPTH[encoding]
        item = dtype.itemsize
    elif encoding in _RGB:
        dtype, item = np.dtype(np.uint8), _RGB[encoding][0]
    else:
        raise NotReadError(f"the encoding '{encoding:.20}' is not read; known are {', '.join((*_RGB, *_DEPTH))}")
    if not 0 < width * item <= step or len(content) != height * step or height <= 0:
        raise ValueError(f"{len(content)} bytes for {height} rows of {step}, {width} pixels of {item}")
    rows = np.ascontiguousarray(content.reshape(height, step)[:, : width * item])
    if encoding in _DEPTH:
        return rows.view(dtype).astype(dtype.newbyteorder("="))
    return np.ascontiguousarray(rows.reshape(height, width, item)[:, :, list(_RGB[encoding][1])])
