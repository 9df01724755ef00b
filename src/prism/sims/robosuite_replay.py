"""Demonstrations of robosuite tasks in robomimic's layout, with the simulator's states: played again, and compared.

prism's own format keeps sensors and actions. The rest of what robomimic stores (states, the scene, the observation
behind the last action) comes back by playing the recorded actions from the recorded seeds, which gives the same
observations bit for bit; where it does not, the dataset was made with another simulator, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, EpisodeSource
from prism.data.formats.robomimic_writer import Demonstration, RobomimicWriter
from prism.errors import PrismError
from prism.sims.robosuite import NAMES, RobosuiteEnv

_SEARCH = 1000  # seeds between two demonstrations that were kept


def to_robomimic(
    source: EpisodeSource,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Writes `source`, recorded by `prism data collect robosuite-TASK`; returns episodes and steps."""
    task = str(getattr(source, "task", ""))
    provenance: dict[str, Any] = getattr(source, "provenance", {})
    if task not in NAMES or "first_seed" not in provenance:
        raise PrismError(
            f"{source.path}: robomimic's layout needs the simulator's states, so it can be written for datasets of "
            "`prism data collect robosuite-...` only; use --to prism or --to lerobot"
        )
    if provenance.get("noise"):
        raise PrismError(
            f"{source.path}: was recorded with noise, so its actions do not lead through its states; collect without"
        )
    env = RobosuiteEnv(*NAMES[task])
    total, seed = int(source.lengths.sum()), int(provenance["first_seed"])
    try:
        with RobomimicWriter(Path(out), env.env_args, overwrite) as writer:
            for episode in range(len(source.lengths)):
                shown, seed = _played(env, source, episode, seed)
                writer.add(shown)
                if progress is not None:
                    progress(writer.steps, total)
            return len(source.lengths), writer.steps
    finally:
        env.close()


def _played(env: RobosuiteEnv, source: EpisodeSource, episode: int, seed: int) -> tuple[Demonstration, int]:
    """The episode played again, and the first seed of the next."""
    recorded = source.read(episode)
    for start in range(seed, seed + _SEARCH):
        observation = env.reset(start)
        if all(np.array_equal(recorded.streams[name][0], value) for name, value in observation.items()):
            break
    else:
        raise _differs(source, episode, 0)
    rows, states, rewards = [observation], [], []
    for step, action in enumerate(recorded.actions):
        if any(not np.array_equal(recorded.streams[name][step], value) for name, value in observation.items()):
            raise _differs(source, episode, step)
        states.append(env.state())
        result = env.step(action)
        observation = result.observation
        rows.append(observation)
        rewards.append(float(result.success))
    streams = {name: np.stack([row[name] for row in rows]) for name in observation}
    dones = np.zeros(len(rewards), np.int64)
    dones[-1] = 1
    keys = robomimic_keys(env, streams)
    shown = Demonstration(keys, recorded.actions, np.stack(states), np.array(rewards), dones, env.model_xml())
    return shown, start + 1


def robomimic_keys(env: RobosuiteEnv, streams: dict[str, Array]) -> dict[str, Array]:
    """Streams (T, ...) by our sensors' names -> the same numbers by robomimic's keys."""
    keys: dict[str, Array] = {}
    for name, rows in streams.items():
        if name == "object_state":
            keys["object"] = rows
        elif name in ("proprio", "tactile"):
            for robot, part in enumerate(np.split(rows, env.robots, axis=1)):
                if name == "tactile":
                    keys[f"robot{robot}_ee_force"], keys[f"robot{robot}_ee_torque"] = part[:, :3], part[:, 3:]
                else:
                    keys[f"robot{robot}_eef_pos"], keys[f"robot{robot}_eef_quat"] = part[:, :3], part[:, 3:7]
                    keys[f"robot{robot}_gripper_qpos"] = part[:, 7:]
        else:
            kind, view = name.split("_", 1)
            camera = (
                env.static_camera
                if view == "static"
                else f"robot{view.removeprefix('wrist').strip('_') or 0}_eye_in_hand"
            )
            keys[f"{camera}_image" if kind == "rgb" else f"{camera}_depth"] = rows if kind == "rgb" else rows[..., None]
    return keys


def _differs(source: EpisodeSource, episode: int, step: int) -> PrismError:
    return PrismError(
        f"{source.path}: episode {episode}, step {step}: this machine's simulator shows something else: recorded with "
        "another version of robosuite or MuJoCo; collect it again"
    )
