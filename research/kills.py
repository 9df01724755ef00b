"""`prism record` killed with SIGKILL at random moments: is a finished episode lost, is the dataset readable? Minutes.

Try:
    python -m research kills --count 50 --json kills.json

    kills        how often; each starts the same command again, which adds to the same dataset
    said         episodes that the command had said to be recorded
    there        episodes in the dataset at the end
    lost         said and not there, or not readable to the last step: checked after every kill
    mid_episode  kills that came while an episode was being recorded or written, as far as can be seen from outside
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from prism.data.formats.episode_folders import RecordingSource, is_recording
from prism.errors import check_numbers
from prism.evaluation.results import run_info
from prism.io.files import HIDDEN
from research.report import Written


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    count: int = 50
    """Kills."""
    seed: int = 0
    """Of the moments."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "count", "[0, inf)": "seed"})


def record_and_kill(folder: Path, seconds: float) -> int:
    """Episodes that were said to be recorded; the kill comes so long after the robot was connected."""
    words = [sys.executable, "-m", "prism.cli", "record", str(folder), "--robot", "ur5e-twin", "--teleop", "scripted"]
    words += ["--option", "realtime=false", "--episodes", "100000"]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(words, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, text=True)
    assert process.stdout is not None
    killer = threading.Timer(seconds, process.send_signal, (signal.SIGKILL,))
    said = 0
    for line in process.stdout:
        if "stop now" in line.lower() and not killer.is_alive():  # the last line before the robot is connected
            killer.start()
        said += line.startswith("episode ")
    process.wait()
    killer.cancel()
    process.stdout.close()
    return said


def readable(folder: Path) -> int:
    """Episodes whose every step can be read."""
    if not is_recording(folder):
        return 0
    source = RecordingSource(folder)
    return sum(source.read(i).length == length for i, length in enumerate(source.lengths.tolist()))


def unfinished(folder: Path) -> bool:
    """An episode was being written; the lock, which is hidden too, is always there."""
    return any(folder.glob(f"{HIDDEN}*"))


def run(config: Config, console: Console) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    said = lost = there = partial = 0
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "killed"
        for _ in track(range(config.count), "kills", console=console, transient=True):
            before = there
            new = record_and_kill(folder, float(rng.uniform(0.05, 2.0)))
            there = readable(folder)
            said += new
            lost += max(0, before + new - there)
            partial += there > before + new or unfinished(folder)
        seeds = [row["seed"] for row in RecordingSource(folder).provenances] if there else []
    return {
        "kills": config.count,
        "said": said,
        "there": there,
        "lost": lost,
        "seeds_once": len(seeds) == len(set(seeds)),
        "mid_episode": partial,
        **run_info(config.seed),
    }


def show(result: dict[str, Any], console: Console) -> None:
    for key in ("kills", "said", "there", "lost", "seeds_once", "mid_episode"):
        console.print(f"{key}: {result[key]}", highlight=False)
