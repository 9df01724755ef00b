"""Our loader beside LeRobot's own, on one LeRobot v3 dataset: windows a CPU second, random order, video included.

Try:
    python -m research loading --lerobot-python lerobot-venv/bin/python --json loading.json

The dataset is made here: one camera of 480 x 640, a state and actions of 7 numbers, video with a key frame every 2
frames as LeRobot writes it. Every loader is a process of its own on one core, one thread, and reads windows of 2 frames
and 16 actions; they take turns, and a ratio is the median over the rounds of ours / LeRobot's in the same round. By CPU
time, which other programs do not stop.

    lerobot             LeRobotDataset + DataLoader as lerobot-train makes them: uint8, shuffled, no worker processes
    same_dataset        ours from the same files at full size, in the order of training (blocks of neighbours)
    own_format          ours after `prism data convert`, at full size
    cached              ours as `prism train DATASET` reads by default: pictures at the policy's size, made once
                        (cache_cpu_s: what the making took, once)
    ratio_same_dataset, ratio_own_format, ratio_cached; ratio is ratio_cached: what a user gets without an option.
                        It delivers smaller pictures: LeRobot's would still have to be resized.
    spent               shares of the time: seek, decode, convert to RGB; the rest is rows, copies and collating
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from research.data_files import frames
from research.loading_lerobot import answer, timed
from research.report import Written

FPS, EPISODE, SIZE = 30, 100, (480, 640)
OURS = ("same_dataset", "own_format", "cached")


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    lerobot_python: Annotated[Path | None, option("PATH")] = None
    """An interpreter that has LeRobot (tested: 0.6.1). Default: only ours is measured, without ratios."""
    codec: Literal["av1", "h264"] = "av1"
    """Of the video; LeRobot's own default is av1."""
    episodes: int = 10
    """Of 100 steps each."""
    seconds: float = 3.0
    """CPU time of each loader in a round."""
    rounds: int = 5
    """How often each has its turn."""
    batch: int = 32
    """Windows of a batch."""
    seed: int = 0
    """Of the order of the windows."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.rounds, self.batch) < 1 or not self.seconds > 0:
            raise PrismError("episodes, rounds and batch must be at least 1, seconds positive")
        if self.lerobot_python is not None and not self.lerobot_python.is_file():
            raise PrismError(f"--lerobot-python {self.lerobot_python}: no such interpreter")


def write_dataset(path: Path, config: Config) -> str:
    """The LeRobot v3 dataset; the key of its camera."""
    from prism.data.formats.lerobot_writer import LeRobotWriter, feature_keys
    from prism.sensors import SensorSpec

    sensors = (SensorSpec("top", "rgb", (*SIZE, 3)), SensorSpec("state", "vector", (7,)))
    pixels, rng = frames(EPISODE, *SIZE), np.random.default_rng(config.seed)
    with LeRobotWriter(path, sensors, 7, FPS, "loading", codec=config.codec, sometimes_absent=()) as writer:
        for _ in range(config.episodes):
            state, actions = rng.normal(size=(2, EPISODE, 7)).astype(np.float32)
            for start in range(0, EPISODE, 20):
                rows = slice(start, start + 20)
                writer.extend({"top": pixels[rows], "state": state[rows]}, actions[rows])
            writer.end_episode()
    return feature_keys(sensors)["top"]


def prism_batches(settings: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
    """In a measuring process: the batches of training steps 0, 1, ... without end."""
    import time

    import torch

    from prism.data import open_dataset
    from prism.data.formats import video
    from prism.data.loader import BatchOrder, read_batch
    from prism.data.pictures import cached_pictures, with_default_sizes
    from prism.data.windows import Windows

    torch.set_num_threads(1)
    decoder = video._Decoder
    decoder._frame_at = timed("decode", decoder._frame_at)  # type: ignore[method-assign]
    decoder._seek = timed("seek", decoder._seek)  # type: ignore[method-assign]
    decoder._to_rgb = timed("convert", decoder._to_rgb)  # type: ignore[method-assign]
    begin = time.process_time()
    source = open_dataset(Path(settings["path"]))
    if settings["loader"] == "cached":
        source = cached_pictures(with_default_sizes(source)[0], lambda _: None, Path(settings["cache"]))
    about: dict[str, Any] = {"open_cpu_s": time.process_time() - begin}
    windows = Windows(source, settings["obs_horizon"], settings["pred_horizon"])
    order = BatchOrder(len(windows), settings["batch"], settings["seed"], blocks=windows.blocks)
    about["picture"] = list(source.sensors[0].shape)
    about["block_steps"] = 0 if windows.blocks is None else int(np.diff(windows.blocks.starts).max())
    about["blocks_mixed"] = 0 if windows.blocks is None else min(windows.blocks.mixed, windows.blocks.count)

    def endless() -> Iterator[Any]:
        step = 0
        while True:
            yield read_batch(windows, order, step)
            step += 1

    return endless(), about


class Loader:
    """A measuring process that has read its first batch; `about` is what it says of itself."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str], settings: dict[str, Any]) -> None:
        self.name, self._process, self._log = name, process, log
        self.about = self.ask({**settings, "loader": name})

    def ask(self, question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: said below
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                found: dict[str, Any] = json.loads(line)
                return found
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:] or ["no message"]
        raise PrismError(f"the loader '{self.name}' failed: {last[0]}")


@contextmanager
def started(name: str, command: list[str], settings: dict[str, Any]) -> Iterator[Loader]:
    """One core, one thread: decoders start as many threads as they see cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if name == "lerobot":  # another Python with other packages
        environment.pop("PYTHONPATH", None)
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as process,
    ):
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            yield Loader(name, process, log, settings)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def run(config: Config, console: Console) -> dict[str, Any]:
    from prism.data import open_dataset
    from prism.data.convert import convert

    with tempfile.TemporaryDirectory(prefix="prism-loading-") as folder, ExitStack() as stack:
        place = Path(folder)
        with console.status("writing the dataset"):
            camera = write_dataset(place / "lerobot", config)
            convert(open_dataset(place / "lerobot"), place / "own")
        settings: dict[str, Any] = {"path": str(place / "lerobot"), "cache": str(place / "cache"), "camera": camera}
        settings |= {"fps": FPS, "obs_horizon": 2, "pred_horizon": 16, "batch": config.batch, "seed": config.seed}
        commands = {name: [sys.executable, "-m", "research.loading"] for name in OURS}
        if config.lerobot_python is not None:
            script = Path(__file__).with_name("loading_lerobot.py")
            commands = {"lerobot": [str(config.lerobot_python), str(script)], **commands}
        paths = {"own_format": {"path": str(place / "own")}}
        loaders = [
            stack.enter_context(started(name, command, settings | paths.get(name, {})))
            for name, command in commands.items()
        ]
        asked: dict[str, list[dict[str, Any]]] = {loader.name: [] for loader in loaders}
        for number in range(config.rounds):
            console.print(f"round {number + 1} of {config.rounds}", highlight=False)
            for loader in loaders:
                asked[loader.name].append(loader.ask(config.seconds))
        about = {loader.name: loader.about for loader in loaders}
    found = {**figures(asked), "cache_cpu_s": about["cached"]["open_cpu_s"]}
    return {**found, "loaders": about, "settings": config.settings("lerobot_python"), **run_info(config.seed)}


def figures(asked: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rates, ratios and shares of the time from what the processes answered, round by round."""
    rates = {name: [one["windows"] / one["seconds"] for one in rounds] for name, rounds in asked.items()}
    found: dict[str, Any] = {"windows_per_cpu_s": {name: statistics.median(rate) for name, rate in rates.items()}}
    if "lerobot" in rates:
        for name in OURS:
            each = [ours / theirs for ours, theirs in zip(rates[name], rates["lerobot"], strict=True)]
            found |= {f"ratio_{name}": statistics.median(each), f"ratio_{name}_range": [min(each), max(each)]}
        found["ratio"] = found["ratio_cached"]
    found["spent"] = {}
    for name, rounds in asked.items():
        total = sum(one["seconds"] for one in rounds)
        parts = sorted({part for one in rounds for part in one["spent"]})
        shares = {part: sum(one["spent"].get(part, 0.0) for one in rounds) / total for part in parts}
        found["spent"][name] = {**shares, "rest": 1 - sum(shares.values())}
    return found


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="480 x 640 video, 2 frames and 16 actions a window, one core")
    for column in ("loader", "windows/CPU s", "ratio", "picture", "where the time goes"):
        table.add_column(column, justify="left" if column in ("loader", "where the time goes") else "right")
    for name, rate in result["windows_per_cpu_s"].items():
        ratio = f"{result[f'ratio_{name}']:.1f}x" if f"ratio_{name}" in result else "-"
        shares = ", ".join(f"{part} {share:.0%}" for part, share in result["spent"][name].items())
        picture = " x ".join(map(str, result["loaders"][name].get("picture", SIZE)[:2]))
        table.add_row(name, f"{rate:,.0f}", ratio, picture, shares)
    console.print(table)
    console.print(f"the cache was made in {result['cache_cpu_s']:.1f} CPU seconds", highlight=False)


if __name__ == "__main__":
    answer(prism_batches)
