"""Many robots on one policy server, an open live page, and frames that no robot would send.

Try:
    python -m research server --clients 64 --seconds 60 --viewer --json server_load.json
    python -m research server --clients 8 --seconds 10 --fuzz 10000
    python -m research server --clients 4 --seconds 5 --flood 60 --json server_flood.json

The keys of `prism bench server` (docs/howto/serving.md), and
    viewer_*   a quarter of the robots, blocks of a few seconds without and with a live page
    fuzz_*     random and mutated frames on eight connections, four robots served meanwhile
    flood_KIND_*  a robot at 30 Hz beside a stranger in a process of his own; KIND is
               nothing (the machine alone), connections (10,000 that speak nonsense, or not at all), pings and
               live_pings (of one who reads no pong), keys (of 3.7 MB) or frames (as many as there is room for);
               `late` are steps for which no plan had come, `steps` all of them, `p50_ms`, `p99_ms` a plan's time,
               `growth_mb` the server's memory
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from prism.bench import server_load
from prism.bench.server_load import Load, drive, robot, scrape
from prism.cli.bench import Server
from prism.errors import PrismError

_VIEWER_BLOCKS, _BLOCK_SECONDS = 8, 4.0


@dataclass(frozen=True, kw_only=True)
class Config(Server):
    fuzz: int = 0
    """Random and mutated frames to send afterwards, while four robots are served."""
    flood: float = 0.0
    """Seconds of each flood, beside a robot at 30 Hz."""
    viewer: bool = False
    """Also measure what an open live page costs the robots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuzz < 0:
            raise PrismError(f"--fuzz {self.fuzz} must be at least 0")
        if not 0 <= self.flood < 3600:
            raise PrismError(f"--flood {self.flood} must be seconds, below 3600")


def run(config: Config, console: Console) -> dict[str, Any]:
    async def more(port: int) -> dict[str, Any]:
        found = await viewer_blocks(config, port) if config.viewer else {}
        found |= await fuzz_keys(config, port) if config.fuzz else {}
        return found | (await flood_keys(config, port) if config.flood else {})

    result = server_load.run(config, console, more)
    if config.fuzz:
        result["fuzz_server_alive"] = result["server_alive"]
    result["settings"] |= {"fuzz": config.fuzz, "flood": config.flood}
    return result


show = server_load.show


@contextlib.asynccontextmanager
async def viewer(port: int) -> AsyncIterator[list[int]]:
    """A live page that reads everything; the sizes of its snapshots."""
    from websockets.asyncio.client import connect

    sizes: list[int] = []

    async def read(socket: Any) -> None:
        async for message in socket:
            sizes.append(len(message))  # noqa: PERF401  # seen while it grows

    async with connect(f"ws://127.0.0.1:{port}/live", compression=None, max_size=None) as socket:
        task = asyncio.create_task(read(socket))
        try:
            yield sizes
        finally:
            task.cancel()


async def viewer_blocks(config: Config, port: int) -> dict[str, Any]:
    """The same robots without and with a viewer, in turns."""
    clients = max(1, config.clients // 4)
    times: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
    sizes: list[int] = []
    for block in range(_VIEWER_BLOCKS):
        watched = block % 2 == 1
        if watched:
            async with viewer(port) as seen:
                load = await drive(port, clients, config.rate, _BLOCK_SECONDS, config.seed + block)
            sizes += seen
        else:
            load = await drive(port, clients, config.rate, _BLOCK_SECONDS, config.seed + block)
        if load.errors:
            raise PrismError(f"the server failed while it was watched: {load.first_error}")
        times[watched].append(1e3 * np.array(load.service))
    alone, watched_times = (np.concatenate(times[which]) for which in (False, True))
    seconds = _VIEWER_BLOCKS / 2 * _BLOCK_SECONDS
    return {
        "viewer_clients": clients,
        "viewer_p50_ms": float(np.median(watched_times)),
        "viewer_p50_ms_without": float(np.median(alone)),
        "viewer_p50_ratio": float(
            np.median([np.median(b) / np.median(a) for a, b in zip(times[False], times[True], strict=True)])
        ),
        "viewer_p99_ms": float(np.quantile(watched_times, 0.99)),
        "viewer_p99_ms_without": float(np.quantile(alone, 0.99)),
        "viewer_snapshots_per_s": len(sizes) / seconds,
        "viewer_snapshot_kb": float(np.mean(sizes)) / 1e3 if sizes else 0.0,
    }


async def fuzz_keys(config: Config, port: int) -> dict[str, Any]:
    """The frames, while four robots work; memory from a tenth of the way to the end."""
    done = asyncio.Event()
    others = Load()

    async def bystanders() -> None:
        rates = [robot(port, 10.0, 0.0, float("inf"), config.seed + i, others) for i in range(4)]
        tasks = [asyncio.create_task(rate) for rate in rates]
        await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # each closes its connection

    watching = asyncio.create_task(bystanders())
    first: FuzzReport = await fuzz(port, max(1, config.fuzz // 10), config.seed)
    early = scrape(port)["process_resident_memory_bytes"]
    rest = await fuzz(port, config.fuzz - first.frames, config.seed + 1)
    late = scrape(port)
    done.set()
    await watching
    return {
        "fuzz_frames": first.frames + rest.frames,
        "fuzz_plans": first.plans + rest.plans,
        "fuzz_refused": first.refused + rest.refused,
        "fuzz_closed": first.closed + rest.closed,
        "fuzz_hangs": first.hangs + rest.hangs,
        "fuzz_tracebacks": first.tracebacks + rest.tracebacks,
        "fuzz_internal_errors": int(late.get('prism_errors_total{kind="internal"}', 0)),
        "fuzz_memory_growth_mb": (late["process_resident_memory_bytes"] - early) / 1e6,
        "fuzz_others_requests": len(others.due),
        "fuzz_others_errors": others.errors,
        "fuzz_others_p99_ms": float(1e3 * np.quantile(others.service or [0.0], 0.99)),
    }


_CONNECTIONS = 8
_PATIENCE = 20.0  # seconds until a reply counts as missing


@dataclass
class FuzzReport:
    frames: int = 0
    plans: int = 0  # the damage did not matter: a proper reply
    refused: int = 0  # one line of text
    closed: int = 0  # by the server
    hangs: int = 0  # neither
    tracebacks: int = 0  # must never be seen


async def fuzz(port: int, frames: int, seed: int) -> FuzzReport:
    """`frames` frames over eight connections, each with its own random numbers; a closed connection is opened again."""
    report = FuzzReport()
    shares = [frames // _CONNECTIONS + (i < frames % _CONNECTIONS) for i in range(_CONNECTIONS)]
    await asyncio.gather(*(_attack(port, share, seed + 1000 * i, report) for i, share in enumerate(shares)))
    return report


async def _attack(port: int, frames: int, seed: int, report: FuzzReport) -> None:
    from prism_client import wire
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake

    rng = np.random.default_rng(seed)
    sent = 0
    while sent < frames:
        try:
            async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=60) as socket:
                async with asyncio.timeout(_PATIENCE):
                    first = await socket.recv()
                assert isinstance(first, bytes)
                sensors = wire.unpack(first)["sensors"]
                while sent < frames:
                    sent += 1
                    report.frames += 1
                    if rng.random() < 0.02:
                        await _raw(port, rng)
                        continue
                    await socket.send(damaged_frame(sensors, rng))
                    async with asyncio.timeout(_PATIENCE):
                        reply = await socket.recv()
                    if isinstance(reply, bytes):
                        report.plans += 1
                    else:
                        report.refused += 1
                        report.tracebacks += "Traceback" in reply or "File " in reply
        except TimeoutError:
            report.hangs += 1
        except (ConnectionClosed, AttributeError):  # Python 3.11: aborting a transport that is gone
            report.closed += 1
        except (InvalidHandshake, OSError):
            report.closed += 1
            await asyncio.sleep(0.05)


async def _raw(port: int, rng: np.random.Generator) -> None:
    """Below WebSocket: noise instead of a handshake, or a handshake and half a frame; then the line goes dead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    shake = (
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    with contextlib.suppress(OSError):
        if rng.random() < 0.5:
            writer.write(rng.bytes(int(rng.integers(1, 400))))
        else:
            half = b"\x82\xfe\x40\x00" + rng.bytes(40)  # promises 16 KiB
            writer.write(shake[: int(rng.integers(20, len(shake)))] if rng.random() < 0.3 else shake + half)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(64)
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            await writer.wait_closed()


def damaged_frame(sensors: list[dict[str, Any]], rng: np.random.Generator) -> bytes | str:
    """A frame to be refused, mostly: one of nine kinds."""
    import msgpack
    from prism_client import wire

    kind = int(rng.integers(9))
    if kind == 0:
        return rng.bytes(int(rng.integers(0, 2000)))
    if kind == 1:
        return "".join(map(chr, rng.integers(32, 0x2FF, size=int(rng.integers(0, 200)))))
    if kind == 2:
        data: bytes = msgpack.packb(_anything(rng, 0))
        return data
    step = _request(sensors, rng)
    if kind == 3:
        step = _wrong(step, rng)
        return wire.pack(step)
    if kind == 4:
        step[str(rng.choice(["reset", "seed", "executed", "plan", "ages", "prompt", "x" * 500]))] = _anything(rng, 2)
        try:
            odd: bytes = msgpack.packb(step, default=wire._pack_numpy)
        except (ValueError, OverflowError, TypeError):
            odd = b"\x80"
        return odd
    frame = bytearray(wire.pack(step))
    if kind == 5:
        return bytes(frame[: int(rng.integers(0, len(frame)))])
    if kind == 6:
        start, size = int(rng.integers(len(frame))), int(rng.integers(1, 64))
        return bytes(frame[:start] + frame[start : start + size] * int(rng.integers(2, 50)) + frame[start:])
    if kind == 7:  # headers that promise more than there is, one inside the other
        headers = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdc\x10\x00")
        return headers[int(rng.integers(len(headers)))] * int(rng.integers(1, 900))
    for _ in range(int(rng.integers(1, 12))):
        frame[int(rng.integers(len(frame)))] = int(rng.integers(256))
    return bytes(frame)


def _request(sensors: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    step: dict[str, Any] = {}
    for sensor in sensors:
        shape = tuple(sensor["shape"])
        step[sensor["name"]] = (
            rng.integers(0, 256, size=shape, dtype=np.uint8)
            if sensor["dtype"] == "uint8"
            else rng.standard_normal(shape).astype(np.float32)
        )
    return step


def _wrong(step: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A request with one sensor of another name, shape, type or size."""
    name = str(rng.choice(list(step)))
    value = step.pop(name)
    choice = int(rng.integers(8))
    if choice == 0:
        step[name[::-1]] = value
    elif choice == 1:
        step[name] = np.full(value.shape, np.nan, np.float32)
    elif choice == 2:
        step[name] = value.reshape(-1)[: max(1, value.size // 2)]
    elif choice == 3:
        step[name] = value.astype(np.float64) * 1e300
    elif choice == 4:
        step[name] = np.zeros((1 << 22,), np.uint8)  # larger than any message may be
    elif choice == 5:
        step[name] = [[1.0], [2.0, 3.0]]
    elif choice == 6:
        step[name] = ["a" * 200_000, *[""] * 4095]  # as an array of text: 3 GB
    else:
        step[name] = {"a": 1}
    return step


def _anything(rng: np.random.Generator, depth: int) -> Any:
    """A random value that msgpack can say."""
    choice = int(rng.integers(9 if depth < 4 else 6))
    if choice == 0:
        return int(rng.integers(-(2**62), 2**62))
    if choice == 1:
        return float(rng.standard_normal() * 10.0 ** int(rng.integers(-300, 300)))
    if choice == 2:
        return bool(rng.integers(2))
    if choice == 3:
        return None
    if choice == 4:
        return rng.bytes(int(rng.integers(0, 30)))
    if choice == 5:
        return "".join(map(chr, rng.integers(32, 0x2FF, size=int(rng.integers(0, 20)))))
    if choice == 6:
        return [_anything(rng, depth + 1) for _ in range(int(rng.integers(0, 6)))]
    if choice == 7:
        return {
            b"__ndarray__": True,
            b"data": rng.bytes(int(rng.integers(0, 40))),
            b"dtype": str(rng.choice(["<f4", "|O", "V8", "<c8", "<M8[s]", "O", "i4,(1000000,)f8", ">u2", "|b1"])),
            b"shape": [int(x) for x in rng.integers(-2, 2**40, size=int(rng.integers(0, 4)))],
        }
    return {str(i) * int(rng.integers(1, 5)): _anything(rng, depth + 1) for i in range(int(rng.integers(0, 6)))}


# Floods: one stranger, blocking sockets, a process of its own.

FLOODS = ("nothing", "connections", "pings", "live_pings", "keys", "frames")
_RATE = 30.0  # steps a second of the robot beside
_MOST = 10_000  # connections


async def flood_keys(config: Config, port: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in FLOODS:
        before = scrape(port)["process_resident_memory_bytes"]
        words = [sys.executable, "-m", "research.server", str(port), kind, str(config.flood)]
        stranger = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert stranger.stdout is not None
        try:
            await asyncio.to_thread(stranger.stdout.readline)  # it begins
            times, late, steps, most = await _beside(port, config.flood, config.seed)
        finally:
            stranger.terminate()
            said, _ = stranger.communicate()
        figures = {
            "late": late,
            "steps": steps,
            "p50_ms": float(np.median(times)),
            "p99_ms": float(np.quantile(times, 0.99)),
        }
        sent = json.loads(said.splitlines()[0]) if said.strip() else {}
        figures |= {
            "growth_mb": (most - before) / 1e6,
            "connections": sent.get("connections", 0),
            "mb_sent": sent.get("mb", 0.0),
        }
        found |= {f"flood_{kind}_{key}": value for key, value in figures.items()}
    return found


async def _beside(port: int, seconds: float, seed: int) -> tuple[list[float], int, int, float]:
    """A robot that asks for a plan at each half of the last one and goes on meanwhile: plan times in ms, steps without
    an action, steps, and the server's largest memory."""
    from prism_client import wire
    from websockets.asyncio.client import connect

    rng = np.random.default_rng(seed)
    times: list[float] = []
    late, most, until, waiting = 0, 0.0, 0, None
    async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=60) as socket:
        metadata = wire.unpack(server_load._binary(await socket.recv()))
        frame = wire.pack(server_load.observation(metadata["sensors"], rng))
        horizon = int(metadata["pred_horizon"])

        async def ask(step: int) -> int:
            sent = time.perf_counter()
            await socket.send(frame)
            server_load._binary(await socket.recv())
            times.append(1e3 * (time.perf_counter() - sent))
            return step + horizon

        until = await ask(0)
        start, count = time.perf_counter(), max(1, round(seconds * _RATE))
        for step in range(count):
            await asyncio.sleep(max(0.0, start + step / _RATE - time.perf_counter()))
            if waiting is not None and waiting.done():
                until, waiting = waiting.result(), None
            late += step >= until
            if waiting is None and step >= until - horizon // 2:
                waiting = asyncio.create_task(ask(step))
            if step % 30 == 0:
                memory = await asyncio.to_thread(_memory_of, port)
                most = max(most, memory)
        if waiting is not None:
            await waiting
    return times, late, count, most


def _memory_of(port: int) -> float:
    with contextlib.suppress(OSError):
        return scrape(port)["process_resident_memory_bytes"]
    return 0.0


def stranger(port: int, kind: str, seconds: float) -> None:
    """Until the time is over or it is ended; then prints how often it connected and how much it sent."""
    import random
    import signal
    import socket

    said = {"connections": 0, "mb": 0.0}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(json.dumps(said)) or 0))
    print("ready", flush=True)
    rng = random.Random(0)
    end = time.monotonic() + seconds
    path = "/live" if kind in ("live_pings", "keys") else "/"
    shake = (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    ping = b"\x89\xfd\0\0\0\0" + b"x" * 125
    text = b'{"key": "' + b"x" * 3_700_000 + b'"}'
    message = b"\x81\xff" + len(text).to_bytes(8, "big") + b"\0\0\0\0" + text
    content = {"pings": ping * 400, "live_pings": ping * 400, "keys": message, "frames": b"\x82\x81\0\0\0\0x" * 4000}
    held: list[socket.socket] = []
    while time.monotonic() < end and kind != "nothing" and said["connections"] < _MOST:
        line = socket.socket()
        line.settimeout(1.0)
        with contextlib.suppress(OSError):
            line.connect(("127.0.0.1", port))
            said["connections"] += 1
            if kind == "connections":
                choice = rng.randrange(4)
                line.sendall(
                    (shake, rng.randbytes(300), shake[: rng.randrange(len(shake))], shake + rng.randbytes(99))[choice]
                )
                held.append(line)  # and goes on holding some of them
                if len(held) > 100:
                    held.pop(0).close()
                continue
            line.sendall(shake)
            line.recv(100)
            while time.monotonic() < end:  # reads nothing more
                line.sendall(content[kind])
                said["mb"] += len(content[kind]) / 1e6
        line.close()
        time.sleep(0.001)
    while time.monotonic() < end:
        time.sleep(0.05)
    print(json.dumps(said))


if __name__ == "__main__":
    stranger(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
