"""prism bench global-batch: its keys, its plot, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.errors import PrismError
from research import global_batch
from research.report import carry_out


def test_the_bench_reports_the_promised_key_and_draws(tmp_path: Path) -> None:
    config = global_batch.Config(
        json=tmp_path / "g.json",
        plot=tmp_path / "g.svg",
        preset="tiny",
        candidates=4,
        rows=2,
        sizes=(4, 32),
        action_dim=2,
        seconds=0.0,
    )
    carry_out(global_batch, config)
    result = json.loads((tmp_path / "g.json").read_text())
    assert 0 < result["share_of_step"] < 1
    assert set(result["sizes"]) == {"4", "32"}
    assert set(result["sizes"]["32"]["kinds"]) == {"own", "batch", "paper", "batch_exact"}
    assert result["sizes"]["32"]["kinds"]["batch"]["memory_mib"] > 0
    assert (tmp_path / "g.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(PrismError, match=r"g\.json exists"):
        carry_out(global_batch, config)


@pytest.mark.parametrize("change", [{"sizes": ()}, {"sizes": (2,)}, {"preset": "huge"}])
def test_the_bench_refuses_bad_settings(change: dict[str, object]) -> None:
    with pytest.raises(PrismError):
        global_batch.Config(**change)  # type: ignore[arg-type]
