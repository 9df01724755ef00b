"""The client and its runtime against a small server of their own: no PyTorch, no PRISM."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve
from websockets.utils import accept_key

from prism_client import Client, ConnectionLostError, RecedingHorizon, ServerError, wire

METADATA = {"pred_horizon": 8, "exec_horizon": 4, "obs_horizon": 2, "action_dim": 1, "fps": 50.0, "sensors": []}


class FakeServer:
    """Answers row j of a plan for observation t with 100 t + j; remembers what it was asked."""

    def __init__(self, metadata: dict[str, Any] | None = None, delay: float = 0.0) -> None:
        self.metadata = {**METADATA, **(metadata or {})}
        self.delay = delay
        self.seen: list[dict[str, Any]] = []
        self.connections = 0
        self.before: Callable[[ServerConnection, dict[str, Any]], bool] | None = None  # True: it has answered
        self.refuse: int = 0  # an HTTP status
        self._server = serve(self._talk, "127.0.0.1", 0, compression=None, process_request=self._http)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(self.refuse, "no entry\n") if self.refuse else None  # type: ignore[arg-type]

    def _talk(self, connection: ServerConnection) -> None:
        self.connections += 1
        connection.send(wire.pack(self.metadata))
        for frame in connection:
            assert isinstance(frame, bytes)
            message = wire.unpack(frame)
            self.seen.append(message)
            if self.before is not None and self.before(connection, message):
                continue
            if message.get("plan", True):
                time.sleep(self.delay)
                rows = 100 * float(message["t"]) + np.arange(self.metadata["pred_horizon"])
                connection.send(wire.pack({"actions": rows[:, None].astype(np.float32)}))
            else:
                connection.send(wire.pack({"plan_age": 1}))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()


@contextlib.contextmanager
def running(metadata: dict[str, Any] | None = None, **options: Any) -> Iterator[FakeServer]:
    server = FakeServer(metadata, **options)
    try:
        yield server
    finally:
        server.close()


def client_of(server: FakeServer, **options: Any) -> Client:
    return Client(f"127.0.0.1:{server.port}", **{"first_pause": 0.02, "retry_for": 5.0, "timeout": 5.0, **options})


def test_asks_and_is_told() -> None:
    with running() as server, client_of(server, api_key="k") as client:
        assert client.metadata["pred_horizon"] == 8
        image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
        reply = client.infer({"t": 3, "image": image, "text": "go"}, executed=2, ages={"image": 0.1})
        np.testing.assert_array_equal(reply["actions"][:, 0], 300 + np.arange(8))
        np.testing.assert_array_equal(server.seen[0]["image"], image)
        assert server.seen[0]["executed"] == 2
        assert server.seen[0]["ages"] == {"image": 0.1}
        assert "reset" not in server.seen[0]
        client.reset(seed=7)
        client.infer({"t": 0}, plan=False)
        assert (server.seen[1]["reset"], server.seen[1]["seed"], server.seen[1]["plan"]) == (True, 7, False)
        client.infer({"t": 0})
        assert "reset" not in server.seen[2]


def test_what_the_server_refuses_is_an_error_and_the_connection_stays() -> None:
    with running() as server, client_of(server) as client:

        def complain(connection: ServerConnection, message: dict[str, Any]) -> bool:
            if "bad" in message:
                connection.send("no sensor 'bad'")
            return "bad" in message

        server.before = complain
        with pytest.raises(ServerError, match="no sensor 'bad'"):
            client.infer({"bad": 1})
        assert client.infer({"t": 1})["actions"].shape == (8, 1)
        assert client.connections == 1


def test_a_lost_connection_is_found_again() -> None:
    with running() as server, client_of(server) as client:
        dropped = []

        def drop(connection: ServerConnection, message: dict[str, Any]) -> bool:
            if not dropped:
                dropped.append(True)
                connection.close()
                return True
            return False

        client.infer({"t": 0})
        server.before = drop
        assert client.infer({"t": 1})["actions"][0, 0] == 100
        assert client.connections == server.connections == 2


def test_gives_up_in_time_and_says_so() -> None:
    with running() as server:
        client = client_of(server, retry_for=0.3)
    start = time.monotonic()
    with pytest.raises(ConnectionLostError):
        client.infer({"t": 0})
    assert time.monotonic() - start < 5
    client.close()


def test_a_wrong_key_is_not_tried_again_and_a_full_server_is() -> None:
    with running() as server:
        server.refuse = 401
        start = time.monotonic()
        with pytest.raises(ServerError, match="401 no entry"):
            client_of(server, retry_for=60.0)
        assert time.monotonic() - start < 10
        server.refuse = 503
        timer = threading.Timer(0.2, lambda: setattr(server, "refuse", 0))
        timer.start()
        with client_of(server) as client:
            assert client.connections == 1
        timer.join()


@contextlib.contextmanager
def deaf_server() -> Iterator[int]:
    """The port of one that shakes hands, says what it serves, and then reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def talk() -> None:
            while True:
                try:
                    peer = stack.enter_context(listener.accept()[0])
                except OSError:  # shut down
                    return
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                request = b""
                while b"\r\n\r\n" not in request:
                    request += peer.recv(4096)
                key = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
                accept = accept_key(key.split(b":", 1)[1].strip().decode())
                data = wire.pack(METADATA)
                peer.sendall(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\n\r\n"
                    b"\x82\x7e" + len(data).to_bytes(2, "big") + data
                )

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


BIG = {"image": np.zeros(30_000_000, np.uint8)}  # more than the network keeps on its way


def test_a_server_that_does_not_read_is_given_up_in_time() -> None:
    with deaf_server() as port, Client(f"127.0.0.1:{port}", timeout=0.5, retry_for=5.0) as client:
        start = time.monotonic()
        with pytest.raises(ConnectionLostError, match="took no more data in time"):
            client.infer(BIG)
        assert time.monotonic() - start < 30
        assert client.connections == 2  # it was tried again


def test_closing_does_not_wait_for_a_server_that_does_not_read() -> None:
    with deaf_server() as port, Client(f"127.0.0.1:{port}", timeout=60.0) as client:
        errors: list[Exception] = []

        def ask() -> None:
            try:
                client.infer(BIG)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: client._sending)
        time.sleep(0.2)
        start = time.monotonic()
        client.close()
        thread.join()
        assert time.monotonic() - start < 20
        assert [type(error) for error in errors] == [ConnectionLostError]


def test_an_address_that_is_none_is_one_line() -> None:
    for uri in ("http://robot:8000", "ws://"):
        with pytest.raises(ServerError, match=f"^{uri} is no address of a server .*: use ws://HOST:PORT$"):
            Client(uri)


def test_synchronous_control_replans_every_exec_horizon_and_sends_every_observation() -> None:
    with running() as server, RecedingHorizon(client_of(server), asynchronous=False) as runtime:
        runtime.reset(seed=3)
        actions = [float(runtime.act({"t": t})[0]) for t in range(10)]
        assert actions == [0, 1, 2, 3, 400, 401, 402, 403, 800, 801]
        assert [m["t"] for m in server.seen] == list(range(10))
        assert [m["t"] for m in server.seen if m.get("plan", True)] == [0, 4, 8]
        assert server.seen[4]["executed"] == 4
        assert server.seen[0]["seed"] == 3
        runtime.reset()
        assert float(runtime.act({"t": 50})[0]) == 5000
        assert server.seen[-1]["reset"] is True
        assert runtime.stats.plans == 1


def drive(runtime: RecedingHorizon, steps: int, period: float) -> list[float]:
    actions = []
    due = time.monotonic()
    for t in range(steps):
        actions.append(float(runtime.act({"t": t})[0]))
        due += period
        time.sleep(max(0.0, due - time.monotonic()))
    return actions


def test_asynchronous_control_enters_a_late_plan_at_the_row_that_is_due() -> None:
    slack = {"pred_horizon": 64}  # plans that no busy machine can use up meanwhile
    with running(slack, delay=0.05) as server, RecedingHorizon(client_of(server), blend=0) as runtime:
        actions = drive(runtime, 30, 0.02)
        starts = {m["t"] for m in server.seen if m.get("plan", True)}
        for step, action in enumerate(actions):
            start, row = divmod(int(action), 100)
            assert start + row == step, (step, action)  # whichever plan it is, the row belongs to this step
            assert start in starts
        assert runtime.stats.held == 0
        assert runtime.stats.plans >= 2
        assert runtime.lead >= 1
        late = [int(a) % 100 for i, a in enumerate(actions) if i and int(a) // 100 != int(actions[i - 1]) // 100]
        assert min(late) >= 1  # the rows that were past when the plan arrived are left out


@pytest.mark.parametrize(("hold", "expected"), [("last", 7.0), ("zero", 0.0), (np.array([-1.0]), -1.0), (None, 0.0)])
def test_a_plan_that_never_comes_ends_in_holding(hold: Any, expected: float) -> None:
    metadata = {"action_kind": "delta"} if hold is None else {}
    with running(metadata=metadata) as server, RecedingHorizon(client_of(server, timeout=0.2), hold=hold) as runtime:
        assert float(runtime.act({"t": 0})[0]) == 0.0
        server.delay = 0.5
        actions = [float(runtime.act({"t": t})[0]) for t in range(1, 12)]  # at once: faster than any plan
        assert actions == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, *[expected] * 4]
        assert runtime.stats.held == 4
        assert runtime.stats.plan_age == 11


def test_errors_do_not_stop_a_moving_robot_but_a_resting_one() -> None:
    with running() as server, RecedingHorizon(client_of(server)) as runtime:
        server.before = lambda connection, message: connection.send("out of order") or True
        with pytest.raises(ServerError, match="out of order"):
            runtime.act({"t": 0})
        server.before = None
        runtime.reset()
        assert float(runtime.act({"t": 0})[0]) == 0.0
        server.before = lambda connection, message: connection.send("out of order") or True
        assert [float(runtime.act({"t": t})[0]) for t in range(1, 6)] == [1, 2, 3, 4, 5]
        deadline = time.monotonic() + 5
        while not runtime.stats.error and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runtime.stats.error == "out of order"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_plans_are_joined_without_a_jump() -> None:
    """Plans of this server lie 99 apart for each step between their observations: 4 steps, 396."""
    with running() as server, RecedingHorizon(client_of(server), blend=3, exec_horizon=4) as runtime:
        actions = [float(runtime.act({"t": t})[0]) for t in range(2)]
        for t in range(2, 10):
            actions.append(float(runtime.act({"t": t})[0]))
            wait_until(lambda t=t: runtime._sent >= t)  # type: ignore[misc]
        assert runtime.stats.plans >= 3
        starts = [m["t"] for m in server.seen if m.get("plan", True)]
        gap = 99.0 * max(b - a for a, b in itertools.pairwise(starts))
        steps = np.abs(np.diff(actions))
        assert steps.max() <= 2 * gap / 4 + 1.0 + 1e-6  # a join may begin before the last one has ended
        assert actions[-1] > 300  # and the new plan is reached


def test_a_plan_after_a_hold_goes_on_where_the_robot_stands() -> None:
    """Held steps are no actions: a plan that took longer than it lasts is executed all the same."""
    with running() as server, RecedingHorizon(client_of(server), blend=0) as runtime:
        assert float(runtime.act({"t": 0})[0]) == 0.0
        server.delay = 0.3
        actions = []
        for t in range(1, 31):
            actions.append(float(runtime.act({"t": t})[0]))
            wait_until(lambda: t > 4 or runtime._wanted is None or runtime._sending)  # noqa: B023
        assert actions == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, *[7.0] * 24]
        wait_until(lambda: runtime.stats.plans == 2)
        asked = [m for m in server.seen if m.get("plan", True)][1]["t"]
        action = float(runtime.act({"t": 31})[0])
        assert divmod(action, 100) == (asked, 8 - asked)  # asked for after `asked` of 8 actions; the rest was executed
        assert runtime.stats.late == 1


def test_a_lost_server_is_told_of_and_closing_does_not_wait_for_it() -> None:
    with running() as server:
        runtime = RecedingHorizon(client_of(server, retry_for=60.0))
        runtime.act({"t": 0})
    wait_until(lambda: bool(runtime.act({"t": 1}).size and runtime.stats.error))
    assert str(server.port) in runtime.stats.error
    start = time.monotonic()
    runtime.close()
    assert time.monotonic() - start < 5
    with pytest.raises(ConnectionLostError, match="closed"):
        runtime.client.infer({"t": 0})


def test_a_new_connection_is_sent_what_is_recent() -> None:
    with running() as server, RecedingHorizon(client_of(server), asynchronous=False, exec_horizon=3) as runtime:
        for t in range(3):
            runtime.act({"t": t})
        dropped: list[bool] = []

        def drop(connection: ServerConnection, message: dict[str, Any]) -> bool:
            if dropped:
                return False
            dropped.append(True)
            connection.close()
            return True

        server.before = drop
        before = len(server.seen)
        assert float(runtime.act({"t": 3})[0]) == 300.0
        sent = [(m["t"], m.get("plan", True), m.get("reset", False)) for m in server.seen[before:]]
        # lost, sent again by the client, and then the window of two in order, the plan from the last of it
        assert sent == [(3, True, False), (3, True, False), (2, False, True), (3, True, False)]


def test_a_driver_that_fills_its_buffer_again_does_not_rewrite_what_is_still_to_be_sent() -> None:
    with running() as server, RecedingHorizon(client_of(server)) as runtime:
        busy = threading.Event()
        server.before = lambda connection, message: len(server.seen) == 2 and not busy.wait(10)
        buffer = np.zeros(1)
        for t in range(4):
            buffer[0] = t
            runtime.act({"t": t, "proprio": buffer})
        buffer[0] = -1.0
        busy.set()
        wait_until(lambda: len(server.seen) >= 3 and runtime._sent == 3)
        assert [m["proprio"][0] for m in server.seen] == [float(m["t"]) for m in server.seen]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("blend", [0, 3])
def test_a_reply_that_is_no_plan_for_this_robot_is_told_and_not_executed(blend: int, asynchronous: bool) -> None:
    with running() as server, RecedingHorizon(client_of(server), blend=blend, asynchronous=asynchronous) as runtime:
        wrong: dict[str, Any] = {"actions": np.zeros((8, 2), np.float32)}  # the server came back with another policy

        def answer(connection: ServerConnection, message: dict[str, Any]) -> bool:
            connection.send(wire.pack(wrong))
            return True

        runtime.act({"t": 0})
        server.before = answer
        if not asynchronous:
            for t in range(1, 4):
                runtime.act({"t": t})
            with pytest.raises(ServerError, match="2 numbers an action, the one before 1"):
                runtime.act({"t": 4})
        else:
            actions = []
            for t in range(1, 12):
                actions.append(runtime.act({"t": t}))
                wait_until(lambda t=t: runtime._sent >= t)  # type: ignore[misc]
            assert [float(a[0]) for a in actions] == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
            assert all(a.shape == (1,) for a in actions)
            assert "2 numbers an action, the one before 1" in runtime.stats.error
            del wrong["actions"]
            wait_until(lambda: bool(runtime.act({"t": 12}).size and "holds no plan" in runtime.stats.error))
        server.before = None
        runtime.reset()  # the thread lives
        assert float(runtime.act({"t": 1})[0]) == 100.0


def test_a_first_step_that_fails_can_be_tried_again() -> None:
    with running() as server, RecedingHorizon(client_of(server), first_timeout=5.0) as runtime:
        server.before = lambda connection, message: connection.send("not yet") or True
        with pytest.raises(ServerError, match="not yet"):
            runtime.act({"t": 0})
        server.before = None
        assert float(runtime.act({"t": 1})[0]) == 100.0


def test_a_hook_slows_down_and_stops() -> None:
    says = ["continue", "slow", "stop", "Stop", "continue"]
    seen: list[Any] = []

    def hook(reply: Any) -> str:
        seen.append(reply["actions"].shape)
        return says[len(seen) - 1]

    with running(metadata={"pred_horizon": 4, "exec_horizon": 2}) as server:
        options = {"asynchronous": False, "hook": hook, "keep": ()}
        with RecedingHorizon(client_of(server), **options) as runtime:  # type: ignore[arg-type]
            actions = [float(runtime.act({"t": t})[0]) for t in range(7)]
            # slow: half way from 1 to 200, then all of it; stop, and what nobody understands: hold
            assert actions == [0.0, 1.0, 100.5, 200.0, 200.0, 200.0, 600.0]
            assert runtime.stats.held == 2
            assert seen == [(4, 1)] * 5
        runtime = RecedingHorizon(client_of(server), hook=lambda reply: "stop")
        with runtime, pytest.raises(RuntimeError, match="stop to the first plan"):
            runtime.act({"t": 0})


def test_a_gripper_keeps_its_value_while_the_rest_is_zero() -> None:
    with running() as server, RecedingHorizon(client_of(server), hold="zero", keep=(0,)) as runtime:
        server.before = lambda connection, message: len(server.seen) > 1
        assert [float(runtime.act({"t": t})[0]) for t in range(10)] == [*range(8), 7.0, 7.0]


def test_arguments_are_checked() -> None:
    with running() as server, client_of(server) as client:
        with pytest.raises(ValueError, match="exec_horizon"):
            RecedingHorizon(client, exec_horizon=9)
        with pytest.raises(ValueError, match="exec_horizon"):
            RecedingHorizon(client, exec_horizon=0)
        with pytest.raises(ValueError, match="hold"):
            RecedingHorizon(client, hold="still")
        with pytest.raises(ValueError, match="blend"):
            RecedingHorizon(client, blend=-1)
        with pytest.raises(TypeError, match="complex"):
            client.infer({"t": np.array([1j])})
