"""Sec. 3: what a sensor is. A spec travels with the dataset and with the checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError
from prism.io.plugins import Table

SensorKind = str  # a name in KINDS


@dataclass(frozen=True)
class Kind:
    """A row of the table of kinds of sensors: what one time step is, and for other packages' kinds what encodes it."""

    what: str
    shape: tuple[str, ...]  # of one time step: a word for each size, or the number if it is fixed
    dtype: str = "float32"
    is_image: bool = False
    encoder: Callable[[SensorSpec, Any], Any] | None = None  # (spec, normalizer) -> encoders.kinds.SensorEncoder


# A kind of another package is an entry point of the group prism.sensors (examples/my_sensor).
KINDS: Table[Kind] = Table(
    "prism.sensors",
    "kind of sensor",
    {
        "vector": Kind("a vector", ("D",)),
        "rgb": Kind("an RGB image", ("H", "W", "3"), "uint8", is_image=True),
        "depth": Kind("a depth image", ("H", "W"), is_image=True),
        "tactile": Kind("a tactile image", ("H", "W", "C"), "uint8", is_image=True),
        "audio": Kind("audio", ("samples",)),
        "text": Kind("text", ("bytes",), "uint8"),
    },
)


@dataclass(frozen=True)
class SensorSpec:
    """One sensor: name, kind, the shape of one time step as stored, and its preprocessing.

    One time step as a numpy array is `shape`, `dtype`; in Observation.streams it is a torch tensor of the
    same type, (B, To, *shape). Readers convert whatever a dataset holds to exactly this:

    vector   (D,) float32, in the sensor's units: proprioception, object state, force/torque
    rgb      (H, W, 3) uint8
    depth    (H, W) float32, metres; 0 where the camera measured nothing (never NaN)
    tactile  (H, W, C) uint8, the image of an optical tactile sensor, any number of channels (two DIGITs: 6);
             a tactile sensor that gives forces is a vector
    audio    (S,) float32 in [-1, 1]: the S = round(sample_rate / control rate) samples that end at this step
    text     (L,) uint8: UTF-8, zeros behind its end (encode_text, decode_text); the same at every step of an
             instruction
    """

    name: str
    kind: SensorKind
    shape: tuple[int, ...]
    fps: float = 0.0  # 0: the rate of the dataset it belongs to
    crop: tuple[int, int] | None = None  # images: this (height, width) out of the middle, first of all
    resize: tuple[int, int] | None = None  # images: what is left, to (height, width)
    random_shift: int = 0  # images, training only: moved by up to this many stored pixels; borders repeat
    sample_rate: int = 0  # audio: samples a second
    clip: tuple[float, float] | None = None  # depth: nearest and farthest valid metres
    # What a healthy sensor shows at run time (prism.inference.health); beyond it the sensor counts as absent.
    limits: tuple[float, float] | None = None  # of every value; of an image's mean; depth: mean of what was measured
    max_repeats: int = 0  # identical frames in a row after which it counts as frozen; 0: no check
    max_age: float = 0.0  # seconds, if the robot reports the age of a reading; 0: three periods of its rate
    names: tuple[str, ...] = ()  # vectors: of the dimensions, where the dataset has them
    # rgb, of policies from before `seen`: mean of the pictures that it was trained on
    colour: tuple[float, float, float] | None = field(default=None, compare=False)
    history: int = 0  # vectors, touch, sound: readings in a time step (prism.data.history); 0: as the training decides
    # What it showed in the training data (prism.data.statistics); a robot's first readings are compared with it, and
    # without `limits` a reading far beyond it is not believed. None: a policy from before it was kept.
    seen: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PrismError(f"sensor '{self.name}': {KINDS.unknown(self.kind)}")
        if not self.name:
            raise PrismError("a sensor needs a name")
        if any(n <= 0 for n in self.shape):
            raise PrismError(f"sensor '{self.name}': shape {self.shape} has an empty dimension")
        row = KINDS[self.kind]
        sizes = [str(size) for size in row.shape]
        fixed = [(int(size), n) for size, n in zip(sizes, self.shape, strict=False) if size.isdigit()]
        if len(self.shape) != len(sizes) or any(size != n for size, n in fixed):
            needed = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
            raise PrismError(f"sensor '{self.name}': {row.what} has shape {needed}, not {self.shape}")
        if (self.kind == "audio") != (self.sample_rate > 0):
            raise PrismError(
                f"sensor '{self.name}': audio needs a sample_rate, and nothing else has one; it is {self.sample_rate}"
            )
        if self.clip is not None and not (
            self.kind == "depth" and len(self.clip) == 2 and 0 <= self.clip[0] < self.clip[1] < math.inf
        ):
            raise PrismError(f"sensor '{self.name}': clip is for depth, (nearest, farthest) metres, not {self.clip}")
        self._check_picture()
        if self.limits is not None and not (len(self.limits) == 2 and self.limits[0] < self.limits[1]):
            raise PrismError(f"sensor '{self.name}': limits are (lowest, highest), not {self.limits}")
        if self.names and (self.kind != "vector" or len(self.names) != self.shape[0]):
            raise PrismError(f"sensor '{self.name}': names are of a vector, one a dimension, not {len(self.names)}")
        for key, value in (("fps", self.fps), ("max_repeats", self.max_repeats), ("max_age", self.max_age)):
            if not 0 <= value < math.inf:
                raise PrismError(f"sensor '{self.name}': {key} is {value}; it must be 0 or more")
        if not 0 <= self.history <= 1000 or (self.history > 1 and self.kind not in ("vector", "tactile", "audio")):
            raise PrismError(
                f"sensor '{self.name}': history is {self.history}; it is for vectors, touch and sound, up to 1000 steps"
            )

    def _check_picture(self) -> None:
        if not self.is_image and (self.crop or self.resize or self.random_shift):
            raise PrismError(f"sensor '{self.name}': crop, resize and random_shift are for images, not {self.kind}")
        if self.random_shift < 0:
            raise PrismError(f"sensor '{self.name}': random_shift is {self.random_shift}; it must be 0 or more")
        for key, size in (("crop", self.crop), ("resize", self.resize)):
            if size is not None and (len(size) != 2 or min(size) < 1 or max(size) > 8192):
                raise PrismError(f"sensor '{self.name}': {key} is (height, width), 1 to 8192 pixels, not {size}")
        if self.crop is not None and (self.crop[0] > self.shape[0] or self.crop[1] > self.shape[1]):
            raise PrismError(f"sensor '{self.name}': crop {self.crop} is larger than the image, {self.shape[:2]}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of one time step: pixels and text are bytes, everything else is float32."""
        return np.dtype(KINDS[self.kind].dtype)

    @property
    def is_image(self) -> bool:
        return KINDS[self.kind].is_image

    @property
    def steps(self) -> int:
        """Readings in a time step."""
        return max(self.history, 1)

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Shape of a time step as a policy takes it: `shape`, or `history` readings of it."""
        return (self.history, *self.shape) if self.history > 1 else self.shape

    @property
    def picture_size(self) -> tuple[int, int]:
        """(height, width) of images in the network."""
        return self.resize or self.crop or (self.shape[0], self.shape[1])

    def describe(self) -> str:
        """Preprocessing and health in words; empty if there is none."""
        parts = (
            self.crop and f"cut to {self.crop[0]} x {self.crop[1]}",
            self.random_shift and f"moved by up to {self.random_shift} pixels in training",
            self.resize and f"resized to {self.resize[0]} x {self.resize[1]}",
            self.clip and f"clipped to {self.clip[0]:g} .. {self.clip[1]:g} m",
            self.limits and f"believed from {self.limits[0]:g} to {self.limits[1]:g}",
            self.max_repeats and f"frozen after {self.max_repeats} equal readings",
            self.max_age and f"late after {self.max_age:g} s",
            self.history > 1 and f"{self.history} readings in a time step",
        )
        return ", ".join(str(part) for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        new = ("names", "history", "colour", "seen")  # not in the files of earlier versions
        return {key: value for key, value in dataclasses.asdict(self).items() if value or key not in new}

    @staticmethod
    def from_json(data: dict[str, Any]) -> SensorSpec:
        known = {field.name for field in dataclasses.fields(SensorSpec)}
        if unknown := set(data) - known:
            raise PrismError(f"sensor spec has unknown keys {sorted(unknown)}: written by a newer version of prism?")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return SensorSpec(**values)


def encode_text(text: str, size: int) -> NDArray[np.uint8]:
    """One time step of a text sensor of shape (size,): UTF-8, padded with zeros."""
    content = text.encode()
    if len(content) > size or "\0" in text:
        raise PrismError(
            f"text of {len(content)} bytes does not fit the {size} of its sensor (say less), or holds NUL: {text!r:.50}"
        )
    return np.frombuffer(content.ljust(size, b"\0"), np.uint8)


def decode_text(step: NDArray[np.generic]) -> str:
    """Inverse of `encode_text`; bytes that are not UTF-8 become replacement characters."""
    return step.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class ActionSpec:
    """What is known about the actions of a dataset besides their number; stored with the policy."""

    names: tuple[str, ...] = ()  # one a dimension; (): unknown
    quaternions: tuple[int, ...] = ()  # first dimensions of unit quaternions: q and -q are one rotation
    robot: str = ""  # the robot's type
    kind: ActionKind | None = None  # of the motion; None: unknown
    units: tuple[str, ...] = ()  # one a dimension: m, mm, rad, deg, ...; "" or (): unknown. Of a velocity: a second
    scale: tuple[float, ...] = ()  # one a dimension: size of an action of 1 in its unit; (): 1

    @property
    def grippers(self) -> tuple[int, ...]:
        """Entries that are no motion, by their names."""
        return tuple(entry for entry, name in enumerate(self.names) if "gripper" in name.lower())

    def still(self, action_dim: int) -> list[int]:
        """Dimensions that have no unit of motion: grippers and quaternions."""
        turned = {first + i for first in self.quaternions for i in range(4)}
        return [entry for entry in range(action_dim) if entry in turned or entry in self.grippers]

    def in_words(self) -> str:
        """Units and scale; empty if unknown."""
        units = " ".join(unit or "-" for unit in self.units)
        scale = " ".join(f"{scale:g}" for scale in self.scale)
        return ", ".join([f"units {units}"] * bool(units) + [f"an action of 1 is {scale} of them"] * bool(scale))

    def check(self, action_dim: int, where: str) -> None:
        """PrismError if it does not fit actions with `action_dim` dimensions."""
        if self.names and len(self.names) != action_dim:
            raise PrismError(f"{where}: {len(self.names)} names for {action_dim} action dimensions; give one each")
        for key, values in (("units", self.units), ("scale", self.scale)):
            if values and len(values) != action_dim:
                raise PrismError(f"{where}: action.{key} has {len(values)} entries for {action_dim} action dimensions")
        if not all(0 < scale < math.inf for scale in self.scale):
            raise PrismError(f"{where}: action.scale is {self.scale}; use numbers above 0")
        ends = [0, *(first + 4 for first in self.quaternions)]
        if any(first < end for first, end in zip(self.quaternions, ends, strict=False)) or ends[-1] > action_dim:
            raise PrismError(f"{where}: quaternions at {self.quaternions} do not fit {action_dim} action dimensions")

    def to_json(self) -> dict[str, Any]:
        """The known fields only."""
        known = {"names": list(self.names), "quaternions": list(self.quaternions), "robot": self.robot}
        known |= {"kind": str(self.kind or ""), "units": list(self.units), "scale": list(self.scale)}
        return {key: value for key, value in known.items() if value}

    @staticmethod
    def from_json(data: object, where: str) -> ActionSpec:
        known = [entry.name for entry in fields(ActionSpec)]
        if not isinstance(data, dict) or set(data) - set(known):
            raise PrismError(f"{where}: 'action' may only hold {', '.join(known)}; fix the file")
        names, first, robot = data.get("names", []), data.get("quaternions", []), data.get("robot", "")
        lists = isinstance(names, list) and isinstance(first, list) and isinstance(robot, str)
        if not lists or not all(isinstance(n, str) for n in names) or not all(type(q) is int for q in first):
            raise PrismError(f"{where}: 'action' needs lists of texts and integers, and a text; fix the file")
        units, scale = data.get("units", []), data.get("scale", [])
        numbers = isinstance(scale, list) and all(type(s) in (int, float) for s in scale)
        if not isinstance(units, list) or not all(isinstance(u, str) for u in units) or not numbers:
            raise PrismError(f"{where}: 'action' needs lists of texts (units) and numbers (scale); fix the file")
        kind = data.get("kind") or None
        if kind is not None and ActionKind.parse(kind) is None:
            raise PrismError(f"{where}: 'action.kind' is {kind!r}, not one of {ActionKind.words()}; fix the file")
        return ActionSpec(
            tuple(names), tuple(first), robot, ActionKind.parse(kind), tuple(units), tuple(map(float, scale))
        )


def action_spec_of(source: object) -> ActionSpec:
    """The ActionSpec of a dataset (an EpisodeSource); empty if nothing is known."""
    found = getattr(source, "action_spec", None)
    return found if isinstance(found, ActionSpec) else ActionSpec()
