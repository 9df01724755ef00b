"""prism bench latency, python -m research size"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prism.cli.style import OutputFile

Preset = Literal["tiny", "base", "paper"]


@dataclass(frozen=True)
class Latency:
    """Time to a plan of every method, taking turns in one run; with the encoders and without.

    Try:
        prism bench latency --json latency.json
        prism bench latency --preset tiny --seconds 5

    Baselines draw one plan with their NFE passes, PRISM draws 8 in one pass, as in the paper; 8 plans from everybody
    stand beside it. On a busy machine look at the ratios, not at the milliseconds.
    """

    preset: Preset = "paper"
    """Size of the networks."""
    threads: int = 2
    """Threads of PyTorch."""
    seconds: float = 60.0
    """CPU time of each of the three groups, at both pairs of horizons: (8, 16) and (16, 32)."""
    all_nfe: bool = False
    """Diffusion Policy with 100 evaluations too."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.latency import LatencyBenchConfig, main

        main(
            LatencyBenchConfig(
                json=self.json,
                overwrite=self.overwrite,
                preset=self.preset,
                threads=self.threads,
                seconds=self.seconds,
                all_nfe=self.all_nfe,
            )
        )
