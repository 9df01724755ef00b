"""torchrun with one worker killed: the run restarts by itself and ends with the right number of steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prism.data.formats.store_writer import DatasetWriter
from prism.sensors import SensorSpec
from prism.training import checkpoint
from prism.training.log import read_log

STEPS = 24
SETTINGS = (
    *("train.batch_size=9", "train.checkpoint_every=2", "train.log_every=1", "train.val_batches=1", "train.threads=1"),
    *("policy.encoder.mix_width=64", "policy.encoder.mix_blocks=1"),
)


def write_demonstrations(path: Path) -> None:
    rng = np.random.default_rng(0)
    sensors = (SensorSpec("proprio", "vector", (4,)),)
    with DatasetWriter(path, sensors, 2, 10.0, "walk") as writer:
        for _ in range(4):
            states = rng.normal(size=(30, 4)).cumsum(0).astype(np.float32)
            writer.add({"proprio": states}, np.sin(states[:, :2]))


def workers_of(agent: int) -> dict[int, int]:
    """Process id of each rank below a torchrun."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            variables = folder.joinpath("environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        rank = [text.removeprefix(b"RANK=") for text in variables if text.startswith(b"RANK=")]
        if parent == agent and rank:
            found[int(rank[0])] = int(folder.name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the workers")
def test_a_killed_worker_costs_steps_and_not_the_run(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "data")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.2", "-m", "prism.cli", "train", str(tmp_path / "data")]
    command += ["--out", str(run), "--auto-resume", "--steps", str(STEPS), "--set", *SETTINGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PRISM_TIMEOUT": "60"}
    with open(tmp_path / "output", "w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
        try:
            deadline = time.monotonic() + 120
            while agent.poll() is None and time.monotonic() < deadline and len(read_log(run)) < 5:
                time.sleep(0.01)
            os.kill(workers_of(agent.pid)[1], signal.SIGKILL)
            status = agent.wait(timeout=150)
        finally:
            agent.kill()
    text = (tmp_path / "output").read_text()
    assert status == 0, text
    assert "resuming" in text
    assert [record["step"] for record in read_log(run)] == list(range(1, STEPS + 1))
    newest = checkpoint.latest_checkpoint(run)
    assert newest is not None
    assert checkpoint.load_training_state(newest).step == STEPS
