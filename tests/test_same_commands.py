"""Given the same candidates, every way to execute a policy commands the same, bit for bit.

Compared before the Guard and before clipping, with a planner that answers at once and with one that is two steps late.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prism.controller import Controller
from prism.inference.backends import BackendPolicy
from tests.golden import streams
from tests.golden.streams import CASES, SEED, STEPS, Case, World

pytest.importorskip("websockets")

LATE = 2  # steps
ALIKE = ("commit", "last_action", "proxy_score", "restless", "smoothing", "ensemble", "jerk", "absent", "changes")
ROTATIONS = ("turning", "turning-smoothing", "turning-jerk")
OPTIONS = {"absent": "continue", "blend": 0, "margin": np.inf}


def of(name: str, late: int) -> Case:
    case = CASES[name]
    return replace(case, controller=replace(case.controller, delay=late))


def commands(stream: dict[str, NDArray[Any]]) -> NDArray[Any]:
    return stream["commands"]


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("name", [*ALIKE, *ROTATIONS])
def test_eval_run_and_serve_command_the_same(name: str, late: int) -> None:
    case = of(name, late)
    with torch.inference_mode():
        played = commands(streams.evaluated(case))
        ran = commands(streams.run_here(case, late, asynchronous=late > 0, **OPTIONS))
        served = commands(streams.served(case, late, asynchronous=late > 0, **OPTIONS))
    assert played.dtype == ran.dtype == served.dtype == np.float32
    np.testing.assert_array_equal(ran, played)
    np.testing.assert_array_equal(served, played)


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("name", ["commit", "jerk", "changes", "turning"])
def test_what_is_joined_and_cut_is_stored_with_the_run_and_the_same_everywhere(name: str, late: int) -> None:
    case = of(name, late)
    stored = replace(case, controller=replace(case.controller, join=3, margin=0.05))
    with torch.inference_mode():
        plain, played = commands(streams.evaluated(case)), commands(streams.evaluated(stored))
        ran = commands(streams.run_here(stored, late, asynchronous=late > 0, absent="continue"))
        served = commands(streams.served(stored, late, asynchronous=late > 0, absent="continue"))
    np.testing.assert_array_equal(ran, played)
    np.testing.assert_array_equal(served, played)
    if late and name != "changes":
        assert not np.array_equal(plain, played), "a late plan of positions is joined"
    if name != "turning":
        assert (np.abs(played) <= 1.1 * np.array([1.0, 2.0, 0.5, 1.0]) + 1e-6).all()


def test_a_plan_that_comes_in_time_is_not_joined_and_runs_from_before_keep_what_they_have() -> None:
    case = of("commit", 0)
    stored = replace(case, controller=replace(case.controller, join=3, margin=9.0))
    with torch.inference_mode():
        plain = commands(streams.evaluated(case))
        np.testing.assert_array_equal(commands(streams.evaluated(stored)), plain)
        np.testing.assert_array_equal(commands(streams.run_here(stored, 0)), plain)
        assert not np.array_equal(commands(streams.run_here(case, 0)), plain)  # joined, as `prism run` did it


def acted(case: Case) -> NDArray[Any]:
    """Controller.act, with the seed that LeRobot's first environment has."""
    controller, world, found = (
        Controller(BackendPolicy(streams.backend_for(case.arm)), case.controller),
        World(case.arm),
        [],
    )
    seen = world.reset(SEED)
    for _ in range(STEPS):
        found.append(controller.act(seen))
        seen = world.step(found[-1]).observation
    return np.stack(found)


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("name", ["commit", "jerk", "changes", *ROTATIONS])
def test_lerobot_commands_the_same(name: str, late: int) -> None:
    """select_action; packages/lerobot_policy_prism/tests has it with LeRobot itself."""
    case = of(name, late)
    with torch.inference_mode():
        np.testing.assert_array_equal(commands(streams.selected(case, rows=1))[:, 0], acted(case))


@pytest.mark.parametrize("name", ["commit", "smoothing", "jerk", "changes", *ROTATIONS])
def test_real_time_chunking_executes_the_plans_of_a_late_planner(name: str) -> None:
    with torch.inference_mode():
        np.testing.assert_array_equal(commands(streams.chunked(CASES[name], LATE, every=True)), acted(of(name, LATE)))


def test_a_late_plan_is_chosen_with_the_pose_of_its_observation() -> None:
    """And not with the pose at which it comes."""
    near, far = (np.full((streams.TP, 4), value, np.float32) for value in (0.0, 1.0))

    class Two(streams.Candidates):
        def plan(self, steps: torch.Tensor, candidates: int, rng: Any) -> torch.Tensor:
            return self.policy.normalizer.normalize_actions(torch.from_numpy(np.stack([near, far]))[None])

    case = of("proxy_score", LATE)
    backend = Two(streams.backend_for(case.arm).policy, case.arm)
    controller = Controller(BackendPolicy(backend), case.controller)
    for step in range(8):  # it jumps from one end to the other right after the second plan was asked for
        at = np.full(4, 0.0 if step <= case.controller.exec_horizon else 1.0, np.float32)
        action = controller.act({"proprio": at, "goal": np.zeros(3, np.float32)})
    assert controller.replans[-1].step == case.controller.exec_horizon
    assert float(action[0]) == pytest.approx(0.0, abs=1e-6)
