"""What a comparison needs of the training loop: a clock that counts computing, and stops on the way."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from prism.errors import PrismError
from prism.io.jsonconfig import from_json
from prism.training import checkpoint, trainer
from prism.training.config import TrainConfig
from prism.training.trainer import TrainResult, train
from tests.test_training import CONFIG, files_of, numbers
from tests.training_fakes import FakePolicy, make_policy, make_windows, quiet


class SleepyPolicy(FakePolicy):
    """Shares its core with somebody else, most of the time."""

    def loss(self, *args: Any) -> Any:
        time.sleep(0.5)
        return super().loss(*args)


def run(folder: Path, config: TrainConfig, policy: FakePolicy | None = None, **options: Any) -> TrainResult:
    windows, held_out = make_windows()
    return train(policy or make_policy(), windows, held_out, config, folder, console=quiet(), **options)


def test_the_cpu_clock_does_not_count_the_time_of_others(tmp_path: Path) -> None:
    plain = make_policy()
    for clock in ("wall", "cpu"):
        config = dataclasses.replace(CONFIG, steps=2, minutes=1.0, clock=clock, val_every=0)
        result = run(tmp_path / clock, config, SleepyPolicy(plain.spec, plain.normalizer))
        assert result.step == 2
        assert (result.seconds >= 2 * 0.5) is (clock == "wall")


def test_the_cpu_clock_ends_the_run_and_a_resume_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setitem(trainer._CLOCKS, "cpu", lambda: float(next(ticks)))  # a second a look, whatever the wall says
    config = dataclasses.replace(CONFIG, steps=0, minutes=0.5, clock="cpu")
    first = run(tmp_path, config, until=0.4)
    assert (first.step, first.seconds) == (12, 12.0)
    with pytest.raises(PrismError, match=r"clock = cpu there, wall now"):
        run(tmp_path, dataclasses.replace(config, clock="wall"), resume=True)
    second = run(tmp_path, config, resume=True)
    assert (second.step, second.seconds) == (30, 30.0)


def test_stopping_on_the_way_changes_nothing(tmp_path: Path) -> None:
    straight = run(tmp_path / "a", CONFIG)
    for until in (0.3, 0.5, 0.5, 1.0):
        halting = run(tmp_path / "b", CONFIG, until=until, resume="auto")
        assert halting.step == round(10 * until)
        assert checkpoint.resolve(tmp_path / "b") == halting.checkpoint
    one, other = files_of(straight.checkpoint), files_of(halting.checkpoint)
    assert one["training"].pop("best_val_loss") >= other["training"].pop("best_val_loss")  # it was measured more often
    assert one == other
    assert [row[1] for row in numbers(tmp_path / "a")] == [row[1] for row in numbers(tmp_path / "b")]


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(PrismError, match=r"clock = 'sun'"):
        TrainConfig(steps=1, clock="sun")  # type: ignore[arg-type]
    assert from_json(TrainConfig, TrainConfig(steps=1, clock="cpu").to_json()).clock == "cpu"
