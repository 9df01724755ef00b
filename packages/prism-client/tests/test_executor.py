"""The executor with a clock and a planner of the test's own: every case exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_client import (
    Command,
    Executor,
    HoldError,
    Plan,
    PlanError,
    PlanInfo,
    PolicyInfo,
    RefusedError,
    Reply,
    Stats,
    Step,
    limit_uncertainty,
)
from prism_client.messages import ActionInfo

TP, FPS, DIM = 8, 10.0, 3
INFO = {"pred_horizon": TP, "exec_horizon": 4, "action_dim": DIM, "fps": FPS, "action": {"kind": "absolute"}}
BLIND = {"bad": True}  # an observation that the planner cannot use


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Script:
    """A planner whose plan number n is ready `delays[n]` seconds after its request (None: never).

    A plan that is asked for at step t is action t, t + 1, ... (plus `offsets[n]`): what is commanded says which
    observation and which row it came from.
    """

    def __init__(self, delays: list[float | None], offsets: Mapping[int, float] | None = None, **info: Any) -> None:
        self.clock, self.delays, self.offsets = Clock(), delays, offsets or {}
        self.info = PolicyInfo.from_wire({**INFO, **info})
        self.errors: dict[int, str] = {}
        self.spread: dict[int, float] = {}
        self.absent: dict[int, list[str]] = {}  # by step
        self.requests: list[int] = []
        self.told: list[list[float]] = []  # at each step: what was sent since the step before
        self.make: Callable[[int, np.ndarray], Any] = lambda number, actions: actions
        self._ready: list[tuple[float, Reply]] = []

    def submit(self, step: Step) -> None:
        self.told.append([float(command[0]) for command in step.sent])
        absent = tuple(self.absent.get(step.number, ()))
        error = RefusedError("all sensors are at fault") if step.observation == BLIND else None
        if error is None or not step.wants_plan:
            self._ready.insert(0, (0.0, Reply(step, absent, error=error)))
        if not step.wants_plan:
            return
        if error is not None:
            self._ready.insert(0, (0.0, Reply(step, is_plan=True, error=error)))
            return
        number = len(self.requests)
        self.requests.append(step.number)
        delay = self.delays[number] if number < len(self.delays) else self.delays[-1]
        if delay is None:
            return
        ramp = np.arange(TP, dtype=np.float32) + step.number + self.offsets.get(number, 0.0)
        failure = PlanError(self.errors[number]) if number in self.errors else None
        info = PlanInfo(spread=self.spread.get(number, 0.0), modes=1 + (number in self.spread))
        plan = None if failure else Plan(self.make(number, np.repeat(ramp[:, None], DIM, axis=1)), info)
        self._ready.append((self.clock.now + delay, Reply(step, absent, plan, True, failure)))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if self._ready and self._ready[0][0] <= self.clock.now + timeout + 1e-9:
            at, reply = self._ready.pop(0)
            self.clock.now = max(self.clock.now, at) if timeout else self.clock.now
            return reply
        self.clock.now += timeout
        return None

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None:
        self._ready.clear()

    def close(self) -> None: ...


def executor(planner: Script, **options: Any) -> Executor:
    return Executor(planner, **{"blend": 0, "clock": planner.clock, **options})


def commands(control: Executor, steps: int, see: Callable[[int], Mapping[str, Any]] = lambda step: {}) -> list[Command]:
    """One a control period of 1 / FPS seconds."""
    planner = control.planner
    assert isinstance(planner, Script)
    found = []
    for _ in range(steps):
        planner.clock.now = max(planner.clock.now, control.stats.steps / FPS)
        found.append(control.step(see(control.stats.steps)))
    return found


def run(control: Executor, steps: int) -> list[float]:
    return [float(command.action[0]) for command in commands(control, steps)]


def test_a_planner_is_told_what_the_robot_really_got() -> None:
    """Joined, held, limited, taken over, nothing at all: and not what the plan said."""
    planner = Script([0.0, 1.0 / FPS, None], {1: 3.0})
    control = executor(planner, blend=3)
    found = run(control, 16)
    assert found[5] != 5.0, "the late plan is joined"
    assert found[-2:] == [found[-1]] * 2, "then it is held"
    assert planner.told == [[], *([value] for value in found[:-1])]
    control.sent(np.full(DIM, 7.5))
    commands(control, 1)
    control.sent(None)
    commands(control, 1)
    assert planner.told[-2:] == [[7.5], []]


def test_a_hold_after_a_takeover_stands_where_the_robot_was_left() -> None:
    control = executor(Script([0.0, None]))
    run(control, 9)
    control.sent(np.full(DIM, 42.0), taken_over=True)
    assert run(control, 1) == [42.0]
    control.sent(np.full(DIM, 41.0))  # limited: it still goes where it was going
    assert run(control, 1) == [42.0]


def test_plans_that_take_no_time_follow_each_other() -> None:
    control = executor(Script([0.0]))
    assert run(control, 12) == list(range(12))
    assert control.stats.held == control.stats.late == 0
    assert control.stats.skipped == type(control.stats.skipped)([0, 0, 0])


@pytest.mark.parametrize("steps_late", [1, 2, 3])
def test_a_delayed_plan_is_aligned_with_the_actions_executed_meanwhile(steps_late: int) -> None:
    planner = Script([0.0, steps_late / FPS])
    control = executor(planner)
    assert run(control, 20) == list(range(20))  # action t at step t, from whichever plan: aligned
    assert list(control.stats.skipped)[1:] == [steps_late] * (control.stats.plans - 1)
    assert control.stats.held == 0
    assert planner.requests[:3] == [0, 4, 8]  # every exec_horizon, whatever the delay


def test_patience_executes_a_quick_plan_from_its_first_action_and_waits_for_no_other() -> None:
    planner = Script([0.0, 0.03, 0.25])
    control = executor(planner, patience=0.04)
    assert run(control, 6) == list(range(6))
    assert list(control.stats.skipped) == [0, 0]
    before = planner.clock.now
    assert run(control, 6) == list(range(6, 12))  # the third is asked for at step 8, and comes 0.25 s later
    assert list(control.stats.skipped)[2] > 0
    assert planner.clock.now < before + 0.7
    with pytest.raises(ValueError, match="patience = -1 is out of range"):
        executor(planner, patience=-1)


def test_a_late_plan_continues_the_old_one_then_holds() -> None:
    control = executor(Script([0.0, 1.0, None]))  # the second is asked for at step 4, comes at step 14
    assert run(control, 14) == [*range(8), *[7.0] * 6]
    assert control.stats.held == control.stats.held_in_a_row == 6
    assert control.stats.late == 1  # budget: exec_horizon / fps = 0.4 s, counted once
    assert run(control, 1) == [8.0]  # four actions were executed since the request: the fifth (4 + 4) is next
    assert control.stats.skipped[1] == 4
    assert control.stats.held_in_a_row == 0


@pytest.mark.parametrize(
    ("kind", "keep", "held"),
    [("absolute", [], [7, 7, 7]), ("delta", [2], [0, 0, 7]), ("velocity", [], [0, 0, 0]), ("delta", [], [0, 0, 0])],
)
def test_a_hold_stands_still_for_every_kind_of_action_and_ends(kind: str, keep: list[int], held: list[float]) -> None:
    control = executor(Script([0.0, None], action={"kind": kind}, keep=keep), max_held=12)
    found = commands(control, 20)
    assert [c.source for c in found] == ["plan"] * 8 + ["hold"] * 12
    assert all(c.action.tolist() == held for c in found[8:])
    assert found[-1].plan_age_ms == pytest.approx(1900.0)
    for _ in range(2):
        with pytest.raises(HoldError, match=r"no plan to execute for 12 steps in a row \(max_held\): stop the robot"):
            commands(control, 1)
    assert control.stats.held == 12


def test_the_kind_of_action_is_never_assumed() -> None:
    unknown = Script([0.0])
    unknown.info = replace(unknown.info, action=ActionInfo())
    with pytest.raises(ValueError, match="action_kind = None is not one of absolute, delta, velocity"):
        executor(unknown)
    assert executor(unknown, action_kind="velocity").action_kind == "velocity"


def test_a_hold_lasts_for_ever_only_where_that_is_wanted() -> None:
    assert run(executor(Script([0.0, None]), max_held=0), 300)[-1] == 7.0
    default = executor(Script([0.0, None]))
    assert run(default, 108)[-1] == 7.0
    with pytest.raises(HoldError):
        run(default, 1)


def test_a_plan_with_no_action_left_is_thrown_away() -> None:
    planner = Script([0.0, 0.2, 0.0])
    planner.make = lambda number, actions: actions[:2] if number == 1 else actions
    control = executor(planner)
    assert run(control, 12) == list(range(12))
    assert control.stats.too_late == 1


def test_a_planner_that_fails_is_reported_and_asked_again() -> None:
    planner = Script([0.0, 0.1, 0.1])
    planner.errors = {1: "RuntimeError: out of memory"}
    control = executor(planner)
    found = commands(control, 12)
    assert [float(c.action[0]) for c in found] == list(range(12))
    assert [c.error for c in found if c.error] == ["RuntimeError: out of memory"]
    assert control.stats.errors == 1
    assert planner.requests[:3] == [0, 4, 5]  # the failure of 4 is seen at 5, and planned again at once


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.full((TP, DIM), np.nan), "not finite"),
        (np.zeros((TP, 2)), "2 numbers an action, not 3"),
        (np.zeros(TP), "holds no plan"),
        (np.zeros((0, DIM)), "holds no plan"),
        (None, "holds no plan"),
        (np.full((TP, DIM), "x"), "holds no plan"),
    ],
)
def test_what_is_no_plan_for_this_robot_is_an_error_not_a_command(wrong: Any, words: str) -> None:
    planner = Script([0.0, 0.1, 0.1])
    planner.make = lambda number, actions: wrong if number == 1 else actions
    control = executor(planner)
    found = commands(control, 12)
    assert [float(c.action[0]) for c in found] == list(range(12))
    assert [words in c.error for c in found if c.error] == [True]
    planner = Script([0.0])
    planner.make = lambda number, actions: wrong
    with pytest.raises(PlanError, match=words):
        executor(planner).act({})


def test_the_first_plan_is_waited_for_and_its_absence_said() -> None:
    planner = Script([2.0])
    assert executor(planner).act({})[0] == 0.0
    assert planner.clock.now == 2.0
    with pytest.raises(PlanError, match="no plan within 5 s: the planner did not answer"):
        executor(Script([None]), first_timeout=5.0).act({})


def test_a_first_plan_that_was_given_up_may_still_come() -> None:
    planner = Script([7.0])
    control = executor(planner, first_timeout=5.0)
    with pytest.raises(PlanError, match="no plan within 5 s"):
        control.act({})
    assert control.act({})[0] == 0.0
    assert (planner.clock.now, len(planner.requests)) == (7.0, 1)


def test_a_first_step_that_fails_raises_and_can_be_tried_again() -> None:
    planner = Script([0.0])
    planner.errors = {0: "ValueError: x"}
    control = executor(planner)
    with pytest.raises(PlanError, match="ValueError: x"):
        control.act({})
    with pytest.raises(RefusedError, match="all sensors are at fault"):
        control.act(BLIND)
    assert control.act({})[0] == 2.0


@given(
    gap=st.floats(-50, 50),
    blend=st.integers(0, 6),
    max_step=st.one_of(st.none(), st.floats(0.01, 5.0)),
    late=st.integers(1, 3),
)
def test_plans_are_joined_without_a_jump(gap: float, blend: int, max_step: float | None, late: int) -> None:
    """No step exceeds that of the plans (1) by more than min(|gap| / (blend + 1), max_step); the gap never grows."""
    planner = Script([0.0, late / FPS, None], {1: gap}, action_scale=[2.0, 2.0, 2.0])
    control = executor(planner, blend=blend, max_step=max_step)
    actions = np.array(run(control, 4 + late))
    assert np.array_equal(actions, np.arange(4 + late))
    joined = np.array(run(control, TP - late))  # from the new plan
    bound = abs(gap) / (blend + 1)
    if max_step is not None and blend:
        bound = min(bound, max_step * 2.0)
    steps = np.diff(np.concatenate([actions[-1:], joined]))
    assert (np.abs(steps - 1.0) <= bound + 1e-4).all()
    offset = np.abs(np.arange(4 + late, 4 + TP) + gap - joined)  # what is left of the gap
    assert (np.diff(offset) <= 1e-4).all()
    if max_step is None and blend < TP - late:
        assert offset[blend:] == pytest.approx(0.0, abs=1e-4)


def turn(angle: Any) -> np.ndarray:
    """Quaternions (w, x, y, z) about z, behind one other number."""
    half = np.asarray(angle, np.float64) / 2
    zero = np.zeros_like(half)
    return np.stack([10 * half, np.cos(half), zero, zero, np.sin(half)], -1).astype(np.float32)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("slow", [False, True])
def test_joined_and_slowed_rotations_stay_rotations(sign: float, slow: bool) -> None:
    """Of length 1, and the shorter way: no step turns by more than the plans and their part of the gap."""
    planner = Script([0.0, 0.1, None], action_dim=5, action={"kind": "absolute", "quaternions": [1]})
    starts = {0: 0.0, 1: 1.8}  # rad; the second plan is 1.4 rad ahead of the first, or the same with the other sign

    def make(number: int, _: np.ndarray) -> np.ndarray:
        plan = turn(starts[number] + 0.1 * np.arange(TP))
        plan[:, 1:] *= sign if number else 1.0
        return plan

    planner.make = make
    if slow:
        planner.spread = {1: 5.0}
    control = executor(planner, blend=3, hook=limit_uncertainty(max_modes=1, then="slow"))
    found = np.array([command.action for command in commands(control, 11)], np.float64)
    turns = found[:, 1:]
    assert np.linalg.norm(turns, axis=1) == pytest.approx(1.0, abs=1e-6)
    steps = 2 * np.arccos(np.clip((turns[1:] * turns[:-1]).sum(1), -1, 1))  # signs included: q, never -q
    assert steps.max() < 0.1 + 1.4 / 4 + 0.05
    if not slow:  # joined: the plan's own
        assert abs(turns[-1] @ turn(1.8 + 0.6)[1:]) == pytest.approx(1.0, abs=1e-6)


def test_a_hold_of_changes_keeps_a_rotation() -> None:
    planner = Script([0.0, None], action_dim=5, action={"kind": "delta", "quaternions": [1]})
    planner.make = lambda number, _: turn(0.1 * np.arange(TP))
    held = commands(executor(planner), TP + 2)[-1]
    assert held.source == "hold"
    assert held.action == pytest.approx([0.0, *turn(0.7)[1:]])


def test_stop_holds_until_the_candidates_agree_again() -> None:
    planner = Script([0.0, 0.1, 0.1, 0.1])
    planner.spread = {1: 5.0, 2: 5.0}
    control = executor(planner, hook=limit_uncertainty(max_spread=1.0, then="stop"))
    found = commands(control, 12)
    assert [c.source for c in found[:8]] == ["plan"] * 5 + ["hold"] * 2 + ["plan"]
    assert [c.decision for c in found[4:8]] == ["continue", "stop", "stop", "continue"]
    assert found[5].action[0] == 4.0
    assert found[5].plan is not None
    assert found[5].plan.info.spread == 5.0
    assert control.stats.uncertain == 2


@pytest.mark.parametrize(("kind", "expected"), [("absolute", [4.5, 5.0, 5.5, 6.0]), ("delta", [2.5, 2.5, 3.0, 3.0])])
def test_slow_follows_the_same_path_at_half_the_speed(kind: str, expected: list[float]) -> None:
    planner = Script([0.0, 0.1, None], action={"kind": kind}, keep=[2])
    planner.spread = {1: 5.0}
    control = executor(planner, hook=limit_uncertainty(max_modes=1, then="slow"))
    found = commands(control, 9)
    assert [float(c.action[0]) for c in found] == [0, 1, 2, 3, 4, *expected]
    assert found[5].action[2] == 5.0  # a gripper is not slowed down


@pytest.mark.parametrize("answer", ["Stop", None, ZeroDivisionError("no spread")])
def test_a_hook_that_nobody_understands_stops_the_robot_and_is_reported(answer: Any) -> None:
    seen: list[PlanInfo] = []

    def hook(info: PlanInfo) -> Any:
        seen.append(info)
        if len(seen) != 2:
            return "continue"
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = commands(executor(Script([0.0, 0.1]), hook=hook), 8)
    assert [c.source for c in found] == ["plan"] * 5 + ["hold", "plan", "plan"]
    assert "the hook" in found[5].error


def test_a_hook_that_says_stop_to_the_first_plan_is_an_error() -> None:
    with pytest.raises(PlanError, match="stopped the first plan"):
        executor(Script([0.0]), hook=lambda info: "stop").act({})


def test_a_sensor_that_the_policy_needs_stops_the_robot(caplog: pytest.LogCaptureFixture) -> None:
    planner = Script([0.0], needs=["camera"])
    planner.absent = {2: ["touch"], 3: ["camera", "touch"], 4: ["camera"]}
    control = executor(planner)
    found = commands(control, 3)
    assert [c.source for c in found] == ["plan"] * 3  # the policy was trained without touch
    assert control.stats.absent == ("touch",)
    found = commands(control, 3)
    assert [(c.source, c.decision) for c in found] == [("hold", "stop")] * 2 + [("plan", "continue")]
    assert found[-1].action[0] == 5.0  # from a plan of a step at which it was back
    assert control.stats.absent == ()
    assert control.stats.absent_steps["touch"] == 2
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    assert "'camera', which the policy requires" in caplog.text


def test_what_was_planned_without_a_needed_sensor_is_not_executed_when_it_is_back() -> None:
    planner = Script([0.0, 0.1], needs=["camera"])
    planner.absent = {4: ["camera"]}  # when the second plan is asked for; it comes at step 5
    control = executor(planner)
    found = commands(control, 8)
    assert [c.source for c in found] == ["plan"] * 4 + ["hold"] + ["plan"] * 3
    assert [float(c.action[0]) for c in found] == [0, 1, 2, 3, 3, 4, 6, 7]  # the old plan goes on; then one of step 5
    assert "absent: 'camera'" in found[5].error
    assert control.stats.absent_steps == {"camera": 1}


def test_a_sensor_that_is_absent_at_first_is_said_before_anything_moves() -> None:
    planner = Script([0.0], needs=["camera"])
    planner.absent = {0: ["camera"]}
    with pytest.raises(PlanError, match="absent: 'camera', which the policy requires"):
        executor(planner).act({})
    assert executor(planner, absent="continue").act({})[0] == 0.0


def test_a_needed_sensor_that_stays_away_is_why_the_loop_ends() -> None:
    planner = Script([0.0], needs=["camera"])
    planner.absent = {step: ["camera"] for step in range(1, 99)}
    control = executor(planner, max_held=5)
    assert [c.source for c in commands(control, 6)] == ["plan"] + ["hold"] * 5
    with pytest.raises(HoldError, match="absent: 'camera'"):
        commands(control, 1)


def test_an_observation_that_cannot_be_used_does_not_stop_a_moving_robot() -> None:
    planner = Script([0.0, 0.1])
    control = executor(planner)
    found = commands(control, 16, lambda step: BLIND if 3 <= step < 12 else {})
    assert [c.source for c in found] == ["plan"] * 8 + ["hold"] * 5 + ["plan"] * 3
    assert ["at fault" in c.error for c in found] == [3 <= i < 12 for i in range(16)]
    assert control.stats.refused == 9
    assert len(planner.requests) == 2


def test_synchronous_control_waits_for_each_plan_and_raises() -> None:
    planner = Script([0.0, 1.0])
    control = executor(planner, asynchronous=False)
    assert [float(control.act({})[0]) for _ in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert planner.requests == [0, 4, 8]
    assert planner.clock.now == 2.0  # it waited for the second and the third
    with pytest.raises(RefusedError):
        control.act(BLIND)


def test_statistics_of_a_long_run_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism_client.stats._KEPT", 10)
    control = executor(Script([0.0]))
    run(control, 100)
    assert control.stats.steps == 100
    assert len(control.stats.plan_age_ms) == 10
    assert control.budget_ms == pytest.approx(400.0)  # exec_horizon / fps
    assert Stats().summary()["plan_age_max_ms"] == 0.0


@settings(max_examples=40)
@given(
    delays=st.lists(st.one_of(st.none(), st.floats(0.0, 1.5)), min_size=1, max_size=8),
    failing=st.sets(st.integers(1, 8)),
    offsets=st.dictionaries(st.integers(1, 8), st.floats(-5, 5)),
    blind=st.sets(st.integers(1, 59)),
    kind=st.sampled_from(["absolute", "delta"]),
)
def test_whatever_the_planner_does_an_action_comes_and_no_step_is_a_jump(
    delays: list[float | None], failing: set[int], offsets: dict[int, float], blind: set[int], kind: str
) -> None:
    planner = Script([0.0, *delays], offsets, action={"kind": kind})
    planner.errors = dict.fromkeys(failing, "RuntimeError: x")
    control = executor(planner, blend=3)
    values: list[float] = []
    for step in range(60):
        planner.clock.now = step / FPS
        command = control.step(BLIND if step in blind else {})
        values.append(float(command.action[0]))
        assert np.isfinite(command.action).all()
        assert command.plan_age_ms >= 0.0
        assert planner.clock.now == step / FPS  # it never waited
        if command.source == "hold":
            assert values[-1] == (values[-2] if kind == "absolute" else 0.0)
        elif step and kind == "absolute":
            # plans lie at most 70 apart (offsets, and what was held): a quarter of it a join, and two may overlap
            assert abs(values[-1] - values[-2]) <= 1.0 + 2 * 70 / 4 + 1e-3
    assert control.stats.steps == 60


def test_reset_starts_a_new_episode() -> None:
    control = executor(Script([0.0, 0.1]))
    first = run(control, 10)
    control.reset(0)
    control.planner.clock.now = 0.0  # type: ignore[attr-defined]
    assert control.stats.steps == 0
    assert run(control, 10) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blend": -1}, "blend = -1"),
        ({"max_step": 0.0}, "max_step"),
        ({"slow_factor": 0.0}, "slow_factor"),
        ({"keep": (9,)}, "keep or base names dimension 9"),
        ({"exec_horizon": 9}, "exec_horizon = 9"),
        ({"exec_horizon": 0}, "exec_horizon = 0"),
        ({"action_kind": "jump"}, "action_kind = 'jump'"),
        ({"max_held": -1}, "max_held"),
        ({"absent": "hope"}, "absent = 'hope'"),
        ({"budget_ms": 0.0}, "budget_ms"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        executor(Script([0.0]), **change)
    with pytest.raises(ValueError, match="'hope'"):
        limit_uncertainty(then="hope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_modes 0"):
        limit_uncertainty(max_modes=0)


def test_a_server_that_is_silent_just_when_the_first_plan_comes_is_no_crash() -> None:
    planner = Script([0.0])
    planner.trouble = lambda: "no sign of life"  # type: ignore[method-assign]
    control = executor(planner, lost="stop")
    assert [command.source for command in commands(control, 3)] == ["plan", "hold", "hold"]
