"""A small fake of calvin_env's API and of a checkout's files: our own world behind CALVIN's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_sims.calvin import World
from prism_sims.calvin_checkout import BLOCKS, TASKS, Checkout


def write_checkout(folder: Path) -> Path:
    """Files where a checkout has them; the rules are our own and much simpler than CALVIN's."""
    evaluation = folder / "calvin_models" / "calvin_agent" / "evaluation"
    annotations = folder / "calvin_models" / "conf" / "annotations"
    for path in (
        evaluation,
        annotations,
        folder / "calvin_env" / "calvin_env" / "envs",
        folder / "calvin_env" / "conf",
    ):
        path.mkdir(parents=True)
    lines = [f'{task}: ["please {task.replace("_", " ")}", "another way to say it"]' for task in TASKS]
    (annotations / "new_playtable_validation.yaml").write_text("\n".join(lines))
    rules = {task: [{"condition": {"grasped": 0}, "effect": {}}] for task in TASKS}
    rules["open_drawer"] = [{"condition": {"drawer": "closed", "grasped": 0}, "effect": {"drawer": "open"}}]
    rules["close_drawer"] = [{"condition": {"drawer": "open", "grasped": 0}, "effect": {"drawer": "closed"}}]
    rules["lift_red_block_table"] = [
        {"condition": {"red_block": "table", "grasped": 0}, "effect": {"red_block": "grasped", "grasped": 1}}
    ]
    rules["place_in_drawer"] = [
        {"condition": {b: "grasped", "drawer": "open"}, "effect": {b: "drawer", "grasped": 0}} for b in BLOCKS
    ]
    rules["lift_red_block_drawer"] = [{"condition": {"red_block": "drawer"}, "effect": {}}]
    rules["stack_block"] = [
        {
            "condition": {"red_block": "grasped", "blue_block": ["table"]},
            "effect": {"red_block": "stacked_top", "blue_block": "stacked_bottom", "grasped": 0},
        }
    ]
    rules["unstack_block"] = [{"condition": {"red_block": "stacked_top"}, "effect": {}}]
    categories = {task: index % 6 for index, task in enumerate(TASKS)}
    (evaluation / "multistep_sequences.py").write_text(
        f"import package_that_nobody_has\ntask_categories = {categories!r}\ntasks = {rules!r}\n"
    )
    (evaluation / "utils.py").write_text(
        "import package_that_nobody_has\n"
        "def temp_seed(seed):\n    return seed\n"
        "def get_env_state_for_initial_condition(condition):\n"
        "    robot, scene = np.full(15, 0.5), np.zeros(24)\n"
        "    scene[1] = 0.2 if condition['drawer'] == 'open' else 0.0\n"
        "    scene[6:24] = hasher(str(condition.values())) % 1000 / 1000 + np.arange(18)\n"
        "    return robot, scene\n"
    )
    return folder


class FakeBullet:
    """Four joints; their links are turned by nothing, a metre apart, and move along the first axis."""

    joints = (b"base__button", b"base__switch", b"base__slide", b"base__drawer")

    def stepSimulation(self, physicsClientId: int) -> None:  # noqa: N802
        pass

    def getNumJoints(self, body: int, physicsClientId: int) -> int:  # noqa: N802
        return len(self.joints)

    def getJointInfo(self, body: int, joint: int, physicsClientId: int) -> tuple[Any, ...]:  # noqa: N802
        return (joint, self.joints[joint], *[0] * 11, (1.0, 0.0, 0.0))

    def getJointState(self, body: int, joint: int, physicsClientId: int) -> tuple[float]:  # noqa: N802
        return (0.25,)

    def getLinkState(self, body: int, joint: int, physicsClientId: int) -> tuple[Any, ...]:  # noqa: N802
        return (*[None] * 4, (joint + 0.25, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))

    def getMatrixFromQuaternion(self, turn: object) -> list[float]:  # noqa: N802
        return np.eye(3).ravel().tolist()


class FakeSim:
    """A drawer (scene_obs[1]) that the first action moves, a lamp (scene_obs[5]) that the second one dims."""

    def __init__(self) -> None:
        self.cid, self.action_repeat, self.np_random = 0, 8, np.random.default_rng(0)
        self.cameras = [
            SimpleNamespace(name="static", height=6, width=8, render=lambda: (np.zeros((6, 8, 3)), np.zeros((6, 8)))),
            SimpleNamespace(name="gripper", height=4, width=4),
            SimpleNamespace(name="tactile", height=5, width=3),
        ]
        self.scene = SimpleNamespace(np_random=None, step=lambda: None, fixed_objects=[SimpleNamespace(uid=5)])
        self.robot = SimpleNamespace(gripper_action=1, apply_action=self._apply)
        self.p = FakeBullet()
        self.loads = self.settled = 0
        self._robot, self._scene = np.zeros(15), np.zeros(24)

    def seed(self, seed: int) -> None:
        self.np_random = np.random.default_rng(seed)

    def load(self) -> None:
        print("Bullet talks")
        self.loads += 1
        self._robot, self._scene = np.zeros(15), np.zeros(24)

    def reset(self, robot_obs: NDArray[np.float64], scene_obs: NDArray[np.float64]) -> dict[str, Any]:
        self._robot, self._scene = robot_obs.copy(), scene_obs.copy()
        return self.get_obs()

    def _apply(self, action: NDArray[np.float64]) -> None:
        assert action[6] in (-1, 1)
        self.settled += 1

    def get_obs(self) -> dict[str, Any]:
        shade = np.uint8(255 * abs(np.sin(self._scene.sum() + self._robot.sum())))
        rgb = {
            "rgb_static": np.full((6, 8, 3), shade),
            "rgb_gripper": np.full((4, 4, 3), shade),
            "rgb_tactile": np.full((5, 3, 6), shade),
        }
        depth = {"depth_static": np.full((6, 8), 4.0), "depth_gripper": np.full((4, 4), 0.3)}
        return {
            "rgb_obs": rgb if self.cameras else {},
            "depth_obs": {**depth, "depth_tactile": np.zeros((5, 3, 2))} if self.cameras else {},
            "robot_obs": self._robot.copy(),
            "scene_obs": self._scene.copy(),
        }

    def get_info(self) -> dict[str, Any]:
        return {"drawer": self._scene[1], "light": self._scene[5]}

    def step(self, action: NDArray[np.float64]) -> tuple[dict[str, Any], int, bool, dict[str, Any]]:
        assert action[6] in (-1, 1)
        self._robot[:3] += 0.01 * action[:3]
        self._scene[1] = np.clip(self._scene[1] + 0.02 * action[0], 0, 0.2)
        self._scene[5] = np.clip(self._scene[5] + 0.25 * action[1], 0, 1)
        return self.get_obs(), 0, False, self.get_info()


class FakeOracle:
    """open_drawer and close_drawer by the drawer, everything else by switching the lamp over."""

    def get_task_info_for_set(self, start: Mapping[str, Any], now: Mapping[str, Any], tasks: set[str]) -> set[str]:
        moved = now["drawer"] - start["drawer"]
        holds = {"open_drawer": moved > 0.1, "close_drawer": moved < -0.1}
        return {task for task in tasks if holds.get(task, abs(now["light"] - start["light"]) > 0.9)}


def make_world(folder: Path) -> World:
    root = write_checkout(folder)
    return World(Checkout(root / "calvin_env"), FakeSim(), FakeOracle())
