"""`prism bench server`: many robots on one policy server.

The server is a process of its own with a random `tiny` policy (or the one of a run); all clients share this process
and one event loop. Each asks for a plan at fixed times, so a late reply delays nothing but itself: `p99_ms` counts
from the time at which the request was due (no coordinated omission), `service_p99_ms` from the time it was sent.

`python -m research server` adds what an open live page costs, and frames that no robot would send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prism.errors import PrismError
from prism.evaluation.results import run_info

if TYPE_CHECKING:
    from prism.cli.bench import Server

SENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "state": {"proprio": (9,), "object_state": (12,)},
    "camera": {"proprio": (9,), "rgb_wrist": (84, 84, 3)},
}
_ACTION_DIM, _FPS = 7, 10.0


# The server's process


def serve(settings: dict[str, Any]) -> None:
    """Prints the port when it is ready; ends when its input does, so it cannot outlive the bench."""
    import logging

    from prism.experiments.run_folder import Run, default_controller
    from prism.methods.presets import build_policy, preset
    from prism.sensors import SensorSpec
    from prism.server.policy_server import PolicyServer, ServerConfig

    logging.getLogger("prism").addHandler(logging.NullHandler())
    logging.getLogger("prism").propagate = False
    if settings["run"] is not None:
        run = Run(settings["run"])
        policy, controller = run.policy(), replace(run.settings, warm_start=False)  # which no server does
    else:
        shapes = SENSORS[settings["sensors"]]
        specs = [SensorSpec(name, "rgb" if len(shape) == 3 else "vector", shape) for name, shape in shapes.items()]
        policy = build_policy(preset("tiny").spec(tuple(specs), _ACTION_DIM, _FPS), settings["seed"])
        controller = default_controller(policy.spec)
    config = ServerConfig(port=0, max_clients=4 * settings["clients"] + 64, threads=1, trust_sensors=True)
    server = PolicyServer(policy, controller, config, "bench")

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), stop.set)
        await server.run(stop, lambda: print(server.port, flush=True))

    asyncio.run(main())


@contextlib.contextmanager
def running_server(config: Server) -> Any:
    settings = {"run": None if config.run_folder is None else str(config.run_folder), "sensors": config.sensors}
    command = [sys.executable, "-m", "prism.bench.server_load"]
    text = json.dumps({**settings, "seed": config.seed, "clients": config.clients})
    process = subprocess.Popen(
        [*command, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise PrismError("the server of the bench did not start: see its message above")
        yield int(line), process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def scrape(port: int) -> dict[str, float]:
    """The server's own metrics, one number a line."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


# The robots


@dataclass
class Load:
    due: list[float] = field(default_factory=list)  # seconds from when a request was due to its reply
    service: list[float] = field(default_factory=list)  # ... from when it was sent
    batches: list[int] = field(default_factory=list)
    errors: int = 0
    first_error: str = ""
    seconds: float = 0.0  # from the first request to the last reply

    def fail(self, message: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or message


def observation(sensors: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """One time step as the server's metadata asks for it."""
    step: dict[str, NDArray[Any]] = {}
    for sensor in sensors:
        shape = tuple(sensor["shape"])
        if sensor["dtype"] == "uint8":
            step[sensor["name"]] = rng.integers(32, 127, size=shape, dtype=np.uint8)
        else:
            mean, std = sensor.get("mean") or 0.0, sensor.get("std") or 1.0  # beyond training it would be absent
            step[sensor["name"]] = (mean + rng.uniform(-1, 1, shape) * std).astype(np.float32)
    return step


async def robot(port: int, rate: float, start: float, end: float, seed: int, load: Load) -> None:
    """Asks at start, start + 1/rate, ... until `end`; checks every reply."""
    from prism_client import wire
    from websockets.asyncio.client import connect

    rng = np.random.default_rng(seed)
    try:
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=60) as socket:
            async with asyncio.timeout(60):
                metadata = wire.unpack(_binary(await socket.recv()))
            rows, width = metadata["pred_horizon"], metadata["action_dim"]
            frames = [wire.pack(observation(metadata["sensors"], rng)) for _ in range(4)]
            due = max(start, time.perf_counter()) + rng.random() / rate
            count = 0
            while due < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                sent = time.perf_counter()
                await socket.send(frames[count % len(frames)])
                async with asyncio.timeout(30):  # wait_for of Python 3.11 may swallow the end of the bench
                    reply = await socket.recv()
                now = time.perf_counter()
                if isinstance(reply, str):
                    load.fail(reply)
                else:
                    message = wire.unpack(reply)
                    actions = message["actions"]
                    if actions.shape != (rows, width) or not np.isfinite(actions).all():
                        load.fail(f"actions of shape {actions.shape}")
                    load.batches.append(message["server_timing"]["batch"])
                load.due.append(now - due)
                load.service.append(now - sent)
                due += 1.0 / rate
                count += 1
    except Exception as error:  # whatever it is, it is the server's failure here
        load.fail(f"{type(error).__name__}: {error}")


def _binary(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise PrismError(f"the server sent text: {frame}")
    return frame


async def drive(port: int, clients: int, rate: float, seconds: float, seed: int) -> Load:
    """All robots connect, then `seconds` of requests."""
    load = Load()
    start = time.perf_counter() + 0.3 + 0.01 * clients
    await asyncio.gather(*(robot(port, rate, start, start + seconds, seed + i, load) for i in range(clients)))
    load.seconds = time.perf_counter() - start
    return load


def run(
    config: Server, console: Console, more: Callable[[int], Awaitable[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """`more`: what else is measured on the server's port; its keys are added."""
    with Progress(console=console, transient=True) as progress, running_server(config) as (port, process):
        bar = progress.add_task("robots", total=config.seconds)

        async def measure() -> dict[str, Any]:
            warm = await drive(port, min(4, config.clients), config.rate, 1.0, config.seed)
            if warm.errors:
                raise PrismError(f"the server of the bench does not answer: {warm.first_error}")
            before = scrape(port)
            ticking = asyncio.create_task(_tick(progress, bar))
            load = await drive(port, config.clients, config.rate, config.seconds, config.seed)
            ticking.cancel()
            progress.update(bar, total=None, description="more")
            result = load_keys(load, before, scrape(port))
            if more is not None:
                result |= await more(port)
            return {**result, "server_alive": process.poll() is None}

        result = asyncio.run(measure())
    settings = {name: getattr(config, name) for name in ("clients", "seconds", "rate", "sensors")}
    policy = "random tiny" if config.run_folder is None else config.run_folder.name
    return {**result, "settings": {**settings, "policy": policy}, **run_info(config.seed)}


async def _tick(progress: Progress, bar: Any) -> None:
    while True:
        await asyncio.sleep(1)
        progress.advance(bar, 1)


def load_keys(load: Load, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    due, service = 1e3 * np.array(load.due or [0.0]), 1e3 * np.array(load.service or [0.0])
    plans = after["prism_batch_size_count"] - before["prism_batch_size_count"]
    return {
        "errors": load.errors,
        "first_error": load.first_error,
        "requests": len(load.due),
        "requests_per_s": len(load.due) / load.seconds,
        "p50_ms": float(np.median(due)),
        "p99_ms": float(np.quantile(due, 0.99)),
        "max_ms": float(due.max()),
        "service_p50_ms": float(np.median(service)),
        "service_p99_ms": float(np.quantile(service, 0.99)),
        "batch_mean": (after["prism_batch_size_sum"] - before["prism_batch_size_sum"]) / max(1.0, plans),
        "batch_max": max(load.batches, default=0),
        "server_cpu_ms": 1e3
        * (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"])
        / max(1, len(load.due)),  # a request
        "memory_mb": after["process_resident_memory_bytes"] / 1e6,
        "memory_growth_mb": (after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]) / 1e6,
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{result['settings']['clients']} clients, {result['settings']['policy']} policy")
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in result.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "seed":
            table.add_row(key, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
