"""What MetaWorld's cameras show: colour and depth, several cameras from one off-screen renderer.

MetaWorld draws its goal as a small sphere: in reach or pick-place there is no other sign of it, so it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.sensors import SensorSpec
from prism.sims import offscreen
from prism.sims.base import Array

SIZE = 84
SEEN = 64  # what a policy sees of it: two thirds of the computation, and an object is still several pixels
MARGIN = 4  # pixels cut off at each side
SHIFT = 1  # training: moved at random by so many of them. The camera stands still, and 4 would be 5 cm of the table
REACH = (0.02, 3.0)  # metres of depth that mean something: the hand's own fingers, the far wall of the table


@dataclass(frozen=True)
class Camera:
    """A camera of the model; moved to `position` where that is given; `hanging`: MetaWorld mounts it upside down."""

    name: str
    position: tuple[float, float, float] | None = None
    hanging: bool = False


CAMERAS = {
    "wrist": Camera("gripperPOV"),
    # docs/simulators.md compares it with MetaWorld's own corner views, in which an object is a few pixels
    "static": Camera("corner2", position=(0.6, 0.295, 0.8), hanging=True),
}


def camera_specs(depth: bool, size: int = SIZE) -> tuple[SensorSpec, ...]:
    """rgb_wrist and rgb_static; with `depth` also depth_wrist and depth_static."""
    look: dict[str, Any] = {"crop": (size - 2 * MARGIN, size - 2 * MARGIN), "random_shift": SHIFT}
    if size > SEEN:
        look["resize"] = (SEEN, SEEN)
    specs = [SensorSpec(f"rgb_{n}", "rgb", (size, size, 3), **look) for n in CAMERAS]
    if depth:
        specs += [SensorSpec(f"depth_{n}", "depth", (size, size), clip=REACH, **look) for n in CAMERAS]
    return tuple(specs)


class Cameras:
    """The image sensors among `sensors`, taken from a MuJoCo model and its data."""

    def __init__(self, model: Any, sensors: Sequence[SensorSpec], cameras: dict[str, Camera] = CAMERAS) -> None:
        wanted = [sensor.name for sensor in sensors if sensor.is_image]
        size = next(sensor.shape for sensor in sensors if sensor.is_image)
        self._shots = [
            (name, camera, f"rgb_{name}" in wanted, f"depth_{name}" in wanted)
            for name, camera in cameras.items()
            if f"rgb_{name}" in wanted or f"depth_{name}" in wanted
        ]
        for _, camera, _, _ in self._shots:
            if camera.position is not None:
                model.camera(camera.name).pos[:] = camera.position
        self._renderer = offscreen.OffscreenRenderer(model, size[0], size[1], self._shots[0][1].name)

    def observe(self, data: Any) -> dict[str, Array]:
        shown: dict[str, Array] = {}
        for name, camera, colour, depth in self._shots:
            if depth:
                picture, metres = self._renderer.render_depth(data, camera.name)
                shown[f"depth_{name}"] = _upright(metres, camera)
            else:
                picture = self._renderer.render(data, camera.name)
            if colour:
                shown[f"rgb_{name}"] = _upright(picture, camera)
        return shown

    def close(self) -> None:
        self._renderer.close()


def _upright(picture: NDArray[Any], camera: Camera) -> Array:
    return np.ascontiguousarray(picture[::-1, ::-1]) if camera.hanging else picture
