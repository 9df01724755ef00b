"""The benches of latency and size: what they time is what they say, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prism.bench import latency
from prism.bench.latency import CANDIDATES, WAYS, Bench
from prism.cli import main
from prism.cli.bench import Latency
from prism.errors import PrismError
from prism.experiments.recipes import recipe, with_budget
from prism.experiments.workflow import train_experiment
from prism.io.jsonconfig import with_settings
from research import size


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.make("tiny", 2, 16, tuple(dict.fromkeys(way.method for way in WAYS)))


def test_every_way_plans_from_the_same_context(bench: Bench) -> None:
    for way in WAYS:
        if way.key != "diffusion_nfe100":
            assert bench.planner(way, 3)().shape == (1, 3, 16, 7)
            assert bench.sampler(way, 1)().shape == (1, 1, 16, 7)
    assert bench.encoder()().shape == bench.context.shape


def test_the_number_of_evaluations_is_the_number_of_passes(bench: Bench) -> None:
    passes = {}
    for way in WAYS:
        policy = bench.policies[way.method]
        network = getattr(policy, "unet", None) or policy
        counts: list[int] = []
        hook = network.register_forward_hook(lambda *_, counts=counts: counts.append(1))
        if way.key.startswith(("diffusion", "flow", "imle")) and not way.key.endswith("100"):
            bench.planner(way, 2)()
            passes[way.key] = len(counts)
        hook.remove()
    assert passes == {
        **{"diffusion_nfe1": 1, "diffusion_nfe10": 10, "flow_matching_nfe1": 1, "flow_matching_nfe5": 5},
        "imle": 1,
    }


def test_latency_writes_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "MIN_ROUNDS", 2)
    monkeypatch.setattr(latency, "HORIZONS", ((2, 16),))
    config = Latency(json=tmp_path / "latency.json", preset="tiny", threads=1, seconds=0.01)
    threads = torch.get_num_threads()
    config.run()
    assert torch.get_num_threads() == threads
    stored = json.loads((tmp_path / "latency.json").read_text())
    for key in ("ratio", "ratio_with_encoders"):
        assert stored[key]["diffusion_nfe10"] > 1
        assert stored[key]["flow_matching_nfe5"] > 0
    times = stored["horizons"]["2x16"]["plan_ms"]
    assert times["diffusion_nfe10"]["median"] > times["diffusion_nfe1"]["median"]
    assert all(one["p99"] >= one["median"] > 0 for one in times.values())
    assert {"command", "date", "machine"} <= set(stored)
    assert "flow_matching_nfe5" in capsys.readouterr().out
    with pytest.raises(PrismError, match="exists already"):
        config.run()


def test_latency_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = with_settings(with_budget(recipe("pusht"), steps=2), ["train.batch_size=8"])
    train_experiment(experiment, tmp_path / "run", False, latency.Console(quiet=True))
    file = tmp_path / "latency.json"
    assert main(["bench", "latency", str(tmp_path / "run"), "--seconds", "0.01", "--json", str(file)]) == 0
    stored = json.loads(file.read_text())
    assert (stored["run"], stored["method"], stored["candidates"]) == ("run", "prism", experiment.controller.candidates)
    assert min(stored["with_encoders_ms"]["policy"]["median"], stored["plan_ms"]["median"]) > 0
    assert stored["plans_per_s"] > 0
    assert "plans a second" in capsys.readouterr().out
    assert main(["bench", "latency", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_sizes_are_counted(tmp_path: Path) -> None:
    data = size.run(size.Config(presets=("tiny",)), latency.Console(quiet=True))["presets"]["tiny"]
    methods = data["methods"]
    assert methods["diffusion"]["flops_one_plan"] > 9 * methods["imle"]["flops_one_plan"]
    for row in methods.values():
        assert row["megabytes"] == pytest.approx(4e-6 * row["parameters"])
        assert row["flops_one_plan"] <= row[f"flops_{CANDIDATES}_plans"]
        assert row["parameters"] - row["head_parameters"] == data["encoder_parameters"]
    linear = torch.nn.Linear(3, 5)
    assert size.flops(lambda: linear(torch.zeros(7, 3))) == 2 * 7 * 3 * 5
    with pytest.raises(PrismError, match="unknown preset"):
        size.Config(presets=("huge",))
