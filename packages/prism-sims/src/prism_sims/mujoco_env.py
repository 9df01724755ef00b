"""What the tasks of MuJoCo share: pictures; and those whose model is ours, the tabletop and the Go2 with an arm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.sims.environment import Array, Simulation

from prism_sims import offscreen

Vector = NDArray[np.float64]


class DrawnEnv(Simulation):
    """Draws off the screen, where this machine can."""

    _cameras: offscreen.Cameras | None = None  # for the policy
    _renderer: offscreen.OffscreenRenderer | None = None  # for people

    @abstractmethod
    def _make_renderer(self) -> offscreen.OffscreenRenderer: ...
    @abstractmethod
    def _drawn(self) -> tuple[Any, offscreen.View | None]:
        """What is drawn for people: MuJoCo's data; from where, None: where the renderer looks."""

    def rendering_hint(self) -> str | None:
        return offscreen.rendering_hint()

    def render(self) -> NDArray[np.uint8] | None:
        if offscreen.backend() is None:
            return None
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer.render(*self._drawn())

    def close(self) -> None:
        for pictures in (self._cameras, self._renderer):
            if pictures is not None:
                pictures.close()
        self._cameras = self._renderer = None


class MujocoEnv(DrawnEnv):
    """A subclass makes `model` and `data`."""

    model: Any
    data: Any
    seen: dict[str, Array]  # the last observation, without pictures: all that an expert may look at

    def _geoms_under(self, body: int) -> list[int]:
        """Of a body and of what is fixed to it, with joints or without."""

        def is_under(one: int) -> bool:
            while one > 0 and one != body:
                one = self.model.body_parentid[one]
            return one == body

        return [geom for geom in range(self.model.ngeom) if is_under(self.model.geom_bodyid[geom])]

    def body(self, name: str) -> Vector:
        """Where it is in the world."""
        return np.array(self.data.xpos[self.model.body(name).id])

    def state(self) -> Vector:
        """Joint positions and velocities."""
        self._need_episode("state()")
        return np.concatenate([self.data.qpos, self.data.qvel])

    def _drawn(self) -> tuple[Any, offscreen.View | None]:
        return self.data, None


def rounded(values: Any) -> NDArray[np.float32]:
    """To 0.1 mm: what stands still is exactly constant; -0.0 -> 0.0."""
    return np.round(np.asarray(values), 4).astype(np.float32) + np.float32(0)
