"""prism bench latency | realtime | server"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from prism.cli.style import JsonOutput, option
from prism.errors import check_numbers, need


@dataclass(frozen=True)
class Latency(JsonOutput):
    """Time to a plan: of a run of yours, or of every method at the paper's sizes; with the encoders and without.

    Try:
        prism bench latency runs/mine
        prism bench latency --json latency.json
        prism bench latency --preset tiny --seconds 5

    Without a run: baselines draw one plan with their NFE passes, PRISM draws 8 in one pass, as in the paper; 8 plans
    of every method are measured too. On a busy machine compare the ratios, not the milliseconds.
    """

    run_folder: Annotated[Path | None, Positional, arg(metavar="RUN", help_behavior_hint="")] = None
    """A run folder, or one checkpoint in it; default: every method with random weights."""
    preset: Literal["tiny", "base", "paper"] = "paper"
    """Size of the random networks."""
    threads: int = 2
    """Threads of PyTorch."""
    device: Annotated[str, option("NAME")] = "cpu"
    """Device: cpu, cuda, mps, or auto (cuda if available)."""
    seconds: float = 60.0
    """CPU time to measure; without a run of each of three groups, at two pairs of horizons: (8, 16) and (16, 32)."""
    all_nfe: bool = False
    """Diffusion Policy with 100 evaluations too."""
    seed: int = 0
    """Random seed of the order of turns."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "threads", "(0, inf)": "seconds"})

    def run(self) -> None:
        from prism.bench import latency

        _carry_out(self, latency)


@dataclass(frozen=True)
class Realtime(JsonOutput):
    """Does a policy hold its control rate on this machine, cameras to action?

    Try:
        prism bench realtime --checkpoint runs/mine --backend onnx
        prism bench realtime --sensors wrist --seconds 60 --json wrist.json

    A clock gives every action its slot; every frame is encoded. docs/explanation/realtime.md explains the keys.
    """

    checkpoint: Annotated[Path | None, option("RUN")] = None
    """A trained run with its own sensors; default: random weights of --size."""
    sensors: Literal["wrist", "calvin"] = "wrist"
    """wrist: RGB 84x84 and proprioception. calvin: RGB 200x200 and 84x84, two depths, touch, proprioception."""
    size: Literal["tiny", "base", "paper"] = "paper"
    """Size of the random policy (a preset)."""
    seconds: float = 60.0
    """Duration of the measurement."""
    rate: Annotated[float | None, option("HZ")] = None
    """Actions a second; default: the rate of the --checkpoint, or 1 % above 50 (wrist) or 30 (calvin)."""
    backend: Annotated[str | None, option("NAME")] = None
    """eager, compile, onnx, onnx-int8; default: onnx for wrist, onnx-int8 for calvin."""
    lanes: Annotated[int | None, option("N")] = None
    """Threads that encode and plan; default: one a core."""
    candidates: int = 8
    """Candidates a plan."""
    seed: int = 0
    """Random seed of weights, frames and latents."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "candidates lanes", "(0, inf)": "seconds rate"})

    def run(self) -> None:
        from prism.bench import realtime

        _carry_out(self, realtime)


@dataclass(frozen=True)
class Server(JsonOutput):
    """Many robots on one policy server: latency, errors, memory.

    Try:
        prism bench server --run-folder runs/mine --clients 4 --rate 5
        prism bench server --clients 64 --seconds 60 --json server_load.json

    docs/howto/serving.md explains the keys. Bad frames and the live page: python -m research server.
    """

    run_folder: Annotated[Path | None, option("RUN")] = None
    """Serve this run; default: a random `tiny` policy."""
    clients: int = 64
    """Number of robots."""
    seconds: float = 60.0
    """Duration of the load."""
    rate: float = 10.0
    """Requests a second of each."""
    sensors: Literal["state", "camera"] = "state"
    """Sensors of the random policy: two vectors, or one and an 84 x 84 camera."""
    seed: int = 0
    """Random seed of the policy and the observations."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "clients", "(0, inf)": "seconds rate"})

    def run(self) -> None:
        for package in ("websockets", "msgpack"):
            need(package, "serve", "prism bench server")
        from prism.bench import server_load

        _carry_out(self, server_load)


def _carry_out(config: Latency | Realtime | Server, bench: Any) -> None:
    """Measure with progress on stderr, show the figures, write them."""
    from rich.console import Console

    from prism.evaluation.results import refuse_existing, write_json

    refuse_existing(config.json, overwrite=config.overwrite)
    result = bench.run(config, Console(stderr=True))
    bench.show(result, Console())
    if config.json is not None:
        write_json(config.json, result, config.overwrite)
