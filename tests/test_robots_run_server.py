"""prism run --server: the plans of a policy server drive the twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets")

from prism.cli import main
from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.experiments.run_folder import Run
from tests import test_robots_run
from tests.server_fakes import serving

recorded, trained = test_robots_run.recorded, test_robots_run.trained  # fixtures


def drive(port: int, out: Path) -> list[str]:
    server = ["--server", f"ws://127.0.0.1:{port}"]
    return ["run", *test_robots_run.TWIN, *server, "--seconds", "1", "--out", str(out)]


def test_plans_of_a_server_drive_the_robot(trained: Path, tmp_path: Path) -> None:
    with serving(Run(trained).policy(), Run(trained).settings) as server:
        assert main(drive(server.port, tmp_path / "o")) == 0
    assert RecordingSource(tmp_path / "o").lengths.tolist() == [10]
    with np.load(tmp_path / "o" / "episode-000000" / COMMANDS, allow_pickle=False) as played:
        assert len(played["candidates"]) == len(played["plan"])
        assert np.array_equal(played["plan"][0], played["candidates"][0, played["chosen"][0]])


def test_a_server_with_a_key_is_told_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRISM_API_KEY", raising=False)
    file = tmp_path / "key.txt"
    file.write_text("k1\n")
    with serving(Run(trained).policy(), Run(trained).settings, api_key="k1") as server:
        words = drive(server.port, tmp_path / "o")
        assert main(words) == 2
        assert "--api-key-file FILE" in capsys.readouterr().err
        assert main([*words, "--api-key-file", str(file)]) == 0
        monkeypatch.setenv("PRISM_API_KEY", "k1")
        assert main(words) == 0
    assert RecordingSource(tmp_path / "o").lengths.tolist() == [10, 10]
    assert main(["run", str(trained), *test_robots_run.TWIN, "--api-key-file", str(file)]) == 2
    assert "needs --server" in capsys.readouterr().err
