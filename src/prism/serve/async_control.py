"""Control that never waits for a plan: the old one is executed while the new one is made.

    step      t    t+1   t+2   t+3   ...                         the new plan was asked for at t, arrives before t+2
    old plan  a0   a1    (a2   a3)                               executed until then
    new plan  b0   b1     b2   b3    b4 ...                      b0, b1 are too late: they are skipped, b2 is next

Latency compensation: a plan made for observation t is executed from the action that is due when it arrives, so actions
stay aligned with time. The join: the gap d = a2 - b2 between both plans is added to the new one and taken away in equal
parts over `blend` steps, at most `max_step` each,

    out_j = b_j + o_j,   |o_j| = max(|d| - (j + 1) min(|d| / (blend + 1), max_step), 0),   sign(o_j) = sign(d)

so no step is larger than that of the plans themselves plus min(|d| / (blend + 1), max_step). A plan that does not come:
the old one is executed to its end, then the robot holds; and so it does when an observation cannot be used (every
sensor at fault, a wrong shape): no plan is asked for until one can, whose window is then filled in as where
nobody sent any. Everything here runs in the caller's thread and asks a clock that can be a test's; the planner
(runtime_lanes.LanePlanner) has the threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from prism.controller import Controller, Replan
from prism.errors import PrismError
from prism.serve.uncertainty import DECISIONS, Decision, Hook, UncertaintyConfig

Array = NDArray[np.generic]
Hold = Literal["last", "zero"]
Source = Literal["plan", "hold"]
_ATTEMPTS = 3  # at a first plan
_KEPT = 50_000  # latest values of a statistic: a robot may run for days
logger = logging.getLogger("prism.control")


def keep_latest(values: list[Any], value: Any) -> None:
    """Append, and forget the oldest values now and then."""
    values.append(value)
    if len(values) >= 2 * _KEPT:
        del values[:-_KEPT]


@dataclass(frozen=True)
class PlanResult:
    ticket: int
    candidates: NDArray[np.float32] | None  # (K, Tp, Da) robot units; None: it failed
    latency_ms: float  # from the request
    error: str | None = None


class Planner(Protocol):
    def observe(self, streams: Mapping[str, Array], present: Mapping[str, bool]) -> None:
        """Take in one time step; must not block."""

    def request(self, candidates: int, rng: torch.Generator) -> int:
        """Start a plan from the window as it is now; its ticket. Must not block."""

    def poll(self) -> PlanResult | None: ...

    def wait(self, timeout: float) -> PlanResult | None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class AsyncConfig:
    blend: int = 3  # steps over which the gap between two plans is closed; 0: none, jump
    max_step: float | None = None  # the most of it a step, in half ranges of an action; None: no bound
    hold: Hold = "last"  # without a plan: the last action (positions), or zero (velocities, changes)
    keep: tuple[int, ...] = ()  # dimensions that keep their last value even when hold is zero: a gripper
    budget_ms: float | None = None  # a plan later than this missed its deadline; None: exec_horizon / fps
    first_timeout: float = 60.0  # seconds that the first plan may take: before it there is nothing to execute
    slow_factor: float = 0.5  # of the speed, when uncertainty says "slow"
    uncertainty: UncertaintyConfig = field(default_factory=UncertaintyConfig)

    def __post_init__(self) -> None:
        if self.hold not in get_args(Hold):
            raise PrismError(f"control.hold is '{self.hold}'; use one of {', '.join(get_args(Hold))}")
        if self.blend < 0:
            raise PrismError(f"control.blend is {self.blend}; use 0 (off) or more")
        if not 0 < self.slow_factor <= 1:
            raise PrismError(f"control.slow_factor is {self.slow_factor}; it must be in (0, 1]")
        for name, value in (("max_step", self.max_step), ("budget_ms", self.budget_ms)):
            if value is not None and not 0 < value < math.inf:
                raise PrismError(f"control.{name} is {value}; it must be above 0")


@dataclass
class Statistics:
    """Since the last reset."""

    actions: int = 0
    plans: int = 0  # adopted
    misses: int = 0  # later than the budget, or not at all
    late_plans: int = 0  # so late that no action of it was left
    errors: int = 0  # the planner failed
    holds: int = 0  # actions without a plan
    uncertain: int = 0  # plans beyond a limit of uncertainty
    refused: int = 0  # observations that could not be used
    # The latest ones:
    latency_ms: list[float] = field(default_factory=list)  # request -> result, of every plan
    plan_age_ms: list[float] = field(default_factory=list)  # of every action: since the observation behind its plan
    skipped: list[int] = field(default_factory=list)  # actions of each plan that were too late

    def summary(self) -> dict[str, Any]:
        ages, latencies = np.array(self.plan_age_ms or [0.0]), np.array(self.latency_ms or [0.0])
        return {
            "plans": self.plans,
            "plan_misses": self.misses,
            "plans_too_late": self.late_plans,
            "plan_errors": self.errors,
            "holds": self.holds,
            "uncertain_plans": self.uncertain,
            "observations_refused": self.refused,
            "plan_latency_p50_ms": float(np.median(latencies)),
            "plan_latency_p99_ms": float(np.quantile(latencies, 0.99)),
            "plan_age_p50_ms": float(np.median(ages)),
            "plan_age_max_ms": float(ages.max()),
            "actions_skipped_mean": float(np.mean(self.skipped)) if self.skipped else 0.0,
        }


@dataclass(frozen=True)
class Command:
    action: NDArray[np.float32]  # (Da,)
    source: Source
    plan_age_ms: float  # since the observation that the executed plan was made for
    replan: Replan | None  # of a plan that was adopted in this step: spread, modes, switches
    decision: Decision  # what uncertainty says at the moment
    error: str | None  # what went wrong in this step, in words


class AsyncController:
    """`step` once a control period: an action, at once. The first one waits for the first plan."""

    def __init__(
        self,
        controller: Controller,
        planner: Planner,
        config: AsyncConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        hook: Hook | None = None,
    ) -> None:
        if controller.config.warm_start:  # planners sample each plan from noise
            raise PrismError("controller.warm_start is not for asynchronous control: use warm_start=False")
        self.controller = controller
        self.planner = planner
        self.config = config or AsyncConfig()
        self._clock = clock
        self._hook = hook or self.config.uncertainty.decide
        spec = controller.policy.spec
        if bad := [d for d in self.config.keep if not 0 <= d < spec.action_dim]:
            raise PrismError(f"control.keep names dimension {bad[0]}, but actions have {spec.action_dim}")
        self._period = 1.0 / spec.fps if spec.fps > 0 else 0.0
        own = self.config.budget_ms
        self.budget_ms = (controller.config.exec_horizon * self._period * 1e3 or math.inf) if own is None else own
        self._reset()

    def reset(self, seed: int = 0) -> None:
        """Start an episode."""
        self.controller.reset(seed)
        self.planner.reset()
        self._reset()

    def _reset(self) -> None:
        self.statistics = Statistics()
        self.decision: Decision = "continue"
        self._flying: tuple[int, float] | None = None  # ticket and time of the request that is under way
        self._executed = 0  # actions of plans since that request
        self._again = False  # the last request came to nothing
        self._blind = 0  # the latest observations that could not be used
        self._missed = False  # the flying request is beyond its budget, and counted
        self._cursor = 0  # next action of the plan
        self._phase = 0.0  # how much of it is done, when slow
        self._born = 0.0  # when the observation behind the plan was made
        self._before: NDArray[np.float32] | None = None  # the last completed action
        self._last: NDArray[np.float32] | None = None  # what was commanded last

    def step(self, observation: Mapping[str, Array | str], ages: Mapping[str, float] | None = None) -> Command:
        """Take in one observation, and say what to do now."""
        refused = self._observe(observation, ages)
        replan, error = self._collect(self.planner.poll())
        self._check_budget()
        if self._last is None:
            replan, error = self._first()
        elif self._flying is None and refused is None and self._due():
            self._request()
        action, source = self._next()
        self._last = action
        age = (self._clock() - self._born) * 1e3
        self.statistics.actions += 1
        self.statistics.holds += source == "hold"
        keep_latest(self.statistics.plan_age_ms, age)
        return Command(action.copy(), source, age, replan, self.decision, error or refused)

    def _observe(self, observation: Mapping[str, Array | str], ages: Mapping[str, float] | None) -> str | None:
        """What is wrong with the observation, if anything is; that is fatal only before the first action."""
        try:
            self.controller.observe(observation, ages, self._blind)
        except PrismError as error:
            if self._last is None:
                raise
            if not self._blind:
                logger.error("%s; the old plan is executed to its end", error)
            self._blind += 1
            self.statistics.refused += 1
            return str(error)
        for step in self._filled():
            self.planner.observe(*step)
        self._blind = 0
        self.planner.observe(*self.controller.latest())
        return None

    def _filled(self) -> Iterator[tuple[dict[str, Array], dict[str, bool]]]:
        """What the controller put in place of observations that could not be used: a window is of consecutive steps."""
        if not self._blind:
            return
        window = self.controller.observation()
        horizon = self.controller.policy.spec.obs_horizon
        for t in range(max(0, horizon - 1 - self._blind), horizon - 1):
            streams: dict[str, Array] = {name: value[0, t].cpu().numpy() for name, value in window.streams.items()}
            yield streams, {name: bool(value[0, t]) for name, value in window.present.items()}

    # ------------------------------------------------------------------ plans

    def _first(self) -> tuple[Replan | None, str | None]:
        """Before the first action nothing moves and there is nothing to hold: wait for a plan that may be executed."""
        until = self._clock() + self.config.first_timeout
        reason: str | None = None
        failures = 0
        while True:
            if self._flying is None:  # not after a first plan that was given up: it may still come
                self._request()
            replan, error = self._collect(self.planner.wait(max(0.0, until - self._clock())))
            if replan is not None and self.decision != "stop":
                return replan, error
            failures += error is not None
            if failures == _ATTEMPTS:
                raise PrismError(f"no first plan in {_ATTEMPTS} attempts: {error}")
            reason = error or ("the candidates disagree too much" if replan is not None else reason)
            if self._clock() >= until:
                raise PrismError(
                    f"no first plan within {self.config.first_timeout:g} s: {reason or 'the planner did not answer'}"
                )

    @property
    def _left(self) -> int:
        plan = self.controller.last_plan
        return 0 if plan is None else len(plan.actions) - self._cursor

    def _due(self) -> bool:
        """exec_horizon actions after the last request; sooner where the plan would run out meanwhile; at once when
        there is nothing to execute, or the last request came to nothing."""
        if self._again or self.decision == "stop" or self._left == 0:
            return True
        usual = self.statistics.latency_ms[-1] if self.statistics.latency_ms else 0.0
        needed = math.ceil(usual / 1e3 / self._period) + 1 if self._period else 1
        return self._executed >= self.controller.config.exec_horizon or self._left <= needed

    def _request(self) -> None:
        ticket = self.planner.request(self.controller.config.candidates, self.controller.rng)
        self._flying = (ticket, self._clock())
        self._executed, self._missed, self._again = 0, False, False

    def _check_budget(self) -> None:
        if self._flying is not None and not self._missed and (self._clock() - self._flying[1]) * 1e3 > self.budget_ms:
            self._miss()

    def _miss(self) -> None:
        self._missed = True
        self.statistics.misses += 1

    def _collect(self, result: PlanResult | None) -> tuple[Replan | None, str | None]:
        """Adopt a plan that has arrived, from the action that is due now."""
        if result is None or self._flying is None or result.ticket != self._flying[0]:
            return None, None
        asked, skip = self._flying[1], self._executed
        self._flying = None
        keep_latest(self.statistics.latency_ms, result.latency_ms)
        if result.latency_ms > self.budget_ms and not self._missed:
            self._miss()
        if result.error is None and result.candidates is not None and not np.isfinite(result.candidates).all():
            result = replace(result, error="the plan holds numbers that are not finite")
        if result.error is not None or result.candidates is None:
            self.statistics.errors += 1
            self._again = True
            logger.error("no plan: %s; the old one is executed to its end", result.error)
            return None, result.error
        if skip >= result.candidates.shape[1]:
            self.statistics.late_plans += 1
            self._again = True
            logger.warning("a plan came %d actions late, none of it is left", skip)
            return None, f"a plan came {skip} actions late"
        reference = self._continuation()
        self.controller.adopt(result.candidates[:, skip:], result.latency_ms)
        plan = self.controller.last_plan
        assert plan is not None
        if reference is not None:
            self.controller.last_plan = replace(plan, actions=self._join(plan.actions, reference))
        self._cursor, self._phase, self._born = 0, 0.0, asked
        self._before = self._last
        self.statistics.plans += 1
        keep_latest(self.statistics.skipped, skip)
        replan = self.controller.replans[-1]
        del self.controller.replans[:-_KEPT]
        self.decision, error = self._decide(replan)
        self.statistics.uncertain += self.decision != "continue" or self.config.uncertainty.exceeded(replan)
        return replan, error

    def _decide(self, replan: Replan) -> tuple[Decision, str | None]:
        """A hook that fails, or says what nobody understands, must not let the robot go on: it stops."""
        try:
            decision: Decision = self._hook(replan)
            error = None if decision in DECISIONS else f"the hook says {decision!r}, not one of {', '.join(DECISIONS)}"
        except Exception as problem:
            error = f"the hook failed: {type(problem).__name__}: {problem}"
        if error is None:
            return decision, None
        logger.error("%s; the robot stops", error)
        return "stop", error

    def _continuation(self) -> NDArray[np.float32] | None:
        """What would be commanded next without the new plan."""
        plan = self.controller.last_plan
        if plan is None or self._last is None:
            return None
        return plan.actions[self._cursor] if self._left and self.decision != "stop" else self._held()

    def _join(self, actions: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.float32]:
        """(Tp, Da): the new plan, starting where the old one would have gone on; see the top of this file."""
        gap = reference.astype(np.float64) - actions[0]
        part = np.abs(gap) / (self.config.blend + 1)
        if self.config.max_step is not None:
            part = np.minimum(part, self.config.max_step * self.controller.scale)
        steps = np.arange(1, len(actions) + 1)[:, None]
        offset = np.sign(gap) * np.maximum(np.abs(gap) - steps * part, 0.0)
        joined: NDArray[np.float32] = (actions + offset).astype(np.float32)
        return joined

    # ------------------------------------------------------------------ actions

    def _next(self) -> tuple[NDArray[np.float32], Source]:
        plan = self.controller.last_plan
        assert plan is not None
        if self.decision == "stop" or self._left == 0:
            return self._held(), "hold"
        target = plan.actions[self._cursor]
        pace = self.config.slow_factor if self.decision == "slow" else 1.0
        whole = self._phase + pace >= 1.0 - 1e-9
        action = target if pace == 1.0 and self._phase == 0.0 else self._part(target, pace)
        self._phase = 0.0 if whole else self._phase + pace
        if whole:
            self._cursor += 1
            self._executed += 1
            self._before = target
            self.controller.advance(1)
        return action.astype(np.float32), "plan"

    def _part(self, target: NDArray[np.float32], pace: float) -> NDArray[np.float32]:
        """The same path at less speed: part of the way to a position, or part of a change."""
        share = min(self._phase + pace, 1.0)
        if self.config.hold == "last":
            before = target if self._before is None else self._before
            slow = before + share * (target - before)
        else:
            slow = (share - self._phase) * target
        keep = list(self.config.keep)
        slow[keep] = target[keep]
        part: NDArray[np.float32] = slow.astype(np.float32)
        return part

    def _held(self) -> NDArray[np.float32]:
        """The safe thing to do without a plan."""
        last = self._last
        assert last is not None
        if self.config.hold == "last":
            return last.copy()
        held = np.zeros_like(last)
        keep = list(self.config.keep)
        held[keep] = last[keep]
        return held
