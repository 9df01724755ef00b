"""robosuite's control step, the same numbers in half of the time.

A control step is 25 substeps of the physics. The first is robosuite's own: it sets goals and grippers. In the others
only the torques of the arms change (operational-space control). They are computed here by robosuite's own compiled
formulas, from the same inputs in the same memory layout, so that they are equal bit for bit. What is saved is the work
around the formulas: names looked up, each jacobian computed twice, the base's velocity, grippers set again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class ArmControl:
    """The torques of one arm between two actions. `part` is robosuite's name of the arm: 'right'."""

    def __init__(self, sim_env: Any, robot: Any, part: str) -> None:
        import mujoco
        from robosuite.utils import control_utils

        self._formulas, self._site_jacobian = control_utils, mujoco.mj_jacSite
        self._robot, self._part = robot, part
        self._model, self._data = model, data = sim_env.sim.model._model, sim_env.sim.data._data
        controller = robot.part_controllers[part]
        actuators, dofs = robot._ref_actuators_indexes_dict[part], _slice(controller.qvel_index)
        self._dofs, self._site = dofs, sim_env.sim.model.site_name2id(controller.ref_name)
        self._low, self._high = model.actuator_ctrlrange[actuators].T
        # views of MuJoCo's memory
        self._position, self._turn = data.site_xpos[self._site], data.site_xmat[self._site].reshape(3, 3)
        self._q, self._v, self._all_v = data.qpos[_slice(controller.qpos_index)], data.qvel[dofs], data.qvel
        self._bias, self._ctrl = data.qfrc_bias[dofs], data.ctrl[_slice(actuators)]
        # written anew in every substep; of six rows or numbers, three are for the position, three for the turn
        count = len(controller.qvel_index)
        self._mass = np.zeros((count, count), order="F")
        self._wide_jacobian, self._jacobian = np.zeros((6, model.nv)), np.zeros((6, count))
        self._error, self._velocity, self._wrench = np.zeros(6), np.zeros(6), np.zeros(6)
        # of one action: the goal in the world, gains, the posture preferred where the hand leaves a choice
        self._goal_position, self._goal_turn = np.zeros(3), np.eye(3)
        self._kp, self._kd, self._posture = np.zeros(6), np.zeros(6), np.zeros(count)

    def begin(self) -> None:
        """robosuite has just set the goal of an action. Its controllers are new after each reset."""
        controller = self._robot.part_controllers[self._part]
        self._goal_position = controller.origin_pos + np.dot(controller.origin_ori, controller.goal_pos)
        self._goal_turn = np.dot(controller.origin_ori, controller.goal_ori)
        self._kp, self._kd, self._posture = controller.kp, controller.kd, controller.initial_joint

    def actuate(self, mass: Vector) -> None:
        """Sets the torques of this substep. `mass` (nv, nv): the mass matrix of the whole scene."""
        formulas, wide, jacobian, dofs = self._formulas, self._wide_jacobian, self._jacobian, self._dofs
        error, velocity, wrench = self._error, self._velocity, self._wrench
        wide_p, wide_r = wide[:3], wide[3:]
        self._site_jacobian(self._model, self._data, wide_p, wide_r, self._site)
        jacobian[:] = wide[:, dofs]
        self._mass[:] = mass[dofs, dofs]
        # three rows at a time, as robosuite: a product of six may be summed in another order
        np.dot(wide_p, self._all_v, out=velocity[:3])
        np.dot(wide_r, self._all_v, out=velocity[3:])
        np.subtract(self._goal_position, self._position, out=error[:3])
        error[3:] = formulas.orientation_error(self._goal_turn, self._turn)
        wanted = error * self._kp - velocity * self._kd
        _, inertia_p, inertia_r, free = formulas.opspace_matrices(self._mass, jacobian, jacobian[:3], jacobian[3:])
        np.dot(inertia_p, wanted[:3], out=wrench[:3])
        np.dot(inertia_r, wanted[3:], out=wrench[3:])
        torques = np.dot(jacobian.T, wrench) + self._bias
        torques += formulas.nullspace_torques(self._mass, free, self._posture, self._q, self._v)
        np.minimum(np.maximum(torques, self._low), self._high, out=self._ctrl)


def _slice(numbers: Sequence[int]) -> slice:
    return slice(int(numbers[0]), int(numbers[-1]) + 1)


def arm_controls(sim_env: Any) -> list[ArmControl] | None:
    """One for each arm of the environment; None if it has something else to control, which robosuite has to step."""
    from robosuite.controllers.composite.composite_controller import CompositeController
    from robosuite.controllers.parts.arm.osc import OperationalSpaceController
    from robosuite.controllers.parts.gripper.simple_grip import SimpleGripController
    from robosuite.robots.fixed_base_robot import FixedBaseRobot

    arms = []
    for robot in sim_env.robots:
        if type(robot) is not FixedBaseRobot or type(robot.composite_controller) is not CompositeController:
            return None
        for part, controller in robot.part_controllers.items():
            if type(controller) is OperationalSpaceController and _is_plain(sim_env, robot, part):
                arms.append(ArmControl(sim_env, robot, part))
            elif type(controller) is not SimpleGripController or controller.interpolator is not None:
                return None  # a plain gripper's target stays the same until the next action
    return arms if sim_env.lite_physics else None


def _is_plain(sim_env: Any, robot: Any, part: str) -> bool:
    """No interpolated goals, position and turn uncoupled, goals in the frame of a base that stands still."""
    controller, model = robot.part_controllers[part], sim_env.sim.model
    base = model.site_name2id(f"{controller.naming_prefix}{controller.part_name}_center")
    indexes = (controller.qvel_index, controller.qpos_index, robot._ref_actuators_indexes_dict[part])
    return bool(
        controller.interpolator_pos is None
        and controller.interpolator_ori is None
        and controller.uncoupling
        and controller.input_ref_frame == "base"
        and controller.lite_physics
        and robot._enabled_parts.get(part, False)
        and model._model.body_weldid[model._model.site_bodyid[base]] == 0
        and all(list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) for numbers in indexes)
    )


def step(sim_env: Any, arms: Sequence[ArmControl], action: Vector) -> None:
    """`sim_env.step(action)` without its reward, its observation and its record of recent torques and velocities."""
    import mujoco

    model, data = sim_env.sim.model._model, sim_env.sim.data._data
    mass = np.zeros((model.nv, model.nv))
    sim_env.timestep += 1
    for substep in range(int(sim_env.control_timestep / sim_env.model_timestep)):
        mujoco.mj_step1(model, data)
        if substep == 0:
            _begin_action(sim_env, action)
            for arm in arms:
                arm.begin()
        else:
            mujoco.mj_fullM(model, mass, data.qM)
            for arm in arms:
                arm.actuate(mass)
        mujoco.mj_step2(model, data)
        sim_env._update_observables()
    sim_env.cur_time += sim_env.control_timestep


def _begin_action(sim_env: Any, action: Vector) -> None:
    """robosuite's own: goals, grippers, and torques from what its controllers know: after a reset, the state then."""
    model, data, start = sim_env.sim.model._model, sim_env.sim.data._data, 0
    for robot in sim_env.robots:
        control, end = robot.composite_controller, start + robot.action_dim
        control.update_state()
        control.set_goal(action[start:end])
        for part, applied in control.run_controller(robot._enabled_parts).items():
            actuators = robot._ref_actuators_indexes_dict[part]
            data.ctrl[actuators] = np.clip(applied, *model.actuator_ctrlrange[actuators].T)
        start = end
