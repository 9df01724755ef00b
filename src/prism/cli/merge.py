"""prism data merge"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from prism.cli.data import _OfDataset, steps_bar
from prism.cli.style import option
from prism.errors import PrismError


@dataclass(frozen=True)
class Merge(_OfDataset):
    """Write several datasets as one: the union of their sensors, a sentence for every episode.

    Try:
        prism data merge data/insert data/stack --out data/both
        prism data merge monday tuesday --out week --text "open the drawer" "close the drawer"

    A sensor that a dataset lacks is absent in its episodes. The episodes of a dataset without text get the words
    of its task, if the tasks differ. `prism train A B` does the same without a copy, and with weights.
    """

    datasets: Annotated[tuple[Path, ...], Positional, arg(metavar="DATASET ...", help_behavior_hint="")]
    """The datasets: folders or files."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(required)")] = None
    """The new folder."""
    text: Annotated[tuple[str, ...], option("SENTENCE")] = ()
    """Instruction for the episodes of each dataset. Default: their own text, or the words of their task."""
    to: Literal["prism", "lerobot"] = "prism"
    """The new format."""
    codec: Literal["h264", "av1"] = "h264"
    """LeRobot: how pictures are compressed."""
    skip_damaged: bool = False
    """Leave out episodes that hold NaN, or whose files are missing or cannot be decoded."""
    overwrite: bool = False
    """Replace the new folder if it exists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is None or len(self.datasets) < 2:
            raise PrismError("give two datasets or more, and the new folder: prism data merge A B --out C")
        if self.text and len(self.text) != len(self.datasets):
            raise PrismError(
                f"--text has {len(self.text)} sentences for {len(self.datasets)} datasets: give one for each"
            )

    def run(self) -> None:
        from rich.console import Console

        from prism.data.convert import convert
        from prism.experiments.combined_recipe import mixed, open_mixture
        from prism.experiments.options import customized

        assert self.out is not None
        if same := [path for path in self.datasets if path.resolve() == self.out.resolve()]:
            raise PrismError(f"{same[0]}: is one of the datasets; choose another folder")
        given: Any = {name: getattr(self, name) for name in ("fps", "map", "sensor", "tolerance", "without", "text")}
        given |= {"episodes": self.episodes or None, "skip_damaged": self.skip_damaged}
        asked = customized(mixed([str(path) for path in self.datasets]), **given).demonstrations
        _, source = open_mixture(asked, Console(quiet=True), small=None)
        with steps_bar() as advance:
            how = (self.to, source.task, self.codec)
            result = convert(source, self.out, *how, overwrite=self.overwrite, progress=advance)
        for note in result.notes:
            print(f"note: {note}")
        print(f"{result.path}: {result.episodes} episodes, {result.steps} steps of {len(self.datasets)} datasets")
