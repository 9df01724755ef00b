"""A connection to a policy server: requests, replies, reconnecting."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import websockets.sync.client
from websockets import State
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from prism_client import wire
from prism_client.messages import RefusedError

logger = logging.getLogger("prism_client")


class ServerError(RefusedError):
    """The server refused the request, in one line. Do not retry it."""


class ConnectionLostError(ConnectionError):
    """No connection could be made within `retry_for` seconds."""


class Client:
    """Requests plans from a policy server; reconnects automatically. Use it from one thread; any thread may
    `close` it.

    client = Client("ws://robot-brain:8000")
    reply = client.infer({"proprio": q, "rgb_wrist": image})    # one time step of each sensor
    reply["actions"]                                            # (T, D): from this observation on

    The server keeps the history of observations of a connection. After a reconnect it starts anew; `connections`
    tells, and RemotePlanner sends the latest observations again.

    `retry_for`: seconds for which a lost connection is sought again, with growing pauses and a little chance in them,
    so that many robots do not come back in the same instant. `timeout`: seconds that a reply may take, and that sending
    may stand still. `trouble` says meanwhile why there is no connection.
    """

    def __init__(
        self,
        uri: str = "ws://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout: float = 10.0,
        retry_for: float = 30.0,
        first_pause: float = 0.1,
        longest_pause: float = 2.0,
    ) -> None:
        self.uri = uri if "://" in uri else f"ws://{uri}"
        self.connections = 0
        self.trouble = ""  # why there is no connection, while one is sought
        self._api_key = api_key
        self._timeout = timeout
        self._retry_for = retry_for
        self._pauses = (first_pause, longest_pause)
        self._socket: websockets.sync.client.ClientConnection | None = None
        self._sending = False
        self._stack = contextlib.ExitStack()  # holds the connection
        self._metadata: dict[str, Any] = {}
        self._reset: dict[str, Any] = {}
        self._closed = threading.Event()
        self.connect()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The server's metadata: sensors, action_dim, fps, obs_horizon, pred_horizon, exec_horizon."""
        return self._metadata

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        executed: int | None = None,
        plan: bool = True,
        ages: Mapping[str, float] | None = None,
        checked: bool = False,
        sent: Sequence[Any] | None = None,
        all_candidates: bool = False,
    ) -> dict[str, Any]:
        """The server's reply to one time step of each sensor; a sensor may be left out.

        `executed`: how many actions of the last plan were executed; default: the server's exec_horizon.
        `plan=False` adds the observation to the history and makes no plan. `ages`: seconds since each was measured.
        `checked`: the caller compares its readings with the metadata (first_look.py) and looks at the reply's `absent`
        itself, as Executor does; otherwise the server does both, and refuses.
        `sent`: the commands (D,) that the robot really got since the last request; default: the plan's actions.
        `all_candidates`: the reply holds those that were not chosen too, (K, T, D).
        """
        message: dict[str, Any] = {**observation, **self._reset}
        knows = self._metadata.get("knows") or ()  # newer keys, which older servers refuse
        if checked and "checked" in knows:
            message["checked"] = True
        if executed is not None:
            message["executed"] = int(executed)
        if not plan:
            message["plan"] = False
        if ages is not None:
            message["ages"] = dict(ages)
        if sent is not None and "sent" in knows:
            message["sent"] = np.array([np.asarray(one, np.float32) for one in sent], np.float32)
        if all_candidates and plan and "all_candidates" in knows:
            message["all_candidates"] = True
        frame = wire.pack(message)
        limit = self._metadata.get("max_message")
        if limit and len(frame) > limit:  # the server would close the connection
            raise ServerError(_too_large(len(frame), observation, self._metadata))
        reply = self._exchange(frame, observation)
        self._reset = {}
        for warning in reply.get("warnings", ()):
            logger.warning("%s: %s", self.uri, warning)
        return reply

    def reset(self, seed: int | None = None) -> None:
        """The next observation starts an episode; a seed repeats its random numbers."""
        self._reset = {"reset": True} if seed is None else {"reset": True, "seed": int(seed)}

    def connect(self) -> None:
        """Called by the constructor; afterwards only needed to use a closed client again."""
        self._closed.clear()
        self._reach()

    @property
    def is_closed(self) -> bool:
        """The connection is missing or lost."""
        connection = self._socket
        return connection is None or connection.state is not State.OPEN

    def ping(self) -> threading.Event:
        """From any thread: an event that is set when the server has answered. OSError: there is no connection."""
        connection = self._socket
        try:
            if connection is None:
                raise OSError("not connected")
            return connection.ping()
        except (ConnectionClosed, OSError) as error:
            raise OSError(f"{self.uri}: {_words(error)}") from error

    def close(self) -> None:
        """From any thread: a request on its way, or the search for a lost connection, ends with ConnectionLostError."""
        self._closed.set()
        self._drop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reach(self) -> None:
        """Returns at once while the connection stands."""
        if self._socket is not None:
            return
        end = time.monotonic() + self._retry_for
        pause = self._pauses[0]
        while True:
            self._check_open()
            try:
                self._open()
                self.trouble = ""
                return
            except InvalidURI as error:
                raise ServerError(f"{self.uri} is not a server address ({error.msg}): use ws://HOST:PORT") from error
            except (ConnectionClosed, InvalidHandshake, OSError) as error:  # TimeoutError is an OSError
                status = error.response.status_code if isinstance(error, InvalidStatus) else 503
                if 400 <= status < 500:
                    key = ": give the server's key, api_key='...' or --api-key-file FILE" if status == 401 else ""
                    raise ServerError(f"{self.uri}: {_words(error)}{key}") from error
                wait = pause * random.uniform(0.5, 1.5)
                if time.monotonic() + wait > end:
                    raise ConnectionLostError(
                        f"{self.uri}: {_words(error)}; tried for {self._retry_for:g} s: is prism serve running there?"
                    ) from error
                self.trouble = f"{self.uri}: {_words(error)}"
                logger.warning("%s; again in %.1f s", self.trouble, wait)
            self._closed.wait(wait)
            pause = min(2 * pause, self._pauses[1])

    def _check_open(self) -> None:
        if self._closed.is_set():
            self._drop()
            raise ConnectionLostError(f"{self.uri}: this client is closed")

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if self._sending and connection is not None:  # by another thread; a good-bye would wait behind it
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        self._stack.close()

    def _open(self) -> None:
        headers = {"Authorization": f"Api-Key {self._api_key}"} if self._api_key else None
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(
                websockets.sync.client.connect(
                    self.uri,
                    compression=None,
                    max_size=None,
                    additional_headers=headers,
                    open_timeout=self._timeout,
                    close_timeout=1.0,
                )
            )
            _limit_sending(connection.socket, self._timeout)
            first = connection.recv(timeout=self._timeout)
            if isinstance(first, str):
                raise ServerError(first)
            self._metadata = wire.unpack(first)
            self._stack = stack.pop_all()  # stays open
        self._socket = connection
        self.connections += 1
        self._check_open()  # closed meanwhile

    def _exchange(self, frame: bytes, observation: Mapping[str, Any]) -> dict[str, Any]:
        """One reply. A request that the network lost is sent once more on a new connection."""
        for last in (False, True):
            self._reach()
            connection = self._socket
            try:
                if connection is None:  # closed by another thread
                    raise OSError("closed")
                self._sending = True
                try:
                    connection.send(frame)
                finally:
                    self._sending = False
                reply = connection.recv(timeout=self._timeout)
            except (ConnectionClosed, OSError) as error:
                self._drop()
                self._check_open()
                if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code == 1009:
                    raise ServerError(_too_large(len(frame), observation, self._metadata)) from error
                if last:
                    raise ConnectionLostError(f"{self.uri}: {_words(error)}") from error
                self.trouble = f"{self.uri}: {_words(error)}"
                logger.warning("%s; connecting again", self.trouble)
                continue
            if isinstance(reply, str):
                raise ServerError(reply)
            return wire.unpack(reply)
        raise AssertionError  # the loop returns or raises


def _limit_sending(connected: socket.socket, seconds: float) -> None:
    """A network that takes no more data is an OSError after so long; the library itself would wait for ever."""
    if sys.platform == "win32":
        limit = struct.pack("L", max(1, int(1e3 * seconds)))
    else:
        limit = struct.pack("ll", int(seconds), int(1e6 * (seconds % 1.0)))
    with contextlib.suppress(OSError):  # a system that does not know it
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _too_large(size: int, observation: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """The sensor that exceeds the policy's size most, and the remedy."""
    specs = {str(spec["name"]): spec for spec in metadata.get("sensors", ())}
    sent = {name: _packed(value) for name, value in observation.items()}
    excess = {name: count - _expected(specs.get(name)) for name, count in sent.items()}
    name = max(excess, key=excess.__getitem__, default="")
    limit = metadata.get("max_message")
    text = f"the message is too large: {_size(size)}" + (f", the server takes {_size(limit)}" if limit else "")
    more = f"send less, or start the server with --max-message-mb {math.ceil(size / 2**20) + 1}"
    if not name:
        return f"{text}: {more}"
    shape, dtype = getattr(observation[name], "shape", None), getattr(observation[name], "dtype", None)
    kind = type(observation[name]).__name__ if shape is None else f"{dtype}, {' x '.join(map(str, shape))}"
    text += f"; sensor '{name}' is {_size(sent[name])} ({kind})"
    if specs and name not in specs:
        return f"{text}: the policy has no sensor of that name: leave it out, or {more}"
    own = specs.get(name, {})
    if shape is not None and own and tuple(shape) != tuple(own["shape"]):
        return f"{text}: resize it to the policy's {' x '.join(map(str, own['shape']))}"
    if excess[name] > 0 and own.get("dtype") and str(dtype) != own["dtype"]:
        return f"{text}: send it as {own['dtype']}"
    return f"{text}: {more}"


def _packed(value: Any) -> int:
    """Bytes on the wire."""
    return int(value.nbytes) if hasattr(value, "nbytes") else len(wire.pack({"": value}))


def _expected(spec: Mapping[str, Any] | None) -> int:
    """Bytes of one time step of a policy's sensor; 0: it has no such sensor."""
    if spec is None:
        return 0
    return math.prod(spec["shape"]) * (4 if str(spec.get("dtype", "uint8")) == "float32" else 1)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _words(error: BaseException) -> str:
    if isinstance(error, InvalidStatus):
        body = (error.response.body or b"").decode("utf-8", "replace").strip()
        return f"the server answered {error.response.status_code} {body}".strip()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error.__cause__, BlockingIOError):
        return "the network did not accept the data in time"
    return " ".join(str(error).split()) or type(error).__name__
