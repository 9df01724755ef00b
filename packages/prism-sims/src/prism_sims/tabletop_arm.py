"""The tabletop's arm, its servo and its senses; the tasks are in tabletop.py, the models in tabletop_model.py."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.sensors import SensorSpec, encode_text
from prism.sims.environment import Array

from prism_sims import offscreen
from prism_sims import tabletop_model as parts
from prism_sims.mujoco_env import MujocoEnv, Vector, rounded

Variant = Literal["state", "pixels", "rgbd"]
FPS = 10.0
STEP = 0.03  # metres that an action of 1 asks for
IMAGE, DEPTH, TAXELS = (84, 84), 24, 16
RATE, SAMPLES = 4000, 400  # of sound
BLOCKS, SUBSTEPS = 4, 5  # of a control step; substeps of 5 ms; contacts are read after each block
FINE_BLOCKS, FINE_SUBSTEPS = 5, 4  # the same step as a robot of 50 commands a second
_CLOSE = 0.006  # metres that a finger moves in a block
_LEASH = 0.004  # metres by which the servo may lag behind its target when the next action comes
_LOW, _HIGH = np.array([0.28, -0.38, 0.02]), np.array([0.72, 0.38, 0.42])  # where the hand may be
_DOWN = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])  # its turn: x crosses the fingers, y is down
_VIEWS = {"static": "agentview", "wrist": "eye_in_hand"}
_TEXT = 48


class TabletopEnv(MujocoEnv):
    """The arm, its senses and its servo; a subclass is a task."""

    words: str  # the command
    sense: ClassVar[Literal["tactile", "audio", "depth", "text"]]  # what decides
    objects: ClassVar[int]  # numbers of _object_state
    steps: ClassVar[int] = 100  # at most
    tip: ClassVar[float] = parts.TIP  # metres from the hand's point down to the tip of the tool
    blocks, substeps, fine = BLOCKS, SUBSTEPS, False

    def __init__(self, name: str, variant: Variant = "state", max_steps: int | None = None) -> None:
        try:
            import mujoco
        except ImportError as error:
            raise PrismError("the tabletop needs mujoco: pip install 'prism-policy[sims]'") from error
        self.variant = variant
        if variant != "state":
            offscreen.require_backend(name)
        self._mj = mujoco
        self.model = mujoco.MjModel.from_xml_string(self._xml())
        self.data = mujoco.MjData(self.model)
        self._site = self.model.site("hand").id
        tool = self.model.body("wrist_3").id
        self._hand_geoms = self._geoms_under(tool)
        self._pads = [self.model.geom(name).id for name in parts.PADS]
        self._target = np.zeros(3)
        self._wrench = np.zeros(6)
        self._way, self._opening = (np.zeros(6), np.zeros(6)), parts.OPEN
        self.seen = {}
        limits = np.ones(4)
        super().__init__(name, self._sensors(), -limits, limits, FPS, max_steps or self.steps)

    # -- what a task says

    @abstractmethod
    def _xml(self) -> str: ...
    @abstractmethod
    def _place(self, rng: np.random.Generator) -> Vector:
        """Puts the things of an episode on the table; where the hand starts."""

    @abstractmethod
    def _object_state(self) -> Vector:
        """Where things are, metres. object_state has it twice: whole, and cut off at 3 cm, because beside the ways
        across the table a network hardly learns the last centimetres."""

    def _twice(self, whole: Vector, cut: Vector) -> Vector:
        return np.concatenate([whole, cut])

    @abstractmethod
    def succeeded(self) -> bool: ...

    # -- the arm

    def hand(self) -> Vector:
        """Between the fingertips, metres."""
        return np.array(self.data.site_xpos[self._site])

    def _step_to(self, target: Vector) -> Vector:
        """Joints (6,) that bring the hand from where it is to `target`, pointing down: one Newton step."""
        move, turn = np.zeros((3, self.model.nv)), np.zeros((3, self.model.nv))
        self._mj.mj_jacSite(self.model, self.data, move, turn, self._site)
        jacobian = np.vstack([move[:, :6], turn[:, :6]])
        off = _DOWN @ self.data.site_xmat[self._site].reshape(3, 3).T
        rotate = 0.5 * np.array([off[2, 1] - off[1, 2], off[0, 2] - off[2, 0], off[1, 0] - off[0, 1]])
        error = np.concatenate([target - self.data.site_xpos[self._site], rotate])
        damped = jacobian @ jacobian.T + 1e-6 * np.eye(6)
        return np.asarray(self.data.qpos[:6] + jacobian.T @ np.linalg.solve(damped, error))

    def _reach(self, target: Vector) -> None:
        """Puts the hand at `target`."""
        self.data.qpos[:6], self.data.qpos[6:8] = parts.REACH, parts.OPEN
        for _ in range(12):
            self._refresh()
            self.data.qpos[:6] = self._step_to(target)
        self._mj.mj_forward(self.model, self.data)

    def _start(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 11])
        self._mj.mj_resetData(self.model, self.data)
        start = self._place(rng)
        self._reach(start)
        self.data.ctrl[:6], self.data.ctrl[6] = self.data.qpos[:6], parts.OPEN
        self._target = start
        self._take()
        self._mj.mj_forward(self.model, self.data)
        self._mj.mj_step(self.model, self.data, nstep=self.blocks * self.substeps)
        self._refresh()
        self._wrench = np.zeros(6)
        self._wrenches: list[Vector] = []

    def _take(self) -> None:
        """Puts what the episode begins with into the hand."""

    def _grip(self, opening: float) -> float:
        return opening

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        if not self.aim(action):
            return 0.0, False
        for block in range(self.blocks):
            self.advance(block)
        self._refresh()
        success = self.succeeded()
        return float(success), success

    def aim(self, action: NDArray[np.float32]) -> bool:
        """The servo's target for one control step; whether it moves."""
        hand = self.hand()
        lag = np.clip(self._target - hand, -_LEASH, _LEASH)
        self._target = np.clip(hand + lag + STEP * action[:3].astype(np.float64), _LOW, _HIGH)
        self._opening = self._grip(parts.OPEN * (1.0 - float(action[3])) / 2.0)
        self._way = self.data.ctrl[:6].copy(), self._step_to(self._target)
        return True

    def refine(self) -> None:
        """From now on each block of a control step has a command of its own, a fifth of the step's."""
        self.blocks, self.substeps, self.fine = FINE_BLOCKS, FINE_SUBSTEPS, True

    def advance(self, block: int) -> None:
        """One of the blocks of a control step: the servo's target moves evenly; where each block has a command of its
        own, at once."""
        before, after = self._way
        share = 1.0 if self.fine else min(1.0, (block + 1) / (self.blocks - 1))
        self.data.ctrl[:6] = before + (after - before) * share
        most = _CLOSE * self.substeps / SUBSTEPS
        self.data.ctrl[6] += np.clip(self._opening - self.data.ctrl[6], -most, most)
        self._run(block)

    def freeze(self) -> None:
        """The servo's target becomes where the joints are."""
        joints = self.data.qpos[:6].copy()
        self._way = joints, joints

    def _run(self, block: int) -> None:
        """The physics of one block of a control step."""
        self._substeps()
        if self.sense == "tactile" and self.fine:  # of the last control step, whenever it is asked for
            self._wrenches = [*self._wrenches, self._contact_wrench()][-self.blocks :]
            self._wrench = np.sum(self._wrenches, axis=0) / self.blocks
        elif self.sense == "tactile":
            self._wrench = (self._wrench if block else 0.0) + self._contact_wrench() / self.blocks

    def _substeps(self) -> None:
        self._mj.mj_step(self.model, self.data, nstep=self.substeps)

    def _refresh(self) -> None:
        """Poses of the state that the step ended in."""
        for refresh in (self._mj.mj_kinematics, self._mj.mj_comPos, self._mj.mj_camlight):
            refresh(self.model, self.data)

    # -- the senses

    def _contact_wrench(self) -> Vector:
        """Force and torque of contacts on the hand and its tool, at the tool's tip, world axes, (6,)."""
        data, total, force = self.data, np.zeros(6), np.zeros(6)
        tip = self.data.site_xpos[self._site] - (0.0, 0.0, self.tip)
        for i in range(data.ncon):
            contact = data.contact[i]
            first, second = contact.geom1 in self._hand_geoms, contact.geom2 in self._hand_geoms
            if first == second:
                continue
            self._mj.mj_contactForce(self.model, data, i, force)
            push = contact.frame.reshape(3, 3).T @ force[:3] * (1.0 if second else -1.0)
            total[:3] += push
            total[3:] += np.cross(contact.pos - tip, push)
        return total

    def _fingertips(self) -> NDArray[np.uint8]:
        """Taxels on the pads, (16, 16, 2): rows along the finger, columns across it. A contact presses its normal
        force, smeared by 1.5 mm, into them; 6 N saturate one."""
        data, image, force = self.data, np.zeros((TAXELS, TAXELS, 2)), np.zeros(6)
        for i in range(data.ncon):
            for channel, pad in enumerate(self._pads):
                if pad in (data.contact.geom1[i], data.contact.geom2[i]):
                    self._mj.mj_contactForce(self.model, data, i, force)
                    local = data.geom_xmat[pad].reshape(3, 3).T @ (data.contact.pos[i] - data.geom_xpos[pad])
                    off = [np.linspace(-half, half, TAXELS) for half in self.model.geom_size[pad][1:]] - local[1:, None]
                    along, across = np.exp(-(off**2) / (2 * 0.0015**2))
                    image[:, :, channel] += force[0] / 6.0 * (along[:, None] * across)
        return np.round(255 * np.clip(image, 0.0, 1.0)).astype(np.uint8)

    def _depth(self) -> NDArray[np.float32]:
        """Rays from the eye in the hand, (24, 24)."""
        camera = self.model.camera("eye_in_hand").id
        rays = depth_rays().reshape(-1, 3)
        length = np.linalg.norm(rays, axis=1)
        world = (rays / length[:, None]) @ self.data.cam_xmat[camera].reshape(3, 3).T
        found, far = np.zeros(len(rays), np.int32), np.zeros(len(rays))
        groups = np.array([1, 1, 1, 0, 0, 0], np.uint8)
        eye = self.data.cam_xpos[camera]
        self._mj.mj_multiRay(
            self.model, self.data, eye, world.ravel(), groups, 1, -1, found, far, len(rays), self._mj.mjMAXVAL
        )
        metres = np.where(far >= 0, far / length, 0.0)
        return np.asarray(metres.reshape(DEPTH, DEPTH), np.float32)

    def _sensors(self) -> tuple[SensorSpec, ...]:
        shown = [SensorSpec("object_state", "vector", (2 * self.objects,))]
        if self.variant != "state":
            shown = [SensorSpec(f"rgb_{name}", "rgb", (*IMAGE, 3)) for name in _VIEWS]
        if self.variant == "rgbd":
            shown += [SensorSpec(f"depth_{name}", "depth", IMAGE, clip=(0.02, 2.0)) for name in _VIEWS]
        elif self.sense == "depth":
            shown.append(SensorSpec("depth_wrist", "depth", (DEPTH, DEPTH), clip=(0.02, 0.6)))
        if self.variant != "state":
            shown.append(SensorSpec("tactile_image", "tactile", (TAXELS, TAXELS, 2)))
        shown.append(SensorSpec("proprio", "vector", (4,)))
        if self.sense == "tactile":
            shown.append(SensorSpec("tactile", "vector", (6,)))
        elif self.sense == "audio":
            shown.append(SensorSpec("audio", "audio", (SAMPLES,), sample_rate=RATE))
        elif self.sense == "text":
            shown.append(SensorSpec("text", "text", (_TEXT,)))
        return tuple(shown)

    def _observe(self) -> dict[str, Array]:
        objects = self._object_state()
        self.seen = {
            "proprio": rounded([*self.hand(), self.data.qpos[6]]),
            "object_state": rounded(self._twice(objects, np.clip(objects, -STEP, STEP))),
        }
        if self.sense == "tactile":
            self.seen["tactile"] = np.round(self._wrench, 3).astype(np.float32) + np.float32(0)
        elif self.sense == "depth":
            self.seen["depth_wrist"] = self._depth()
        elif self.sense == "audio":
            self.seen["audio"] = self._sound()
        elif self.sense == "text":
            self.seen["text"] = encode_text(self.words, _TEXT)
        shown = {name: value.copy() for name, value in self.seen.items()}
        if self.variant != "state":
            if self._cameras is None:
                self._cameras = offscreen.Cameras(self.model, IMAGE, _VIEWS, self.variant == "rgbd")
            shown |= self._cameras.observe(self.data) | {"tactile_image": self._fingertips()}
        return {sensor.name: shown[sensor.name] for sensor in self.sensors}

    def _sound(self) -> NDArray[np.float32]:
        return np.zeros(SAMPLES, np.float32)

    # -- for tasks

    def put(self, name: str, place: Vector | list[float], yaw: float = 0.0) -> None:
        at = self.model.joint(name).qposadr[0]
        self.data.qpos[at : at + 7] = [*place, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]

    def touched(self, name: str) -> bool:
        """A finger touches the body."""
        body, contact = self.model.body(name).id, self.data.contact
        return any(
            (a in self._pads and self.model.geom_bodyid[b] == body)
            or (b in self._pads and self.model.geom_bodyid[a] == body)
            for a, b in zip(contact.geom1, contact.geom2, strict=True)
        )

    def let_go(self, name: str) -> bool:
        return not self.touched(name) and float(self.data.qpos[6]) > 0.3 * parts.OPEN

    def _make_renderer(self) -> offscreen.OffscreenRenderer:
        return offscreen.OffscreenRenderer(self.model, 240, 320, "agentview")


def depth_rays() -> Vector:
    """Directions that the pixels of depth_wrist look in, in the camera's frame (x right, y up, -z ahead), (24, 24, 3):
    a metre along the optical axis."""
    across = np.tan(np.pi / 6) * (2 * (np.arange(DEPTH) + 0.5) / DEPTH - 1)  # a field of view of 60 degrees
    x, y = np.meshgrid(across, -across)
    return np.stack([x, y, -np.ones_like(x)], -1)
