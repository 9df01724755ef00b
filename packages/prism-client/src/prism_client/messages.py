"""Typed messages between executor and planner, validated on arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_client.action_kind import ActionKind

Array = np.ndarray[Any, Any]


class PlanError(RuntimeError):
    """There is no plan to execute, in one line."""


class RefusedError(PlanError):
    """The planner refused this observation. Do not retry it."""


class HoldError(PlanError):
    """The robot was held for `max_held` steps in a row. End the loop and stop the robot."""


@dataclass(frozen=True)
class SensorInfo:
    """A sensor of a policy, and what the training data showed of it (first_look.py)."""

    name: str
    kind: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    history: int = 1  # readings in a time step
    mean: tuple[float, ...] = ()  # of a vector
    std: tuple[float, ...] = ()
    colour: tuple[float, ...] = ()  # the mean colour of a camera's pictures
    seen: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, message: Any) -> SensorInfo:
        message = _map(message, "sensors")
        return cls(
            _text(message, "name"),
            _text(message, "kind"),
            _wholes(message, "shape"),
            _text(message, "dtype", "float32"),
            _whole(message, "history", 1),
            *(_numbers(message, key) for key in ("mean", "std", "colour")),
            seen=_map(message.get("seen") or {}, "seen"),
        )

    def to_wire(self) -> dict[str, Any]:
        """The known fields only."""
        listed = {"mean": list(self.mean), "std": list(self.std), "colour": list(self.colour), "seen": dict(self.seen)}
        about = {"name": self.name, "kind": self.kind, "shape": list(self.shape), "dtype": self.dtype}
        return {**about, "history": self.history, **{key: value for key, value in listed.items() if value}}


@dataclass(frozen=True)
class ActionInfo:
    """What is known about the dimensions of an action."""

    names: tuple[str, ...] = ()  # one a number
    quaternions: tuple[int, ...] = ()  # the first number of each
    robot: str = ""
    kind: ActionKind | None = None  # None: unknown
    units: tuple[str, ...] = ()  # one a number; "": unknown. Of a velocity: a second
    scale: tuple[float, ...] = ()  # one a number: an action of 1 is so many of its unit; (): 1

    @classmethod
    def from_wire(cls, message: Any) -> ActionInfo:
        message = _map(message, "action")
        kind = message.get("kind") or None
        if kind is not None and ActionKind.parse(kind) is None:
            raise PlanError(f"'action.kind' must be one of {ActionKind.words()}, not {_short(kind)}")
        names, turns = _names(message, "names"), _wholes(message, "quaternions")
        measured = _names(message, "units") or (), _numbers(message, "scale")
        return cls(names or (), turns, _text(message, "robot"), ActionKind.parse(kind), *measured)

    def to_wire(self) -> dict[str, Any]:
        """The known fields only."""
        known = {"names": list(self.names), "quaternions": list(self.quaternions), "robot": self.robot}
        known |= {"kind": str(self.kind or ""), "units": list(self.units), "scale": list(self.scale)}
        return {key: value for key, value in known.items() if value}


@dataclass(frozen=True)
class PolicyInfo:
    """What an executor needs to know about a policy. Missing keys are unknown."""

    action_dim: int = 0  # 0: unknown
    action: ActionInfo = ActionInfo()
    pred_horizon: int = 0  # Tp; 0: unknown
    exec_horizon: int = 1  # Ta
    obs_horizon: int = 1  # To
    memory: int = 1  # steps that a plan is made from
    fps: float = 0.0  # of the training data; 0: unknown
    candidates: int = 1  # K
    sensors: tuple[SensorInfo, ...] = ()
    needs: tuple[str, ...] = ()  # sensors that the policy requires
    keep: tuple[int, ...] = ()  # numbers of an action that a hold leaves as they are where the others become zero
    action_scale: tuple[float, ...] = ()  # half ranges in the demonstrations
    action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # lowest and highest
    method: str = ""
    policy: str = ""  # its name
    join: int | None = None  # steps over which a late plan of positions is joined; None: the executor's default
    margin: float | None = None  # share of action_range that a plan may go beyond it; None: the executor's default

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> PolicyInfo:
        """From a server's metadata. PlanError if it is invalid."""
        ends = message.get("action_range")
        if ends is not None and (not isinstance(ends, list | tuple) or len(ends) != 2):
            raise PlanError(f"'action_range' must be two lists of numbers, not {_short(ends)}")
        wanted = {"action_dim": 0, "pred_horizon": 0, "exec_horizon": 1, "obs_horizon": 1, "candidates": 1}
        counts = {key: _whole(message, key, default) for key, default in wanted.items()}
        return cls(
            **counts,
            memory=_whole(message, "memory", counts["obs_horizon"]),
            action=ActionInfo.from_wire(message.get("action") or {}),
            fps=_number(message, "fps"),
            sensors=tuple(SensorInfo.from_wire(sensor) for sensor in _list(message, "sensors")),
            needs=_names(message, "needs") or (),
            keep=_wholes(message, "keep"),
            action_scale=_numbers(message, "action_scale"),
            action_range=None if ends is None else (_numbers({"0": ends[0]}, "0"), _numbers({"1": ends[1]}, "1")),
            method=_text(message, "method"),
            policy=_text(message, "policy"),
            join=None if message.get("join") is None else _whole(message, "join"),
            margin=None if message.get("margin") is None else _number(message, "margin"),
        )

    def to_wire(self) -> dict[str, Any]:
        """Numbers, text and lists of them."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        plain |= {"action": self.action.to_wire(), "sensors": [sensor.to_wire() for sensor in self.sensors]}
        plain["action_range"] = None if self.action_range is None else [list(end) for end in self.action_range]
        return {key: value for key, value in plain.items() if value is not None}

    def differs(self, other: PolicyInfo) -> list[str]:
        """The fields that are not equal."""
        return [key for key, value in vars(self).items() if getattr(other, key) != value]


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
        """From a server's reply; missing keys have their defaults. PlanError if a value is not a number."""
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
    """A planner's reply for one step: health, the requested plan, or an error."""

    step: Step
    absent: tuple[str, ...] | None = None  # sensors that it does not have, or does not believe; None: it does not say
    plan: Plan | None = None  # from `step` on
    is_plan: bool = False  # the answer to a request for a plan, even where it is an error
    error: Exception | None = None
    latency_ms: float | None = None  # from the request, where the planner measures it; the executor notices it later


def absent_of(message: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Sensors that are missing or faulty; None: unknown."""
    return _names(message, "absent")


def _names(message: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"'{key}' must be a list of names, not {_short(value)}")
    return tuple(value)


def _map(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"'{key}' must hold names and values, not {_short(value)}")
    return value


def _list(message: Mapping[str, Any], key: str) -> list[Any] | tuple[Any, ...]:
    value = message.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise PlanError(f"'{key}' must be a list, not {_short(value)}")
    return value


def _text(message: Mapping[str, Any], key: str, default: str = "") -> str:
    value = message.get(key, default)
    if not isinstance(value, str):
        raise PlanError(f"'{key}' must be text, not {_short(value)}")
    return value


def _numbers(message: Mapping[str, Any], key: str) -> tuple[float, ...]:
    return tuple(_number({key: value}, key) for value in _list(message, key))


def _wholes(message: Mapping[str, Any], key: str) -> tuple[int, ...]:
    return tuple(_whole({key: value}, key) for value in _list(message, key))


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
