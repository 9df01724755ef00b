"""Benchmarks: their protocols, tables that never average over what is missing, runs found, checked and resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prism import cli
from prism.controller import ControllerConfig
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.evaluation.metrics import wilson_interval
from prism.evaluation.results import EpisodeResult, EvaluationResult
from prism.experiments.run_folder import EvalOptions
from prism.policy import PolicySpec
from prism.sensors import SensorSpec
from research import benchmark as command
from research.benchmark import at_k, find_runs, make_plan, overview, run_plan, write_benchmark
from research.benchmark_protocols import NAMES, PAPER, BenchmarkResult, benchmark, macro_interval
from research.report import ComputedTrials, carry_out


def episode(seed: int, success: bool, score: float | None = None) -> EpisodeResult:
    return EpisodeResult(
        seed=seed,
        success=success,
        score=float(success) if score is None else score,
        steps=3,
        success_step=3 if success else None,
        jerk=0.1,
        physical_jerk=1.0,
        replans=1,
        mode_switches=0,
        avoidable_switches=0,
        modes=1.0,
        spread=0.0,
        latency_ms=[1.0],
        seconds=0.1,
        actions=np.zeros((3, 2), np.float32),
        states=np.zeros((4, 2), np.float32),
    )


def result(task: str, wins: int, total: int, scores: list[float] | None = None) -> EvaluationResult:
    episodes = tuple(episode(100_000 + i, i < wins, scores[i] if scores else None) for i in range(total))
    return EvaluationResult(task, "runs/x", 100_000, 10.0, ControllerConfig(), episodes, 1.0)


def test_protocols() -> None:
    metaworld = benchmark("metaworld")
    assert len(metaworld.tasks) == 50
    assert [len(metaworld.groups[split]) for split in ("easy", "medium", "hard", "very-hard")] == [28, 11, 6, 5]
    assert metaworld.planned("metaworld-reach") == 20
    assert metaworld.base("metaworld-reach-pixels") == "metaworld-reach"
    assert metaworld.base("metaworld-reach-wall") == "metaworld-reach-wall"
    assert metaworld.base("pusht") is None
    assert metaworld.base("metaworld-reach-nonsense") is None
    assert metaworld.variants("metaworld-reach")[0] == "metaworld-reach"
    assert benchmark("robomimic").planned("robosuite-lift") == 50
    calvin = benchmark("calvin")
    assert len(calvin.tasks) == 35
    assert calvin.planned("calvin") == 1000
    assert calvin.planned("calvin", 3) == 3
    with pytest.raises(PrismError, match="did you mean metaworld"):
        benchmark("metaword")
    for name in NAMES[:4]:
        known = {*benchmark(name).tasks, *benchmark(name).groups}
        assert set(PAPER.get(name, {})) <= known, name


@given(st.lists(st.tuples(st.integers(0, 20), st.just(20)), min_size=1, max_size=50))
def test_the_interval_of_a_mean(counts: list[tuple[int, int]]) -> None:
    low, high = macro_interval(counts)
    mean = np.mean([wins / trials for wins, trials in counts])
    assert 0 <= low <= mean + 1e-12
    assert mean <= high + 1e-12
    assert high <= 1
    if len(counts) == 1:
        assert (low, high) == pytest.approx(wilson_interval(*counts[0]))
    if all(wins == trials for wins, trials in counts):
        assert low < 1  # twenty of twenty is no proof of certainty


def test_a_table_never_averages_over_what_is_missing() -> None:
    bench = benchmark("robomimic")
    some = {task: (result(task, 40, 50),) for task in bench.tasks[:3]}
    table = BenchmarkResult(bench, some, expert={"robosuite-lift": 1.0})
    mean = next(row for row in table.rows() if row.is_mean)
    assert mean.success is None
    assert mean.note == "3 of 5"
    data = table.to_json()
    assert data["mean.all"] is None
    assert data["missing"] == ["robosuite-transport", "robosuite-tool-hang"]
    assert data["complete"] is False
    assert data["success.robosuite-can"] == 0.8
    assert data["paper.all"] == 0.922
    assert "missing" in overview(table)

    every = {task: (result(task, wins, 50),) for task, wins in zip(bench.tasks, (50, 40, 30, 20, 10), strict=True)}
    whole = BenchmarkResult(bench, every)
    assert whole.to_json()["mean.all"] == pytest.approx(0.6)
    assert whole.to_json()["complete"] is True
    assert whole.departures() == ()
    few = BenchmarkResult(bench, {**every, bench.tasks[0]: (result(bench.tasks[0], 5, 5),)}, 5)
    assert few.departures() == ("robosuite-lift: 5 episodes, the protocol has 50",)


def test_chains_of_five() -> None:
    bench = benchmark("calvin")
    scores = [1.0, 0.6, 0.2, 0.0]
    table = BenchmarkResult(bench, {"calvin": (result("calvin", 1, 4, scores),)})
    assert table.chain_lengths() == [5, 3, 1, 0]
    data = table.to_json()
    assert [data[f"chain.{n}"] for n in range(1, 6)] == [0.75, 0.5, 0.5, 0.25, 0.25]
    assert data["chain.mean_length"] == 2.25
    assert data["mean.single"] is None
    assert [row.label for row in table.rows()][:2] == ["1 in a row", "2 in a row"]


def test_the_page_has_the_table_and_the_tasks(tmp_path: Path) -> None:
    table = BenchmarkResult(benchmark("pusht"), {"pusht": (result("pusht", 1, 2, [1.0, 0.5]),)}, 2)
    page = write_benchmark(tmp_path / "page.html", table).read_text()
    assert "PRISM on Push-T" in page
    assert "the protocol has 50" in page
    assert 'id="pusht"' in page


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained for two steps, enough to be rolled out."""
    folder = tmp_path_factory.mktemp("benchmarks")
    rng = np.random.default_rng(0)
    spec = SensorSpec("state", "vector", (5,))  # Push-T's raw state, from which the task's sensors are made
    with DatasetWriter(folder / "data", (spec,), action_dim=2, fps=10.0, task="pusht") as writer:
        for _ in range(3):
            state = np.cumsum(rng.normal(0, 3, (30, 5)), axis=0) + np.array([256, 256, 200, 300, 1])
            writer.add({"state": state.astype(np.float32)}, (state[:, :2] + 5).astype(np.float32))
    run = folder / "runs" / "pusht"
    assert cli.main(["train", "pusht", "--data", str(folder / "data"), "--steps", "2", "--out", str(run)]) == 0
    return run


def another(run: Path, name: str, **changes: object) -> Path:
    """A copy of the run whose experiment.json says something else."""
    copy = run.parent.parent / name / name
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(run, copy)
    data = json.loads((copy / "experiment.json").read_text())
    (copy / "experiment.json").write_text(json.dumps({**data, **changes}))
    return copy


def test_what_is_wrong_is_said_before_any_work(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="no benchmark 'pusht2': did you mean pusht"):
        make_plan("pusht2", [trained])
    with pytest.raises(PrismError, match="does not exist"):
        make_plan("pusht", [tmp_path / "nothing"])
    with pytest.raises(PrismError, match="holds no run"):
        make_plan("pusht", [tmp_path])
    with pytest.raises(PrismError, match="trained for 'pusht', which is no task of robomimic"):
        make_plan("robomimic", [trained])
    with pytest.raises(PrismError, match="no run for robomimic"):
        make_plan("robomimic", [trained.parent])
    with pytest.raises(PrismError, match="has no task 'pushd'"):
        make_plan("pusht", [trained], EvalOptions(task="pushd"))
    pixels = another(trained, "pixels", task="pusht-pixels")
    with pytest.raises(PrismError, match=r"pixels: task 'pusht-pixels' has (no sensor|')"):
        make_plan("pusht", [pixels])
    data_alone = another(trained, "alone", task=None)
    with pytest.raises(PrismError, match="--task pusht"):
        make_plan("pusht", [data_alone])
    assert make_plan("pusht", [data_alone], EvalOptions(task="pusht")).trials[0].task == "pusht"
    with pytest.raises(PrismError, match="both play pusht"):
        make_plan("pusht", [trained, data_alone], EvalOptions(task="pusht"))
    (tmp_path / "expert.json").write_text('{"success.metaworld-reach": 1.0}')
    with pytest.raises(PrismError, match=r"expert\.json: no key 'success\.TASK'"):
        make_plan("pusht", [trained], expert=tmp_path / "expert.json")
    options = EvalOptions(selection="proxy_score", set=("selection.pose_sensor=hand",))
    with pytest.raises(PrismError, match=r"pusht: selection\.rule = 'proxy_score' needs the pose.*'hand'"):
        make_plan("pusht", [trained], options)
    assert [path for path, _ in find_runs([trained.parent])] == [trained]


def test_a_policy_for_other_actions_is_refused(trained: Path) -> None:
    pytest.importorskip("metaworld")
    wrong = another(trained, "wrong", task="metaworld-reach")
    with pytest.raises(PrismError, match=r"wrong: task 'metaworld-reach' (has|takes)"):
        make_plan("metaworld", [wrong])


def test_a_table_is_a_grid_that_goes_on(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gym_pusht")
    out, work = tmp_path / "table.json", tmp_path / "work"
    config = command.Config(name="pusht", runs=(trained.parent,), work=work, episodes=1, workers=1, json=out)
    carry_out(command, config)
    data = json.loads(out.read_text())
    assert data["benchmark"] == "pusht"
    assert data["episodes.pusht"] == 1
    assert data["departures"] == ["pusht: 1 episodes, the protocol has 50"]
    assert {"command", "date", "machine"} <= set(data)
    assert "not the protocol: pusht: 1 episodes" in capfd.readouterr().out
    assert (work / "benchmark.html").is_file()
    assert not (trained / "evaluation").exists(), "the run itself is left alone"
    with pytest.raises(PrismError, match="exists already"):
        carry_out(command, config)

    def again(**changes: object) -> BenchmarkResult:
        plan = make_plan("pusht", [trained], EvalOptions(workers=1, **changes), episodes=1)  # type: ignore[arg-type]
        return run_plan(plan, ComputedTrials(work, Console(quiet=True)))

    assert (again().reused, again().to_json()["runs"]) == (("pusht",), data["runs"]), "not played again"
    with pytest.raises(PrismError, match=r"controller\.candidates = .* there, 2 now"):
        again(candidates=2)
    with pytest.raises(PrismError, match="backend = eager there, onnx now"):
        again(backend="onnx")


def test_what_several_versions_played_is_said() -> None:
    bench = benchmark("robomimic")
    versions = {"robosuite-lift": "abc", "robosuite-can": "def"}
    played = {task: (replace(result(task, 40, 50), info={"commit": commit}),) for task, commit in versions.items()}
    assert "several versions of prism: abc, def" in BenchmarkResult(bench, played).departures()[0]


def test_success_at_k_is_the_papers_selection(trained: Path) -> None:
    pytest.importorskip("gym_pusht")
    plan = make_plan("pusht", [trained], success_at=8)
    assert plan.trials[0].controller.candidates == 8
    assert plan.trials[0].controller.selection.rule == "proxy_score"
    assert BenchmarkResult(plan.benchmark, {}).to_json()["success_at"] == 8
    calvin = PolicySpec("p", {}, (SensorSpec("robot_obs", "vector", (15,)),), 7, 30.0, 2, 12)
    assert "selection.pose_sensor=robot_obs" in at_k(EvalOptions(), 8, [calvin]).set
    with pytest.raises(PrismError, match="the first sets both others"):
        make_plan("pusht", [trained], EvalOptions(candidates=4), success_at=8)
    with pytest.raises(PrismError, match="--success-at 0 is out of range"):
        make_plan("pusht", [trained], success_at=0)
