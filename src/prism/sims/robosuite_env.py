"""robosuite's Lift, PickPlaceCan, NutAssemblySquare, TwoArmTransport and ToolHang by robomimic's protocol.

20 steps a second, at most 400 of them (700 for Transport and ToolHang), success if any step succeeds. An action is, for
each arm, a displacement of the hand (1 is 5 cm), a turn (1 is half a radian), both in the frame of the robot's base,
and the gripper (1 closes, -1 opens): 7 numbers, 14 for Transport.

Sensors keep robomimic's order, so that its datasets fit (docs/robosuite.md):

    proprio       a robot: hand position (3), quaternion xyzw (4), fingers (2)
    object_state  robosuite's `object-state`: poses of the objects, also seen from the hand
    tactile       a robot: force (3, N) and torque (3, Nm) at the wrist, in its frame, mean of the control step
    rgb_static    agentview; rgb_wrist, rgb_wrist_1: the eye in each hand; 84 x 84; depth_* likewise, metres

A seed fixes the layout and the arm's start. robosuite's own observables are not sampled while the simulation runs:
observations show the state that the step ended in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.sims import offscreen
from prism.sims.base import Array, StepResult
from prism.sims.robosuite_setup import FPS, TASKS, Variant, build, load_robosuite, parse_env_args, task_name, task_of

IMAGE = (84, 84)
_PICTURE = (240, 320)
_DIGITS = 4  # objects at rest tremble by a micrometre, which normalisation would blow up


class VisualRenderer(offscreen.OffscreenRenderer):
    """Draws what robosuite's models look like, not the simpler shapes that collide."""

    def __init__(self, model: Any, height: int, width: int, camera: str | offscreen.View) -> None:
        super().__init__(model, height, width, camera)
        self._option.geomgroup[0] = 0


class RobosuiteEnv:
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
        self.task, self.variant = task, variant
        self.touches = variant != "state"
        self.name = task_name(task, variant)
        if variant != "state":
            offscreen.require_backend(self.name)
        self.env_args: Mapping[str, Any] = TASKS[task].env_args if env_args is None else env_args
        self.static_camera = TASKS[task].static_camera
        self.max_steps = TASKS[task].max_steps if max_steps is None else max_steps
        self._adopt(build(self.env_args), float(self.env_args["env_kwargs"].get("control_freq", FPS)))

    def _adopt(self, sim_env: Any, fps: float) -> None:
        """Plays in `sim_env`, robosuite's own environment; experts look into it."""
        self.sim_env, self.fps = sim_env, fps
        self.robots = len(sim_env.robots)
        low, high = sim_env.action_spec
        self.action_dim = int(low.shape[0])
        self.action_low, self.action_high = low.astype(np.float32), high.astype(np.float32)
        self._wrenches: list[NDArray[np.float64]] = []
        self._update_observables = sim_env._update_observables
        sim_env._update_observables = self._between_substeps
        self._cameras: VisualRenderer | None = None
        self._renderer: VisualRenderer | None = None
        self._steps, self._is_over = -1, False  # no episode yet
        self.sensors = self._sensors()

    def _sensors(self) -> tuple[SensorSpec, ...]:
        proprio = SensorSpec("proprio", "vector", (9 * self.robots,))
        if self.variant == "state":
            self._start(0)
            self._steps = -1
            return proprio, SensorSpec("object_state", "vector", self._object_state().shape)
        return (*self._picture_sensors(), proprio, SensorSpec("tactile", "vector", (6 * self.robots,)))

    def _picture_sensors(self) -> list[SensorSpec]:
        names = [name for name, _ in self._views()]
        pictures = [SensorSpec(f"rgb_{name}", "rgb", (*IMAGE, 3)) for name in names]
        if self.variant == "rgbd":
            pictures += [SensorSpec(f"depth_{name}", "depth", IMAGE) for name in names]
        return pictures

    def _views(self) -> list[tuple[str, str]]:
        """Sensor name without its kind, camera."""
        hands = [("wrist" if i == 0 else f"wrist_{i}", f"robot{i}_eye_in_hand") for i in range(self.robots)]
        return [("static", self.static_camera), *hands]

    def reset(self, seed: int) -> dict[str, Array]:
        self._start(seed)
        return self._observe()

    def _start(self, seed: int) -> None:
        env = self.sim_env
        # every sampler holds this generator, so it is set, not replaced
        env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        env.reset()
        self._wrenches = [self._wrench()]
        self._steps, self._is_over = 0, False

    def restore(self, state: NDArray[np.float64]) -> dict[str, Array]:
        """Goes on from a `state()` of this task, as robomimic replays datasets; the grippers' targets start afresh."""
        if self._steps < 0:
            raise PrismError(f"{self.name}: call reset(seed) before restore(state)")
        sim = self.sim_env.sim
        if state.shape != sim.get_state().flatten().shape:
            raise PrismError(f"{self.name}: a state has {sim.get_state().flatten().size} numbers, not {state.shape}")
        sim.set_state_from_flattened(state)
        sim.forward()
        for robot in self.sim_env.robots:  # the pose that the controller prefers where the hand leaves it a choice
            joints = sim.data.qpos[robot._ref_joint_pos_indexes]
            robot.composite_controller.part_controllers[robot.arms[0]].update_initial_joints(joints)
        self._wrenches = [self._wrench()]
        self._steps, self._is_over = 0, False
        return self._observe()

    def step(self, action: NDArray[np.float32]) -> StepResult:
        if self._steps < 0:
            raise PrismError(f"{self.name}: call reset(seed) before step(action)")
        if self._is_over:
            raise PrismError(f"{self.name}: the episode is over; call reset(seed)")
        action = np.asarray(action, dtype=np.float32)
        if action.shape != (self.action_dim,) or not np.isfinite(action).all():
            raise PrismError(f"{self.name}: an action is {self.action_dim} finite numbers, not {action!r}")
        self._wrenches = []
        self.sim_env.step(np.clip(action, self.action_low, self.action_high).astype(np.float64))
        self._steps += 1
        success = bool(self.sim_env._check_success())
        self._refresh()
        self._is_over = success or self._steps >= self.max_steps
        return StepResult(self._observe(), float(success), success, done=self._is_over)

    def _refresh(self) -> None:
        """Poses of the state that the step ended in; contact forces, which start the next step, stay as they are."""
        import mujoco

        sim = self.sim_env.sim
        mujoco.mj_kinematics(sim.model._model, sim.data._data)
        mujoco.mj_comPos(sim.model._model, sim.data._data)
        mujoco.mj_camlight(sim.model._model, sim.data._data)

    def _between_substeps(self, force: bool = False) -> None:
        """robosuite calls this after each of its 25 substeps."""
        if force:
            self._update_observables(force=True)
        elif self.touches:
            self._wrenches.append(self._wrench())

    def _wrench(self) -> NDArray[np.float64]:
        parts = []
        for robot in self.sim_env.robots:
            parts += [robot.ee_force[robot.arms[0]], robot.ee_torque[robot.arms[0]]]
        return np.concatenate(parts)

    def _observe(self) -> dict[str, Array]:
        observation: dict[str, Array] = {}
        if self.variant != "state":
            observation |= self._pictures()
            observation["tactile"] = np.mean(self._wrenches, axis=0).astype(np.float32)
        else:
            observation["object_state"] = self._object_state()
        observation["proprio"] = self._proprio()
        return {sensor.name: observation[sensor.name] for sensor in self.sensors}

    def _pictures(self) -> dict[str, Array]:
        data = self.sim_env.sim.data._data
        if self._cameras is None:
            self._cameras = VisualRenderer(self.sim_env.sim.model._model, *IMAGE, self.static_camera)
        pictures: dict[str, Array] = {}
        for name, camera in self._views():
            if self.variant == "rgbd":
                pictures[f"rgb_{name}"], pictures[f"depth_{name}"] = self._cameras.render_depth(data, camera)
            else:
                pictures[f"rgb_{name}"] = self._cameras.render(data, camera)
        return pictures

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
        self.sim_env._obs_cache = {}
        state = np.asarray(self.sim_env._get_observations(force_update=True)["object-state"])
        return np.round(state, _DIGITS).astype(np.float32) + np.float32(0)  # -0.0 -> 0.0

    # -- privileged: what experts see

    def hand(self, robot: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Between the fingertips: position (3,), rotation (3, 3), world frame; x crosses the fingers' gap or y does."""
        made = self.sim_env.robots[robot]
        return self._pose_of("site", int(made.eef_site_id[made.arms[0]]))

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
        if self._steps < 0:
            raise PrismError(f"{self.name}: call reset(seed) before state()")
        return np.asarray(self.sim_env.sim.get_state().flatten(), dtype=np.float64).copy()

    def model_xml(self) -> str:
        """The scene as MuJoCo's XML: robomimic's `model_file`. Its meshes are named from robosuite's folder on, which
        is how robosuite finds them on another machine."""
        packages = str(Path(load_robosuite().__file__).parent.parent)
        return str(self.sim_env.model.get_xml()).replace(packages + os.sep, "")

    def render(self) -> NDArray[np.uint8] | None:
        if offscreen.backend() is None:
            return None
        if self._renderer is None:
            self._renderer = VisualRenderer(self.sim_env.sim.model._model, *_PICTURE, self.static_camera)
        return self._renderer.render(self.sim_env.sim.data._data)

    def close(self) -> None:
        for renderer in (self._cameras, self._renderer):
            if renderer is not None:
                renderer.close()
        self._cameras = self._renderer = None
        self.sim_env.close()


def env_from_args(
    env_args: str | bytes | Mapping[str, Any], variant: Variant = "state", where: str = "env_args"
) -> RobosuiteEnv:
    """The environment that a robomimic dataset was recorded in, from its `env_args`."""
    args = parse_env_args(env_args, where)
    return RobosuiteEnv(task_of(args), variant, args)
