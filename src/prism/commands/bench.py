"""prism bench attention | train-step | allocator"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prism.commands.style import option

OutputFile = Annotated[Path | None, option("FILE")]


@dataclass(frozen=True)
class Attention:
    """Exact softmax against FAVOR+: error by number of features, time by length, and the rule behind `auto`.

    Try:
        prism bench attention --json attention.json --plot attention.png
    """

    json: OutputFile = None
    """Write the figures to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.attention import AttentionBenchConfig, main

        main(AttentionBenchConfig(json=self.json, plot=self.plot, overwrite=self.overwrite))


@dataclass(frozen=True)
class TrainStep:
    """What back-propagating only the chosen candidates brings: time and memory against all K.

    Try:
        prism bench train-step --json train-step.json
    """

    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.train_step import TrainStepBenchConfig, main

        main(TrainStepBenchConfig(json=self.json, overwrite=self.overwrite))


@dataclass(frozen=True)
class Allocator:
    """What keeping freed memory in the process brings to a training step on this CPU.

    Try:
        prism bench allocator --json allocator.json
    """

    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.allocator import AllocatorBenchConfig, main

        main(AllocatorBenchConfig(json=self.json, overwrite=self.overwrite))
