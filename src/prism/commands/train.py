"""prism train"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from prism.commands.style import option
from prism.errors import PrismError

Preset = Literal["tiny", "base", "paper"]


@dataclass(frozen=True)
class Train:
    """Train a policy on a task or a recipe.

    Try:
        prism train pusht-human --minutes 15        human demonstrations of Push-T
        prism train pusht                           the demonstrations that ship with prism
        prism train metaworld-drawer-open           records demonstrations first, then trains
        prism train pusht --data my.zarr.zip --out runs/mine
        prism train pusht-human --resume            goes on where runs/pusht-human stopped

    A run is a folder: checkpoints, logs for TensorBoard, and the whole configuration. Afterwards:
        prism eval runs/pusht-human
    """

    recipe: Positional[str]
    """A recipe (pusht-human, pusht, ...) or the name of a task (metaworld-drawer-open, ...)."""
    data: Annotated[Path | None, option("PATH")] = None
    """Train on this dataset (a folder or a .zarr.zip) and not on the recipe's own."""
    minutes: Annotated[float | None, option("M")] = None
    """Stop after this many minutes of training; the learning rate follows this budget."""
    steps: Annotated[int | None, option("N")] = None
    """Stop after this many steps; the learning rate follows this budget."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Where the run goes; runs/RECIPE unless told."""
    preset: Annotated[Preset | None, option("{tiny,base,paper}")] = None
    """Size of the network: tiny learns in minutes on CPU, paper is the publication's; the recipe's own unless told."""
    episodes: Annotated[int | None, option("N")] = None
    """Demonstrations to record where the task has an expert and no data was given."""
    seed: int = 0
    """Same seed, same machine, same numbers."""
    resume: bool = False
    """Go on from the newest checkpoint of the run."""

    def __post_init__(self) -> None:
        if self.minutes is not None and self.steps is not None:
            raise PrismError("give --minutes or --steps, not both: each is the whole training budget")
        if self.minutes is not None and self.minutes <= 0:
            raise PrismError(f"--minutes {self.minutes:g} is out of range: use a positive number")
        if self.steps is not None and self.steps < 1:
            raise PrismError(f"--steps {self.steps} is out of range: use 1 or more")
        if self.episodes is not None and self.episodes < 1:
            raise PrismError(f"--episodes {self.episodes} is out of range: use 1 or more")
        if self.seed < 0:
            raise PrismError(f"--seed {self.seed} is out of range: use 0 or more")

    def run(self) -> None:
        raise PrismError("prism train is not wired up yet")
