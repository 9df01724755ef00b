"""kill -9 at random moments, resume each time: the end is that of an undisturbed run, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from prism.training import checkpoint
from prism.training.config import TrainConfig
from prism.training.loop import train
from tests.test_training import files_of
from tests.training_fakes import make_policy, make_windows, quiet

CONFIG = TrainConfig(batch_size=16, steps=40, warmup_steps=3, log_every=1, checkpoint_every=2, threads=1)


def _train_in_child(run_dir: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run_dir.mkdir(exist_ok=True)
        train(make_policy(), *make_windows(), CONFIG, run_dir, True, quiet())
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(tmp_path: Path, kills: int) -> None:
    undisturbed = train(make_policy(), *make_windows(), CONFIG, tmp_path / "undisturbed", console=quiet())
    rng = random.Random(kills)
    killed = 0
    run_number = 0
    while killed < kills:  # a short run ends before many kills, so there are several
        run_number += 1
        run_dir = tmp_path / f"run-{run_number}"
        while True:
            child = _train_in_child(run_dir)
            if killed < kills:
                time.sleep(rng.uniform(0.02, 0.5))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            killed += 1
            damaged: list[str] = []
            checkpoint.latest_checkpoint(run_dir, damaged.append)
            assert damaged == []
        newest = checkpoint.latest_checkpoint(run_dir)
        assert newest is not None
        assert files_of(newest) == files_of(undisturbed.checkpoint)
