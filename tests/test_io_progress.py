"""What stands in a log file of work that takes longer than a moment."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import TextColumn

from prism.io import progress
from prism.io.progress import Bar


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 10.0, 11.0, 20.0, 20.0, 21.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    file = io.StringIO()
    bar = Bar(TextColumn("{task.description}"), console=Console(file=file, width=80))
    row = bar.add_task("pusht", total=None, success="-")
    for done in (1, 2, 3, 4):
        bar.update(row, completed=done, total=4, success=f"0/{done}")
    assert file.getvalue().splitlines() == ["pusht, 2 of 4, success 0/2", "pusht, 4 of 4, success 0/4"]


@pytest.mark.parametrize("how", [{"force_terminal": True}, {"quiet": True}])
def test_a_terminal_has_its_bar_instead(how: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    file = io.StringIO()
    bar = Bar(TextColumn("{task.description}"), console=Console(file=file, **how))
    bar.update(bar.add_task("pusht", total=4), completed=2)
    assert "2 of 4" not in file.getvalue()
