"""The policy server on the wire: openpi's protocol, histories, batching, errors."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prism_client import wire
from websockets.exceptions import ConnectionClosed

from prism.controller import Controller
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.server import sessions
from prism.server.policy_server import PolicyServer, ServerConfig
from prism.server.sessions import Reader, RequestError
from tests.evaluation_fakes import PointPolicy
from tests.policy_fakes import ACTION_DIM, CAMERA, VECTORS, small_config, small_policy
from tests.server_fakes import CONTROLLER, ChunkBroker, OpenPi, see, serving


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
                controller.act({name: (see(t - 2)[name] + see(t)[name]) / 2 for name in see()})
            expected = controller.act(see(t))
            np.testing.assert_allclose(reply["actions"][0], expected, rtol=1e-4, atol=1e-5)


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
    "ragged": ({"proprio": [[1.0], [1.0, 2.0]]}, "not an array of numbers"),
    "text in a list": ({"proprio": ["a", "b", "c"]}, "not an array of numbers"),
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


@pytest.mark.parametrize("sent", [[1.0], [[1.0, 2.0]], "all", [[math.nan] * ACTION_DIM], np.zeros((2, 2, ACTION_DIM))])
def test_commands_that_cannot_have_been_sent_are_refused(sent: object) -> None:
    reader = Reader(small_policy().spec.sensors, ACTION_DIM)
    with pytest.raises(RequestError, match="sent holds commands"):
        reader.read({"sent": sent})
    assert reader.read({"sent": []}).sent.shape == (0, ACTION_DIM)  # type: ignore[union-attr]
    assert reader.read({}).sent is None


def test_a_list_that_holds_a_long_text_gets_no_room_for_as_many_of_them() -> None:
    reader = Reader(small_policy().spec.sensors, ACTION_DIM)
    message = {"proprio": ["a" * 20_000, *[""] * 4095]}  # 24 KB; as an array of text: 330 MB
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="not an array of numbers"):
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
    with serving(allow_absent=True) as server, OpenPi(server.port) as client:
        assert client.infer(see())["absent"] == []
        assert client.infer({"proprio": see()["proprio"]})["absent"] == ["object_state"]
        assert client.metadata["needs"] == ["proprio", "object_state"]
        assert client.infer({**see(), "object_state": np.full(5, np.inf)})["absent"] == ["object_state"]
        assert client.infer({**see(), "object_state": np.full(5, 1e300)})["absent"] == ["object_state"]
        assert client.infer({**see(), "ages": {"object_state": 99.0}})["absent"] == ["object_state"]
        assert client.infer({**see(), "prompt": "push", "proprio": [1, 2, 3]})["absent"] == []
    assert server.metrics.faults["object_state", "missing"] == 1
    assert server.metrics.faults["object_state", "nan"] == 2


@pytest.mark.parametrize("lost", [{}, {"object_state": None}, {"object_state": np.full(5, np.nan, np.float32)}])
def test_a_client_that_knows_nothing_of_absence_gets_no_plan_without_what_the_policy_needs(
    lost: dict[str, Any],
) -> None:
    """It would execute it. One line says what is missing; with the sensor back it goes on."""
    with serving() as server, OpenPi(server.port) as client:
        with pytest.raises(RuntimeError, match=r"sensor 'object_state' .* policy requires it.*--allow-absent"):
            client.infer({"proprio": see()["proprio"], **lost})
        assert client.infer(see())["actions"].shape == (4, ACTION_DIM)
        # prism-client looks at `absent` itself: its executor holds at once, and does not go on with the old plan
        assert client.infer({"proprio": see()["proprio"], **lost, "checked": True})["absent"] == ["object_state"]


def test_a_guessed_key_is_logged_and_the_client_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(small_policy(sensors=(VECTORS[0], CAMERA))) as server, OpenPi(server.port) as client:
        picture = np.random.default_rng(0).integers(0, 256, CAMERA.shape, dtype=np.uint8)
        message = {"observation/proprio": see()["proprio"], "observation/image": picture}
        said = [f"'observation/image' is taken for sensor '{CAMERA.name}'; to be sure: prism serve --map "
                f"observation/image={CAMERA.name}"]  # fmt: skip
        assert client.infer(message)["warnings"] == said
        assert "warnings" not in client.infer(message)
    assert sum(said[0] in line for line in caplog.messages) == 1


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
    caplog.set_level(logging.INFO, logger="prism")
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
    assert "it may have 262144 bytes, and the policy needs proprio 3 float32, object_state 5 float32" in caplog.text
    left = [record.levelname for record in caplog.records if "left after" in record.getMessage()]
    assert sorted(left)[-1] == "WARNING", "the one whose message was too large"
    assert left.count("WARNING") == 1, "a client that leaves, also without a good-bye, is no fault"


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


def test_keys_of_clients_can_be_mapped() -> None:
    rename = {"observation/state": "proprio", "extra": ""}
    with serving(rename=rename, allow_absent=True) as server, OpenPi(server.port) as client:
        step = see()
        message = {"observation/state": step["proprio"], "object_state": step["object_state"], "extra": "ignored"}
        assert client.infer(message)["absent"] == []
        for ages in (dict.fromkeys(message, 0.01), {"observation/proprio": 0.01}):
            assert client.infer({**message, "ages": ages})["absent"] == []
        assert client.infer({**message, "ages": {"observation/proprio": 60.0}})["absent"] == ["proprio"]
        with pytest.raises(RuntimeError, match="no sensor 'arm'"):
            client.infer({**message, "ages": {"arm": 0.01}})
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
