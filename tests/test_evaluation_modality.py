"""Dropping sensors: which sets, the same episodes, the numbers, the page."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prism.controller import Controller, ControllerConfig
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.evaluation.play import run_episode
from prism.report.charts import Bar, bar_chart
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.sims.environment import StepResult
from prism.types import Observation
from research.modality import DropSensors, charts, conditions, never_dropped, render, study, write_page
from research.modality_dropout import VIEWS, Config, SeenTwice, summarise
from tests.evaluation_fakes import PointEnv, PointPolicy, make_point_env
from tests.policy_fakes import small_config, small_policy


class LostPolicy(PointPolicy):
    """Walks to the goal while it sees it, stands still otherwise; needs no proprioception at the start."""

    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        plan = super().sample(observation, candidates, rng)
        return plan if bool(observation.present["goal"].all()) else torch.zeros_like(plan)


def make_lost_policy() -> LostPolicy:
    return LostPolicy(noise=0.0)


def test_each_sensor_each_pair_never_all() -> None:
    assert conditions(("a", "b", "c")) == [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]
    assert conditions(("a", "b"), most=1) == [(), ("a",), ("b",)]
    assert conditions(("a",)) == [(), ("a",)]
    assert len(conditions("abcdef")) == 1 + 6 + 15


def test_a_dropped_sensor_says_nothing() -> None:
    env = DropSensors(PointEnv(), ("goal",))
    assert set(env.reset(3)) == {"proprio"}
    result = env.step(np.ones(2, np.float32))
    assert set(result.observation) == {"proprio"}
    plain = PointEnv()
    plain.reset(3)
    assert result.score == plain.step(np.ones(2, np.float32)).score
    assert [s.name for s in env.sensors] == ["proprio", "goal"]
    with pytest.raises(PrismError, match="no sensor 'camera' to drop"):
        DropSensors(PointEnv(), ("camera",))


class TwoGoals(PointEnv):
    """A chain: the second command comes after five steps."""

    goal_index = 0

    def reset(self, seed: int) -> dict[str, NDArray[np.generic]]:
        self.goal_index = 0
        return super().reset(seed)

    def step(self, action: NDArray[np.float32]) -> StepResult:
        result = super().step(action)
        self.goal_index = self._steps // 5
        return replace(result, success=False, done=self._steps >= 10)


@pytest.mark.parametrize("dropped", [(), ("proprio",)])
def test_a_view_of_a_chain_starts_the_controller_anew_with_each_command(dropped: tuple[str, ...]) -> None:
    class Watched(Controller):
        def reset(self, seed: int = 0) -> None:
            super().reset(seed)
            seeds.append(seed)

    seeds: list[int] = []
    controller = Watched(PointPolicy(), ControllerConfig(exec_horizon=4, candidates=2))
    seeds.clear()
    env = DropSensors(TwoGoals(), dropped)
    run_episode(env, controller, 3)
    assert seeds == [3, 4]
    assert env.goal_index == 2
    assert DropSensors(PointEnv(), ()).goal_index == 0


def test_a_sensor_that_training_never_dropped_is_told() -> None:
    spec = small_policy(small_config()).spec
    assert never_dropped(spec, ("proprio", "object_state")) == ("proprio", "object_state")
    some = dataclasses.replace(small_config().encoder, dropout=0.3, sensor_dropout={"proprio": 0.0})
    assert never_dropped(small_policy(small_config(encoder=some)).spec, ("proprio", "object_state")) == ("proprio",)
    assert never_dropped(dataclasses.replace(spec, absent=("proprio",)), ("proprio", "object_state")) == (
        "object_state",
    )
    assert never_dropped(PointPolicy().spec, ("proprio",)) == ()  # says nothing of dropout
    controller = ControllerConfig(exec_horizon=4, candidates=2)
    found = study(make_lost_policy, "point", episodes=1, controller=controller, workers=1, env=make_point_env)
    assert found.note is None
    told = replace(found, untrained=("goal",))
    assert told.to_json()["untrained"] == ["goal"]
    assert "without dropout of goal" in told.to_json()["note"]
    assert "without dropout of goal" in render(told)
    assert "without dropout" not in render(found)


def test_study_measures_pairs_of_episodes_and_writes_the_figure(tmp_path: Path) -> None:
    controller = ControllerConfig(exec_horizon=4, candidates=2)
    found = study(make_lost_policy, "point", episodes=4, controller=controller, workers=1, env=make_point_env)
    assert list(found.results) == [(), ("proprio",), ("goal",)]
    assert found.metric == "success"
    assert [e.seed for e in found.results["goal",].episodes] == [e.seed for e in found.baseline.episodes]
    assert found.baseline.summary()["success"] == 1.0
    assert found.change(("goal",), "success") == (-1.0, -1.0, -1.0)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["single"]["goal"]["success"] == 0.0
    assert data["single"]["goal"]["success_change_ci"] == [-1.0, -1.0]
    assert data["pair"] == {}
    assert data["baseline"]["success_change"] == 0.0
    assert [title for title, chart in charts(found) if chart] == ["Without one sensor", "Change against all sensors"]
    page = write_page(tmp_path / "modality.html", found).read_text()
    assert page == render(found)
    assert "http" not in page.replace("http-equiv", "")
    HTMLParser().feed(page)
    with pytest.raises(PrismError, match="no sensor 'camera' to drop"):
        study(make_lost_policy, "point", episodes=1, workers=1, env=make_point_env, sensors=("camera",))


def test_bars_cover_their_intervals_and_escape_names() -> None:
    chart = bar_chart([Bar("<a>", 0.5, 0.2, 0.9), Bar("b", -0.5, -0.75, 0.0, "loss")], "it", "change", percent=True)
    assert "&lt;a&gt;" in chart
    assert "<a>" not in chart
    assert "-50 %" in chart
    positions = [float(part.split('"')[0]) for part in chart.split('x1="')[1:]]
    assert min(positions) >= 0
    assert max(positions) <= 360
    assert bar_chart([], "it", "x") == ""
    marked = bar_chart([Bar("a", 0.1, 0.0, 0.2)], "it", "x", percent=True, mark=0.9)
    line = re.search(r'class="mark" x1="([\d.]+)"', marked)
    assert line is not None
    assert float(line[1]) <= 360, "what a bar is compared with is on the page"
    assert "0 %" in bar_chart([Bar("a", 0.0, 0.0, 0.0)], "it", "x", percent=True)


def test_the_object_is_seen_twice(tmp_path: Path) -> None:
    sensors = (SensorSpec("proprio", "vector", (4,)), SensorSpec("object_state", "vector", (15,)))
    state = np.arange(60, dtype=np.float32).reshape(4, 15)
    with DatasetWriter(tmp_path / "d", sensors, 4, 80.0, "t") as writer:
        writer.add({"proprio": np.zeros((4, 4), np.float32), "object_state": state}, np.zeros((4, 4), np.float32))
    from prism.data import open_dataset

    source = SeenTwice(open_dataset(tmp_path / "d"))
    assert [s.name for s in source.sensors] == ["proprio", *VIEWS]
    part = source.read(0, 1, 3)
    assert part.streams["object_world"].tolist() == state[1:3, :6].tolist()
    assert part.streams["object_hand"][0].tolist() == [21.0, 22.0, 23.0, 27.0, 28.0, 29.0]
    assert set(source.read(0, streams=("object_hand",)).streams) == {"object_hand"}


def test_cost_is_what_a_missing_sensor_takes_away() -> None:
    full, none, half = [True, True], [False, False], [True, False]

    def seed(hand: list[bool]) -> dict[str, Any]:
        without = {"nothing": full, "object_world": none, "object_hand": hand}
        return {"without": without, "with": {"nothing": full, "object_world": hand, "object_hand": full}}

    result = summarise({0: seed(half), 1: seed(full)})
    assert result["cost_without_dropout"] == pytest.approx(0.625)
    assert result["cost_with_dropout"] == pytest.approx(0.125)
    assert result["saved"] == pytest.approx(0.5)
    assert result["saved_by_seed"] == pytest.approx([0.5, 0.5])
    assert result["successes"]["without"]["object_hand"] == [half, full]
    assert result["cost_by_seed"]["without"] == pytest.approx([0.75, 0.5])
    with pytest.raises(PrismError, match="no MetaWorld task"):
        Config(task="pusht")
