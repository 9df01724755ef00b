"""The page of tables is what the results files give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.cli import EXIT_USER
from research import pages
from research.__main__ import main


def test_the_page_is_what_the_results_files_give() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), f"run {pages.COMMAND}"


def test_every_table_has_a_cell_for_every_head() -> None:
    for one in pages.SECTIONS:
        file = pages.HERE / "results" / f"{one.file}.json"
        if file.is_file():
            for heads, rows in one.table(json.loads(file.read_text())):
                assert {len(row) for row in rows} <= {len(heads)}, (one.file, heads)


def test_tables_from_the_true_state_say_so_first() -> None:
    """Nearly everything but human Push-T and pick-place in small."""
    labelled = {one.file for one in pages.SECTIONS if one.label.startswith("From the true state")}
    assert labelled == {"metaworld_state", "metaworld_methods", "robomimic", "senses", "loco", "few_step"}
    assert pages.page().count("*From the true state; execution tuned for PRISM alone") == len(labelled)


def test_a_page_that_is_out_of_date_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "PAGE", tmp_path / "TABLES.md")
    assert main(["pages", "--check"]) == EXIT_USER
    assert "is not what the results files give: run python -m research pages" in capsys.readouterr().err
    assert not pages.PAGE.exists()
    assert main(["pages"]) == 0
    assert main(["pages", "--check"]) == 0
