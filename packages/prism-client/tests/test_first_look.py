"""What a policy was not trained on is refused before the first action, and its plans stay where they were shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prism_client import Executor, PlanError
from test_executor import DIM, FPS, TP, Script, commands, executor, run

STATE = {"name": "proprio", "kind": "vector", "shape": [3], "mean": [0.5, 0.0, 0.2], "std": [0.1, 0.08, 0.05]}
EYE = {"name": "eye", "kind": "rgb", "shape": [24, 32, 3], "colour": [120.0, 90.0, 60.0]}


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (24, 32)) -> Any:
    return np.broadcast_to(np.array(colour, np.uint8), (*size, 3)).copy()


def shown(**more: Any) -> dict[str, Any]:
    return {"proprio": np.array([0.45, 0.1, 0.25], np.float32), "eye": picture((130, 95, 66)), **more}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"proprio": np.array([45.0, 10.0, 25.0], np.float32)}, "'proprio': number 2 is 25, in training it was 0.2"),
        ({"proprio": np.array([0.45, 0.1], np.float32)}, "'proprio' is 2, the policy's 3: it is another sensor"),
        ({"eye": picture((130, 95, 66), (48, 64))}, "'eye' is 48 x 64 x 3, the policy's 24 x 32 x 3: resize it"),
        ({"eye": picture((66, 95, 130))}, "are red and blue swapped"),
    ],
)
def test_what_the_policy_was_not_trained_on_is_refused_before_the_first_action(
    wrong: dict[str, Any], said: str
) -> None:
    planner = Script([0.0], sensors=[STATE, EYE])
    control = executor(planner)
    with pytest.raises(PlanError, match=said):
        control.act(shown(**wrong))
    assert not planner.requests, "nothing was planned"
    assert executor(planner, look=False).act(shown(**wrong)).shape == (DIM,)


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"proprio": np.array([0.9, -0.3, 0.0], np.float32)},  # elsewhere
        {"eye": picture((40, 30, 20))},  # darker
        {"eye": picture((90, 92, 95))},  # a grey scene
        {"eye": None},  # absent: that is for others to judge
    ],
)
def test_another_scene_is_no_fault(fine: dict[str, Any]) -> None:
    seen = {name: value for name, value in shown(**fine).items() if value is not None}
    assert executor(Script([0.0], sensors=[STATE, EYE])).act(seen).shape == (DIM,)


def test_a_planner_that_says_nothing_of_its_sensors_is_not_asked_to() -> None:
    assert executor(Script([0.0])).act(shown()).shape == (DIM,)


@pytest.mark.parametrize(("rate", "fits"), [(3.0, False), (30.0, False), (10.0, True), (9.0, True), (12.0, True)])
def test_a_loop_at_another_rate_than_the_data_is_stopped(rate: float, fits: bool) -> None:
    """10 Hz in the data. At 3 Hz a robot crawls through its plans, at 30 Hz it races."""
    planner = Script([0.0])
    control = executor(planner)

    def loop() -> None:
        for step in range(30):
            planner.clock.now = step / rate
            control.act({})

    if fits:
        loop()
        return
    with pytest.raises(PlanError, match=f"the loop makes {rate:g} steps a second, the policy's data have 10"):
        loop()
    assert control.stats.steps <= 12


def test_one_pause_is_not_another_rate() -> None:
    planner = Script([0.0])
    control = executor(planner)
    for step in range(30):
        planner.clock.now = step / FPS + (5.0 if step > 4 else 0.0)
        control.act({})


def test_plans_stay_within_the_demonstrations_and_constants_constant() -> None:
    """Numbers 0, 1, 2, ... in all three dimensions; shown were 2 to 6, always 3, and -10 to 10."""
    planner = Script([0.0], action_range=[[2.0, 3.0, -10.0], [6.0, 3.0, 10.0]])
    found = np.array([command.action for command in commands(executor(planner), 12)])
    assert found[:, 0].min() == pytest.approx(1.8)
    assert found[:, 0].max() == pytest.approx(6.2)
    assert (found[:, 1] == 3.0).all()
    assert found[:10, 2].tolist() == list(range(10)), "what is within is not even rounded"
    control = executor(planner, margin=0.5)
    assert max(run(control, TP)) == pytest.approx(7.0)  # 6 and half of 4 beyond: all of the plan
    assert control.stats.summary()["plans_beyond_demonstrations"] == control.stats.beyond > 0


def test_positions_are_joined_and_changes_are_not() -> None:
    """A gap of 10 between two plans: of a position it is faded out; added to changes it would stay in the pose."""
    for kind, said in (("absolute", 3), ("delta", 0), ("velocity", 0)):
        planner = Script([0.0], {1: 10.0}, action={"kind": kind})
        control = Executor(planner, clock=planner.clock)
        steps = np.diff(run(control, 8))
        assert control._blend == said
        assert steps.max() == pytest.approx(1 + 10 / 4 if said else 11), kind
