"""research loco: the order of the trials, and figures that say what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism.errors import PrismError
from prism.experiments.trial import TrialId
from research import loco
from research.__main__ import main
from research.loco import Config, figures_of


def test_prism_with_all_demonstrations_comes_first() -> None:
    order = Config().order()
    assert [(count, task) for count, task, methods in order[:3]] == [(35, task) for task in Config().tasks]
    assert all(methods == ("prism",) for _, _, methods in order[:3])
    found = [(count, len(methods)) for count, _, methods in order[::3]]
    assert found == [(35, 1), (35, 2), (35, 3), (35, 4), (25, 1), (15, 1), (25, 4), (15, 4)]


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["loco", "--status", "--work", str(tmp_path / "none"), "--json", str(tmp_path / "f.json")]
    assert main(words) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert len(found["missing"]) == 3 * 4 * 3
    assert "15 demonstrations, go2-park diffusion seed 0: not started yet" in found["missing"]
    assert found["success"] == {"prism": {}, "diffusion": {}, "flow_matching": {}, "imle": {}}
    assert found["ahead"] == {} == found["mean"]


def comparison(task: str, successes: dict[str, list[int]]) -> Any:
    rows = [
        SimpleNamespace(contestant=name, success=sum(won) / len(won), success_ci=(0.0, 1.0), seeds=(0,))
        for name, won in successes.items()
    ]
    trials = {
        TrialId(task, name, 0): {
            "per_episode": [{"success": one} for one in won],
            "info": {"commit": "evaluated"},
            "trained_by": {"commit": f"{task}{len(name)}"},
        }
        for name, won in successes.items()
    }
    return SimpleNamespace(rows=rows, trials=trials, config=SimpleNamespace(seeds=(0,)))


def test_the_figures_are_their_definitions() -> None:
    config = Config(tasks=("a", "b"), counts=(5, 9), methods=("prism", "imle", "diffusion"))
    there = {
        ("a", 5): comparison("a", {"prism": [1, 0, 0, 0]}),
        ("b", 5): comparison("b", {}),
        ("a", 9): comparison("a", {"prism": [1, 1, 1, 0], "imle": [0, 1, 0, 0], "diffusion": [1, 1, 1, 1]}),
        ("b", 9): comparison("b", {"prism": [1, 1, 1, 1], "imle": [1, 1, 0, 0]}),
    }
    found = figures_of(config, there)
    assert found["success"]["prism"] == {"a": 0.75, "b": 1.0}
    assert found["mean"] == {"prism": 0.875, "imle": 0.375}, "diffusion has one task of two"
    assert found["ahead"]["imle"]["mean"] == pytest.approx(0.5)
    assert set(found["ahead"]) == {"imle"}
    assert found["gain"]["prism"]["a"]["mean"] == pytest.approx(0.5)
    assert "b" not in found["gain"]["prism"]
    assert found["curve"]["prism"]["a"] == {
        "5": {"success": 0.25, "ci": [0.0, 1.0], "seeds": 1, "commits": ["a5, played by evaluated"]},
        "9": {"success": 0.75, "ci": [0.0, 1.0], "seeds": 1, "commits": ["a5, played by evaluated"]},
    }


def test_one_training_is_no_verdict() -> None:
    beyond = {"mean": 0.2, "low": 0.1, "high": 0.3, "p": 0.001, "episodes": 50}
    for seeds, verdict in ((1, "cannot be tested here"), (3, "confirmed")):
        one = {**beyond, "seeds": seeds}
        found = loco.claims({"ahead": {"imle": one}, "gain": {"prism": {"go2-pick": one}}}, Config())
        assert [claim.verdict for claim in found] == [verdict] * 2


def test_versions_of_the_cells_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commits of the code that trained and played them, and a line where there are several."""

    def there(folder: Path, config: Any) -> Any:
        found = comparison(folder.parent.name, {"prism": [1, 0]})
        return SimpleNamespace(**vars(found), missing=())

    monkeypatch.setattr(loco, "summarise", there)
    for tasks in (["go2-park", "go2-pick"], ["go2-park"]):
        file = tmp_path / f"{len(tasks)}.json"
        assert main(["loco", "--status", "--tasks", *tasks, "--methods", "prism", "--json", str(file)]) == 0
        commits = [f"{task}5, played by evaluated" for task in tasks]
        assert json.loads(file.read_text())["commits"] == commits
        said = f"the trials are of several versions of prism: {'; '.join(commits)}\n"
        assert (said in capsys.readouterr().out) is (len(tasks) == 2)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(PrismError, match="growing"):
        Config(counts=(35, 15))
    with pytest.raises(PrismError, match="comes first"):
        Config(methods=("imle", "prism"))
