"""prism bench realtime | scaling"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Realtime:
    """Does the paper-size policy hold its control rate on this machine, cameras to action?

    Try:
        prism bench realtime --sensors wrist --seconds 60 --json wrist.json
        prism bench realtime --sensors calvin --compare --json calvin.json

    A clock gives every action its slot; every frame is encoded. docs/explanation/realtime.md explains the keys.
    """

    sensors: Literal["wrist", "calvin"] = "wrist"
    """wrist: RGB 84x84 and proprioception. calvin: RGB 200x200 and 84x84, two depths, touch, proprioception."""
    seconds: float = 60.0
    """How long."""
    rate: Annotated[float | None, option("HZ")] = None
    """Actions a second; 1 % above 50 (wrist) or 30 (calvin), or the rate of a --checkpoint, unless told."""
    backend: Annotated[str | None, option("NAME")] = None
    """eager, compile, onnx, onnx-int8; onnx for wrist and onnx-int8 for calvin unless told."""
    checkpoint: Annotated[Path | None, option("RUN")] = None
    """A trained run with its own sensors; random weights of the preset `paper` unless told."""
    lanes: Annotated[int | None, option("N")] = None
    """Threads that encode and plan; one a core unless told."""
    compare: bool = False
    """Also run Diffusion Policy (NFE 10) and Flow Matching (NFE 5) in the same loop."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.errors import need

        need("prism_client", "serve", "prism bench realtime")
        from prism.bench.realtime import RealtimeBenchConfig, main

        main(
            RealtimeBenchConfig(
                sensors=self.sensors,
                seconds=self.seconds,
                rate=self.rate,
                backend=self.backend,
                checkpoint=self.checkpoint,
                lanes=self.lanes,
                compare=self.compare,
                json=self.json,
                overwrite=self.overwrite,
            )
        )
