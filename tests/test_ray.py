"""Ray: the same results as local processes, and the loss of a worker is no loss (tests/ray_checks.py)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prism import presets
from prism.errors import PrismError
from prism.evaluation import ray_workers
from prism.evaluation.ray_workers import SentPolicy
from prism.training.checkpoint import TrainingState, save_checkpoint
from tests.evaluation_fakes import SENSORS


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_on_a_local_cluster(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.ray_checks", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("check_")]) == 5


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrismError, match=r"pip install 'prism-policy\[ray\]'"):
        ray_workers.connect()


def test_a_policy_is_sent_whole_and_verified(tmp_path: Path) -> None:
    policy = presets.build_policy(presets.tiny().spec(SENSORS, 2, 10.0), seed=3)
    state = TrainingState(
        step=1,
        seconds=1.0,
        train_config={},
        data="",
        val_loss=None,
        best_val_loss=None,
        skipped=0,
        skipped_total=0,
        scaler={},
        weights={},
        optimizer={},
    )
    save_checkpoint(tmp_path / "run", policy.spec, policy.state_dict(), state)
    sent = SentPolicy.read(tmp_path / "run")
    loaded = sent().state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in policy.state_dict().items())
    sent.files["model.safetensors"] = sent.files["model.safetensors"][:-1] + b"x"
    with pytest.raises(PrismError, match=r"model\.safetensors"):
        sent()
