"""robots/replay.py: from wherever the robot is to where the recording began, and along its path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prism_client")

from prism.errors import PrismError
from prism.robots.guard import Guard
from prism.robots.loop import drive
from prism.robots.recording import Trace
from prism.robots.replay import APPROACH, Recorded, ReplayCommander, read_recorded
from tests.test_robots_loop import Typed
from tests.test_robots_safety import RATE, WIDE, Arm

START = np.array([0.0, 0.0, 0.5])


def square(side: int = 8, step: float = 0.05) -> np.ndarray:
    """Where a corner is cut, it is seen."""
    turns = [np.array(one) for one in ((1, 0, 0), (0, 1, 0), (-1, 0, 0), (0, -1, 0))]
    return START + np.cumsum([step * turn for turn in turns for _ in range(side)], axis=0)


def recorded(kind: str) -> Recorded:
    path = square()
    poses = np.concatenate([START[None], path[:-1]])
    moves = path - poses
    actions = {"absolute": path, "delta": moves, "velocity": moves * RATE}[kind]
    return Recorded(actions.astype(np.float32), poses)


class Seen(Arm):
    """Keeps where it was."""

    def wait(self, until: float) -> None:
        super().wait(until)
        self.way = [*getattr(self, "way", []), self.x.copy()]


def play(robot: Seen, commander: ReplayCommander, slow: float = 1.0) -> str:
    """Why it was stopped."""
    return drive(Guard(robot, robot.limits.slowed(slow)), commander, 0, 120.0, Typed(), Trace(robot)).stopped


def off_path(way: list[np.ndarray], path: np.ndarray) -> float:
    """The largest distance of a point of `way` from the polyline `path`."""
    found = 0.0
    for point in way:
        a, b = path[:-1], path[1:]
        length = np.maximum(((b - a) ** 2).sum(1), 1e-12)
        share = np.clip(((point - a) * (b - a)).sum(1) / length, 0, 1)
        found = max(found, float(np.linalg.norm(a + share[:, None] * (b - a) - point, axis=1).min()))
    return found


@pytest.mark.parametrize("slow", [1.0, 0.3])
@pytest.mark.parametrize("away", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["absolute", "delta", "velocity"])
def test_a_replay_follows_the_recorded_path(kind: str, away: float, slow: float) -> None:
    """It went at full speed from anywhere to the first recorded place, cut corners, and refused to be slow."""
    tight = dataclasses.replace(WIDE, acceleration=(1.0,) * 3)  # the corners cannot be taken at the recorded speed
    robot = Seen(kind, tight)
    robot.x = robot.goal = begin = START - np.array([0.0, away, 0.0])
    robot.past = [(robot.time, robot.x)]
    begun = robot.time
    stopped = play(robot, ReplayCommander(robot, recorded(kind), slow), slow)
    assert stopped == "", stopped
    path = np.concatenate([robot.way[0][None], START[None], square()])
    assert off_path(robot.way, path) < 0.0101, "a step of braking, behind a corner; it was 0.05 and more"
    assert np.allclose(robot.x, square()[-1], atol=1e-3), "to its end"
    assert robot.time - begun > len(square()) / RATE / slow
    moved = np.linalg.norm(np.diff([begin, *robot.way], axis=0), axis=1) * RATE
    approach = [speed for speed, at in zip(moved, robot.way, strict=True) if at[1] < -0.01 and at[0] < 1e-6]
    if away:
        assert max(approach) <= APPROACH * slow * 0.5 + 1e-3, "slowly to the beginning"


def test_a_robot_that_leaves_the_path_is_stopped() -> None:
    robot = Seen("absolute", WIDE)
    there = recorded("absolute")
    elsewhere = Recorded(there.actions, there.pose + np.linspace(0, 0.6, len(square()))[:, None])
    stopped = play(robot, ReplayCommander(robot, elsewhere))
    assert "is not where it was recorded" in stopped


def test_an_arm_that_does_not_get_to_the_beginning_is_stopped() -> None:
    robot = Seen("delta", WIDE)
    robot.goal, robot.adds_up, robot.blocked = START - (0.0, 0.2, 0.0), False, True
    robot.x = robot.goal
    robot.past = [(robot.time, robot.x)]
    stopped = play(robot, ReplayCommander(robot, recorded("delta")))
    assert stopped
    assert np.allclose(robot.x, START - (0.0, 0.2, 0.0))


def test_a_pose_that_is_unknown_is_refused() -> None:
    robot = Seen("absolute", WIDE)
    robot.values = {"pose": np.float32([np.nan] * 3)}
    there = recorded("absolute")
    robot.past = [(robot.time, np.full(3, np.nan))]
    stopped = play(robot, ReplayCommander(robot, there))
    assert "where the robot is, or was when it was recorded, is unknown" in stopped
    with pytest.raises(PrismError, match="is not a recorded episode"):
        read_recorded(Path("nowhere"), robot)
