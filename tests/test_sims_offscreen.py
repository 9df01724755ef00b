"""Pictures off the screen: what lies outside of one is not drawn, and nobody can tell."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")

import mujoco
from prism_sims import offscreen
from prism_sims.offscreen import OffscreenRenderer, View

if offscreen.backend() is None:
    pytest.skip(offscreen.rendering_hint() or "", allow_module_level=True)

CAMERAS = ("narrow", "wide", View((0.0, 0.0, 0.0), 1.5, 30.0, -20.0))


def scene() -> tuple[Any, Any]:
    """A floor and 60 boxes, spheres and long capsules all round two cameras, some of them across an edge."""
    rng = np.random.default_rng(0)
    shapes = [("box", "0.2 0.1 0.3"), ("sphere", "0.15"), ("capsule", "0.03 0.6")]
    geoms = []
    for at in range(60):
        kind, size = shapes[at % 3]
        place, turn, colour = rng.uniform(-2, 2, 3), rng.uniform(-90, 90, 3), rng.uniform(0.2, 1, 3)
        words = [" ".join(f"{number:.3f}" for number in part) for part in (place, turn, colour)]
        geoms.append(f'<geom type="{kind}" size="{size}" pos="{words[0]}" euler="{words[1]}" rgba="{words[2]} 1"/>')
    model = mujoco.MjModel.from_xml_string(
        f"""<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="0 0 1" pos="0 0 -2"/>{"".join(geoms)}
        <camera name="narrow" pos="0.5 0 0.2" euler="80 0 40" fovy="40"/><camera name="wide" pos="0 0.3 0" fovy="90"/>
        </worldbody></mujoco>"""
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


@pytest.mark.parametrize("size", [(48, 96), (96, 48)])
def test_a_picture_without_what_lies_outside_is_the_same(size: tuple[int, int], monkeypatch: Any) -> None:
    model, data = scene()
    groups = model.geom_group.copy()
    renderer = OffscreenRenderer(model, *size, "wide")
    drawn = [renderer.render_depth(data, camera) for camera in CAMERAS]
    assert np.array_equal(model.geom_group, groups), "the model is as it was"
    left_out = [int(renderer._outside(data, renderer._camera(camera)).sum()) for camera in CAMERAS]
    assert min(left_out) > 5, "something is left out at all"
    monkeypatch.setattr(OffscreenRenderer, "_outside", lambda self, data, camera: np.zeros(self._model.ngeom, bool))
    for camera, (picture, depth) in zip(CAMERAS, drawn, strict=True):
        whole, whole_depth = renderer.render_depth(data, camera)
        assert picture.std() > 1, "a picture of something"
        assert np.array_equal(picture, whole)
        assert np.array_equal(depth, whole_depth)
    renderer.close()


def test_a_renderer_that_nobody_closed_ends_without_a_word() -> None:
    program = """
import mujoco
from prism_sims.offscreen import OffscreenRenderer, View
model = mujoco.MjModel.from_xml_string("<mujoco/>")
kept = OffscreenRenderer(model, 8, 8, View((0.0, 0.0, 0.0), 1.0, 0.0, 0.0))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
