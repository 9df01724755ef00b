"""Executes plans at the robot's rate. The only place that knows which plan is executed, and which row of it.

    step       0  1  2  3  4  5  6  7 ...
    plan A     A0 A1 A2 A3 A4 A5 A6 A7          asked for at step 0
    plan B                 B0 B1 B2 B3 ...      asked for at step 4 with o[4], arrives before step 6
    executed   A0 A1 A2 A3 A4 A5 B2 B3 ...      B0 and B1 are past: actions stay aligned with time

join   The gap d = A6 - B2 between both plans is added to the new one and taken away in equal parts over `blend` steps,
       at most `max_step` each: no step is larger than that of the plans plus min(|d| / (blend + 1), max_step).
       Quaternions (ActionInfo.quaternions) go the shorter way and keep their length of 1. Changes and
       velocities are not joined: what is added to a change stays in the pose.
range  Of the actions in the demonstrations (PolicyInfo.action_range), and `margin` of it beyond: no plan goes
       farther, and what was constant stays so.
look   The first observation of an episode and the rate of the loop are compared with the training data
       (first_look.py); PlanError has the differences.
hold   Without a new plan the old one is executed to its end, then the robot stands still. A position is repeated; a
       change or a velocity (`base`) becomes zero, except in `keep` (a gripper). Held steps are not actions, so a plan
       that arrives later starts where the robot stands. After `max_held` of them in a row `step` raises HoldError.
slow   The same path at `slow_factor` of the speed: part of the way to a position, part of a change or a velocity.
stop   Hold until a plan may be executed: a hook stopped it, a required sensor is missing, or the planner is lost
       and `lost` is "stop".

Where plans come from is a Planner: a server (`RemotePlanner`), or a policy in this process, in this thread
(prism.inference.inline) or beside it (prism.inference.lanes). It gets every observation, and the commands that the
robot really got before it. Everything here runs in the caller's thread and asks a clock that can be a test's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from prism_client.action_kind import ActionKind
from prism_client.first_look import Pace, look
from prism_client.joining import joined, within
from prism_client.messages import HoldError, Plan, PlanError, PlanInfo, RefusedError, Reply, Step
from prism_client.planner import Planner
from prism_client.rotations import same_side, unit
from prism_client.stats import DECISIONS, Decision, Hook, Stats

Array = np.ndarray[Any, Any]
BLEND = 3  # steps, of positions
MARGIN = 0.05
MAX_HELD = 100  # steps in a row: 2 s at 50 Hz, 10 s at 10 Hz
logger = logging.getLogger("prism_client")


@dataclass(frozen=True)
class Command:
    """The action of one control step, and why."""

    action: Array  # (D,)
    source: Literal["plan", "hold"]
    plan_age_ms: float  # since the observation that the executed plan was made for
    decision: Decision
    plan: Plan | None  # that was taken over in this step
    error: str  # what went wrong in this step; empty: nothing


@dataclass(frozen=True)
class _Plan:
    step: Step  # of its observation: row j is action step.done + j
    actions: Array  # (T, D), joined to the plan before


class Executor:
    """`act` at every control step, at the rate of the policy; it never waits once the first plan is there.

    with Executor(RemotePlanner("ws://robot-brain:8000")) as executor:
        while True:
            robot.send(executor.act(robot.read()))

    exec_horizon   actions after which the next plan is asked for; default: the planner's. Sooner where plans take so
                   long that the old one would run out
    action_kind    "absolute", "delta" or "velocity": it decides how the robot stands still. Default: the planner's,
                   an error if it has none
    keep           dimensions that a hold does not change, such as a gripper; default: the planner's
    base           dimensions that are always velocities, such as a mobile base; default: none
    blend          steps over which a new plan is joined to the old one; default: what is stored with the policy
                   (`join`), for late plans of positions. If it is not stored: 3 for positions, 0 (jump) for
                   changes and velocities, and without `asynchronous`
    margin         share of the demonstrated range of an action that a plan may go beyond it; default: what is stored
                   with the policy; if it is not stored: 0.05, or any without `asynchronous`
    look           compare sensors and rate with the training data; default: True
    max_step       largest part of the gap that is closed in a step, in half ranges of an action; default: no bound
    hook           gets the PlanInfo of every plan (spread, modes, ...) and returns "continue", "slow" or "stop"; an
                   error counts as "stop"
    slow_factor    of the speed, when slow; default: 0.5
    absent         what to do while a required sensor is missing; default: "stop"
    lost           what to do while the planner is in trouble (the server is gone); default: "continue" with the old
                   plan to its end
    max_held       held steps in a row, then HoldError; default: 100. 0: no limit
    budget_ms      latency above which a plan counts as late; default: exec_horizon / fps
    asynchronous   False waits for each plan, for simulators; default: True
    first_timeout  longest wait for a plan, seconds; default: 60
    patience       seconds that a step waits for the plan that it asks for, so that a quick one is executed from its
                   first action on; default: 0
    strict         raise errors instead of continuing with the old plan; default: not asynchronous
    """

    def __init__(
        self,
        planner: Planner,
        *,
        exec_horizon: int | None = None,
        action_kind: str | None = None,
        keep: Sequence[int] | None = None,
        base: Sequence[int] = (),
        blend: int | None = None,
        margin: float | None = None,
        look: bool = True,
        max_step: float | None = None,
        hook: Hook | None = None,
        slow_factor: float = 0.5,
        absent: Decision = "stop",
        lost: Decision = "continue",
        max_held: int = MAX_HELD,
        budget_ms: float | None = None,
        asynchronous: bool = True,
        first_timeout: float = 60.0,
        patience: float = 0.0,
        strict: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.planner = planner
        self._given = (exec_horizon, action_kind, keep, budget_ms)
        self._asked_blend, self._look, self._base = blend, look, [int(d) for d in base]
        self._asked_margin = margin
        self._max_step = max_step
        self._hook = hook
        self._slow_factor = slow_factor
        self._absent: Decision = absent
        self._lost: Decision = lost
        self._max_held = max_held
        self._asynchronous = asynchronous
        self._first_timeout = first_timeout
        self._patience = patience
        self._strict = not asynchronous if strict is None else strict
        self._clock = clock
        for name, value, good, hint in (
            ("blend", blend, blend is None or blend >= 0, "0 (off) or more"),
            ("margin", margin, margin is None or margin >= 0, "0 or more"),
            ("max_step", max_step, max_step is None or 0 < max_step < math.inf, "more than 0"),
            ("slow_factor", slow_factor, 0 < slow_factor <= 1, "a value in (0, 1]"),
            ("patience", patience, 0 <= patience < math.inf, "0 or more"),
            ("max_held", max_held, max_held >= 0, "0 (for ever) or more"),
            ("budget_ms", budget_ms, budget_ms is None or budget_ms > 0, "more than 0"),
            ("absent", absent, absent in DECISIONS, f"one of {', '.join(DECISIONS)}"),
            ("lost", lost, lost in DECISIONS, f"one of {', '.join(DECISIONS)}"),
        ):
            if not good:
                raise ValueError(f"{name} = {value!r} is out of range: use {hint}")
        self._configure()
        self._clear()

    def _configure(self) -> None:
        """Settings from the planner's PolicyInfo."""
        info = self.planner.info
        exec_horizon, kind, keep, budget = self._given
        length, self.action_dim = info.pred_horizon, info.action_dim
        self.exec_horizon = info.exec_horizon if exec_horizon is None else int(exec_horizon)
        if self.exec_horizon < 1 or (length and self.exec_horizon > length):
            raise ValueError(f"exec_horizon = {self.exec_horizon} is out of range: plans have {length} actions")
        kind = info.action.kind if kind is None else kind
        known = ActionKind.parse(kind)
        if known is None:
            raise ValueError(
                f"action_kind = {kind!r} is not one of {ActionKind.words()}: it decides how the robot stands "
                "still; pass Executor(..., action_kind='absolute')"
            )
        self.action_kind: ActionKind = known
        usual = (BLEND if self._asynchronous else 0) if info.join is None else info.join
        usual = usual if known is ActionKind.ABSOLUTE else 0
        self._blend = usual if self._asked_blend is None else int(self._asked_blend)
        self._joins_all = self._asked_blend is not None or info.join is None  # and not only plans that come late
        self.keep = [int(d) for d in (info.keep if keep is None else keep)]
        self._quaternions = list(info.action.quaternions)
        if known is not ActionKind.ABSOLUTE:  # a rotation is one whatever the others are, and zeros are none
            self.keep += [d for first in self._quaternions for d in range(first, first + 4) if d not in self.keep]
        named = (*self.keep, *self._base, *(d for first in self._quaternions for d in (first, first + 3)))
        if bad := [d for d in named if d < 0 or (self.action_dim and d >= self.action_dim)]:
            raise ValueError(f"keep or base names dimension {bad[0]}, but actions have {self.action_dim}")
        self.fps = info.fps
        self.budget_ms = (1e3 * self.exec_horizon / self.fps if self.fps else math.inf) if budget is None else budget
        self._needs = frozenset(info.needs)
        self._scale = np.asarray(info.action_scale or 1.0, dtype=np.float64)
        self._range: tuple[Array, Array] | None = None
        usual_margin = (MARGIN if self._asynchronous else math.inf) if info.margin is None else info.margin
        margin = usual_margin if self._asked_margin is None else self._asked_margin
        if margin < math.inf and (known := info.action_range) is not None:
            low, high = np.array(known[0], np.float64), np.array(known[1], np.float64)
            self._range = low - margin * (high - low), high + margin * (high - low)

    def _clear(self) -> None:
        self.stats = Stats()
        self._plan: _Plan | None = None
        self._step = 0
        self._done = 0  # rows executed
        self._phase = 0.0  # how much of the present row is done, when slow
        self._before: Array | None = None  # the last row that was executed to its end
        self._commanded: Array | None = None  # planned or held
        self._sent: Array | None = None  # what the robot got in the last step
        self._asked: Step | None = None  # whose plan is on its way
        self._asked_done = 0  # rows executed before the last request
        self._heard = -1  # the latest step that the planner has answered
        self._seen = -1  # ... and said which sensors it has
        self._again = False  # the last request came to nothing
        self._counted_late = False
        self._verdict: Decision = "continue"  # of the hook, on the plan in use
        self._missing: tuple[str, ...] = ()  # absent sensors that the policy needs
        self._taken: Plan | None = None  # in this step
        self._failure: Exception | None = None  # in this step
        self._problem = ""  # in this step, in words
        self._pace = Pace(self.fps)

    def reset(self, seed: int | None = None) -> None:
        """Start an episode; a seed repeats its random numbers."""
        self.planner.reset(seed)
        self._configure()
        self._clear()

    def close(self) -> None:
        self.planner.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def act(self, observation: Mapping[str, Any], ages: Mapping[str, float] | None = None) -> Array:
        """The action (D,) for this step."""
        return self.step(observation, ages).action

    def step(self, observation: Mapping[str, Any], ages: Mapping[str, float] | None = None) -> Command:
        """The Command for this observation. Waits only for the first plan of an episode."""
        self.observe(observation, ages)
        return self.command()

    def observe(self, observation: Mapping[str, Any], ages: Mapping[str, float] | None = None) -> None:
        """The first half of a step: what the planner gets. For several robots whose plans are drawn together."""
        self._taken = self._failure = None
        self._problem = ""
        if self._look:
            self._check(observation)
        self._collect()
        sent = () if self._sent is None else (self._sent,)
        wants = self._asked is None and self._due()
        step = Step(self._step, self._done, observation, ages, wants, self._clock(), sent)
        self.planner.submit(step)  # a planner in this thread may raise: then nothing was taken in
        self._sent = None
        self._step += 1
        self.stats.steps = self._step
        if wants:
            self._asked, self._asked_done = step, self._done
            self._again = self._counted_late = False
        self._now = step

    def command(self) -> Command:
        """The second half: the Command."""
        step = self._now
        self._collect()
        if self._plan is None or not self._asynchronous:
            self._wait(step)
        elif step.wants_plan and self._patience:
            self._wait_a_little()
        if self._strict and self._failure is not None:
            raise self._failure
        self._check_budget()
        if trouble := self.planner.trouble():
            self.stats.error = trouble
        self._decide()
        command = self._command()
        self._commanded = self._sent = command.action
        return command

    def sent(self, action: Array | None, taken_over: bool = False) -> None:
        """The command that the robot really got in the last step, if it was limited or a person commanded
        (`taken_over`: a hold then stands still there). None: it got nothing. The next plan continues from it."""
        self._sent = None if action is None else np.asarray(action)
        if taken_over and self._sent is not None:
            self._commanded = self._sent

    def revise(self) -> Command | None:
        """The present step once more, where the plan that it asked for has come since; None: nothing is new. For robots
        that get several commands a step: a plan that is a little late still serves its first row."""
        asked = self._asked
        if asked is None or asked.number != self._step - 1 or self._phase or not self._asynchronous:
            return None
        self._taken = self._failure = None
        done, self._done = self._done, asked.done
        self._collect()
        if self._taken is None or self.stats.decision != "continue":
            self._done = done
            return None
        command = self._command()
        self._commanded = self._sent = command.action
        return command

    def _check(self, observation: Mapping[str, Any]) -> None:
        """PlanError if this cannot match the training data."""
        if self._step == 0:
            found = look(self.planner.info.sensors, observation)
            for doubt in found.doubts:
                logger.warning("%s", doubt)
            if found.wrong:
                raise PlanError(found.wrong)
        if self._asynchronous and (problem := self._pace.step(self._clock())):
            raise PlanError(problem)

    # ------------------------------------------------------------------ plans

    def _due(self) -> bool:
        """exec_horizon actions after the last request; sooner where the plan would run out meanwhile; at once when
        nothing may be executed, or the last request came to nothing."""
        if self._plan is None or self._again or self.stats.decision == "stop":
            return True
        latencies = self.stats.latency_ms
        needed = math.ceil(1e-3 * latencies[-1] * self.fps) + 1 if latencies and self._asynchronous else 0
        return self._done - self._asked_done >= self.exec_horizon or self._left(self._plan) <= needed

    def _left(self, plan: _Plan) -> int:
        return len(plan.actions) - (self._done - plan.step.done)

    def _collect(self) -> None:
        while (reply := self.planner.poll()) is not None:
            self._take(reply)

    def _wait(self, step: Step) -> None:
        """Wait until the planner has answered this step and the requested plan has arrived."""
        until = self._clock() + self._first_timeout
        while self._failure is None and (self._heard < step.number or self._asked is not None):
            reply = self.planner.poll(max(0.0, until - self._clock()))
            if reply is not None:
                self._take(reply)
            elif self._clock() >= until:
                reason = self.planner.trouble() or "the planner did not answer"
                raise PlanError(f"no plan within {self._first_timeout:g} s: {reason}")
        if self._failure is not None:
            raise self._failure
        if self._plan is None:
            raise PlanError("there is no plan to execute yet")

    def _wait_a_little(self) -> None:
        until = self._clock() + self._patience
        while self._asked is not None and (left := until - self._clock()) > 0:
            reply = self.planner.poll(left)
            if reply is not None:
                self._take(reply)

    def _check_budget(self) -> None:
        asked = self._asked
        if asked is not None and not self._counted_late and 1e3 * (self._clock() - asked.at) > self.budget_ms:
            self._counted_late = True
            self.stats.late += 1

    def _take(self, reply: Reply) -> None:
        error = reply.error
        if reply.absent is not None and reply.step.number > self._seen:  # a plan tells of the step it was asked for at
            self._seen = reply.step.number
            self._see(reply.absent)
        self._heard = max(self._heard, reply.step.number)
        if reply.is_plan:
            self._check_budget()
            self._asked = None
            if error is None:
                try:
                    self._adopt(reply, Plan(np.empty(0)) if reply.plan is None else reply.plan)
                except PlanError as problem:
                    error = problem
            self._again = error is not None
        if error is not None:
            self.stats.errors += 1
            self.stats.refused += isinstance(error, RefusedError)
            if str(error) != self.stats.error:  # once, not at every step
                logger.warning("step %d: %s", reply.step.number, error)
            self.stats.error = self._problem = str(error)
            self._failure = error
        self._decide()

    def _see(self, absent: Sequence[str]) -> None:
        """Update the missing sensors; a required one is logged as an error."""
        self.stats.absent = tuple(absent)
        for name in absent:
            self.stats.absent_steps[name] = self.stats.absent_steps.get(name, 0) + 1
        missing = tuple(name for name in absent if name in self._needs)
        if missing and missing != self._missing:
            level = logging.INFO if self._absent == "continue" else logging.ERROR  # chosen by the user
            logger.log(level, "%s: %s", _without(missing), self._absent)
        self._missing = missing

    def _adopt(self, reply: Reply, plan: Plan) -> None:
        actions = np.array(plan.actions)
        if actions.ndim != 2 or not len(actions) or actions.dtype.kind not in "iuf":
            raise PlanError("the reply holds no plan: 'actions' must be numbers (T, D)")
        width = self.action_dim if self._plan is None else self._plan.actions.shape[1]
        if width and actions.shape[1] != width:
            raise PlanError(
                f"the plan has {actions.shape[1]} numbers an action, not {width}: it is of another policy; "
                "reset() to go on with that"
            )
        if not np.isfinite(actions).all():
            raise PlanError("the plan holds numbers that are not finite")
        skip = self._done - reply.step.done
        waited = 1e3 * (self._clock() - reply.step.at)
        self.stats.latency_ms.append(waited if reply.latency_ms is None else reply.latency_ms)
        if skip >= len(actions):
            self.stats.too_late += 1
            raise PlanError(f"a plan came {skip} actions late, after its own end")
        blind = [name for name in reply.absent or () if name in self._needs]
        if blind and self._absent == "stop":
            raise PlanError(_without(blind))
        verdict = self._ask_hook(plan.info)
        self.stats.spread, self.stats.modes = plan.info.spread, plan.info.modes
        self.stats.uncertain += verdict != "continue"
        if self._commanded is None and verdict == "stop":  # nothing moves and there is nothing to hold
            raise PlanError("the hook stopped the first plan: there is nothing to execute yet")
        if blind:
            verdict = max(verdict, self._absent, key=DECISIONS.index)
        self._plan = _Plan(reply.step, self._within(self._join(actions, skip)))
        self._verdict = verdict
        self._phase, self._before = 0.0, self._commanded
        self.stats.plans += 1
        self.stats.skipped.append(skip)
        self.stats.error = ""
        self._taken = plan

    def _ask_hook(self, info: PlanInfo) -> Decision:
        """A hook that fails, or returns an unknown value, stops the robot."""
        if self._hook is None:
            return "continue"
        try:
            decision: Decision = self._hook(info)
            if decision in DECISIONS:
                return decision
            problem = f"the hook says {decision!r}, not one of {', '.join(DECISIONS)}"
        except Exception as error:
            problem = f"the hook failed: {type(error).__name__}: {error}"
        self._problem = problem
        logger.error("%s: stop", problem)
        return "stop"

    def _decide(self) -> None:
        missing: Decision = self._absent if self._missing else "continue"
        lost: Decision = self._lost if self._commanded is not None and self.planner.trouble() else "continue"
        self.stats.decision = max(self._verdict, missing, lost, key=DECISIONS.index)

    def _join(self, actions: Array, row: int) -> Array:
        """The new plan, starting at `row` where the robot would have gone on without it; see the top of this file."""
        late = row > 0 or self.stats.held_in_a_row > 0
        if self._commanded is None or not self._blend or not (late or self._joins_all):
            return actions
        next_row = self._row()
        reference = self._held() if next_row is None else next_row
        reference[self._base] = actions[row, self._base]
        most = None if self._max_step is None else self._max_step * self._scale
        return joined(actions, row, reference, self._blend, most, self._quaternions)

    def _within(self, actions: Array) -> Array:
        """The plan, kept within the range of the demonstrations."""
        if self._range is None or self._range[0].shape != actions.shape[1:]:
            return actions
        inside, moved = within(actions, self._range, self._quaternions)
        self.stats.beyond += moved
        return inside

    # ------------------------------------------------------------------ actions

    def _command(self) -> Command:
        assert self._plan is not None
        now = self._clock()
        age = 1e3 * (now - self._plan.step.at)
        self.stats.plan_age_ms.append(age)
        target = self._row()
        if target is None:
            self._count_hold()
            action = self._held()
        else:
            self.stats.held_in_a_row = 0
            action = self._paced(target)
        source: Literal["plan", "hold"] = "hold" if target is None else "plan"
        return Command(action, source, age, self.stats.decision, self._taken, self._problem)

    def _row(self) -> Array | None:
        """The next planned action; None if there is none or it may not be executed."""
        if self._plan is None or self._left(self._plan) <= 0 or self.stats.decision == "stop":
            return None
        return np.array(self._plan.actions[self._done - self._plan.step.done])

    def _paced(self, target: Array) -> Array:
        """All of the way to the next action; slow: part of the way to a position, or part of a change."""
        pace = self._slow_factor if self.stats.decision == "slow" else 1.0
        start, end = self._phase, min(self._phase + pace, 1.0)
        action = target
        if pace < 1.0 or start > 0.0:
            before = target if self._before is None else self._before
            absolute = self.action_kind is ActionKind.ABSOLUTE
            before = same_side(before[None], 0, target, self._quaternions)[0]
            action = before + end * (target - before) if absolute else (end - start) * target
            action[self.keep] = target[self.keep]
            action[self._base] = (end - start) * target[self._base]
            action = unit(action, self._quaternions).astype(target.dtype)
        self._phase = end
        if end >= 1.0 - 1e-9:
            self._phase, self._before = 0.0, target
            self._done += 1
        return np.array(action)

    def _held(self) -> Array:
        """Standing still, by the kind of the actions."""
        assert self._commanded is not None
        held = np.array(self._commanded) if self.action_kind is ActionKind.ABSOLUTE else np.zeros_like(self._commanded)
        held[self.keep] = self._commanded[self.keep]
        held[self._base] = 0.0
        return held

    def _count_hold(self) -> None:
        if self._max_held and self.stats.held_in_a_row >= self._max_held:
            reason = _without(self._missing) if self._missing else self.stats.error
            raise HoldError(
                f"no plan to execute for {self._max_held} steps in a row (max_held): stop the robot; "
                f"{reason or 'the planner is too slow, or a hook stopped it'}"
            )
        self.stats.held += 1
        self.stats.held_in_a_row += 1


def _without(sensors: Sequence[str]) -> str:
    names = ", ".join(f"'{name}'" for name in sensors)
    return f"absent: {names}, which the policy requires; fix it, or Executor(..., absent='continue')"
