"""A policy server in a thread, and clients that speak to it as openpi-client does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import ClientConnection, connect

from prism.controller import ControllerConfig
from prism.policy import Policy
from prism.server.beside import THREAD, served
from prism.server.policy_server import PolicyServer, ServerConfig
from tests.policy_fakes import small_policy

CONTROLLER = ControllerConfig(exec_horizon=2, candidates=4)


@contextmanager
def serving(
    policy: Policy | None = None, controller: ControllerConfig = CONTROLLER, **config: Any
) -> Iterator[PolicyServer]:
    """A server on a free port, in a thread with its own event loop."""
    server = PolicyServer(policy or small_policy(), controller, ServerConfig(port=0, **config), "small")
    before = set(threading.enumerate())
    with served(server):
        yield server
    assert not [one for one in set(threading.enumerate()) - before if one.name == THREAD], "it ends with its server"


class OpenPi:
    """What openpi-client 0.1.2 does on the wire, no more: no reset, no extras, read-only arrays by np.ndarray()."""

    def __init__(self, port: int, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._stack = ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(
            connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, additional_headers=headers)
        )
        try:
            self.metadata = self._unpack(self.socket.recv(timeout=20))
        except BaseException:
            self.close()
            raise

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(msgpack.packb(observation, default=_encode))
        reply = self.socket.recv(timeout=20)
        if isinstance(reply, str):
            raise RuntimeError(f"Error in inference server:\n{reply}")
        return self._unpack(reply)

    def _unpack(self, frame: str | bytes) -> dict[str, Any]:
        assert isinstance(frame, bytes)
        message: dict[str, Any] = msgpack.unpackb(frame, object_hook=_decode)
        return message

    def __enter__(self) -> OpenPi:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()


class ChunkBroker:
    """openpi's ActionChunkBroker: cuts every array of a reply by steps, however deep it lies."""

    def __init__(self, infer: Callable[[dict[str, Any]], dict[str, Any]], horizon: int) -> None:
        self._infer, self._horizon, self._reply, self._step = infer, horizon, None, 0

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        if self._reply is None:
            self._reply, self._step = self._infer(observation), 0
        cut = _cut(self._reply, self._step)
        self._step += 1
        if self._step >= self._horizon:
            self._reply = None
        return cut


def _cut(value: Any, step: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(inner, step) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, step) for inner in value]
    return value[step, ...] if isinstance(value, np.ndarray) else value


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return value


def _decode(value: Any) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    if b"__npgeneric__" in value:
        return np.dtype(value[b"dtype"]).type(value[b"data"])
    return value


def see(t: float = 0.0) -> dict[str, np.ndarray]:
    """One time step for tests.policy_fakes.small_policy."""
    return {
        "proprio": np.array([t, 0.1, -t], dtype=np.float32),
        "object_state": np.linspace(t, 1.0, 5).astype(np.float32),
    }
