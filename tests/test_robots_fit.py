"""What was dangerous with one's own robot, as a user meets it: units, colours, ranges, a planner that is gone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism_client import Executor, Plan, PolicyInfo, Reply, Step

from prism.cli import main
from prism.data.formats.episode_folders import RecordingSource
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.robots.contract import ROBOTS, Reading, Robot, make_robot
from prism.robots.guard import Guard, watched_by_guard
from prism.robots.loop import Keys, PolicyCommander, drive
from prism.robots.program import check_robot
from prism.robots.recording import Trace
from prism.sensors import SensorSpec

EYE = SensorSpec("rgb_eye", "rgb", (24, 32, 3), fps=10.0)
SMALL = ("--set", "policy.obs_horizon=2", "policy.pred_horizon=8", "controller.exec_horizon=4")


def seeing(state: float = 1.0, swapped: bool = False) -> Robot:
    """The twin with a camera on an orange table; its state may come in other units, its colours in another order."""
    robot = make_robot("ur5e-twin", ["realtime=false", "rate=10"])
    robot.sensors = (*robot.sensors, EYE)
    read = robot.read

    def changed() -> dict[str, Reading]:
        found = read()
        own = found["proprio"]
        pixels = np.broadcast_to(np.array([170, 110, 50], np.uint8), EYE.shape)
        return {
            **found,
            "proprio": Reading((own.value * state).astype(np.float32), own.stamp),
            EYE.name: Reading(pixels[..., ::-1] if swapped else pixels, own.stamp),
        }

    robot.read = changed  # type: ignore[method-assign]
    return robot


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    ROBOTS._rows["seeing"] = seeing
    try:
        record = ["record", str(folder / "data"), "--robot", "seeing", "--teleop", "scripted", "--episodes", "2"]
        assert main([*record, "--no-video"]) == 0
        assert main(["train", str(folder / "data"), "--steps", "4", "--out", str(folder / "run"), *SMALL]) == 0
    finally:
        del ROBOTS._rows["seeing"]
    return folder / "run"


@pytest.mark.parametrize(
    ("robot", "said"),
    [({"state": 100.0}, "is it in other units"), ({"swapped": True}, "are red and blue swapped (BGR for RGB)?")],
)
def test_other_units_and_colours_are_refused_before_anything_moves(
    robot: dict[str, Any],
    said: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[Robot] = []

    def make() -> Robot:
        made.append(seeing(**robot))
        made[-1].limits = type(made[-1].limits)()  # that the pose is outside the workspace is another test
        made[-1].send = sent.append  # type: ignore[method-assign,assignment]
        return made[-1]

    sent: list[Any] = []
    monkeypatch.setitem(ROBOTS._rows, "strange", make)
    words = ["run", str(trained), "--robot", "strange", "--seconds", "0.5", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert said in capsys.readouterr().out
    assert not sent
    assert main([*words, "--trust-sensors"]) == 0
    assert sent


def test_the_same_robot_goes(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a policy that has learned next to nothing stays within what was shown; what never moved does not move."""
    monkeypatch.setitem(ROBOTS._rows, "seeing", seeing)
    words = ["--seconds", "2", "--out", str(tmp_path / "out"), "--set", "selection.rule=first"]
    assert main(["run", str(trained), "--robot", "seeing", *words]) == 0
    shown = RecordingSource(trained.parent / "data")
    actions = np.concatenate([shown.read(i).actions for i in range(2)])
    done = RecordingSource(tmp_path / "out").read(0).actions
    room = 0.05 * np.ptp(actions, axis=0) + 1e-5
    assert (done >= actions.min(0) - room).all()
    assert (done <= actions.max(0) + room).all()
    constant = np.ptp(actions, axis=0) == 0
    assert constant.any()
    assert np.abs(done[:, constant] - actions[0, constant]).max() < 1e-5


class Gone:
    """A planner that answers once, with a motion of 9 mm a step, and never again."""

    def __init__(self, info: PolicyInfo) -> None:
        self.info, self._replies = info, list[Reply]()

    def submit(self, step: Step) -> None:
        if step.number == 0:
            plan = np.tile(np.array([0.3, 0.0, 0.0, 1.0], np.float32), (8, 1))
            self._replies.append(Reply(step, plan=Plan(plan), is_plan=True))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        return self._replies.pop() if self._replies else None

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None: ...
    def close(self) -> None: ...


def test_a_planner_that_is_gone_stands_still_and_ends_the_run() -> None:
    """Deltas: to repeat the last one would drive on. It stands, and after `max_held` steps the run says why it ends."""
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.connect()
    sensors = [{"name": "proprio", "kind": "vector", "shape": [4]}]
    info = {
        "pred_horizon": 8,
        "exec_horizon": 4,
        "action_dim": 4,
        "fps": 10.0,
        "action": {"kind": "delta"},
        "keep": [3],
    }
    executor = Executor(Gone(PolicyInfo.from_wire({**info, "sensors": sensors})), max_held=10, clock=robot.now)
    guard, trace = Guard(robot, robot.limits), Trace(robot)
    with open(os.devnull) as nothing, Keys(nothing) as keys:
        end = drive(guard, PolicyCommander(executor), 0, 30.0, keys, trace)
    assert "no plan to execute for 10 steps in a row (max_held): stop the robot" in end.stopped
    assert guard.state == "stopped"
    assert len(trace) == 8 + 10
    assert np.abs(trace.actions[10:, :3]).max() < 1e-6, "it stands still"
    assert (trace.actions[10:, 3] == 1.0).all(), "and does not let go"


def test_what_it_sees_travels_with_the_weights(trained: Path) -> None:
    """To the robot's computer: means and deviations of the state, the colours of the camera."""
    spec = next(sensor for sensor in Run(Run(trained).weights()).spec.sensors if sensor.name == EYE.name)
    assert spec.seen is not None
    assert np.array(spec.seen["grid"]).reshape(-1, 3) == pytest.approx(np.tile((170, 110, 50), (64, 1)), abs=0.1)


def test_a_policy_of_another_robot_is_refused() -> None:
    """One of franka_panda ran on ur5e: both have six joints."""
    robot = make_robot("ur5e-twin", ["realtime=false"])

    def of(name: str) -> PolicyInfo:
        return PolicyInfo.from_wire({"action": {"robot": name}})

    for name in ("", "ur5e"):
        check_robot(robot, of(name))
    check_robot(robot, PolicyInfo())
    with pytest.raises(
        PrismError, match=r"trained on robot 'franka_panda', and this is 'ur5e': .* --trained-on franka_p"
    ):
        check_robot(robot, of("franka_panda"))
    check_robot(robot, of("franka_panda"), "franka_panda")
    with pytest.raises(PrismError, match="--trained-on so101: its data name 'franka_panda'; drop it"):
        check_robot(robot, of("franka_panda"), "so101")


def test_a_sensor_is_judged_by_one_monitor_the_stricter_one() -> None:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    force, eye = SensorSpec("force", "vector", (3,), max_repeats=5), SensorSpec("eye", "rgb", (8, 8, 3))
    robot.sensors = (force, eye)
    asked = (replace(force, max_repeats=3), replace(eye, max_repeats=2), SensorSpec("other", "vector", (2,)))
    assert watched_by_guard(robot, asked) == {"force"}, "the robot does not look whether its camera hangs"
    assert watched_by_guard(robot, (force, eye)) == {"force", "eye"}
    assert watched_by_guard(robot, (replace(eye, max_age=0.1),)) == set()
