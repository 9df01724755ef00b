"""What is said of a policy and of a plan: it survives the wire, and what cannot be is refused where it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prism_client import ActionKind, Plan, PlanError, PlanInfo, PolicyInfo, wire
from prism_client.messages import ActionInfo, SensorInfo, absent_of

ARM = PolicyInfo(
    action_dim=5,
    action=ActionInfo(
        ("qx", "qy", "qz", "qw", "gripper"),
        (0,),
        "arm",
        ActionKind.ABSOLUTE,
        ("", "", "", "", "mm"),
        (1, 1, 1, 1, 10.0),
    ),
    pred_horizon=16,
    exec_horizon=8,
    obs_horizon=2,
    memory=9,
    fps=10.0,
    candidates=16,
    sensors=(
        SensorInfo("proprio", "vector", (2,), mean=(0.5, 0.25), std=(1.0, 2.0), seen={"low": [0.0, 1.0]}),
        SensorInfo("eye", "rgb", (8, 8, 3), "uint8", 4, colour=(1.0, 2.0, 3.0)),
    ),
    needs=("proprio",),
    keep=(4,),
    action_scale=(1.0, 1.0, 1.0, 1.0, 0.5),
    action_range=((-1.0,) * 5, (1.0,) * 5),
    method="prism",
    policy="arm-3",
)


@pytest.mark.parametrize("info", [ARM, PolicyInfo()])
def test_a_policy_is_told_over_a_wire(info: PolicyInfo) -> None:
    told = wire.unpack(wire.pack({**info.to_wire(), "server": "prism", "unknown": [1]}))
    assert PolicyInfo.from_wire(told) == info
    assert not info.differs(PolicyInfo.from_wire(told))


def test_what_differs_is_named() -> None:
    other = PolicyInfo.from_wire({**ARM.to_wire(), "fps": 20.0, "needs": []})
    assert ARM.differs(other) == ["fps", "needs"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fps": "fast"}, "'fps' must be a number"),
        ({"fps": float("nan")}, "'fps' must be a number"),
        ({"action_dim": 2.5}, "'action_dim' must be a whole number"),
        ({"exec_horizon": True}, "'exec_horizon' must be a whole number"),
        ({"action": {"kind": "sideways"}}, "'action.kind' must be one of absolute, delta, velocity"),
        ({"action": ["delta"]}, "'action' must hold names and values"),
        ({"sensors": {"proprio": 1}}, "'sensors' must be a list"),
        ({"sensors": [{"name": 3}]}, "'name' must be text"),
        ({"sensors": [{"name": "eye", "shape": ["8"]}]}, "'shape' must be a whole number"),
        ({"needs": "proprio"}, "'needs' must be a list of names"),
        ({"action_range": [[0.0]]}, "'action_range' must be two lists"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PolicyInfo.from_wire({**ARM.to_wire(), **change})


def test_a_plan_is_told_over_a_wire() -> None:
    info = PlanInfo(4, 3, 1, 0.5, 2, True, False, None, 12.5)
    rows, fan = np.ones((8, 2), np.float32), np.zeros((3, 8, 2), np.float32)
    told = wire.unpack(wire.pack({"actions": rows, "all_candidates": fan, "absent": ["eye"], **info.to_reply()}))
    plan = Plan.from_reply(told)
    assert plan.info == info
    np.testing.assert_array_equal(plan.actions, rows)
    assert plan.candidates.shape == (3, 8, 2)
    assert absent_of(told) == ("eye",)
    assert Plan.from_reply({"actions": rows}).info == PlanInfo(), "another server says less"
    assert absent_of({}) is None


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({}, "'actions' is missing"),
        ({"actions": [[0.0]], "spread": "wide"}, "'spread' must be a number"),
        ({"actions": [[0.0]], "modes": None}, "'modes' must be a whole number"),
        ({"actions": [[0.0]], "mode_switch": 1}, "'mode_switch' must be true or false"),
        ({"actions": [[0.0]], "all_candidates": [1.0]}, "'all_candidates' must be numbers"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(reply: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.from_reply(reply)


def test_a_plan_of_other_names_is_refused() -> None:
    with pytest.raises(PlanError, match="'absent' must be a list of names"):
        absent_of({"absent": [1]})
