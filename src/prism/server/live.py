"""The live page: its files, and snapshots, ten a second, made away from the control path.

The worker leaves an immutable `View` behind after each request; a snapshot reads the latest one. It is made on a
thread of its own, only while there are viewers. A viewer whose last snapshot is still on its way gets no new one, and
is disconnected after `write_timeout` seconds.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import json
import logging
import time
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response

from prism.data.inspect import as_picture
from prism.evaluation.metrics import jerks
from prism.sensors import SensorSpec, decode_text
from prism.server.gate import GuardedConnection, address_of
from prism.server.sessions import Array, Session, View

if TYPE_CHECKING:
    from prism.server.policy_server import PolicyServer

PERIOD = 0.1  # seconds
_PICTURE = 320  # longer side of a camera's picture in pixels
_BINS = 40
_CLIENTS = 200  # listed at most
_WAVE = 240  # points of a sound
VIEWERS = 8  # at once
MESSAGE = 1024  # bytes of a viewer's message: a key or a number
_FRAMES = 20.0  # a second
_UNLOCK = 5.0  # seconds

_ASSETS = {
    "/": ("live.html", "text/html; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, and no other page may frame it: the page shows cameras.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'"
)

logger = logging.getLogger("prism.server")


class Viewer:
    def __init__(self, connection: GuardedConnection) -> None:
        self.connection = connection
        self.number: int | None = None  # which client to show; None: the one that has been here longest
        self.sending: asyncio.Task[None] | None = None


class Live:
    """The viewers of one server. One thread makes their snapshots; it rests without viewers."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._pictures: dict[tuple[int, str], tuple[Array, str]] = {}  # the latest of each camera, encoded
        self._rate = (time.monotonic(), 0, 0.0)

    async def serve(self, connection: GuardedConnection) -> None:
        """Until the page is closed. Its messages: {"key": ...} first where a key is needed, {"client": number}."""
        metrics = self._server.metrics
        try:
            if self._locked and not await self._unlock(connection):
                return
        except ConnectionClosed:
            return
        if metrics.viewers >= VIEWERS:  # those without a key yet take no viewer's place
            await connection.close(1013, "too many viewers")
            return
        connection.welcome(_FRAMES)
        metrics.viewers += 1
        viewer = Viewer(connection)
        try:
            await self._send(connection, json.dumps({"hello": self._server.metadata()}))
            self._viewers.add(viewer)
            if self._task is None:
                self._task = asyncio.create_task(self._beat())
            async for message in connection:
                viewer.number = _client_number(message)
        except ConnectionClosed:
            pass
        finally:
            self._viewers.discard(viewer)
            metrics.viewers -= 1
            if viewer.sending is not None:
                viewer.sending.cancel()

    @property
    def _locked(self) -> bool:
        return self._server.config.api_key is not None

    async def _unlock(self, connection: GuardedConnection) -> bool:
        await self._send(connection, '{"locked": true}')
        try:
            async with asyncio.timeout(_UNLOCK):  # the page has it already: it connects once the key is typed
                message = await connection.recv()
        except TimeoutError:
            await connection.close(1008, "no key")
            return False
        try:
            key = json.loads(message)["key"]
        except (ValueError, TypeError, KeyError, RecursionError):
            key = None
        if isinstance(key, str) and self._server.is_authorized(f"Api-Key {key}"):
            return True
        self._server.metrics.connections["unauthorized"] += 1
        logger.warning("%s refused: a viewer with a wrong key", address_of(connection))
        await connection.close(1008, "wrong key")
        return False

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prism-live") as pool:
            try:
                while self._viewers:
                    start = loop.time()
                    wanted = {viewer.number for viewer in self._viewers}
                    shared = self._shared()
                    sessions = {number: self._choose(number) for number in wanted}
                    shown = {session.number for session in sessions.values() if session is not None}
                    for known in [key for key in self._pictures if key[0] not in shown]:
                        del self._pictures[known]  # of robots that left, or without a viewer
                    made = {
                        number: await loop.run_in_executor(pool, self._snapshot, shared, session)
                        for number, session in sessions.items()
                    }
                    for viewer in self._viewers:
                        if (text := made.get(viewer.number)) and (viewer.sending is None or viewer.sending.done()):
                            viewer.sending = asyncio.create_task(self._send(viewer.connection, text))
                    await asyncio.sleep(max(0.01, PERIOD - (loop.time() - start)))
            except Exception:
                logger.exception("the live page failed")
            finally:
                self._task = None
                self._pictures.clear()

    async def _send(self, connection: GuardedConnection, text: str) -> None:
        """A viewer that does not read (a phone that was put away) is dropped: it would hold up the server's end."""
        try:
            async with asyncio.timeout(self._server.config.write_timeout):
                await connection.send(text)
        except ConnectionClosed:
            pass
        except TimeoutError:
            self._server.metrics.errors["slow_reader"] += 1
            logger.warning("%s left: a viewer that did not read", address_of(connection))
            if not connection.transport.is_closing():
                connection.transport.abort()

    def _choose(self, number: int | None) -> Session | None:
        """The session with this number; else the one that has been here longest: it does not jump about."""
        sessions = self._server.sessions
        if number in sessions:
            return sessions[number]
        return next((session for session in sessions.values() if session.view is not None), None)

    def _shared(self) -> dict[str, Any]:
        """Figures of all clients together; computed on the loop's thread."""
        server, metrics = self._server, self._server.metrics
        now, requests = time.monotonic(), sum(metrics.requests.values())
        then, before, rate = self._rate
        if now - then > 1.0:
            rate = (requests - before) / (now - then)
            self._rate = (now, requests, rate)
        return {
            "up": now - metrics.started,
            "requests": requests,
            "rate": rate,
            "errors": sum(metrics.errors.values()),
            "batch": metrics.batch_size.total / max(1, metrics.batch_size.count),
            "clients": [_row(session) for session in list(server.sessions.values())[:_CLIENTS]],
            "connected": metrics.clients,
            "latencies": list(server.latencies),
        }

    def _snapshot(self, shared: Mapping[str, Any], session: Session | None) -> str:
        """JSON; on the live thread."""
        data = {**shared, "latency": latency_histogram(shared["latencies"])}
        del data["latencies"]
        view = None if session is None else session.view
        if session is not None and view is not None:
            data["view"] = self._describe(session, view)
        return json.dumps(data, separators=(",", ":"))

    def _describe(self, session: Session, view: View) -> dict[str, Any]:
        spec = self._server.policy.spec
        trace = np.asarray(session.trace(), dtype=np.float64).reshape(-1, spec.action_dim)
        described: dict[str, Any] = {
            "number": session.number,
            "who": session.who,
            "requests": session.requests,
            "episode": session.episodes,
            "steps": session.steps,
            "trace": _rounded(trace),
            "jerk": _rounded(jerks(trace, self._server.scale)),
            "sensors": [self._sensor(session.number, view, sensor) for sensor in spec.sensors],
        }
        if (plan := view.plan) is not None:
            described["plan"] = {
                "step": plan.info.step,
                "candidates": _rounded(plan.candidates),
                "modes": plan.modes.tolist(),
                "index": plan.info.index,
                "actions": _rounded(plan.actions),
                "remainder": None if plan.remainder is None else _rounded(plan.remainder),
                "age_ms": (time.monotonic() - view.planned_at) * 1e3,
                "spread": plan.info.spread,
                "count": plan.info.modes,
                "switch": plan.info.mode_switch,
                "latency_ms": plan.info.latency_ms,
            }
        return described

    def _sensor(self, number: int, view: View, spec: SensorSpec) -> dict[str, Any]:
        value = view.observation.get(spec.name)
        row: dict[str, Any] = {
            "name": spec.name,
            "kind": spec.kind,
            "shape": list(spec.shape),
            "fault": view.faults.get(spec.name),
            "count": view.counts.get(spec.name, 0),
        }
        if value is None:
            return row
        if spec.is_image:
            row["picture"] = self._picture(number, spec, value)
        elif spec.kind == "text":
            row["text"] = decode_text(value)
        else:
            values = np.asarray(value, dtype=np.float64)
            row["values"] = _rounded(values[:: max(1, len(values) // _WAVE)])
        return row

    def _picture(self, number: int, spec: SensorSpec, value: Array) -> str:
        known = self._pictures.get((number, spec.name))
        if known is None or known[0] is not value:
            known = value, encode_picture(spec, value)
            self._pictures[number, spec.name] = known
        return known[1]


def _client_number(message: str | bytes) -> int | None:
    try:
        number = json.loads(message).get("client")
    except (ValueError, AttributeError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _row(session: Session) -> dict[str, Any]:
    view = session.view
    absent = sorted(view.faults) if view is not None else []
    return {"number": session.number, "who": session.who, "requests": session.requests, "absent": absent}


def _rounded(values: NDArray[Any]) -> Any:
    """Nested lists with six digits; NaN becomes null for JSON."""
    array = np.nan_to_num(np.asarray(values, dtype=np.float64), posinf=0.0, neginf=0.0)
    if array.size == 0:
        return []
    digits = 5 - int(np.floor(np.log10(max(float(np.abs(array).max()), 1e-12))))
    return np.round(array, min(12, max(0, digits))).tolist()


def latency_histogram(seconds: Iterable[float]) -> dict[str, Any]:
    """Counts in equal bins from 0 to a little above the 99th percentile; the last one holds what is beyond."""
    values = np.asarray(list(seconds), dtype=np.float64) * 1e3
    if not len(values):
        return {"counts": [], "high": 1.0, "p50": 0.0, "p99": 0.0, "last": 0.0}
    p50, p99 = (float(np.quantile(values, q)) for q in (0.5, 0.99))
    high = max(1.25 * p99, 1.0)
    counts, _ = np.histogram(np.minimum(values, high * 0.9999), bins=_BINS, range=(0.0, high))
    return {"counts": counts.tolist(), "high": high, "p50": p50, "p99": p99, "last": float(values[-1])}


def encode_picture(spec: SensorSpec, value: Array) -> str:
    """A camera as a data URL (JPEG)."""
    image = Image.fromarray(np.ascontiguousarray(as_picture(spec, value), dtype=np.uint8))
    image.thumbnail((_PICTURE, _PICTURE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# The files of the page, and small text answers, by plain HTTP.


def response(status: HTTPStatus, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    data = body.encode() if isinstance(body, str) else body
    headers = Headers()
    headers["Content-Type"] = kind
    headers["Content-Length"] = str(len(data))
    headers["Connection"] = "close"
    headers["Cache-Control"] = "no-store"
    headers["X-Content-Type-Options"] = "nosniff"
    if kind.startswith("text/html"):
        headers["Content-Security-Policy"] = _POLICY
    return Response(status.value, status.phrase, headers, data)


def asset(path: str) -> Response | None:
    if path == "/favicon.ico":
        return response(HTTPStatus.NO_CONTENT, b"")
    return response(HTTPStatus.OK, _read(_ASSETS[path][0]), _ASSETS[path][1]) if path in _ASSETS else None


@cache
def _read(name: str) -> bytes:
    return (files("prism") / "assets" / name).read_bytes()
