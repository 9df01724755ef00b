"""The counts of an executor, and hooks that slow or stop the robot."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from prism_client.messages import PlanInfo

Decision = Literal["continue", "slow", "stop"]
Hook = Callable[[PlanInfo], Decision]  # what is said of a plan -> what to do with it
DECISIONS: tuple[Decision, ...] = ("continue", "slow", "stop")  # from harmless to safe
_KEPT = 50_000  # latest values of a statistic: a robot may run for days


@dataclass
class Stats:
    """Counts of the episode so far."""

    steps: int = 0
    plans: int = 0  # taken over
    late: int = 0  # plans that took longer than the budget
    too_late: int = 0  # plans of which no action was left
    errors: int = 0  # requests that failed
    refused: int = 0  # ... because the observation could not be used
    held: int = 0  # steps without a planned action
    held_in_a_row: int = 0
    beyond: int = 0  # plans that left the range of the demonstrations, and were kept within it
    uncertain: int = 0  # plans to which the hook did not say "continue"
    spread: float = 0.0  # of the last plan: how far apart its candidates are
    modes: int = 0  # ... and in how many groups
    decision: Decision = "continue"
    absent: tuple[str, ...] = ()  # sensors that the planner does not have, or does not believe, now
    absent_steps: dict[str, int] = field(default_factory=dict)  # by sensor: how many steps it was absent
    error: str = ""  # of the last request that failed, or why nothing comes
    latency_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT), repr=False)  # of every plan
    plan_age_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT), repr=False)  # of every action
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT), repr=False)  # of every plan: past ones

    def summary(self) -> dict[str, Any]:
        ages, latencies = np.array(self.plan_age_ms or [0.0]), np.array(self.latency_ms or [0.0])
        return {
            "plans": self.plans,
            "plan_misses": self.late,
            "plans_too_late": self.too_late,
            "plan_errors": self.errors - self.refused,
            "holds": self.held,
            "uncertain_plans": self.uncertain,
            "plans_beyond_demonstrations": self.beyond,
            "observations_refused": self.refused,
            "absent_steps": dict(self.absent_steps),
            "plan_latency_p50_ms": float(np.median(latencies)),
            "plan_latency_p99_ms": float(np.quantile(latencies, 0.99)),
            "plan_age_p50_ms": float(np.median(ages)),
            "plan_age_max_ms": float(ages.max()),
            "actions_skipped_mean": float(np.mean(self.skipped)) if self.skipped else 0.0,
        }


def limit_uncertainty(max_spread: float | None = None, max_modes: int | None = None, then: Decision = "slow") -> Hook:
    """A hook: `then` where the candidates of a plan disagree by more than this (spread in half ranges of an action)."""
    if then not in DECISIONS:
        raise ValueError(f"then {then!r} is unknown: use one of {', '.join(DECISIONS)}")
    if (max_spread is not None and not 0 <= max_spread < math.inf) or (max_modes is not None and max_modes < 1):
        raise ValueError(f"max_spread {max_spread} and max_modes {max_modes}: use at least 0, and at least 1")

    def hook(info: PlanInfo) -> Decision:
        spread_out = max_spread is not None and info.spread > max_spread
        exceeded = spread_out or (max_modes is not None and info.modes > max_modes)
        return then if exceeded else "continue"

    return hook
