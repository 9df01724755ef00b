"""A comparison that is interrupted: its processes end, and so do the pipes to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from prism.experiments import trial_places
from prism.experiments.trials import Trials

_CELL = """
import pathlib, sys
if sys.argv[2] == "long": sys.stdin.read()
else: (pathlib.Path(sys.argv[1]) / "result.json").write_text("{}")
"""


def test_ctrl_c_leaves_no_process_and_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def launch(folder: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-S", "-c", _CELL, str(folder), folder.parent.name]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial_places, "launch", launch)
    monkeypatch.setattr(trial_places, "_POLL_SECONDS", 0.02)
    listed = Trials(tmp_path, Console(quiet=True))
    names = ["long/seed-0", "short/seed-0"]
    for name in names:
        listed.folder(name).mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        listed.run(names, 2, interrupt)
    assert len(started) == 2
    for process in started:
        assert process.returncode == 0
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdin.closed
        assert process.stdout.closed
