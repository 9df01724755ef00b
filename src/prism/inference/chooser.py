"""Sec. 4.5, Alg. 2: which of the K candidates becomes the plan, and the state of that choice.

A plan is chosen for the observation that it was made from, however late it arrives:

    advance(rows, sent)         what was executed until that observation: rows of the old plan, commands really sent
    choose(candidates, newest)  against the rest of the old plan and the commands before; smoothed as configured

An executor decides which row of which plan is sent (prism_client/executor.py) and reports what the robot really got.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client.messages import Plan, PlanInfo

from prism.errors import PrismError, check_numbers
from prism.inference.smoothing import ensemble, least_jerk
from prism.inference.window import Reading
from prism.normalize import one_sign, unit_norm
from prism.policy import Policy, PolicySpec
from prism.selection import (
    FloatArray,
    SelectionConfig,
    SelectionState,
    Standstill,
    find_modes,
    is_change,
    overlap,
    reach,
    select,
)

_PAST = 3  # commands that a third difference reaches back to
_SINCE = 10_000  # commands between two plans, at most


@dataclass(frozen=True)
class ControllerConfig:
    exec_horizon: int = 8  # Ta; paper, Sec. 5 (hardware): Tp = 16, Ta = 8
    candidates: int = 16  # K
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    smoothing: int = 0  # steps over which a new plan fades in over the old one's remainder; 0: off, as the paper
    # ACT's temporal ensembling: an action is the weighted mean over all plans that contain it. The i-th plan, oldest
    # first, has weight exp(-ensemble i). Published: 0.01 with exec_horizon 1. None: off.
    ensemble: float | None = None
    warm_start: bool = False  # Falcon: sample near the old plan's remainder
    # Replaces the chosen plan by the nearest one with small third differences (least_jerk). Small corrections, within
    # selection.mode_radius, are smoothed less. Grippers are left out. 0: off, as in the paper.
    jerk_weight: float = 0.0
    # Simulated planning latency, in steps. Until a plan arrives the old one is executed, and the new one starts at
    # this row. 0: the simulator waits. For evaluations only.
    delay: int = 0
    # For the executor. join: steps over which a late plan is joined to the old one; positions only. margin: a plan may
    # leave the demonstrated range of an action by this share of it. None (older runs): `prism run` uses 3 steps and
    # 0.05, an evaluation neither.
    join: int | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        # Beyond 10 in `ensemble`, one plan alone counts.
        counts = {"[1, inf)": "exec_horizon candidates", "[0, inf)": "smoothing jerk_weight delay join margin"}
        check_numbers(self, "controller", {**counts, "[-10, 10]": "ensemble"})
        if self.ensemble is not None and self.smoothing:
            raise PrismError("controller.ensemble and controller.smoothing both blend plans: use one of them")


def check_controller(config: ControllerConfig, spec: PolicySpec) -> None:
    """PrismError if a policy cannot be controlled with these settings. Needs no weights, so it runs first."""
    if config.exec_horizon > spec.pred_horizon:
        raise PrismError(
            f"controller.exec_horizon = {config.exec_horizon} exceeds the policy's pred_horizon = "
            f"{spec.pred_horizon}; use a smaller exec_horizon"
        )
    needed = config.delay + max(config.delay, config.exec_horizon) + config.selection.needs_overlap
    if config.delay and needed > spec.pred_horizon:
        raise PrismError(
            f"controller.delay = {config.delay}: a plan of {spec.pred_horizon} actions is over before the next one is "
            "there; use a smaller delay or exec_horizon"
        )
    selection = config.selection
    if selection.restless and is_change(spec.action.kind) and selection.pose_dims is None and not selection.grippers:
        raise PrismError(
            f"selection.restless = {selection.restless} with actions of kind '{spec.action.kind}' has to know which "
            "entries of an action are changes of pose: set selection.grippers to the others, or selection.pose_dims to "
            "how many come first"
        )
    if selection.needs_overlap and config.exec_horizon >= spec.pred_horizon:
        raise PrismError(
            f"selection.rule = '{selection.rule}' compares with the unexecuted remainder of a plan: "
            f"use exec_horizon < {spec.pred_horizon}, or rule = 'last_action'"
        )
    sizes = {sensor.name: sensor.shape[0] for sensor in spec.sensors if sensor.kind == "vector"}
    moving = selection.motion(spec.action_dim)
    if max((*moving, *selection.grippers), default=0) >= spec.action_dim or not moving:
        raise PrismError(
            f"selection.pose_dims = {selection.pose_dims} and grippers = {selection.grippers} do not fit the "
            f"{spec.action_dim} entries of an action"
        )
    wanted = max(moving) + 1
    if selection.rule == "proxy_score" and sizes.get(selection.pose_sensor, 0) < wanted:
        vectors = ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "none"
        raise PrismError(
            f"selection.rule = 'proxy_score' needs the pose: no vector sensor '{selection.pose_sensor}' of at least "
            f"{wanted} values here (vectors: {vectors}); set selection.pose_sensor and selection.pose_dims"
        )


def action_scale(policy: Policy) -> FloatArray:
    """(Da,) half the range of each action dimension in the demonstrations; 1 if a dimension is constant."""
    half = policy.normalizer.action_scale.abs().double().cpu().numpy()
    return np.where(half > 1e-6, half, 1.0)


class Chooser:
    """The chooser of one robot. `reset` starts an episode."""

    def __init__(self, spec: PolicySpec, config: ControllerConfig, scale: FloatArray) -> None:
        check_controller(config, spec)
        self.spec, self.config, self.scale = spec, config, scale
        self.reset()

    def reset(self) -> None:
        self.plan: Plan | None = None  # the latest
        self.row = 0  # how many of its actions are executed
        self._step = 0  # actions executed in this episode
        self._past: deque[FloatArray] = deque(maxlen=_PAST)  # commands
        self._since: deque[FloatArray] = deque(maxlen=_SINCE)  # commands since the last choice
        self._doubt = 0.0
        self._standstill = Standstill(self.config.selection, self.scale, self.spec.action.kind)
        self._chosen: list[tuple[int, FloatArray]] = []  # ensemble only: first step and actions, oldest first

    @property
    def remainder(self) -> FloatArray | None:
        """(R, Da), the unexecuted rest of the plan."""
        if self.plan is None or self.row >= len(self.plan.actions):
            return None
        return self.plan.actions[self.row :].astype(np.float64)

    def advance(self, rows: int, sent: Sequence[NDArray[Any]] | NDArray[Any] | None = None) -> None:
        """Count the next `rows` actions of the plan as executed. `sent`: the commands that the robot really got
        meanwhile, also after a join, a cut, a limit or a takeover; None: it got these actions, past the plan's end the
        last one."""
        rows = max(rows, 0) if self.plan is not None else 0
        if sent is None:
            planned = np.empty((0, 0)) if self.plan is None else self.plan.actions[self.row : self.row + rows]
            self._since.extend(planned.astype(np.float64))
            held = [] if self.plan is None else [self.plan.actions[-1].astype(np.float64)] * (rows - len(planned))
            self._past.extend([*planned.astype(np.float64), *held[:_PAST]])
        else:
            commands = [np.asarray(one, dtype=np.float64) for one in sent]
            self._since.extend(commands)
            self._past.extend(commands)
        if self.plan is not None:
            self.row = min(self.row + rows, len(self.plan.actions))
        self._step += rows

    def choose(
        self,
        candidates: NDArray[np.float32],
        newest: Reading,
        latency_ms: float,
        remainder: FloatArray | None = None,
    ) -> Plan:
        """The plan among the candidates (K, Tp, Da), and the state of the next choice.

        `newest`: the readings that they were made from. `latency_ms`: time to draw them; the choice is added.
        `remainder`: what is left of the plan before, where another program executes it; default: as counted here.
        """
        start = time.perf_counter()
        remainder = self.remainder if remainder is None else remainder
        plans = self._rotations(candidates.astype(np.float64), remainder)
        if not np.isfinite(plans).all():
            raise PrismError(
                f"step {self._step}: the policy returned an action that is not finite; retrain or reload it"
            )
        if self.plan is not None and self.config.selection.restless:
            self._standstill.executed(np.array(self._since).reshape(-1, plans.shape[-1]))
        self._since.clear()
        streams, present = newest
        pose_name = self.config.selection.pose_sensor
        pose = streams[pose_name] if present.get(pose_name, False) else None
        state = SelectionState(
            remainder=remainder,
            last_action=self._past[-1] if self._past else None,
            pose=None if pose is None else pose.astype(np.float64).ravel(),
            doubt=self._doubt,
            rested=self._standstill.replans,
        )
        radius = self.config.selection.mode_radius
        modes = find_modes(plans, self.scale, radius)
        selection = select(plans, self.scale, state, self.config.selection, modes, self.spec.action.kind)
        self._doubt = selection.doubt
        latency = latency_ms + (time.perf_counter() - start) * 1e3

        stay = None if remainder is None else overlap(plans, remainder, self.scale)
        moved = None if stay is None else float(stay[selection.index])
        switched = moved is not None and moved > radius
        chosen = self._blended(plans[selection.index].copy(), remainder, switched)
        actions = self._rotations(chosen, remainder).astype(np.float32)
        if not np.isfinite(actions).all():
            raise PrismError(
                f"step {self._step}: the blended plan is not finite; check controller.ensemble and smoothing"
            )
        info = PlanInfo(
            step=self._step,
            candidates=len(candidates),
            index=selection.index,
            spread=float(modes.distance.sum() / max(1, len(plans) * (len(plans) - 1))),
            modes=int(modes.labels.max()) + 1,
            mode_switch=switched,
            avoidable_switch=switched and stay is not None and bool(stay.min() <= radius),
            overlap_distance=moved,
            latency_ms=latency,
        )
        rest = None if remainder is None else remainder.astype(np.float32)
        self.plan, self.row = Plan(actions, info, candidates, selection.scores, modes.labels, rest), 0
        return self.plan

    def _blended(self, chosen: FloatArray, remainder: FloatArray | None, switched: bool) -> FloatArray:
        """The chosen plan with smoothing, ensemble and least jerk, as configured; it may be changed in place."""
        if self.config.smoothing and remainder is not None and not switched:
            # Only within a mode: halfway between two modes is neither.
            steps = min(self.config.smoothing, len(remainder), len(chosen))
            fade = (np.arange(1, steps + 1) / (steps + 1))[:, None]
            chosen[:steps] = fade * chosen[:steps] + (1.0 - fade) * remainder[:steps]
        if self.config.ensemble is not None:
            self._chosen = [(at, plan) for at, plan in self._chosen if at + len(plan) > self._step]
            self._chosen.append((self._step, chosen))
            chosen = ensemble(self._chosen, self.config.ensemble)
        if self.config.jerk_weight:
            moving = [i for i in range(chosen.shape[1]) if i not in self.config.selection.grippers]
            past = np.array([action[moving] for action in self._past]).reshape(-1, len(moving))
            far = float(reach(chosen, self.scale, self.config.selection, self.spec.action.kind))
            weight = self.config.jerk_weight * min(1.0, far / self.config.selection.mode_radius) ** 2
            chosen[:, moving] = least_jerk(chosen[:, moving], past, weight)
        return chosen

    def _rotations(self, plans: FloatArray, remainder: FloatArray | None) -> FloatArray:
        """Plans (..., Tp, Da) with unit quaternions whose sign continues the executed ones (q and -q are equal)."""
        quaternions = self.spec.action.quaternions
        if not quaternions:
            return plans
        unit = unit_norm(torch.from_numpy(plans), quaternions)
        before = (self._past[-1] if self._past else None) if remainder is None else remainder[0]
        if before is not None:
            references = np.stack([before[first : first + 4] for first in quaternions])
            unit = one_sign(unit, quaternions, torch.from_numpy(references))
        turned: FloatArray = unit.numpy()
        return turned
