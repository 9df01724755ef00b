"""Less data, drawn by a seed: a fraction of the steps, or a number of demonstrations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from prism.data.episodes import Episode, EpisodeSource, IntArray, SourceView, check_slice
from prism.errors import PrismError
from prism.sensors import SensorSpec


@dataclass(frozen=True)
class Portion(SourceView):
    """Some episodes of a source, the first steps of each."""

    episodes: IntArray
    steps: IntArray

    @property
    def lengths(self) -> IntArray:
        return self.steps

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return self.source.sensors

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        return self.source.read(int(self.episodes[episode]), start, stop, streams)


def draw(
    lengths: Sequence[int] | IntArray, fraction: float | None = None, count: int | None = None, seed: int = 0
) -> tuple[IntArray, IntArray]:
    """Which of the episodes of these lengths, and how many steps of each; neither fraction nor count: all.

    Episodes come in an order that the seed draws: `count` of them whole; or whole ones until `fraction` of all steps is
    reached, of the last as many as are missing. (Of play data, as CALVIN's, an episode is hours long: whole ones would
    not give a tenth.) With one seed less is contained in more, so that learning curves over the amount of data add
    demonstrations and never exchange them.
    """
    sizes = np.asarray(lengths, np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    if fraction is not None and count is not None:
        raise PrismError("give a fraction or a number of demonstrations, not both")
    taken = sizes[order]
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise PrismError(f"the fraction of the data to train on must be in (0, 1], not {fraction:g}")
        wanted = max(round(fraction * int(sizes.sum())), 1)
        taken = np.clip(wanted - (np.cumsum(taken) - taken), 0, taken)
    elif count is not None:
        if not 1 <= count <= len(sizes):
            raise PrismError(f"{count} demonstrations were asked for, there are {len(sizes)} to train on")
        taken = np.where(np.arange(len(taken)) < count, taken, 0)
    back = np.argsort(order)
    steps: IntArray = taken[back]
    episodes = np.flatnonzero(steps)
    return episodes.astype(np.int64), steps[episodes]


def portion(source: EpisodeSource, episodes: Sequence[int] | IntArray, lengths: IntArray) -> EpisodeSource:
    """The first steps of these episodes of the source."""
    return Portion(source, np.asarray(episodes, np.int64), np.asarray(lengths, np.int64))
