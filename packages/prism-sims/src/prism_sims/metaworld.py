"""MetaWorld v3: 50 manipulation tasks of one arm, from state or from pixels, with their scripted experts.

Protocol (DP3): 200 steps, success if any step succeeds. Actions are 4-D in [-1, 1]: a displacement of the hand
and the closing of the gripper. Simulated time runs at 80 steps a second.

A seed fixes the layout. MetaWorld's own reset has four traps that this module closes: it draws its layout from
numpy's global state, it draws twice and keeps what the first draw left in the model, positions in its first
observation may predate the draw, and its goal is drawn where it is only after the first step. Here the model is put
back as it was loaded, both passes of the reset draw the same numbers from a generator of their own, and the first
observation is taken after a forward pass, with the goal in its place.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.sims.environment import Array

from prism_sims import offscreen
from prism_sims.mujoco_env import DrawnEnv

Variant = Literal["state", "pixels", "rgbd"]

SPLITS: dict[str, tuple[str, ...]] = {
    "easy": (
        "button-press", "button-press-topdown", "button-press-topdown-wall", "button-press-wall", "coffee-button",
        "dial-turn", "door-close", "door-lock", "door-open", "door-unlock", "drawer-close", "drawer-open",
        "faucet-close", "faucet-open", "handle-press", "handle-press-side", "handle-pull", "handle-pull-side",
        "lever-pull", "plate-slide", "plate-slide-back", "plate-slide-back-side", "plate-slide-side", "reach",
        "reach-wall", "window-close", "window-open", "peg-unplug-side",
    ),
    "medium": (
        "basketball", "bin-picking", "box-close", "coffee-pull", "coffee-push", "hammer", "peg-insert-side",
        "push-wall", "soccer", "sweep", "sweep-into",
    ),
    "hard": ("assembly", "hand-insert", "pick-out-of-hole", "pick-place", "push", "push-back"),
    "very-hard": ("shelf-place", "disassemble", "stick-pull", "stick-push", "pick-place-wall"),
}  # fmt: skip
TASKS: tuple[str, ...] = tuple(sorted(task for split in SPLITS.values() for task in split))

NAMES: dict[str, tuple[str, Variant]] = {
    f"metaworld-{task}" + ("" if variant == "state" else f"-{variant}"): (task, variant)
    for variant in get_args(Variant)
    for task in TASKS
}  # every task of this simulator by the name that make_env knows

MAX_STEPS = 200
FPS = 80.0
_TWO_OBJECTS = ("hammer", "stick-pull", "stick-push")
_HAND, _FIRST, _SECOND = slice(0, 3), slice(4, 7), slice(11, 14)  # in MetaWorld's observation
_MODEL_ARRAYS = ("body_pos", "body_quat", "site_pos", "site_quat", "geom_pos", "geom_quat")  # what resets move
SIZE = 128  # of a picture: a fifth more of a step's time than 84, and a frozen backbone sees things of a few pixels
SEEN = 64  # what a policy sees of depth, whose network is trained
REACH = (0.02, 3.0)  # metres of depth that mean something: the hand's own fingers, the far wall of the table
CAMERAS = {"wrist": "gripperPOV", "static": "corner2"}
_STATIC_AT = (
    0.6,
    0.295,
    0.8,
)  # DP3's place: from MetaWorld's own an object is a few pixels (docs/reference/simulators.md)
_PICTURE = (240, 320)
# MetaWorld's own corner cameras hang upside down
_VIEW = offscreen.View(lookat=(0.0, 0.68, 0.1), distance=1.1, azimuth=145.0, elevation=-38.0)


def object_states(observation: NDArray[np.float64], goal: NDArray[np.float64], objects: int) -> dict[str, Array]:
    """object_state (15,): object, goal, and the differences a policy needs; where there are two objects, second_object
    (12,). Metres.

    Left out of MetaWorld's 14 object numbers: its padding zeros, and orientations, which no scripted expert reads
    and which carry solver noise of 1e-5 that normalisation would blow up. Rounded to 0.1 mm for the same reason:
    what stands still is then exactly constant.
    """
    hand, first, second = observation[_HAND], observation[_FIRST], observation[_SECOND]
    shown = {"object_state": [first, goal, first - hand, goal - first, goal - hand]}
    if objects == 2:
        shown["second_object"] = [second, second - hand, second - first, goal - second]
    zero = np.float32(0)  # -0.0 -> 0.0
    return {name: np.round(np.concatenate(parts), 4).astype(np.float32) + zero for name, parts in shown.items()}


def _load(task: str) -> Any:
    """The MetaWorld environment itself, goal visible, layouts drawn from a generator that reset() installs."""
    try:
        from metaworld.env_dict import ENV_CLS_MAP
    except ImportError as error:
        raise PrismError(f"MetaWorld is not installed ({error.name}): pip install 'prism-policy[sims]'") from error
    env = ENV_CLS_MAP[f"{task}-v3"]()
    env.__dict__.pop("sawyer_observation_space", None)  # cached for the hidden goal
    env._partially_observable = False
    env._set_task_called = True
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    return env


def camera_specs(depth: bool, size: int = SIZE) -> tuple[SensorSpec, ...]:
    """rgb_wrist and rgb_static; with `depth` also depth_wrist and depth_static."""
    specs = [SensorSpec(f"rgb_{n}", "rgb", (size, size, 3)) for n in CAMERAS]
    if depth:
        small = (SEEN, SEEN) if size > SEEN else None
        specs += [SensorSpec(f"depth_{n}", "depth", (size, size), clip=REACH, resize=small) for n in CAMERAS]
    return tuple(specs)


class MetaWorldEnv(DrawnEnv):
    """One MetaWorld task; sensor `proprio` (hand xyz, gripper opening), and

    state    object_state (second_object): where things are; privileged
    pixels   rgb_wrist and rgb_static, size x size
    rgbd     these and depth_wrist, depth_static in metres
    """

    def __init__(self, task: str, variant: Variant = "state", max_steps: int = MAX_STEPS, size: int = SIZE) -> None:
        if task not in TASKS:
            raise PrismError(f"MetaWorld has no task '{task}': see prism_sims.metaworld.TASKS")
        if variant not in get_args(Variant):
            raise PrismError(f"MetaWorld has no variant '{variant}'; use one of {', '.join(get_args(Variant))}")
        self.task, self.variant = task, variant
        name = next(name for name, what in NAMES.items() if what == (task, variant))
        if variant != "state":
            offscreen.require_backend(name)  # before anything is recorded or trained
        self._env = _load(task)
        if not 1 <= max_steps <= self._env.max_path_length:
            raise PrismError(f"max_steps {max_steps} is out of range: 1 to {self._env.max_path_length} for {task}")
        self._objects = 2 if task in _TWO_OBJECTS else 1
        self._pristine = {name: getattr(self._env.model, name).copy() for name in _MODEL_ARRAYS}
        if variant == "state":
            second = SensorSpec("second_object", "vector", (12,))  # its own: one policy may learn several tasks
            shown = (SensorSpec("object_state", "vector", (15,)), *[second][: self._objects - 1])
        else:
            shown, depth = camera_specs(variant == "rgbd", size), variant == "rgbd"
            self._env.model.camera(CAMERAS["static"]).pos[:] = _STATIC_AT
            self._cameras = offscreen.Cameras(self._env.model, (size, size), CAMERAS, depth, upside_down=("static",))
        self._raw = np.zeros(39)
        sensors = (SensorSpec("proprio", "vector", (4,)), *shown)
        super().__init__(name, sensors, -np.ones(4), np.ones(4), FPS, max_steps)

    def _start(self, seed: int) -> None:
        import mujoco

        env = self._env
        for name, values in self._pristine.items():
            getattr(env.model, name)[:] = values
        env.curr_path_length = 0
        env._did_see_sim_exception = False
        for _ in range(2):  # the first pass moves the model, the second starts from the model so moved
            env.np_random = np.random.default_rng(seed)
            mujoco.mj_resetData(env.model, env.data)
            env.reset_model()
        mujoco.mj_forward(env.model, env.data)
        now = env._get_curr_obs_combined_no_goal()
        env._prev_obs = now
        for name, position in env._target_site_config:
            env._set_pos_site(name, position)
        self._raw = np.concatenate([now, now, env._get_pos_goal()])

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        self._raw, _, _, _, info = self._env.step(action)
        # MetaWorld clips the goal it shows to a box that some tasks' goals leave; the real one is the same all along
        self._raw[36:39] = self._env._get_pos_goal()
        success = bool(info["success"] > 0)
        return float(success), success

    def _observe(self) -> dict[str, Array]:
        proprio = self._raw[:4].astype(np.float32)
        if self._cameras is None:
            return {"proprio": proprio, **object_states(self._raw, self._raw[36:39], self._objects)}
        return {"proprio": proprio, **self._cameras.observe(self._env.data)}

    def state(self) -> NDArray[np.float64]:
        """MetaWorld's own observation (39,): hand, gripper, objects, the same one step ago, goal."""
        self._need_episode("state()")
        return self._raw.copy()

    def _make_renderer(self) -> offscreen.OffscreenRenderer:
        return offscreen.OffscreenRenderer(self._env.model, *_PICTURE, _VIEW)

    def _drawn(self) -> tuple[Any, offscreen.View | None]:
        return self._env.data, None

    def close(self) -> None:
        super().close()
        self._env.close()


class PushBack:
    """Ours for push-back: MetaWorld's pulls before its fingers are closed, and loses the puck every second time."""

    def get_action(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        hand, opening, puck, goal = state[:3], state[3], state[4:7], state[-3:]
        aside, above = np.linalg.norm(hand[:2] - puck[:2]), hand[2] - puck[2]
        grip = -1.0
        if aside > 0.06 or (aside > 0.03 and above > 0.06):
            to = puck + np.array([0.0, 0.0, 0.1])
        elif above > 0.045:
            to = puck - np.array([0.0, 0.0, 0.02])
        else:
            grip = 1.0
            held = opening < 0.65  # 1 is wide open, 0.5 holds the puck
            to = hand + (goal - puck) * np.array([1.0, 1.0, 0.0]) if held else puck
        return np.append(10.0 * (to - hand), grip)


OWN = {"push-back": PushBack}


class MetaWorldExpert:
    """MetaWorld's scripted policy for the task, or one of OWN; deterministic, reads only the observation it was written
    for."""

    def __init__(self, env: MetaWorldEnv) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        policies: dict[str, Any] = ENV_POLICY_MAP
        self._env = env
        self._make = OWN.get(env.task) or policies[f"{env.task}-v3"]
        self._policy = self._make()

    def reset(self, seed: int) -> None:
        self._policy = self._make()  # nothing random in it; a fresh one has no memory of the last episode

    def act(self) -> NDArray[np.float32]:
        with warnings.catch_warnings():  # the experts warn about their own gains; their actions are clipped here
            warnings.simplefilter("ignore")
            action = np.asarray(self._policy.get_action(self._env.state()), dtype=np.float32)
        return np.clip(action, np.float32(-1), np.float32(1))
