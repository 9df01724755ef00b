"""python -m research faults and robots: the keys they promise, and that their judges can say no."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism.cli import main as command
from prism.robots.contract import make_robot
from prism.robots.guard import LATE, Guard
from prism.robots.recording import Trace
from research import faults
from research.__main__ import main
from research.faults import FAULTS, Faulty
from research.kills import unfinished
from research.robots import beyond
from tests.test_robots_safety import GUARDED, Points


def test_faults_has_its_keys(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    assert main(["faults", "--count", str(len(FAULTS)), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["violations"] == 0
    assert found["injected"] > 0
    assert found["recovered"] > 0.8
    assert found["recorded"] == 1
    assert {"p50", "p99", "max"} == set(found["stopped_in_ms"])
    assert main(["faults", "--json", str(out)]) == 2, "nothing is overwritten"
    for wrong in (["faults", "--count", "0"], ["faults", "--seed", "-1"], ["kills", "--seed", "-1"]):
        assert main(wrong) == 2


def test_robots_plays_the_bar_and_what_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that have learned nothing, on the simulated clock: `prism run` and `prism eval` of each task."""
    monkeypatch.chdir(tmp_path)
    for task in ("tabletop-insert-left", "tabletop-stack-blue"):
        assert command(["train", task, "--steps", "2", "--episodes", "10", "--out", f"runs/{task}"]) == 0
    words = ["robots", "runs/tabletop-insert-left", "--episodes", "1", "--simulated"]
    assert main([*words, "--beside", "runs/tabletop-stack-blue", "--json", "out.json"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["task"], list(found["beside"])) == ("tabletop-insert-left", ["tabletop-stack-blue"])
    for one in (found, found["beside"]["tabletop-stack-blue"]):
        assert (one["run_success"], one["eval_success"], one["agree"]) == (0.0, 0.0, 1.0)
        assert (one["late_share"], one["violations"]) == (0.0, 0)
        assert one["commands"] > 20
    assert main([*words, "--beside", "runs/tabletop-insert-left"]) == 2, "each task once"


def test_an_episode_that_ends_before_its_first_command_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that injects it waits for a command, and must not wait for ever."""
    monkeypatch.setattr(faults.Operator, "pressed", lambda _operator, _wait=0.0: " ")
    robot = Faulty(make_robot("ur5e-twin", ["realtime=true"]))
    robot.connect()
    guard = Guard(robot, robot.limits)
    trace = faults.play_remote(robot, guard, np.random.default_rng(0), 0, "server")
    guard.close()
    assert robot.sent == []
    assert robot.at == np.inf
    assert len(trace) <= 1


def test_no_episode_is_lost_by_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    assert main(["kills", "--count", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["kills"], found["lost"], found["seeds_once"]) == (2, 0, True)
    assert found["there"] >= found["said"]


def test_the_judge_of_the_faults_sees_a_violation() -> None:
    robot = Faulty(make_robot("ur5e-twin", ["realtime=false"]))
    robot.connect()
    robot.prepare(0)
    robot.send(np.array([0.05, 0.0, 0.0, 1.0], np.float32))
    assert robot.violations == 0
    robot.wait(robot.now() + 0.02)
    robot.send(np.array([0.2, 0.0, 0.0, 1.0], np.float32))
    assert robot.violations == 1


def test_what_was_recorded_is_judged_by_the_limits() -> None:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    good = np.array([[0.06, 0.0, 0.0, 1.0], [0.13, -0.06, 0.0, 1.0]], np.float32)  # 20 ms each: 0.09 and 0.195 m/s
    times = np.array([0.0, 0.02])
    assert beyond(robot, good, times) == 0
    assert beyond(robot, 3 * good, times) == 2
    assert beyond(robot, good, np.array([0.0, 0.2])) == 1, "from where it stands, 0.195 m/s is too much at once"
    assert Guard(robot, robot.limits).limits.speed == robot.limits.speed


def test_a_loop_that_loses_time_anywhere_is_within_the_limits() -> None:
    """The computer takes the loop's time away before or after a command: what was sent is judged by the clock that it
    was limited by. By another clock, of when it had arrived, some of these commands seem to go beyond a limit."""
    rng = np.random.default_rng(0)
    robot = Points(GUARDED)
    guard, trace = Guard(robot, GUARDED), Trace(robot)
    guard.begin()
    begin = robot.time
    for tick in range(300):
        due = begin + tick / robot.rate
        robot.wait(max(robot.time, due) + float(rng.choice([0.0, 0.0, 0.03, 0.06])))
        guard.observe()
        trace.decide(tick, "test", None, None)
        sent = guard.command(np.array([0.2 * (-1) ** (tick // 4), 0.0, 0.0]))
        robot.wait(robot.time + float(rng.choice([0.0, 0.0, 0.04])))
        if sent.action is not None:
            trace.command(tick, due, sent.action, 1e3 * (robot.now() - due), sent.at)
    found = trace.details()
    assert guard.state == "go"
    assert len(found["command"]) > 150
    assert (np.diff(found["sent"]) * robot.rate > LATE).any()
    assert beyond(robot, found["command"], found["sent"]) == 0
    assert beyond(robot, found["command"], found["time"] + 1e-3 * found["latency_ms"]) > 0


def test_a_lock_is_no_unfinished_episode(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "episode-000000").mkdir()
    assert not unfinished(tmp_path)
    (tmp_path / ".tmp-episode-000001").mkdir()
    assert unfinished(tmp_path)
