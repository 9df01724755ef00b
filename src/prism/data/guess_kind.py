"""Whether the actions of a dataset are poses or changes of a pose, where it does not say: a guess that is explained.

    absolute   an action is nearly what a vector sensor shows one step later, in the same units
    delta      an action moves with the change of a vector sensor to the next step, and is as large as it
    unknown    neither can be seen: no such sensor, too little motion, or an action of 1 is not 1 of motion

An action that moves with the change of a sensor on another scale may be a velocity, in millimetres or normalised: a
robot would go many times too far. A controller that takes one kind for the other drives a robot away, so the guess is
printed, and `--action-kind` states it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.data.episodes import EpisodeSource
from prism.sensors import action_spec_of

_EPISODES, _STEPS = 8, 300  # looked at
_NEAR, _TOGETHER = 0.35, 0.7  # rms of the difference, in deviations of the action; correlation
_ALIKE = 2.0  # motion of an action of 1, at most, and 1 / it at least: a robot lags behind its commands
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Guess:
    kind: ActionKind | None
    why: str  # in words; of an unknown kind with what to do


@dataclass(frozen=True)
class Sample:
    """Some steps of a source: actions (N, Da), what the vector sensors showed then (N, D) and one step later."""

    actions: Float
    before: dict[str, Float]  # NaN where it was absent
    after: dict[str, Float]

    def spread(self) -> Float:
        """(Da,) half the range of the actions, without their outermost percent."""
        low, high = np.percentile(self.actions, [1, 99], axis=0)
        return np.asarray((high - low) / 2, np.float64)


def sampled(source: EpisodeSource) -> Sample | None:
    names = [spec.name for spec in source.sensors if spec.kind == "vector"]
    actions: list[Float] = []
    before: dict[str, list[Float]] = {name: [] for name in names}
    after: dict[str, list[Float]] = {name: [] for name in names}
    for episode in np.unique(np.linspace(0, len(source.lengths) - 1, _EPISODES).astype(int)):
        length = min(int(source.lengths[episode]), _STEPS)
        if length < 3:
            continue
        part = source.read(int(episode), 0, length, streams=names)
        actions.append(part.actions[:-1].astype(np.float64))
        for name in names:
            there = part.present.get(name, np.ones(length, np.bool_))[:, None]
            shown = np.where(there, part.streams[name], np.nan).astype(np.float64)
            before[name].append(shown[:-1])
            after[name].append(shown[1:])
    if not actions:
        return None
    join = np.concatenate
    return Sample(join(actions), {n: join(v) for n, v in before.items()}, {n: join(v) for n, v in after.items()})


def described_kind(source: EpisodeSource) -> str:
    """Kind of the actions of a dataset and how it was found, in a sentence."""
    action = action_spec_of(source)
    units = f"; {words}" if (words := action.in_words()) else ""
    if action.kind is not None:
        return f"actions are {action.kind} ({action.kind.meaning}), as the dataset says{units}"
    guess = guess_kind(source)
    if guess.kind is not None:
        return f"actions look {guess.kind} ({guess.kind.meaning}){units}; if they are not, pass --action-kind"
    return f"unknown kind of action: {guess.why}{units}"


def guess_kind(source: EpisodeSource) -> Guess:
    """Absolute, delta, or unknown where the data do not show it."""
    found, action = sampled(source), action_spec_of(source)
    ask = "pass --action-kind absolute, delta or velocity"
    if found is None or not found.before:
        return Guess(None, f"no vector sensor shows a pose; {ask}")
    scale = np.array(action.scale or (1.0,) * source.action_dim)
    moving = [i for i in range(source.action_dim) if i not in action.still(source.action_dim)]
    votes = [_vote(scale[i] * a, found) for i in moving if (a := found.actions[:, i]).std() > 1e-6]
    if 2 * sum(vote is ActionKind.ABSOLUTE for vote in votes) > len(votes):
        return Guess(ActionKind.ABSOLUTE, "each is nearly the pose one step later")
    slopes = [vote for vote in votes if isinstance(vote, tuple)]
    if 2 * len(slopes) <= len(votes):
        return Guess(None, f"the data do not show whether they are poses or changes of a pose; {ask}")
    motion = float(np.median([slope for slope, _ in slopes]))
    if 1 / _ALIKE <= motion <= _ALIKE:
        return Guess(ActionKind.DELTA, "each is nearly the change of pose to the next step")
    told = f"actions move with the change of '{slopes[0][1]}', but an action of 1 is {motion:.2g} of motion"
    if 1 / _ALIKE <= motion * source.fps <= _ALIKE:
        return Guess(None, f"{told}: a velocity at {source.fps:g} Hz? pass --action-kind velocity, or delta")
    stated = f"--action-kind delta --sensor action.scale={motion * float(np.median(scale[moving])):.2g}"
    return Guess(None, f"{told}: changes in another unit, or normalised? pass {stated}, or velocity")


def _vote(action: Float, sample: Sample) -> ActionKind | tuple[float, str] | None:
    """Absolute; or of the sensor that moves with the action: how far, for an action of 1, and its name."""
    best, found = _TOGETHER, None
    for name, after in sample.after.items():
        away = np.sqrt(np.mean((after - action[:, None]) ** 2, axis=0)) / action.std()
        if (away < _NEAR).any():  # NaN, of a sensor that was absent somewhere, is not
            return ActionKind.ABSOLUTE
        moved = after - sample.before[name]
        for column in moved[:, moved.std(axis=0) > 1e-9].T:
            together = abs(float(np.corrcoef(action, column)[0, 1]))
            if together > best:
                best, found = together, (together * float(column.std() / action.std()), name)
    return found
