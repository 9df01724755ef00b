"""Reading datasets: windows a second from every format, and memory as the data grow ten times.

Try:
    python -m research data --json data.json
    python -m research data --formats prism lerobot_v3

Each dataset is generated with the shapes that people have (WRITERS) and read in a process of its own:
opened, its vectors cached, then batches in the order of training (prism.data.windows). windows_per_s is on the dataset
of ten times the size, by CPU time of the one thread that reads, which other programs do not disturb, without the first
batches, which fill the memory for blocks; windows_per_s_wall is beside it, and windows_per_s_alone: the same where
every window is read by itself, in any order. memory_ratio_10x is the ratio of the peaks of resident memory, and
memory_growth_mb the difference, which does not hide behind the size of Python and torch.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from research.data_files import WRITERS
from research.report import Written


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    formats: Annotated[tuple[str, ...], option("FORMAT ...")] = ()
    """prism, zarr, zarr_zip, robomimic, lerobot_v21, lerobot_v3, calvin; default: all of them."""
    seconds: float = 3.0
    """Of reading, for each dataset."""
    batch: int = 32
    """Windows of a batch."""
    obs_horizon: int = 2
    """To."""
    pred_horizon: int = 16
    """Tp."""
    growth: int = 10
    """How many times larger the second dataset is."""
    scale: float = 1.0
    """Of the number of steps; smaller is quicker, and caches then hold everything."""
    seed: int = 0
    """Of the order of the windows."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.formats if name not in WRITERS]:
            raise PrismError(f"--formats {unknown[0]}: use some of {', '.join(WRITERS)}")
        if min(self.batch, self.obs_horizon, self.pred_horizon) < 1 or self.growth < 2:
            raise PrismError("batch and horizons must be at least 1, growth at least 2")
        if not (self.seconds > 0 and self.scale > 0):
            raise PrismError("seconds and scale must be positive")


def peak_memory() -> int:
    """Bytes. VmHWM where there is one: getrusage's counts the parent's memory too, as it was when this was started."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_windows(settings: dict[str, Any]) -> dict[str, float]:
    """In the measuring process."""
    import torch

    from prism.data import open_dataset
    from prism.data.loader import BatchOrder, read_batch
    from prism.data.windows import Windows

    torch.set_num_threads(1)
    begin = time.perf_counter()
    windows = Windows(open_dataset(Path(settings["path"])), settings["obs_horizon"], settings["pred_horizon"])
    opened = time.perf_counter() - begin
    blocks, batch, seed = windows.blocks, settings["batch"], settings["seed"]
    order = BatchOrder(len(windows), batch, seed, blocks=blocks)
    first = 1 if blocks is None else 1 + 3 * min(blocks.kept, blocks.count) // batch
    for step in range(first):
        read_batch(windows, order, step)
    found = _rates(lambda number: read_batch(windows, order, first + number), batch, settings["seconds"])
    peak = peak_memory()
    rng = np.random.default_rng(seed)
    alone = _rates(lambda _: windows.batch(rng.integers(len(windows), size=batch)), batch, settings["seconds"] / 2)
    return {
        "windows_per_s": found[0],
        "windows_per_s_wall": found[1],
        "windows_per_s_alone": alone[0],
        "open_s": opened,
        "steps": len(windows),
        "block_steps": 0 if blocks is None else int(np.diff(blocks.starts).max()),
        "blocks_mixed": 0 if blocks is None else min(blocks.mixed, blocks.count),
        "peak_bytes": peak,
    }


def _rates(read: Callable[[int], object], batch: int, seconds: float) -> tuple[float, float]:
    """Windows a second of CPU and of wall time."""
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while count == 0 or time.perf_counter() - wall < seconds:
        read(count)
        count += 1
    return batch * count / (time.process_time() - cpu), batch * count / (time.perf_counter() - wall)


def measure(config: Config, path: Path) -> dict[str, float]:
    settings = {name: getattr(config, name) for name in ("seconds", "batch", "obs_horizon", "pred_horizon", "seed")}
    command = [sys.executable, "-m", "research.data", json.dumps({**settings, "path": str(path)})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PrismError(f"{path}: the measuring process failed: {last[0]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(config: Config, console: Console) -> dict[str, Any]:
    names = config.formats or tuple(WRITERS)
    once: dict[str, dict[str, float]] = {}
    grown: dict[str, dict[str, float]] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("formats", total=2 * len(names))
        for name in names:
            file, write, steps = WRITERS[name]
            steps = max(round(steps * config.scale / 100), 1) * 100
            for times, results in ((1, once), (config.growth, grown)):
                with tempfile.TemporaryDirectory(prefix="prism-bench-") as folder:
                    write(Path(folder) / file, steps, times)
                    results[name] = measure(config, Path(folder) / file)
                progress.advance(bar)
    growth = {name: grown[name]["peak_bytes"] - once[name]["peak_bytes"] for name in names}
    return {
        "windows_per_s": {name: grown[name]["windows_per_s"] for name in names},
        "windows_per_s_alone": {name: grown[name]["windows_per_s_alone"] for name in names},
        "windows_per_s_wall": {name: grown[name]["windows_per_s_wall"] for name in names},
        "memory_ratio_10x": {name: grown[name]["peak_bytes"] / once[name]["peak_bytes"] for name in names},
        "memory_growth_mb": {name: growth[name] / 1e6 for name in names},
        "once": once,
        "grown": grown,
        "settings": {name: getattr(config, name) for name in ("seconds", "batch", "obs_horizon", "growth", "scale")},
        **run_info(config.seed),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Windows in the order of training, one thread")
    growth = f"memory at {result['settings']['growth']}x"
    columns = ("format", "steps", "windows/s", "each alone", "blocks mixed", "peak, MB", growth)
    for column in columns:
        first = column == "format"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    for name, speed in result["windows_per_s"].items():
        grown = result["grown"][name]
        ratio = f"{result['memory_ratio_10x'][name]:.2f}x"
        alone, mixed = f"{grown['windows_per_s_alone']:,.0f}", f"{grown['blocks_mixed']} of {grown['block_steps']}"
        mixed = mixed if grown["blocks_mixed"] else "-"
        memory = f"{grown['peak_bytes'] / 1e6:.0f}"
        table.add_row(name, f"{grown['steps']:,}", f"{speed:,.0f}", alone, mixed, memory, ratio)
    console.print(table)


if __name__ == "__main__":
    print(json.dumps(read_windows(json.loads(sys.argv[1]))))
