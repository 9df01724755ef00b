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

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")


def run_checks(module: str, folder: Path, *names: str) -> list[str]:
    """The checks that held, by name; tests/ray_checks.py says why they have a process of their own."""
    words = [sys.executable, "-m", module, str(folder), *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("check_")]


@needs_ray
def test_on_a_local_cluster(tmp_path: Path) -> None:
    names = ["check_episodes_are_the_same_bit_for_bit", "check_a_lost_worker_is_replaced_and_its_job_done_again"]
    assert run_checks("tests.ray_checks", tmp_path, *names) == names


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("tests.ray_checks", 5), ("tests.ray_node_loss", 3)])
def test_a_cluster_in_trouble(tmp_path: Path, module: str, count: int) -> None:
    """Workers that die, refusals, cells as tasks; an evaluation and a comparison that lose a node in the middle."""
    assert len(run_checks(module, tmp_path)) == count


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
