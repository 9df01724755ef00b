"""PRISM's tasks as LeRobot environments. LeRobot finds this package by its name: nothing has to be imported by hand.

| prism's sensor                     | the environment's observation | the policy's key               |
| ---------------------------------- | ----------------------------- | ------------------------------ |
| state or proprio                   | agent_pos                     | observation.state              |
| rgb, touch of 3 channels           | pixels[NAME]                  | observation.images.NAME        |
| text                               | (task_description)            | task                           |
| everything else; depth in metres   | NAME                          | observation.NAME               |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.utils.constants import ACTION, OBS_STATE
from prism.data.formats.lerobot import TASK
from prism.data.formats.lerobot_writer import feature_keys
from prism.sensors import decode_text
from prism.sims.environment import TEST_SEED, Env, StepResult
from prism.sims.task_table import make_env

_IMAGES = "observation.images."


def _split(key: str) -> tuple[str, str]:
    """Where LeRobot looks for what becomes `key`: the observation's entry, and the one inside it."""
    if key.startswith(_IMAGES):
        return "pixels", key.removeprefix(_IMAGES)
    return ("agent_pos", "") if key == OBS_STATE else (key.removeprefix("observation."), "")


class PrismGymEnv(gym.Env[dict[str, Any], np.ndarray]):
    """One of prism's environments behind gymnasium's interface; the reward is the score."""

    def __init__(self, task: str) -> None:
        self.prism: Env = make_env(task)
        self.task = task
        self.task_description = task.replace("-", " ")
        self._max_episode_steps = self.prism.max_steps
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(self.prism.fps)}
        self.render_mode = "rgb_array"
        self._keys = feature_keys(self.prism.sensors)
        self._seed = TEST_SEED
        spaces: dict[str, Any] = {}
        for sensor in self.prism.sensors:
            if self._keys[sensor.name] == TASK:
                continue
            entry, inner = _split(self._keys[sensor.name])
            low, high = (0, 255) if sensor.dtype == np.uint8 else (-np.inf, np.inf)
            space = gym.spaces.Box(low, high, sensor.shape, sensor.dtype.type)
            if inner:
                spaces.setdefault(entry, {})[inner] = space
            else:
                spaces[entry] = space
        self.observation_space = gym.spaces.Dict(
            {name: gym.spaces.Dict(space) if isinstance(space, dict) else space for name, space in spaces.items()}
        )
        self.action_space = gym.spaces.Box(self.prism.action_low, self.prism.action_high)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Without a seed the episodes are prism's test episodes, one after the other."""
        super().reset(seed=seed)
        self._seed = self._seed + 1 if seed is None else seed
        return self._shown(self.prism.reset(self._seed)), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        result: StepResult = self.prism.step(np.asarray(action, np.float32))
        shown = self._shown(result.observation)
        over = result.done and not result.success
        return shown, float(result.score), result.success, over, {"is_success": bool(result.success)}

    def _shown(self, observation: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for name, value in observation.items():
            if self._keys[name] == TASK:
                self.task_description = decode_text(value)
                continue
            entry, inner = _split(self._keys[name])
            if inner:
                shown.setdefault(entry, {})[inner] = value
            else:
                shown[entry] = value
        return shown

    def render(self) -> np.ndarray:
        picture = self.prism.render()
        return np.zeros((64, 64, 3), np.uint8) if picture is None else picture

    def close(self) -> None:
        self.prism.close()


@EnvConfig.register_subclass("prism")
@dataclass
class PrismEnvConfig(EnvConfig):
    """`--env.type=prism --env.task=pusht`: any task that `prism train` knows."""

    task: str = "pusht"
    fps: int = 10
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        env = make_env(self.task)
        self.fps = round(env.fps)
        keys = feature_keys(env.sensors)
        features = {ACTION: PolicyFeature(FeatureType.ACTION, (env.action_dim,))}
        for sensor in env.sensors:
            key = keys[sensor.name]
            if key != TASK:
                kind = FeatureType.VISUAL if key.startswith(_IMAGES) else FeatureType.STATE
                features[key] = PolicyFeature(kind, sensor.shape)
        env.close()
        self.features, self.features_map = features, {key: key for key in features}

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {}

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, VectorEnv]]:
        make = freeze_after_episode_end(partial(PrismGymEnv, self.task))
        if use_async_envs and n_envs > 1:
            vector: VectorEnv = AsyncVectorEnv(
                [make] * n_envs, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP
            )
        else:
            vector = SyncVectorEnv([make] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return {"prism": {0: vector}}
