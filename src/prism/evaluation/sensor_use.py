"""Is the sensor used? What each sensor changes in the plans, on held-out windows and without a simulator.

    with      the window as it was recorded
    absent    the sensor is missing (its learned "absent" vector)
    swapped   its readings are those of a random window of another episode

All three are planned with the same latents, so what changes is due to the sensor. docs/reference/metrics.md has the
equations, tests/reference/sensor_use.py a slow version of them.

Every error and every change is a share of the mean action's error: 1 is as wrong as a constant, and as different as
actions usually are.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prism.data.history import feels_events
from prism.data.windows import Windows
from prism.encoders.vision import Shift
from prism.errors import PrismError
from prism.inference.about import trained_without
from prism.io import files
from prism.io.jsonconfig import from_json, to_json
from prism.methods.base import ContextPolicy
from prism.policy import Policy
from prism.rows import Random, derive_seed
from prism.training.checkpoint import SENSOR_USE
from prism.types import Batch, Observation

F64 = NDArray[np.float64]
IntArray = NDArray[np.int64]
Verdict = Literal["used", "not used", "unclear", "constant"]
Progress = Callable[[int, int], None]

CANDIDATES = 4  # plans of each window; the error is their mean
WINDOWS = 256  # at most
SECONDS = 8.0  # after which no further windows are begun
CHANGES = 0.01  # of the plan: less is no use
TOLERATED = 0.05  # rise of the error without a sensor that a robot may lose
NEVER_ABSENT = "never absent in training (--set policy.encoder.dropout=0.05 trains for it)"
# 97.5 % points of Student's t, by degrees of freedom from 1; 1.96 + 2.4 / df beyond.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12)
_NO_INTERVAL = 10.0  # a share that no error reaches: one stretch alone has no interval
_FIRST, _ROUND = 4, 32  # windows planned together, at first and at most
_CAMERAS = ("rgb", "depth")


@dataclass(frozen=True)
class Rise:
    """How much larger the error is than with every sensor: mean, and its 95 % interval over stretches."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class SensorUse:
    """One sensor. Errors, rises and changes are shares of the mean action's error."""

    name: str
    kind: str
    verdict: Verdict
    change: float  # of the plan, swapped
    first_change: float  # of its first action
    swapped: float  # error
    swapped_rise: Rise
    absent_change: float
    absent: float  # error
    absent_rise: Rise
    trained_without: bool
    tolerated: bool  # measured: the plans are as good without it
    advice: str = ""

    @property
    def can_be_lost(self) -> bool:
        return self.trained_without and self.tolerated

    @property
    def sentence(self) -> str:
        change, error = percent(self.change), f"error {percent(self.swapped)} with another episode's readings"
        if self.verdict == "used":
            return f"{self.name} is used: it changes the plan by {change}, {error}"
        if self.verdict == "not used":
            in_vain = f" and does not lower the error ({error})" * (self.change >= CHANGES)
            return f"{self.name} is not used: it changes the plan by {change}{in_vain}"
        if self.verdict == "unclear":
            return f"{self.name}: too little held-out data to tell; it changes the plan by {change}, {error}"
        return f"{self.name}: unknown, it reads the same in all held-out episodes"

    @property
    def without(self) -> str:
        """The effect of its absence, in words."""
        if not self.trained_without:
            return NEVER_ABSENT
        return f"error {percent(self.absent)} without it"


@dataclass(frozen=True)
class SensorReport:
    """The measurement and its amount of data."""

    sensors: tuple[SensorUse, ...]
    windows: int
    episodes: int
    stretches: int
    error: float  # of a random candidate; a share of the mean action's, as all below
    mean_action: float  # error of the mean action, in half ranges of the demonstrations' actions
    another_draw: float  # how much a plan changes with other random numbers alone
    without_cameras: float | None  # error; None: there are no cameras, or nothing else
    seconds: float

    @property
    def required(self) -> tuple[SensorUse, ...]:
        return tuple(sensor for sensor in self.sensors if not sensor.can_be_lost)

    @property
    def summary(self) -> str:
        unclear = any(sensor.verdict == "unclear" for sensor in self.sensors)
        few = "; too few to tell of every sensor, hold out more (--set train.val_fraction=0.2)" * unclear
        beyond = "" if self.error < 0.9 else ", hardly better than a constant: train longer, or look at the data"
        return (
            f"error {percent(self.error)} of the mean action's on {_count(self.windows, 'window')} of "
            f"{_count(self.episodes, 'held-out episode')}{beyond}{few}"
        )

    def lines(self) -> list[str]:
        """The output of `prism train`: one line per sensor, then the required sensors."""
        reasons: dict[str, list[str]] = {}
        for sensor in self.sensors:
            reasons.setdefault(
                f"{'tolerates losing' if sensor.can_be_lost else 'requires'} {{}}: {sensor.without}", []
            ).append(sensor.name)
        last = [sentence.format(", ".join(names)) for sentence, names in sorted(reasons.items())]
        shown = [f"  {s.sentence}" + f"; {s.advice}" * bool(s.advice) for s in self.sensors]
        return [f"sensors: {self.summary}", *shown, *last]


def measure_sensors(
    policy: Policy,
    held_out: Windows,
    others: Windows,
    most: int = WINDOWS,
    seconds: float = SECONDS,
    progress: Progress | None = None,
    seed: int = 0,
) -> SensorReport:
    """Measure every sensor of `policy` on windows of `held_out`; swapped readings come from other episodes of `others`.

    At most `most` windows, spread evenly. A round of them is not begun if it would probably end after `seconds`.
    `progress(done, of)` is called after each round.
    """
    started = time.monotonic()
    chosen = np.unique(np.linspace(0, len(held_out) - 1, min(most, len(held_out))).round().astype(np.int64))
    rng = np.random.default_rng(seed)
    order = rng.permutation(chosen)  # a round sees all of it, so that an early end does
    donors = _donors(held_out.episode_of(order), others, rng)
    table, done, was_training = _Table(policy), 0, policy.training
    policy.eval()
    try:
        for number, rows in enumerate(_rounds(len(order))):
            with _encoded_once(policy):
                batch, other = held_out.batch(order[rows]), others.batch(donors[rows])
                table.add(batch, other.observation, derive_seed(seed, 0, number))
            done = rows.stop
            if progress is not None:
                progress(done, len(order))
            if (time.monotonic() - started) * (done + _ROUND) / done > seconds:
                break
    finally:
        policy.train(was_training)
    order = order[:done]
    stretches = stretches_of(order, held_out.episode_of(order), held_out.pred_horizon)
    episodes = len(np.unique(held_out.episode_of(order)))
    return table.report(stretches, episodes, time.monotonic() - started)


def _rounds(count: int) -> Iterator[slice]:
    """Windows that are planned together: few at first, since a large network may take long for one."""
    start, size = 0, _FIRST
    while start < count:
        stop = min(start + size, count)
        yield slice(start, stop)
        start, size = stop, min(2 * size, _ROUND)


@contextmanager
def _encoded_once(policy: Policy) -> Iterator[None]:
    """Within a round every sensor is seen in all conditions but its own as it was recorded: it is encoded once as
    recorded and once swapped. For methods that have this package's encoder; others encode each time."""
    encoders: list[Any] = list(policy.encoder.encoders) if isinstance(policy, ContextPolicy) else []
    for encoder in encoders:
        encoder.encode = _remembering(encoder.encode)
    try:
        yield
    finally:
        for encoder in encoders:
            del encoder.encode


def _remembering(encode: Callable[[Tensor, Shift], Tensor]) -> Callable[[Tensor, Shift], Tensor]:
    known: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def encoded(stream: Tensor, shift: Shift) -> Tensor:
        key = (stream.data_ptr(), stream.shape, stream.stride())
        if key not in known:
            known[key] = stream, encode(stream, shift)  # with the stream: its memory must not become another's
        return known[key][1]

    return encoded


def stretches_of(windows: IntArray, episodes: IntArray, horizon: int) -> IntArray:
    """Windows of one episode that begin within the same `horizon` steps have actions in common: one number for them."""
    keys = np.stack([episodes, windows // horizon], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1]).reshape(-1).astype(np.int64)


def _donors(episodes: IntArray, others: Windows, rng: np.random.Generator) -> IntArray:
    """For every window a random window of another episode, or of its own if there is no other."""
    found = rng.integers(len(others), size=len(episodes))
    for _ in range(100):
        same = others.episode_of(found) == episodes
        if not same.any():
            break
        found[same] = rng.integers(len(others), size=int(same.sum()))
    return found


class _Table:
    """Errors and changes of every window (N,) by condition: "with", "absent SENSOR", "swapped SENSOR", "no cameras"."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._names = policy, [spec.name for spec in policy.spec.sensors]
        normalizer = policy.normalizer
        self._moves = (normalizer.action_moves > 0).cpu().numpy()
        self._scale = normalizer.action_scale.abs().double().cpu().numpy()
        self._device = normalizer.action_scale.device
        cameras = {spec.name for spec in policy.spec.sensors if spec.kind in _CAMERAS}
        self._cameras = cameras if 0 < len(cameras) < len(self._names) else set()
        self._errors: dict[str, list[F64]] = {}
        self._changes: dict[str, list[F64]] = {}
        self._first: dict[str, list[F64]] = {}
        self._draws: list[F64] = []
        self._differs = dict.fromkeys(self._names, 0)
        self._actions: list[F64] = []
        self._valid: list[NDArray[np.bool_]] = []

    def add(self, batch: Batch, other: Observation, seed: int) -> None:
        truth, valid = self._scaled(batch.actions), batch.action_valid.numpy()
        plans = self._plans(batch.observation, seed)
        self._actions.append(truth)
        self._valid.append(valid)
        self._draws.append(draw_change(plans, valid))
        self._note("with", plans, plans, truth, valid)
        for name, seen in self._conditions(batch.observation, other).items():
            self._note(name, self._plans(seen, seed), plans, truth, valid)
        for name in self._names:
            self._differs[name] += int(_differ(batch.observation, other, name).sum())

    def _conditions(self, seen: Observation, other: Observation) -> dict[str, Observation]:
        made = {}
        for name in self._names:
            made[f"absent {name}"] = _without(seen, {name})
            streams = {**seen.streams, name: other.streams[name]}
            made[f"swapped {name}"] = Observation(streams, {**seen.present, name: other.present[name]})
        if self._cameras:
            made["no cameras"] = _without(seen, self._cameras)
        return made

    def _plans(self, seen: Observation, seed: int) -> F64:
        """(B, K, Tp, Da') in scaled units, of the dimensions that move; equal seeds draw equal latents."""
        plans = self._policy.sample(seen.to(self._device), CANDIDATES, Random(seed))
        if not bool(plans.isfinite().all()):
            raise PrismError("the policy's plans on held-out windows are not finite: look at the data, and train again")
        return self._scaled(plans.cpu())

    def _scaled(self, actions: Tensor) -> F64:
        scaled: F64 = (actions.double().numpy() / self._scale)[..., self._moves]
        return scaled

    def _note(self, name: str, plans: F64, usual: F64, truth: F64, valid: NDArray[np.bool_]) -> None:
        self._errors.setdefault(name, []).append(apart(plans, truth[:, None], valid))
        self._changes.setdefault(name, []).append(apart(plans, usual, valid))
        self._first.setdefault(name, []).append(apart(plans[:, :, :1], usual[:, :, :1], valid[:, :1]))

    def report(self, stretches: IntArray, episodes: int, seconds: float) -> SensorReport:
        unit = mean_action_error(np.concatenate(self._actions), np.concatenate(self._valid))
        errors = {name: np.concatenate(parts) / unit for name, parts in self._errors.items()}
        changes = {name: float(np.concatenate(parts).mean() / unit) for name, parts in self._changes.items()}
        first = {name: float(np.concatenate(parts).mean() / unit) for name, parts in self._first.items()}
        chances = trained_without(self._policy)
        used = []
        for spec in self._policy.spec.sensors:
            rises = {
                how: rise(errors[f"{how} {spec.name}"] - errors["with"], stretches) for how in ("absent", "swapped")
            }
            change = changes[f"swapped {spec.name}"]
            used.append(
                SensorUse(
                    name=spec.name,
                    kind=spec.kind,
                    verdict=judge(change, rises["swapped"], self._differs[spec.name] > 0),
                    change=change,
                    first_change=first[f"swapped {spec.name}"],
                    swapped=float(errors[f"swapped {spec.name}"].mean()),
                    swapped_rise=rises["swapped"],
                    absent_change=changes[f"absent {spec.name}"],
                    absent=float(errors[f"absent {spec.name}"].mean()),
                    absent_rise=rises["absent"],
                    trained_without=spec.name in chances,
                    tolerated=rises["absent"].high < TOLERATED,
                )
            )
        return SensorReport(
            sensors=_advised(used, self._policy),
            windows=len(stretches),
            episodes=episodes,
            stretches=int(stretches.max()) + 1,
            error=float(errors["with"].mean()),
            mean_action=unit,
            another_draw=float(np.concatenate(self._draws).mean() / unit),
            without_cameras=float(errors["no cameras"].mean()) if self._cameras else None,
            seconds=round(seconds, 3),
        )


def apart(plans: F64, others: F64, valid: NDArray[np.bool_]) -> F64:
    """(B,): mean |plans - others| over candidates, valid steps and dimensions; plans (B, K, T, D)."""
    each = np.abs(plans - others).mean(axis=(1, 3))  # (B, T)
    weight = valid.astype(np.float64)
    mean: F64 = (each * weight).sum(axis=1) / weight.sum(axis=1)
    return mean


def draw_change(plans: F64, valid: NDArray[np.bool_]) -> F64:
    """(B,): how far candidates of one context are from each other: what another latent alone changes."""
    return apart(plans, np.roll(plans, 1, axis=1), valid)


def mean_action_error(actions: F64, valid: NDArray[np.bool_]) -> float:
    """Error of the constant prediction: mean over windows of mean |a - mean a|; actions (N, T, D) in scaled units."""
    constant = actions[valid].mean(axis=0)
    error = float(apart(np.broadcast_to(constant, actions.shape)[:, None], actions[:, None], valid).mean())
    return max(error, 1e-12)  # held-out actions that never move


def rise(difference: F64, stretches: IntArray) -> Rise:
    """Mean of (N,) paired differences; its 95 % interval is Student's over stretches, whose windows overlap."""
    sums, mean = np.bincount(stretches, weights=difference), float(difference.mean())
    count = len(sums)
    if count == 1:
        return Rise(mean, -_NO_INTERVAL, _NO_INTERVAL)
    quantile = _T[count - 2] if count - 2 < len(_T) else 1.96 + 2.4 / (count - 1)
    half = quantile * float((sums * count / len(difference)).std(ddof=1)) / math.sqrt(count)
    return Rise(mean, mean - half, mean + half)


def judge(change: float, swapped: Rise, differs: bool) -> Verdict:
    """`used`: the plans follow it and are better for it."""
    if not differs:
        return "constant"
    if change < CHANGES:
        return "not used"
    if swapped.low > 0 and swapped.mean >= CHANGES:
        return "used"
    return "not used" if swapped.high < TOLERATED else "unclear"


def _advised(used: Sequence[SensorUse], policy: Policy) -> tuple[SensorUse, ...]:
    """Add advice for sensors that are not used."""
    specs = {spec.name: spec for spec in policy.spec.sensors}
    leading = max(used, key=lambda one: one.change)
    advised = []
    for one in used:
        ways = []
        if leading.verdict == "used" and not leading.trained_without:
            half = shlex.quote(f'policy.encoder.sensor_dropout={{"{leading.name}":0.5}}')
            ways.append(f"leave {leading.name} out of half the training windows (--set {half})")
        if feels_events(specs[one.name]) and specs[one.name].steps == 1:
            ways.append(f"give it a history (--sensor {one.name}.history=8)")
        needed = f", or if the task needs it {', or '.join(ways)}" * bool(ways)
        advice = f"leave it out (--without {one.name}){needed}" if one.verdict == "not used" else ""
        advised.append(replace(one, advice=advice))
    return tuple(advised)


def _without(seen: Observation, names: set[str]) -> Observation:
    gone = {name: torch.zeros_like(seen.present[name]) for name in names}
    return Observation(seen.streams, {**seen.present, **gone})


def _differ(seen: Observation, other: Observation, name: str) -> NDArray[np.bool_]:
    """(B,) whether the readings that the policy would see are others."""
    there, here = seen.present[name], other.present[name]
    shape = (*there.shape, *([1] * (seen.streams[name].ndim - there.ndim)))
    own = torch.where(there.view(shape), seen.streams[name], torch.zeros_like(seen.streams[name]))
    swapped = torch.where(here.view(shape), other.streams[name], torch.zeros_like(seen.streams[name]))
    differs: NDArray[np.bool_] = ((own != swapped).flatten(1).any(1) | (there != here).any(1)).numpy()
    return differs


def write_sensor_report(folder: Path, report: SensorReport) -> Path:
    """Beside the weights that were measured; an older one is replaced."""
    path = folder / SENSOR_USE
    files.replace_file(path, files.encode_json(to_json(report)))
    return path


def read_sensor_report(folder: Path) -> SensorReport | None:
    """The measurement of these weights; None if there is none."""
    path = folder / SENSOR_USE
    return from_json(SensorReport, files.read_json(path), str(path)) if path.exists() else None


def percent(share: float) -> str:
    """Two digits: 0.3 %, 7.2 %, 84 %."""
    percent = 100 * share
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
