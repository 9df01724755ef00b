"""Sec. 4.5: which of the K candidates to execute. Pure functions; the state between replans is passed in.

Everything is measured in *scaled* units: a difference of actions is divided, per dimension, by `scale`
(half the range of the demonstrations' actions), so that metres, radians and gripper effort compare. The
distance of two plans a, b over the steps t = 0..n-1 is

    d(a, b) = sum_t w_t sqrt(mean_j ((a_tj - b_tj) / scale_j)^2) / sum_t w_t,     w_t = discount^t

so it does not grow with the horizon or the number of action dimensions. 2 means the whole range apart.

A *mode* is a connected component of the candidates when those nearer than `mode_radius` are joined.
Candidates are draws from the policy, so the share of candidates in a mode estimates the probability that
the policy gives it: the only plausibility a generator without a density has.

The kind of the actions is the policy's (`policy.spec.action.kind`); None, unknown, is treated as absolute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.errors import PrismError, check_choices, check_numbers
from prism.sensors import ActionSpec

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Rule = Literal["proxy_score", "last_action", "overlap", "commit", "first", "medoid"]
InitialRule = Literal["first", "medoid"]


@dataclass(frozen=True)
class SelectionConfig:
    rule: Rule = "commit"
    initial: InitialRule = "medoid"  # for the first plan, where there is nothing to be consistent with
    mode_radius: float = 0.15  # scaled units; plans nearer than this are one mode; chosen in docs/reference/metrics.md
    discount: float = 1.0  # overlap, commit: weight of a step of the overlap against the step before it
    patience: float = 3.0  # commit: how much doubt (see `commit`) it takes to give up a mode
    min_share: float = 0.1  # commit: a rival mode with a smaller share of the candidates is noise
    centrality: float = (
        0.75  # commit: in the kept mode, 0 = nearest the old plan, 1 = most typical; docs/reference/metrics.md
    )
    pose_sensor: str = "proprio"  # proxy_score: its first entries are the pose
    pose_dims: int | None = None  # proxy_score, restless: how many; None: as many as the action has
    grippers: tuple[int, ...] = ()  # of these: entries that are not motion
    # After this many replans in one place (within mode_radius / 2) the candidate that moves farthest is taken until
    # the robot has left. Otherwise, where most candidates wait, the robot waits without end. 0: never.
    restless: int = 0

    def __post_init__(self) -> None:
        check_choices(self, "selection")
        numbers = {"(0, inf)": "mode_radius patience", "(0, 1]": "discount", "[0, 1]": "min_share centrality"}
        check_numbers(self, "selection", {**numbers, "[0, inf)": "restless", "[1, inf)": "pose_dims"})
        if any(entry < 0 for entry in self.grippers):
            raise PrismError(f"selection.grippers = {self.grippers} is out of range; entries count from 0")

    def motion(self, action_dim: int) -> list[int]:
        """Which entries of an action name a pose or a change of it: the first pose_dims, without grippers."""
        return [entry for entry in range(self.pose_dims or action_dim) if entry not in self.grippers]

    @property
    def needs_overlap(self) -> bool:
        return self.rule in ("overlap", "commit")

    def of_actions(self, action: ActionSpec) -> SelectionConfig:
        """With the grippers found by the names of the actions, if none are set."""
        if self.grippers or len(action.grippers) in (0, len(action.names)):
            return self
        return replace(self, grippers=action.grippers)


@dataclass(frozen=True)
class SelectionState:
    """State from the previous replan, in robot units."""

    remainder: FloatArray | None = None  # (R, Da) unexecuted end of the previous plan
    last_action: FloatArray | None = None  # (Da,) last executed action
    pose: FloatArray | None = None  # (>= pose_dims,) observed pose, None where the sensor is absent
    doubt: float = 0.0  # commit only
    rested: int = 0  # replans in a row that stayed in one place


@dataclass(frozen=True)
class Selection:
    index: int
    scores: FloatArray = field(repr=False)  # (K,) lower is better; what the rule minimised
    doubt: float = 0.0  # to be passed to the next replan


def plan_distance(a: FloatArray, b: FloatArray, scale: FloatArray, discount: float = 1.0) -> FloatArray:
    """d(a, b) of the module's head for plans (..., n, Da), broadcast over the leading dimensions."""
    return _mean_step((a - b) / scale, discount)


def _mean_step(way: FloatArray, discount: float = 1.0) -> FloatArray:
    """Differences (..., n, Da) in scaled units -> (...)."""
    step = np.sqrt(np.einsum("...j,...j->...", way, way) / way.shape[-1])  # (..., n); three times faster than np.mean
    if discount == 1.0:
        return np.asarray(step.sum(axis=-1) / step.shape[-1], dtype=np.float64)
    weight = discount ** np.arange(step.shape[-1], dtype=np.float64)
    return np.asarray(step @ weight / weight.sum(), dtype=np.float64)


def pairwise_distance(candidates: FloatArray, scale: FloatArray) -> FloatArray:
    """(K, Tp, Da) -> (K, K), symmetric: each pair is measured once."""
    count = len(candidates)
    left, right = _pairs(count)
    distance = np.zeros((count, count))
    scaled = candidates / scale
    distance[left, right] = distance[right, left] = _mean_step(scaled[left] - scaled[right])
    return distance


@functools.lru_cache(maxsize=16)
def _pairs(count: int) -> tuple[IntArray, IntArray]:
    left, right = np.triu_indices(count, 1)
    return left, right


def mode_labels(distance: FloatArray, radius: float) -> IntArray:
    """Connected components of the graph that joins plans at most `radius` apart: (K, K) -> (K,) in 0..M-1.

    Labels are numbered by first appearance. Order of the candidates does not change which belong together.
    """
    if distance[0].max() <= radius:  # the usual case, and the server's worker counts microseconds
        return np.zeros(len(distance), dtype=np.int64)
    labels = list(range(len(distance)))  # small lists beat small arrays
    left, right = np.nonzero(np.triu(distance <= radius, 1))
    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        if labels[a] != labels[b]:
            keep, drop = sorted((labels[a], labels[b]))
            labels = [keep if label == drop else label for label in labels]
    order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.array([order[label] for label in labels], dtype=np.int64)


@dataclass(frozen=True)
class Modes:
    """Distances and modes of the candidates of one replan, for every rule and the report."""

    distance: FloatArray  # (K, K)
    labels: IntArray  # (K,)


def find_modes(candidates: FloatArray, scale: FloatArray, radius: float) -> Modes:
    distance = pairwise_distance(candidates, scale)
    return Modes(distance, mode_labels(distance, radius))


def proxy_score(
    candidates: FloatArray,
    pose: FloatArray,
    scale: FloatArray,
    kind: ActionKind | None,
    dims: Sequence[int] | None = None,
) -> FloatArray:
    """The paper's ProxyScore, literally: (K,) distance of the first induced pose from the current pose.

    The induced pose is `action` itself where actions are absolute and `pose + action` where they are
    changes. It prefers the candidate that moves least: with changes the current pose cancels and the
    score is the length of the first action. `dims`: the entries that are motion; None: all of them.
    """
    moving = list(range(candidates.shape[-1]) if dims is None else dims)
    if not moving or max(moving) >= min(candidates.shape[-1], len(pose)):
        raise PrismError(
            f"selection.pose_dims and grippers leave the entries {moving}, but the action has {candidates.shape[-1]} "
            f"and the pose {len(pose)} entries"
        )
    current = pose[None, moving]
    first = candidates[:, 0, moving]
    induced = current + first if is_change(kind) else first
    return np.asarray(np.sqrt(np.mean(np.square((induced - current) / scale[moving]), axis=-1)), dtype=np.float64)


def last_action(candidates: FloatArray, previous: FloatArray, scale: FloatArray) -> FloatArray:
    """The paper's tie-break: (K,) distance of the first action from the last executed one."""
    return plan_distance(candidates[:, :1], previous[None, None], scale)


def overlap(candidates: FloatArray, remainder: FloatArray, scale: FloatArray, discount: float = 1.0) -> FloatArray:
    """(K,) distance of each candidate's beginning from the unexecuted remainder (R, Da) of the previous plan."""
    steps = min(len(remainder), candidates.shape[1])
    if steps == 0:
        raise PrismError("overlap needs an unexecuted remainder: use exec_horizon < pred_horizon, or another rule")
    return plan_distance(candidates[:, :steps], remainder[None, :steps], scale, discount)


def medoid(candidates: FloatArray, scale: FloatArray, radius: float, modes: Modes | None = None) -> FloatArray:
    """(K,) mean distance to the members of its own mode; infinite outside the mode with most candidates.

    Its minimum is the most typical candidate of the most probable mode. Of modes of equal size the tighter
    one wins, then the more central one, so that the order of candidates does not matter.
    """
    modes = modes or find_modes(candidates, scale, radius)
    distance, labels = modes.distance, modes.labels
    within = _mean_within(distance, labels)
    sizes = np.bincount(labels)
    tightness = np.bincount(labels, weights=within) / sizes
    remoteness = np.bincount(labels, weights=distance.mean(axis=1)) / sizes
    best = min(range(len(sizes)), key=lambda mode: (-sizes[mode], tightness[mode], remoteness[mode]))
    return np.where(labels == best, within, np.inf)


def commit(
    candidates: FloatArray,
    remainder: FloatArray,
    scale: FloatArray,
    doubt: float,
    config: SelectionConfig,
    modes: Modes | None = None,
) -> Selection:
    """Overlap with hysteresis on modes: stay in the mode of the previous plan, with limited patience.

    The kept mode is the one that holds the candidate nearest the remainder; within it the choice is
    nearest-the-remainder blended with most-typical (`centrality`), because "nearest" alone follows the
    noise of the previous draw. Other modes with at least `min_share` of the candidates are rivals. At
    every replan at which a rival was there and was declined,

        doubt <- doubt + n_rival / (n_rival + n_kept)        (n_rival: the largest rival)

    and without a rival doubt halves. When doubt exceeds `patience` the largest rival is taken and
    doubt restarts at 0. So a mode that the policy hardly believes in any more is left after about
    `patience` replans, one of two equal modes after 2 * patience, and no mode with a lasting rival of
    share s is kept for more than patience / s replans (a robot that waits where others would move does
    move in the end). Passing an obstacle is quicker than that: the rival disappears and doubt with it.
    Where no candidate is within 2 * mode_radius of the remainder there is nothing to keep (the world
    changed, or the old plan was an outlier): the most probable mode is taken afresh.
    """
    modes = modes or find_modes(candidates, scale, config.mode_radius)
    distance, labels = modes.distance, modes.labels
    sizes = np.bincount(labels)
    old = overlap(candidates, remainder, scale, config.discount)
    nearest = int(np.argmin(old))
    if old[nearest] > 2.0 * config.mode_radius:
        scores = medoid(candidates, scale, config.mode_radius, modes)
        return Selection(int(np.argmin(scores)), scores)
    kept = int(labels[nearest])
    rivals = [m for m in range(len(sizes)) if m != kept and sizes[m] >= config.min_share * len(candidates)]
    if rivals:
        rival = max(rivals, key=lambda mode: (sizes[mode], -old[labels == mode].min()))
        doubt += float(sizes[rival] / (sizes[rival] + sizes[kept]))
        if doubt > config.patience:
            kept, doubt = rival, 0.0
    else:
        doubt /= 2.0
    blended = (1.0 - config.centrality) * old + config.centrality * _mean_within(distance, labels)
    scores = np.where(labels == kept, blended, np.inf)
    return Selection(int(np.argmin(scores)), scores, doubt)


def select(
    candidates: FloatArray,
    scale: FloatArray,
    state: SelectionState,
    config: SelectionConfig,
    modes: Modes | None = None,
    kind: ActionKind | None = None,
) -> Selection:
    """Apply the configured rule to candidates (K, Tp, Da) in robot units; `scale` is (Da,), positive.

    Without history the `initial` rule decides. Without a pose, ProxyScore becomes the last-action rule,
    as Sec. 4.5 has it. `modes`: of these candidates at config.mode_radius, where they are known already.
    """
    if config.restless and state.rested >= config.restless:
        here = np.zeros(len(scale)) if is_change(kind) else state.last_action
        scores = -reach(candidates, scale, config, kind, here)
        return Selection(int(np.argmin(scores)), scores)
    rule: Rule = config.rule
    remainder, last, pose = state.remainder, state.last_action, state.pose
    if rule == "proxy_score" and pose is None:
        rule = "last_action"
    if rule == "commit" and remainder is not None:
        return commit(candidates, remainder, scale, state.doubt, config, modes)
    if rule == "overlap" and remainder is not None:
        scores = overlap(candidates, remainder, scale, config.discount)
    elif rule == "last_action" and last is not None:
        scores = last_action(candidates, last, scale)
    elif rule == "proxy_score" and pose is not None:
        scores = proxy_score(candidates, pose, scale, kind, config.motion(candidates.shape[-1]))
    elif (rule if rule in ("first", "medoid") else config.initial) == "medoid":
        scores = medoid(candidates, scale, config.mode_radius, modes)
    else:
        scores = np.arange(len(candidates), dtype=np.float64)
    return Selection(int(np.argmin(scores)), scores)


def _mean_within(distance: FloatArray, labels: IntArray) -> FloatArray:
    """(K,) mean distance of each candidate to the members of its mode, itself included."""
    if not labels.any():
        return np.asarray(distance.sum(axis=1) / len(labels), dtype=np.float64)
    same = labels[:, None] == labels[None, :]
    return np.asarray((distance * same).sum(axis=1) / same.sum(axis=1), dtype=np.float64)


class Standstill:
    """Number of consecutive plans that stayed within half a mode_radius of one place."""

    def __init__(self, config: SelectionConfig, scale: FloatArray, kind: ActionKind | None = None) -> None:
        self.replans = 0
        self._config, self._scale, self._kind = config, scale, kind
        self._at: FloatArray | None = None  # where it began
        self._last = np.zeros(len(scale))  # of poses that are sums of changes

    def executed(self, actions: FloatArray) -> None:
        """(n, Da), the executed part of the plan that a new one replaces."""
        if len(actions) == 0:
            return
        actions = poses(actions, self._last, self._config, self._kind)
        self._last = actions[-1]
        self._at = actions[0] if self._at is None else self._at
        moved = plan_distance(actions[:, None], self._at[None, None], self._scale)  # (n,)
        if moved.max() <= self._config.mode_radius / 2:
            self.replans += 1
        else:
            self.replans, self._at = 0, actions[-1]


def is_change(kind: ActionKind | None) -> bool:
    """Whether actions accumulate to motion, as changes and velocities do."""
    return kind in (ActionKind.DELTA, ActionKind.VELOCITY)


def poses(actions: FloatArray, last: FloatArray, config: SelectionConfig, kind: ActionKind | None) -> FloatArray:
    """Where actions (..., n, Da) lead from the pose `last` (Da,): changes accumulate, a gripper is absolute."""
    if not is_change(kind):
        return actions
    moving = config.motion(len(last))
    reached = actions.copy()
    reached[..., moving] = last[moving] + np.cumsum(actions[..., moving], axis=-2)
    return reached


def reach(
    plans: FloatArray,
    scale: FloatArray,
    config: SelectionConfig,
    kind: ActionKind | None = None,
    start: FloatArray | None = None,
) -> FloatArray:
    """(..., n, Da) -> (...): how far a plan goes from the pose `start` (Da,), or its first action; without grippers."""
    moving = [entry for entry in range(len(scale)) if entry not in config.grippers]
    way = poses(plans, np.zeros(len(scale)), config, kind)[..., moving]
    origin = way[..., :1, :] if start is None else start[moving]
    return np.asarray(plan_distance(way[..., None, :], origin[..., None, :], scale[moving]).max(axis=-1))
