"""What an executor and a planner say to each other, and what can go wrong between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class PlanError(RuntimeError):
    """There is no plan to execute, in one line."""


class RefusedError(PlanError):
    """The planner understood and said no to this observation. Asking the same again will not help."""


class HoldError(PlanError):
    """The robot was held for `max_held` steps in a row. End the loop and stop the robot."""


@dataclass(frozen=True)
class Step:
    """One control step, as a planner gets it."""

    number: int
    done: int  # planned actions executed before it
    observation: Mapping[str, Any]  # one time step of each sensor
    ages: Mapping[str, float] | None  # seconds since each was measured, where that is known
    wants_plan: bool
    at: float  # the executor's clock


@dataclass(frozen=True)
class Reply:
    """What a planner says of one step: what it saw (`info`), the plan that was asked for, or an error."""

    step: Step
    info: Mapping[str, Any] = field(default_factory=dict)  # absent, spread, modes, ...
    actions: Any = None  # (T, D) in robot units, from `step` on
    is_plan: bool = False  # the answer to a request for a plan, even where it is an error
    error: Exception | None = None
    latency_ms: float | None = None  # from the request, where the planner measures it; the executor notices it later


class Planner(Protocol):
    """Makes plans beside the control loop. Nothing but `poll` with a timeout may block."""

    @property
    def info(self) -> Mapping[str, Any]:
        """action_dim, action (its kind), exec_horizon, pred_horizon; where known fps, keep, needs, action_scale."""
        ...

    def submit(self, step: Step) -> None:
        """Take in one step; start a plan for it if it wants one."""

    def poll(self, timeout: float = 0.0) -> Reply | None:
        """The next reply, in the order of the steps; None: there is none within `timeout` seconds."""

    def trouble(self) -> str:
        """Why nothing comes at the moment, in words; empty: no reason is known."""

    def reset(self, seed: int | None = None) -> None:
        """Start an episode: replies to steps before it never come."""

    def close(self) -> None: ...
