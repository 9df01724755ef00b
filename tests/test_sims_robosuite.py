"""robosuite: the experts solve the tasks, datasets in robomimic's layout hold what was played, bad input is named."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("robosuite") is None:  # importing it here would set MUJOCO_GL for the whole process
    pytest.skip("needs robosuite", allow_module_level=True)
pytest.importorskip("h5py")

import h5py
from prism_sims import robosuite
from prism_sims import robosuite_features as features
from prism_sims.robomimic_writer import Demonstration, RobomimicWriter
from prism_sims.robosuite import TASKS, RobosuiteEnv, env_from_args, parse_env_args, to_robomimic
from prism_sims.robosuite_expert import (
    UP,
    Arm,
    Phase,
    carried,
    grasp_turn,
    make_robosuite_expert,
    moved,
    pause,
    rotation_vector,
)

from prism.data import open_dataset
from prism.data.formats.store import StoreSource
from prism.errors import PrismError
from prism.sims.collect import collect, demonstrate


@pytest.mark.parametrize(("task", "seed"), [("lift", 3), ("square", 102), ("tool-hang", 2)])
def test_expert_solves_smoothly(task: str, seed: int) -> None:
    env = RobosuiteEnv(task)
    expert = make_robosuite_expert(env)
    env.reset(seed)
    expert.reset(seed)
    actions, done = [], False
    while not done:
        actions.append(expert.act())
        result = env.step(actions[-1])
        done = result.done
    env.close()
    assert result.success
    moves = np.array(actions)[:, :6]
    assert np.abs(moves).max() <= 1.0
    assert np.abs(np.diff(moves, axis=0)).max() < 0.21


def test_relations_are_the_simulators_own_distances() -> None:
    """From the sensors alone, to the 0.1 mm that they are rounded to."""
    env = RobosuiteEnv("tool-hang")
    seen = env.reset(5)
    frame, stand, tool = (env.body(f"{name}_root") for name in ("frame", "stand", "tool"))
    tip = frame[0] + frame[1] @ np.array([0.04375, 0.0, -0.13445])  # as in the expert
    hole = stand[0] + stand[1] @ np.array([0.0, 0.045, 0.08])
    post = frame[0] + frame[1] @ np.array([-0.04375, 0.0, 0.09])
    expected = [
        env.geom("frame_grip_frame")[0] - env.hand()[0],
        tip - hole,
        tool[0] - env.hand()[0],
        env.site("tool_hole1_center")[0] - post,
    ]
    meet = seen["relations"][18:30].reshape(4, 3)
    np.testing.assert_allclose(meet, expected, atol=4e-4)
    np.testing.assert_allclose(seen["relations"][30:], np.tanh(meet / features.FINE).ravel(), atol=1e-6)
    np.testing.assert_allclose(seen["relations"][6:12].reshape(3, 2), frame[1][:, :2], atol=1e-3)
    env.close()


def _played(env: RobosuiteEnv, steps: int) -> np.ndarray:
    """Joint positions of the scene after each of `steps` random actions; half way, the episode is restored."""
    env.reset(7)
    moves = np.random.default_rng(7).uniform(-1, 1, (steps, env.action_dim)).astype(np.float32)
    rows = []
    for step, move in enumerate(moves):
        if step == steps // 2:
            env.restore(env.state())
        env.step(move)
        rows.append(env.sim_env.sim.data.qpos.copy())
    return np.array(rows)


@pytest.mark.parametrize("task", list(TASKS))
def test_steps_and_objects_are_robosuites_own(task: str) -> None:
    env = RobosuiteEnv(task)
    assert env._arms is not None
    assert len(env._arms) == env.robots
    fast, seen = _played(env, 20), env._object_state()
    env._arms = None
    own = _played(env, 20)
    np.testing.assert_allclose(fast, own, atol=1e-6)
    env._update_observables(force=True)  # robosuite's list twice, so that nothing relative is left out
    objects = env.sim_env._get_observations(force_update=True)["object-state"]
    np.testing.assert_allclose(seen, objects, atol=1e-4)
    env.close()


@pytest.mark.parametrize(
    "change", [{"uncouple_pos_ori": False}, {"type": "JOINT_POSITION", "output_max": 0.05, "output_min": -0.05}]
)
def test_other_controllers_are_left_to_robosuite(change: dict[str, object]) -> None:
    args = copy.deepcopy(TASKS["lift"].env_args)
    args["env_kwargs"]["controller_configs"]["body_parts"]["right"].update(change)
    env = RobosuiteEnv("lift", env_args=args)
    assert env._arms is None
    env.reset(0)
    env.step(np.zeros(env.action_dim, np.float32))
    env.close()


def test_wrenches_are_robosuites_own() -> None:
    env = RobosuiteEnv("transport")
    env.reset(3)
    for _ in range(3):
        env.step(np.full(14, 0.3, dtype=np.float32))
        told = [(robot.ee_force[robot.arms[0]], robot.ee_torque[robot.arms[0]]) for robot in env.sim_env.robots]
        assert np.array_equal(env._wrench(), np.concatenate([part for pair in told for part in pair]))
    assert np.abs(env._wrench()).max() > 1.0, "the weight of a gripper at least"
    env.close()


def test_relations_of_transport_point_at_where_the_hammer_is_taken() -> None:
    env = RobosuiteEnv("transport")
    seen = env.reset(4)
    (middle, turn), giver, taker = env.body("payload_root"), env.hand(0)[0], env.hand(1)[0]
    meet = seen["relations"][30:51].reshape(7, 3)
    np.testing.assert_allclose(meet[1], middle - 0.03 * turn[:, 2] - giver, atol=2e-4)
    np.testing.assert_allclose(meet[2], middle + 0.07 * turn[:, 2] - taker, atol=2e-4)
    env.close()


@pytest.mark.parametrize("task", ["can", "square", "tool-hang"])
def test_object_state_has_what_is_seen_from_the_hand(task: str) -> None:
    """robosuite leaves it 0 where the object's pose comes later in its list: half of the sensor was."""
    env = RobosuiteEnv(task)
    env.reset(3)
    seen = env.step(np.full(7, 0.3, np.float32)).observation
    hand, body = features._pose(seen["proprio"].astype(np.float64), 0), features._pose(seen["object_state"], 7)
    np.testing.assert_allclose(seen["object_state"][:3], hand.turn.T @ (body.position - hand.position), atol=5e-4)
    env.close()


def test_relations_do_not_see_the_sign_of_a_quaternion() -> None:
    rng = np.random.default_rng(0)
    own, seen = rng.normal(size=(5, 18)), rng.normal(size=(5, 41))
    one = features.relations("transport", own, seen)
    own[:, 3:7], own[:, 12:16], seen[:, 3:7] = -own[:, 3:7], -own[:, 12:16], -seen[:, 3:7]
    np.testing.assert_allclose(features.relations("transport", own, seen), one, atol=1e-6)
    assert one.shape == (5, 5 * 6 + 7 * 6)


@pytest.mark.parametrize(("task", "often"), [("lift", 0.0), ("transport", 0.025)])
def test_a_disturbed_demonstration_is_pushed_in_the_long_tasks_alone(task: str, often: float) -> None:
    env, rng = RobosuiteEnv(task), np.random.default_rng(0)
    env.reset(1)
    still, noise = np.zeros(env.action_dim, np.float32), 0.03
    added = np.array([env.disturb(still, noise, rng) for _ in range(4000)])
    env.close()
    arm = added[:, :6]
    assert np.abs(added[:, 6]).max() < 5 * noise  # the fingers are never pushed
    pushed = np.abs(arm[:, :3]).max(axis=1) > 5 * noise
    # a push lasts five and a half steps in the mean, and most are stronger than any noise
    assert 0.5 * 5.5 * often <= pushed.mean() <= 5.5 * often
    if not often:
        plain = noise * np.random.default_rng(0).standard_normal((4000, 7))
        np.testing.assert_allclose(added, plain, atol=1e-6)  # as every environment without pushes


def test_the_frame_of_tool_hang_is_let_in_undisturbed() -> None:
    env = RobosuiteEnv("tool-hang")
    expert = make_robosuite_expert(env)
    env.reset(2)
    expert.reset(2)
    pushed = {}
    for _ in range(250):
        observation = env.step(expert.act()).observation
        inside = features.frame_in_hole(observation["object_state"])
        if observation["object_state"][42] > 0.5:  # it stands: pushed again
            break
        if inside not in pushed:
            rng = np.random.default_rng(0)
            added = np.array([env.disturb(np.zeros(7, np.float32), 0.03, rng) for _ in range(300)])
            pushed[inside] = bool(np.abs(added).max() > 0.15)
            env._pushes._left = 0
    env.close()
    assert pushed == {False: True, True: False}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lift", "can", "square"])
def test_experts_success_rate(task: str) -> None:
    env = RobosuiteEnv(task)
    expert = make_robosuite_expert(env)
    assert sum(demonstrate(env, expert, seed).success for seed in range(20)) >= 19
    env.close()


@pytest.fixture(scope="module")
def lift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lift")
    collect("robosuite-lift", 2, folder / "own", seed=4, workers=1)
    assert to_robomimic(StoreSource(folder / "own"), folder / "lift.hdf5")[0] == 2
    return folder


def test_robomimic_layout(lift: Path) -> None:
    with h5py.File(lift / "lift.hdf5") as file:
        data = file["data"]
        args = json.loads(data.attrs["env_args"])
        assert (args["env_name"], args["type"], args["env_version"]) == ("Lift", 1, robosuite.VERSION)
        assert data.attrs["total"] == sum(len(data[demo]["actions"]) for demo in data)
        assert [name.decode() for name in file["mask/train"][:]] == ["demo_0"]
        assert [name.decode() for name in file["mask/valid"][:]] == ["demo_1"]
        for demo in data.values():
            steps = demo.attrs["num_samples"]
            assert "<mujoco" in demo.attrs["model_file"]
            assert 'file="robosuite/models' in demo.attrs["model_file"]
            for key in ("actions", "states", "rewards", "dones"):
                assert len(demo[key]) == steps
            assert demo["rewards"][-1] == 1.0
            assert demo["dones"][:].tolist() == [0] * (steps - 1) + [1]
            for key in ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"):
                assert np.array_equal(demo["obs"][key][1:], demo["next_obs"][key][:-1])


def test_our_reader_reads_it_back_equal(lift: Path) -> None:
    from prism.data.formats.table import parse_map

    table = ("robot0_eef_pos+robot0_eef_quat+robot0_gripper_qpos=proprio", "object=object_state", "actions=action")
    own, theirs = StoreSource(lift / "own"), open_dataset(lift / "lift.hdf5", None, parse_map(table))
    assert theirs.fps == own.fps == 20.0
    assert theirs.lengths.tolist() == own.lengths.tolist()
    for episode in range(2):
        a, b = own.read(episode), theirs.read(episode)
        assert np.array_equal(a.actions, b.actions)
        for name in ("proprio", "object_state"):
            assert np.array_equal(a.streams[name], b.streams[name])


def test_states_and_actions_play_again(lift: Path) -> None:
    with h5py.File(lift / "lift.hdf5") as file:
        env = env_from_args(file["data"].attrs["env_args"])
        demo = file["data/demo_1"]
        env.reset(0)
        env.restore(demo["states"][0])
        for step, action in enumerate(demo["actions"][:]):
            assert np.allclose(env.state()[1:], demo["states"][step][1:], atol=1e-4)  # a warm start apart
            result = env.step(action)
        env.close()
    assert result.success


def test_a_dataset_that_does_not_play_again_is_refused(lift: Path, tmp_path: Path) -> None:
    source = StoreSource(lift / "own")
    read = source.read
    source.read = lambda *a: _bent(read(*a))  # type: ignore[method-assign]
    with pytest.raises(PrismError, match="another version"):
        to_robomimic(source, tmp_path / "x.hdf5")
    assert not list(tmp_path.iterdir())


def _bent(episode):  # type: ignore[no-untyped-def]
    episode.actions[3, 0] += 0.25
    return episode


def test_a_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    shown = Demonstration(
        {"object": np.zeros((3, 4), np.float32)}, np.zeros((2, 7), np.float32), np.zeros((2, 5)), np.zeros(2),
        np.zeros(2, np.int64), "<mujoco/>",
    )  # fmt: skip
    with pytest.raises(RuntimeError), RobomimicWriter(tmp_path / "a.hdf5", {}) as writer:  # noqa: PT012
        writer.add(shown)
        raise RuntimeError
    with pytest.raises(PrismError, match="no demonstration"), RobomimicWriter(tmp_path / "a.hdf5", {}):
        pass
    assert not list(tmp_path.iterdir())
    with RobomimicWriter(tmp_path / "a.hdf5", {}) as writer:
        writer.add(shown)
    with pytest.raises(PrismError, match="exists already"):
        RobomimicWriter(tmp_path / "a.hdf5", {})
    with pytest.raises(PrismError, match="'object' has 2 rows"):
        Demonstration(
            {"object": np.zeros((2, 4))}, shown.actions, shown.states, shown.rewards, shown.dones, ""
        )  # fmt: skip


def test_env_args_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TASKS["can"].env_args
    assert parse_env_args(json.dumps(args)) == args
    with pytest.raises(PrismError, match=r"robosuite 1\.4\.1.*collect"):
        parse_env_args({**args, "env_version": "1.4.1"}, "can.hdf5")
    with pytest.raises(PrismError, match="unknown version"):
        parse_env_args({key: value for key, value in args.items() if key != "env_version"})
    with pytest.raises(PrismError, match="prism plays Lift"):
        parse_env_args({**args, "env_name": "Door"})
    with pytest.raises(PrismError, match="not JSON"):
        parse_env_args("{")
    with pytest.raises(PrismError, match="env_kwargs"):
        parse_env_args({"env_name": "Lift"})
    monkeypatch.setattr(robosuite, "version", lambda _: "1.4.0")
    with pytest.raises(PrismError, match=r"pip install --no-deps robosuite==1\.5\.2"):
        RobosuiteEnv("lift")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise robosuite.PackageNotFoundError

    monkeypatch.setattr(robosuite, "version", missing)
    with pytest.raises(PrismError, match=r"prism-policy\[robosuite\].*--no-deps robosuite==1\.5\.2"):
        RobosuiteEnv("lift")


def test_geometry_of_the_expert() -> None:
    rng = np.random.default_rng(0)
    from scipy.spatial.transform import Rotation

    for vector in rng.normal(size=(20, 3)):
        turn = Rotation.from_rotvec(vector).as_matrix()
        assert np.allclose(Rotation.from_rotvec(rotation_vector(turn)).as_matrix(), turn)
    half = np.diag([-1.0, 1.0, -1.0])
    assert np.allclose(np.abs(rotation_vector(half)), [0, np.pi, 0])
    a, b, c, d = Rotation.random(4, random_state=1).as_matrix()
    hand, thing, goal = (rng.normal(size=3), a), (rng.normal(size=3), b), (rng.normal(size=3), c)
    position, turn = carried(hand, thing, goal)
    offset, relative = thing[1].T @ (hand[0] - thing[0]), thing[1].T @ hand[1]
    assert np.allclose(position, goal[0] + goal[1] @ offset)
    assert np.allclose(turn, goal[1] @ relative)
    made = grasp_turn(d[:, 0], np.eye(3))
    assert np.allclose(made[:, 2], [0, 0, -1])
    assert np.isclose(np.linalg.det(made), 1.0)


class Fingers:
    """The part of an environment that an arm reads: a hand that stays, fingers that are set."""

    width = 0.08

    def hand(self, robot: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(3), np.eye(3)

    def base_turn(self, robot: int) -> np.ndarray:
        return np.eye(3)

    def opening(self, robot: int) -> float:
        return self.width


@pytest.mark.parametrize(("closed", "widths", "leaves"), [
    (True, [0.08, 0.08, 0.08, 0.06, 0.04, 0.04], 5),  # not while they are open, not while they move
    (True, [0.08, 0.04, 0.04], 2),
    (False, [0.04, 0.05, 0.06, 0.076], 3),
])  # fmt: skip
def test_an_expert_waits_for_its_fingers_and_counts_no_steps(closed, widths, leaves):
    env = Fingers()
    arm = Arm(env, 0, [pause(closed), Phase(lambda start: moved(start, UP), closed)], pace=1.0)  # type: ignore[arg-type]
    phases = []
    for env.width in widths:
        arm.act()
        phases.append(arm.phase)
    assert phases.index(1) == leaves
