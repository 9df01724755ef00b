"""Sec. 3: what a sensor is. A spec travels with the dataset and with the checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prism.errors import PrismError

SensorKind = Literal["vector", "rgb", "depth", "tactile", "audio", "text"]


@dataclass(frozen=True)
class SensorSpec:
    """One sensor: name, kind, the shape of one time step as stored, and its preprocessing.

    vector  (D,) float32: proprioception, object state, force/torque
    rgb     (H, W, 3) uint8
    """

    name: str
    kind: SensorKind
    shape: tuple[int, ...]
    fps: float = 0.0  # 0: the rate of the dataset it belongs to
    resize: tuple[int, int] | None = None  # images: to (height, width), before anything else
    random_shift: int = 0  # images, training only: pad by this many pixels and crop back

    def __post_init__(self) -> None:
        if self.kind not in get_args(SensorKind):
            raise PrismError(
                f"sensor '{self.name}': unknown kind '{self.kind}'; use one of {', '.join(get_args(SensorKind))}"
            )
        if not self.name:
            raise PrismError("a sensor needs a name")
        if any(n <= 0 for n in self.shape):
            raise PrismError(f"sensor '{self.name}': shape {self.shape} has an empty dimension")
        if self.kind == "vector" and len(self.shape) != 1:
            raise PrismError(f"sensor '{self.name}': a vector has shape (D,), not {self.shape}")
        if self.kind == "rgb" and (len(self.shape) != 3 or self.shape[2] != 3):
            raise PrismError(f"sensor '{self.name}': an RGB image has shape (H, W, 3), not {self.shape}")

    @property
    def is_image(self) -> bool:
        return self.kind in ("rgb", "depth", "tactile")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> SensorSpec:
        known = {field.name for field in dataclasses.fields(SensorSpec)}
        if unknown := set(data) - known:
            raise PrismError(f"sensor spec has unknown keys {sorted(unknown)}: written by a newer version of prism?")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return SensorSpec(**values)
