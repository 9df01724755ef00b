"""The client, and the planner on top of it, against a small server of their own: no PyTorch, no PRISM."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve
from websockets.utils import accept_key

from prism_client import Client, ConnectionLostError, Executor, HoldError, RemotePlanner, ServerError, Step, wire

METADATA = {
    **{"pred_horizon": 8, "exec_horizon": 4, "obs_horizon": 2, "action_dim": 1, "action": {"kind": "absolute"}},
    **{"fps": 50.0, "sensors": [{"name": "camera", "shape": [4, 4, 3]}]},
}


class Slow:
    """A client whose first reply waits for the gate; it remembers which commands it was told."""

    def __init__(self) -> None:
        self.metadata = {**METADATA, "obs_horizon": 1, "memory": 1}
        self.connections, self.trouble, self.is_closed, self.uri = 1, "", False, "slow"
        self.told: list[list[float]] = []
        self.gate = threading.Event()

    def infer(self, observation: Any, *, sent: Any, **_: Any) -> dict[str, Any]:
        self.told.append([float(command[0]) for command in sent])
        self.gate.wait(10.0)
        return {"actions": np.zeros((8, 1), np.float32)}

    def close(self) -> None: ...


def test_commands_of_steps_that_a_slow_network_left_out_are_told_with_the_next() -> None:
    client: Any = Slow()
    planner = RemotePlanner(client)

    def step(number: int) -> None:
        sent = (np.array([float(number)]),) if number else ()
        planner.submit(Step(number, number, {}, None, number == 0, 0.0, sent))

    step(0)
    until = time.monotonic() + 10
    while not client.told and time.monotonic() < until:
        time.sleep(1e-3)
    for number in (1, 2, 3):
        step(number)
    client.gate.set()
    while len(client.told) < 2 and time.monotonic() < until:
        time.sleep(1e-3)
    planner.close()
    assert client.told == [[], [1.0, 2.0, 3.0]]


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


def test_asks_and_is_answered() -> None:
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
        with pytest.raises(ServerError, match=r"401 no entry.*: give the server's key, api_key="):
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
        with pytest.raises(ConnectionLostError, match="did not accept the data in time"):
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
        with pytest.raises(ServerError, match=f"^{uri} is not a server address .*: use ws://HOST:PORT$"):
            Client(uri)


def test_a_message_that_is_too_large_names_the_sensor_and_what_helps() -> None:
    camera = {"t": 0, "camera": np.zeros((40, 40, 3), np.uint8)}  # the policy has 4 x 4 x 3
    with running({"max_message": 1000}) as server, client_of(server) as client:
        with pytest.raises(
            ServerError, match=r"sensor 'camera' is 4\.8 kB \(uint8, 40 x 40 x 3\): resize it to the policy's 4 x 4"
        ):
            client.infer(camera)
        with pytest.raises(
            ServerError,
            match=r"'extra' .*: the policy has no sensor of that name: leave it out, or send less.*-mb 2",
        ):
            client.infer({"t": 0, "extra": np.zeros(2000)})
        assert client.infer({"t": 1})["actions"].shape == (8, 1)  # neither was sent
        assert client.connections == 1
    sensors = [
        {"name": "camera", "shape": [4, 4, 3], "dtype": "uint8"},
        {"name": "state", "shape": [200], "dtype": "float32"},
    ]
    with running({"max_message": 1000, "sensors": sensors}) as server, client_of(server) as client:
        seen = {"t": 0, "camera": np.zeros((4, 4, 3)), "state": np.zeros(200, np.float32)}  # larger, and right
        with pytest.raises(ServerError, match=r"the server takes 1\.0 kB; sensor 'camera' is .*: send it as uint8"):
            client.infer(seen)

    def refuse(connection: ServerConnection, message: dict[str, Any]) -> bool:
        connection.close(1009, "too big")
        return True

    with running() as server, client_of(server) as client:  # one that does not say what it takes
        server.before = refuse
        with pytest.raises(ServerError, match=r"the message is too large: 4\.9 kB; sensor 'camera'"):
            client.infer(camera)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def driving(server: FakeServer, client: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Executor]:
    with Executor(RemotePlanner(client_of(server, **(client or {}))), **{"look": False, **options}) as executor:
        yield executor


def sent(executor: Executor, step: int) -> None:
    """Wait until the server has answered this step."""
    planner = executor.planner
    assert isinstance(planner, RemotePlanner)
    wait_until(lambda: planner._sent >= step)


def test_every_observation_is_sent_and_a_plan_is_asked_for_every_exec_horizon() -> None:
    with running() as server, driving(server, asynchronous=False) as executor:
        executor.reset(seed=3)
        actions = [float(executor.act({"t": t})[0]) for t in range(10)]
        assert actions == [0, 1, 2, 3, 400, 401, 402, 403, 800, 801]
        assert [m["t"] for m in server.seen] == list(range(10))
        assert [m["t"] for m in server.seen if m.get("plan", True)] == [0, 4, 8]
        assert server.seen[4]["executed"] == 4
        assert server.seen[0]["seed"] == 3
        executor.reset()
        assert float(executor.act({"t": 50})[0]) == 5000
        assert server.seen[-1]["reset"] is True
        assert executor.stats.plans == 1


def test_a_late_plan_is_entered_at_the_row_that_is_due() -> None:
    slack = {"pred_horizon": 64}  # plans that no busy machine can use up meanwhile
    with running(slack, delay=0.05) as server, driving(server, blend=0) as executor:
        actions, due = [], time.monotonic()
        for t in range(30):
            actions.append(float(executor.act({"t": t})[0]))
            due += 0.02
            time.sleep(max(0.0, due - time.monotonic()))
        starts = {m["t"] for m in server.seen if m.get("plan", True)}
        for step, action in enumerate(actions):
            start, row = divmod(int(action), 100)
            assert start + row == step, (step, action)  # whichever plan it is, the row belongs to this step
            assert start in starts
        assert executor.stats.held == 0
        assert executor.stats.plans >= 2
        late = [int(a) % 100 for i, a in enumerate(actions) if i and int(a) // 100 != int(actions[i - 1]) // 100]
        assert min(late) >= 1  # the rows that were past when the plan arrived are left out


def test_a_plan_after_a_hold_goes_on_where_the_robot_stands() -> None:
    """Held steps are no actions: a plan that took longer than it lasts is executed all the same."""
    with running() as server, driving(server, blend=0) as executor:
        assert float(executor.act({"t": 0})[0]) == 0.0
        free = threading.Event()
        server.before = lambda connection, message: message.get("plan", True) and not free.wait(10)
        assert [float(executor.act({"t": t})[0]) for t in range(1, 31)] == [*range(1, 8), *[7.0] * 23]
        free.set()
        planner = executor.planner
        assert isinstance(planner, RemotePlanner)
        wait_until(lambda: planner._wanted is None)
        asked = [m for m in server.seen if m.get("plan", True)][1]["t"]
        done = min(8, asked)  # what was executed before it
        assert divmod(float(executor.act({"t": 31})[0]), 100) == (asked, 8 - done)


def test_errors_do_not_stop_a_moving_robot_but_a_resting_one() -> None:
    with running() as server, driving(server) as executor:
        server.before = lambda connection, message: connection.send("out of order") or True
        with pytest.raises(ServerError, match="out of order"):
            executor.act({"t": 0})
        server.before = None
        executor.reset()
        assert float(executor.act({"t": 0})[0]) == 0.0
        server.before = lambda connection, message: connection.send("out of order") or True
        for t in range(1, 6):
            assert float(executor.act({"t": t})[0]) == t
            sent(executor, t)
        assert float(executor.act({"t": 6})[0]) == 6
        assert executor.stats.error == "out of order"
        assert executor.stats.refused >= 5


def test_a_lost_server_is_reported_and_closing_does_not_wait_for_it() -> None:
    with running() as server:
        executor = Executor(RemotePlanner(client_of(server, retry_for=60.0)), look=False)
        executor.act({"t": 0})
    for t in range(1, 12):
        executor.act({"t": t})
    wait_until(lambda: bool(executor.planner.trouble()))
    executor.act({"t": 12})
    assert str(server.port) in executor.stats.error
    for t in range(13, 108):
        executor.act({"t": t})
    with pytest.raises(HoldError, match=rf"100 steps in a row .*: stop the robot; .*{server.port}"):
        executor.act({"t": 108})
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < 5


def test_a_new_connection_is_sent_what_is_recent() -> None:
    with running() as server, driving(server, asynchronous=False, exec_horizon=3) as executor:
        for t in range(3):
            executor.act({"t": t})
        dropped: list[bool] = []

        def drop(connection: ServerConnection, message: dict[str, Any]) -> bool:
            if dropped:
                return False
            dropped.append(True)
            connection.close()
            return True

        server.before = drop
        before = len(server.seen)
        assert float(executor.act({"t": 3})[0]) == 300.0
        sent = [(m["t"], m.get("plan", True), m.get("reset", False)) for m in server.seen[before:]]
        # lost, sent again by the client, and then the window of two in order, the plan from the last of it
        assert sent == [(3, True, False), (3, True, False), (2, False, True), (3, True, False)]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("action", {"kind": "delta"}, "action {'kind': 'delta'}, not {'kind': 'absolute'}"),
        ("fps", 7.0, "fps 7.0, not 50.0"),
    ],
)
def test_a_server_that_comes_back_with_another_policy_is_not_obeyed(key: str, value: Any, said: str) -> None:
    with running() as server, driving(server) as executor:
        executor.act({"t": 0})

        def change(connection: ServerConnection, message: dict[str, Any]) -> bool:
            server.metadata[key] = value
            server.before = None
            connection.close()
            return True

        server.before = change
        for t in range(1, 9):
            assert float(executor.act({"t": t})[0]) == min(t, 7)
            sent(executor, t)
        executor.act({"t": 9})
        assert f"the server came back with another policy ({said})" in executor.stats.error
        executor.reset()
        assert float(executor.act({"t": 1})[0]) == 100.0
        assert executor.action_kind == server.metadata["action"]["kind"]  # delta: a hold is zero now


def test_a_driver_that_fills_its_buffer_again_does_not_rewrite_what_is_still_to_be_sent() -> None:
    with running() as server, driving(server) as executor:
        busy = threading.Event()
        server.before = lambda connection, message: len(server.seen) == 2 and not busy.wait(10)
        buffer = np.zeros(1)
        for t in range(4):
            buffer[0] = t
            executor.act({"t": t, "proprio": buffer})
        buffer[0] = -1.0
        busy.set()
        sent(executor, 3)
        assert len(server.seen) >= 3
        assert [m["proprio"][0] for m in server.seen] == [float(m["t"]) for m in server.seen]


def test_what_cannot_be_packed_is_said() -> None:
    with running() as server, client_of(server) as client, pytest.raises(wire.WireError, match="complex"):
        client.infer({"t": np.array([1j])})


def test_a_network_that_takes_no_data_is_trouble_while_an_observation_is_sent() -> None:
    """A ping waits behind the frame: nobody could say that the server is silent."""
    with running() as server, client_of(server) as client:
        ping, sent = client.ping, threading.Event()

        def behind_the_frame() -> threading.Event:
            sent.wait(30.0)
            return ping()

        client.ping = behind_the_frame  # type: ignore[method-assign]
        planner = RemotePlanner(client, silence=0.02)
        wait_until(lambda: planner.trouble().endswith("the network accepts no data"))
        sent.set()
        wait_until(lambda: not planner.trouble())
        planner.close()
