"""PRISM inside LeRobot, with LeRobot's own commands: `make lerobot`. Needs the environment of that target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.envs.factory import make_env, make_env_config
from lerobot.envs.utils import env_to_policy_features, preprocess_observation
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.rollout.inference.rtc import RTCInferenceEngine, supports_rtc_inference
from lerobot.utils.feature_utils import hw_to_dataset_features
from lerobot.utils.import_utils import register_third_party_plugins
from prism.controller import Controller
from prism.data.formats.lerobot_writer import LeRobotWriter
from prism.data.formats.video import ordinary_scheduling
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.experiments.share import write_lerobot
from prism.sensors import ActionSpec, SensorSpec
from prism_client import ActionKind

BIN = Path(sys.executable).parent
MODEL = "checkpoints/last/pretrained_model"
STEPS = 200


def lerobot(command: str, *words: str) -> str:
    """One of LeRobot's commands in a process of its own; what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run([str(BIN / command), *words], env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def played(folder: Path, task: str, out: Path) -> dict[str, Any]:
    """What lerobot-eval says of an episode of the task."""
    lerobot(
        "lerobot-eval",
        f"--policy.path={folder}",
        "--env.type=prism",
        f"--env.task={task}",
        "--seed=100000",
        "--eval.n_episodes=1",
        "--eval.batch_size=1",
        "--policy.device=cpu",
        f"--output_dir={out}",
    )
    overall: dict[str, Any] = json.loads((out / "eval_info.json").read_text())["overall"]
    assert overall["n_episodes"] == 1
    return overall


def train(dataset: Path, out: Path, *words: str) -> Path:
    """lerobot-train --policy.type=prism on a dataset; the folder of the checkpoint."""
    lerobot(
        "lerobot-train",
        "--policy.type=prism",
        "--policy.push_to_hub=false",
        "--policy.device=cpu",
        f"--dataset.repo_id=prism/{dataset.name}",
        f"--dataset.root={dataset}",
        f"--output_dir={out}",
        f"--steps={STEPS}",
        "--batch_size=8",
        "--num_workers=0",
        *words,
    )
    return out / MODEL


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lerobot")


def record(path: Path, cameras: dict[str, tuple[int, int, int]], steps: int = 30) -> Path:
    """A dataset as lerobot-record makes it: state, cameras (one channel is depth, millimetres), actions that follow
    the state."""
    names = [f"joint_{i}.pos" for i in range(3)]
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": names},
        "action": {"dtype": "float32", "shape": (3,), "names": names},
    }
    for name, shape in cameras.items():
        features[f"observation.images.{name}"] = {
            "dtype": "image" if shape[2] == 1 else "video",
            "shape": shape,
            "names": ["height", "width", "channels"],
            "info": {"is_depth_map": shape[2] == 1, **({"depth_unit": "mm"} if shape[2] == 1 else {})},
        }
    dataset = LeRobotDataset.create(f"prism/{path.name}", 10, features, root=path, robot_type="so101")
    rng = np.random.default_rng(0)
    with ordinary_scheduling():  # LeRobot's AV1 encoder would leave this process, and what it starts, real-time
        fill(dataset, cameras, steps, rng)
        dataset.finalize()
    return path


def fill(dataset: LeRobotDataset, cameras: dict[str, tuple[int, int, int]], steps: int, rng: Any) -> None:
    for _ in range(2):
        state = np.cumsum(rng.normal(0, 1, (steps + 1, 3)), axis=0).astype(np.float32)
        for step in range(steps):
            frame: dict[str, Any] = {"observation.state": state[step], "action": state[step + 1], "task": "follow"}
            for name, shape in cameras.items():
                high, kind = (2000, np.uint16) if shape[2] == 1 else (256, np.uint8)
                frame[f"observation.images.{name}"] = rng.integers(0, high, shape, dtype=kind)
            dataset.add_frame(frame)
        dataset.save_episode()


@pytest.fixture(scope="module")
def two_cameras(home: Path) -> Path:
    """A checkpoint of 200 steps on two cameras and a state."""
    dataset = record(home / "two-cameras", {"top": (48, 64, 3), "wrist": (48, 64, 3)})
    return train(dataset, home / "two")


def load(folder: Path) -> Any:
    register_third_party_plugins()
    return get_policy_class("prism").from_pretrained(folder)


def frames(policy: Any, count: int, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Observations as lerobot-eval and lerobot-rollout pass them on: one time step, a batch of one."""
    rng = np.random.default_rng(3)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        frame: dict[str, Any] = {"task": ["follow"]}
        for key, feature in policy.config.input_features.items():
            picture = key.startswith("observation.images.")
            high = 1.0 if picture and feature.shape[0] == 3 else 1000.0 if picture else 2.0
            value = torch.from_numpy(rng.uniform(0, high, (1, *feature.shape)).astype(np.float32))
            frame[key] = (value * 255).round() / 255 if picture and high == 1.0 else value
        made.append({key: value for key, value in frame.items() if key not in without})
    return made


def play(policy: Any, observations: list[dict[str, Any]]) -> np.ndarray:
    policy.reset()
    return np.concatenate([policy.select_action(dict(frame)).numpy() for frame in observations])


def test_the_plugins_are_found_without_an_import() -> None:
    code = (
        "from lerobot.utils.import_utils import register_third_party_plugins as find; find();"
        "from lerobot.configs import PreTrainedConfig; from lerobot.envs.configs import EnvConfig;"
        "assert 'prism' in PreTrainedConfig.get_known_choices() and 'prism' in EnvConfig.get_known_choices()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_two_cameras_and_a_state(two_cameras: Path) -> None:
    """200 steps, saved, read again; the state has the action's names, so plans are offsets from it."""
    policy = load(two_cameras)
    assert policy.config.policy["config"]["anchor"] == "state"
    assert [sensor.kind for sensor in policy.policy.spec.sensors].count("rgb") == 2
    actions = play(policy, frames(policy, 12))
    assert actions.shape == (12, 3)
    assert np.isfinite(actions).all()
    assert np.array_equal(actions, play(load(two_cameras), frames(policy, 12)))  # the same episode, the same actions


def test_a_lost_camera_is_absent(two_cameras: Path) -> None:
    policy = load(two_cameras)
    actions = play(policy, frames(policy, 12, without=("observation.images.wrist",)))
    assert np.isfinite(actions).all()
    _, present = policy._controllers[0].planner.window.steps[-1]
    assert present == {"state": True, "top": True, "wrist": False}


def test_prism_reads_the_checkpoint(two_cameras: Path, home: Path) -> None:
    """LeRobot -> prism -> LeRobot: not an action differs by more than 1e-5."""
    policy = load(two_cameras)
    observations = frames(policy, 12)
    expected = play(policy, observations)
    for source in (home / "two", two_cameras):
        controller = Run(source).controller()
        controller.reset(0)
        keys = policy.config.keys
        seen = [
            {
                name: (frame[key][0].permute(1, 2, 0) * 255).round().byte().numpy()
                if "images" in key
                else frame[key][0]
                for name, key in keys.items()
            }
            for frame in observations
        ]
        got = np.stack([controller.act({k: np.asarray(v) for k, v in frame.items()}) for frame in seen])
        assert np.abs(got - expected).max() <= 1e-5
    back = home / "back"
    write_lerobot(Run(two_cameras), back)
    assert np.abs(play(load(back), observations) - expected).max() <= 1e-5
    before, after = make_pre_post_processors(PreTrainedConfig.from_pretrained(back), str(back))
    again = after(load(back).select_action(before(observations[0])))
    assert np.abs(again.numpy() - expected[0]).max() <= 1e-5


@pytest.mark.parametrize("late", [0, 2])
def test_select_action_commands_what_prism_commands(
    two_cameras: Path, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with a planner that answers at once and with a late one."""
    policy = load(two_cameras)
    config = replace(policy.config.control(), delay=late, jerk_weight=3.0, join=3, margin=0.05)
    monkeypatch.setattr(policy.config, "control", lambda: config)
    observations = frames(policy, 12)
    expected = play(policy, observations)
    controller = Controller(policy.acting, config, look=False)
    got = [controller.act(policy._frames(frame)[0]) for frame in observations]
    np.testing.assert_array_equal(np.stack(got), expected)


def test_chunks_are_smoothed_as_actions_are(two_cameras: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(two_cameras)
    config = replace(policy.config.control(), jerk_weight=16.0)
    monkeypatch.setattr(policy.config, "control", lambda: config)
    frame = frames(policy, 1)[0]
    chunk = policy.predict_action_chunk(dict(frame))[0].numpy()
    policy.reset()
    np.testing.assert_array_equal(chunk[0], policy.select_action(dict(frame))[0].numpy())
    assert not any(np.array_equal(chunk, plan) for plan in policy._controllers[0].planner.chooser.plan.candidates)


def test_real_time_chunking(two_cameras: Path) -> None:
    """Of the candidates the one that goes on from what is left of the last plan; appended zeros are no actions."""
    policy = load(two_cameras)
    assert supports_rtc_inference(policy)
    policy.config.selection = "overlap"
    frame = frames(policy, 1)[0]
    first = policy.predict_action_chunk(dict(frame), inference_delay=0, prev_chunk_left_over=None)
    assert first.shape == (1, 16, 3)
    plan = policy._controllers[0].planner.chooser.plan
    candidates = torch.from_numpy(plan.candidates)
    for wanted in (3, 11):
        policy.reset()
        padded = torch.zeros(10, 3)
        padded[:6] = candidates[wanted, :6]
        chosen = policy.predict_action_chunk(dict(frame), inference_delay=2, prev_chunk_left_over=padded)
        assert torch.allclose(chosen[0], candidates[wanted], atol=1e-5)


def test_the_engine_of_lerobot_rollout(two_cameras: Path) -> None:
    """lerobot-rollout --inference.type=rtc, its own thread and queue: actions come, and plan after plan."""
    policy = load(two_cameras)
    before, after = make_pre_post_processors(policy.config, str(two_cameras))
    joints = {f"joint_{i}.pos": float for i in range(3)}
    features = hw_to_dataset_features({**joints, "top": (48, 64, 3), "wrist": (48, 64, 3)}, "observation")
    robot: Any = SimpleNamespace(robot_type="so101", action_features=joints)
    engine = RTCInferenceEngine(policy, before, after, robot, RTCConfig(), features, "follow", 10.0, "cpu")
    picture = np.zeros((48, 64, 3), np.uint8)
    seen = {"joint_0.pos": 0.1, "joint_1.pos": 0.2, "joint_2.pos": 0.3, "top": picture, "wrist": picture}
    engine.start()
    try:
        engine.reset()
        engine.resume()
        actions: list[Any] = []
        until = time.monotonic() + 120
        while len(actions) < 40 and time.monotonic() < until:  # more than two plans of 16
            engine.notify_observation(dict(seen))
            action = engine.get_action(None)
            if action is None:
                time.sleep(0.01)
            else:
                actions.append(action)
    finally:
        engine.stop()
    assert not engine.failed
    assert len(actions) == 40
    assert all(action.shape == (3,) and torch.isfinite(action).all() for action in actions)


def test_depth_and_an_absent_camera(home: Path) -> None:
    """A depth camera by info.is_depth_map, in LeRobot's millimetres; then a camera that is missing at run time."""
    dataset = record(home / "with-depth", {"top": (48, 64, 3), "front_depth": (48, 64, 1)})
    folder = train(dataset, home / "depth", "--policy.dropout=0.2")
    policy = load(folder)
    kinds = {sensor.name: sensor.kind for sensor in policy.policy.spec.sensors}
    assert kinds == {"state": "vector", "top": "rgb", "front_depth": "depth"}
    play(policy, frames(policy, 2))
    metres = policy._controllers[0].observation().streams["front_depth"]
    assert 0.5 < metres.max() <= 1.0
    assert np.isfinite(play(policy, frames(policy, 9, without=("observation.images.top",)))).all()


def test_a_camera_that_was_absent_in_the_recording(home: Path) -> None:
    """Columns `present.KEY` of `prism data convert`: prism's sensors come back, and the steps without one count as
    such, at every step of a window."""
    path, rng = home / "sometimes", np.random.default_rng(0)
    sensors = (
        SensorSpec("proprio", "vector", (3,)),
        SensorSpec("rgb_wrist", "rgb", (48, 64, 3)),
        SensorSpec("depth_static", "depth", (24, 32), clip=(0.1, 2.0)),
    )
    with LeRobotWriter(path, sensors, 2, 10.0, "reach", sometimes_absent=("rgb_wrist",)) as writer:
        for episode in range(3):
            streams = {
                "proprio": rng.normal(size=(25, 3)).astype(np.float32),
                "rgb_wrist": rng.integers(0, 256, (25, 48, 64, 3), dtype=np.uint8),
                "depth_static": rng.uniform(0.2, 1.5, (25, 24, 32)).astype(np.float32),
            }
            there = np.arange(25) % 5 > 0 if episode else np.zeros(25, np.bool_)
            writer.extend(streams, rng.normal(size=(25, 2)).astype(np.float32), {"rgb_wrist": there})
            writer.end_episode()
    policy = load(train(path, home / "some", "--steps=20"))
    assert {sensor.name: sensor.kind for sensor in policy.policy.spec.sensors}["depth_static"] == "depth"
    from lerobot_policy_prism.sensor_features import Presence

    meta = LeRobotDataset("prism/sometimes", root=path).meta
    presence = Presence.of(meta)
    key = "observation.images.rgb_wrist"
    batch = {
        "index": torch.tensor([24, 25, 26, 30]),
        f"{key}_is_pad": torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]]).bool(),
    }
    expected = [[False, False], [False, False], [False, True], [True, False]]
    assert presence.window(key, batch, 2).tolist() == expected


def test_eval_plays_push_t(home: Path) -> None:
    """lerobot-eval --env.type=prism: the demonstrations that ship with prism, 200 steps, an episode of Push-T."""
    subprocess.run(
        [str(BIN / "prism"), "data", "convert", "pusht", str(home / "pusht"), "--to", "lerobot"],
        check=True,
        timeout=600,
        capture_output=True,
    )
    folder = train(home / "pusht", home / "push", "--policy.anchor=observation.state")
    assert 0 <= played(folder, "pusht", home / "played")["avg_max_reward"] <= 1
    assert Run(home / "push").controller().policy.spec.obs_horizon == 2


@pytest.mark.parametrize("task", ["metaworld-drawer-open", "tabletop-insert-left"])
def test_eval_plays_mujoco(home: Path, task: str) -> None:
    """The same with simulators of MuJoCo: demonstrations of our expert, 20 steps, an episode by lerobot-eval."""
    pytest.importorskip("mujoco")
    if task.startswith("metaworld"):
        pytest.importorskip("metaworld")
    collected, dataset = home / task, home / f"{task}-lerobot"
    for words in (
        ["collect", task, "--episodes", "2", "--workers", "1", "--out", str(collected)],
        ["convert", str(collected), str(dataset), "--to", "lerobot"],
    ):
        done = subprocess.run([str(BIN / "prism"), "data", *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    folder = train(dataset, home / f"{task}-run", "--steps=20")
    assert 0 <= played(folder, task, home / f"{task}-played")["pc_success"] <= 100


def test_robosuite_plays() -> None:
    pytest.importorskip("robosuite")
    register_third_party_plugins()
    config = make_env_config("prism", task="robosuite-lift")
    vector = make_env(config, n_envs=1)["prism"][0]
    try:
        first = preprocess_observation(vector.reset(seed=[100000])[0])
        assert set(first) == set(env_to_policy_features(config)) - {"action"}
        _, reward, _, _, _ = vector.step(np.zeros((1, 7), np.float32))
        assert 0 <= reward[0] <= 1
    finally:
        vector.close()


@pytest.mark.parametrize("parallel", [False, True])
def test_environments(parallel: bool) -> None:
    """Pictures and vectors under the keys that a policy has; the reward is the score; a start by its seed."""
    register_third_party_plugins()
    config = make_env_config("prism", task="pusht-pixels")
    features = env_to_policy_features(config)
    assert features["observation.images.rgb_static"].shape == (3, 96, 96)
    vector = make_env(config, n_envs=2, use_async_envs=parallel)["prism"][0]
    try:
        first = preprocess_observation(vector.reset(seed=[100000, 100001])[0])
        assert set(first) == set(features) - {"action"}
        assert first["observation.images.rgb_static"].shape == (2, 3, 96, 96)
        again = preprocess_observation(vector.reset(seed=[100000, 100001])[0])
        assert torch.equal(first["observation.state"], again["observation.state"])
        assert not torch.equal(first["observation.state"][0], first["observation.state"][1])
        _, reward, terminated, _, info = vector.step(np.full((2, 2), 256.0, np.float32))
        assert ((reward >= 0) & (reward <= 1)).all()
        assert not terminated.any()
        assert not any(info["is_success"])
        assert list(vector.call("_max_episode_steps")) == [300, 300]
        assert list(vector.call("task_description")) == ["pusht pixels"] * 2
    finally:
        vector.close()


def test_a_training_goes_on(two_cameras: Path, home: Path) -> None:
    """--resume: from the raw weights, and the average goes on too."""
    lerobot("lerobot-train", f"--config_path={two_cameras}/train_config.json", "--resume=true", f"--steps={STEPS + 5}")
    policy = load(home / "two" / MODEL)
    assert policy._step == STEPS + 5


@pytest.mark.parametrize(
    ("kind", "anchor", "restless"),
    [
        (None, None, 0),
        (None, "observation.state", 2),
        (ActionKind.ABSOLUTE, None, 2),
        (ActionKind.DELTA, None, 0),
        (ActionKind.VELOCITY, "observation.state", 0),
    ],
)
def test_only_poses_stand_still(kind: ActionKind | None, anchor: str | None, restless: int, tmp_path: Path) -> None:
    """What meta/prism.json says of the actions reaches the policy, its controller and the checkpoint: a constant
    velocity is no rest, and the hold of a change is none."""
    from lerobot_policy_prism import PrismConfig, sensor_features

    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/prism.json").write_text(json.dumps({"sensors": {}, "action": {"kind": kind}}))
    names = ["x", "y", "gripper"]
    features = {key: {"dtype": "float32", "names": names} for key in ("observation.state", "action")}
    meta = SimpleNamespace(root=tmp_path, features=features, tasks=SimpleNamespace(index=["reach"]), fps=10)
    config = PrismConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (3,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        anchor=anchor,
    )
    spec, _ = sensor_features.make_spec(config, meta)
    assert spec.action == ActionSpec(tuple(names), kind=kind)
    config.policy = spec.to_json()
    selection = config.control().selection
    assert (selection.restless, selection.grippers) == (restless, (2,))
    assert selection.rule == "commit"


def test_bad_input(two_cameras: Path, home: Path) -> None:
    """One line each: a dataset that does not fit, statistics that are missing, an anchor that is none."""
    from lerobot_policy_prism import sensor_features

    policy = load(two_cameras)
    spec, keys = policy.policy.spec, policy.config.keys
    meta = LeRobotDataset("prism/two-cameras", root=home / "two-cameras").meta
    with pytest.raises(PrismError, match=r"no statistics of 'observation\.state'.*recompute"):
        sensor_features.make_normalizer(spec, keys, {})
    with pytest.raises(PrismError, match="actions have 7 dimensions"):
        sensor_features.check_features(replace(spec, action_dim=7), keys, meta, "checkpoint")
    other = replace(
        spec, sensors=tuple(replace(s, shape=(9,), names=()) if s.kind == "vector" else s for s in spec.sensors)
    )
    with pytest.raises(PrismError, match=r"'observation\.state' has 9 values"):
        sensor_features.check_features(other, keys, meta, "checkpoint")
    with pytest.raises(PrismError, match=r"'observation\.state' has 6 values, the policy's has 3: use the robot"):
        policy.select_action({**frames(policy, 1)[0], "observation.state": torch.zeros(1, 6)})
    policy.config.anchor = "observation.nothing"
    with pytest.raises(PrismError, match="no such observation"):
        sensor_features.make_spec(policy.config, meta)
    for steps in (0, 16, 17):
        with pytest.raises(PrismError, match="n_action_steps"):
            replace(policy.config, n_action_steps=steps)
