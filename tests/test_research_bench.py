"""The benches run, report the promised keys, and measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from prism.bench import timing
from prism.errors import PrismError
from research import attention, data, train_step
from research.report import carry_out


def test_interleave_visits_every_call_every_round() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    times = timing.interleave(calls, np.random.default_rng(0), seconds=0.0, min_rounds=20, min_sample_seconds=0.0)
    assert {len(t.wall) for t in times.values()} == {20}
    rounds = [order[12:][i : i + 3] for i in range(0, 60, 3)]  # four calls each come first
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_paired_ratio_cancels_what_slows_both() -> None:
    slow = np.array([1.0, 10.0, 1.0, 100.0, 1.0])
    assert timing.paired_ratio(2 * slow, slow) == 2.0
    low, high = timing.ratio_interval(2 * slow, slow, np.random.default_rng(0))
    assert low == high == 2.0


def test_peak_counts_what_lives_at_once_and_views_once() -> None:
    existing = torch.zeros(1000)

    def in_turn() -> None:
        for _ in range(5):
            torch.ones(250).view(5, 50).t()  # 1000 bytes, freed before the next

    def together() -> list[torch.Tensor]:
        return [existing.add_(1.0), *(torch.ones(250) for _ in range(5))]

    assert train_step.peak_bytes(in_turn, [existing]) == 1000
    assert train_step.peak_bytes(together, [existing]) == 5000


def test_saved_counts_what_backward_needs() -> None:
    w = torch.randn(10, 10, requires_grad=True)
    x = torch.randn(7, 10)
    assert train_step.saved_bytes(lambda: x @ w, [w, x]) == 0
    assert train_step.saved_bytes(lambda: (x @ w).exp(), [w, x]) == 4 * 70  # exp keeps its result
    assert train_step.saved_bytes(lambda: (x @ w).exp().sum(), []) == 4 * (70 + 70)  # and the product its input


def test_attention_bench_reports_the_promised_keys(tmp_path: Path) -> None:
    config = attention.Config(
        json=tmp_path / "a.json",
        plot=tmp_path / "a.svg",
        lengths=(4, 32),
        heads=2,
        head_dim=8,
        features=4,
        error_features=(16, 1024),
        error_seeds=5,
        error_head_dim=8,
        seconds=0.0,
    )
    carry_out(attention, config)
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["error"]["favor"]["1024"] < result["error"]["favor"]["16"] / 2
    assert result["error"]["favor_paper"]["1024"] > 2 * result["error"]["favor"]["1024"]
    assert result["auto_worst_ratio"] > 0
    assert set(result["time_ms"]["forward"]) == {"softmax", "favor", "favor_paper", "auto"}
    assert set(result["time_ms"]["forward"]["auto"]) == {"4", "32"}
    assert result["auto"]["forward"]["4"]["resolved"] == "softmax"
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(PrismError, match=r"a\.json exists"):
        carry_out(attention, config)


@pytest.mark.parametrize("change", [{"lengths": ()}, {"error_features": (0,)}, {"threads": 0}, {"seconds": -1.0}])
def test_attention_bench_refuses_bad_settings(change: dict[str, object]) -> None:
    with pytest.raises(PrismError):
        attention.Config(**change)  # type: ignore[arg-type]


def test_train_step_bench_compares_equal_gradients() -> None:
    config = train_step.Config(preset="tiny", candidates=8, batch=2, seconds=0.0, threads=1)
    result = train_step.run(config, Console(quiet=True))
    assert result["gradient_difference"] < 1e-4
    assert 0 < result["hard"]["saved_ratio"] < result["soft"]["saved_ratio"] < 1
    assert 0 < result["memory_ratio"] <= 1  # at this size one weight's gradient can be all of the peak
    assert result["speedup_hard"] > 0
    assert result["speedup_soft"] > 0
    assert result["settings"]["threads"] == 1


def test_train_step_bench_refuses_bad_settings() -> None:
    with pytest.raises(PrismError, match="preset"):
        train_step.Config(preset="huge")
    with pytest.raises(PrismError, match="soft-candidates"):
        train_step.Config(candidates=2, soft_candidates=3)


def test_data_bench_measures_speed_and_memory(tmp_path: Path) -> None:
    name, file = "prism", tmp_path / "data.json"
    carry_out(data, data.Config(json=file, formats=(name,), seconds=0.05, scale=0.05, batch=4, growth=2))
    result = json.loads(file.read_text())
    assert result["windows_per_s"].keys() == result["memory_ratio_10x"].keys() == {name}
    assert result["windows_per_s"][name] > 0
    assert 0.5 < result["memory_ratio_10x"][name] < 2
    assert result["grown"][name]["steps"] == 2 * result["once"][name]["steps"]


def test_data_bench_refuses_unknown_formats() -> None:
    with pytest.raises(PrismError, match="--formats csv: use some of prism"):
        data.Config(formats=("csv",))
