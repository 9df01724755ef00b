"""Curves of a training: evaluations on the way, Weights & Biases, and the device it runs on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import prism
from prism.experiments.recipes import recipe, with_budget
from prism.experiments.workflow import TUNING_SEED, evaluation_fractions, read_curve
from prism.inference.backends import backend_device
from prism.ranks import choose_device
from prism.report.run_page import training_curves
from prism.training.config import TrainConfig
from prism.training.log import Curves, read_log

QUICK = {"demonstrations": 4, "progress": False, "set": ["train.batch_size=8", "train.threads=1"]}


def test_evaluations_on_the_way_do_not_change_the_training(tmp_path: Path) -> None:
    plain = prism.train("pusht", steps=12, out=tmp_path / "plain", **QUICK)  # type: ignore[arg-type]
    run = prism.train("pusht", steps=12, out=tmp_path / "run", eval_every=6, eval_episodes=1, **QUICK)  # type: ignore[arg-type]
    assert run.weights_id()["sha256"] == plain.weights_id()["sha256"]
    points = read_curve(run.folder)
    assert [(point["fraction"], point["step"], point["episodes"]) for point in points] == [(0.5, 6, 1), (1.0, 12, 1)]
    logged = [line for line in read_log(run.folder) if "success" in line]
    assert [(line["step"], line["score"]) for line in logged] == [(point["step"], point["score"]) for point in points]
    assert list((run.folder / "tensorboard").glob("events*"))
    assert not (run.folder / "metrics.json").exists()  # test seeds were not touched
    assert TUNING_SEED > 100_000
    curves = training_curves(read_log(run.folder))
    assert curves is not None
    assert "Success on the way" in dict(curves["charts"])


def test_eval_every_counts_in_the_unit_of_the_budget() -> None:
    by_clock, by_steps = with_budget(recipe("pusht"), minutes=10), with_budget(recipe("pusht"), steps=1000)
    assert evaluation_fractions(by_clock, 4) == (0.4, 0.8)
    assert evaluation_fractions(by_steps, 250) == (0.25, 0.5, 0.75)
    with pytest.raises(prism.PrismError, match="--eval-every 10: use less than the budget of 10 minutes"):
        evaluation_fractions(by_clock, 10)


class FakeWandb:
    """What prism calls of wandb."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> FakeWandb:
        self.opened.append(settings)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def test_weights_and_biases_gets_the_same_numbers_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = TrainConfig(steps=10, wandb="arms")
    for step, mode in ((5, "offline"), (10, "online")):
        curves = Curves(tmp_path, config, step - 5)
        curves.write({"step": step, "seconds": 1.5, "loss": 0.25, "val_loss": None})
        curves.close()
        assert fake.opened[-1]["mode"] == mode
        monkeypatch.setenv("WANDB_MODE", "online")
    first, second = fake.opened
    assert (first["project"], first["name"], first["dir"]) == ("arms", tmp_path.name, str(tmp_path))
    assert first["id"] == second["id"]  # a resumed run goes on there, too
    assert fake.logged == [(5, {"loss": 0.25}), (10, {"loss": 0.25})]
    assert fake.finished == 2
    assert [line["step"] for line in read_log(tmp_path)] == [5, 10]


def test_weights_and_biases_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(steps=10, wandb="arms")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(prism.PrismError, match=r"train.wandb=arms needs the package wandb: .*\[wandb\]"):
        Curves(tmp_path, config, 0)

    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))  # type: ignore[arg-type]
    with pytest.raises(prism.PrismError, match="no API key; WANDB_MODE=offline needs no account"):
        Curves(tmp_path, config, 0)


def test_one_place_resolves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    assert choose_device("mps") == torch.device("mps")
    for name, said in (("cuda", "PyTorch sees no cuda device here"), ("tpu", "use auto, cpu, cuda, mps")):
        with pytest.raises(prism.PrismError, match=said):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert backend_device("auto", "onnx") == torch.device("cpu")
    with pytest.raises(prism.PrismError, match="--backend onnx runs on the CPU"):
        backend_device("mps", "onnx")
