"""LeRobot's own loader, measured by `python -m research loading` in an interpreter that has LeRobot.

Started by path, so it imports nothing of prism. As lerobot-train reads: LeRobotDataset with delta_timestamps, pixels as
uint8, DataLoader in random order, no worker process. One line of JSON on stdin (settings), one on stdout (versions);
then for each line on stdin it reads batches for that many CPU seconds and answers with one line.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

spent: dict[str, float] = {}


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0.0) + time.process_time() - begin

    return wrapped


def lerobot_batches(settings: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
    torch: Any = importlib.import_module("torch")
    lerobot: Any = importlib.import_module("lerobot")
    datasets: Any = importlib.import_module("lerobot.datasets.lerobot_dataset")
    reader: Any = importlib.import_module("lerobot.datasets.dataset_reader")
    data: Any = importlib.import_module("torch.utils.data")
    torch.set_num_threads(1)
    reader.decode_video_frames = timed("video", reader.decode_video_frames)
    fps, camera = settings["fps"], settings["camera"]
    seen = [(step + 1 - settings["obs_horizon"]) / fps for step in range(settings["obs_horizon"])]
    deltas = {camera: seen, "observation.state": seen}
    deltas["action"] = [step / fps for step in range(settings["pred_horizon"])]
    dataset = datasets.LeRobotDataset(
        "bench/loading", root=settings["path"], delta_timestamps=deltas, return_uint8=True
    )
    backend = importlib.import_module("lerobot.utils.import_utils").get_safe_default_video_backend()
    generator = torch.Generator().manual_seed(settings["seed"])
    collate = timed("collate", data.default_collate)
    loader = data.DataLoader(
        dataset, settings["batch"], shuffle=True, drop_last=True, generator=generator, collate_fn=collate
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    return endless(), {"lerobot": lerobot.__version__, "torch": torch.__version__, "video_backend": backend}


def answer(batches: Callable[[dict[str, Any]], tuple[Iterator[Any], dict[str, Any]]]) -> None:
    """The measuring process: also of prism's own loaders."""
    settings = json.loads(sys.stdin.readline())
    read, about = batches(settings)
    next(read)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        spent.clear()
        count, begin = 0, time.process_time()
        while count == 0 or time.process_time() - begin < float(line):
            next(read)
            count += settings["batch"]
        print(json.dumps({"windows": count, "seconds": time.process_time() - begin, "spent": spent}), flush=True)


if __name__ == "__main__":
    answer(lerobot_batches)
