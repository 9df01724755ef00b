"""An arm that takes positions on a base that takes velocities: a Go2 with an arm, LeRobot's LeKiwi."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prism_client import Executor, Plan, PlanError, PolicyInfo, Reply, Step

INFO = {"pred_horizon": 4, "exec_horizon": 4, "action_dim": 2, "fps": 10.0, "action": {"kind": "absolute"}}


class Plans:
    """One plan after the other, at once; then none."""

    def __init__(self, *plans: Any, **info: Any) -> None:
        self.info = PolicyInfo.from_wire({**INFO, **info})
        self._plans, self._replies = list(plans), list[Reply]()

    def submit(self, step: Step) -> None:
        if step.wants_plan and self._plans:
            self._replies.append(Reply(step, plan=Plan(np.array(self._plans.pop(0), np.float32)), is_plan=True))
        elif step.wants_plan:
            self._replies.append(Reply(step, is_plan=True, error=PlanError("none")))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        return self._replies.pop(0) if self._replies else None

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None: ...
    def close(self) -> None: ...


def run(steps: int, *plans: Any, info: Any = None, **options: Any) -> list[list[float]]:
    """(arm, base) of each step."""
    executor = Executor(Plans(*plans, **(info or {})), base=(1,), look=False, **options)
    return [np.round(executor.act({}), 5).tolist() for _ in range(steps)]


WALK = [[1.0, 0.5], [2.0, 0.5], [3.0, 0.5], [4.0, 0.5]]


@pytest.mark.parametrize("info", [{}, {"action": {"kind": "delta"}, "keep": [1]}])
def test_a_hold_stops_the_base(info: dict[str, Any]) -> None:
    still = 0.0 if info else 4.0
    assert run(6, WALK, info=info) == [*WALK, [still, 0.0], [still, 0.0]]


def test_slow_goes_as_far_with_the_base_as_at_full_speed() -> None:
    found = run(8, WALK, hook=lambda _: "slow", slow_factor=0.5)
    assert [arm for arm, _ in found][1::2] == [1.0, 2.0, 3.0, 4.0]
    assert [base for _, base in found] == [0.25] * 8


def test_velocities_of_the_base_are_not_joined() -> None:
    found = run(5, WALK, [[15.0, -0.5], [16.0, -0.5], [17.0, -0.5], [18.0, -0.5]], blend=3)
    assert {base for _, base in found} == {0.5, -0.5}
    assert any(4.0 < arm < 15.0 for arm, _ in found), "the arm's positions are"


def test_a_base_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="keep or base names dimension 7"):
        Executor(Plans(WALK), base=(7,))
