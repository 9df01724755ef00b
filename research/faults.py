"""Faults on the UR5e twin while it is driven: is any command beyond a limit, how soon does it stand still? Minutes.

Try:
    python -m research faults --count 1000 --json faults.json

Each trial starts an episode of the scripted insertion by the loop of `prism run`, 50 commands a second, injects one
fault at a random moment, and then plays the next episode without it.

    injected          trials in which the fault took place (some end before it)
    violations        commands beyond a limit, by a judge of its own: finite, speed, acceleration, and the true pose
                      after the command within the position limits
    stopped_in_ms     p50, p99, max: from the fault to the first command (or stop) after which nothing moves any more
    by_fault          the same for each (FAULTS)
    missed            trials in which it went on moving until the episode was over: an operator would have to notice
    recovered         share of the episodes afterwards that succeeded
    recorded          share of the interrupted episodes of two steps or more that can be kept as they are

    dead frozen nan late     the pose: no readings; the same value with new stamps; NaN; no new readings
    swapped force clock      another sensor's readings; a spike of 60 N; the stamps jump by an hour
    crash jumps operator     of what commands; wild commands (limited, not stopped); the stop key
    following backlog null   the pose is 0.15 m from where it was told to be; readings 0.3 s behind; one is no number
    hangup units program     SIGHUP; commands in mm for m (limited, not stopped); a second program asks for the robot
                             and is refused (nothing stops)
    server network           plans come from a server of its own process, which is killed; or from behind a wire that
                             goes silent. The twin's clock is real there, a server's reply is a motion up and down

A crash counts from when it happens, which is when the policy is asked. All others count from the injection: a fault
between two readings is noticed with the next. Nothing of it was tried on hardware.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_client import Executor, RemotePlanner, wire
from rich.console import Console
from rich.progress import track

from prism.errors import PrismError, check_numbers
from prism.evaluation.results import run_info
from prism.inference.lanes import steady
from prism.io.terminal import TerminalLost, end_by_signals
from prism.robots.claim import Claim
from prism.robots.contract import Health, Reading, Robot, make_robot
from prism.robots.guard import LATE, Guard, Seen
from prism.robots.loop import Keys, PolicyCommander, TeleopCommander, drive
from prism.robots.recording import Trace
from prism.robots.teleop import Script
from research.report import Written

HERE = (
    *("dead", "frozen", "nan", "late", "swapped", "force", "clock", "crash", "jumps", "operator"),
    *("following", "backlog", "null", "hangup", "units", "program"),
)
GOES_ON = ("jumps", "units", "program")  # of these nothing has to stop
BACKLOG, AWAY = 0.3, 0.15  # seconds, metres
REMOTE = ("server", "network")
FAULTS = (*HERE, *REMOTE)
_STILL = 2e-4  # of a command: nothing moves (6 um)
_SECONDS = 3.0  # of an episode with a server


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    count: int = 200
    """Trials; the faults take turns."""
    seed: int = 0
    """Of scenes and moments."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "count", "[0, inf)": "seed"})


class Faulty(Robot):
    """A robot of which one thing fails from `at` on, and the judge of what is sent to it."""

    def __init__(self, robot: Robot) -> None:
        super().__init__(
            robot.name, robot.rate, robot.sensors, robot.actions, robot.limits,
            is_twin=True, realtime=robot.realtime, episode_seconds=robot.episode_seconds, fps=robot.fps,
        )  # fmt: skip
        self.inner, self.fault, self.at = robot, "", np.inf
        self.violations = 0
        self.sent: list[tuple[float, float]] = []  # when, how large a motion
        self.stopped_at = np.inf
        self.claim, self.address = Claim(), f"faults:{os.getpid()}:{id(self)}"
        self._past: deque[dict[str, Reading]] = deque(maxlen=64)
        self._shown: np.ndarray | None = None

    def connect(self) -> None:
        self.claim.take([self.address], self.name)
        self.inner.connect()

    def close(self) -> None:
        self.claim.release()
        self.inner.close()

    def setpoint(self) -> NDArray[np.float64] | None:
        return self.inner.setpoint()

    def health(self) -> Health:
        return self.inner.health()

    def prepare(self, seed: int) -> None:
        self.inner.prepare(seed)
        self.sent, self.stopped_at, self._speed, self._asked = [], np.inf, np.zeros(3), self.inner.now()
        self._last = self.inner.read()
        self._past.clear()

    def now(self) -> float:
        self._asked = self.inner.now()
        return self._asked

    def wait(self, until: float) -> None:
        self.inner.wait(until)

    def success(self) -> bool | None:
        return self.inner.success()

    def script(self, seed: int) -> Any:
        return self.inner.script(seed)

    def read(self) -> dict[str, Reading]:
        readings, now = self.inner.read(), self.now()
        self._past.append(readings)
        self._shown = readings["proprio"].value[:3].astype(np.float64)
        if now < self.at:
            self._last = readings
            return readings
        pose = readings["proprio"]
        if self.fault == "dead":
            del readings["proprio"]
        elif self.fault == "frozen":
            readings["proprio"] = Reading(self._last["proprio"].value, pose.stamp)
        elif self.fault == "nan":
            readings["proprio"] = Reading(np.full_like(pose.value, np.nan), pose.stamp)
        elif self.fault == "null":
            readings["proprio"] = Reading(np.array([*pose.value[:-1].tolist(), None], np.float32), pose.stamp)
        elif self.fault == "late":
            readings = self._last
        elif self.fault == "backlog":
            behind = [one for one in self._past if one["proprio"].stamp <= now - BACKLOG]
            readings = (
                behind[-1] if behind and behind[-1]["proprio"].stamp >= self._last["proprio"].stamp else self._last
            )
        elif self.fault == "following":
            away = np.zeros_like(pose.value)
            away[0] = AWAY if pose.value[0] < np.mean(self.limits.position[0]) else -AWAY
            readings["proprio"] = Reading(np.add(pose.value, away), pose.stamp)
            self._shown = readings["proprio"].value[:3].astype(np.float64)
        elif self.fault == "swapped":
            readings["proprio"], readings["tactile"] = readings["tactile"], pose
        elif self.fault == "force":
            readings["tactile"] = Reading(np.full(6, 60.0, np.float32), readings["tactile"].stamp)
        elif self.fault == "clock":
            readings = {name: Reading(reading.value, reading.stamp - 3600.0) for name, reading in readings.items()}
        return readings

    def send(self, action: NDArray[np.float32]) -> None:
        command = np.asarray(action, np.float64)
        move = command[:3] * self.actions.scales[:3]
        speed = move * self.rate
        low, high = np.array(self.limits.position[:3]).T
        end = self.inner.read()["proprio"].value[:3].astype(np.float64) + move
        now = self._asked  # by the guard, just before: on a busy computer it may be later by now
        waited = (now - self.sent[-1][0]) * self.rate if self.sent else np.inf
        start = np.zeros(3) if waited > LATE else self._speed
        growth = float(np.max(np.abs(speed - start) / self.limits.acceleration[:3]))
        good = (
            bool(np.isfinite(command).all())
            and bool((np.abs(speed) <= np.array(self.limits.speed[:3]) + 1e-4).all())
            and growth * self.rate <= 1.0 + 2e-3
            and self._follows(move)
            and bool(((end >= low - 1e-3) | (move >= 0)).all() and ((end <= high + 1e-3) | (move <= 0)).all())
        )
        self.violations += not good
        self._speed = speed
        self.sent.append((now, float(np.abs(command[:3]).max())))
        self.inner.send(action)

    def _follows(self, move: NDArray[np.float64]) -> bool:
        """Whether the setpoint stays within the following error of the pose that was shown."""
        goal, most = self.inner.setpoint(), self.limits.followed(self.actions.dim)[:3]
        return goal is None or self._shown is None or bool((np.abs(goal + move - self._shown) <= most + 1e-3).all())

    def stop(self) -> None:
        self.stopped_at = min(self.stopped_at, self.inner.now())
        self.inner.stop()

    def still_after(self, at: float) -> float | None:
        """Seconds from `at` to when nothing moves any more; None: it went on."""
        moving = [when for when, size in self.sent if when >= at and size > _STILL]
        if np.isinf(self.stopped_at) and moving and moving[-1] == self.sent[-1][0]:
            return None
        later = [when for when, _ in self.sent if when > (moving[-1] if moving else at)]
        return max(0.0, min([*later[:1], self.stopped_at]) - at)


class Commands(TeleopCommander):
    """The script of the robot, or what goes wrong with it."""

    def __init__(self, robot: Faulty, rng: np.random.Generator) -> None:
        super().__init__(Script(robot))
        self.robot, self.rng = robot, rng

    def act(self, seen: Seen, keys: str) -> NDArray[np.generic] | None:
        action = super().act(seen, keys)
        if self.robot.now() >= self.robot.at and self.robot.fault == "crash":
            self.robot.at = self.robot.now()
            raise RuntimeError("the policy crashed")
        if self.robot.now() >= self.robot.at and self.robot.fault == "jumps":
            wild = self.rng.choice([np.nan, np.inf, -np.inf, 1e30, -50.0, 50.0, 1.0, -1.0], 4)
            return np.asarray(wild, np.float64)
        if self.robot.now() >= self.robot.at and self.robot.fault == "units":
            return np.asarray(action, np.float64) * [1000.0, 1000.0, 1000.0, 1.0]
        return action


class Operator(Keys):
    """Presses the stop key when the fault is that."""

    def __init__(self, robot: Faulty) -> None:
        self.is_terminal, self.robot = False, robot

    def pressed(self, wait: float = 0.0) -> str:
        if self.robot.now() >= self.robot.at and self.robot.fault == "hangup":
            os.kill(os.getpid(), signal.SIGHUP)
        if self.robot.now() >= self.robot.at and self.robot.fault == "program":
            self.robot.violations += not self.is_refused()
        # with a server, half a second shows whether it stands
        after = {"operator": 0.0, "server": 0.5, "network": 0.5}.get(self.robot.fault, np.inf)
        return " " if self.robot.now() - self.robot.at >= after else ""

    def is_refused(self) -> bool:
        other = Claim()
        try:
            other.take([self.robot.address], "a second program")
        except PrismError:
            return True
        other.release()
        return False


# ------------------------------------------------------------------ a server, and the wire to it

INFO: dict[str, Any] = {
    "sensors": [{"name": "proprio", "kind": "vector", "shape": [4]}],
    "needs": ["proprio"],
    "action_dim": 4,
    "action": {"kind": "delta"},
    "keep": [3],
    "fps": 10.0,
    "obs_horizon": 1,
    "pred_horizon": 16,
    "exec_horizon": 2,
}


def serve(port: Any) -> None:
    """Up and down for ever, 0.15 m/s; in a process that can be killed."""
    from websockets.sync.server import serve as listen

    def answer(connection: Any) -> None:
        connection.send(wire.pack(INFO))
        with contextlib.suppress(Exception):
            for number, _ in enumerate(connection):
                rows = np.zeros((16, 4), np.float32)
                rows[:, 2] = np.where((np.arange(16) + number) % 8 < 4, 0.5, -0.5)
                connection.send(wire.pack({"actions": rows, "absent": []}))

    with listen(answer, "127.0.0.1", 0) as server:
        port.send(server.socket.getsockname()[1])
        server.serve_forever()


class Wire:
    """A TCP connection from `port` to a server, until `cut`: then nothing passes, and nobody hears of it."""

    def __init__(self, target: int) -> None:
        self.cut, self._target = threading.Event(), target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends.append(far)
                for a, b in ((near, far), (far, near)):
                    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    thread = threading.Thread(target=self._pass, args=(a, b), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                if self.cut.is_set():
                    return
                b.sendall(data)
            b.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._accepting.join()
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@contextlib.contextmanager
def server() -> Iterator[tuple[Any, int]]:
    context = multiprocessing.get_context("forkserver")  # a fork of this process might inherit a lock that is held
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(60.0):
            raise PrismError("the server of the trial did not start within a minute")
        yield process, here.recv()
    finally:
        process.kill()
        process.join()
        process.close()
        for end in (here, there):
            end.close()


def play_remote(robot: Faulty, guard: Guard, rng: np.random.Generator, seed: int, fault: str) -> Trace:
    """An episode that a server plans; it, or the wire to it, dies on the way."""
    trace = Trace(robot)
    robot.fault, robot.at = fault, np.inf
    with server() as (process, port):
        line = Wire(port)
        planner = RemotePlanner(f"ws://127.0.0.1:{line.port}", silence=0.03, timeout=0.5, retry_for=0.3)
        executor = Executor(planner, lost="stop", patience=0.4 / robot.rate, max_held=10)
        after = float(rng.uniform(0.3, 1.4))
        over = threading.Event()  # an episode may end before its first command: then there is nothing to fail

        def fail() -> None:
            over.wait(after)
            while not robot.sent:
                if over.wait(0.01):
                    return
            robot.at = robot.inner.now()
            process.kill() if fault == "server" else line.cut.set()

        killer = threading.Thread(target=fail)
        killer.start()
        try:
            with steady(realtime=True):
                drive(guard, PolicyCommander(executor), seed, _SECONDS, Operator(robot), trace)
        finally:
            over.set()
            killer.join()
            line.close()
            planner.close()
    return trace


# ------------------------------------------------------------------ the study


def play(guard: Guard, robot: Faulty, rng: np.random.Generator, seed: int, fault: str) -> Trace:
    """One episode of the script."""
    robot.fault, trace = fault, Trace(robot)
    robot.at = robot.now() + float(rng.uniform(0.2, 1.4)) if fault else np.inf
    try:
        with hangups():
            drive(guard, Commands(robot, rng), seed, robot.episode_seconds, Operator(robot), trace)
    except TerminalLost as lost:  # as robots/program.py does
        guard.stop(str(lost))
    return trace


@contextlib.contextmanager
def hangups() -> Iterator[None]:
    """SIGHUP as in prism run, and afterwards as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_by_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Count:
    injected: int = 0
    missed: int = 0
    recovered: int = 0
    recorded: int = 0
    kept: int = 0

    def take(self, robot: Faulty, trace: Trace, fault: str, took: dict[str, list[float]]) -> None:
        at = robot.at
        happened = robot.now() >= at and (robot.stopped_at >= at and bool(robot.sent))
        self.injected += happened
        if happened and fault not in GOES_ON:
            seconds = robot.still_after(at)
            self.missed += seconds is None
            if seconds is not None:
                took[fault].append(1e3 * seconds)
        if len(trace) > 1:
            self.recorded += 1
            self.kept += trace.episode()[0].length == len(trace)


def run(config: Config, console: Console) -> dict[str, Any]:
    with _quiet("prism.inference.health", "prism_client", "websockets"):  # they would say every fault
        return study(config, console)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def study(config: Config, console: Console) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    robot, real = (Faulty(make_robot("ur5e-twin", [f"realtime={clock}"])) for clock in ("false", "true"))
    guards = []
    for one in (robot, real):
        one.connect()
        guards.append(Guard(one, one.limits))
    took: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    count = Count()
    for trial in track(range(config.count), "faults", console=console, transient=True):
        fault, seed = FAULTS[trial % len(FAULTS)], config.seed + trial
        if fault in REMOTE:
            count.take(real, play_remote(real, guards[1], rng, seed, fault), fault, took)
        else:
            count.take(robot, play(guards[0], robot, rng, seed, fault), fault, took)
        play(guards[0], robot, rng, seed + 50_000, "")
        count.recovered += bool(robot.success())
    guards[1].close()
    everything = [ms for times in took.values() for ms in times]
    return {
        "injected": count.injected,
        "violations": robot.violations + real.violations,
        "stopped_in_ms": _spread(everything),
        "by_fault": {fault: {"count": len(times), **_spread(times)} for fault, times in took.items() if times},
        "missed": count.missed,
        "recovered": count.recovered / config.count,
        "recorded": count.kept / max(count.recorded, 1),
        "count": config.count,
        "load": os.getloadavg()[0],
        **run_info(config.seed),
    }


def _spread(times: list[float]) -> dict[str, float]:
    found = np.array(times or [0.0])
    return {"p50": float(np.median(found)), "p99": float(np.quantile(found, 0.99)), "max": float(found.max())}


def show(result: dict[str, Any], console: Console) -> None:
    for key in ("injected", "violations", "missed", "recovered", "recorded", "stopped_in_ms"):
        console.print(f"{key}: {result[key]}", highlight=False)
    for fault, row in result["by_fault"].items():
        console.print(f"  {fault}: {row['count']}, p50 {row['p50']:.0f}, max {row['max']:.0f} ms", highlight=False)
