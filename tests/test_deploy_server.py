"""The policy server on the wire: openpi's protocol, histories, batching, access, limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prism_client import wire
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.serve import sessions
from prism.serve.server import PolicyServer, RateLimit, ServerConfig, message_limit
from prism.serve.sessions import Reader, RequestError
from tests.evaluation_fakes import PointPolicy
from tests.policy_fakes import ACTION_DIM, CAMERA, VECTORS, small_config, small_policy
from tests.server_fakes import CONTROLLER, ChunkBroker, OpenPi, see, serving


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_an_openpi_client_gets_metadata_and_plans() -> None:
    with serving() as server, OpenPi(server.port) as client:
        assert client.metadata["action_dim"] == ACTION_DIM
        assert [sensor["name"] for sensor in client.metadata["sensors"]] == ["proprio", "object_state"]
        reply = client.infer(see())
        assert reply["actions"].shape == (4, ACTION_DIM)
        assert reply["actions"].dtype == np.float32
        assert set(reply["server_timing"]) >= {"infer_ms"}
        assert "prev_total_ms" in client.infer(see())["server_timing"]
        # Extras are lists and numbers: the broker would cut arrays.
        assert [key for key, value in reply.items() if isinstance(value, np.ndarray)] == ["actions"]
        broker = ChunkBroker(client.infer, 2)
        assert all(broker.infer(see())["actions"].shape == (ACTION_DIM,) for _ in range(5))


def test_each_connection_has_its_own_history_and_equals_the_controller() -> None:
    """Requests of two robots, in turns: each gets what a controller of its own would have planned."""
    policy = small_policy()
    alone = [Controller(policy, CONTROLLER), Controller(policy, CONTROLLER)]
    with serving(policy) as server, OpenPi(server.port) as first, OpenPi(server.port) as second:
        for t in range(6):
            for i, client in enumerate((first, second)):
                observation = see(0.3 * t + i)
                plan = t % CONTROLLER.exec_horizon == 0
                reply = client.infer({**observation, "plan": plan, "executed": CONTROLLER.exec_horizon})
                expected = alone[i].act(observation)
                if plan:
                    np.testing.assert_allclose(reply["actions"][0], expected, rtol=1e-5, atol=1e-6)
                    assert reply["index"] == alone[i].replans[-1].index
                else:
                    assert "actions" not in reply
                    assert reply["plan_age"] == 1


def test_steps_that_a_chunk_client_does_not_send_are_filled_in() -> None:
    """A broker sends every second observation: the window is of consecutive steps all the same."""
    policy = small_policy()
    controller = Controller(policy, CONTROLLER)
    with serving(policy) as server, OpenPi(server.port) as client:
        for t in (0.0, 2.0, 4.0):
            reply = client.infer(see(t))
            if t:
                middle = {name: (see(t - 2)[name] + see(t)[name]) / 2 for name in see()}
                controller.observe(middle)
            expected = controller.act(see(t))
            np.testing.assert_allclose(reply["actions"][0], expected, rtol=1e-4, atol=1e-5)
            controller.advance(1)


def test_kept_tokens_give_the_plans_of_whole_windows() -> None:
    """Every observation is encoded once, when it arrives, also one without a plan; a reset forgets."""
    sensors = (*VECTORS, CAMERA, SensorSpec("text", "text", (16,)))
    policy = small_policy(small_config(obs_horizon=4), sensors).eval()
    encoded: list[int] = []
    original = policy.encoder.encoders[2].encode
    policy.encoder.encoders[2].encode = lambda stream, rng: encoded.append(len(stream)) or original(stream, rng)  # type: ignore[union-attr,assignment,operator]

    def look(t: int) -> dict[str, Any]:
        picture = np.random.default_rng(t).integers(0, 256, CAMERA.shape, dtype=np.uint8)
        return {**see(0.1 * t), "rgb_wrist": picture, "text": "push"}

    whole = Controller(policy, CONTROLLER)  # samples the whole window
    with serving(policy) as server, OpenPi(server.port) as client:
        for episode in (1, 2):
            whole.reset(episode)
            encoded.clear()
            for t in range(7):
                start = {"reset": True, "seed": episode} if t == 0 else {}
                message = {**look(t + 10 * episode), **start, "plan": t % 2 == 0, "executed": 2}
                reply = client.infer(message)
                if t % 2 == 0:
                    replies = reply["actions"]
                    assert sum(encoded) == t + 1
                    counted = len(encoded)
                    expected = whole.act(look(t + 10 * episode))
                    np.testing.assert_allclose(replies[0], expected, rtol=1e-4, atol=1e-5)
                    del encoded[counted:]
                else:
                    whole.act(look(t + 10 * episode))


def test_a_client_that_asks_sooner_than_it_could_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: 100.0))  # for the sessions no time passes
    with serving() as server, OpenPi(server.port) as client:
        for _ in range(12):
            client.infer({**see(), "executed": 1})
        assert "exec_horizon=1" not in caplog.text
        for _ in range(12):
            client.infer(see())
    assert caplog.text.count("exec_horizon=1") == 1


def test_reset_forgets_and_repeats() -> None:
    with serving() as server, OpenPi(server.port) as client:
        first = client.infer({**see(), "reset": True, "seed": 5})["actions"]
        later = client.infer(see())["actions"]
        again = client.infer({**see(), "reset": True, "seed": 5})
        np.testing.assert_array_equal(again["actions"], first)
        assert again["step"] == 0
        assert not np.array_equal(later, first)
        other = client.infer({**see(), "reset": True, "seed": 6})["actions"]
        assert not np.array_equal(other, first)


def test_simultaneous_requests_share_a_pass_and_get_their_own_plans() -> None:
    class Patient(type(small_policy())):  # type: ignore[misc]
        batches: list[int] = []  # noqa: RUF012
        waiting: Callable[[], int] | None = None

        def plan(self, context, candidates, rng):  # type: ignore[no-untyped-def]
            """The first pass goes on until all other requests are there."""
            self.batches.append(len(context))
            deadline = time.monotonic() + 20
            while self.waiting is not None and sum(self.batches) + self.waiting() < 6 and time.monotonic() < deadline:
                time.sleep(0.005)
            return super().plan(context, candidates, rng)

    policy = small_policy()
    policy.__class__ = Patient
    expected = []
    for i in range(6):
        controller = Controller(policy, CONTROLLER)
        controller.act(see(i))
        assert controller.last_plan is not None
        expected.append(controller.last_plan.actions)
    with serving(policy) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(OpenPi(server.port)) for _ in range(6)]
        assert server._batcher is not None
        Patient.batches.clear()
        Patient.waiting = staticmethod(server._batcher._queue.qsize)
        replies: dict[int, np.ndarray] = {}
        threads = [
            threading.Thread(target=lambda i=i: replies.update({i: clients[i].infer(see(i))["actions"]}))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(Patient.batches) == 6
        assert len(Patient.batches) <= 2  # what was there at first, and all others together
    for i in range(6):
        np.testing.assert_allclose(replies[i], expected[i], rtol=1e-4, atol=1e-5)


BAD = {
    "wrong name": ({"propio": np.zeros(3, np.float32)}, "no sensor 'propio': did you mean 'proprio'"),
    "wrong shape": ({"proprio": np.zeros(4, np.float32)}, "shape"),
    "wrong type": ({"proprio": "hello"}, "send an array"),
    "a map": ({"proprio": {"a": 1}}, "send an array"),
    "ragged": ({"proprio": [[1.0], [1.0, 2.0]]}, "no array of numbers"),
    "text in a list": ({"proprio": ["a", "b", "c"]}, "no array of numbers"),
    "all NaN": ({"proprio": np.full(3, np.nan)}, "none of the policy's sensors"),
    "nothing": ({}, "none of the policy's sensors"),
    "twice": ({**see(), "instruction": None, "proprio2": see()["proprio"]}, "no sensor 'instruction'"),
    "reset": ({**see(), "reset": 3}, "reset is true or false"),
    "executed": ({**see(), "executed": -1}, "executed is a whole number"),
    "seed": ({**see(), "seed": 1.5}, "seed is a whole number"),
    "ages": ({**see(), "ages": {"proprio": "old"}}, "ages is"),
    "age of nobody": ({**see(), "ages": {"camera": 1.0}}, "no sensor 'camera'"),
}


def test_a_bad_observation_is_one_line_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="prism")
    with serving() as server, OpenPi(server.port) as other, OpenPi(server.port) as client:
        before = other.infer({**see(), "reset": True, "seed": 1})["actions"]
        for name, (message, words) in BAD.items():
            with pytest.raises(RuntimeError, match="Error in inference server") as error:
                client.infer(message)
            text = str(error.value).split("\n", 1)[1]
            assert words in text, name
            assert "\n" not in text
            assert len(text) < 301
            assert "Traceback" not in text
            assert client.infer(see())["actions"].shape == (4, ACTION_DIM)
        np.testing.assert_array_equal(other.infer({**see(), "reset": True, "seed": 1})["actions"], before)
        assert server.metrics.errors["observation"] == len(BAD)
        assert any("client 2 (127.0.0.1" in line and "propio" in line for line in caplog.messages)


def test_a_list_that_holds_a_long_text_gets_no_room_for_as_many_of_them() -> None:
    reader = Reader(small_policy().spec.sensors)
    message = {"proprio": ["a" * 20_000, *[""] * 4095]}  # 24 KB; as an array of text: 330 MB
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="no array of numbers"):
            reader.read(message)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_reader_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, OpenPi(server.port) as client:
        server._reader.read = lambda message: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(RuntimeError, match="internal error"):
            client.infer(see())
    assert "ZeroDivisionError" in caplog.text


def test_a_missing_sensor_is_absent_and_comes_back() -> None:
    with serving() as server, OpenPi(server.port) as client:
        assert client.infer(see())["absent"] == []
        assert client.infer({"proprio": see()["proprio"]})["absent"] == ["object_state"]
        assert client.metadata["needs"] == ["proprio", "object_state"]
        assert client.infer({**see(), "object_state": np.full(5, np.inf)})["absent"] == ["object_state"]
        assert client.infer({**see(), "object_state": np.full(5, 1e300)})["absent"] == ["object_state"]
        assert client.infer({**see(), "ages": {"object_state": 99.0}})["absent"] == ["object_state"]
        assert client.infer({**see(), "prompt": "push", "proprio": [1, 2, 3]})["absent"] == []
    assert server.metrics.faults["object_state", "missing"] == 1
    assert server.metrics.faults["object_state", "nan"] == 2


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1\xc1", wire.pack(see())[:-3], b"\xdd\xff\xff\xff\xff", b"\x93\x01\x02\x03"]
)
def test_a_frame_that_is_no_request_ends_its_connection_only(frame: bytes) -> None:
    with serving() as server, OpenPi(server.port) as other:
        with OpenPi(server.port) as client:
            client.socket.send(frame)
            reply = client.socket.recv(timeout=10)
            assert isinstance(reply, str)
            assert len(reply) < 200
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(timeout=10)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1011
        assert other.infer(see())["actions"].shape == (4, ACTION_DIM)


def test_text_frames_giant_frames_and_half_frames(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, OpenPi(server.port) as other:
        with OpenPi(server.port) as client:
            client.socket.send("hello")
            assert "binary" in str(client.socket.recv(timeout=10))
        with OpenPi(server.port) as client, pytest.raises(ConnectionClosed) as closed:
            client.infer({"proprio": np.zeros(1 << 20)})
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        with OpenPi(server.port) as client:
            client.socket.socket.sendall(b"\x82\xfe\x40\x00abcd")  # promises 16 KiB
            client.socket.socket.shutdown(socket.SHUT_RDWR)
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
            raw.recv(100)
        assert other.infer(see())["actions"].shape == (4, ACTION_DIM)
    assert server.metrics.errors["message"] == 1
    assert "its message was too large (frame with 8388" in caplog.text
    assert "does it send 'object_state' as 5? --max-message-mb takes more" in caplog.text


def test_too_many_errors_in_a_row_end_the_connection() -> None:
    with serving(max_errors=3) as server, OpenPi(server.port) as client:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                client.infer({"x": 1})
        with pytest.raises(ConnectionClosed):
            client.infer(see())


def test_a_failing_policy_tells_the_client_nothing_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(PointPolicy):
        broken = False

        def sample(self, observation, candidates, rng):  # type: ignore[no-untyped-def]
            if self.broken:
                raise ValueError("secret /home/me")
            return super().sample(observation, candidates, rng)

    policy = Failing()
    point = {"proprio": np.zeros(2, np.float32), "goal": np.ones(2, np.float32)}
    with serving(policy) as server:
        with OpenPi(server.port) as client:
            client.infer(point)
            policy.broken = True
            with pytest.raises(RuntimeError, match="internal error") as error:
                client.infer(point)
            assert "secret" not in str(error.value)
        policy.broken = False
        with OpenPi(server.port) as client:
            assert client.infer(point)["actions"].shape == (8, 2)
    assert "secret" in caplog.text


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
            assert json.loads(viewer.recv(timeout=10))["locked"]
            viewer.send(json.dumps({"key": "wrong"}))
            with pytest.raises(ConnectionClosed):
                viewer.recv(timeout=10)
        with connect(f"ws://127.0.0.1:{server.port}/live") as viewer:
            viewer.recv(timeout=10)
            viewer.send(json.dumps({"key": "open-sesame"}))
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
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", server.port))
            raw.sendall(
                b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
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
    monkeypatch.setattr("prism.serve.server.time.monotonic", lambda: now[0])
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


def test_keys_of_clients_can_be_mapped() -> None:
    rename = {"observation/state": "proprio", "extra": ""}
    with serving(rename=rename) as server, OpenPi(server.port) as client:
        step = see()
        message = {"observation/state": step["proprio"], "object_state": step["object_state"], "extra": "ignored"}
        assert client.infer(message)["absent"] == []
        with pytest.raises(RuntimeError, match="twice"):
            client.infer({**step, "observation/state": step["proprio"]})
    with pytest.raises(PrismError, match="no sensor 'arm'"):
        PolicyServer(small_policy(), CONTROLLER, ServerConfig(rename={"x": "arm"}))


def test_instructions_arrive_as_text() -> None:
    sensors = (SensorSpec("proprio", "vector", (3,)), SensorSpec("instruction", "text", (32,)))
    policy = small_policy(sensors=sensors)
    with serving(policy) as server, OpenPi(server.port) as client:
        proprio = np.zeros(3, np.float32)
        drawer = client.infer({"proprio": proprio, "instruction": "open the drawer", "reset": True, "seed": 1})
        prompt = client.infer({"proprio": proprio, "prompt": "open the drawer", "reset": True, "seed": 1})
        np.testing.assert_array_equal(drawer["actions"], prompt["actions"])
        assert drawer["absent"] == []
        with pytest.raises(RuntimeError, match="does not fit"):
            client.infer({"proprio": proprio, "prompt": "x" * 33})


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
    with pytest.raises(PrismError, match="word of the protocol"):
        PolicyServer(small_policy(sensors=(SensorSpec("reset", "vector", (1,)),)), CONTROLLER, ServerConfig())
