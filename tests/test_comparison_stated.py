"""What a comparison says: missing trials, intervals, versions, the frontier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prism.cli.compare import print_comparison
from prism.errors import PrismError
from prism.experiments import trial_process, trials
from prism.experiments.comparison import JSON, PAGE, Contestant, compare, folder_of, prepare, summarise
from prism.experiments.recipes import Experiment, recipe
from prism.experiments.trial import FAILED, RESULT, TrialId
from prism.report.comparison_page import frontier, render
from tests.comparison_fakes import PRISM, QUIET, config, fake_result, finish


def test_missing_seeds_are_stated_and_tests_use_common_ones(tmp_path: Path) -> None:
    whole = config(seeds=(0, 1, 2))
    for seed, score in ((0, 0.5), (1, 0.6), (2, 1.0)):
        finish(tmp_path, TrialId("pusht", "prism", seed), [score, score, score])
    finish(tmp_path, TrialId("pusht", "mse", 1), [0.4, 0.5, 0.6])
    lost = TrialId("pusht", "mse", 0)
    folder_of(tmp_path, lost).mkdir(parents=True)
    (folder_of(tmp_path, lost) / FAILED).write_text('{"reason": "loss is not finite"}')
    comparison = summarise(tmp_path, whole)
    prism, mse = comparison.rows
    assert (prism.score, prism.complete, mse.seeds, mse.complete) == (pytest.approx(0.7), True, (1,), False)
    assert mse.difference is not None
    assert (mse.difference.mean, mse.difference.seeds) == (pytest.approx(-0.1), 1), "against seed 1 of prism alone"
    assert {one.trial.seed: one.reason for one in comparison.missing} == {
        0: "loss is not finite",
        2: "not started yet",
    }
    stored = comparison.to_json()
    assert stored["scores"] == {"prism": pytest.approx([0.5, 0.6, 1.0]), "mse": [None, pytest.approx(0.5), None]}
    assert [row["n"] for row in stored["table"]] == [3, 1]
    assert list(stored["table_by"]) == ["prism"], "one that lacks a seed has no mean"
    assert stored["table_by"]["prism"]["score"] == pytest.approx(0.7)
    assert set(stored["table_by"]["prism"]) == {"score", "success", "jerk", "switches"}
    page = render(comparison)
    assert "1 of 3" in page
    assert "loss is not finite" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<h4>Learning</h4>" in page
    ends = replace(comparison, rows=tuple(replace(row, curve=row.curve[-1:]) for row in comparison.rows))
    assert "<h4>Learning</h4>" not in render(ends), "one point is no curve"


def test_finished_cells_that_a_smaller_comparison_leaves_out_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same folder with fewer seeds and methods: nothing is lost, and neither file is silent about the others."""
    for id in prepare(tmp_path, config(), QUIET):
        finish(tmp_path, id, [0.25 * (1 + id.seed)] * 3)
    whole = compare(tmp_path, config(), 1, QUIET)
    assert (whole.beside, whole.to_json()["left_out"]) == ("", {})
    fewer = compare(tmp_path, config(PRISM, seeds=(0,)), 1, QUIET)
    names = ["pusht/mse/seed-0", "pusht/mse/seed-1", "pusht/prism/seed-1"]
    said = f"3 finished trials of this folder are not named, so not in this table: {', '.join(names)}"
    assert fewer.beside == said
    stored = json.loads((tmp_path / JSON).read_text())
    assert stored["left_out"] == {names[0]: 0.25, names[1]: 0.5, names[2]: 0.5}
    assert (stored["seeds"], stored["scores"]) == ([0], {"prism": [0.25]})
    assert said in (tmp_path / PAGE).read_text()
    print_comparison(fewer)
    assert said in capsys.readouterr().out
    again = compare(tmp_path, config(), 1, QUIET)
    assert again.to_json()["scores"] == whole.to_json()["scores"] == {"prism": [0.25, 0.5], "mse": [0.25, 0.5]}
    assert said not in (tmp_path / PAGE).read_text()


def test_the_frontier_holds_what_nobody_beats(tmp_path: Path) -> None:
    contestants = tuple(Contestant(name, "prism") for name in "abc")
    for name, score, latency in (("a", 0.95, 10.0), ("b", 0.2, 20.0), ("c", 0.1, 1.0)):
        finish(tmp_path, TrialId("pusht", name, 0), [score] * 3, latency=latency)
    comparison = summarise(tmp_path, config(*contestants, seeds=(0,)))
    assert [row.contestant for row in frontier(comparison.rows)] == ["c", "a"]


def test_cells_of_several_versions_are_said(tmp_path: Path) -> None:
    for seed in (0, 1):
        finish(tmp_path, TrialId("pusht", "prism", seed), [0.5] * 3)
    assert summarise(tmp_path, config(PRISM)).mixed == ""
    path = folder_of(tmp_path, TrialId("pusht", "prism", 1)) / RESULT
    path.write_text(path.read_text().replace('"abc"', '"def"'))
    comparison = summarise(tmp_path, config(PRISM))
    assert comparison.mixed.endswith("several versions of prism: abc; def")
    assert "versions of prism: abc; def" in render(comparison)


def test_a_training_that_went_on_with_another_version_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (id, *_) = prepare(tmp_path, config(PRISM, seeds=(0,)), QUIET)
    folder = folder_of(tmp_path, id)
    for commit, step in (("abc", 2), ("abc", 3), ("def", 4), ("ghi", 4)):  # the budget is 4 steps: the last one plays
        monkeypatch.setattr(trial_process, "run_info", lambda seed, commit=commit: {"commit": commit, "date": "today"})
        trial_process._sign(folder, Experiment.load(folder))
        (folder / "log.jsonl").write_text(json.dumps({"step": step, "seconds": 1.0}) + "\n")
    trained_by = json.loads((folder / trial_process.TRAINED_BY).read_text())
    assert trained_by["commit"] == "abc + def"
    result = {**fake_result(id, [0.5] * 3), "trained_by": trained_by, "info": {"commit": "def"}}
    (folder / RESULT).write_text(json.dumps(result))
    mixed = summarise(tmp_path, config(PRISM, seeds=(0,))).mixed
    assert mixed == "the trials are of several versions of prism: abc + def"


def test_trainings_of_one_version_played_by_two_are_said(tmp_path: Path) -> None:
    for seed, commit in ((0, "abc"), (1, "def")):
        id = TrialId("pusht", "prism", seed)
        finish(tmp_path, id, [0.5] * 3)
        played = {**fake_result(id, [0.5] * 3), "info": {"commit": commit}, "trained_by": {"commit": "old"}}
        (folder_of(tmp_path, id) / RESULT).write_text(json.dumps(played))
    comparison = summarise(tmp_path, config(PRISM))
    assert comparison.commits == ["old, played by abc", "old, played by def"]
    assert comparison.mixed.endswith("several versions of prism: old, played by abc; old, played by def")


def test_scores_that_are_all_one_are_not_certain(tmp_path: Path) -> None:
    finish(tmp_path, TrialId("pusht", "prism", 0), [1.0] * 3)
    (row,) = summarise(tmp_path, config(PRISM, seeds=(0,))).rows
    assert row.score_ci == row.success_ci
    assert row.score_ci[0] < 0.5


def test_no_job_at_a_time_is_refused(tmp_path: Path) -> None:
    for jobs in (0, -1):
        with pytest.raises(PrismError, match=f"--jobs {jobs} is out of range"):
            compare(tmp_path / "new", config(PRISM), jobs, QUIET)
    assert not (tmp_path / "new").exists()


def test_a_cell_that_plays_says_so(tmp_path: Path) -> None:
    recipe("pusht").save(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 3, "seconds": 9.0, "loss": 1.5}\n')
    assert trials.progress_of(tmp_path)[1].startswith("step 3  loss 1.5")
    (tmp_path / "output.txt").write_text("training\nevaluate: 4 of 20 episodes, 1 succeeded\n")
    fraction, said = trials.progress_of(tmp_path)
    assert 0 < fraction < 1
    assert said == "evaluate: 4 of 20 episodes, 1 succeeded"
