"""What an executor and a planner say to each other, typed: checked where it arrives, never looked up by a string."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class PlanError(RuntimeError):
    """There is no plan to execute, in one line."""


class RefusedError(PlanError):
    """The planner understood and said no to this observation. Asking the same again will not help."""


class HoldError(PlanError):
    """The robot was held for `max_held` steps in a row. End the loop and stop the robot."""


@dataclass(frozen=True)
class PlanInfo:
    """How a plan was chosen. Spread, modes and switches are defined in docs/reference/metrics.md."""

    step: int = 0  # actions executed before the observation that it was made for
    candidates: int = 1  # K, among which it was chosen
    index: int = 0  # which of them
    spread: float = 0.0  # mean pairwise distance of the candidates, scaled units
    modes: int = 1
    mode_switch: bool = False
    avoidable_switch: bool = False  # a switch although another candidate would have stayed
    overlap_distance: float | None = None  # from the rest of the plan before; None: there was none
    latency_ms: float = 0.0  # window -> candidates -> choice

    @classmethod
    def from_reply(cls, message: Mapping[str, Any]) -> PlanInfo:
        """Of a server's reply; what another server leaves out has its default. PlanError for what is no number."""
        return cls(
            step=_whole(message, "step"),
            candidates=_whole(message, "candidates", 1),
            index=_whole(message, "index"),
            spread=_number(message, "spread"),
            modes=_whole(message, "modes", 1),
            mode_switch=_truth(message, "mode_switch"),
            avoidable_switch=_truth(message, "avoidable_switch"),
            overlap_distance=None if message.get("overlap_distance") is None else _number(message, "overlap_distance"),
            latency_ms=_number(message, "latency_ms"),
        )

    def to_reply(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan with all its alternatives, in robot units."""

    actions: Array  # (Tp, Da) what is executed: the chosen candidate, smoothed if so configured
    info: PlanInfo = PlanInfo()
    candidates: Array = field(
        default_factory=lambda: np.empty((0, 0, 0), np.float32)
    )  # (K, Tp, Da); K = 0: they were not sent
    scores: Array = field(default_factory=lambda: np.empty(0))  # (K,) lower is better
    modes: Array = field(default_factory=lambda: np.empty(0, np.int64))  # (K,) which mode each belongs to
    remainder: Array | None = None  # (R, Da) of the plan before

    @classmethod
    def from_reply(cls, message: Mapping[str, Any]) -> Plan:
        if "actions" not in message:
            raise PlanError("the reply holds no plan: 'actions' is missing")
        candidates = message.get("all_candidates", np.empty((0, 0, 0), np.float32))
        if not isinstance(candidates, np.ndarray) or candidates.ndim != 3:
            raise PlanError("the reply's 'all_candidates' must be numbers (K, T, D)")
        return cls(np.asarray(message["actions"]), PlanInfo.from_reply(message), candidates)


@dataclass(frozen=True)
class Step:
    """One control step, as a planner gets it."""

    number: int
    done: int  # planned actions executed before it
    observation: Mapping[str, Any]  # one time step of each sensor
    ages: Mapping[str, float] | None  # seconds since each was measured, where that is known
    wants_plan: bool
    at: float  # the executor's clock
    sent: tuple[Array, ...] = ()  # commands (D,) that the robot really got since the step before


@dataclass(frozen=True)
class Reply:
    """What a planner says of one step: what it saw, the plan that was asked for, or an error."""

    step: Step
    absent: tuple[str, ...] | None = None  # sensors that it does not have, or does not believe; None: it does not say
    plan: Plan | None = None  # from `step` on
    is_plan: bool = False  # the answer to a request for a plan, even where it is an error
    error: Exception | None = None
    latency_ms: float | None = None  # from the request, where the planner measures it; the executor notices it later


def names_of(message: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """A list of names; None: it is not there."""
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"'{key}' must be a list of names, not {_short(value)}")
    return tuple(value)


def _number(message: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = message.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isnan(value):
        raise PlanError(f"'{key}' must be a number, not {_short(value)}")
    return float(value)


def _whole(message: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = message.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise PlanError(f"'{key}' must be a whole number, not {_short(value)}")
    return int(value)


def _truth(message: Mapping[str, Any], key: str) -> bool:
    value = message.get(key, False)
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"'{key}' must be true or false, not {_short(value)}")
    return bool(value)


def _short(value: object) -> str:
    return repr(value)[:60]
