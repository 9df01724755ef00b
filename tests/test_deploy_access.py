"""The policy server: who may connect, what else answers at its port, and how much one client may ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from prism_client import wire
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.server.policy_server import PolicyServer, RateLimit, ServerConfig, message_limit
from prism.server.prometheus import resident_bytes
from tests.evaluation_fakes import PointPolicy
from tests.policy_fakes import ACTION_DIM, small_policy
from tests.server_fakes import CONTROLLER, OpenPi, see, serving


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def handshake(path: str, headers: str = "Host: 127.0.0.1") -> bytes:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
    return f"GET {path} HTTP/1.1\r\n{headers}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n\r\n".encode()


@contextlib.contextmanager
def deaf(port: int, path: str) -> Iterator[socket.socket]:
    """Has shaken hands, and reads nothing from then on."""
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", port))
        raw.settimeout(10)
        raw.sendall(handshake(path))
        assert b"101" in raw.recv(100)
        yield raw


def test_keys() -> None:
    with serving(api_key="open-sesame") as server:
        for key in (None, "open-sesamd", "x"):
            with pytest.raises(InvalidStatus) as refused:
                OpenPi(server.port, key)
            assert refused.value.response.status_code == 401
        with OpenPi(server.port, "open-sesame") as client:
            assert client.infer(see())["actions"].shape == (4, ACTION_DIM)
        assert get(server.port, "/healthz") == (200, "OK\n")
        assert get(server.port, "/metrics")[0] == 401
        status, text = get(server.port, "/metrics", {"Authorization": "Api-Key open-sesame"})
        assert status == 200
        assert 'prism_connections_total{result="unauthorized"} 3' in text
        with connect(f"ws://127.0.0.1:{server.port}/live") as viewer:
            assert json.loads(viewer.recv(timeout=10)) == {"locked": True}, "nothing of the policy before the key"
            viewer.send(json.dumps({"key": "wrong"}))
            with pytest.raises(ConnectionClosed):
                viewer.recv(timeout=10)
        with connect(f"ws://127.0.0.1:{server.port}/live") as viewer:
            viewer.recv(timeout=10)
            viewer.send(json.dumps({"key": "open-sesame"}))
            assert json.loads(viewer.recv(timeout=10))["hello"]["action_dim"] == ACTION_DIM
            assert "clients" in json.loads(viewer.recv(timeout=10))
    assert "sesame" not in repr(server.config)


def test_pages_of_other_sites_may_not_look() -> None:
    with serving() as server:
        here = f"127.0.0.1:{server.port}"
        for origin, host in (("http://evil.example", here), (f"http://evil.example:{server.port}", None)):
            headers = {"Origin": origin}
            uri = f"ws://{here}/live"
            with pytest.raises(InvalidStatus) as refused, connect(uri, additional_headers=headers) as _:
                pass
            assert refused.value.response.status_code == 403, host
        with connect(f"ws://{here}/live", additional_headers={"Origin": f"http://{here}"}) as viewer:
            assert "hello" in json.loads(viewer.recv(timeout=10))
        # A foreign name that was made to resolve to this computer.
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(
                b"GET /live HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                b"Sec-WebSocket-Version: 13\r\n\r\n"
            )
            assert b"403" in raw.recv(1000)


def test_by_an_address_or_a_known_name_only() -> None:
    """Beyond loopback and without a key: a stranger's name that was made to resolve to this computer."""
    with serving(host="0.0.0.0", names=("robot.lan",)) as server:
        for host, allowed in (
            (f"127.0.0.1:{server.port}", True),
            ("192.168.1.5:8000", True),
            ("[fe80::1]:8000", True),
            ("robot.lan:8000", True),
            ("evil.example", False),
            ("", False),
        ):
            assert get(server.port, "/metrics", {"Host": host})[0] == (200 if allowed else 403), host
            with contextlib.ExitStack() as stack:
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                raw.sendall(handshake("/live", f"Host: {host}\r\nOrigin: http://{host}"))
                assert (b"101 Switching" in raw.recv(1000)) == allowed, host
        assert get(server.port, "/healthz", {"Host": "evil.example"}) == (200, "OK\n")
        with connect(f"ws://127.0.0.1:{server.port}", additional_headers={"Host": "robot"}) as robot:
            robot.recv(timeout=10)  # robots send no origin, and may use any name


def is_cut_off(raw: socket.socket, data: bytes, times: int) -> bool:
    """Whether the server ends the connection before all of it is sent."""
    try:
        for _ in range(times):
            raw.sendall(data)
        raw.settimeout(2)
        while raw.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_pings_of_one_that_reads_no_pongs_do_not_pile_up() -> None:
    ping = b"\x89\xfd\0\0\0\0" + b"x" * 125
    for path, key in (("/live", "open-sesame"), ("/live", None), ("/", None)):
        with serving(api_key=key) as server, deaf(server.port, path) as raw:
            before = resident_bytes()
            assert is_cut_off(raw, ping * 800, 100), path  # 10 MB
            assert resident_bytes() - before < 5e6, path


def test_a_newcomer_says_little_and_has_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism.server.live._UNLOCK", 0.2)
    compared = []
    with serving(api_key="open-sesame") as server:
        monkeypatch.setattr(server, "is_authorized", lambda header: bool(compared.append(len(header))))
        uri = f"ws://127.0.0.1:{server.port}/live"
        with connect(uri) as viewer:
            viewer.recv(timeout=10)
            viewer.send(json.dumps({"key": "x" * 3_700_000}))
            with pytest.raises(ConnectionClosed) as closed:
                viewer.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert not compared
        start = time.monotonic()
        with connect(uri) as viewer:
            viewer.recv(timeout=10)
            with pytest.raises(ConnectionClosed):
                viewer.recv(timeout=10)
        assert time.monotonic() - start < 5.0
    with pytest.raises(PrismError, match="at most 256"):
        ServerConfig(api_key="x" * 257)


def test_strangers_do_not_lock_the_page() -> None:
    with serving(api_key="open-sesame") as server, contextlib.ExitStack() as stack:
        uri = f"ws://127.0.0.1:{server.port}/live"
        for _ in range(12):
            stack.enter_context(connect(uri)).recv(timeout=10)
        with connect(uri) as viewer:
            viewer.recv(timeout=10)
            viewer.send(json.dumps({"key": "open-sesame"}))
            assert "hello" in json.loads(viewer.recv(timeout=10))


def test_one_address_has_so_many_places_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism.server.gate.NEWCOMERS", 4)
    with serving() as server, OpenPi(server.port) as robot, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(12)]
        deadline = time.monotonic() + 10
        while server.gate.cut_off["newcomers"] < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.gate.cut_off["newcomers"] == 8
        robot.infer(see())  # it is none any more
        for one in silent:
            one.close()
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, InvalidHandshake, EOFError), OpenPi(server.port) as other:
                other.infer(see())
                break
        else:
            pytest.fail("the places stay taken")


def test_the_log_obeys_no_escape_codes(caplog: pytest.LogCaptureFixture) -> None:
    red = "\x1b]0;owned\x07\x1b[31m\u202e"
    with serving() as server, OpenPi(server.port) as client:
        with pytest.raises(RuntimeError) as error:
            client.infer(see() | {red: np.zeros(3, np.float32)})
        for text in (caplog.text, str(error.value)):
            assert "\\x1b" in text
            assert "\x1b" not in text
            assert "\u202e" not in text


def test_http_beside_the_websocket() -> None:
    with serving() as server, OpenPi(server.port) as client:
        client.infer(see())
        assert get(server.port, "/healthz") == (200, "OK\n")
        status, text = get(server.port, "/metrics")
        assert status == 200
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines["prism_clients"] == "1"
        assert lines['prism_requests_total{kind="plan"}'] == "1"
        assert lines['prism_request_seconds_bucket{le="+Inf"}'] == lines["prism_request_seconds_count"] == "1"
        for path, words in (("/", "<title>PRISM live"), ("/live.js", "WebSocket"), ("/live.css", "--accent")):
            status, text = get(server.port, path)
            assert status == 200
            assert words in text
            assert "http://" not in text.replace("http://www.w3.org", "")  # nothing from elsewhere
        assert get(server.port, "/etc/passwd")[0] == 404
        assert get(server.port, "/../live.py")[0] == 404


def test_more_clients_than_allowed_are_turned_away() -> None:
    with serving(max_clients=1) as server:
        with OpenPi(server.port), pytest.raises(InvalidStatus) as refused:
            OpenPi(server.port)
        assert refused.value.response.status_code == 503
        deadline = time.monotonic() + 5
        while server.metrics.clients and time.monotonic() < deadline:
            time.sleep(0.02)
        with OpenPi(server.port) as client:
            client.infer(see())


def test_a_silent_client_is_closed() -> None:
    with serving(idle_timeout=0.2) as server, OpenPi(server.port) as client:
        with pytest.raises(ConnectionClosed) as closed:
            client.socket.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.reason == "idle"


def test_a_client_that_stops_reading_is_dropped_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="prism")
    policy = PointPolicy(pred_horizon=4096)  # replies of 32 KiB
    point = {"proprio": np.zeros(2, np.float32), "goal": np.ones(2, np.float32)}
    frame = wire.pack(point)
    with serving(policy, write_timeout=0.3, rate=0.0) as server, OpenPi(server.port) as other:
        with deaf(server.port, "/") as raw:
            masked = bytes([0x82, 0x80 | 126]) + len(frame).to_bytes(2, "big") + b"\0\0\0\0" + frame
            raw.setblocking(False)
            deadline = time.monotonic() + 20
            while not server.metrics.errors["slow_reader"] and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # full, until the server gives it up
                    raw.send(masked * 100)
                time.sleep(0.01)
        assert other.infer(point)["actions"].shape == (4096, 2)
    assert server.metrics.errors["slow_reader"] == 1
    assert "it did not read its replies" in caplog.text


def test_the_rate_limit_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("prism.server.policy_server.time.monotonic", lambda: now[0])
    limit = RateLimit(10.0)
    assert [limit.delay() for _ in range(10)] == [0.0] * 10  # a second's worth at once
    assert limit.delay() == pytest.approx(0.1)
    assert limit.delay() == pytest.approx(0.2)
    now[0] += 0.2
    assert limit.delay() == pytest.approx(0.1)
    now[0] += 100.0
    assert limit.delay() == 0.0
    assert RateLimit(0.0).delay() == 0.0


def test_a_fast_client_waits_and_the_metrics_tell() -> None:
    with serving(rate=2.0) as server, OpenPi(server.port) as client:
        start = time.monotonic()
        for _ in range(4):
            client.infer(see())
        assert time.monotonic() - start > 0.9
        assert server.metrics.throttled > 0


def test_bad_configurations_and_a_port_in_use_are_one_line() -> None:
    for bad in ({"port": -1}, {"max_clients": 0}, {"rate": -1.0}, {"api_key": ""}, {"idle_timeout": 0.0}):
        with pytest.raises(PrismError):
            ServerConfig(**bad)
    with serving() as server:
        again = PolicyServer(small_policy(), CONTROLLER, ServerConfig(port=server.port))
        with pytest.raises(PrismError, match="in use"):
            asyncio.run(again.run(asyncio.Event()))
    with pytest.raises(PrismError, match=r"controller\.warm_start is not served: use --set warm_start=false"):
        PolicyServer(small_policy(), ControllerConfig(exec_horizon=2, warm_start=True), ServerConfig())
    with pytest.raises(PrismError, match="exceeds"):
        PolicyServer(small_policy(), ControllerConfig(exec_horizon=99), ServerConfig())
    assert message_limit((SensorSpec("c", "rgb", (480, 640, 3)),)) > 4 * 480 * 640 * 3
    with pytest.raises(PrismError, match="a name that the protocol uses"):
        PolicyServer(small_policy(sensors=(SensorSpec("reset", "vector", (1,)),)), CONTROLLER, ServerConfig())
