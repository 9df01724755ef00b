"""Forward and inverse kinematics of an arm, by MuJoCo's Jacobians and damped least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import need
from prism.robots.drivers.rotation import product, quaternion, vector

Vector = NDArray[np.float64]
_STEPS, _DAMPING, _MOST = 60, 0.05, 0.2  # iterations; of the squares; radians an iteration


class ArmModel:
    """A chain of hinges in MuJoCo's XML, with a site `tool`. A pose is x, y, z and a rotation vector, in the base."""

    def __init__(self, xml: str) -> None:
        self._mj: Any = need("mujoco", "robots-go2", "the arm's kinematics")
        self._model = self._mj.MjModel.from_xml_string(xml)
        self._data = self._mj.MjData(self._model)
        self._site = self._mj.mj_name2id(self._model, self._mj.mjtObj.mjOBJ_SITE, "tool")
        self.low, self.high = (side.copy() for side in self._model.jnt_range.T)

    def pose(self, joints: Vector) -> Vector:
        turn = np.empty(4)
        self._data.qpos[:] = joints
        self._mj.mj_kinematics(self._model, self._data)
        self._mj.mj_comPos(self._model, self._data)  # the Jacobians need it
        self._mj.mju_mat2Quat(turn, self._data.site_xmat[self._site])
        return np.array([*self._data.site_xpos[self._site], *vector(turn)])

    def solve(self, pose: Vector, start: Vector) -> tuple[Vector, float, float]:
        """Joints near `start` whose pose is nearest; what is left of it, in metres and radians."""
        joints, goal = np.clip(start, self.low, self.high), quaternion(pose[3:])
        jacobian = np.zeros((6, self._model.nv))
        for _ in range(_STEPS):
            here = self.pose(joints)
            turn = vector(product(goal, quaternion(-here[3:])))
            error = np.array([*(pose[:3] - here[:3]), *turn])
            if np.linalg.norm(error[:3]) < 1e-5 and np.linalg.norm(turn) < 1e-4:
                break
            self._mj.mj_jacSite(self._model, self._data, jacobian[:3], jacobian[3:], self._site)
            damped = jacobian @ jacobian.T + _DAMPING**2 * np.linalg.norm(error) * np.eye(6)
            step = jacobian.T @ np.linalg.solve(damped, error)
            joints = np.clip(
                joints + step * min(1.0, _MOST / max(float(np.abs(step).max()), 1e-9)), self.low, self.high
            )
        here = self.pose(joints)
        turn = vector(product(goal, quaternion(-here[3:])))
        return joints, float(np.linalg.norm(pose[:3] - here[:3])), float(np.linalg.norm(turn))
