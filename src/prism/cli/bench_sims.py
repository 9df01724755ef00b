"""prism bench sims"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Sims:
    """How fast each simulator runs on one core: steps and camera pictures a second.

    Try:
        prism bench sims --json sims.json
        prism bench sims --sims metaworld --seconds 10
    """

    sims: Annotated[tuple[str, ...], option("NAME ...")] = ()
    """pusht, metaworld, robosuite, ...; all that are installed unless told."""
    seconds: float = 30.0
    """Of CPU time, for all of them together."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.sims import SimsBenchConfig, main

        main(SimsBenchConfig(sims=self.sims, seconds=self.seconds, json=self.json, overwrite=self.overwrite))
