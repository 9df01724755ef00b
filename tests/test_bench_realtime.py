"""The real-time benches run on a small policy, report the promised keys, and count what they say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.bench import realtime
from prism.bench.realtime import run_loop, synthetic_frames
from prism.cli.bench import Realtime
from prism.errors import PrismError
from research import realtime as research_realtime
from research import scaling
from research.report import carry_out


class Lazy:
    """A controller that gives every third action too late."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, frame: object) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            time.sleep(0.06)


def test_an_action_after_its_slot_is_late_and_does_not_count() -> None:
    loop = run_loop(Lazy(), [{}], slots=12, rate=20.0)  # type: ignore[arg-type]
    assert loop.late >= 4  # slots of 50 ms; a busy machine may add some
    assert len(loop.latency_ms) == 12
    figures = loop.figures()
    assert figures["actions_per_s"] == pytest.approx((12 - loop.late) / loop.seconds)
    assert figures["actions_per_s"] < 20.0


def test_frames_differ_and_look_like_the_sensors() -> None:
    frames = synthetic_frames(realtime.CALVIN, 3, np.random.default_rng(0))
    for spec in realtime.CALVIN:
        readings = [frame[spec.name] for frame in frames]
        assert {r.shape for r in readings} == {spec.shape}
        assert {r.dtype for r in readings} == {spec.dtype}
        assert not np.array_equal(readings[0], readings[1])


def test_realtime_reports_the_promised_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "_FRAMES", 16)
    options: dict[str, Any] = {"seconds": 1.0, "rate": 10.0, "backend": "eager", "size": "tiny", "lanes": 2}
    carry_out(research_realtime, research_realtime.Config(**options, json=tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert {"actions_per_s", "late_actions", "p99_ms", "p50_ms", "plan_latency_p99_ms", "plan_misses"} <= set(result)
    assert result["frames"] == result["frames_encoded"] == 10  # one camera, ten slots
    assert result["observations_dropped"] == 0
    assert result["max_action_difference"] < 1e-4
    assert result["token_cache_difference"] < 1e-4
    assert result["token_cache_ratio_wrist"] > 0
    assert result["backend"] == "eager"
    assert {"command", "date", "machine"} <= set(result)
    assert result["stolen_s"] >= 0
    with pytest.raises(PrismError, match=r"r\.json exists"):
        Realtime(**options, json=tmp_path / "r.json").run()


def test_scaling_fits_exponents_and_draws(tmp_path: Path) -> None:
    assert scaling.exponent({1: 2.0, 2: 4.0, 4: 8.0}) == pytest.approx(1.0)
    assert scaling.exponent({1: 2.0, 2: 8.0, 4: 32.0}) == pytest.approx(2.0)
    config = scaling.Config(
        json=tmp_path / "s.json",
        plot=tmp_path / "s.svg",
        size="tiny",
        pred_horizons=(16, 64),
        candidates=(1, 8),
        seconds=0.0,
    )
    carry_out(scaling, config)
    result = json.loads((tmp_path / "s.json").read_text())
    assert set(result["pred_horizon_ms"]) == {"16", "64"}
    assert {"pred_horizon_exponent", "candidates_exponent", "candidates_growth"} <= set(result)
    assert (tmp_path / "s.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(PrismError, match=r"cannot draw a '\.bmp'"):
        carry_out(scaling, scaling.Config(plot=tmp_path / "s.bmp"))


def test_wrong_arguments_are_named() -> None:
    for change, message in (({"seconds": 0.0}, "--seconds"), ({"lanes": 0}, "--lanes"), ({"rate": -1.0}, "--rate")):
        with pytest.raises(PrismError, match=message):
            Realtime(**change)  # type: ignore[arg-type]
