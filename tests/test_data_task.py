"""Data that contradict the task they are trained for are said to; data of the task are not."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from prism_sims.pusht_features import GOAL
from rich.console import Console

from prism.data.formats.store_writer import DatasetWriter
from prism.experiments.demonstrations import Demonstrations, _another_task, open_demonstrations
from prism.sensors import SensorSpec
from prism.server.sessions import Reader, RequestError
from prism.sims.task_table import make_env


def pushes(
    path: Path, goal: tuple[float, float, float], scale: float = 1.0, fps: float = 10.0, task: str = "push"
) -> Path:
    rng = np.random.default_rng(0)
    with DatasetWriter(path, [SensorSpec("state", "vector", (5,))], 2, fps, task) as writer:
        for _ in range(12):
            begin = np.concatenate([rng.uniform(50, 450, 4), rng.uniform(-3, 3, 1)])
            way = np.linspace(0, 1, 20)[:, None]
            state = begin * (1 - way) + np.concatenate([begin[:2], goal]) * way
            writer.add({"state": state}, np.clip(state[:, :2], 0, 512) * scale)
    return path


def warnings_of(path: Path, task: str = "pusht") -> str:
    out = io.StringIO()
    console = Console(file=out, width=400)
    open_demonstrations(Demonstrations("path", path=str(path)), task, console)
    return " ".join(line for line in out.getvalue().splitlines() if "warning" in line)


def test_data_of_the_task_pass_silently(tmp_path: Path) -> None:
    assert warnings_of(pushes(tmp_path / "set", tuple(GOAL))) == ""


def test_another_goal_rate_and_unit_are_said(tmp_path: Path) -> None:
    said = warnings_of(pushes(tmp_path / "goal", (150.0, 350.0, 2.5)))
    assert "the block at (150, 350), turned 143 degrees; the goal at (256, 256)" in said
    assert "steps a second" not in said
    said = warnings_of(pushes(tmp_path / "unit", tuple(GOAL), scale=10.0, fps=50.0))
    assert "50 steps a second, pusht has 10" in said
    assert "actions [0, 1] leave the range of pusht" in said
    assert "another goal" not in said


def test_data_of_another_task_are_said_and_those_of_a_variant_are_not(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    env = make_env("tabletop-insert-left")
    start = env.reset(0)
    env.close()
    streams = {sensor.name: np.repeat(start[sensor.name][None], 5, 0) for sensor in env.sensors}
    for task, said in (
        ("tabletop-insert-right", "the data were recorded in tabletop-insert-right, not in tabletop-insert-left"),
        ("tabletop-insert-left", ""),
        ("tabletop-insert-left-pixels", ""),
        ("my-kitchen", ""),
    ):
        with DatasetWriter(tmp_path / task, env.sensors, env.action_dim, env.fps, task) as writer:
            writer.add(streams, np.linspace(0, 0.1, 5)[:, None].repeat(env.action_dim, 1))
        warning = f"warning: {tmp_path / task}: {said}" if said else ""
        assert warnings_of(tmp_path / task, "tabletop-insert-left") == warning
    assert warnings_of(pushes(tmp_path / "edge", tuple(GOAL), task="pusht-keypoints"), "pusht-edge") == ""
    for stored, task in (("calvin", "calvin-open_drawer"), ("calvin-open_drawer-state", "calvin-state")):
        assert _another_task(stored, task) == []
    assert _another_task("metaworld-push-wall", "metaworld-push-pixels")


def test_keys_of_another_program_map_by_themselves_where_only_one_sensor_fits() -> None:
    camera, state = SensorSpec("rgb_static", "rgb", (4, 4, 3)), SensorSpec("proprio", "vector", (2,))
    message = {"observation/state": np.zeros(2, np.float32), "observation/image": np.zeros((4, 4, 3), np.uint8)}
    assert set(Reader((camera, state), 2).read(message).observation) == {"proprio", "rgb_static"}
    two = (camera, state, SensorSpec("object_state", "vector", (2,)))
    with pytest.raises(RequestError, match=r"no sensor 'observation/state'; the policy has .*--map") as error:
        Reader(two, 2).read(message)
    assert "did you mean" not in str(error.value)
