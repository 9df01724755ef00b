"""robosuite's Lift, PickPlaceCan, NutAssemblySquare, TwoArmTransport and ToolHang by robomimic's protocol.

20 steps a second, at most 400 of them (700 for Transport and ToolHang), success if any step succeeds. An action is, for
each arm, a displacement of the hand (1 is 5 cm), a turn (1 is half a radian), both in the frame of the robot's base,
and the gripper (1 closes, -1 opens): 7 numbers, 14 for Transport.

Sensors keep robomimic's order, so that its datasets fit (docs/reference/robosuite.md):

    proprio       a robot: hand position (3), quaternion xyzw (4), fingers (2)
    object_state  robosuite's `object-state`: poses of the objects, also seen from the hand
    relations     the same, seen from what each thing has to fit (robosuite_features.py)
    tactile       a robot: force (3, N) and torque (3, Nm) at the wrist, in its frame, mean of the control step
    rgb_static    agentview; rgb_wrist, rgb_wrist_1: the eye in each hand; 84 x 84; depth_* likewise, metres

A seed fixes the layout and the arm's start. robosuite's own observables are not sampled while the simulation runs:
observations show the state that the step ended in.

robosuite is an optional package. Its pin of an optional controller (mink) excludes numpy 2, so it is installed without
its dependencies, which the extra names instead: INSTALL_LINE.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prism.data.episodes import EpisodeSource
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.sims.environment import Array

from prism_sims import offscreen, robosuite_control
from prism_sims.mujoco_env import DrawnEnv
from prism_sims.pushes import Pushes
from prism_sims.robomimic_writer import Demonstration, RobomimicWriter
from prism_sims.robosuite_features import frame_in_hole, relations

Variant = Literal["state", "pixels", "rgbd"]
IMAGE = (84, 84)
VERSION = "1.5.2"
INSTALL_LINE = f"pip install 'prism-policy[robosuite]' && pip install --no-deps robosuite=={VERSION}"
FPS = 20.0
ROBOMIMIC_TYPE = 1  # robomimic's number for robosuite environments
_PICTURE = (240, 320)
_DIGITS = 4  # objects at rest tremble by a micrometre, which normalisation would blow up
_COLLISION = (0,)  # the group of the simpler shapes that collide, which are not drawn
_SEARCH = 1000  # seeds between two demonstrations that were kept
_PUSH_STEPS = (3, 9)  # how long something pushes: an eighth to almost half a second
_PUSH = np.array([10.0, 10.0, 10.0, 3.0, 3.0, 3.0, 0.0])  # how hard, of the noise, an arm; the fingers are left alone
_BUILD_SEED = 0  # what robosuite draws once, when it builds a model (the cube's edge, the hammer): the same always


@dataclass(frozen=True)
class Task:
    """One benchmark task: robosuite's name for it, its robots, the step limit of the protocol."""

    env_name: str
    max_steps: int
    robots: tuple[str, ...] = ("Panda",)
    static_camera: str = "agentview"
    pushed: float = 0.0  # how often something pushes while a disturbed demonstration is recorded, a step

    @property
    def env_args(self) -> dict[str, Any]:
        """Robomimic's env_args, stored with a dataset to rebuild the environment."""
        arm = {
            "type": "OSC_POSE", "input_max": 1, "input_min": -1,
            "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5], "output_min": [-0.05, -0.05, -0.05, -0.5, -0.5, -0.5],
            "kp": 150, "damping_ratio": 1, "impedance_mode": "fixed", "kp_limits": [0, 300],
            "damping_ratio_limits": [0, 10], "position_limits": None, "orientation_limits": None,
            "uncouple_pos_ori": True, "input_type": "delta", "input_ref_frame": "base", "interpolation": None,
            "ramp_ratio": 0.2, "gripper": {"type": "GRIP"},
        }  # fmt: skip
        kwargs: dict[str, Any] = {
            "robots": list(self.robots),
            "controller_configs": {"type": "BASIC", "body_parts": {"right": arm}},
            "control_freq": int(FPS),
            "reward_shaping": False,
        }
        if len(self.robots) == 2:
            kwargs["env_configuration"] = "opposed"
        return {"env_name": self.env_name, "type": ROBOMIMIC_TYPE, "env_version": VERSION, "env_kwargs": kwargs}


TASKS: dict[str, Task] = {
    "lift": Task("Lift", 400),
    "can": Task("PickPlaceCan", 400),
    "square": Task("NutAssemblySquare", 400),
    "transport": Task("TwoArmTransport", 700, ("Panda", "Panda"), pushed=0.025),
    "tool-hang": Task("ToolHang", 700, pushed=0.05),
}


def task_name(task: str, variant: Variant) -> str:
    return f"robosuite-{task}" + ("" if variant == "state" else f"-{variant}")


NAMES: dict[str, tuple[str, Variant]] = {task_name(t, v): (t, v) for t in TASKS for v in get_args(Variant)}


def task_of(env_args: Mapping[str, Any]) -> str:
    """The task whose environment `env_args` names."""
    name = env_args.get("env_name")
    for task, entry in TASKS.items():
        if entry.env_name == name:
            return task
    known = ", ".join(entry.env_name for entry in TASKS.values())
    raise PrismError(f"env_args: 'env_name' is {name!r}; prism plays {known}")


def parse_env_args(text: str | bytes | Mapping[str, Any], where: str = "env_args") -> dict[str, Any]:
    """A dataset's env_args, checked: JSON, one of the tasks, recorded with the robosuite that is installed."""
    if isinstance(text, Mapping):
        args: Any = dict(text)
    else:
        try:
            args = json.loads(text)
        except (ValueError, RecursionError):
            raise PrismError(f"{where}: is not JSON; a robomimic dataset keeps it as an attribute of 'data'") from None
    if not isinstance(args, dict) or not isinstance(args.get("env_kwargs"), dict):
        raise PrismError(f"{where}: needs 'env_name' and 'env_kwargs'; is this a robomimic dataset of robosuite?")
    try:
        task_of(args)
    except PrismError as error:
        raise PrismError(f"{where}: {error}") from None
    recorded = str(args.get("env_version") or "an unknown version")
    if recorded.split(".")[:2] != VERSION.split(".")[:2]:
        raise PrismError(
            f"{where}: recorded with robosuite {recorded}, prism plays {VERSION}, where the same actions move "
            "otherwise: train on it (prism train FILE), and evaluate on demonstrations of our own (prism data collect)"
        )
    return args


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """robosuite logs advice when it is imported, and sets MUJOCO_GL for the whole process: neither is wanted."""
    disabled, backend = logging.root.manager.disable, os.environ.get("MUJOCO_GL")
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if backend is None:
            os.environ.pop("MUJOCO_GL", None)
        else:
            os.environ["MUJOCO_GL"] = backend


def load_robosuite() -> Any:
    """The package, or one line that says how to get it."""
    try:
        found = version("robosuite")
    except PackageNotFoundError:
        raise PrismError(f"robosuite is not installed: {INSTALL_LINE}") from None
    if found.split(".")[:2] != VERSION.split(".")[:2]:
        raise PrismError(f"robosuite {found} is installed, prism plays {VERSION}: {INSTALL_LINE}")
    try:
        with _quiet():
            import robosuite
    except ImportError as error:
        raise PrismError(f"robosuite needs {error.name}: {INSTALL_LINE}") from None
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    return robosuite


def build(env_args: Mapping[str, Any]) -> Any:
    """robosuite's environment, as `env_args` describe it, without a renderer of its own, built once, reset softly."""
    robosuite = load_robosuite()
    given = env_args["env_kwargs"].items()
    kwargs = {key: value for key, value in given if not key.startswith(("camera_", "render"))}
    kwargs |= {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "renderer": "mujoco"}
    # the model stays: nothing is compiled again, and a renderer can keep it
    kwargs |= {"hard_reset": False, "ignore_done": True, "seed": _BUILD_SEED}
    try:
        with _quiet():
            return robosuite.make(env_args["env_name"], **kwargs)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        made = f"robosuite {VERSION} does not build {env_args['env_name']} from them"
        raise PrismError(f"env_args: {made} ({error})") from None


class RobosuiteEnv(DrawnEnv):
    """One task; `variant` says which sensors it shows."""

    def __init__(
        self,
        task: str,
        variant: Variant = "state",
        env_args: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
    ) -> None:
        if task not in TASKS:
            raise PrismError(f"robosuite: prism has no task '{task}': use {', '.join(TASKS)}")
        name = task_name(task, variant)
        if variant != "state":
            offscreen.require_backend(name)
        self.task, self.variant, self.static_camera = task, variant, TASKS[task].static_camera
        self.env_args = TASKS[task].env_args if env_args is None else env_args
        self.sim_env = build(self.env_args)  # robosuite's own environment; experts look into it
        self.robots = len(self.sim_env.robots)
        self._wrenches: list[NDArray[np.float64]] = []
        self._wrench_at = self._wrench_places()
        self._update_observables = self.sim_env._update_observables
        self.sim_env._update_observables = self._between_substeps
        self._arms = robosuite_control.arm_controls(self.sim_env)  # None: robosuite's own, slower steps
        fps = float(self.env_args["env_kwargs"].get("control_freq", FPS))
        low, high = self.sim_env.action_spec
        super().__init__(name, self._sensors(), low, high, fps, max_steps or TASKS[task].max_steps)

    def _sensors(self) -> tuple[SensorSpec, ...]:
        proprio = SensorSpec("proprio", "vector", (9 * self.robots,))
        if self.variant == "state":
            self._start(0)
            return tuple(SensorSpec(name, "vector", value.shape) for name, value in self._state_sensors().items())
        pictures = [SensorSpec(f"rgb_{name}", "rgb", (*IMAGE, 3)) for name in self._views()]
        if self.variant == "rgbd":
            pictures += [SensorSpec(f"depth_{name}", "depth", IMAGE) for name in self._views()]
        return (*pictures, proprio, SensorSpec("tactile", "vector", (6 * self.robots,)))

    def _views(self) -> dict[str, str]:
        """Sensor name without its kind -> camera."""
        hands = {"wrist" if i == 0 else f"wrist_{i}": f"robot{i}_eye_in_hand" for i in range(self.robots)}
        return {"static": self.static_camera, **hands}

    def _start(self, seed: int) -> None:
        env = self.sim_env
        # every sampler holds this generator, so it is set, not replaced
        env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        env.reset()
        self._wrenches = [self._wrench()]
        self._pushes = Pushes(TASKS[self.task].pushed, _PUSH_STEPS, np.tile(_PUSH, self.robots))

    def disturb(self, action: NDArray[np.float32], noise: float, rng: np.random.Generator) -> NDArray[np.float32]:
        """What is executed of a demonstrated action; the long tasks are pushed, too (prism_sims/pushes.py)."""
        return self._pushes.executed(action, (self.action_high - self.action_low) / 2, noise, rng, self._free)

    def _free(self) -> bool:
        """ToolHang's frame is let in undisturbed: pushed between the walls it jams, and jams would be demonstrated."""
        if self.task != "tool-hang" or self.sim_env._check_frame_assembled():
            return True
        return not frame_in_hole(self._object_state())

    def restore(self, state: NDArray[np.float64]) -> dict[str, Array]:
        """Goes on from a `state()` of this task, as robomimic replays datasets; the grippers' targets start afresh."""
        self._need_episode("restore(state)")
        sim = self.sim_env.sim
        if state.shape != sim.get_state().flatten().shape:
            raise PrismError(f"{self.name}: a state has {sim.get_state().flatten().size} numbers, not {state.shape}")
        sim.set_state_from_flattened(state)
        sim.forward()
        for robot in self.sim_env.robots:  # the pose that the controller prefers where the hand leaves it a choice
            joints = sim.data.qpos[robot._ref_joint_pos_indexes]
            robot.composite_controller.part_controllers[robot.arms[0]].update_initial_joints(joints)
        self._wrenches = [self._wrench()]
        return self._begin()

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        import mujoco

        self._wrenches = []
        if self._arms is None:
            self.sim_env.step(action.astype(np.float64))
        else:
            robosuite_control.step(self.sim_env, self._arms, action.astype(np.float64))
        success = bool(self.sim_env._check_success())
        # Poses of the state that the step ended in; contact forces, which start the next step, stay as they are.
        sim = self.sim_env.sim
        for refresh in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight):
            refresh(sim.model._model, sim.data._data)
        return float(success), success

    def _between_substeps(self, force: bool = False) -> None:
        """robosuite calls this after each of its 25 substeps."""
        if force:
            self._update_observables(force=True)
        elif self.variant != "state":
            self._wrenches.append(self._wrench())

    def _wrench_places(self) -> NDArray[np.int64]:
        """Where in MuJoCo's sensor data the forces and torques at the wrists are."""
        model, places = self.sim_env.sim.model, []
        for robot in self.sim_env.robots:
            names = robot.gripper[robot.arms[0]].important_sensors
            for kind in ("force_ee", "torque_ee"):
                start = model._model.sensor_adr[model.sensor_name2id(names[kind])]
                places += [start, start + 1, start + 2]
        return np.array(places)

    def _wrench(self) -> NDArray[np.float64]:
        """A robot: force and torque; read where the sensors are, without robosuite's search for their names."""
        return np.asarray(self.sim_env.sim.data._data.sensordata)[self._wrench_at]

    def _observe(self) -> dict[str, Array]:
        if self.variant == "state":
            return self._state_sensors()
        observation: dict[str, Array] = {**self._pictures(), "proprio": self._proprio()}
        observation["tactile"] = np.mean(self._wrenches, axis=0).astype(np.float32)
        return {sensor.name: observation[sensor.name] for sensor in self.sensors}

    def _state_sensors(self) -> dict[str, Array]:
        proprio, objects = self._proprio(), self._object_state()
        return {"proprio": proprio, "object_state": objects, "relations": relations(self.task, proprio, objects)}

    def _pictures(self) -> dict[str, Array]:
        sim = self.sim_env.sim
        if self._cameras is None:
            depth = self.variant == "rgbd"
            self._cameras = offscreen.Cameras(sim.model._model, IMAGE, self._views(), depth, hidden=_COLLISION)
        return self._cameras.observe(sim.data._data)

    def _proprio(self) -> NDArray[np.float32]:
        env, parts = self.sim_env, []
        for i, robot in enumerate(env.robots):
            position, _ = self.hand(i)
            body = env.sim.model.body_name2id(robot.robot_model.eef_name[robot.arms[0]])
            w, x, y, z = env.sim.data._data.xquat[body]
            joints = robot._ref_gripper_joint_pos_indexes[robot.arms[0]]
            fingers = env.sim.data.qpos[[joints[0], joints[len(joints) // 2]]]  # one a finger; a Robotiq has three
            parts += [position, (x, y, z, w), fingers]
        return np.concatenate(parts).astype(np.float32)

    def _object_state(self) -> NDArray[np.float32]:
        """The active ones of robosuite's object observables, in its order. No others are read, and each once."""
        every = self.sim_env._observables.values()
        objects = [one for one in every if one.modality == "object"]
        hands = [one for one in every if one.modality != "object" and one.name.endswith(("eef_pos", "eef_quat"))]
        # Poses first: what is seen from the hand (Can_to_robot0_eef_pos) is made of poses that come later in
        # robosuite's list, and is 0 where they are not there yet.
        poses: dict[str, Any] = {}
        for one in sorted(hands + objects, key=lambda one: "_to_" in one.name):
            one.update(self.sim_env.model_timestep, poses, force=True)
        state = np.concatenate([np.atleast_1d(one.obs) for one in objects if one.is_enabled() and one.is_active()])
        return np.round(state, _DIGITS).astype(np.float32) + np.float32(0)  # -0.0 -> 0.0

    # -- privileged: what experts see

    def hand(self, robot: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Between the fingertips: position (3,), rotation (3, 3), world frame; x crosses the fingers' gap or y does."""
        made = self.sim_env.robots[robot]
        return self._pose_of("site", int(made.eef_site_id[made.arms[0]]))

    def opening(self, robot: int = 0) -> float:
        """Between the fingers, metres: 0.08 wide open."""
        made = self.sim_env.robots[robot]
        joints = made._ref_gripper_joint_pos_indexes[made.arms[0]]
        return float(np.abs(self.sim_env.sim.data.qpos[joints]).sum())

    def base_turn(self, robot: int = 0) -> NDArray[np.float64]:
        """The frame (3, 3) in which an action of this robot moves and turns its hand."""
        return np.array(self.sim_env.robots[robot].base_ori, dtype=np.float64)

    def body(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._pose_of("body", self.sim_env.sim.model.body_name2id(name))

    def geom(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._pose_of("geom", self.sim_env.sim.model.geom_name2id(name))

    def site(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._pose_of("site", self.sim_env.sim.model.site_name2id(name))

    def _pose_of(self, kind: str, number: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        data = self.sim_env.sim.data._data
        positions = data.xpos if kind == "body" else getattr(data, f"{kind}_xpos")
        turns = data.xmat if kind == "body" else getattr(data, f"{kind}_xmat")
        return positions[number].copy(), turns[number].reshape(3, 3).copy()

    def state(self) -> NDArray[np.float64]:
        """robomimic's `states`: time, positions and velocities of every joint."""
        self._need_episode("state()")
        return np.asarray(self.sim_env.sim.get_state().flatten(), dtype=np.float64).copy()

    def model_xml(self) -> str:
        """The scene as MuJoCo's XML: robomimic's `model_file`. Its meshes are named from robosuite's folder on, which
        is how robosuite finds them on another machine."""
        packages = str(Path(load_robosuite().__file__).parent.parent)
        return str(self.sim_env.model.get_xml()).replace(packages + os.sep, "")

    def _make_renderer(self) -> offscreen.OffscreenRenderer:
        model = self.sim_env.sim.model._model
        return offscreen.OffscreenRenderer(model, *_PICTURE, self.static_camera, _COLLISION)

    def _drawn(self) -> tuple[Any, offscreen.View | None]:
        return self.sim_env.sim.data._data, None

    def close(self) -> None:
        super().close()
        self.sim_env.close()


def env_from_args(
    env_args: str | bytes | Mapping[str, Any], variant: Variant = "state", where: str = "env_args"
) -> RobosuiteEnv:
    """The environment that a robomimic dataset was recorded in, from its `env_args`."""
    args = parse_env_args(env_args, where)
    return RobosuiteEnv(task_of(args), variant, args)


# -- demonstrations in robomimic's layout: prism's own format keeps sensors and actions; the rest of what robomimic
# stores (states, the scene, the observation behind the last action) comes back by playing the recorded actions again,
# which gives the same observations bit for bit


def to_robomimic(
    source: EpisodeSource, out: Path, *, overwrite: bool = False, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Writes `source`, recorded by `prism data collect robosuite-TASK`; returns episodes and steps."""
    task = str(getattr(source, "task", ""))
    provenance: dict[str, Any] = getattr(source, "provenance", {})
    if task not in NAMES or "first_seed" not in provenance:
        raise PrismError(
            f"{source.path}: robomimic's layout needs the simulator's states, so it can be written for datasets of "
            "`prism data collect robosuite-...` only; use --to prism or --to lerobot"
        )
    if provenance.get("noise"):
        raise PrismError(
            f"{source.path}: recorded with noise, its actions do not lead through its states; collect with --noise 0"
        )
    env = RobosuiteEnv(*NAMES[task])
    total, seed = int(source.lengths.sum()), int(provenance["first_seed"])
    try:
        with RobomimicWriter(Path(out), env.env_args, overwrite) as writer:
            for episode in range(len(source.lengths)):
                shown, seed = _played(env, source, episode, seed)
                writer.add(shown)
                if progress is not None:
                    progress(writer.steps, total)
            return len(source.lengths), writer.steps
    finally:
        env.close()


def _played(env: RobosuiteEnv, source: EpisodeSource, episode: int, seed: int) -> tuple[Demonstration, int]:
    """The episode played again, and the first seed of the next."""
    recorded = source.read(episode)
    for start in range(seed, seed + _SEARCH):
        observation = env.reset(start)
        if all(np.array_equal(recorded.streams[name][0], value) for name, value in observation.items()):
            break
    else:
        raise _differs(source, episode, 0)
    rows, states, rewards = [observation], [], []
    for step, action in enumerate(recorded.actions):
        if any(not np.array_equal(recorded.streams[name][step], value) for name, value in observation.items()):
            raise _differs(source, episode, step)
        states.append(env.state())
        result = env.step(action)
        observation = result.observation
        rows.append(observation)
        rewards.append(float(result.success))
    streams = {name: np.stack([row[name] for row in rows]) for name in observation}
    dones = np.zeros(len(rewards), np.int64)
    dones[-1] = 1
    keys = robomimic_keys(env, streams)
    shown = Demonstration(keys, recorded.actions, np.stack(states), np.array(rewards), dones, env.model_xml())
    return shown, start + 1


def robomimic_keys(env: RobosuiteEnv, streams: dict[str, Array]) -> dict[str, Array]:
    """Streams (T, ...) by our sensors' names -> the same numbers by robomimic's keys."""
    keys: dict[str, Array] = {}
    for name, rows in streams.items():
        if name == "relations":
            continue  # robomimic has none; they follow from the others
        if name == "object_state":
            keys["object"] = rows
        elif name in ("proprio", "tactile"):
            for robot, part in enumerate(np.split(rows, env.robots, axis=1)):
                if name == "tactile":
                    keys[f"robot{robot}_ee_force"], keys[f"robot{robot}_ee_torque"] = part[:, :3], part[:, 3:]
                else:
                    keys[f"robot{robot}_eef_pos"], keys[f"robot{robot}_eef_quat"] = part[:, :3], part[:, 3:7]
                    keys[f"robot{robot}_gripper_qpos"] = part[:, 7:]
        else:
            kind, view = name.split("_", 1)
            camera = env._views()[view]
            keys[f"{camera}_image" if kind == "rgb" else f"{camera}_depth"] = rows if kind == "rgb" else rows[..., None]
    return keys


def _differs(source: EpisodeSource, episode: int, step: int) -> PrismError:
    return PrismError(
        f"{source.path}: episode {episode}, step {step}: this machine's simulator shows something else: recorded with "
        "another version of robosuite or MuJoCo; collect it again"
    )
