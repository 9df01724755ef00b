"""`prism bench server`, small: the keys, robots that are served, frames that are refused. `bench realtime` on a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from prism.bench import realtime
from prism.bench.server_load import Load, load_keys, running_server
from prism.cli import main
from prism.cli.bench import Realtime, Server
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations
from prism.experiments.recipes import Experiment
from prism.sensors import SensorSpec, decode_text
from prism.server.prometheus import Histogram
from research import realtime as research_realtime
from research.__main__ import main as research
from tests.policy_fakes import VECTORS, save_run, small_config, small_policy
from tests.server_fakes import OpenPi, see


def test_the_bench_serves_robots_and_refuses_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.json"
    assert research(["server", "--clients", "3", "--seconds", "0.5", "--fuzz", "60", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["errors"] == 0
    assert 1 <= result["requests"] <= 18  # 15, fewer on a machine too busy to connect them in time
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
    assert result["batch_mean"] >= 1
    assert result["fuzz_frames"] == 60
    assert result["fuzz_hangs"] == result["fuzz_tracebacks"] == result["fuzz_internal_errors"] == 0
    assert result["fuzz_others_errors"] == 0
    assert result["fuzz_server_alive"]
    assert {"command", "seed", "date", "machine"} <= set(result)
    assert "64 clients" not in capsys.readouterr().out
    assert main(["bench", "server", "--json", str(file)]) == 2  # before anything is measured; the same with research
    assert "exists already" in capsys.readouterr().err


def test_configurations_are_checked() -> None:
    for bad in ({"clients": 0}, {"seconds": 0.0}, {"rate": -1.0}):
        with pytest.raises(PrismError):
            Server(**bad)  # type: ignore[arg-type]


def test_realtime_runs_a_checkpoint_with_an_instruction_and_long_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors = (*VECTORS, SensorSpec("text", "text", (6,)))
    run = save_run(tmp_path / "run", small_policy(small_config(pred_horizon=64), sensors))
    monkeypatch.setattr(realtime, "_FRAMES", 16)
    config = Realtime(checkpoint=run, backend="eager", lanes=1, candidates=2)
    policy = realtime.prepare(config).policy
    assert realtime.slot_rate(config, policy) == policy.spec.fps == 10.0
    assert realtime.slot_rate(Realtime(checkpoint=run, rate=7.0), policy) == 7.0
    assert realtime.slot_rate(Realtime(), policy) == pytest.approx(50.5)
    frames = realtime.synthetic_frames(policy.spec.sensors, 16, np.random.default_rng(0))
    assert decode_text(frames[0]["text"]) == "push t"
    ready = dataclasses.replace(realtime.prepare(config), frames=frames, rate=100.0)
    found = realtime.measure(ready, 10, config, saturated=0.0)
    assert found["plan_budget_ms"] == pytest.approx(80.0)  # exec_horizon 8 at the rate that is run, not the policy's
    assert found["plan_errors"] == 0
    with pytest.raises(PrismError, match=r"--compare .* without --checkpoint"):
        research_realtime.Config(checkpoint=run, compare=True)


def test_short_plans_are_benched_with_the_controller_of_the_run(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", small_policy(small_config(pred_horizon=8)))
    for stored, executed in ((None, 4), (ControllerConfig(exec_horizon=3, candidates=5, warm_start=True), 3)):
        if stored is not None:
            Experiment("short", None, Demonstrations("path", path="demos"), controller=stored).save(run)
        config = Realtime(checkpoint=run, backend="eager", lanes=1, candidates=2)
        ready = realtime.prepare(config)
        found = realtime.measure(dataclasses.replace(ready, rate=100.0), 2, config, saturated=0.0)
        assert found["plan_budget_ms"] == pytest.approx(10.0 * executed)
        with running_server(Server(run_folder=run)) as (port, _), OpenPi(port) as client:
            assert client.metadata["exec_horizon"] == executed
            assert client.metadata["candidates"] == (5 if stored else 16)
            assert client.infer(see())["actions"].shape == (8, 3)


def test_percentiles_count_from_when_a_request_was_due() -> None:
    load = Load(due=[0.1] * 99 + [1.0], service=[0.01] * 100, batches=[1, 2], seconds=10.0)
    zero = dict.fromkeys(
        (
            "prism_batch_size_count",
            "prism_batch_size_sum",
            "process_resident_memory_bytes",
            "process_cpu_seconds_total",
        ),
        0.0,
    )
    keys = load_keys(load, zero, {**zero, "process_cpu_seconds_total": 1.0})
    assert keys["p50_ms"] == pytest.approx(100)
    assert keys["p99_ms"] > 100
    assert keys["service_p99_ms"] == pytest.approx(10)
    assert keys["server_cpu_ms"] == pytest.approx(10)
    assert keys["requests_per_s"] == 10


def test_histograms_count_by_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 3.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.count == 5


def test_a_load_of_noise_is_no_robot_to_look_at(tmp_path: Path) -> None:
    """The bench sends random numbers: the server would refuse them as readings in other units."""
    seen = {"low": [0.0, 0.0, 0.0], "high": [0.001, 0.001, 0.001]}
    run = save_run(tmp_path / "run", small_policy(sensors=(dataclasses.replace(VECTORS[0], seen=seen),)))
    with running_server(Server(run_folder=run)) as (port, _), OpenPi(port) as client:
        assert "actions" in client.infer({"proprio": np.array([0.09, 0.08, 0.07], np.float32)})
    frames = realtime.synthetic_frames((dataclasses.replace(VECTORS[0], seen=seen),), 3, np.random.default_rng(0))
    assert max(float(frame["proprio"].max()) for frame in frames) <= 0.001
