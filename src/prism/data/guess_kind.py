"""Whether the actions of a dataset are poses or changes of a pose, where it does not say: a guess that is explained.

    absolute   an action is nearly what a vector sensor shows one step later, in the same units
    delta      an action moves with the change of a vector sensor to the next step
    ""         neither can be seen: no such sensor, or too little motion

A controller that takes one for the other drives a robot away, so the guess is printed, and `--action-kind` states it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.data.episodes import EpisodeSource
from prism.sensors import action_spec_of

_EPISODES, _STEPS = 8, 300  # looked at
_NEAR, _TOGETHER = 0.35, 0.7  # rms of the difference, in deviations of the action; correlation
Float = NDArray[np.float64]


def described_kind(source: EpisodeSource) -> str:
    """What the actions of a dataset are and how that is known, in a sentence."""
    if kind := action_spec_of(source).kind:
        return f"actions are {kind} ({kind.meaning}), as the dataset says"
    if kind := guess_kind(source):
        return f"actions look {kind} ({kind.meaning}); if they are not, say it: prism train --action-kind"
    return "nothing says whether actions are poses or changes of a pose: prism train --action-kind absolute or delta"


def guess_kind(source: EpisodeSource) -> ActionKind | None:
    """Absolute, delta, or None where the data do not show it."""
    names = [spec.name for spec in source.sensors if spec.kind == "vector"]
    grippers = set(action_spec_of(source).grippers)
    actions, now, later = [], [], []
    for episode in np.unique(np.linspace(0, len(source.lengths) - 1, _EPISODES).astype(int)) if names else ():
        length = min(int(source.lengths[episode]), _STEPS)
        if length < 3:
            continue
        part = source.read(int(episode), 0, length, streams=names)
        there = {name: part.present.get(name, np.ones(length, np.bool_))[:, None] for name in names}
        seen = [np.where(there[name], part.streams[name], np.nan) for name in names]
        shown = np.concatenate(seen, axis=1).astype(np.float64)
        actions.append(part.actions[:-1].astype(np.float64))
        now.append(shown[:-1])
        later.append(shown[1:])
    if not actions:
        return None
    a, before, after = (np.concatenate(rows) for rows in (actions, now, later))
    votes = [_vote(a[:, i], before, after) for i in range(a.shape[1]) if i not in grippers and a[:, i].std() > 1e-6]
    for kind in (ActionKind.ABSOLUTE, ActionKind.DELTA):
        if 2 * votes.count(kind) > len(votes):
            return kind
    return None


def _vote(action: Float, before: Float, after: Float) -> ActionKind | None:
    away = np.sqrt(np.mean((after - action[:, None]) ** 2, axis=0)) / action.std()
    if (away < _NEAR).any():  # NaN, of a sensor that was absent somewhere, is not
        return ActionKind.ABSOLUTE
    moved = after - before
    moves = moved.std(axis=0) > 1e-9
    if moves.any() and max(abs(np.corrcoef(action, column)[0, 1]) for column in moved[:, moves].T) > _TOGETHER:
        return ActionKind.DELTA
    return None
