"""CALVIN through the user's own checkout of calvin_env: 34 commands, or chains of five of them.

An episode of `calvin-COMMAND` starts where the command can be done, gives it in words and ends with its success or
after 360 steps. An episode of `calvin` is a chain: when a command is done, the next one is given (`goal_index` counts
them); one that is not done in 360 steps ends it. Success is all five, the score the share that was done. 30 steps a
second; actions are CALVIN's relative ones (position x50, rotation x20, gripper -1 closes), clipped to [-1, 1].

Sensors have the names of the dataset's keys (what `prism train CALVIN/training` learns from) and those of this project:

    rgb_static                     (200, 200, 3)     rgb_gripper, rgb_wrist      (84, 84, 3)
    depth_static                   (200, 200) m      depth_gripper, depth_wrist  (84, 84) m
    rgb_tactile, tactile           (160, 120, 6), only where `tacto` is installed
    robot_obs, proprio             (15,)             text                        (64,) the command

Recordings (`prism data collect`) hold the dataset's names alone. The variants `-state` have no pictures, which are nine
tenths of the time, and show the simulator's own state instead: proprio (11,), object_state (54,), text.

calvin_env keeps one world a process in module-level calls, so the environments of a process share one: the last reset
owns it. Every reset loads the world anew: Bullet's contact caches would make an episode depend on the one before.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError
from prism.sensors import SensorSpec, encode_text
from prism.sims.environment import TEST_SEED, Array, Simulation, StepResult

from prism_sims.calvin_checkout import (
    BLOCKS,
    GET_IT,
    LENGTH,
    NAMES,
    Chains,
    Checkout,
    Symbols,
    find_checkout,
    quiet,
    starts,
)
from prism_sims.calvin_scene import OBJECT_STATE, PROPRIO, Fixture, Scene, object_state, proprio, read_fixtures

MAX_STEPS = 360  # a command
FPS = 30.0
TEXT_BYTES = 64
SHIFT = 4  # pixels by which a picture is moved in training, out of the margin that is left
SEEN = 96  # a policy of recordings made here sees pictures at most this large; CALVIN's own have their settings
EGL = "PRISM_CALVIN_EGL"  # "1": draw on the GPU, as CALVIN's own evaluation does

_AWAY = range(6, 12)  # the hand that holds one moves by 12 cm meanwhile, and comes to rest
_SETTLE = 22  # control steps after blocks were put into the hand, the drawer or onto each other
_SCENE = {block: 6 + 6 * i for i, block in enumerate(BLOCKS)}  # where a block's pose begins in scene_obs
_DRAWER = (0.18, -0.30, 0.40)  # above the floor of the open drawer
_ON_TOP = 0.06  # metres between the centres of stacked blocks, a little more than their height
_ALIASES = {
    "rgb_gripper": "rgb_wrist", "depth_gripper": "depth_wrist", "rgb_tactile": "tactile", "robot_obs": "proprio"
}  # fmt: skip

_STATE = {
    "proprio": SensorSpec("proprio", "vector", (PROPRIO,)),
    "object_state": SensorSpec("object_state", "vector", (OBJECT_STATE,)),
    "text": SensorSpec("text", "text", (TEXT_BYTES,)),
}


class World:
    """The one CALVIN simulator of this process, and what its checkout knows."""

    def __init__(self, checkout: Checkout, sim: Any, oracle: Any) -> None:
        self.checkout, self.sim, self.oracle = checkout, sim, oracle
        self.sentences = checkout.sentences()
        self.chains = Chains(*checkout.rules())
        self.place = checkout.placement()
        self.cameras = list(sim.cameras)
        self.owner: object = None

    @functools.cached_property
    def fixtures(self) -> dict[str, Fixture]:
        return read_fixtures(self.sim)

    def restart(self, state: Symbols) -> Mapping[str, Any]:
        """Everything as loaded, then as the symbolic state says; the first observation."""
        robot_obs, scene_obs, is_special = realise(self.place, state)
        with quiet():
            self.sim.seed(0)
            self.sim.scene.np_random = self.sim.np_random
            self.sim.robot.gripper_action = 1
            self.sim.load()
            observation: Mapping[str, Any] = self.sim.reset(robot_obs=robot_obs, scene_obs=scene_obs)
            for number in range(_SETTLE if is_special else 0):
                # CALVIN's start is above the open drawer: a hand that let go there would have placed its block.
                away = 1.0 if state["grasped"] and number in _AWAY else 0.0
                self.sim.robot.apply_action(np.array([0, away, 0, 0, 0, 0, -1 if state["grasped"] else 1], dtype=float))
                for _ in range(self.sim.action_repeat):
                    self.sim.p.stepSimulation(physicsClientId=self.sim.cid)
                self.sim.scene.step()
            return self.sim.get_obs() if is_special else observation


def realise(place: Any, state: Symbols) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """robot_obs (15,), scene_obs (24,) of a symbolic state, and whether it is one that CALVIN never starts from.

    CALVIN places blocks on the table and in the cabinet. Blocks in the hand, in the drawer or on another block are
    ours: put there, and left to settle.
    """
    special = {block: state[block] for block in BLOCKS if state[block] not in ("table", "slider_right", "slider_left")}
    plain = {block: "table" if where == "stacked_bottom" else None for block, where in special.items()}
    fixed = {key: value for key, value in {**state, **plain, "grasped": 0}.items() if value is not None}
    base = next((s for s in starts() if all(s[key] == value for key, value in fixed.items())), None)
    if base is None:
        raise PrismError(f"CALVIN has no start like {dict(state)}")
    robot_obs, scene_obs = place(base)
    for block, where in special.items():
        at = _SCENE[block]
        if where == "grasped":
            scene_obs[at : at + 6] = [*robot_obs[:3], 0.0, 0.0, robot_obs[5]]
        elif where == "drawer":
            scene_obs[at : at + 6] = [*_DRAWER, 0.0, 0.0, np.pi / 2]
        elif where == "stacked_top":
            below = _SCENE[next(other for other in BLOCKS if state[other] == "stacked_bottom")]
            scene_obs[at : at + 6] = scene_obs[below : below + 6]
            scene_obs[at + 2] += _ON_TOP
    return robot_obs, scene_obs, bool(special)


@functools.cache
def world(path: Path | None = None) -> World:
    checkout = find_checkout(path)
    if sys.path[:1] != [str(checkout.env)]:
        sys.path.insert(0, str(checkout.env))
    try:
        with quiet(errors=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import hydra
            from hydra import compose, initialize_config_dir
            from hydra.core.global_hydra import GlobalHydra
            from omegaconf import OmegaConf

            touch = importlib.util.find_spec("tacto")  # the empty folder of a submodule is found, but has no origin
            cameras = "static_gripper_tactile" if touch and touch.origin else "static_and_gripper"
            GlobalHydra.instance().clear()
            with initialize_config_dir(str(checkout.env / "conf"), version_base=None):
                settings = [f"cameras={cameras}", "use_vr=false", "record=false", "env.use_scene_info=true"]
                settings += [f"env.use_egl={str(os.environ.get(EGL) == '1').lower()}"]
                if "tactile" in cameras:
                    settings.append("cameras.tactile.visualize_gui=false")
                config = compose("config_data_collection", overrides=settings)
            sim = hydra.utils.instantiate(config.env)
            sim.close = lambda: None  # it would print at the end of the process, which closes it anyway
            oracle = hydra.utils.instantiate(OmegaConf.load(checkout.env / "conf/tasks/new_playtable_tasks.yaml"))
    except ImportError as error:
        raise PrismError(f"CALVIN needs the package {error.name}: {GET_IT}") from error
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        if isinstance(error.__cause__, ImportError) or "ModuleNotFoundError" in str(error):
            raise PrismError(f"CALVIN lacks a package ({line}): {GET_IT}") from error
        if "InvalidGitRepositoryError" in f"{type(error).__name__} {error!r}":
            raise PrismError(f"{checkout.env} is not a git checkout, which calvin_env needs: {GET_IT}") from error
        raise PrismError(f"{checkout.env}: calvin_env does not start ({type(error).__name__}: {line})") from error
    return World(checkout, sim, oracle)


class CalvinEnv(Simulation):
    """`task` None: chains of five commands."""

    def __init__(self, task: str | None = None, inputs: str = "sensors", path: Path | None = None) -> None:
        self.task = task
        self._world = world(path)
        self._cameras = self._world.cameras if inputs == "sensors" else []
        self._shown = self._survey() if inputs == "sensors" else _STATE
        self.goals: tuple[str, ...] = ()  # the commands of this episode, by name
        self.goal_index = 0  # which of them is to be done now
        self._observation: Mapping[str, Any] = {}
        self._start_info: Any = None
        self._command_steps = 0
        name = next(name for name, of in NAMES.items() if of == (task, inputs))
        max_steps = MAX_STEPS * (1 if task else LENGTH)
        super().__init__(name, tuple(self._shown.values()), -np.ones(7), np.ones(7), FPS, max_steps)
        twice = set(_ALIASES.values()) if inputs == "sensors" else set()
        self.recorded_sensors = tuple(spec for spec in self.sensors if spec.name not in twice)

    def _survey(self) -> dict[str, SensorSpec]:
        """What this world's cameras say of themselves, by the dataset's names and by this project's."""
        specs: list[SensorSpec] = []
        for camera in self._cameras:
            size = (int(camera.height), int(camera.width)) if hasattr(camera, "height") else (160, 120)
            if camera.name == "tactile":
                specs.append(SensorSpec("rgb_tactile", "tactile", (*size, 6)))
            else:
                seen: dict[str, Any] = {}
                if min(size) > 4 * SHIFT:
                    seen = {"crop": (size[0] - 2 * SHIFT, size[1] - 2 * SHIFT), "random_shift": SHIFT}
                    seen["resize"] = (SEEN, SEEN) if min(size) > 2 * SEEN else None
                specs.append(SensorSpec(f"rgb_{camera.name}", "rgb", (*size, 3), **seen))
                specs.append(SensorSpec(f"depth_{camera.name}", "depth", size, **seen))
        specs += [SensorSpec("robot_obs", "vector", (15,)), SensorSpec("text", "text", (TEXT_BYTES,))]
        named = [(name, spec) for spec in specs for name in (spec.name, _ALIASES.get(spec.name, spec.name))]
        return {name: replace(spec, name=name) for name, spec in named}

    @property
    def instruction(self) -> str:
        return self._world.sentences[self.goals[min(self.goal_index, len(self.goals) - 1)]]

    def _start(self, seed: int) -> None:
        # Evaluation episode i is chain i; tests and the rest never share one.
        number = seed - TEST_SEED if seed >= TEST_SEED else -1 - seed
        if self.task is None:
            state, self.goals = self._world.chains.chain(number % 2**32)
        else:
            state, self.goals = self._world.chains.start_for(self.task, number % 2**32), (self.task,)
        self.goal_index = 0
        self._world.owner, self._world.sim.cameras = self, self._cameras
        self._observation = self._world.restart(state)
        self._begin_command()

    def _begin_command(self) -> None:
        """What the current command changes is measured from here."""
        self._command_steps, self._start_info = 0, self._world.sim.get_info()

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        command = action.astype(np.float64)
        command[6] = 1.0 if command[6] > 0 else -1.0  # the gripper knows two
        self._observation, _, _, info = self._world.sim.step(command)
        self._command_steps += 1
        goal = self.goals[self.goal_index]
        if self._world.oracle.get_task_info_for_set(self._start_info, info, {goal}):
            self.goal_index += 1
            if self.goal_index < len(self.goals):
                self._begin_command()
        done = self.goal_index / len(self.goals)
        return done, done == 1.0

    def step(self, action: NDArray[np.float32]) -> StepResult:
        if self._world.owner is not self:
            raise PrismError(f"{self.name}: call reset(seed) before step(action); a process has one CALVIN world")
        result = super().step(action)
        self._is_over = result.done or self._command_steps >= MAX_STEPS
        return replace(result, done=self._is_over)

    def _observe(self) -> dict[str, Array]:
        text = encode_text(self.instruction, TEXT_BYTES).copy()
        if self._shown is _STATE:
            state = self.state()
            return {"proprio": proprio(state), "object_state": object_state(self._world.fixtures, state), "text": text}
        raw = self._observation
        pictures = {**raw["rgb_obs"], **raw["depth_obs"]}
        streams: dict[str, Array] = {"robot_obs": np.array(raw["robot_obs"], dtype=np.float32)}
        for name, spec in self._shown.items():
            if name in pictures:
                streams[name] = np.array(pictures[name], dtype=spec.dtype)
        streams |= {alias: streams[name].copy() for name, alias in _ALIASES.items() if name in streams}
        return streams | {"text": text}

    def record(self, observation: Mapping[str, Array]) -> dict[str, Array]:
        return {spec.name: observation[spec.name] for spec in self.recorded_sensors}

    def state(self) -> NDArray[np.float64]:
        """robot_obs (15) and scene_obs (24): slider, drawer, button, switch, two lights, poses of three blocks."""
        if not self._observation:
            raise PrismError(f"{self.name}: call reset(seed) before state()")
        return np.concatenate([self._observation["robot_obs"], self._observation["scene_obs"]]).astype(np.float64)

    def scene(self) -> Scene:
        """The state for the experts."""
        return Scene.read(self._world.fixtures, self.state())

    def render(self) -> NDArray[np.uint8] | None:
        if not self._observation:
            return None
        picture = self._observation["rgb_obs"].get("rgb_static")
        if picture is None:  # a variant without pictures
            picture = next(camera for camera in self._world.cameras if camera.name == "static").render()[0]
        return np.array(picture, dtype=np.uint8)

    def close(self) -> None:
        """The world stays: the process has one, and the next environment takes it."""
        if self._world.owner is self:
            self._world.owner = None
