"""Datasets of every format with the shapes that people have, `times` as long, for `python -m research data`.

What is repeated is hard-linked where the format has many files: readers cannot tell, and the disk is spared.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array
from prism.data.formats.store_writer import DatasetWriter
from prism.data.formats.video import VideoWriter
from prism.errors import need
from prism.sensors import SensorSpec

EPISODE = 100  # steps
CAMERA = "observation.images.top"
FPS = 10.0


def frames(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    """Moving gradients with some noise: compresses about as camera pictures do."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    phase = np.arange(count)[:, None, None, None] * 0.1 + np.arange(channels)
    waves = 110 + 80 * np.sin((x + 2 * y)[None, :, :, None] / 17 + phase)
    noise = rng.integers(0, 8, (count, height, width, 1))
    pixels: Array = (waves + noise).astype(np.uint8)
    return pixels


def write_prism(path: Path, steps: int, times: int) -> None:
    pixels = frames(EPISODE, 96, 96)
    rng = np.random.default_rng(0)
    sensors = (SensorSpec("rgb_static", "rgb", (96, 96, 3)), SensorSpec("proprio", "vector", (7,)))
    with DatasetWriter(path, sensors, 7, FPS, "bench") as writer:
        for _ in range(steps * times // EPISODE):
            proprio, actions = rng.normal(size=(2, EPISODE, 7))
            writer.add({"rgb_static": pixels, "proprio": proprio}, actions)


def write_zarr(path: Path, steps: int, times: int) -> None:
    """As Push-T's: pictures as float32, in chunks of 100 steps."""
    import zarr

    rows, rng = steps * times, np.random.default_rng(0)
    root = zarr.open_group(path, mode="w", zarr_format=2)
    root.create_array("data/action", data=rng.normal(size=(rows, 2)).astype(np.float32), chunks=(EPISODE, 2))
    root.create_array("data/state", data=rng.normal(size=(rows, 5)).astype(np.float32), chunks=(EPISODE, 5))
    root.create_array("meta/episode_ends", data=np.arange(EPISODE, rows + 1, EPISODE))
    images = root.create_array("data/img", shape=(rows, 96, 96, 3), dtype=np.float32, chunks=(EPISODE, 96, 96, 3))
    images[:EPISODE] = frames(EPISODE, 96, 96).astype(np.float32)
    for chunk in range(1, rows // EPISODE):
        os.link(path / "data/img/0.0.0.0", path / f"data/img/{chunk}.0.0.0")


def write_zarr_zip(path: Path, steps: int, times: int) -> None:
    folder = path.with_suffix(".folder")
    write_zarr(folder, steps, times)
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, str(file.relative_to(folder)))


def write_robomimic(path: Path, steps: int, times: int) -> None:
    """As robomimic's image datasets: two cameras of 84 x 84, proprioception, 7 actions, 20 a second."""
    h5py = need("h5py", "data", "robomimic")
    pixels, rng = frames(EPISODE, 84, 84), np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = steps * times
        data.attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20}})
        for number in range(steps * times // EPISODE):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = EPISODE
            demo["actions"] = rng.uniform(-1, 1, (EPISODE, 7))
            for key in ("agentview_image", "robot0_eye_in_hand_image"):
                demo[f"obs/{key}"] = pixels
            for key, size in (("robot0_eef_pos", 3), ("robot0_eef_quat", 4), ("robot0_gripper_qpos", 2)):
                demo[f"obs/{key}"] = rng.normal(size=(EPISODE, size))


def write_calvin(path: Path, steps: int, times: int) -> None:
    """All of CALVIN's arrays at their real sizes."""
    path.mkdir()
    rng = np.random.default_rng(0)
    images = {"rgb_static": frames(20, 200, 200), "rgb_gripper": frames(20, 84, 84)}
    images["rgb_tactile"] = frames(20, 160, 120, 6)
    depth = {"depth_static": (200, 200), "depth_gripper": (84, 84), "depth_tactile": (160, 120, 2)}
    for number in range(steps * times):
        file = path / f"episode_{number:07d}.npz"
        if number >= 20:
            os.link(path / f"episode_{number % 20:07d}.npz", file)
            continue
        arrays = {key: values[number] for key, values in images.items()}
        arrays |= {key: rng.uniform(1, 1.01, shape).astype(np.float32) for key, shape in depth.items()}
        arrays |= {"robot_obs": rng.normal(size=15), "scene_obs": rng.normal(size=24)}
        arrays |= {"actions": rng.normal(size=7), "rel_actions": rng.uniform(-1, 1, 7)}
        np.savez_compressed(file, **arrays)
    first = np.arange(0, steps * times, 50)
    np.save(path / "ep_start_end_ids.npy", np.stack([first, first + 49], axis=1))


def _rows(episode: int, rng: np.random.Generator) -> dict[str, Any]:
    steps = np.arange(EPISODE)
    return {
        "observation.state": list(rng.normal(size=(EPISODE, 7)).astype(np.float32)),
        "action": list(rng.normal(size=(EPISODE, 7)).astype(np.float32)),
        "timestamp": (steps / FPS).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(EPISODE, episode),
        "index": episode * EPISODE + steps,
        "task_index": np.zeros(EPISODE, np.int64),
    }


def _info(path: Path, version: str, episodes: int) -> None:
    numbers = {"observation.state": ("float32", 7), "action": ("float32", 7), "timestamp": ("float32", 1)}
    numbers |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", 1))
    features: dict[str, Any] = {key: {"dtype": kind, "shape": [size]} for key, (kind, size) in numbers.items()}
    features[CAMERA] = {"dtype": "video", "shape": [96, 96, 3], "names": ["height", "width", "channels"]}
    info = {"codebase_version": version, "fps": int(FPS), "total_episodes": episodes, "features": features}
    (path / "meta").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(info))


def _video(path: Path, count: int) -> Path:
    """One video of `count` frames, h264, a key frame every 2."""
    writer = VideoWriter(path, "source-{}-{}-{}.mp4", "x", FPS, (96, 96), "h264")
    pixels = frames(EPISODE, 96, 96)
    for _ in range(count // EPISODE):
        writer.add(pixels)
    writer.close()
    return path / "source-x-0-0.mp4"


def write_lerobot_v21(path: Path, steps: int, times: int) -> None:
    pa, parquet = need("pyarrow", "data", "parquet"), need("pyarrow.parquet", "data", "parquet")
    episodes, rng = steps * times // EPISODE, np.random.default_rng(0)
    _info(path, "v2.1", episodes)
    lines = [json.dumps({"episode_index": e, "tasks": ["bench"], "length": EPISODE}) for e in range(episodes)]
    (path / "meta/episodes.jsonl").write_text("\n".join(lines))
    (path / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "bench"}))
    video = _video(path, EPISODE)
    for folder in ("data/chunk-000", f"videos/chunk-000/{CAMERA}"):
        (path / folder).mkdir(parents=True)
    for episode in range(episodes):
        parquet.write_table(pa.table(_rows(episode, rng)), path / f"data/chunk-000/episode_{episode:06d}.parquet")
        os.link(video, path / f"videos/chunk-000/{CAMERA}/episode_{episode:06d}.mp4")


def write_lerobot_v3(path: Path, steps: int, times: int) -> None:
    pa, parquet = need("pyarrow", "data", "parquet"), need("pyarrow.parquet", "data", "parquet")
    episodes, rng, each = steps * times // EPISODE, np.random.default_rng(0), steps // EPISODE
    _info(path, "v3.0", episodes)
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{CAMERA}/chunk-000"):
        (path / folder).mkdir(parents=True)
    parquet.write_table(pa.table({"task_index": [0], "task": ["bench"]}), path / "meta/tasks.parquet")
    video = _video(path, steps)
    for number in range(times):
        table = pa.concat_tables([pa.table(_rows(number * each + e, rng)) for e in range(each)])
        parquet.write_table(table, path / f"data/chunk-000/file-{number:03d}.parquet", row_group_size=EPISODE)
        os.link(video, path / f"videos/{CAMERA}/chunk-000/file-{number:03d}.mp4")
    index = np.arange(episodes)
    table = {"episode_index": index, "length": np.full(episodes, EPISODE), "dataset_from_index": index * EPISODE}
    for prefix in ("data", f"videos/{CAMERA}"):
        table |= {f"{prefix}/chunk_index": 0 * index, f"{prefix}/file_index": index // each}
    table[f"videos/{CAMERA}/from_timestamp"] = index % each * (EPISODE / FPS)
    parquet.write_table(pa.table(table), path / "meta/episodes/chunk-000/file-000.parquet")


# name of the file or folder, how it is written, and the steps that are "once": more than any cache holds
WRITERS: dict[str, tuple[str, Callable[[Path, int, int], None], int]] = {
    "prism": ("set", write_prism, 1500),
    "zarr": ("set.zarr", write_zarr, 2600),
    "zarr_zip": ("set.zarr.zip", write_zarr_zip, 2600),
    "robomimic": ("set.hdf5", write_robomimic, 800),
    "lerobot_v21": ("set", write_lerobot_v21, 1300),
    "lerobot_v3": ("set", write_lerobot_v3, 1300),
    "calvin": ("set", write_calvin, 200),
}
