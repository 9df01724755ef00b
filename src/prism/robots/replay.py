"""`prism run --replay`: a recorded episode once more, from where it began, along its path.

The robot first goes slowly to where the recording begins. Then it is led from one recorded step to the next, and never
past one that it has not been sent to: limits, or `slow`, stretch the time and leave the path as it was. Where the pose
is farther from the recorded one than the following error allows, it stops.

A course is where commands lead, in units: positions; for changes and velocities, what they add up to since the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prism.data.formats.store import StoreSource, is_store
from prism.errors import PrismError
from prism.robots.contract import Robot
from prism.robots.guard import Seen

Vector = NDArray[np.float64]
APPROACH = 0.25  # of the speed limits, on the way to the beginning
_NEAR = 0.25  # of the following error: at the beginning
_ARRIVES = 2.0  # seconds that the robot may take to get there after its last command
_REACHED = 1e-3  # of the way to the next step: the rest is rounding


@dataclass(frozen=True)
class Recorded:
    """Action and pose of each step; `pose` is None if it was not recorded."""

    actions: NDArray[np.float32]
    pose: Vector | None


def read_recorded(episode: Path, robot: Robot) -> Recorded:
    """One recorded episode of this robot. PrismError where it is another's."""
    if not is_store(episode):
        raise PrismError(
            f"--replay {episode}: is not a recorded episode; give a folder episode-000000 of prism run or record"
        )
    source = StoreSource(episode)
    mine, theirs = robot.actions.spec, source.action_spec
    if source.action_dim != robot.actions.dim or (theirs.kind, theirs.robot) != (mine.kind, mine.robot):
        raise PrismError(f"--replay {episode}: was recorded with '{theirs.robot}' ({theirs.kind}), not with this robot")
    if abs(source.fps - robot.fps) > 0.02 * robot.fps:
        raise PrismError(f"--replay {episode}: has {source.fps:g} steps a second, robot '{robot.name}' {robot.fps:g}")
    name, told = robot.actions.pose, [spec.name for spec in source.sensors]
    found = source.read(0, streams=(name,) if name in told else ())
    pose = None
    if name in found.streams:
        pose = found.streams[name][:, : robot.actions.pose_dims].astype(np.float64)
        if found.present is not None and name in found.present:
            pose[~found.present[name]] = math.nan
    return Recorded(found.actions, pose)


class ReplayCommander:
    """Then it stands still. `dry`: the robot does not move, so its pose is not compared."""

    who, plan, label = "replay", None, None

    def __init__(self, robot: Robot, recorded: Recorded, slow: float = 1.0, dry: bool = False) -> None:
        self._robot, self._recorded, self._slow, self._dry = robot, recorded, slow, dry
        self._kinds, self._scale = np.array(robot.actions.kinds), robot.actions.scales
        self._most = robot.limits.followed(robot.actions.dim)[: robot.actions.pose_dims]
        self._most[[i for i in robot.actions.spec.grippers if i < len(self._most)]] = math.inf
        self._turned = [first + i for first in robot.actions.spec.quaternions for i in range(4)]

    def start(self, seed: int) -> None:
        self._path: Vector | None = None  # a course each row
        self._first, self._at, self._arrived, self._waited = 0, 0.0, False, 0

    @property
    def over(self) -> bool:
        return self._path is not None and self._at >= len(self._path)

    def revise(self) -> None:
        return None

    def sent(self, action: NDArray[np.generic] | None) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        if self._path is None:
            self._path = self._make_path(seen)
            self._at = min(self._slow, 1.0)
        elif self._reached(seen.course) and self._is_there(seen):
            self._at = min(self._at + self._slow, math.floor(self._at + 1e-9) + 1.0)  # no step is left out
        if self.over:
            return None
        self._compare(seen)
        return self._command(self._goal(), seen.course)

    # -- the path

    def _make_path(self, seen: Seen) -> Vector:
        """From where the course is now: to the beginning, and the recorded steps. Row 0 is now."""
        actions = self._recorded.actions.astype(np.float64) * self._scale
        absolute, velocity = self._kinds == "absolute", self._kinds == "velocity"
        summed = np.cumsum(np.where(velocity, actions / self._robot.fps, actions), axis=0)
        now = np.where(np.isfinite(seen.course), seen.course, actions[0])
        way = self._way_to_start(seen)
        self._first = len(way) + 1  # the first recorded step
        begun = now + np.where(absolute, 0.0, way[-1] if len(way) else 0.0)
        there = np.where(absolute, actions, begun + summed)
        approach = now + way if len(way) else np.empty((0, len(now)))
        self._unit(approach)
        return np.concatenate([now[None], approach, there])

    def _unit(self, rows: Vector) -> None:
        """Quaternions of length 1."""
        for first in self._robot.actions.spec.quaternions:
            part = rows[:, first : first + 4]
            part /= np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-9)

    def _way_to_start(self, seen: Seen) -> Vector:
        """Rows of the way to where the recording began, at a share of the speed limits; none where it is there."""
        dims, poses = self._robot.actions.pose_dims, self._recorded.pose
        pose = None if self._robot.actions.pose is None else seen.observation.get(self._robot.actions.pose)
        nothing = np.empty((0, self._robot.actions.dim))
        if poses is None or not dims or self._dry:
            return nothing
        known = poses[np.isfinite(poses).all(1)]
        if pose is None or not len(known):
            raise PrismError("--replay: where the robot is, or was when it was recorded, is unknown; look at its pose")
        away = np.zeros(self._robot.actions.dim)
        away[:dims] = known[0] - np.asarray(pose[:dims], np.float64)
        away[list(self._robot.actions.spec.grippers)] = 0.0
        for first in self._robot.actions.spec.quaternions:  # the shorter arc
            if first < dims and float(known[0][first : first + 4] @ pose[first : first + 4]) < 0:
                away[first : first + 4] = -known[0][first : first + 4] - pose[first : first + 4]
        if (np.abs(away[:dims]) <= np.where(np.isfinite(self._most), _NEAR * self._most, math.inf)).all():
            return nothing
        limits = np.array(self._robot.limits.speed or (math.inf,) * len(away))
        seconds = np.max(np.abs(away) / np.where(np.isfinite(limits), limits, 1.0)) / (APPROACH * self._slow)
        steps = max(1, math.ceil(float(seconds) * self._robot.fps))
        return np.arange(1, steps + 1)[:, None] / steps * away

    def _goal(self) -> Vector:
        """The course to be led to now."""
        assert self._path is not None
        last, share = int(self._at), self._at - int(self._at)
        if share < 1e-9:
            return np.asarray(self._path[last])
        before, after = self._path[last], self._path[min(last + 1, len(self._path) - 1)]
        goal = before + share * (after - before)
        self._unit(goal[None])
        goal[list(self._robot.actions.spec.grippers)] = after[list(self._robot.actions.spec.grippers)]
        return np.asarray(goal)

    def _command(self, goal: Vector, course: Vector) -> NDArray[np.generic]:
        left = np.where(self._kinds == "absolute", goal, goal - np.nan_to_num(course))
        return np.asarray(np.where(self._kinds == "velocity", left * self._robot.fps, left) / self._scale)

    # -- where it is

    def _reached(self, course: Vector) -> bool:
        """Whether what was sent leads to the goal; a gripper, or what is a little off by rounding, does not wait."""
        assert self._path is not None
        goal = self._goal()
        step = np.abs(goal - self._path[max(0, math.ceil(self._at - 1e-9) - 1)])
        off = np.abs(goal - course) > _REACHED * step + 1e-5 * self._scale
        off[[*self._robot.actions.spec.grippers, *self._turned]] = False
        return not bool(off[np.isfinite(course)].any())

    def _is_there(self, seen: Seen) -> bool:
        """At the beginning the pose is waited for."""
        if self._arrived or self._first == 1 or self._at < self._first - 1:
            return True
        self._arrived = not len(self._away(seen, 0, _NEAR))
        self._waited += 1
        if not self._arrived and self._waited > _ARRIVES * self._robot.fps:
            raise PrismError("--replay: the robot does not get to where the recording begins; is something in its way?")
        return self._arrived

    def _away(self, seen: Seen, step: int, share: float) -> NDArray[np.int64]:
        """Dimensions in which the pose is farther from a recorded one than a share of the following error."""
        pose = None if self._robot.actions.pose is None else seen.observation.get(self._robot.actions.pose)
        if pose is None or self._recorded.pose is None or self._dry:
            return np.empty(0, np.int64)
        there = self._recorded.pose[min(max(step, 0), len(self._recorded.pose) - 1)]
        apart = np.abs(np.asarray(pose[: len(there)], np.float64) - there)
        apart[[i for i in self._turned if i < len(apart)]] = 0.0
        return np.flatnonzero(apart > share * self._most)

    def _compare(self, seen: Seen) -> None:
        """PrismError where the robot has left the recorded path."""
        step = int(self._at) - self._first
        if step < 0:
            return
        off = [self._away(seen, near, 1.0) for near in range(step - 1, step + 2)]
        if all(map(len, off)):
            name = self._robot.actions.name(int(off[1][0]))
            raise PrismError(f"--replay: at step {step} {name} is not where it was recorded; look at what is different")
