"""prism bench sims: the keys it promises, on whatever is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("gym_pusht")

from prism.errors import PrismError
from research import sims
from research.__main__ import main


def test_every_simulator_is_measured_by_its_own_tasks() -> None:
    table = sims.simulators()
    assert table["pusht"] == ("pusht", "pusht-pixels")
    plain, pixels = table["metaworld"]
    assert pixels == f"{plain}-pixels"


def test_keys_and_provenance(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    out = tmp_path / "sims.json"
    assert main(["sims", "--sims", "pusht", "--seconds", "0.1", "--json", str(out)]) == 0
    assert os.sched_getaffinity(0) == cores, "the core is given back"
    figures = json.loads(out.read_text())
    for key in ("steps_per_s.pusht", "frames_per_s.pusht", "wall_steps_per_s.pusht", "wall_frames_per_s.pusht"):
        assert figures[key] > 0
    assert {"command", "date", "seed", "machine", "versions"} <= set(figures)
    assert main(["sims", "--sims", "pusht", "--json", str(out)]) == 2, "nothing is overwritten"


def test_what_is_not_installed_is_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sims.make_env

    def broken(task: str) -> object:
        if task.startswith("metaworld"):
            raise PrismError("MetaWorld is not installed")
        return real(task)

    monkeypatch.setattr(sims, "make_env", broken)
    said: list[str] = []
    figures = sims.measure(("pusht", "metaworld"), 0.05, 0, said.append)
    assert "steps_per_s.pusht" in figures
    assert not any("metaworld" in key for key in figures)
    assert len(said) == 2
    with pytest.raises(PrismError, match="no simulator"):
        sims.measure(("metaworld",), 0.05, 0, said.append)
    with pytest.raises(PrismError, match="unknown simulator"):
        sims.Config(sims=("minecraft",))
