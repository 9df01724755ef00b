"""Training with reader processes: a signal to the whole group stops it politely, kill -9 leaves none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prism.training import checkpoint

CODE = """
import sys
import time
from pathlib import Path
import numpy as np
from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.data.windows import Windows
from prism.sensors import SensorSpec
from prism.training.config import TrainConfig
from prism.training.trainer import train
from tests.training_fakes import SENSORS, make_policy

class Slow(Windows):  # so that the signal comes while the training waits for a batch
    def read_lazy(self, *arguments):
        time.sleep(1.0)
        return super().read_lazy(*arguments)

def main(folder):
    rng = np.random.default_rng(0)
    with DatasetWriter(folder / "data", (*SENSORS, SensorSpec("rgb", "rgb", (2, 2, 3))), 3, 10.0, "none") as writer:
        for _ in range(4):
            states = rng.normal(size=(30, 5)).astype(np.float32)
            writer.add({"proprio": states, "rgb": np.zeros((30, 2, 2, 3), np.uint8)}, np.sin(states[:, :3]))
    windows = Slow(StoreSource(folder / "data"), 2, 8)
    config = TrainConfig(batch_size=16, minutes=5, log_every=1, val_every=0, threads=1, workers=2)
    result = train(make_policy(), windows, None, config, folder / "run")
    print(result.stopped_by, result.step)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
"""


def children(of: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = folder.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            command = folder.joinpath("cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == of and state != "Z" and b"spawn_main" in command:
            found.add(int(folder.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the readers")
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_readers_leave_signals_to_the_training_and_end_with_it(tmp_path: Path, repository: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), *sys.path]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a group of its own, as a shell's command has
    )
    readers: set[int] = set()
    try:
        log = tmp_path / "run" / "log.jsonl"
        deadline = time.monotonic() + 240
        while process.poll() is None and not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        readers = children(process.pid)
        assert len(readers) == 2, process.poll()
        if how == "kill":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
            os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        deadline = time.monotonic() + 30
        while any(alive(reader) for reader in readers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(alive(reader) for reader in readers)
    finally:
        process.kill()
        for reader in filter(alive, readers):
            os.kill(reader, signal.SIGKILL)
    if how == "stop":
        assert process.returncode == 0, err
        assert "Traceback" not in err
        name, step = out.split()
        assert name in ("SIGINT", "SIGTERM")
        newest = checkpoint.latest_checkpoint(tmp_path / "run")
        assert newest is not None
        assert newest.name == f"step-{int(step):08d}"
