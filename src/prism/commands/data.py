"""prism data collect | inspect | download"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from prism.commands.style import option
from prism.errors import PrismError


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of a task from its expert.

    Try:
        prism data collect metaworld-button-press-topdown --episodes 20
        prism data collect pusht --episodes 100 --out data/pusht-100

    Only episodes that succeed are kept. Nothing existing is overwritten.
    """

    task: Positional[str]
    """Name of the task."""
    episodes: int = 20
    """Successful episodes to record."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Where the dataset goes; data/TASK unless told."""
    seed: int = 0
    """Of the first episode; each one has its own."""
    noise: float = 0.0
    """Disturb what is executed, not what is recorded, so that recovery is shown; 1 is half the action range."""
    workers: Annotated[int | None, option("N")] = None
    """Processes that record in parallel; one a core unless told."""
    overwrite: bool = False
    """Replace what is there."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise PrismError(f"--episodes {self.episodes} is out of range: use 1 or more")
        if self.seed < 0:
            raise PrismError(f"--seed {self.seed} is out of range: use 0 or more")
        if self.noise < 0:
            raise PrismError(f"--noise {self.noise:g} is out of range: use 0 or more")
        if self.workers is not None and self.workers < 1:
            raise PrismError(f"--workers {self.workers} is out of range: use 1 or more")

    def run(self) -> None:
        from rich.console import Console

        from prism.demonstrations import COLLECTED
        from prism.sims.collect import collect

        collected = collect(
            self.task,
            self.episodes,
            self.out or COLLECTED / self.task,
            seed=self.seed,
            console=Console(stderr=True),
            overwrite=self.overwrite,
            workers=self.workers,
            noise=self.noise,
        )
        print(
            f"{collected.path}: {collected.episodes} episodes, {collected.steps} steps; "
            f"the expert succeeded in {collected.success:.0%} of {collected.attempts} attempts"
        )


@dataclass(frozen=True)
class Inspect:
    """Summarise a dataset in any format prism reads: episodes, lengths, sensors, ranges.

    Try:
        prism data inspect data/metaworld-button-press-topdown
        prism data inspect pusht_cchi_v7_replay.zarr.zip --page pusht.html
    """

    path: Positional[Path]
    """The dataset: a folder or a file."""
    page: Annotated[Path | None, option("FILE")] = None
    """Write a page with plots of every stream and sample frames of every camera: one HTML file."""
    fps: Annotated[float | None, option("RATE")] = None
    """Steps a second, for formats that do not store it."""
    overwrite: bool = False
    """Replace the page if it exists."""

    def __post_init__(self) -> None:
        if self.fps is not None and self.fps <= 0:
            raise PrismError(f"--fps {self.fps:g} is out of range: use a positive number")

    def run(self) -> None:
        from rich.console import Console

        from prism.data.inspect import inspect, print_summary
        from prism.data.inspect_page import write_page

        if self.page is None:
            summary = inspect(self.path, self.fps)
        else:
            summary = write_page(self.path, self.page, self.fps, self.overwrite)
        print_summary(summary, Console())
        if self.page is not None:
            print(f"page: {self.page}")


@dataclass(frozen=True)
class Download:
    """Fetch a public dataset (needs internet).

    Try:
        prism data download pusht      206 human demonstrations of Push-T, for prism train pusht-human
    """

    name: Positional[str]
    """Name of the dataset."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Where it goes; the folder that PRISM_DATA names, or the user's cache, unless told."""
    overwrite: bool = False
    """Fetch it again if it is there."""

    def run(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from prism.data.locate import download

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            row = bar.add_task(self.name, total=None)
            path = download(
                self.name,
                self.out,
                self.overwrite,
                progress=lambda done, total: bar.update(row, completed=done, total=total),
            )
        print(path)
