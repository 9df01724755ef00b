"""One executor, two transports: what it does with a policy in this process, it does with a server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prism_client import ActionKind, Executor, HoldError, PlanError, RefusedError, RemotePlanner
from torch import Tensor

from prism.controller import Controller, ControllerConfig
from prism.inference.backends import Backend, BackendPolicy, EagerBackend
from prism.inference.lanes import LocalPlanner
from prism.methods.prism import PrismPolicy
from prism.rows import Random
from prism.selection import SelectionConfig
from tests.policy_fakes import ACTION_DIM, small_config, small_policy
from tests.server_fakes import serving

TP, TA = 8, 4
TRANSPORTS = pytest.mark.parametrize("transport", ["local", "socket"])
FIRST = SelectionConfig(rule="first", initial="first")


class Ramp(EagerBackend):
    """Row j of a plan for an observation with proprio (t, ...) is 100 t + j; plans wait for the gate."""

    def __init__(self, policy: PrismPolicy) -> None:
        super().__init__(policy)
        self.gate = threading.Event()
        self.gate.set()
        self.failing = False

    def features(self, sensor: int, stream: Tensor) -> Tensor:
        return stream.float()

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def plan(self, steps: Tensor, candidates: int, rng: Random) -> Tensor:
        self.gate.wait(30.0)
        if self.failing:
            raise RuntimeError("out of memory")
        rows = 100 * steps[:, -1, 0].reshape(-1, 1, 1, 1) + torch.arange(TP).reshape(1, 1, TP, 1)
        return self.policy.normalizer.normalize_actions(rows.expand(-1, candidates, -1, ACTION_DIM).float())


def ramp(dropout: float = 0.0, kind: ActionKind = ActionKind.ABSOLUTE) -> Ramp:
    small = small_config(pred_horizon=TP)
    small = dataclasses.replace(small, encoder=dataclasses.replace(small.encoder, dropout=dropout))
    policy = small_policy(small, kind=kind)
    for encoder in policy.encoder.encoders:  # as wide as what `features` gives
        encoder.absent = torch.nn.Parameter(torch.zeros(encoder.spec.shape))  # type: ignore[union-attr,assignment]
    return Ramp(policy.eval())


@contextlib.contextmanager
def driving(transport: str, backend: Backend, selection: SelectionConfig = FIRST, **options: Any) -> Iterator[Executor]:
    config = ControllerConfig(exec_horizon=TA, candidates=2, selection=selection)
    with contextlib.ExitStack() as stack:
        if transport == "local":
            planner: Any = LocalPlanner(backend, config)
        else:
            server = stack.enter_context(serving(BackendPolicy(backend), config))
            planner = RemotePlanner(f"ws://127.0.0.1:{server.port}", retry_for=1.0, first_pause=0.02)
        yield stack.enter_context(Executor(planner, **{"blend": 0, "margin": math.inf, "look": False, **options}))


def see(t: float) -> dict[str, np.ndarray]:
    return {"proprio": np.array([t, 0.1, -t], np.float32), "object_state": np.linspace(t, 1.0, 5).astype(np.float32)}


def settle(executor: Executor, condition: Callable[[], bool]) -> None:
    """Until a reply has made it true."""
    deadline = time.monotonic() + 30
    while not condition():
        executor._collect()
        assert time.monotonic() < deadline
        time.sleep(2e-3)


def answered(executor: Executor) -> None:
    settle(executor, lambda: executor._asked is None and executor._heard == executor.stats.steps - 1)


def first(action: np.ndarray) -> float:
    return round(float(action[0]), 2)


@TRANSPORTS
def test_a_plan_is_entered_at_the_row_that_is_due_and_a_late_one_after_a_hold(transport: str) -> None:
    backend = ramp()
    with driving(transport, backend) as executor:
        actions = []
        for t in range(12):  # the plan of step 4 does not come: the old one to its end, then hold
            if t == 4:
                answered(executor)
                backend.gate.clear()
            actions.append(first(executor.act(see(t))))
            if t == 4:
                settle(executor, lambda: transport == "local" or executor.planner._sending)  # type: ignore[attr-defined]
        assert actions == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
        assert executor.stats.held == 4
        assert "held=4" in str(executor.stats)
        assert "deque" not in str(executor.stats)  # a line, to be printed
        backend.gate.set()
        settle(executor, lambda: executor._asked is None)
        assert first(executor.act(see(12))) == 404  # four of its rows were executed from the old one
        answered(executor)


@TRANSPORTS
@pytest.mark.parametrize(("kind", "held"), [(ActionKind.ABSOLUTE, [7, 7, 7]), (ActionKind.DELTA, [0, 0, 7])])
def test_a_hold_stands_still_as_the_run_says_and_ends_the_loop(transport: str, kind: Any, held: list[float]) -> None:
    backend = ramp(kind=kind)
    selection = FIRST if kind is ActionKind.ABSOLUTE else dataclasses.replace(FIRST, pose_dims=2)
    with driving(transport, backend, selection, max_held=6) as executor:
        assert executor.action_kind == kind
        executor.act(see(0))
        backend.gate.clear()
        for t in range(1, 8):
            executor.act(see(t))
        for t in range(8, 14):
            np.testing.assert_allclose(executor.act(see(t)), held, atol=1e-2)
        with pytest.raises(HoldError, match="6 steps in a row"):
            executor.act(see(14))
        backend.gate.set()


@TRANSPORTS
def test_an_observation_that_cannot_be_used_stops_a_resting_robot_and_no_moving_one(transport: str) -> None:
    wrong = {"proprio": np.zeros(9, np.float32)}
    with driving(transport, ramp()) as executor:
        with pytest.raises(RefusedError, match="sensor 'proprio': the policy was trained with shape"):
            executor.act(wrong)
        assert first(executor.act(see(1))) == 100
        assert first(executor.act(wrong)) == 101
        answered(executor)
        assert executor.stats.refused == 2
        assert "sensor 'proprio'" in executor.stats.error
        assert first(executor.act(see(3))) == 102
        answered(executor)
        assert executor.stats.refused == 2


@TRANSPORTS
def test_a_planner_that_fails_is_reported_and_the_robot_goes_on(transport: str) -> None:
    backend = ramp()
    with driving(transport, backend) as executor:
        for t in range(4):
            executor.act(see(t))
        backend.failing = True
        assert first(executor.act(see(4))) == 4
        settle(executor, lambda: executor.stats.errors > 0)
        backend.failing = False
        assert "out of memory" in executor.stats.error or "internal error" in executor.stats.error
        assert first(executor.act(see(5))) == 5
        settle(executor, lambda: executor.stats.plans == 2)
        assert first(executor.act(see(6))) in (401, 402, 501)  # as soon as it can: a server closes the connection


@TRANSPORTS
def test_a_sensor_that_was_never_missing_in_training_stops_the_robot(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    blind = {"object_state": see(0)["object_state"]}
    with driving(transport, ramp()) as executor:
        with pytest.raises(PlanError, match="absent: 'proprio', which the policy requires"):
            executor.act(blind)
        executor.reset()
        for t in range(2):
            assert first(executor.act(see(t))) == t
        executor.act(blind)
        answered(executor)
        command = executor.step(blind)
        assert (command.source, command.decision, first(command.action)) == ("hold", "stop", executor_last(transport))
        assert executor.stats.absent == ("proprio",)
        answered(executor)
        assert executor.stats.absent_steps["proprio"] >= 2
        executor.act(see(4))
        answered(executor)
        assert executor.step(see(5)).source == "plan"
        assert executor.stats.absent == ()
    assert "which the policy requires" in caplog.text
    with driving(transport, ramp(dropout=0.2)) as executor:  # trained without: it goes on
        executor.act(see(0))
        executor.act(blind)
        answered(executor)
        assert executor.step(blind).source == "plan"
        assert executor.stats.absent == ("proprio",)


def executor_last(transport: str) -> float:
    """What is held: in this process the absence is known at once, over a network a step later."""
    return 1 if transport == "local" else 2


@TRANSPORTS
def test_a_simulator_gets_the_actions_of_the_controller(transport: str) -> None:
    """With asynchronous=False both transports are `prism eval`: the same seed, the same actions."""
    policy = small_policy(small_config(pred_horizon=TP))
    config = ControllerConfig(exec_horizon=TA, candidates=2)
    alone = Controller(policy, config)
    with driving(transport, EagerBackend(policy), config.selection, asynchronous=False) as executor:
        for seed in (5, 6):
            alone.reset(seed)
            executor.reset(seed)
            for t in range(10):
                expected = alone.act(see(0.1 * t))
                np.testing.assert_allclose(executor.act(see(0.1 * t)), expected, rtol=1e-4, atol=1e-5)
        assert executor.stats.plans == 3
        assert executor.stats.spread > 0
