"""Sec. 4.5, Alg. 2: receding-horizon control. All state of a rollout lives here, none in the policy.

observe o_t -> window (To) -> K candidates in one pass -> select one -> execute its first Ta actions -> repeat
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client.first_look import look

from prism.data.history import memory, stacked
from prism.errors import PrismError, check_numbers
from prism.health import SensorMonitor, trained_on
from prism.normalize import one_sign, unit_norm
from prism.policy import Policy, PolicySpec
from prism.rows import Random
from prism.selection import (
    FloatArray,
    IntArray,
    SelectionConfig,
    SelectionState,
    Standstill,
    find_modes,
    is_change,
    overlap,
    reach,
    select,
)
from prism.types import Observation

logger = logging.getLogger("prism.controller")

_PAST = 3  # executed actions that a third difference reaches back to
Reading = tuple[dict[str, NDArray[np.generic]], dict[str, bool]]  # of every sensor, and which can be believed


@dataclass(frozen=True)
class ControllerConfig:
    exec_horizon: int = 8  # Ta; paper, Sec. 5 (hardware): Tp = 16, Ta = 8
    candidates: int = 16  # K
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    smoothing: int = 0  # steps over which a new plan fades in over the old one's remainder; 0: off, as the paper
    # ACT's temporal ensembling: an action is the mean of what all plans since say of it, the i-th of them, oldest
    # first, with weight exp(-ensemble i). Published: 0.01 with exec_horizon 1. None: off.
    ensemble: float | None = None
    warm_start: bool = False  # Falcon: sample near the old plan's remainder
    # The chosen plan gives way to the nearest one of small third differences (least_jerk); less, by the square of its
    # reach, where it stays within selection.mode_radius: a smoothed nudge is none. 0: off, as the paper. No grippers.
    jerk_weight: float = 0.0
    # Steps that a plan takes to be made: until then the old one goes on, and the new one begins that many steps in.
    # 0: the world waits. For evaluations; on a robot the clock decides.
    delay: int = 0

    def __post_init__(self) -> None:
        # Beyond 10 in `ensemble`, one plan alone counts.
        counts = {"[1, inf)": "exec_horizon candidates", "[0, inf)": "smoothing jerk_weight delay"}
        check_numbers(self, "controller", {**counts, "[-10, 10]": "ensemble"})
        if self.ensemble is not None and self.smoothing:
            raise PrismError("controller.ensemble and controller.smoothing both blend plans: use one of them")


@dataclass(frozen=True)
class Replan:
    """What happened at one replan. Definitions of spread, modes and switches: docs/reference/metrics.md."""

    step: int
    latency_ms: float  # window -> tensors -> candidates -> choice
    index: int
    spread: float  # mean pairwise distance of the candidates, scaled units
    modes: int
    overlap_distance: float | None  # chosen plan against the remainder of the previous; None at the first plan
    mode_switch: bool
    avoidable_switch: bool  # a switch although another candidate would have stayed


@dataclass(frozen=True)
class Plan:
    """The latest plan with all its alternatives, for pictures. Robot units."""

    step: int
    candidates: NDArray[np.float32]  # (K, Tp, Da)
    scores: FloatArray  # (K,) lower is better
    modes: IntArray  # (K,) which mode each belongs to
    index: int
    actions: NDArray[np.float32]  # (Tp, Da) what is executed: the chosen candidate, smoothed if so configured
    remainder: NDArray[np.float32] | None  # (R, Da) of the plan before


@runtime_checkable
class WarmStart(Protocol):
    """A policy that can begin where the last plan left off; the old plan itself is kept here, not there."""

    def sample_near(
        self, observation: Observation, candidates: int, rng: Random, previous: torch.Tensor
    ) -> torch.Tensor:
        """Like `sample`, near `previous` (B, R, Da), the unexecuted remainder of the old plan in robot units."""
        ...


def check_controller(config: ControllerConfig, spec: PolicySpec) -> None:
    """PrismError where a policy cannot be controlled so; without its weights, so that it is known before any work."""
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


class Controller:
    """Turns a policy into actions, one observation at a time.

    A sensor that is missing from the observation, NaN, frozen, out of range or late is marked absent for that step
    (prism.health says which): the policy goes on with the others. A sensor that the policy does not know is an error.
    `reset(seed)` starts an episode; the same seed and observations give the same actions. A new controller has been
    reset with its `seed`: without a call of reset, the first act begins its first episode.

    `look`: `act` compares the first observation of an episode with the training data (units, colours, cameras) and
    refuses what would move a robot wrongly. Not for a simulator that is the training data's own.
    """

    def __init__(
        self,
        policy: Policy,
        config: ControllerConfig,
        seed: int = 0,
        scale: NDArray[np.floating] | None = None,
        look: bool = True,
    ) -> None:
        spec = policy.spec
        check_controller(config, spec)
        if config.warm_start and not isinstance(policy, WarmStart):
            raise PrismError(f"controller.warm_start: a policy of method '{spec.method}' cannot start from an old plan")
        self.policy = policy.eval()
        self.config = config
        self.scale: FloatArray = action_scale(policy) if scale is None else np.asarray(scale, dtype=np.float64)
        parameter = next(policy.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self.rng = Random()
        self.health = SensorMonitor(spec.sensors, spec.fps)
        self.replans: list[Replan] = []
        self.last_plan: Plan | None = None
        self._look = look
        self.reset(seed)

    def reset(self, seed: int = 0) -> None:
        self.rng.manual_seed(seed)
        self.health.reset()
        horizon = self.policy.spec.obs_horizon
        self._window: deque[dict[str, NDArray[np.generic]]] = deque(maxlen=horizon)
        self._present: deque[dict[str, bool]] = deque(maxlen=horizon)
        self._readings: deque[Reading] = deque(maxlen=memory(self.policy.spec.sensors, 1))
        self._last_action: FloatArray | None = None
        self._executed: deque[FloatArray] = deque(maxlen=_PAST)
        self._doubt = 0.0
        self._standstill = Standstill(self.config.selection, self.scale, self.policy.spec.action.kind)
        self._step = 0
        self._next = 0  # position in the current plan
        self._late: tuple[int, NDArray[np.float32], float] | None = None  # a plan in the making: when, what, ms
        self._chosen: list[tuple[int, FloatArray]] = []  # ensemble only: first step and actions, oldest first
        self.replans = []
        self.last_plan = None

    def act(
        self, observation: Mapping[str, NDArray[np.generic] | str], ages: Mapping[str, float] | None = None
    ) -> NDArray[np.float32]:
        """The action (Da,) for this observation: observe, sample and adopt when a plan is due, next_action.

        The steps are public for those who sample elsewhere: a server in batches, a runtime in another thread.
        """
        if self._look and self._step == 0 and self.last_plan is None:
            first_look(self.policy, observation)
        self.observe(observation, ages)
        if self._late is not None and self._step >= self._late[0]:
            self.adopt(*self._late[1:])
            self._late = None
        wait = 0 if self.last_plan is None else self.config.delay
        if self.last_plan is None or (self._late is None and self._next >= self.config.exec_horizon - wait):
            start = time.perf_counter()
            with torch.inference_mode():
                sample = self._sample()
            candidates = sample[0].float().cpu().numpy()[:, wait:]  # (K, Tp, Da)
            latency = (time.perf_counter() - start) * 1e3
            if wait:
                self._late = self._step + wait, candidates, latency
            else:
                self.adopt(candidates, latency)
        return self.next_action()

    def _sample(self) -> torch.Tensor:
        remainder = self._remainder()
        if self.config.warm_start and remainder is not None and isinstance(self.policy, WarmStart):
            previous = torch.from_numpy(remainder[None]).float().to(self._device)
            return self.policy.sample_near(self.observation(), self.config.candidates, self.rng, previous)
        return self.policy.sample(self.observation(), self.config.candidates, self.rng)

    @property
    def needs_plan(self) -> bool:
        """Whether the next action takes a new plan: there is none, or exec_horizon of its actions are executed."""
        return self.last_plan is None or self._next >= self.config.exec_horizon

    @property
    def executed(self) -> int:
        """How many actions of the plan count as executed."""
        return self._next

    def next_action(self) -> NDArray[np.float32]:
        """The plan's next action (Da,), which from now on counts as executed."""
        self.advance(1)
        assert self.last_plan is not None
        action: NDArray[np.float32] = self.last_plan.actions[self._next - 1].copy()
        return action

    def advance(self, steps: int) -> None:
        """Count the next `steps` actions of the plan as executed; past its end the last one counts as held."""
        if steps < 1 or self.last_plan is None:
            return
        end = len(self.last_plan.actions)
        for step in range(max(self._next, self._next + steps - _PAST), self._next + steps):
            self._executed.append(self.last_plan.actions[min(step, end - 1)].astype(np.float64))
        self._next = min(self._next + steps, end)
        self._step += steps
        self._last_action = self._executed[-1]

    def observe(
        self,
        observation: Mapping[str, NDArray[np.generic] | str],
        ages: Mapping[str, float] | None = None,
        missed: int = 0,
    ) -> list[Reading]:
        """Slide the window by one time step of each sensor, in sensor units. Returns the time steps that it gained; one
        of a sensor with a history holds its latest readings (prism.data.history).

        `ages`: how many seconds ago each reading was taken, of the sensors for which that is known. `missed`: time
        steps since the observation before that nobody sent. A window is of consecutive steps, and a policy reads
        velocities off it, so they are filled in: vectors by interpolation, everything else by what is nearest in time.
        """
        known = [sensor.name for sensor in self.policy.spec.sensors]
        if unknown := [name for name in observation if name not in known]:
            raise PrismError(
                f"step {self._step}: the policy knows no sensor '{unknown[0]}'; it knows {', '.join(known)}. Leave out "
                "what it does not know, and what is missing: a sensor that is left out counts as absent"
            )
        streams: dict[str, NDArray[np.generic]] = {}
        present: dict[str, bool] = {}
        for sensor in self.policy.spec.sensors:
            streams[sensor.name], present[sensor.name] = self.health.read(
                sensor, observation.get(sensor.name), None if ages is None else ages.get(sensor.name)
            )
        self.health.step()
        if not any(present.values()):
            raise PrismError(
                f"step {self._step}: none of the policy's sensors ({', '.join(present)}) can be used: the observation "
                f"has {', '.join(observation) or 'nothing'}; one has to be there and finite"
            )
        horizon, length = self._window.maxlen or 1, self._readings.maxlen or 1
        new: list[Reading] = [(streams, present)]
        if self._readings and missed > 0:
            before, there = self._readings[-1]
            steps = range(max(1, missed + 3 - horizon - length), missed + 1)
            new = [self._between(before, there, streams, present, step / (missed + 1)) for step in steps] + new
        self._readings.extend(new * (0 if self._readings else length - 1))  # edge padding: the first one fills it
        gained = []
        for reading in new:
            self._readings.append(reading)
            gained.append(self._stacked())
        for own, there_now in gained * (1 if self._window else horizon):
            self._window.append(own)
            self._present.append(there_now)
        return gained

    def _stacked(self) -> Reading:
        """The time step of the newest readings."""
        newest, believed = self._readings[-1]
        streams, present = dict(newest), dict(believed)
        for sensor in self.policy.spec.sensors:
            if sensor.steps > 1:
                name, past = sensor.name, list(self._readings)[-sensor.steps :]
                there = np.array([known[name] for _, known in past])
                streams[name], any_there = stacked(np.stack([own[name] for own, _ in past]), there)
                present[name] = bool(any_there)
        return streams, present

    def _between(
        self,
        before: dict[str, NDArray[np.generic]],
        there: dict[str, bool],
        after: dict[str, NDArray[np.generic]],
        present: dict[str, bool],
        at: float,
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, bool]]:
        """A time step between two observations, `at` in (0, 1)."""
        streams, known = {}, {}
        for sensor in self.policy.spec.sensors:
            name = sensor.name
            late = present[name] and (at >= 0.5 or not there[name])
            streams[name], known[name] = (after[name], True) if late else (before[name], there[name])
            if sensor.kind == "vector" and there[name] and present[name]:
                way = after[name].astype(np.float64) - before[name].astype(np.float64)
                streams[name] = (before[name].astype(np.float64) + at * way).astype(np.float32)
        return streams, known

    def adopt(self, candidates: NDArray[np.float32], latency_ms: float) -> None:
        """Choose among the candidates (K, Tp, Da), drawn for the present window: `last_plan` starts now.

        `latency_ms`: what drawing them took; the time of the choice is added to it.
        """
        start = time.perf_counter()
        remainder = self._remainder()
        plans = self._rotations(candidates.astype(np.float64), remainder)
        if not np.isfinite(plans).all():
            raise PrismError(
                f"step {self._step}: the policy returned an action that is not finite; retrain or reload it"
            )
        if self.last_plan is not None:
            self._standstill.executed(self.last_plan.actions[: self._next].astype(np.float64))
        pose_name = self.config.selection.pose_sensor
        newest, there = self._readings[-1]
        pose = newest[pose_name] if there.get(pose_name, False) else None
        state = SelectionState(
            remainder=remainder,
            last_action=self._last_action,
            pose=None if pose is None else pose.astype(np.float64).ravel(),
            doubt=self._doubt,
            rested=self._standstill.replans,
        )
        radius = self.config.selection.mode_radius
        modes = find_modes(plans, self.scale, radius)
        selection = select(plans, self.scale, state, self.config.selection, modes, self.policy.spec.action.kind)
        self._doubt = selection.doubt
        latency = latency_ms + (time.perf_counter() - start) * 1e3

        stay = None if remainder is None else overlap(plans, remainder, self.scale)
        moved = None if stay is None else float(stay[selection.index])
        switched = moved is not None and moved > radius
        self.replans.append(
            Replan(
                step=self._step,
                latency_ms=latency,
                index=selection.index,
                spread=float(modes.distance.sum() / max(1, len(plans) * (len(plans) - 1))),
                modes=int(modes.labels.max()) + 1,
                overlap_distance=moved,
                mode_switch=switched,
                avoidable_switch=switched and stay is not None and bool(stay.min() <= radius),
            )
        )
        chosen = self._blended(plans[selection.index].copy(), remainder, switched)
        actions = self._rotations(chosen, remainder).astype(np.float32)
        if not np.isfinite(actions).all():
            raise PrismError(
                f"step {self._step}: the blended plan is not finite; check controller.ensemble and smoothing"
            )
        self.last_plan = Plan(
            step=self._step,
            candidates=candidates,
            scores=selection.scores,
            modes=modes.labels,
            index=selection.index,
            actions=actions,
            remainder=None if remainder is None else remainder.astype(np.float32),
        )
        self._next = 0

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
            past = np.array([action[moving] for action in self._executed]).reshape(-1, len(moving))
            far = float(reach(chosen, self.scale, self.config.selection, self.policy.spec.action.kind))
            weight = self.config.jerk_weight * min(1.0, far / self.config.selection.mode_radius) ** 2
            chosen[:, moving] = least_jerk(chosen[:, moving], past, weight)
        return chosen

    def _remainder(self) -> FloatArray | None:
        if self.last_plan is None or self._next >= len(self.last_plan.actions):
            return None
        return self.last_plan.actions[self._next :].astype(np.float64)

    def _rotations(self, plans: FloatArray, remainder: FloatArray | None) -> FloatArray:
        """Plans (..., Tp, Da) whose quaternions have unit norm and go on from what is executed: q and -q are one."""
        quaternions = self.policy.spec.action.quaternions
        if not quaternions:
            return plans
        unit = unit_norm(torch.from_numpy(plans), quaternions)
        before = self._last_action if remainder is None else remainder[0]
        if before is not None:
            references = np.stack([before[first : first + 4] for first in quaternions])
            unit = one_sign(unit, quaternions, torch.from_numpy(references))
        turned: FloatArray = unit.numpy()
        return turned

    def observation(self) -> Observation:
        """The window as a batch of one, on the policy's device."""
        return observations([self])


def first_look(policy: Policy, observation: Mapping[str, object]) -> None:
    """PrismError where a first observation cannot be what the policy was trained on; doubts are logged."""
    found = look({"sensors": [trained_on(sensor, policy.normalizer) for sensor in policy.spec.sensors]}, observation)
    absent = [sensor.name for sensor in policy.spec.sensors if observation.get(sensor.name) is None]
    lacking = [f"sensor '{name}' is not in the first observation: the policy goes on without it" for name in absent]
    for doubt in (*lacking, *found.doubts):
        logger.warning("%s", doubt)
    if found.wrong:
        raise PrismError(found.wrong)


def observations(controllers: Sequence[Controller]) -> Observation:
    """The windows of several controllers of one policy as one batch, on its device; all have observed."""
    windows = [controller._window for controller in controllers]
    known = [controller._present for controller in controllers]
    streams, present = {}, {}
    for sensor in controllers[0].policy.spec.sensors:
        steps = np.stack([step[sensor.name] for window in windows for step in window])  # (B * To, ...)
        streams[sensor.name] = torch.from_numpy(steps.reshape(len(windows), -1, *steps.shape[1:]))
        present[sensor.name] = torch.tensor([[step[sensor.name] for step in there] for there in known])
    return Observation(streams, present).to(controllers[0]._device)


def ensemble(plans: Sequence[tuple[int, FloatArray]], decay: float) -> FloatArray:
    """The newest of plans (first step, (Tp, Da)), oldest first: each action is the mean over the plans that have it,

    with weights exp(-decay i), i = 0 for the oldest of them (Zhao et al. 2023, Sec. IV.B).
    """
    start, newest = plans[-1]
    blended = np.empty_like(newest)
    for offset in range(len(newest)):
        step = start + offset
        said = np.stack([plan[step - at] for at, plan in plans if step < at + len(plan)])
        exponent = -decay * np.arange(len(said))
        weight = np.exp(exponent - exponent.max())  # of the heaviest: 1, however large the exponents
        blended[offset] = weight @ said / weight.sum()
    return blended


def least_jerk(plan: FloatArray, past: FloatArray, weight: float) -> FloatArray:
    """argmin_u |u - plan|^2 + weight |third differences of (past, u)|^2, plan (Tp, Da), past (at most 3, Da).

    Looks ahead over the whole plan, so it delays nothing; what was executed is fixed, so plans join smoothly.
    """
    third = np.diff(np.eye(len(past) + len(plan)), n=3, axis=0)
    old, new = third[:, : len(past)], third[:, len(past) :]
    system = np.eye(len(plan)) + weight * new.T @ new
    return np.asarray(np.linalg.solve(system, plan - weight * new.T @ old @ past), dtype=np.float64)


def action_scale(policy: Policy) -> FloatArray:
    """(Da,) half the range of each action dimension in the demonstrations; 1 where a dimension is constant."""
    half = policy.normalizer.action_scale.abs().double().cpu().numpy()
    return np.where(half > 1e-6, half, 1.0)
