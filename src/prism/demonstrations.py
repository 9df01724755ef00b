"""Where the demonstrations of a run come from, and how they become what the task's environment shows.

| kind    | from                                                                       |
| ------- | -------------------------------------------------------------------------- |
| expert  | data/TASK, recorded from the task's expert first where it is not there yet |
| shipped | Push-T demonstrations of our expert, inside the package                    |
| human   | Push-T demonstrations of people: prism data download pusht                 |
| path    | any dataset that prism reads: --data PATH                                  |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from prism.data import Episode, EpisodeSource, open_dataset, with_sensors
from prism.data.episodes import check_slice, wanted_sensors
from prism.data.locate import find_dataset
from prism.errors import PrismError
from prism.sims import pusht_features as pusht

Kind = Literal["expert", "shipped", "human", "path"]
COLLECTED = Path("data")  # where `prism data collect TASK` records, unless told


@dataclass(frozen=True)
class Demonstrations:
    kind: Kind
    episodes: int = 20  # expert: how many to record
    mirror: bool = False  # Push-T: each demonstration and its mirror image (see sims/pusht_features.py)
    path: str | None = None  # the dataset; None: where the kind says

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PrismError(f"demonstrations.kind is '{self.kind}'; use one of {', '.join(get_args(Kind))}")
        if self.episodes < 1:
            raise PrismError(f"demonstrations.episodes is {self.episodes}; it must be at least 1")
        if self.kind == "path" and self.path is None:
            raise PrismError("demonstrations.kind is 'path', but no path is given (--data PATH)")


def open_demonstrations(
    config: Demonstrations, task: str, console: Console
) -> tuple[Demonstrations, EpisodeSource, int]:
    """The dataset as the task's sensors see it, how many copies of each episode it holds, and its config with the
    path filled in. Copy c of episode e is number c * originals + e."""
    path = _locate(config, task, console)
    source = open_dataset(path)
    for note in source.notes:
        console.print(f"{path}: {note}", highlight=False, markup=False, soft_wrap=True)
    copies = 1
    if task.startswith("pusht") and "state" in {sensor.name for sensor in source.sensors}:
        variant: pusht.Variant = "state" if task == "pusht" else task.removeprefix("pusht-")  # type: ignore[assignment]
        source = PushTDemonstrations(source, variant, config.mirror)
        copies = source.copies
    elif config.mirror:
        raise PrismError(f"{path}: only Push-T demonstrations with a 'state' can be mirrored; set mirror to false")
    return replace(config, path=str(path)), source, copies


def _locate(config: Demonstrations, task: str, console: Console) -> Path:
    if config.kind == "human":
        return find_dataset("pusht-human", None if config.path is None else Path(config.path))
    if config.kind == "shipped" and config.path is None:
        return find_dataset("pusht-expert")
    if config.path is not None:
        return Path(config.path)
    return record_if_missing(config, task, console)


def record_if_missing(config: Demonstrations, task: str, console: Console) -> Path:
    """The folder with demonstrations of the task's expert, recorded now if it is not there."""
    path = COLLECTED / task if config.path is None else Path(config.path)
    if path.exists():
        console.print(f"using the demonstrations in {path}", highlight=False, soft_wrap=True)
        return path
    from prism.sims.collect import collect

    words = f"recording {config.episodes} demonstrations of {task} in {path}"
    console.print(words, highlight=False, soft_wrap=True)
    collect(task, config.episodes, path, console=console)
    return path


class PushTDemonstrations:
    """Push-T episodes with a raw `state`, shown through the environment's own features, once or with mirror images."""

    def __init__(self, source: EpisodeSource, variant: pusht.Variant, mirror: bool) -> None:
        names = {sensor.name: sensor for sensor in source.sensors}
        if names["state"].shape != (5,):
            raise PrismError(f"{source.path}: 'state' has shape {names['state'].shape}; Push-T's is (5,)")
        if variant == "pixels" and "img" not in names:
            raise PrismError(f"{source.path}: has no 'img'; use the task pusht or pusht-keypoints, or other data")
        self._source = with_sensors(source, ("state", "img") if variant == "pixels" else ("state",))
        self._variant: pusht.Variant = variant
        self.copies = 2 if mirror else 1
        self.sensors = pusht.sensor_specs(variant)
        self.path, self.action_dim, self.fps, self.notes = source.path, source.action_dim, source.fps, source.notes
        self.lengths = np.tile(source.lengths, self.copies)

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        start, stop = check_slice(self, episode, start, stop)
        wanted = {sensor.name for sensor in wanted_sensors(self, streams)}
        copy, original = divmod(episode, len(self._source.lengths))
        raw = ["state"] + ["img"] * ("rgb_static" in wanted)
        part = self._source.read(original, start, stop, raw)
        state: NDArray[np.floating] = np.asarray(part.streams["state"], dtype=np.float64)
        actions: NDArray[np.float32] = part.actions
        if copy:
            state = pusht.mirror_state(state)
            actions = np.ascontiguousarray(pusht.mirror_action(actions), dtype=np.float32)
        shown: dict[str, NDArray[np.generic]] = dict(pusht.features(state, self._variant))
        if "rgb_static" in wanted:
            pixels = part.streams["img"]
            shown["rgb_static"] = pixels.swapaxes(1, 2)[:, ::-1, ::-1] if copy else pixels
        return Episode({name: stream for name, stream in shown.items() if name in wanted}, actions)
