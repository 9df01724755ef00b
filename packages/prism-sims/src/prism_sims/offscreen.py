"""MuJoCo pictures without a display: which OpenGL back end works here, and a cheap renderer on top of it.

A broken GL driver can end the whole process, so each back end is tried in a child process, once, on first use.
Nothing here runs until somebody asks for a picture.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.sims.environment import Array

INSTALL_LINE = "apt-get install libosmesa6"
_BACKENDS = ("osmesa", "egl")  # software first: the same pixels on every machine
_OFF = ("disable", "disabled", "off", "false", "0")  # MuJoCo's own words
_PROBE_SECONDS = 60.0
_UNSEEN = 5  # a group of geoms that MuJoCo does not draw by default

_PROBE = """
import importlib, sys
import mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(16, 16)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), 100)
"""


def candidates() -> tuple[str, ...]:
    """The back ends worth trying: the user's MUJOCO_GL if it names one, else all of them."""
    wanted = os.environ.get("MUJOCO_GL", "").strip().lower()
    if wanted in _OFF:
        return ()
    return (wanted,) if wanted in _BACKENDS else _BACKENDS


def _works(backend: str) -> bool:
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": _PROBE_SECONDS}
    environment = {**os.environ, "MUJOCO_GL": "disable"}  # the probe names its own back end
    try:
        return not subprocess.run([sys.executable, "-c", _PROBE, backend], env=environment, **quiet).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def backend() -> str | None:
    """The first back end that draws on this machine, or None."""
    return next((name for name in candidates() if _works(name)), None)


def rendering_hint() -> str | None:
    """None where pictures of MuJoCo scenes work; otherwise the one line that makes them work."""
    if backend() is not None:
        return None
    if not candidates():
        return "pictures of MuJoCo scenes are switched off: unset MUJOCO_GL"
    return f"no pictures of MuJoCo scenes on this machine; to get them: {INSTALL_LINE}"


def require_backend(who: str) -> str:
    """The back end; PrismError with the remedy where there is none. `who` cannot do without pictures."""
    name = backend()
    if name is None:
        raise PrismError(f"{who} needs pictures: {rendering_hint()}")
    return name


@dataclass(frozen=True)
class View:
    """A free camera: the point it looks at, metres from it, degrees round it and above it (below 0: from above)."""

    lookat: tuple[float, float, float]
    distance: float
    azimuth: float
    elevation: float


class OffscreenRenderer:
    """Draws cameras, named or free, of a MuJoCo model at (height, width); quality settings chosen for speed.

    No multisampling, shadows, reflections or sky box: about ten times faster in software. The settings are made on
    the model before the GL context exists, because MuJoCo reads them only then. `hidden`: groups of geoms not drawn.
    Nor is what lies outside of the picture: a wrist camera does not see its arm, which is most of a robot's triangles.
    """

    def __init__(
        self, model: Any, height: int, width: int, camera: str | View, hidden: Collection[int] = ()
    ) -> None:  # camera: the default one
        import mujoco

        self._gl: Any = None
        name = backend()
        assert name is not None, "ask backend() first"
        model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
        model.vis.global_.offheight, model.vis.global_.offwidth = max(height, 1), max(width, 1)
        self._mujoco, self._model = mujoco, model
        self._gl = importlib.import_module(f"mujoco.{name}").GLContext(width, height)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        atexit.register(_close, weakref.ref(self))  # before MuJoCo's own, which ends the display
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        # 1 at the near plane, 0 at infinity: floats are dense near 0, so that far things keep their precision
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR.value
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_HAZE"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = False
        self._option = mujoco.MjvOption()
        for group in hidden:
            self._option.geomgroup[group] = 0
        self._cameras: dict[str | View, Any] = {}
        self._default = self._camera(camera)
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._pixels = np.empty((height, width, 3), dtype=np.uint8)
        self._depth = np.empty((height, width), dtype=np.float32)

    def _camera(self, camera: str | View) -> Any:
        if camera in self._cameras:
            return self._cameras[camera]
        mujoco = self._mujoco
        made = mujoco.MjvCamera()
        if isinstance(camera, View):
            made.type = mujoco.mjtCamera.mjCAMERA_FREE
            made.lookat[:] = camera.lookat
            made.distance, made.azimuth, made.elevation = camera.distance, camera.azimuth, camera.elevation
        else:
            made.type = mujoco.mjtCamera.mjCAMERA_FIXED
            made.fixedcamid = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
            assert made.fixedcamid >= 0, camera
        self._cameras[camera] = made
        return made

    def _draw(self, data: Any, camera: str | View | None, depth: NDArray[np.float32] | None) -> NDArray[np.uint8]:
        mujoco = self._mujoco
        self._gl.make_current()
        chosen = self._default if camera is None else self._camera(camera)
        groups = self._model.geom_group.copy()
        self._model.geom_group[self._outside(data, chosen)] = _UNSEEN
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, data, self._option, None, chosen, everything, self._scene)
        self._model.geom_group[:] = groups
        mujoco.mjr_render(self._rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, depth, self._rectangle, self._context)
        return self._pixels[::-1].copy()  # OpenGL's first row is the lowest

    def _outside(self, data: Any, camera: Any) -> NDArray[np.bool_]:
        """Geoms whose bounding sphere is behind the camera or beyond an edge of its picture: no pixel is theirs."""
        mujoco, model = self._mujoco, self._model
        mujoco.mjv_updateCamera(model, data, camera, self._scene)
        eye = mujoco.mjv_averageCamera(*self._scene.camera)  # of two eyes
        forward, up = np.array(eye.forward), np.array(eye.up)
        axes = np.stack([np.cross(forward, up), up, forward], axis=1)
        x, y, z = (np.asarray(data.geom_xpos) - np.array(eye.pos)).dot(axes).T
        high, near = eye.frustum_top, eye.frustum_near
        wide = eye.frustum_width or high * self._rectangle.width / self._rectangle.height
        beside = (np.abs(x) * near - z * wide) / np.hypot(near, wide)
        above = (np.abs(y) * near - z * high) / np.hypot(near, high)
        radius = np.asarray(model.geom_rbound)  # 0: a plane without end
        outside: NDArray[np.bool_] = (radius > 0) & (np.maximum(np.maximum(beside, above), -z) > radius)
        return outside

    def render(self, data: Any, camera: str | View | None = None) -> NDArray[np.uint8]:
        """(H, W, 3)"""
        return self._draw(data, camera, None)

    def render_depth(
        self, data: Any, camera: str | View | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """The picture and its depth in metres along the optical axis, (H, W, 3), (H, W); 0 where there is nothing.

        From the buffer's b, 1 near and 0 far:  z = near / (b + (1 - b) near / far). MuJoCo's near and far planes are
        multiples of the model's extent.
        """
        picture = self._draw(data, camera, self._depth)
        planes = self._model.vis.map
        near, far = (float(plane * self._model.stat.extent) for plane in (planes.znear, planes.zfar))
        buffer = self._depth[::-1].astype(np.float64)
        metres = near / (buffer + (1.0 - buffer) * (near / far))
        return picture, np.where(buffer > 0.0, metres, 0.0).astype(np.float32)

    def close(self) -> None:
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None

    def __del__(self) -> None:
        # Not left to MuJoCo's own clean-up: that would delete GL objects of whichever context is current then
        self.close()


def _close(renderer: weakref.ref[OffscreenRenderer]) -> None:
    if (there := renderer()) is not None:
        there.close()


class Cameras:
    """rgb_NAME, and with `depth` depth_NAME, of some cameras of a model, from one renderer."""

    def __init__(
        self,
        model: Any,
        size: tuple[int, int],
        cameras: Mapping[str, str],  # NAME -> MuJoCo's name
        depth: bool = False,
        upside_down: Collection[str] = (),  # NAMEs
        hidden: Collection[int] = (),
    ) -> None:
        self._cameras, self._has_depth, self._upside_down = cameras, depth, upside_down
        self._renderer = OffscreenRenderer(model, *size, next(iter(cameras.values())), hidden)

    def observe(self, data: Any) -> dict[str, Array]:
        shown: dict[str, Array] = {}
        for name, camera in self._cameras.items():
            if self._has_depth:
                shown[f"rgb_{name}"], shown[f"depth_{name}"] = self._renderer.render_depth(data, camera)
            else:
                shown[f"rgb_{name}"] = self._renderer.render(data, camera)
        for key in [key for key in shown if key.partition("_")[2] in self._upside_down]:
            shown[key] = np.ascontiguousarray(shown[key][::-1, ::-1])
        return shown

    def close(self) -> None:
        self._renderer.close()
