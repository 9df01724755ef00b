"""prism bench server"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Server:
    """Many robots on one policy server: latency, errors, and whether bad frames disturb anybody.

    Try:
        prism bench server --clients 64 --seconds 60 --json server.json
        prism bench server --clients 8 --seconds 10 --fuzz 10000 --viewer

    docs/howto/serving.md explains the keys.
    """

    clients: int = 64
    """Robots at once."""
    seconds: float = 60.0
    """How long they ask."""
    rate: float = 10.0
    """Requests a second of each."""
    fuzz: int = 0
    """Random and mutated frames to send afterwards, while four robots are served."""
    viewer: bool = False
    """Also measure what an open live page costs the robots."""
    run_folder: Annotated[Path | None, option("RUN")] = None
    """Serve this run; a random `tiny` policy unless told."""
    sensors: Literal["state", "camera"] = "state"
    """Of the random policy: two vectors, or one and an 84 x 84 camera."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.errors import need

        for package in ("websockets", "msgpack", "prism_client"):
            need(package, "serve", "prism bench server")
        from prism.bench.server import ServerBenchConfig, main

        main(
            ServerBenchConfig(
                clients=self.clients,
                seconds=self.seconds,
                rate=self.rate,
                fuzz=self.fuzz,
                viewer=self.viewer,
                run=self.run_folder,
                sensors=self.sensors,
                json=self.json,
                overwrite=self.overwrite,
            )
        )
