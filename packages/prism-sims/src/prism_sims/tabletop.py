"""A UR5e on a table, and tasks in which one sense decides. Ours; needs mujoco, no other package.

| task                  | what to do                                                              | what decides |
| --------------------- | ----------------------------------------------------------------------- | ------------ |
| tabletop-insert-left  | the peg into the left hole, which is up to 10 mm beside where it seems  | tactile      |
| tabletop-insert-right | the same with the right hole                                            | tactile      |
| tabletop-rattle       | of two boxes that look alike, the one with the ball in it on the mark   | audio        |
| tabletop-height       | the fragile block on a stand of unknown height                          | depth_wrist  |
| tabletop-can          | the fragile can on a mark of unknown height (tabletop_place.py)         | -            |
| tabletop-nest         | three containers into each other (tabletop_place.py)                    | -            |
| tabletop-stack-blue   | "stack the blue cup on the green cup"                                   | text         |
| tabletop-stack-yellow | "stack the yellow cup on the blue cup"                                  | text         |
| tabletop-ball         | "put the green ball into the green cup"                                 | text         |
| tabletop-hang         | "hang the green cup on the hook"                                        | text         |

The last four share one scene. 10 steps a second. An action is a displacement of the hand (1 is 3 cm) in the frame of
the base, and the gripper (1 closes, -1 opens); the hand points down.

    proprio        (4,)        hand xyz, opening of the fingers, metres
    object_state   (4..54,)    things seen from the hand and from each other, metres, whole and cut off at 3 cm;
                               what the sense tells is left out
    tactile        (6,)        force (N) and torque (Nm) of contacts at the tip of the tool, mean of the control step
    audio          (400,)      a contact microphone at the wrist, 4 kHz
    depth_wrist    (24, 24)    metres along the optical axis of a camera beside the fingers
    text           (48,)       the command

Each task has proprio, object_state and the sense that decides. `-pixels`: rgb_static, rgb_wrist and tactile_image
(16 x 16, one channel a fingertip) instead of object_state; `-rgbd`: with depth_static and depth_wrist.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError

from prism_sims import tabletop_model as parts
from prism_sims.mjcf import box, free
from prism_sims.mujoco_env import Vector
from prism_sims.tabletop_arm import RATE, SAMPLES, TabletopEnv, Variant

CUPS = {"green": "0.15 0.6 0.2 1", "blue": "0.15 0.25 0.8 1", "yellow": "0.9 0.8 0.1 1"}
COMMANDS = {
    "stack-blue": "stack the blue cup on the green cup",
    "stack-yellow": "stack the yellow cup on the blue cup",
    "ball": "put the green ball into the green cup",
    "hang": "hang the green cup on the hook",
}
# What to do, in words; an environment that hears it and the table of tasks have it from here.
WORDS = {
    "insert-left": "put the peg into the left hole",
    "insert-right": "put the peg into the right hole",
    "rattle": "put the box with the ball on the mark",
    "height": "put the block on the stand",
    "can": "put the can on the mark",
    "nest": "put the containers into each other",
    **COMMANDS,
}
_RINGING = 240  # samples after which a click has faded


class Insert(TabletopEnv):
    """The peg is in the hand; where the hole really is shows only in the forces when the peg stands on its rim."""

    sense, objects, tip, steps = "tactile", 3, parts.PEG_FOOT, 60
    OFFSET = 0.010  # metres, of the hole from where it seems, each way
    LIMIT = 45.0  # newtons, at which the robot's protective stop ends all motion

    def __init__(self, hole: Literal["left", "right"], name: str, variant: Variant = "state", **more: Any) -> None:
        self.hole, self.words = hole, WORDS[f"insert-{hole}"]
        self.middle = np.zeros(3)
        super().__init__(name, variant, **more)

    def _xml(self) -> str:
        inside = "".join(f'<exclude body1="peg" body2="finger_{side}"/>' for side in ("left", "right"))
        return parts.scene(parts.board("left") + parts.board("right"), tool=parts.peg(), exclude=inside)

    def _place(self, rng: np.random.Generator) -> Vector:
        for name, side in (("left", 0.12), ("right", -0.12)):
            seen = np.array([0.5, side, parts.BOARD_TOP / 2])
            seen[:2] += rng.uniform(-0.05, 0.05, 2)
            true = seen.copy()
            true[:2] += rng.uniform(-self.OFFSET, self.OFFSET, 2)
            self.model.body(f"seen_{name}").pos[:], self.model.body(f"hole_{name}").pos[:] = seen, true
            if name == self.hole:
                self.middle, self.hole_at = seen + np.array([0.0, 0.0, parts.BOARD_TOP / 2]), true
        self.stopped = False
        return np.array([0.45, 0.0, 0.22]) + rng.uniform(-0.04, 0.04, 3)

    def _take(self) -> None:
        self.data.qpos[6:8] = self.data.ctrl[6] = parts.PEG

    def _grip(self, opening: float) -> float:
        return parts.PEG  # it holds the peg

    def aim(self, action: NDArray[np.float32]) -> bool:
        if np.linalg.norm(self._wrench[:3]) > self.LIMIT:
            self.stopped = True
        return not self.stopped and super().aim(action)

    def foot(self) -> Vector:
        return self.body("peg") - (0.0, 0.0, 0.045)

    def _object_state(self) -> Vector:
        """Where the hole seems to be, from where the peg's foot is when nothing pushes it in."""
        return np.asarray(self.middle - self.hand() + (0.0, 0.0, parts.PEG_FOOT))

    def succeeded(self) -> bool:
        foot = self.foot()
        return bool(foot[2] < parts.BOARD_TOP - 0.02 and np.abs(foot - self.hole_at)[:2].max() < 0.005)


class Rattle(TabletopEnv):
    """Two boxes that look and weigh the same; the ball in one of them can be heard when it is shaken."""

    sense, objects, steps, words = "audio", 15, 100, WORDS["rattle"]
    MARK = np.array([0.58, 0.0])

    def _xml(self) -> str:
        mark = box((0.04, 0.04, 0.0005), (*self.MARK, 0.0), "0.1 0.1 0.1 1", 'contype="0" conaffinity="0"')
        sensors = "".join(f'<touch site="{site}"/>' for site in ("ball", "pad_left", "pad_right"))
        things = parts.container("left") + parts.container("right") + parts.ball("ball", parts.BALL, 0.006, "1 1 1 1")
        return parts.scene(mark + things, sensors=sensors)

    def _place(self, rng: np.random.Generator) -> Vector:
        self.full, empty = ("left", "right") if rng.random() < 0.5 else ("right", "left")
        for name, side in (("left", 0.11), ("right", -0.11)):
            at = np.array([0.42, side, parts.BOX + 0.0005])
            at[:2] += rng.uniform(-0.03, 0.03, 2)
            self.put(name, at, rng.uniform(-0.15, 0.15))
            if name == self.full:
                self.put("ball", [*at[:2], at[2] + parts.BALL - parts.CAVITY + 0.0005])
        self.model.body(self.full).mass[:], self.model.body(empty).mass[:] = 0.072, 0.078  # the ball has 6 g
        self._echo, self._pressed = np.zeros(_RINGING), np.zeros(2)
        self._clicks = np.zeros((2, self.blocks * self.substeps))
        return np.array([0.45, 0.0, 0.16]) + rng.uniform(-0.03, 0.03, 3)

    def _start(self, seed: int) -> None:
        super()._start(seed)
        self._pressed = self._touching()

    def _touching(self) -> Vector:
        """Newtons on the ball, on the fingers."""
        ball, left, right = self.data.sensordata
        return np.array([ball, left + right])

    def _run(self, block: int) -> None:
        for i in range(block * self.substeps, (block + 1) * self.substeps):
            self._mj.mj_step(self.model, self.data)
            now = self._touching()
            self._clicks[:, i] = np.maximum(now - self._pressed, 0.0)
            self._pressed = now

    def _sound(self) -> NDArray[np.float32]:
        """A force that rises within 5 ms is a click: it rings high where the ball hits wood, low where fingers do."""
        excitation = np.zeros((2, SAMPLES))
        excitation[:, :: SAMPLES // self._clicks.shape[1]] = np.where(self._clicks > 0.01, self._clicks, 0.0)
        ringing = np.sum([np.convolve(row, ring) for row, ring in zip(excitation, _RINGS, strict=True)], axis=0)
        ringing[:_RINGING] += self._echo
        self._echo = ringing[SAMPLES:]
        return np.asarray(np.tanh(ringing[:SAMPLES]), np.float32)

    def _object_state(self) -> Vector:
        """Left box, right box, mark: from the hand; the boxes from the mark."""
        hand, mark = self.hand(), np.array([*self.MARK, 0.0])
        left, right = self.body("left"), self.body("right")
        return np.concatenate([left - hand, right - hand, mark - hand, left - mark, right - mark])

    def succeeded(self) -> bool:
        box = self.body(self.full)
        on_mark = np.abs(box[:2] - self.MARK).max() < 0.03 and box[2] < parts.BOX + 0.004
        return bool(on_mark and self.let_go(self.full))


def _ring(hertz: float, fall: float, loud: float) -> Vector:
    time = np.arange(_RINGING + 1) / RATE
    return np.asarray(loud * np.sin(2 * np.pi * hertz * time) * np.exp(-time / fall))


_RINGS = (_ring(900.0, 0.008, 3.0), _ring(180.0, 0.015, 0.02))  # wood, rubber: Hz, seconds, of full scale a newton


class Fragile(TabletopEnv):
    """A thing that breaks when it falls or is pressed down."""

    fragile: ClassVar[str]  # its body
    broken = False
    FALL, PRESS = 0.45, 25.0  # metres a second (a fall of 1 cm), newtons: what breaks it

    def _substeps(self) -> None:
        thing, force = self.model.body(self.fragile).id, np.zeros(6)
        for _ in range(self.substeps):
            falling = -float(self.data.qvel[self.model.joint(self.fragile).dofadr[0] + 2])
            self._mj.mj_step(self.model, self.data)
            pressed = 0.0
            for i in range(self.data.ncon):
                pair = (self.data.contact.geom1[i], self.data.contact.geom2[i])
                others = [g for g in pair if self.model.geom_bodyid[g] != thing]
                if len(others) == 1 and others[0] not in self._hand_geoms:
                    self._mj.mj_contactForce(self.model, self.data, i, force)
                    pressed += force[0]
            self.broken |= pressed > self.PRESS or (pressed > 0.0 and falling > self.FALL)


class Height(Fragile):
    """The block is in the hand; how high the stand is shows only in depth. Its plate has a random size, so that a
    picture tells nothing of its distance."""

    sense, objects, steps, words, fragile = "depth", 2, 60, WORDS["height"], "block"

    def _xml(self) -> str:
        post = box((0.01, 0.01, 0.1), (0, 0, -0.105), "0.3 0.3 0.3 1")
        top = box((0.06, 0.06, 0.005), (0, 0, -0.005), "0.8 0.8 0.8 1", 'name="plate"')
        block = box((parts.BLOCK,) * 3, (0, 0, 0), "0.85 0.2 0.2 1", 'mass="0.06" friction="1 0.01 0.001"')
        return parts.scene(f'<body name="stand">{top}{post}</body>' + free("block", block))

    def _place(self, rng: np.random.Generator) -> Vector:
        stand = np.array([0.5, 0.0, rng.uniform(0.03, 0.15)])
        stand[:2] += rng.uniform(-0.1, 0.1, 2)
        self.model.body("stand").pos[:] = stand
        self.model.geom("plate").size[:2] = self._half = rng.uniform(0.035, 0.055)
        self.broken = False
        offset = rng.uniform(-0.08, 0.08, 2)
        return np.array([*(stand[:2] + offset), 0.26 + rng.uniform(-0.02, 0.02)])

    def _take(self) -> None:
        self.data.qpos[6:8], self.data.ctrl[6] = parts.BLOCK + 0.0003, 0.0
        self.put("block", self.hand() - (0.0, 0.0, 0.004))

    def _object_state(self) -> Vector:
        """The stand's middle from the hand, without its height."""
        return np.asarray((self.body("stand") - self.hand())[:2])

    def succeeded(self) -> bool:
        off = self.body("block") - self.body("stand")
        stands = abs(off[2] - parts.BLOCK) < 0.003 and np.abs(off[:2]).max() < self._half
        return bool(stands and not self.broken and self.let_go("block"))


class Command(TabletopEnv):
    """Three cups, a ball and a hook; the sentence says which of four things to do."""

    sense, objects, steps = "text", 27, 100

    def __init__(self, command: str, name: str, variant: Variant = "state", **more: Any) -> None:
        self.command, self.words = command, COMMANDS[command]
        super().__init__(name, variant, **more)

    def _xml(self) -> str:
        things = "".join(parts.cup(name, rgba) for name, rgba in CUPS.items())
        return parts.scene(things + parts.ball("ball", parts.SMALL_BALL, 0.02, "0.1 0.7 0.15 1") + parts.hook())

    def _place(self, rng: np.random.Generator) -> Vector:
        spots = rng.permutation(4)
        for name, spot in zip((*CUPS, "ball"), spots, strict=True):
            at = np.array([0.42, -0.24 + 0.16 * spot, parts.SMALL_BALL if name == "ball" else 0.0005])
            at[:2] += rng.uniform(-0.025, 0.025, 2)
            self.put(name, at, rng.uniform(-0.1, 0.1))
        return np.array([0.45, 0.0, 0.2]) + rng.uniform(-0.03, 0.03, 3)

    def _object_state(self) -> Vector:
        """From the hand: green, blue, yellow cup (where they are held), ball, tip of the hook. Then what belongs
        together: from the blue cup's foot to the green one's rim, from yellow to blue, from the ball to the middle of
        the green rim, from the green handle to the tip of the hook."""
        hand, (green, blue, yellow, ball) = self.hand(), (self.body(name) for name in (*CUPS, "ball"))
        held, rim = np.array([0.0, 0.0, parts.CUP_HELD]), np.array([0.0, 0.0, parts.CUP_HEIGHT])
        handle = green + np.array([parts.HANDLE, 0.0, parts.HANDLE_Z])
        tip = parts.HOOK - np.array([0.0, parts.HOOK_LENGTH, 0.0])
        seen = [thing + held - hand for thing in (green, blue, yellow)] + [ball - hand, tip - hand]
        return np.concatenate([*seen, green + rim - blue, blue + rim - yellow, green + rim - ball, tip - handle])

    def _twice(self, whole: Vector, cut: Vector) -> Vector:
        """Six numbers for each of the nine: a policy that picks one by the sentence has all of it."""
        return np.hstack([whole.reshape(-1, 3), cut.reshape(-1, 3)]).ravel()

    def succeeded(self) -> bool:
        if self.command == "ball":
            off = self.body("ball") - self.body("green")
            return bool(np.hypot(*off[:2]) < parts.CUP and 0 < off[2] < parts.CUP_HEIGHT / 2 and self.let_go("ball"))
        if self.command == "hang":
            cup = self.data.xipos[self.model.body("green").id]
            near = abs(cup[0] - parts.HOOK[0]) < 0.08 and abs(cup[1] - parts.HOOK[1] + 0.065) < 0.06
            return bool(near and cup[2] > 0.06 and self.let_go("green") and self.hand()[2] > cup[2] + 0.1)
        upper, lower = ("blue", "green") if self.command == "stack-blue" else ("yellow", "blue")
        off = self.body(upper) - self.body(lower)
        stands = abs(off[2] - parts.CUP_HEIGHT) < 0.006 and np.hypot(*off[:2]) < parts.CUP / 2
        return bool(stands and self.let_go(upper))


NAMES: dict[str, tuple[str, Variant]] = {
    f"tabletop-{task}" + ("" if variant == "state" else f"-{variant}"): (task, variant)
    for variant in get_args(Variant)
    for task in WORDS
}


def make_tabletop(task: str, variant: Variant = "state", **more: Any) -> TabletopEnv:
    name = next((name for name, what in NAMES.items() if what == (task, variant)), None)
    if name is None:
        raise PrismError(f"tabletop: there is no task '{task}' ({variant}): use one of {', '.join(NAMES)}")
    if task in COMMANDS:
        return Command(task, name, variant, **more)
    if task == "rattle":
        return Rattle(name, variant, **more)
    if task == "height":
        return Height(name, variant, **more)
    if task in ("can", "nest"):
        from prism_sims.tabletop_place import Can, Nest

        return (Can if task == "can" else Nest)(name, variant, **more)
    return Insert("left" if task == "insert-left" else "right", name, variant, **more)
