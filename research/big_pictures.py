"""A dataset as people bring it, 480 x 640 AV1 video of which some is missing: inspect, train, convert, and steps/s.

Try:
    python -m research big-pictures --json research/results/big_pictures.json

The dataset is LeRobot v2.1 and made here: one camera, a state and actions of 7 numbers, 30 episodes of 200 steps, a
video each; every seventh video is deleted. A blob in the picture is where the state is, and the action is where it goes
next. Each command is what a user types, in a process of its own:

    inspect        prism data inspect DATASET
    refused        prism train DATASET: the message of one line
    train          prism train DATASET --skip-damaged --minutes 3
    convert        prism data convert DATASET OUT --skip-damaged --sensor top.resize=72,96
    before         prism train DATASET --skip-damaged on pictures as they are recorded (resize=480,640)
    one_core       as `train`, with one thread, for a minute of CPU time, which other programs do not change

`steps_per_s` is by the wall clock (`load`: how many processes wanted a core), of `before` and `one_core` by CPU time;
`first_minute` counts the steps in the first minute of that clock after the cache is made. `ratio` is one_core / before.
Each command has its `seconds`, `cpu_s`, exit `code` and the `last` line that it printed; `cache_s` (of `train`) is from
its start to the first step, `val_loss` that of the held-out episode.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.data.episodes import Array
from prism.data.formats.video import VideoWriter
from prism.errors import PrismError, need
from prism.evaluation.results import run_info
from prism.training.log import read_log
from research.report import Written, show_rows

CAMERA, FPS, SIZE, DIM, MISSING = "observation.images.top", 30.0, (480, 640), 7, 7


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    episodes: int = 30
    """Of the dataset; every seventh has no video."""
    length: int = 200
    """Steps of an episode."""
    minutes: float = 3.0
    """Of the training with the defaults."""
    cpu_minutes: float = 1.0
    """Of the two trainings that are compared, before and one_core."""
    work: Annotated[Path | None, option("FOLDER")] = None
    """Where the dataset and the runs go; default: a folder that is removed afterwards."""


def pictures(place: Array, rng: np.random.Generator) -> Iterator[Array]:
    """(T, 2) in [-1, 1] -> (480, 640, 3) each: a blob on a still background, with the camera's noise."""
    y, x = (np.arange(side, dtype=np.float32) for side in SIZE)
    scene = (90 + 60 * np.outer(np.cos(y / 23), np.sin(x / 31)))[:, :, None] * np.ones(3, np.float32)
    noisy = [(scene + rng.integers(0, 6, scene.shape)).astype(np.uint8) for _ in range(8)]
    for step, (down, right) in enumerate(place):
        rows, columns = (
            np.exp(-((y / SIZE[0] - 0.5 - 0.4 * down) ** 2) / 0.003),
            np.exp(-((x / SIZE[1] - 0.5 - 0.4 * right) ** 2) / 0.002),
        )
        picture = noisy[step % len(noisy)].copy()
        picture[:, :, 0] += (90 * np.outer(rows, columns)).astype(np.uint8)
        yield picture


def write_dataset(path: Path, episodes: int, length: int, rng: np.random.Generator) -> int:
    """LeRobot v2.1; how many videos are missing."""
    pa, parquet = need("pyarrow", "data", "parquet"), need("pyarrow.parquet", "data", "parquet")
    numbers = {"observation.state": ("float32", DIM), "action": ("float32", DIM), "timestamp": ("float32", 1)}
    numbers |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", 1))
    features: dict[str, Any] = {key: {"dtype": kind, "shape": [size]} for key, (kind, size) in numbers.items()}
    features[CAMERA] = {"dtype": "video", "shape": [*SIZE, 3], "names": ["height", "width", "channels"]}
    info = {"codebase_version": "v2.1", "fps": int(FPS), "total_episodes": episodes, "features": features}
    lines = [json.dumps({"episode_index": e, "tasks": ["follow"], "length": length}) for e in range(episodes)]
    (path / "meta").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(info))
    (path / "meta/episodes.jsonl").write_text("\n".join(lines))
    (path / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "follow"}))
    for folder in ("data/chunk-000", f"videos/chunk-000/{CAMERA}"):
        (path / folder).mkdir(parents=True)
    missing = 0
    for episode in range(episodes):
        waves = rng.uniform(0.5, 2, (2, DIM))
        seconds = np.arange(length + 1)[:, None] / FPS
        states = np.sin(waves[0] * seconds + 6 * waves[1]).astype(np.float32)  # (T + 1, DIM)
        steps = np.arange(length)
        columns = {
            "observation.state": list(states[:-1] * (np.arange(DIM) > 1)),  # what the camera shows is not in it
            "action": list(states[1:]),
            "timestamp": (steps / FPS).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, episode),
            "index": episode * length + steps,
            "task_index": np.zeros(length, np.int64),
        }
        name = f"episode_{episode:06d}"
        parquet.write_table(pa.table(columns), path / f"data/chunk-000/{name}.parquet")
        if episode % MISSING == MISSING - 1:
            missing += 1
            continue
        template = f"videos/chunk-000/{CAMERA}/{name}.mp4"
        writer = VideoWriter(path, template, CAMERA, FPS, SIZE, "av1")
        for picture in pictures(states[:-1, :2], rng):
            writer.add(picture[None])
        writer.close()
    return missing


def prism(work: Path, *words: str) -> dict[str, Any]:
    """One command as a user types it, in `work`."""
    command = [sys.executable, "-m", "prism.cli", *words]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "PRISM_DATA": str(work / "cache")}
    environment.pop("OMP_NUM_THREADS", None)  # a user has none
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return {
        "command": " ".join(["prism", *words]),
        "code": done.returncode,
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "last": lines[-1] if lines else "",
        "lines": len(lines),
    }


def training(work: Path, name: str, minutes: float, settings: str = "", *words: str) -> dict[str, Any]:
    """A training with these settings, and its steps from the log."""
    said = prism(
        work, "train", "dataset", "--skip-damaged", "--minutes", f"{minutes:g}", "--out", name,
        *words, "--set", *settings.split(), "train.log_every=1",
    )  # fmt: skip
    if said["code"]:
        return said
    log = read_log(work / name)
    steps, seconds = log[-1]["step"], log[-1]["seconds"]
    first = max((line["step"] for line in log if line["seconds"] <= 60), default=0)
    figures = {"steps": steps, "steps_per_s": steps / seconds, "first_minute": first, "val_loss": log[-1]["val_loss"]}
    cache = {} if "clock=cpu" in settings else {"cache_s": round(said["seconds"] - seconds, 1)}
    return {**said, **figures, **cache}


def run(config: Config, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="prism-big-pictures-") as folder:
        work = (config.work or Path(folder)).resolve()
        dataset, found = work / "dataset", dict[str, Any]()
        if dataset.exists():
            raise PrismError(f"{dataset} exists already: remove it, or choose another --work")
        with console.status("encoding the dataset (a minute)"):
            rng = np.random.default_rng(0)
            found["missing"] = write_dataset(dataset, config.episodes, config.length, rng)
            found["video_mb"] = round(sum(file.stat().st_size for file in dataset.rglob("*.mp4")) / 1e6, 1)
        resize, by_cpu = "top.resize={},{}".format, "train.clock=cpu"
        played: dict[str, Callable[[], dict[str, Any]]] = {
            "inspect": lambda: prism(work, "data", "inspect", "dataset"),
            "refused": lambda: prism(work, "train", "dataset", "--minutes", "1", "--out", "refused"),
            "train": lambda: training(work, "train", config.minutes),
            "one_core": lambda: training(work, "one_core", config.cpu_minutes, f"{by_cpu} train.threads=1"),
            "before": lambda: training(work, "before", config.cpu_minutes, by_cpu, "--sensor", resize(*SIZE)),
            "convert": lambda: prism(
                work, "data", "convert", "dataset", "small", "--skip-damaged", "--sensor", resize(72, 96)
            ),
            "again": lambda: prism(work, "data", "inspect", "small"),
        }
        for name, play in played.items():
            with console.status(name):
                found[name] = play() | {"load": round(os.getloadavg()[0], 1)}
            told = f"{found[name]['command']}: {found[name]['last']}"
            if (found[name]["code"] == 0) == (name == "refused"):
                raise PrismError(told)
            console.print(told, highlight=False, soft_wrap=True)
        found["small_mb"] = round(sum(f.stat().st_size for f in (work / "small").rglob("*") if f.is_file()) / 1e6, 1)
    before, after = (found[name]["steps_per_s"] for name in ("before", "one_core"))
    return {**found, "ratio": after / before, "settings": config.settings(), **run_info(0)}


def show(result: Mapping[str, Any], console: Console) -> None:
    rows = [
        (name, str(row["steps"]), f"{row['steps_per_s']:.2f}", str(row["first_minute"]), f"{row['val_loss']:.3f}")
        for name, row in ((name, result[name]) for name in ("before", "one_core", "train"))
    ]
    show_rows("training on 480 x 640 AV1", ("", "steps", "steps/s", "first minute", "val loss"), rows, console)


def check(result: Mapping[str, Any]) -> None:
    """At least 100 steps in the first minute."""
    if (first := result["one_core"]["first_minute"]) < 100:
        raise PrismError(f"{first} steps in the first minute of one core; at least 100 are asked for, on two")
