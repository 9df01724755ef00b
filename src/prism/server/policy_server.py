"""The policy server: WebSocket + msgpack as openpi speaks it, one port for robots, page, health and metrics.

    robot  -> GET /         upgrade; the server sends its metadata, then one reply for each request
    viewer -> GET /live     upgrade; snapshots for the live page
    GET /                   the live page          GET /healthz  "OK"          GET /metrics  Prometheus text

The network loop only moves bytes: observations are checked, sampled and answered on the thread of `batching`. An
error is one line of text to its client, which stays connected unless its frames make no sense at all; then it is
closed with 1011. What goes wrong inside is "internal error" to the client and a traceback in the log alone.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prism_client import PolicyInfo, wire
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

import prism
from prism.errors import PrismError, printable, reason
from prism.inference.about import about_policy
from prism.inference.backends import backend_of
from prism.inference.chooser import ControllerConfig, action_scale, check_controller
from prism.inference.tokens import Tokens, warm_up
from prism.policy import Policy
from prism.sensors import SensorSpec
from prism.server.batching import Batcher, Job
from prism.server.gate import Gate, GuardedConnection, address_of
from prism.server.live import MESSAGE, VIEWERS, Live, asset, response
from prism.server.prometheus import Metrics
from prism.server.sessions import NEWER, WHO, Reader, RequestError, Session

INTERNAL_ERROR = 1011
POLICY_VIOLATION = 1008
MESSAGE_TOO_BIG = 1009
_GOOD_BYES = (1000, 1001, 1005)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LATENCIES = 1000  # latest ones, for the live page
_HANDSHAKE = 10.0  # seconds
_BACKLOG = 32  # connections that are accepted in one go
_FRAMES = 5000.0  # a second, of a client that may send as many requests as it likes
MAX_KEY = 256  # letters: what is longer is not even compared

logger = logging.getLogger("prism.server")


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"  # only this computer; 0.0.0.0: every computer that can reach it
    port: int = 8000  # 0: a free one
    api_key: str | None = field(default=None, repr=False)
    max_clients: int = 128
    max_message: int | None = None  # bytes; None: four full observations
    rate: float = 200.0  # requests a second of one client; faster ones wait. 0: no limit
    max_errors: int = 20  # in a row, then the client is closed
    idle_timeout: float = 300.0  # seconds
    write_timeout: float = 10.0
    threads: int | None = None  # of torch; None: as torch chooses
    seed: int = 0
    rename: Mapping[str, str] = field(default_factory=dict)  # key of the clients -> sensor
    allow_absent: bool = False  # plans also without a sensor that the policy requires
    trust_sensors: bool = False  # first observations are not compared with the training data
    names: tuple[str, ...] = ()  # that this server has on its network, for the pages of browsers

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise PrismError(f"--port {self.port} is not a port: use 1 to 65535, or 0 for a free one")
        for name in ("max_clients", "max_errors", "max_message", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PrismError(f"{name} = {value} is out of range: use at least 1")
        for name in ("idle_timeout", "write_timeout"):
            if not getattr(self, name) > 0:
                raise PrismError(f"{name} = {getattr(self, name)} is out of range: use seconds above 0")
        if not 0 <= self.rate < math.inf:
            raise PrismError(f"rate = {self.rate} is out of range: use requests a second, or 0 for no limit")
        if self.api_key is not None and not self.api_key:
            raise PrismError("the API key is empty: put a key into its file or variable, or serve without one")
        if self.api_key is not None and len(self.api_key) > MAX_KEY:
            raise PrismError(f"the API key has {len(self.api_key)} letters: use at most {MAX_KEY}")

    @property
    def is_local(self) -> bool:
        return self.host in _LOOPBACK or self.host.startswith("127.")


def message_limit(sensors: tuple[SensorSpec, ...]) -> int:
    """Bytes that any honest request stays below: four observations, each number as a float64."""
    sizes = [8 if spec.dtype.kind == "f" else 1 for spec in sensors]
    total = sum(size * math.prod(spec.shape) for size, spec in zip(sizes, sensors, strict=True))
    return max(256 * 1024, 4 * total + 64 * 1024)


class RateLimit:
    """A bucket of one second's worth of requests: `delay` is how long the next one has to wait."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = max(1.0, rate)
        self._last = time.monotonic()

    def delay(self) -> float:
        if not self._rate:
            return 0.0
        now = time.monotonic()
        self._tokens = min(max(1.0, self._rate), self._tokens + (now - self._last) * self._rate) - 1.0
        self._last = now
        return max(0.0, -self._tokens / self._rate)


class PolicyServer:
    """Serves one policy to many robots. `run` inside an event loop; `port` once it has started."""

    def __init__(self, policy: Policy, controller: ControllerConfig, config: ServerConfig, name: str = "") -> None:
        if controller.warm_start:  # plans are sampled in batches, each from noise
            raise PrismError("controller.warm_start is not served: use --set warm_start=false")
        self.policy = policy.eval()
        self.backend = backend_of(policy)
        self.config = config
        self.controller = controller
        self.name = name or policy.spec.method
        self.metrics = Metrics()
        self.sessions: dict[int, Session] = {}
        self.latencies: deque[float] = deque(maxlen=_LATENCIES)  # seconds, of requests for a plan
        self.port = config.port
        self.limit = config.max_message or message_limit(policy.spec.sensors)
        self._reader = Reader(policy.spec.sensors, policy.spec.action_dim, config.rename)
        self.scale = action_scale(policy)
        self._number = 0
        self._batcher: Batcher | None = None
        self._live = Live(self)
        self.gate = Gate()
        self._about = self._warm_up()

    def _warm_up(self) -> PolicyInfo:
        """The first pass allocates; it also shows that the controller's configuration fits the policy."""
        check_controller(self.controller, self.policy.spec)
        if self.backend is not None:
            warm_up(self.backend, self.controller.candidates)
        return about_policy(self.policy, self.controller, self.scale)

    def metadata(self) -> dict[str, Any]:
        head = {"server": "prism", "prism_version": prism.__version__, "policy": self.name}
        return {**self._about.to_wire(), **head, "max_message": self.limit, "knows": list(NEWER)}

    async def run(self, stop: asyncio.Event, started: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is set; then every connection is closed with 1001 and the worker ends."""
        config = self.config
        self._batcher = Batcher(self.policy, self.backend, config.threads, self.metrics)
        quiet = logging.getLogger("prism.server.network")
        quiet.setLevel(logging.WARNING)
        quiet.addFilter(_one_line)
        try:
            async with serve(
                self._handle,
                config.host,
                config.port,
                compression=None,
                process_request=self._http,
                server_header=None,
                open_timeout=_HANDSHAKE,
                close_timeout=2.0,
                max_size=self.limit,
                max_queue=4,
                logger=quiet,
                create_connection=partial(GuardedConnection, gate=self.gate),  # type: ignore[arg-type]
                backlog=_BACKLOG,
            ) as server:
                self.port = next(iter(server.sockets)).getsockname()[1]
                if started is not None:
                    started()
                await stop.wait()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PrismError(f"port {config.port} is in use: choose another with --port, or 0 for any") from None
            if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES) or error.errno is None or error.errno < 0:
                raise PrismError(f"cannot listen on {config.host}:{config.port} ({error.strerror or error})") from None
            raise
        finally:
            quiet.removeFilter(_one_line)
            await asyncio.to_thread(self._batcher.close)

    # HTTP

    def _http(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """None lets the WebSocket handshake go on; anything else is the answer."""
        path = urlsplit(request.path).path
        headers = request.headers
        if "websocket" not in headers.get("Upgrade", "").lower():
            return self._page(path, request)
        if not self._same_origin(request):
            return self._refuse(connection, HTTPStatus.FORBIDDEN, "origin", "pages of other sites may not connect")
        if path == "/live":  # asks for the key in its first message: a browser cannot send the header
            if self.metrics.viewers >= VIEWERS:
                return self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE, "full", "too many viewers")
            connection.protocol.max_message_size = MESSAGE
            return None
        if not self.is_authorized(headers.get("Authorization", "")):
            return self._refuse(
                connection, HTTPStatus.UNAUTHORIZED, "unauthorized", "this server needs 'Authorization: Api-Key KEY'"
            )
        if self.metrics.clients >= self.config.max_clients:
            return self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE, "full", "too many clients")
        assert isinstance(connection, GuardedConnection)
        connection.welcome(100 + 4 * self.config.rate if self.config.rate else _FRAMES)
        return None

    def _page(self, path: str, request: HttpRequest) -> Response:
        if path == "/healthz":
            return response(HTTPStatus.OK, "OK\n")
        if not self._is_own_name(request):
            return response(HTTPStatus.FORBIDDEN, "this is not a name of this server: use its address, or --name\n")
        if path == "/metrics":
            if not self.is_authorized(request.headers.get("Authorization", "")):
                return response(HTTPStatus.UNAUTHORIZED, "metrics need 'Authorization: Api-Key KEY'\n")
            return response(HTTPStatus.OK, self.metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
        return asset(path) or response(HTTPStatus.NOT_FOUND, "not found\n")

    def _refuse(self, connection: ServerConnection, status: HTTPStatus, result: str, text: str) -> Response:
        self.metrics.connections[result] += 1
        logger.warning("%s refused: %s", address_of(connection), text)
        return response(status, text + "\n")

    def is_authorized(self, header: str) -> bool:
        """Constant time, whatever the key's first wrong letter is."""
        if self.config.api_key is None:
            return True
        if len(header) > MAX_KEY + 8:
            return False
        return hmac.compare_digest(header.encode(errors="replace"), f"Api-Key {self.config.api_key}".encode())

    def _same_origin(self, request: HttpRequest) -> bool:
        """Browsers name the page that opens a WebSocket; robots send no origin. A foreign page must not look in."""
        origin = request.headers.get("Origin")
        if origin is None:
            return True
        try:
            there = urlsplit(origin).netloc
        except ValueError:
            return False
        return request.headers.get("Host", "") == there and self._is_own_name(request)

    def _is_own_name(self, request: HttpRequest) -> bool:
        """Whether the browser was sent here by an address or a known name: any name of a stranger's can be made to
        resolve to this computer, and then his page is of the same origin. With a key that gains him nothing."""
        try:
            name = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
            if name in _LOOPBACK:
                return True
            if self.config.is_local:
                return False
            if self.config.api_key is not None or name in {self.config.host, *self.config.names}:
                return True
            ipaddress.ip_address(name)
        except (ValueError, LookupError):  # no address; no Host, or two
            return False
        return True

    # Connections

    async def _handle(self, connection: ServerConnection) -> None:
        request = connection.request
        assert request is not None
        assert isinstance(connection, GuardedConnection)
        if urlsplit(request.path).path == "/live":
            await self._live.serve(connection)
            return
        if self.metrics.clients >= self.config.max_clients:  # several shook hands at once
            await connection.close(1013, "too many clients")
            return
        self.metrics.connections["accepted"] += 1
        self.metrics.clients += 1
        self._number += 1
        who = f"client {self._number} ({address_of(connection)})"
        WHO.set(who)
        tokens = None if self.backend is None else Tokens(self.backend)
        strict = self.config.allow_absent, self.config.trust_sensors
        session = Session(
            self._number, who, self.policy, self.controller, self.scale, self.config.seed, tokens, *strict
        )
        self.sessions[session.number] = session
        logger.info("%s connected", who)
        fault = False  # the client's, or the server's
        try:
            await self._talk(connection, session)
            reason = ""
        except ConnectionClosed as closed:
            reason = _closed(closed)
            fault = closed.sent is not None and not closed.rcvd_then_sent and closed.sent.code not in _GOOD_BYES
            if closed.sent is not None and closed.sent.code == MESSAGE_TOO_BIG:
                self.metrics.errors["message"] += 1
                specs = self.policy.spec.sensors
                takes = ", ".join(f"{s.name} {' x '.join(map(str, s.shape))} {s.dtype}" for s in specs)
                reason += f"; it may have {self.limit} bytes, and the policy needs {takes[:200]}: send it as that, or "
                reason += "start the server with a larger --max-message-mb"
        except TimeoutError:
            reason, fault = "it did not read its replies", True
            self.metrics.errors["slow_reader"] += 1
            if not connection.transport.is_closing():
                connection.transport.abort()
        finally:
            self.metrics.clients -= 1
            del self.sessions[session.number]
        level = logging.WARNING if fault else logging.INFO
        logger.log(level, "%s left after %d requests%s", who, session.requests, f": {reason}" if reason else "")

    async def _talk(self, connection: ServerConnection, session: Session) -> None:
        await self._send(connection, wire.pack(self.metadata()))
        limit = RateLimit(self.config.rate)
        previous: float | None = None
        errors = 0
        throttled = False
        while True:
            try:
                async with asyncio.timeout(self.config.idle_timeout):
                    frame = await connection.recv()
            except TimeoutError:
                self.metrics.errors["idle"] += 1
                logger.warning("%s was silent for %g s", session.who, self.config.idle_timeout)
                await connection.close(1001, "idle")
                return
            if delay := limit.delay():
                self.metrics.throttled += 1
                if not throttled:
                    throttled = True
                    logger.warning(
                        "%s sends more than %g requests a second: they are delayed", session.who, self.config.rate
                    )
                await asyncio.sleep(delay)
            start = time.perf_counter()
            try:
                reply, is_plan = await self._answer(session, frame, start, previous)
            except RequestError as error:
                errors += 1
                await self._complain(connection, session, "observation", str(error))
                if errors >= self.config.max_errors:
                    await connection.close(POLICY_VIOLATION, f"{errors} errors in a row")
                    return
            except wire.WireError as error:
                await self._complain(connection, session, "frame", str(error))
                await connection.close(INTERNAL_ERROR, "bad frame")
                return
            except Exception:  # logged with its traceback where it happened
                await self._complain(
                    connection, session, "internal", "internal error: the server's log has the details"
                )
                await connection.close(INTERNAL_ERROR, "internal error")
                return
            else:
                errors = 0
                await self._send(connection, reply)
                seconds = time.perf_counter() - start
                previous = seconds * 1e3
                self.metrics.latency.add(seconds)
                if is_plan:  # the others take next to no time: they would hide it
                    self.latencies.append(seconds)

    async def _answer(
        self, session: Session, frame: str | bytes, start: float, previous: float | None
    ) -> tuple[bytes, bool]:
        if isinstance(frame, str):
            raise wire.WireError("this is text: requests are binary msgpack frames")
        try:
            request = self._reader.read(wire.unpack(frame))
        except (PrismError, wire.WireError):
            raise
        except Exception:
            logger.exception("%s: a request could not be read", session.who)
            raise
        assert self._batcher is not None
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._batcher.submit(Job(session, request, future, start, previous))
        reply = await future
        self.metrics.requests["plan" if request.plan else "observe"] += 1
        self.metrics.faults.update(session.faults)
        return reply, request.plan

    async def _complain(self, connection: ServerConnection, session: Session, kind: str, text: str) -> None:
        self.metrics.errors[kind] += 1
        text = printable(" ".join(text.split()))[:300]
        logger.warning("%s: %s", session.who, text)
        await self._send(connection, text)

    async def _send(self, connection: ServerConnection, data: str | bytes) -> None:
        async with asyncio.timeout(self.config.write_timeout):
            await connection.send(data)


def _closed(closed: ConnectionClosed) -> str:
    """Why, in words; empty after an orderly good-bye."""
    frame = closed.sent if closed.sent is not None and not closed.rcvd_then_sent else closed.rcvd
    if frame is None:
        return "the connection broke"
    if frame.code in _GOOD_BYES:
        return ""
    if frame.code == MESSAGE_TOO_BIG:
        return f"its message was too large ({frame.reason})" if frame.reason else "its message was too large"
    return f"closed with {frame.code} {frame.reason}".strip()


def _one_line(record: logging.LogRecord) -> bool:
    """The library logs every odd handshake with a traceback: keep what happened, in a line."""
    if record.exc_info and record.exc_info[1] is not None:
        error: BaseException = record.exc_info[1]
        while error.__cause__ is not None:
            error = error.__cause__
        record.msg = f"{record.getMessage()}: {type(error).__name__}: {reason(error)}"
        record.args, record.exc_info, record.exc_text = (), None, None
    return True
