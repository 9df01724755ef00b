"""What each sense is worth, and one policy for four commands: figures of made-up trials, and both in miniature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.errors import PrismError
from prism.experiments.trial import TrialId
from research import language, senses
from research.__main__ import main
from research.report import Study


def episodes(won: list[bool]) -> list[dict[str, Any]]:
    return [{"success": one, "jerk": 0.5, "mode_switches": 1} for one in won]


def test_a_mean_over_tasks_needs_every_trial() -> None:
    config = senses.Config(seeds=(0, 1))
    tasks = [task for task, _ in senses.SENSES.values()]
    trials = {
        TrialId(task, name, seed): {"per_episode": episodes([name == "prism"] * 8)}
        for task in tasks
        for name in ("prism", "imle")
        for seed in (0, 1)
    }
    assert senses.mean_of(config, trials, "imle")["ahead"]["mean"] == 1.0
    del trials[TrialId(tasks[1], "imle", 1)]
    assert senses.mean_of(config, trials, "imle") == {"success": None, "ahead": None}


def test_a_difference_is_of_the_seeds_that_both_have() -> None:
    full = {0: episodes([True] * 6), 1: episodes([True] * 6)}
    found = senses.difference(full, {1: episodes([False] * 6)})
    assert found is not None
    assert (found["mean"], found["seeds"]) == (1.0, 1)
    assert senses.difference(full, {}) is None


def test_a_missing_sensor_is_judged_by_its_own_episodes() -> None:
    kept = {0: {"nothing": episodes([True] * 4), "proprio": episodes([True, True, True, False])}}
    found = senses.dropped(kept)
    assert found["proprio"]["change"]["mean"] == -0.25
    assert "change" not in found["nothing"]


def measured(low: float, high: float, p: float = 0.001, episodes: int = 50, seeds: int = 3) -> dict[str, Any]:
    return {"mean": (low + high) / 2, "low": low, "high": high, "p": p, "seeds": seeds, "episodes": episodes}


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        (measured(0.3, 0.6), "confirmed"),
        (measured(0.1, 0.6), "cannot be tested here"),  # its mean is above the bar, 25 %
        (measured(0.1, 0.35), "cannot be tested here"),  # below
        (measured(0.05, 0.2), "not confirmed"),
        (measured(-0.1, 0.1, p=1.0), "not confirmed"),
        (measured(1.0, 1.0, p=0.5, episodes=2), "cannot be tested here"),
    ],
)
def test_a_gain_is_told_by_its_interval(gain: dict[str, Any], verdict: str) -> None:
    one = {"success": 0.5, "ci": [0.4, 0.6]}
    row = {"task": "t", "sensor": "tactile", "all": one, "without": one, "gain": gain}
    study = Study("senses", {"tasks": {"touch": row}, "means": {}, "dropout": {}}, (), {})
    (claim,) = senses.claims(study)
    assert claim.verdict == verdict
    assert ("cannot be told" in claim.note) == (verdict == "cannot be tested here")


def test_one_training_confirms_no_sense() -> None:
    gain, one = measured(0.3, 0.6, seeds=1), {"success": 0.5, "ci": [0.4, 0.6]}
    figures = {
        "tasks": {"touch": {"task": "t", "sensor": "tactile", "all": one, "without": one, "gain": gain}},
        "means": {"prism": one, "imle": {**one, "ahead": gain}},
        "dropout": {"touch": {"trained": {"proprio": {"change": measured(-0.03, 0.03, p=1.0, seeds=1)}}}},
    }
    claims = senses.claims(Study("senses", figures, (), {}))
    assert [claim.verdict for claim in claims] == ["cannot be tested here"] * 3
    assert all("1 of the 3 training seeds that a claim takes" in claim.note for claim in claims)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ((measured(-0.03, 0.03, p=1.0), measured(0.0, 0.0, p=1.0)), "confirmed"),
        ((measured(-0.06, 0.09, p=0.7), measured(0.0, 0.0, p=1.0)), "cannot be tested here"),
        ((measured(-0.06, 0.09, p=0.7), measured(-0.4, -0.2)), "not confirmed"),
        ((measured(0.0, 0.0, p=1.0, episodes=1),), "cannot be tested here"),  # three episodes alike
    ],
)
def test_what_a_redundant_sensor_costs_is_told_by_its_intervals(
    changes: tuple[dict[str, Any], ...], verdict: str
) -> None:
    dropout = {
        sense: {"trained": {"proprio": {"change": one}}} for sense, one in zip(senses.SENSES, changes, strict=False)
    }
    (claim,) = senses.claims(Study("senses", {"tasks": {}, "means": {}, "dropout": dropout}, (), {}))
    assert claim.verdict == verdict


def test_unknown_senses_are_refused() -> None:
    with pytest.raises(PrismError, match="smell"):
        senses.Config(senses=("smell",))


def test_every_other_command_is_another_one() -> None:
    assert set(language.OTHER) == set(language.OTHER.values()) == set(language.COMMANDS)
    assert all(scene != other for scene, other in language.OTHER.items())
    trained = {language.words(command) for command in language.COMMANDS}
    told = {text for texts in language.PARAPHRASES.values() for text in texts}
    assert not told & trained
    assert max(len(text.encode()) for text in told) <= 48


def test_swapped_counts_what_was_told() -> None:
    played = {f"{b} > {a}": [True, True] for a, b in language.OTHER.items()}
    played |= {f"{a} < {b}": [False, False] for a, b in language.OTHER.items()}
    played |= {f"{a} = {a}": [a == "ball"] for a in language.OTHER}
    figures = language.summary({"told": {}, "swapped": {0: played}, "paraphrase": {}})
    assert (figures["swapped"], figures["ignored"], figures["mean"], figures["paraphrase"]) == (1.0, 0.0, None, None)
    assert figures["both"] == 0.25
    assert figures["commands"]["hang"] == "hang the green cup on the hook"


@pytest.mark.slow
def test_the_senses_table_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    words = ["senses", "--senses", "touch", "--minutes", "0.005", "--episodes", "1"]
    words += ["--methods", "imle", "--dropped-episodes", "1", "--demonstrations", "2", "--work", "work"]
    assert main([*words, "--seeds", "0", "--json", "senses.json"]) == 0
    stored = json.loads(Path("senses.json").read_text())
    assert stored["missing"] == []
    touch = stored["tasks"]["touch"]
    assert {"success", "ci"} <= touch["all"].keys() & touch["without"].keys() & touch["methods"]["imle"].keys()
    assert stored["dropout"]["touch"]["trained"].keys() == stored["dropout"]["touch"]["plain"].keys()
    assert "tactile" in stored["dropout"]["touch"]["trained"]
    assert "without tactile" in Path("work/senses.html").read_text()
    assert main([*words, "--seeds", "0", "1", "--parts", "--json", "more.json"]) == 0
    assert len(json.loads(Path("more.json").read_text())["missing"]) == 6


@pytest.mark.slow
def test_four_commands_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    words = ["language", "--minutes", "0.005", "--episodes", "1", "--paraphrased", "1"]
    words += ["--demonstrations", "2", "--work", "work"]
    assert main([*words, "--seeds", "0", "--json", "language.json"]) == 0
    stored = json.loads(Path("language.json").read_text())
    assert stored["success"].keys() == set(language.COMMANDS)
    assert stored["missing"] == []
    assert main([*words, "--seeds", "0", "1", "--status", "--json", "more.json"]) == 0
    assert json.loads(Path("more.json").read_text())["missing"] == [
        f"seed-1/{part}: not there" for part in ("told", "swapped", "paraphrase")
    ]
