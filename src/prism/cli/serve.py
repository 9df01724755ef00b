"""prism serve"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.errors import PrismError, check_numbers, need, printable

if TYPE_CHECKING:
    from prism.server.policy_server import PolicyServer

KEY_VARIABLE = "PRISM_API_KEY"


@dataclass(frozen=True)
class Serve:
    """Serve a trained policy to robots over the network, with a live page.

    Try:
        prism serve runs/pusht                      ws://127.0.0.1:8000, page at http://127.0.0.1:8000
        prism serve runs/pusht --host 0.0.0.0 --api-key-file key.txt
        prism serve runs/mine --map observation/image=rgb_static prompt=instruction
        prism serve runs/mine --backend onnx-int8   cameras two to four times faster

    The protocol is openpi's, so openpi-client works; prism-client (packages/prism-client) is
    small and offers more. Ctrl-C ends it. docs/howto/serving.md explains the protocol and every limit.
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    host: str = "127.0.0.1"
    """Address to listen on; default: this computer only. 0.0.0.0 means all its networks."""
    port: int = 8000
    """Port for robots, page, /healthz and /metrics; 0 takes a free one."""
    api_key_file: Annotated[Path | None, option("FILE")] = None
    """Clients must send the key in this file (Authorization: Api-Key KEY); PRISM_API_KEY does the same."""
    no_key: bool = False
    """Listen beyond this computer without a key: anyone on the network can send requests and watch the cameras."""
    name: Annotated[tuple[str, ...], option("HOST")] = ()
    """Network names of this computer, for browsers that open the live page without a key."""
    map: Annotated[tuple[str, ...], option("KEY=SENSOR")] = ()
    """The client's name of a sensor, KEY=SENSOR; KEY= ignores a key."""
    candidates: Annotated[int | None, option("K")] = None
    """Candidates to draw for each plan; default: the run's."""
    selection: Annotated[str | None, option("RULE")] = None
    """Selection rule; default: the run's (prism eval --help lists the rules)."""
    action_kind: Annotated[str | None, option("KIND")] = None
    """Kind of the policy's actions, if unknown: absolute, delta or velocity."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the controller: --set exec_horizon=1 for clients that request a plan at every step."""
    backend: Annotated[str, option("NAME")] = "eager"
    """Back end: eager, compile, onnx or onnx-int8 (docs/explanation/realtime.md)."""
    device: Annotated[str, option("NAME")] = "auto"
    """Device: cpu, cuda, mps, or auto (cuda if available). Back ends other than eager run on the CPU."""
    max_clients: int = 128
    """Maximum number of connected robots."""
    max_message_mb: Annotated[float | None, option("MB")] = None
    """Largest message; default: four full observations of this policy."""
    rate: float = 200.0
    """Requests per second of one client; faster requests wait. 0: no limit."""
    idle_timeout: float = 300.0
    """Seconds without a request after which a client is disconnected."""
    threads: Annotated[int | None, option("N")] = None
    """Threads for the network; default: all cores but one."""
    allow_absent: bool = False
    """Accept requests without a required sensor; default: refuse them."""
    trust_sensors: bool = False
    """Do not compare first observations with the training data (units, sizes, colours, cameras)."""
    seed: int = 0
    """Random seed of every client's first episode."""

    def __post_init__(self) -> None:
        for entry in self.map:
            if "=" not in entry or not entry.partition("=")[0]:
                raise PrismError(f"--map {entry}: write KEY=SENSOR, or KEY= to ignore a key")
        check_numbers(self, "--", {"(0, inf)": "max_message_mb"})

    def run(self) -> None:
        import asyncio

        for package in ("websockets", "msgpack"):
            need(package, "serve", "prism serve")
        asyncio.run(_serve(self._server()))

    def _server(self) -> PolicyServer:
        from prism.experiments.run_folder import Run, changed
        from prism.inference.backends import backend_device, check_backend
        from prism.server.policy_server import PolicyServer, ServerConfig

        check_backend(self.backend)
        config = ServerConfig(
            host=self.host,
            port=self.port,
            api_key=read_key(self.api_key_file),
            max_clients=self.max_clients,
            max_message=None if self.max_message_mb is None else int(self.max_message_mb * 2**20),
            rate=self.rate,
            idle_timeout=self.idle_timeout,
            threads=max(1, (os.cpu_count() or 2) - 1) if self.threads is None else self.threads,
            seed=self.seed,
            allow_absent=self.allow_absent,
            trust_sensors=self.trust_sensors,
            names=tuple(name.lower() for name in self.name),
            rename={key: name for key, _, name in (entry.partition("=") for entry in self.map)},
        )
        if not (config.is_local or config.api_key or self.no_key):
            raise PrismError(
                f"--host {self.host} opens the server to its network: give it a key with --api-key-file FILE, or say "
                "--no-key if anyone there may send requests and watch"
            )
        run = Run(self.run_folder)
        settings = changed(run.settings, self.candidates, self.selection, set=self.set)
        device = backend_device(self.device, self.backend)
        known: Any = {"threads": config.threads or 1, "action_kind": self.action_kind}
        policy = run.policy(device, backend=self.backend, **known)
        return PolicyServer(policy, settings, config, run.name)


def read_key(file: Path | None) -> str | None:
    """The key in a file, or in PRISM_API_KEY; None where there is neither."""
    if file is None:
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        source = f"--api-key-file {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PrismError(f"{source} cannot be read ({error})") from None
    if not key or not key.isascii() or any(letter.isspace() for letter in key):
        raise PrismError(f"{source}: the API key must be one ASCII word")
    return key


async def _serve(server: PolicyServer) -> None:
    import asyncio
    import signal

    from prism.io.terminal import TerminalLost, drop_lost_outputs, on_hangup

    stop, lost = asyncio.Event(), list[bool]()
    loop = asyncio.get_running_loop()

    def hang_up() -> None:
        lost.append(True)
        drop_lost_outputs()
        loop.call_soon_threadsafe(end)

    def end() -> None:
        stop.set()
        for name in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C does not wait
            loop.remove_signal_handler(name)

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    on_hangup(hang_up)
    with _log_to_stderr():
        await server.run(stop, lambda: _announce(server))
    requests = sum(server.metrics.requests.values())
    print(f"stopped after {requests} requests of {server.metrics.connections['accepted']} clients")
    if lost:
        raise TerminalLost


def _announce(server: PolicyServer) -> None:
    from prism_client import ActionKind
    from rich.console import Console
    from rich.table import Table

    spec, config = server.policy.spec, server.config
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "localhost") else config.host
    host = f"[{host}]" if ":" in host else host
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{server.name}[/bold] at [bold]ws://{host}:{server.port}[/bold]")
    console.print(f"live page: http://{host}:{server.port}/   (also /healthz, /metrics)")
    access = "an API key" if config.api_key else "no key"
    reach = "this computer only" if config.is_local else f"every computer that reaches {config.host}"
    console.print(f"open to: {reach}, with {access}", markup=False)
    if not config.is_local and not config.api_key:
        console.print("[yellow]--no-key: anyone on the network can send requests and watch[/yellow]")
    table = Table(title=None, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("sensor", "kind", "shape", "type", "may be absent"):
        table.add_column(column)
    needs = server.metadata()["needs"]
    for sensor in spec.sensors:
        shape = " x ".join(map(str, sensor.shape))
        table.add_row(sensor.name, sensor.kind, shape, sensor.dtype.name, "no" if sensor.name in needs else "yes")
    console.print(table)
    if needs:
        console.print(
            f"[yellow]required: {', '.join(needs)}. They were never missing in training, or the held-out error rises "
            "without them: prism-client stops the robot. --set policy.encoder.dropout=0.05 trains for absence.[/yellow]"
        )
    selection = server.controller.selection
    kind = spec.action.kind
    if kind is None:
        console.print(
            "[yellow]unknown kind of action: poses, or changes of a pose? prism-client needs it to hold the robot "
            "still; pass --action-kind[/yellow]"
        )
    motion = ", ".join(map(str, selection.motion(spec.action_dim)))
    moving = "" if kind is ActionKind.ABSOLUTE else f", motion: {motion}"
    console.print(
        f"replies with {spec.pred_horizon} actions of {spec.action_dim} numbers ({kind or 'unknown kind'}{moving}) at "
        f"{spec.fps:g} a second; execute {server.controller.exec_horizon}, then ask again. Ctrl-C ends the server."
    )


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    import logging
    import sys

    from prism.server.sessions import WHO

    class Line(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            line = printable(super().format(record), keep="\n\t")
            who = WHO.get()
            return line if who == "-" or who in line else f"{line} [{who}]"

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Line("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("prism")
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
