"""Rollouts: the same numbers for any number of workers, crashes survived and told, recordings that come back."""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from prism.cli.compare import Compare
from prism.cli.evaluate import Eval
from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.evaluation.play import (
    IncompleteError,
    RecordConfig,
    _Job,
    _Player,
    evaluate,
    rate_note,
    run_episode,
    to_film,
)
from prism.evaluation.results import (
    EvaluationResult,
    flat_json,
    load_result,
    load_results,
    metrics_json,
    recording_path,
    save_result,
    write_json,
)
from prism.sensors import SensorSpec
from prism.sims.environment import TEST_SEED
from tests.evaluation_fakes import (
    SENSORS,
    PointEnv,
    PointPolicy,
    make_deadly_env,
    make_picture_env,
    make_point_env,
    make_point_policy,
)

CONFIG = ControllerConfig(exec_horizon=4, candidates=6)


def comparable(result: EvaluationResult) -> list[dict[str, object]]:
    return [
        {k: v for k, v in e.row().items() if k not in ("seconds", "latency_p50_ms")} | {"actions": e.actions.tolist()}
        for e in result.episodes
    ]


@pytest.fixture(scope="module")
def filmed() -> EvaluationResult:
    return evaluate(
        make_point_policy, "point", 5, 100, CONFIG, 2, RecordConfig(videos=2, frames=5), False, make_picture_env
    )


def test_same_result_for_any_number_of_workers(filmed: EvaluationResult) -> None:
    alone = evaluate(make_point_policy, "point", 5, 100, CONFIG, 1, None, False, make_point_env)
    assert comparable(alone) == comparable(filmed)
    assert [e.seed for e in alone.episodes] == [100, 101, 102, 103, 104]
    here = run_episode(PointEnv(), Controller(PointPolicy(), CONFIG), 103)
    np.testing.assert_array_equal(here.actions, alone.episodes[3].actions)


def test_an_episode_that_kills_its_process_is_run_again_with_the_same_result(
    filmed: EvaluationResult, tmp_path: Path
) -> None:
    env = functools.partial(make_deadly_env, tmp_path, {101: 2})
    result = evaluate(make_point_policy, "point", 5, 100, CONFIG, 2, None, False, env)
    assert comparable(result) == comparable(filmed)
    assert sorted(line.split(":")[0] for line in result.crashes) == ["seed 101", "seed 101"]
    assert any("SIGKILL" in line for line in result.crashes)
    assert any("ValueError: the simulation diverged" in line for line in result.crashes)
    assert result.lost == ()


def test_an_episode_that_always_kills_is_named_and_the_others_are_kept(
    filmed: EvaluationResult, tmp_path: Path
) -> None:
    env = functools.partial(make_deadly_env, tmp_path / "deaths", {101: 99})
    (tmp_path / "deaths").mkdir()
    with pytest.raises(
        IncompleteError, match=r"^point: a worker died 3 times at seed 101: .*; 3 of 4 episodes"
    ) as error:
        evaluate(make_point_policy, "point", 4, 100, CONFIG, 2, None, False, env)
    kept = error.value.result
    assert [episode.seed for episode in kept.episodes] == [100, 102, 103]
    expected = [row for row in comparable(filmed) if row["seed"] in (100, 102, 103)]
    assert comparable(kept) == expected
    save_result(recording_path(tmp_path, "point"), kept)
    assert load_results(tmp_path)[0].lost == kept.lost


def test_the_camera_changes_nothing_but_adds_pictures_and_fans(filmed: EvaluationResult) -> None:
    recorded = [e for e in filmed.episodes if e.frames]
    assert len(recorded) == 2
    for episode in recorded:
        assert all(frame[:2] == b"\xff\xd8" for frame in episode.frames)
        assert episode.frame_steps[0] == 0
        assert episode.frame_steps[-1] == episode.steps
        assert len(episode.frames) <= 7
        assert [fan.step for fan in episode.fans] == list(range(0, episode.steps, CONFIG.exec_horizon))
        for fan in episode.fans:
            np.testing.assert_array_equal(np.clip(fan.candidates[fan.index][0], -1, 1), episode.actions[fan.step])
        assert episode.states.shape == (episode.steps + 1, 4)


def test_missing_pictures_come_with_a_hint() -> None:
    outcome = _Player(make_point_policy, make_point_env, CONFIG, RecordConfig(videos=1))(_Job(100, film_every=1))
    assert not outcome.episode.frames
    assert outcome.episode.fans
    assert outcome.rendering_hint


def test_in_this_process_as_in_workers() -> None:
    here, there = (evaluate(make_point_policy, "point", 2, 100, CONFIG, n, None, False, make_point_env) for n in (0, 1))
    for one, other in zip(here.episodes, there.episodes, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        assert (one.seed, one.score, one.jerk) == (other.seed, other.score, other.jerk)
    assert (here.policy, here.first_seed, here.crashes) == (there.policy, there.first_seed, ())


def test_a_refusal_in_a_worker_is_one_line_here() -> None:
    config = ControllerConfig(exec_horizon=9)
    with pytest.raises(PrismError, match="exec_horizon = 9 exceeds"):
        evaluate(make_point_policy, "point", 2, 100, config, 1, None, False, make_point_env)
    with pytest.raises(PrismError, match="at least 1"):
        evaluate(make_point_policy, "point", 0, 100, CONFIG, 1, None, False, make_point_env)


class OtherEnv(PointEnv):
    def __init__(self, sensors: tuple[SensorSpec, ...], action_dim: int) -> None:
        super().__init__()
        self.sensors, self.action_dim = sensors, action_dim


@pytest.mark.parametrize(
    ("sensors", "action_dim", "message"),
    [(SENSORS[:1], 2, "no sensor 'goal'"), (SENSORS, 3, "3 action dimensions, the policy gives 2")],
)
def test_a_policy_on_the_wrong_task_is_refused(sensors: tuple[SensorSpec, ...], action_dim: int, message: str) -> None:
    with pytest.raises(PrismError, match=message):
        _Player(make_point_policy, lambda: OtherEnv(sensors, action_dim), CONFIG, RecordConfig())


class FastEnv(PointEnv):
    def __init__(self) -> None:
        super().__init__()
        self.fps = 80.0


def test_another_rate_than_in_training_is_told(caplog: pytest.LogCaptureFixture) -> None:
    result = evaluate(make_point_policy, "point", 2, 100, CONFIG, 1, None, False, FastEnv)
    told = [record.getMessage() for record in caplog.records if record.name == "prism.evaluation"]
    assert told == [result.info["note"]]
    assert "trained at 10 steps a second, task 'point' takes 80" in told[0]
    spec = PointPolicy().spec
    assert rate_note(PointEnv(), spec) is None
    assert rate_note(PointEnv(), dataclasses.replace(spec, fps=9.99)) is None
    assert rate_note(PointEnv(), dataclasses.replace(spec, fps=0.0)) is None  # not known


def test_the_commands_name_the_test_seeds() -> None:
    for command in (Eval, Compare):  # they start without numpy, and so without the constant
        assert {field.name: field.default for field in dataclasses.fields(command)}["first_seed"] == TEST_SEED


def test_filming_prefers_a_mixture(filmed: EvaluationResult) -> None:
    def episodes(outcomes: str) -> list[int]:
        base = filmed.episodes[0]
        return to_film([dataclasses.replace(base, success=letter == "s") for letter in outcomes], 4)

    assert episodes("ssssffff") == [0, 1, 4, 5]
    assert episodes("ssssssfs") == [0, 1, 2, 6]
    assert episodes("fffffs") == [0, 1, 2, 5]
    assert episodes("ss") == [0, 1]


def test_metrics_json(filmed: EvaluationResult, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, metrics_json([filmed]))
    data = json.loads(path.read_text())
    task = data["tasks"]["point"]
    assert {"success", "success_ci", "score", "episodes", "jerk", "mode_switches", "latency_ms"} <= set(task)
    assert set(task["latency_ms"]) == {"p50", "p99"}
    assert {"command", "seed", "date", "versions", "machine"} <= set(data)
    assert task["success"] == np.mean([e.success for e in filmed.episodes])
    assert task["success_ci"][0] <= task["success"] <= task["success_ci"][1]
    flat = flat_json(filmed)
    assert flat["score"] == task["score"]
    assert len(flat["per_episode"]) == 5
    with pytest.raises(PrismError, match="exists already"):
        write_json(path, data)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


def test_recording_round_trip(filmed: EvaluationResult, tmp_path: Path) -> None:
    path = recording_path(tmp_path, "point")
    save_result(path, filmed)
    again = load_results(tmp_path)[0]
    assert again.summary() == filmed.summary()
    assert again.info == filmed.info
    for a, b in zip(again.episodes, filmed.episodes, strict=True):
        assert a.row() == b.row()
        assert a.frames == b.frames
        assert a.frame_steps == b.frame_steps
        np.testing.assert_array_equal(a.states, b.states)
        assert [f.index for f in a.fans] == [f.index for f in b.fans]
        for f, g in zip(a.fans, b.fans, strict=True):
            np.testing.assert_array_equal(f.candidates, g.candidates)


def test_damaged_recordings_are_named(filmed: EvaluationResult, tmp_path: Path) -> None:
    path = recording_path(tmp_path, "point")
    with pytest.raises(PrismError, match="does not exist"):
        load_result(path)
    with pytest.raises(PrismError, match="evaluate the policy first"):
        load_results(tmp_path)
    save_result(path, filmed)
    content = path.read_bytes()
    for cut in (0, 10, len(content) // 2, len(content) - 5):
        path.write_bytes(content[:cut])
        with pytest.raises(PrismError, match=r"point\.npz"):
            load_result(path)
    for meta in (b"[]", b"3", b'{"format_version": []}'):
        with zipfile.ZipFile(path, "w") as archive, archive.open("meta.npy", "w") as file:
            np.lib.format.write_array(file, np.frombuffer(meta, np.uint8))
        with pytest.raises(PrismError, match=r"point\.npz"):
            load_result(path)
