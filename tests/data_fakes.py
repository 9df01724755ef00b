"""A dataset in memory, for tests of everything that reads datasets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from prism.data import format_name, open_dataset
from prism.data.episodes import Episode, check_slice, wanted_sensors
from prism.data.formats.table import Entry
from prism.data.inspect import Summary, readable, summarise
from prism.sensors import SensorSpec


class MemorySource:
    path = Path("memory")
    notes: tuple[str, ...] = ()
    read_together = 0

    def __init__(self, episodes: Sequence[Episode], sensors: Sequence[SensorSpec], fps: float = 10.0) -> None:
        self.episodes, self.sensors, self.fps = list(episodes), tuple(sensors), fps
        self.action_dim = episodes[0].actions.shape[1]
        self.lengths = np.array([episode.length for episode in episodes], np.int64)
        self.reads: list[tuple[int, int, int, tuple[str, ...]]] = []

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        names = tuple(sensor.name for sensor in wanted_sensors(self, streams))
        self.reads.append((episode, start, stop, names))
        whole = self.episodes[episode]
        return Episode(
            {name: whole.streams[name][start:stop] for name in names},
            whole.actions[start:stop],
            {name: mask[start:stop] for name, mask in whole.present.items() if name in names},
        )


def counting_source(lengths: Sequence[int], images: bool = False) -> MemorySource:
    """Actions, vectors and pixels all say which episode and which step they are from: (episode, step)."""
    sensors = [SensorSpec("where", "vector", (2,))]
    if images:
        sensors.append(SensorSpec("cam", "rgb", (2, 2, 3)))
    episodes = []
    for number, length in enumerate(lengths):
        label = np.stack([np.full(length, number), np.arange(length)], axis=1).astype(np.float32)
        streams: dict[str, np.ndarray] = {"where": label}  # type: ignore[type-arg]
        if images:
            streams["cam"] = np.zeros((length, 2, 2, 3), np.uint8)
            streams["cam"][:, 0, 0, :2] = label.astype(np.uint8)
        episodes.append(Episode(streams, label.copy()))
    return MemorySource(episodes, sensors)


def inspect(path: Path, fps: float | None = None, entries: Sequence[Entry] = ()) -> Summary:
    """As `prism data inspect` looks at a dataset."""
    source, problems = readable(open_dataset(path, fps, entries, skip_damaged=None))
    return summarise(source, format_name(Path(path)), problems=problems)


def read_all(path: Path) -> None:
    source = open_dataset(path)
    for episode in range(len(source.lengths)):
        source.read(episode)
