"""prism bench server"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Server:
    """Many robots on one policy server: latency, errors, memory.

    Try:
        prism bench server --clients 64 --seconds 60 --json server.json
        prism bench server --clients 8 --seconds 10 --run-folder runs/mine

    docs/howto/serving.md explains the keys.
    """

    clients: int = 64
    """Robots at once."""
    seconds: float = 60.0
    """How long they ask."""
    rate: float = 10.0
    """Requests a second of each."""
    run_folder: Annotated[Path | None, option("RUN")] = None
    """Serve this run; default: a random `tiny` policy."""
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
                run=self.run_folder,
                sensors=self.sensors,
                json=self.json,
                overwrite=self.overwrite,
            )
        )
