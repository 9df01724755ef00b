"""prism bench realtime"""

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
        prism bench realtime --checkpoint runs/mine

    A clock gives every action its slot; every frame is encoded. docs/explanation/realtime.md explains the keys.
    """

    sensors: Literal["wrist", "calvin"] = "wrist"
    """wrist: RGB 84x84 and proprioception. calvin: RGB 200x200 and 84x84, two depths, touch, proprioception."""
    seconds: float = 60.0
    """How long."""
    rate: Annotated[float | None, option("HZ")] = None
    """Actions a second; default: 1 % above 50 (wrist) or 30 (calvin), or the rate of a --checkpoint."""
    backend: Annotated[str | None, option("NAME")] = None
    """eager, compile, onnx, onnx-int8; default: onnx for wrist, onnx-int8 for calvin."""
    checkpoint: Annotated[Path | None, option("RUN")] = None
    """A trained run with its own sensors; default: random weights of the preset `paper`."""
    lanes: Annotated[int | None, option("N")] = None
    """Threads that encode and plan; default: one a core."""
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
                json=self.json,
                overwrite=self.overwrite,
            )
        )
