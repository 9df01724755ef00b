"""MetaWorld: the sensors make sense, the experts solve the tasks, pictures are optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld")

from prism_sims import offscreen
from prism_sims.metaworld import SPLITS, TASKS, MetaWorldEnv, MetaWorldExpert

from prism.errors import PrismError
from prism.sims.collect import collect


def test_splits_are_the_benchmarks() -> None:
    from metaworld.env_dict import ENV_CLS_MAP

    assert [len(SPLITS[name]) for name in ("easy", "medium", "hard", "very-hard")] == [28, 11, 6, 5]
    assert {f"{task}-v3" for task in TASKS} == set(ENV_CLS_MAP)


@pytest.mark.parametrize("task", ["button-press-topdown", "pick-place", "drawer-open", "hammer", "push-back"])
def test_expert_solves(task: str) -> None:
    env = MetaWorldEnv(task)
    expert = MetaWorldExpert(env)
    solved = 0
    for seed in range(3):
        env.reset(seed)
        expert.reset(seed)
        done = False
        while not done:
            action = expert.act()
            assert action.shape == (4,)
            assert action.dtype == np.float32
            assert np.abs(action).max() <= 1.0
            result = env.step(action)
            done = result.done
        solved += result.success
    env.close()
    assert solved == 3


def test_object_state_shows_goal_and_differences() -> None:
    env = MetaWorldEnv("pick-place")
    for seed in (0, 1):
        observation = env.reset(seed)
        for _ in range(5):
            hand = observation["proprio"][:3]
            thing, goal, to_thing, thing_to_goal, to_goal = observation["object_state"].reshape(5, 3)
            assert np.allclose(goal, env.state()[36:39], atol=1e-4)
            assert np.abs(goal).max() > 0.05, "the goal must not be hidden"
            assert np.allclose(to_thing, thing - hand, atol=2e-4)
            assert np.allclose(thing_to_goal, goal - thing, atol=2e-4)
            assert np.allclose(to_goal, goal - hand, atol=2e-4)
            observation = env.step(np.array([0.3, 0.3, 0.1, 0.0], dtype=np.float32)).observation
    env.close()


def test_first_observation_agrees_with_the_next_when_nothing_moves() -> None:
    # in plain MetaWorld the first observation of window-open shows where the window was before it was placed
    env = MetaWorldEnv("window-open")
    for seed in range(3):
        first = env.reset(seed)["object_state"]
        second = env.step(np.zeros(4, dtype=np.float32)).observation["object_state"]
        assert np.abs(first - second).max() < 0.01
    env.close()


def test_numpys_global_state_is_neither_read_nor_written() -> None:
    env = MetaWorldEnv("reach")
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    a = env.reset(1)["object_state"]
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    assert np.array_equal(a, env.reset(1)["object_state"])
    env.close()


def test_bad_arguments() -> None:
    with pytest.raises(PrismError, match="no task"):
        MetaWorldEnv("open-sesame")
    with pytest.raises(PrismError, match="out of range"):
        MetaWorldEnv("reach", max_steps=501)
    with pytest.raises(PrismError, match="variant"):
        MetaWorldEnv("reach", "smell")  # type: ignore[arg-type]


def test_picture_or_a_hint() -> None:
    env = MetaWorldEnv("drawer-open")
    env.reset(0)
    picture = env.render()
    if offscreen.backend() is None:
        assert picture is None
        assert "apt-get install libosmesa6" in (offscreen.rendering_hint() or "")
    else:
        assert offscreen.rendering_hint() is None
        assert picture is not None
        assert picture.shape == (240, 320, 3)
        assert picture.dtype == np.uint8
        assert picture.std() > 20
        other = MetaWorldEnv("reach")  # a second picture maker in one process must not disturb the first
        other.reset(0)
        assert not np.array_equal(picture, other.render())
        other.close()
        assert np.array_equal(picture, env.render())
    env.close()


needs_pictures = pytest.mark.skipif(offscreen.backend() is None, reason="no off-screen OpenGL here")


@needs_pictures
def test_cameras_show_the_same_scene_with_and_without_depth() -> None:
    colour, both = MetaWorldEnv("drawer-open", "pixels"), MetaWorldEnv("drawer-open", "rgbd")
    a, b = colour.reset(4), both.reset(4)
    assert set(a) == {"proprio", "rgb_wrist", "rgb_static"}
    assert set(b) == {*a, "depth_wrist", "depth_static"}
    for name in a:
        assert np.array_equal(a[name], b[name])
    colour.close()
    both.close()


@needs_pictures
def test_depth_is_metres_along_the_optical_axis() -> None:
    env = MetaWorldEnv("drawer-open", "rgbd")
    depth = env.reset(0)["depth_static"]
    model, data = env._env.model, env._env.data
    import mujoco

    camera = data.camera("corner2")
    right, up, back = camera.xmat.reshape(3, 3).T
    half = np.tan(np.radians(model.camera("corner2").fovy[0]) / 2)
    drawn = np.array([1, 1, 1, 0, 0, 0], dtype=np.uint8)  # groups of geoms
    errors = []
    side = len(depth)
    for row in range(4, side, 15):
        for column in range(4, side, 15):  # the picture is turned upright, the camera hangs upside down
            x, y = 1 - (2 * column + 1) / side, (2 * row + 1) / side - 1
            ray = -back + half * (x * right + y * up)
            along = mujoco.mj_ray(model, data, camera.xpos, ray, drawn, 1, -1, np.zeros(1, dtype=np.int32))
            errors.append(abs(depth[row, column] - max(along, 0.0)))  # -1: it hits nothing; 0 in the picture
    assert np.quantile(errors, 0.8) < 0.005, "but for edges"
    assert depth.min() >= 0.0
    assert depth.max() < 10.0
    env.close()


@needs_pictures
def test_pixels_stand_upright_and_show_the_goal_from_the_start() -> None:
    env = MetaWorldEnv("reach", "pixels")
    first = env.reset(1)["rgb_static"]
    second = env.step(np.zeros(4, dtype=np.float32)).observation["rgb_static"]
    # plain MetaWorld draws the goal elsewhere before the first step: a red dot would jump
    assert (np.abs(first.astype(int) - second).max(-1) > 60).mean() < 0.01
    assert first[:15, 76:].mean() < first[-45:].mean(), "the dark background is above the table"
    env.close()


def test_pixels_without_a_gl_library_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, fresh_backend: None, tmp_path: Path
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(offscreen, "_PROBE", "import sys; sys.exit(1)")
    with pytest.raises(PrismError, match="apt-get install libosmesa6"):
        MetaWorldEnv("reach", "pixels")
    with pytest.raises(PrismError, match="metaworld-reach-rgbd needs pictures"):
        collect("metaworld-reach-rgbd", 1, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.fixture
def fresh_backend() -> None:
    offscreen.backend.cache_clear()
    yield
    offscreen.backend.cache_clear()


def test_without_a_gl_library(monkeypatch: pytest.MonkeyPatch, fresh_backend: None) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(offscreen, "_PROBE", "import sys; sys.exit(1)")
    assert offscreen.backend() is None
    assert "apt-get install libosmesa6" in (offscreen.rendering_hint() or "")
    env = MetaWorldEnv("reach")
    env.reset(0)
    assert env.render() is None
    env.close()


def test_a_driver_that_kills_the_process_does_not_kill_ours(
    monkeypatch: pytest.MonkeyPatch, fresh_backend: None
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(offscreen, "_PROBE", "import os; os.abort()")
    assert offscreen.backend() is None


def test_switched_off_by_the_user(monkeypatch: pytest.MonkeyPatch, fresh_backend: None) -> None:
    monkeypatch.setenv("MUJOCO_GL", "disable")
    assert offscreen.backend() is None
    assert "MUJOCO_GL" in (offscreen.rendering_hint() or "")


def test_names_need_no_simulator() -> None:
    code = "import sys; from prism.sims.task_table import task_names; task_names(); print('mujoco' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
