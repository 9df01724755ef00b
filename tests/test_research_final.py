"""A final table is whole, of one protocol, commit and budget, on fresh episodes, and made once."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from prism.cli import EXIT_USER
from prism.errors import PrismError
from research import final
from research.__main__ import main

EXECUTION = {"controller": {"exec_horizon": 8}, "success": [0.5, 0.6, 0.7], "score": [0.9, 0.9, 0.9]}
METHOD = {
    "updates": [100, 101, 99],
    "weights": ["a" * 64, "b" * 64, "c" * 64],
    "command": "prism compare ...",
    "as_published": EXECUTION,
    "best": EXECUTION,
}
WHOLE: dict[str, Any] = {
    "protocol": "human Push-T, success",
    "tag": "protocol-1",
    "commits": ["0123abc"],
    "budget": {"minutes": 30.0, "steps": None, "clock": "cpu"},
    "seeds": [0, 1, 2],
    "evaluation": {"episodes": 100, "first_seed": 3_000_000},
    "chosen_on": ["200000-200029"],
    "missing": [],
    "methods": {"prism": METHOD, "flow_matching": METHOD},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The whole table with one value changed, or left out where it is None."""
    table = copy.deepcopy(WHOLE)
    *parents, last = path.split(".")
    inner = table
    for key in parents:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return table


def found(folder: Path, table: dict[str, Any]) -> list[str]:
    path = folder / "table.json"
    path.write_text(json.dumps(table))
    return final.problems(path)


def test_a_whole_table_has_no_problem(tmp_path: Path) -> None:
    assert found(tmp_path, WHOLE) == []


@pytest.mark.parametrize("key", [*WHOLE, *(f"methods.prism.{key}" for key in METHOD), "methods.prism.best.score"])
def test_a_missing_field_is_named(tmp_path: Path, key: str) -> None:
    (line,) = found(tmp_path, changed(key, None))[:1]
    assert line.startswith("table.json: ")
    assert f"has no '{key.split('.')[-1]}'" in line


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("seeds", [0, 1], "2 training seeds; a final table takes 3"),
        ("seeds", [0, 0, 1], "2 training seeds; a final table takes 3"),
        ("missing", ["pusht prism seed 2"], "lacks 1 trials: pusht prism seed 2"),
        ("commits", ["0123abc", "4567def"], "trained and played by one commit"),
        ("commits", ["0123abc + 4567def"], "trained and played by one commit"),
        ("commits", ["unknown"], "trained and played by one commit"),
        ("budget", {"minutes": 30, "steps": 100}, "minutes or steps, one of them"),
        ("evaluation", {"episodes": 100, "first_seed": 800_000}, "were looked at (human Push-T"),
        ("evaluation", {"episodes": 50, "first_seed": 2_699_980}, "were looked at (prototypes"),
        ("evaluation", {"episodes": 50, "first_seed": 2_900_000}, "fresh ones have seeds from 3000000"),
        ("chosen_on", ["3000050-3000060"], "were what its settings were chosen on"),
        ("chosen_on", ["tuning"], "write it as FIRST-LAST"),
        ("chosen_on", [], "'chosen_on' is empty"),
        ("methods.prism.protocol", "another", "prism: protocol is another, the table's is human Push-T, success"),
        ("methods.prism.budget", {"minutes": 5.0}, "a table has one"),
        ("methods.prism.commits", ["4567def"], "a table has one"),
        ("methods.prism.updates", [100, 101], "'updates' needs a value for each of the 3 seeds"),
        ("methods.prism.weights", ["a" * 64, "b" * 64, "policy"], "'policy' in weights is no sha256"),
        ("methods.prism.best.success", [0.5, None, 0.7], "'best.success' needs a value for each of the 3 seeds"),
    ],
)
def test_what_makes_a_table_no_final_one_is_one_line(tmp_path: Path, path: str, value: Any, words: str) -> None:
    table = changed(path, value)
    assert any(words in line for line in found(tmp_path, table)), found(tmp_path, table)
    with pytest.raises(PrismError) as error:
        final.keep(tmp_path / "table.json", tmp_path / "final")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "final").exists()


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_table_is_made_once_and_after_its_tag(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "before")
    commit, folder, table = git(tmp_path, "rev-parse", "--short", "HEAD"), tmp_path / "final", tmp_path / "push.json"
    folder.mkdir()
    table.write_text(json.dumps(changed("commits", [commit])))
    with pytest.raises(PrismError, match="there is no git tag 'protocol-1'"):
        final.keep(table, folder)
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "after")
    git(tmp_path, "tag", "protocol-1")
    with pytest.raises(PrismError, match=f"not part of commit {commit}: it was set after the training"):
        final.keep(table, folder)
    table.write_text(json.dumps(changed("commits", [git(tmp_path, "rev-parse", "--short", "HEAD")])))
    assert main(["final", "--keep", str(table), "--folder", str(folder)]) == 0
    assert main(["final", "--check", "--folder", str(folder)]) == 0
    with pytest.raises(PrismError, match="exists: a final table is made once"):
        final.keep(table, folder)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "table")
    (folder / "push.json").unlink()
    with pytest.raises(PrismError, match="was made before, in commit"):
        final.keep(table, folder)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["final", "--check", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "there are no final tables yet\n"
    (tmp_path / "push.json").write_text(json.dumps(changed("seeds", [0])))
    assert main(["final", "--check", "--folder", str(tmp_path)]) == EXIT_USER
    assert "push.json: 1 training seeds; a final table takes 3" in capsys.readouterr().err
    assert main(["final"]) == EXIT_USER
    assert "say what to do" in capsys.readouterr().err


def test_the_final_tables_of_this_repository_are_whole() -> None:
    assert {path.name: final.problems(path) for path in final.FOLDER.glob("*.json") if final.problems(path)} == {}


def test_the_list_of_episodes_that_were_looked_at_is_in_order() -> None:
    flat = [end for low, high, _ in final.LOOKED_AT for end in (low, high)]
    assert flat == sorted(flat)
    assert flat[-1] < final.FRESH
