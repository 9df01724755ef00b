"""The whole chain as a machine: random policies, sensors, faults, clocks, takeovers, reconnects and signals, against
the spaces of every twin and stand-ins of the drivers, on a simulated clock. chain_model.py judges what is sent.

No command beyond position, speed, acceleration, following error or force; nothing after a stop; no NaN on any wire.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism_client import ActionKind, Executor, Plan, PlanError, Reply, Step
from prism_client.messages import ActionInfo, PolicyInfo

from prism.errors import PrismError
from prism.robots.guard import Guard
from prism.robots.loop import PolicyCommander, Takeover
from prism.robots.program import Program
from tests.chain_model import NOISE, Driven, Naive, model_of, plain_space, twin_spaces
from tests.test_robots_loop import Typed

STEPS, SLOW_STEPS = 10_000, 1_000_000
KINDS = ("absolute", "delta", "velocity")
COUNTED: Counter[str] = Counter()  # ticks of all machines, and what they met


class Planner:
    """Random plans, some of which are no plans."""

    def __init__(self, robot: Any, rng: np.random.Generator) -> None:
        self.robot, self.rng, self.mood, self.left = robot, rng, "calm", 0
        kind = str(robot.actions.spec.kind)
        self.info = PolicyInfo(
            action_dim=robot.actions.dim,
            action=ActionInfo(kind=ActionKind(kind)),
            keep=robot.actions.spec.grippers,
            fps=robot.fps,
            pred_horizon=8,
            exec_horizon=4,
        )
        self.replies: list[Reply] = []

    def submit(self, step: Step) -> None:
        actions, error = self.rows(), None
        if self.mood == "fails":
            error = PlanError("the policy failed")
        self.replies.append(Reply(step, (), None if error else Plan(actions), True, error))

    def rows(self) -> np.ndarray:
        space, model = self.robot.actions, model_of(self.robot)
        low, high = np.array(self.robot.limits.position).T
        low, high = np.nan_to_num(low, neginf=-1), np.nan_to_num(high, posinf=1)
        speed = np.nan_to_num(np.array(self.robot.limits.speed), posinf=1.0)
        kinds, rng = np.array(space.kinds), self.rng
        size = {"calm": 0.3, "fast": 1.0, "one way": 1.5, "wild": 30.0}.get(self.mood, 1.0)
        there = rng.uniform(low - 0.1, high + 0.1, (8, space.dim))
        if self.mood in ("calm", "fast"):
            there = model.goal + size * 0.1 * (there - model.goal)
        way = size * speed * (np.ones((8, space.dim)) if self.mood == "one way" else rng.uniform(-1, 1, (8, space.dim)))
        moves = np.where(kinds == "velocity", way, way / self.robot.fps)
        rows = np.where(kinds == "absolute", there, moves) / space.scales
        for first in space.spec.quaternions:
            rows[:, first : first + 4] = rng.standard_normal((8, 4))
        if self.mood == "wild":
            rows[rng.random(rows.shape) < 0.1] = rng.choice([math.nan, math.inf, -math.inf, 1e30])
        return rows.astype(np.float32)

    def poll(self, timeout: float = 0.0) -> Reply | None:
        return self.replies.pop(0) if self.replies else None

    def trouble(self) -> str:
        self.left -= self.left > 0
        return "the network is gone" if self.left else ""

    def reset(self, seed: int | None = None) -> None:
        self.replies = []

    def close(self) -> None: ...


class Person:
    """Takes over at random, and pushes."""

    who, help = "operator", ""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.taken = planner, False

    def start(self, seed: int) -> None: ...

    def act(self, seen: Any, keys: str) -> Any:
        return self.planner.rows()[0]

    def wants(self, keys: str, own: Any, policys: Any) -> bool:
        return self.taken

    def close(self) -> None: ...


def make(which: str, seed: int) -> Any:
    if which.startswith("driven "):
        return Driven(which.removeprefix("driven "), seed)
    if which.startswith("naive "):
        return Naive(*plain_space(which.removeprefix("naive ")), seed)
    return Naive(*twin_spaces()[which], seed)


ROBOTS = (*(f"naive {kind}" for kind in KINDS), *(f"driven {kind}" for kind in KINDS), "ur5e-twin", "go2-twin")
BAD: dict[str, Any] = {
    "missing": None, "nan": lambda dims: np.full(dims, np.nan, np.float32), "swapped": lambda dims: np.zeros((4, 4)),
    "null": lambda dims: np.array([None] * dims, np.float32), "huge": lambda dims: np.full(dims, 1e30, np.float32),
}  # fmt: skip


class Chain(RuleBasedStateMachine):
    which: ClassVar[str] = ROBOTS[0]

    @initialize(seed=st.integers(0, 2**16), lag=st.sampled_from([0.0, 0.05, 0.1]))
    def build(self, seed: int, lag: float) -> None:
        self.robot = make(self.which, seed)
        self.model = model_of(self.robot)
        self.model.lag = lag
        if isinstance(self.robot, Naive) and lag == 0.0 and seed % 2:
            self.robot.adds_up = False  # without a setpoint it goes at once
        self.planner = Planner(self.robot, np.random.default_rng(seed))
        executor = Executor(
            self.planner, asynchronous=False, patience=0.0, lost="stop", base=self.robot.actions.base,
            margin=self.robot.limits.margin, look=False, clock=self.robot.now,
        )  # fmt: skip
        self.person = Person(self.planner)
        self.commander = Takeover(PolicyCommander(executor), self.person)
        self.guard = Guard(self.robot, self.robot.limits)
        self.events: list[tuple[int, Any]] = []

    # -- what happens in the next episode, `after` ticks from its beginning

    def later(self, after: int, event: Any) -> None:
        self.events.append((after, event))

    @rule(after=st.integers(0, 40), mood=st.sampled_from(["calm", "fast", "one way", "wild", "fails"]))
    def policy(self, after: int, mood: str) -> None:
        self.later(after, lambda: setattr(self.planner, "mood", mood))

    @rule(after=st.integers(2, 40), taken=st.booleans())
    def takeover(self, after: int, taken: bool) -> None:
        self.later(after, lambda: setattr(self.person, "taken", taken))

    @rule(after=st.integers(2, 40), sensor=st.sampled_from(["proprio", "force"]), bad=st.sampled_from(sorted(BAD)),
          ticks=st.integers(1, 30))  # fmt: skip
    def sensor(self, after: int, sensor: str, bad: str, ticks: int) -> None:
        dims = self.model.dims if sensor == "proprio" else 3
        value = BAD[bad](dims) if BAD[bad] else None
        self.later(after, lambda: self.model.values.update({sensor: value}))
        self.later(after + ticks, lambda: self.model.values.pop(sensor, None))

    @rule(after=st.integers(2, 40), frozen=st.booleans())
    def encoder(self, after: int, frozen: bool) -> None:
        self.later(after, lambda: setattr(self.model, "frozen", self.model.body.copy() if frozen else None))

    @rule(after=st.integers(2, 40), delay=st.integers(0, 4))
    def backlog(self, after: int, delay: int) -> None:
        self.later(after, lambda: setattr(self.model, "delay", delay))

    @rule(after=st.integers(2, 40), seconds=st.sampled_from([-3600.0, -0.2, 0.2, 3600.0]), ticks=st.integers(1, 20))
    def clock(self, after: int, seconds: float, ticks: int) -> None:
        self.later(after, lambda: setattr(self.model, "offset", seconds))
        self.later(after + ticks, lambda: setattr(self.model, "offset", 0.0))

    @rule(after=st.integers(2, 40), late=st.floats(0.0, 0.3))
    def loop_is_late(self, after: int, late: float) -> None:
        def pause() -> None:
            self.model.time += late

        self.later(after, pause)

    @rule(after=st.integers(2, 40), blocked=st.booleans(), noise=st.sampled_from([0.0, NOISE]))
    def block(self, after: int, blocked: bool, noise: float) -> None:
        self.later(after, lambda: vars(self.model).update(blocked=blocked, noise=noise))

    @rule(after=st.integers(2, 40), newtons=st.sampled_from([15.0, 60.0, 500.0]))
    def hit(self, after: int, newtons: float) -> None:
        self.later(after, lambda: setattr(self.model, "force", newtons))

    @rule(after=st.integers(2, 40))
    def network(self, after: int) -> None:
        self.later(after, lambda: setattr(self.planner, "left", 5))

    @rule(after=st.integers(1, 40))
    def signal(self, after: int) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        self.later(after, interrupt)

    @rule()
    def repair(self) -> None:
        self.model.values, self.model.force, self.model.frozen = {}, 1.0, None
        self.model.blocked, self.model.delay, self.model.noise, self.model.offset = False, 0, 0.0, 0.0
        self.planner.mood, self.person.taken = "calm", False

    # -- an episode: from connecting to closing, as prism run does

    @rule(steps=st.integers(40, 80), key=st.sampled_from([None, None, 30]), seed=st.integers(0, 9))
    def episode(self, steps: int, key: int | None, seed: int) -> None:
        self.play(steps, key, seed)

    @rule(steps=st.integers(40, 80))
    def another(self, steps: int) -> None:
        self.play(steps, None, 0)

    @rule(steps=st.integers(40, 80))
    def one_without_faults(self, steps: int) -> None:
        self.repair()
        self.events = []
        self.play(steps, None, 0)

    def play(self, steps: int, key: int | None, seed: int) -> None:
        for after, event in self.events:
            self.model.events.setdefault(self.model.ticks + after + 1, []).append(event)
        self.events = []
        begun = self.model.ticks
        keys = Typed(*([""] * (key or 0)), "q") if key is not None else Typed()
        program = Program(
            self.guard, self.commander, keys, "chain", seconds=steps / self.robot.rate, say=lambda line: None
        )
        try:
            program.run([seed])
        except PrismError:
            COUNTED["stopped"] += 1
        except KeyboardInterrupt:
            COUNTED["interrupted"] += 1
        self.model.events.clear()
        COUNTED["ticks"] += self.model.ticks - begun
        assert self.guard.state == "stopped"
        assert self.guard.command(np.zeros(self.robot.actions.dim)).action is None, "nothing after a stop"

    @invariant()
    def nothing_beyond_the_limits(self) -> None:
        if found := getattr(getattr(self, "model", None), "judge", None):
            assert not found.found, found.found[:3]

    def teardown(self) -> None:
        if hasattr(self, "model"):
            COUNTED["commands"] += self.model.judge.commands


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No line for every fault; other tests hear them again."""
    loggers = [logging.getLogger(name) for name in ("prism.inference.health", "prism_client")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def run(which: str, steps: int, examples: int) -> None:
    COUNTED.clear()
    profile = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    machine: Any = type("Chain", (Chain,), {"which": which})
    run_state_machine_as_test(machine, settings=profile)
    assert COUNTED["ticks"] >= steps / len(ROBOTS)
    assert COUNTED["commands"] > COUNTED["ticks"] / 3, "most of the time it moves"


@pytest.mark.parametrize("which", ROBOTS)
def test_no_command_of_the_chain_is_beyond_a_limit(which: str) -> None:
    run(which, STEPS, 14)


@pytest.mark.slow
@pytest.mark.parametrize("which", ROBOTS)
def test_no_command_of_a_million_is_beyond_a_limit(which: str) -> None:
    run(which, SLOW_STEPS, 1500)
