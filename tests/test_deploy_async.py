"""Asynchronous control with a clock and a planner of the test's own: every case exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.controller import Controller, ControllerConfig, Replan
from prism.errors import PrismError
from prism.selection import SelectionConfig
from prism.serve.async_control import AsyncConfig, AsyncController, PlanResult
from prism.serve.uncertainty import UncertaintyConfig
from tests.policy_fakes import ACTION_DIM, small_config, small_policy

TP, FPS = 8, 10.0
CONFIG = ControllerConfig(exec_horizon=4, candidates=2, selection=SelectionConfig(rule="first", initial="first"))
OBSERVATION = {"proprio": np.zeros(3, np.float32), "object_state": np.zeros(5, np.float32)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Script:
    """A planner whose plan number n is ready `delays[n]` seconds after its request (None: never).

    A plan that is asked for at step t is action t, t + 1, ... (times `slope`, plus `offsets[n]`): what is commanded
    says which observation and which index it came from.
    """

    def __init__(self, clock: Clock, delays: list[float | None], offsets: dict[int, float] | None = None) -> None:
        self.clock, self.delays, self.offsets = clock, delays, offsets or {}
        self.errors: dict[int, str] = {}
        self.spread: dict[int, float] = {}
        self.requests: list[int] = []
        self.steps = 0
        self._ready: list[tuple[float, PlanResult]] = []

    def reset(self) -> None:
        self.steps = 0
        self._ready.clear()

    def observe(self, streams: Mapping[str, Any], present: Mapping[str, bool]) -> None:
        self.steps += 1

    def request(self, candidates: int, rng: torch.Generator) -> int:
        number = len(self.requests)
        self.requests.append(self.steps - 1)
        delay = self.delays[number] if number < len(self.delays) else self.delays[-1]
        ramp = np.arange(TP, dtype=np.float32) + (self.steps - 1) + self.offsets.get(number, 0.0)
        plans = np.repeat(ramp[None, :, None], ACTION_DIM, axis=2).repeat(candidates, axis=0)
        plans[1:] += self.spread.get(number, 0.0)
        error = self.errors.get(number)
        if delay is not None:
            result = PlanResult(number, None if error else plans, delay * 1e3, error)
            self._ready.append((self.clock.now + delay, result))
        return number

    def poll(self) -> PlanResult | None:
        if self._ready and self._ready[0][0] <= self.clock.now + 1e-9:
            return self._ready.pop(0)[1]
        return None

    def wait(self, timeout: float) -> PlanResult | None:
        if not self._ready or self._ready[0][0] > self.clock.now + timeout:
            self.clock.now += timeout
            return None
        self.clock.now = max(self.clock.now, self._ready[0][0])
        return self.poll()


POLICY = small_policy(small_config(pred_horizon=TP))  # never asked here: Script makes the plans


def _make(planner: Script, **changes: Any) -> AsyncController:
    config = AsyncConfig(**{"blend": 0, **changes})
    return AsyncController(Controller(POLICY, CONFIG), planner, config, clock=planner.clock)


def _run(control: AsyncController, steps: int) -> list[float]:
    """One action (its first dimension) a step of 1 / FPS seconds."""
    clock, planner = control._clock, control.planner
    assert isinstance(clock, Clock)
    assert isinstance(planner, Script)
    actions = []
    for _ in range(steps):
        clock.now = max(clock.now, planner.steps / FPS)
        actions.append(float(control.step(OBSERVATION).action[0]))
    return actions


def test_plans_that_take_no_time_follow_each_other() -> None:
    control = _make(Script(Clock(), [0.0]))
    assert _run(control, 12) == list(range(12))
    assert control.statistics.holds == control.statistics.misses == 0


@pytest.mark.parametrize("steps_late", [1, 2, 3])
def test_a_delayed_plan_is_aligned_with_the_actions_executed_meanwhile(steps_late: int) -> None:
    planner = Script(Clock(), [0.0, steps_late / FPS])
    control = _make(planner)
    assert _run(control, 20) == list(range(20))  # action t at step t, from whichever plan: aligned
    assert control.statistics.skipped[1:] == [steps_late] * (control.statistics.plans - 1)
    assert control.statistics.holds == 0
    assert planner.requests[:3] == [0, 4, 8]  # every exec_horizon, whatever the delay


def test_a_late_plan_continues_the_old_one_then_holds_the_last_action() -> None:
    control = _make(Script(Clock(), [0.0, 1.0, 0.0]))  # the second is asked for at step 4, comes at step 14
    actions = _run(control, 14)
    assert actions == [*range(8), *[7.0] * 6]
    assert control.statistics.holds == 6
    assert control.statistics.misses == 1  # budget: exec_horizon / fps = 0.4 s, counted once
    after = _run(control, 2)
    assert after[0] == 8.0  # four actions were executed since the request: the fifth (4 + 4) is next
    assert control.statistics.skipped[1] == 4


def test_a_plan_that_never_comes_never_stops_the_loop() -> None:
    control = _make(Script(Clock(), [0.0, None]), hold="zero", keep=(2,))
    commands = []
    for step in range(30):
        control._clock.now = step / FPS  # type: ignore[attr-defined]
        commands.append(control.step(OBSERVATION))
    assert [c.source for c in commands] == ["plan"] * 8 + ["hold"] * 22
    assert commands[-1].action.tolist() == [0.0, 0.0, 7.0]  # stands still, keeps the gripper
    assert control.statistics.misses == 1
    assert commands[-1].plan_age_ms == pytest.approx(2900.0)


def test_a_plan_with_no_action_left_is_thrown_away() -> None:
    planner = Script(Clock(), [0.0, 0.2, 0.0])
    control = _make(planner)
    original = planner.poll

    def short() -> PlanResult | None:
        result = original()
        return result if result is None or result.ticket != 1 else PlanResult(1, result.candidates[:, :2], 200.0)  # type: ignore[index]

    planner.poll = short  # type: ignore[method-assign]
    assert _run(control, 12) == list(range(12))
    assert control.statistics.late_plans == 1


def test_a_planner_that_fails_is_reported_and_asked_again() -> None:
    planner = Script(Clock(), [0.0, 0.1, 0.1])
    planner.errors = {1: "RuntimeError: out of memory"}
    control = _make(planner)
    errors = []
    for step in range(12):
        control._clock.now = step / FPS  # type: ignore[attr-defined]
        command = control.step(OBSERVATION)
        assert float(command.action[0]) == step
        errors.append(command.error)
    assert [e for e in errors if e] == ["RuntimeError: out of memory"]
    assert control.statistics.errors == 1
    assert planner.requests[:3] == [0, 4, 5]  # the failure of 4 is seen at 5, and planned again at once


def test_a_plan_that_is_not_finite_is_an_error_not_a_command() -> None:
    planner = Script(Clock(), [0.0, 0.1, 0.1], {1: float("nan")})
    control = _make(planner)
    assert np.isfinite(_run(control, 12)).all()
    assert control.statistics.errors == 1


def test_the_first_plan_is_waited_for_and_its_absence_said() -> None:
    clock = Clock()
    control = _make(Script(clock, [2.0]))
    assert control.step(OBSERVATION).action[0] == 0.0
    assert clock.now == 2.0
    with pytest.raises(PrismError, match="no first plan within 5 s"):
        _make(Script(Clock(), [None]), first_timeout=5.0).step(OBSERVATION)


def test_a_first_plan_that_fails_again_and_again_is_given_up_soon(caplog: pytest.LogCaptureFixture) -> None:
    failing = Script(Clock(), [0.0])  # fails at once: there is no pause between attempts
    failing.errors = dict.fromkeys(range(10**3), "ValueError: x")
    control = _make(failing)
    with pytest.raises(PrismError, match="no first plan in 3 attempts: ValueError: x"):
        control.step(OBSERVATION)
    assert len(failing.requests) == caplog.text.count("no plan: ValueError: x") == 3
    failing.errors = {3: "ValueError: x"}  # may be tried again; a single failure is no reason to end
    assert control.step(OBSERVATION).action[0] == 1.0


@given(
    gap=st.floats(-50, 50),
    blend=st.integers(0, 6),
    max_step=st.one_of(st.none(), st.floats(0.01, 5.0)),
    late=st.integers(1, 3),
)
def test_plans_are_joined_without_a_jump(gap: float, blend: int, max_step: float | None, late: int) -> None:
    """No step exceeds that of the plans (1) by more than min(|gap| / (blend + 1), max_step); the gap never grows."""
    control = _make(Script(Clock(), [0.0, late / FPS, None], {1: gap}), blend=blend, max_step=max_step)
    actions = np.array(_run(control, 4 + late))
    assert np.array_equal(actions, np.arange(4 + late))
    joined = np.array(_run(control, TP - late))  # from the new plan
    bound = abs(gap) / (blend + 1)
    if max_step is not None:
        bound = min(bound, max_step * float(control.controller.scale[0]))
    steps = np.diff(np.concatenate([actions[-1:], joined]))
    assert (np.abs(steps - 1.0) <= bound + 1e-4).all()
    offset = np.abs(np.arange(4 + late, 4 + TP) + gap - joined)  # what is left of the gap
    assert (np.diff(offset) <= 1e-4).all()
    if max_step is None and blend < TP - late:
        assert offset[blend:] == pytest.approx(0.0, abs=1e-4)


def test_stop_holds_until_the_candidates_agree_again() -> None:
    planner = Script(Clock(), [0.0, 0.1, 0.1, 0.1])
    planner.spread = {1: 5.0, 2: 5.0}
    control = _make(planner, uncertainty=UncertaintyConfig(max_spread=1.0, then="stop"))
    commands = []
    for step in range(12):
        control._clock.now = step / FPS  # type: ignore[attr-defined]
        commands.append(control.step(OBSERVATION))
    assert [c.source for c in commands[:8]] == ["plan"] * 5 + ["hold"] * 2 + ["plan"]
    assert [c.decision for c in commands[4:8]] == ["continue", "stop", "stop", "continue"]
    assert commands[5].action[0] == 4.0
    assert commands[5].replan is not None
    assert commands[5].replan.spread > 1.0
    assert control.statistics.uncertain == 2


@pytest.mark.parametrize(("hold", "expected"), [("last", [4.5, 5.0, 5.5, 6.0]), ("zero", [2.5, 2.5, 3.0, 3.0])])
def test_slow_follows_the_same_path_at_half_the_speed(hold: str, expected: list[float]) -> None:
    planner = Script(Clock(), [0.0, 0.1, None])
    planner.spread = {1: 5.0}
    control = _make(planner, hold=hold, uncertainty=UncertaintyConfig(max_modes=1, then="slow"))
    actions = _run(control, 9)
    assert actions[:5] == [0, 1, 2, 3, 4]
    assert actions[5:] == expected


def test_a_hook_of_ones_own_sees_every_plan() -> None:
    seen: list[Replan] = []
    planner = Script(Clock(), [0.0])

    def hook(replan: Replan) -> Any:
        seen.append(replan)
        return "continue"

    control = AsyncController(Controller(POLICY, CONFIG), planner, AsyncConfig(), planner.clock, hook)
    _run(control, 10)
    assert [r.step for r in seen] == [0, 5, 9]  # a plan that is ready at once is executed from the next step on


@pytest.mark.parametrize("answer", ["Stop", None, ZeroDivisionError("no spread")])
def test_a_hook_that_nobody_understands_stops_the_robot_and_is_told(answer: Any) -> None:
    planner, seen = Script(Clock(), [0.0, 0.1]), []

    def hook(replan: Replan) -> Any:
        seen.append(replan)
        if len(seen) != 2:
            return "continue"
        if isinstance(answer, Exception):
            raise answer
        return answer

    control = AsyncController(Controller(POLICY, CONFIG), planner, AsyncConfig(blend=0), planner.clock, hook)
    commands = []
    for step in range(8):
        planner.clock.now = step / FPS
        commands.append(control.step(OBSERVATION))
    assert [c.source for c in commands] == ["plan"] * 5 + ["hold", "plan", "plan"]
    assert commands[5].error is not None
    assert "the hook" in commands[5].error


def test_an_observation_that_cannot_be_used_does_not_stop_a_moving_robot() -> None:
    planner = Script(Clock(), [0.0, 0.1])
    control = _make(planner)
    blind = {name: np.full_like(value, np.nan) for name, value in OBSERVATION.items()}
    with pytest.raises(PrismError, match="none of the policy's sensors"):
        control.step(blind)
    commands = []
    for step in range(16):
        planner.clock.now = step / FPS
        commands.append(control.step(blind if 3 <= step < 12 else OBSERVATION))
    assert [c.source for c in commands] == ["plan"] * 8 + ["hold"] * 5 + ["plan"] * 3
    assert ["none of the policy's sensors" in (c.error or "") for c in commands] == [3 <= i < 12 for i in range(16)]
    assert control.statistics.refused == 9
    assert len(planner.requests) == 2  # none while it is blind


@pytest.mark.parametrize("blind", [1, 2, 9])
def test_observations_that_could_not_be_used_are_filled_in(blind: int) -> None:
    """The planner's window is of consecutive steps, and that of the controller."""
    planner = Script(Clock(), [0.0, 0.1])
    policy = small_policy(small_config(pred_horizon=TP, obs_horizon=4))
    control = AsyncController(Controller(policy, CONFIG), planner, AsyncConfig(), planner.clock)
    seen: list[float] = []
    planner.observe = lambda streams, present: seen.append(float(streams["proprio"][0]))  # type: ignore[method-assign]
    for step in range(3 + blind):
        planner.clock.now = step / FPS
        value = np.nan if 2 <= step < 2 + blind else step
        control.step({"proprio": np.full(3, value, np.float32)})
    expected = [0, 1, *range(2, 3 + blind)][-4:]
    assert seen[-4:] == pytest.approx(expected)
    assert len(seen) == 2 + min(blind + 1, 4)
    window = control.controller.observation().streams["proprio"][0, :, 0]
    assert window.tolist() == pytest.approx(expected)


def test_a_first_plan_that_was_given_up_may_still_come() -> None:
    clock = Clock()
    planner = Script(clock, [7.0])
    control = _make(planner, first_timeout=5.0)
    with pytest.raises(PrismError, match="no first plan within 5 s"):
        control.step(OBSERVATION)
    assert control.step(OBSERVATION).action[0] == 0.0
    assert (clock.now, len(planner.requests)) == (7.0, 1)


def test_statistics_of_a_long_run_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism.serve.async_control._KEPT", 10)
    control = _make(Script(Clock(), [0.0]))
    _run(control, 100)
    assert control.statistics.actions == 100
    assert len(control.statistics.plan_age_ms) < 20
    assert len(control.controller.replans) <= 11
    assert control.budget_ms == pytest.approx(400.0)  # exec_horizon / fps


@settings(max_examples=40)
@given(
    delays=st.lists(st.one_of(st.none(), st.floats(0.0, 1.5)), min_size=1, max_size=8),
    failing=st.sets(st.integers(1, 8)),
    offsets=st.dictionaries(st.integers(1, 8), st.floats(-5, 5)),
    blind=st.sets(st.integers(1, 59)),
)
def test_whatever_the_planner_does_an_action_comes_and_no_step_is_a_jump(
    delays: list[float | None], failing: set[int], offsets: dict[int, float], blind: set[int]
) -> None:
    clock = Clock()
    planner = Script(clock, [0.0, *delays], offsets)
    planner.errors = dict.fromkeys(failing, "RuntimeError: x")
    control = _make(planner, blend=3)
    nothing = {name: np.full_like(value, np.nan) for name, value in OBSERVATION.items()}
    values: list[float] = []
    for step in range(60):
        clock.now = step / FPS
        command = control.step(nothing if step in blind else OBSERVATION)
        values.append(float(command.action[0]))
        assert np.isfinite(command.action).all()
        assert command.plan_age_ms >= 0.0
        assert clock.now == step / FPS  # it never waited
        if command.source == "hold":
            assert values[-1] == values[-2]
        elif step:
            # plans lie at most 70 apart (offsets, and what was held): a quarter of it a join, and two may overlap
            assert abs(values[-1] - values[-2]) <= 1.0 + 2 * 70 / 4 + 1e-3
    assert control.statistics.actions == 60


def test_reset_starts_a_new_episode() -> None:
    control = _make(Script(Clock(), [0.0, 0.1]))
    first = _run(control, 10)
    control.reset(0)
    control._clock.now = 0.0  # type: ignore[attr-defined]
    assert control.statistics.actions == 0
    assert _run(control, 10) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hold": "jump"}, "control.hold"),
        ({"blend": -1}, "control.blend"),
        ({"max_step": 0.0}, "control.max_step"),
        ({"slow_factor": 0.0}, "control.slow_factor"),
        ({"keep": (9,)}, "control.keep"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        _make(Script(Clock(), [0.0]), **change)
    with pytest.raises(PrismError, match=r"uncertainty\.then"):
        UncertaintyConfig(then="hope")  # type: ignore[arg-type]


def test_a_warm_start_that_nobody_would_do_is_refused() -> None:
    controller = Controller(POLICY, CONFIG)
    controller.config = dataclasses.replace(CONFIG, warm_start=True)
    with pytest.raises(PrismError, match=r"controller\.warm_start"):
        AsyncController(controller, Script(Clock(), [0.0]))
