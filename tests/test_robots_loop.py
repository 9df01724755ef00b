"""The loop that drives a robot: what does not fit is refused before anything moves, and what fails stops it."""

from __future__ import annotations

import os
import pty
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism_client import ActionKind, Executor, Plan, PlanError, PolicyInfo, Reply, Step
from prism_client.messages import ActionInfo

from prism.data import open_dataset
from prism.errors import PrismError
from prism.robots import program
from prism.robots.contract import Robot, make_robot
from prism.robots.guard import Guard, Seen
from prism.robots.loop import Keys, Outcome, PolicyCommander, Takeover, check_fit, drive
from prism.robots.program import Program
from prism.robots.recording import Recording, Trace
from prism.robots.teleop import Keyboard
from prism.sensors import SensorSpec


class Crashes:
    who, plan, label = "policy", None, None

    def start(self, seed: int) -> None:
        self.steps = 0
        self.got: list[NDArray[np.float32] | None] = []

    def act(self, seen: Seen, keys: str) -> Any:
        self.steps += 1
        if self.steps > 5:
            raise ZeroDivisionError("the network is gone")
        return np.array([0.3, 0.0, 0.0, 1.0])

    def sent(self, action: NDArray[np.float32] | None) -> None:
        self.got.append(action)

    def revise(self) -> None:
        return None

    def trouble(self) -> str:
        return ""


def test_a_crash_of_the_policy_stops_the_robot(tmp_path: Path) -> None:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.connect()
    guard, trace = Guard(robot, robot.limits), Trace(robot)
    with open(os.devnull) as nothing, Keys(nothing) as keys:
        end = drive(guard, Crashes(), 0, 3.0, keys, trace)
    assert end.stopped == "policy: ZeroDivisionError: the network is gone"
    assert len(trace) == 5
    with pytest.raises(PrismError):
        robot.send(np.zeros(4, np.float32))
    recording = Recording(tmp_path / "x", robot, "t")
    recording.add(trace.episode()[0], {"seed": 0})
    assert open_dataset(tmp_path / "x").lengths.tolist() == [5], "what was recorded before is there"


def test_arrows_and_function_keys_are_no_letters() -> None:
    """As letters, an arrow to the left would discard an episode, and F2 stop the robot."""
    ours, theirs = pty.openpty()
    with open(theirs) as terminal, Keys(terminal) as keys:
        for typed, found in {b"\x1b[D": "", b"\x1bOQ": "", b"\x1b[15~s": "s", b"\x1b q": "\x1b q", b"Id": "id"}.items():
            os.write(ours, typed)
            assert keys.pressed(10.0) == found
    os.close(ours)


class Typed(Keys):
    def __init__(self, *keys: str) -> None:
        self.is_terminal, self._keys = False, iter(keys)

    def pressed(self, wait: float = 0.0) -> str:
        return next(self._keys, "")


def test_a_verdict_from_before_an_episode_is_not_of_it() -> None:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.connect()
    for early, steps in {"s": 5, "f": 5, "d": 5, "q": 0}.items():  # a stop is one at any time
        trace = Trace(robot)
        end = drive(Guard(robot, robot.limits), Crashes(), 0, 0.5, Typed(early), trace, ends="dr")
        assert (len(trace), end.by_operator) == (steps, early == "q")
    assert len(trace) == 0
    drive(Guard(robot, robot.limits), Crashes(), 0, 0.5, Typed("", "", "s"), trace)
    assert len(trace) == 1, "pressed within it, it ends it"


def test_an_episode_is_kept_when_nobody_wants_to_judge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where it is asked whether it succeeded: all of it is there by then."""
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(program, "drive", lambda *_: Outcome(None, "", False, ""))
    monkeypatch.setattr(program, "ask_success", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(Program, "_keep", lambda program, trace, row: kept.append(row))
    robot = SimpleNamespace(episode_seconds=1.0)
    guard: Any = SimpleNamespace(robot=robot, dry=False, stop=lambda reason: None)
    nobody: Any = None
    with pytest.raises(KeyboardInterrupt):
        Program(guard, nobody, Typed(), "run")._episode(3, [])
    assert kept == [{"stopped": "", "seed": 3, "success": None}]


SEEN = Seen(1.0, {}, {}, {}, {})


class Unsure:
    """An executor with a plan in each step, until it has none."""

    planner = SimpleNamespace(info=PolicyInfo(), trouble=lambda: "")
    fails = False

    def reset(self, seed: int) -> None: ...

    def step(self, observation: Any, ages: Any) -> Any:
        if self.fails:
            raise PlanError("no plan")
        return SimpleNamespace(action=np.array([0.1, 0.0, 0.0, 1.0]), plan="a plan")


def taken_over() -> tuple[Takeover, Unsure]:
    """The policy commands; a person sits at the keyboard."""
    executor: Any = Unsure()
    commander = Takeover(PolicyCommander(executor), Keyboard(make_robot("ur5e-twin", ["realtime=false"])))
    commander.start(0)
    commander.act(SEEN, "")
    assert (commander.who, commander.plan) == ("policy", "a plan")
    return commander, executor


def test_the_executor_hears_what_the_robot_got_after_a_limit_and_a_takeover() -> None:
    class Hasty(Crashes):
        def act(self, seen: Seen, keys: str) -> Any:
            return np.array([9.0, 0.0, 0.0, 1.0])

    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.connect()
    hasty, guard, trace = Hasty(), Guard(robot, robot.limits), Trace(robot)
    with open(os.devnull) as nothing, Keys(nothing) as keys:
        drive(guard, hasty, 0, 4 / robot.fps, keys, trace)
    guard.close()
    assert 0 < float(hasty.got[-1][0]) < 9.0  # type: ignore[index]
    np.testing.assert_array_equal(np.stack(hasty.got), trace.actions[: len(hasty.got)])  # type: ignore[arg-type]

    commander, executor = taken_over()
    told: list[Any] = []
    executor.sent = lambda action, taken_over: told.append((action, taken_over))  # type: ignore[attr-defined]
    commander.sent(np.zeros(4, np.float32))
    commander.act(SEEN, "t")
    commander.sent(np.ones(4, np.float32))
    assert [(float(action[0]), by) for action, by in told] == [(0.0, False), (1.0, True)]


def test_who_takes_over_in_the_step_in_which_the_plan_fails_is_in_command() -> None:
    commander, executor = taken_over()
    executor.fails = True
    assert commander.act(SEEN, "t") is not None
    assert commander.who == "operator"
    assert commander.plan is None, "it is recorded once, not at each step of the takeover"
    commander.act(SEEN, "")
    with pytest.raises(PlanError, match="no plan"):
        commander.act(SEEN, "t")
    assert commander.who == "policy", "it was given back"


def test_a_server_that_comes_back_with_another_policy_does_not_drive_the_next_episode() -> None:
    executor: Any = Unsure()
    executor.planner = SimpleNamespace(info=PolicyInfo(fps=10.0), trouble=lambda: "")
    commander = PolicyCommander(executor)
    commander.start(0)
    executor.planner.info = PolicyInfo(fps=10.0)
    commander.start(1)
    executor.planner.info = PolicyInfo(fps=20.0)
    with pytest.raises(PrismError, match=r"another policy than was compared with the robot \(fps\): run again"):
        commander.start(2)


INFO: dict[str, Any] = {
    "sensors": [
        {"name": "proprio", "kind": "vector", "shape": [4]},
        {"name": "eye", "kind": "rgb", "shape": [24, 32, 3]},
    ],
    "needs": ["proprio"],
    "action_dim": 4,
    "action": {"kind": "delta"},
    "fps": 10.0,
}


def robot_with_eye(size: tuple[int, int]) -> Robot:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.sensors = (*robot.sensors, SensorSpec("eye", "rgb", (*size, 3)))
    return robot


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action_dim": 7}, "7 numbers an action, robot 'ur5e-twin' takes 4"),
        ({"action": {}}, "unknown kind of action"),
        ({"action": {"kind": "absolute"}}, "'absolute', robot 'ur5e-twin' takes 'delta'"),
        ({"action": {"kind": "velocity"}}, "'velocity', robot"),
        ({"action": {"kind": "delta", "names": ["a", "b", "c", "d"]}}, "another robot"),
        ({"fps": 30.0}, "trained at 30 steps a second"),
        ({"sensors": [{"name": "rgb_wrist", "kind": "rgb", "shape": [8, 8, 3]}], "needs": ["rgb_wrist"]}, "no sensor"),
        ({"sensors": [{"name": "proprio", "kind": "vector", "shape": [5]}]}, "needs shape"),
        ({"sensors": [{"name": "proprio", "kind": "audio", "shape": [4]}]}, "is audio"),
        ({"sensors": [{"name": "eye", "kind": "rgb", "shape": [12, 16, 3]}]}, "pass --resize"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    robot = robot_with_eye((24, 32))
    assert check_fit(robot, PolicyInfo.from_wire(INFO)) == {}
    with pytest.raises(PrismError, match=words):
        check_fit(robot, PolicyInfo.from_wire({**INFO, **change}))


def in_metres(kind: ActionKind) -> Robot:
    """0.3 m/s and a box of 0.4 m, 10 steps a second: a UR by its driver, whose command of 1 is 1 m."""
    robot = robot_with_eye((24, 32))
    robot.actions = replace(robot.actions, spec=replace(robot.actions.spec, kind=kind, scale=()))
    return robot


@pytest.mark.parametrize(
    ("kind", "reach", "words"),
    [
        ("delta", 0.03, ""),
        ("delta", 0.05, ""),  # beyond the limit, which cuts it, but of this unit
        ("delta", 1.0, "actions of 'x' reach 1 m a step, robot 'ur5e-twin' makes at most 0.03: another unit"),
        ("delta", 20.0, "reach 20 m a step"),  # millimetres
        ("velocity", 0.3, ""),
        ("velocity", 100.0, "actions of 'x' reach 100 m/s, robot 'ur5e-twin' makes at most 0.3"),
        ("absolute", 0.4, ""),
        ("absolute", 400.0, "positions of 'x' are -400 to 400 m, those of robot 'ur5e-twin' 0.28 to 0.72"),
    ],
)
def test_demonstrated_actions_of_another_unit_are_refused(kind: str, reach: float, words: str) -> None:
    """Changes in -1..1 that mean centimetres on a robot in metres: 0.2 was 0.2 m, at the speed limit."""
    near = {"absolute": 0.3}.get(kind, -reach) if reach < 1 else -reach
    ends = [[near, near, near, -1.0], [reach, reach, reach, 1.0]]
    info = {**INFO, "action": {"kind": kind}, "action_range": ends}
    with nullcontext() if not words else pytest.raises(PrismError, match=re.escape(words)):
        check_fit(in_metres(ActionKind(kind)), PolicyInfo.from_wire(info))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"units": ["m", "m", "m", ""]}, ""),
        ({"units": ["mm", "mm", "mm", ""], "scale": [1000.0, 1000.0, 1000.0, 1.0]}, ""),
        ({"units": ["mm", "mm", "mm", ""]}, "an action of 1 in 'x' is 1 mm for the policy, 1 m for robot 'ur5e-twin'"),
        ({"units": ["m", "m", "m", ""], "scale": [0.05] * 4}, "is 0.05 m for the policy, 1 m for robot"),
        ({"units": ["rad", "rad", "rad", ""]}, "is 1 rad for the policy, 1 m for robot"),
    ],
)
def test_units_that_policy_and_robot_state_have_to_agree(stated: dict[str, Any], words: str) -> None:
    info = PolicyInfo.from_wire({**INFO, "action": {"kind": "delta", **stated}})
    remedy = ".*prism data convert --map KEY=action:vector:SCALE"
    with nullcontext() if not words else pytest.raises(PrismError, match=re.escape(words) + remedy):
        check_fit(in_metres(ActionKind.DELTA), info)


def test_pictures_are_resized_when_asked() -> None:
    sizes = check_fit(robot_with_eye((48, 64)), PolicyInfo.from_wire(INFO), resize=True)
    assert sizes["eye"].shape == (24, 32, 3)
    from prism.data.pictures import shrunk

    assert shrunk(np.zeros((1, 48, 64, 3), np.uint8), sizes["eye"]).shape == (1, 24, 32, 3)


class Late:
    """A planner whose plans come when a test lets them."""

    info = PolicyInfo(1, ActionInfo(kind=ActionKind.DELTA), pred_horizon=8, exec_horizon=2, fps=10.0)

    def __init__(self) -> None:
        self.waiting: list[Step] = []
        self.ready: list[Reply] = []

    def submit(self, step: Step) -> None:
        self.ready.append(Reply(step, ()))
        self.waiting += [step] * step.wants_plan

    def answer(self) -> None:
        step = self.waiting.pop()
        rows = (100 * step.number + np.arange(8, dtype=np.float32))[:, None]
        self.ready.append(Reply(step, (), Plan(rows), True))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if timeout and not self.ready and self.waiting:
            self.answer()  # it is waited for
        return self.ready.pop(0) if self.ready else None

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None: ...
    def close(self) -> None: ...


def test_a_plan_that_comes_within_its_step_still_serves_it() -> None:
    planner = Late()
    executor = Executor(planner, blend=0)
    assert [executor.act({})[0] for _ in range(2)] == [0, 1]
    assert executor.act({})[0] == 2, "the plan of step 2 is not there: the old one goes on"
    assert executor.revise() is None
    planner.answer()
    revised = executor.revise()
    assert revised is not None
    assert revised.action[0] == 200, "its first row, for the rest of step 2"
    assert executor.revise() is None, "once"
    assert executor.act({})[0] == 201
    assert executor.stats.skipped[-1] == 0
    executor.act({})
    executor.act({})
    planner.answer()
    assert executor.revise() is None, "a plan of the step before is taken over by the next"
    assert executor.act({})[0] == 402
