"""Where the demonstrations of a run come from, and how they become what the task's environment shows.

| kind    | from                                                                       |
| ------- | -------------------------------------------------------------------------- |
| expert  | data/TASK, recorded from the task's expert first where it is not there yet |
| shipped | Push-T demonstrations of our expert, inside the package                    |
| human   | Push-T demonstrations of people: prism data download pusht                 |
| path    | any dataset that prism reads: --data PATH                                  |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from prism.data import EpisodeSource, open_dataset
from prism.data.locate import find_dataset
from prism.errors import PrismError
from prism.sims.pusht_data import PushTDemonstrations
from prism.sims.pusht_features import Variant

Kind = Literal["expert", "shipped", "human", "path"]
COLLECTED = Path("data")  # where `prism data collect TASK` records, unless told


@dataclass(frozen=True)
class Demonstrations:
    kind: Kind
    episodes: int = 20  # expert: how many to record
    noise: float = 0.0  # expert: disturbance of what is executed, not of what is recorded; of half the action range
    mirror: bool = False  # Push-T: each demonstration and its mirror image (see sims/pusht_features.py)
    path: str | None = None  # the dataset; None: where the kind says

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PrismError(f"demonstrations.kind is '{self.kind}'; use one of {', '.join(get_args(Kind))}")
        if self.episodes < 1:
            raise PrismError(f"demonstrations.episodes is {self.episodes}; it must be at least 1")
        if self.noise < 0:
            raise PrismError(f"demonstrations.noise is {self.noise}; it must be 0 or more")
        if self.kind == "path" and self.path is None:
            raise PrismError("demonstrations.kind is 'path', but no path is given (--data PATH)")


def open_demonstrations(
    config: Demonstrations, task: str, console: Console
) -> tuple[Demonstrations, EpisodeSource, int]:
    """The dataset as the task's sensors see it, how many copies of each episode it holds, and its config with the
    path filled in. Copy c of episode e is number c * originals + e."""
    path = _locate(config, task, console)
    source = open_dataset(path)
    copies = 1
    if task.startswith("pusht") and "state" in {sensor.name for sensor in source.sensors}:
        variant: Variant = "state" if task == "pusht" else task.removeprefix("pusht-")  # type: ignore[assignment]
        source = PushTDemonstrations(source, variant, config.mirror)
        copies = source.copies
    elif config.mirror:
        raise PrismError(f"{path}: only Push-T demonstrations with a 'state' can be mirrored; set mirror to false")
    for note in source.notes:
        console.print(f"{path}: {note}", highlight=False, markup=False, soft_wrap=True)
    return replace(config, path=str(path)), source, copies


def _locate(config: Demonstrations, task: str, console: Console) -> Path:
    if config.kind == "human":
        return find_dataset("pusht-human", None if config.path is None else Path(config.path))
    if config.kind == "shipped" and config.path is None:
        return find_dataset("pusht-expert")
    if config.path is not None:
        return Path(config.path)
    return record_if_missing(config, task, console)


def record_if_missing(config: Demonstrations, task: str, console: Console, workers: int | None = None) -> Path:
    """The folder with demonstrations of the task's expert, recorded now if it is not there."""
    path = COLLECTED / task if config.path is None else Path(config.path)
    if path.exists():
        console.print(f"using the demonstrations in {path}", highlight=False, soft_wrap=True)
        return path
    from prism.sims.collect import collect

    words = f"recording {config.episodes} demonstrations of {task} in {path}"
    console.print(words, highlight=False, soft_wrap=True)
    collect(task, config.episodes, path, console=console, workers=workers, noise=config.noise)
    return path
