"""Small datasets of every format, written with that format's own library in the layout that its users have."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
LENGTHS = (7, 3, 12)


def picture(episode: int, step: int, size: tuple[int, int] = (32, 48)) -> Array:
    """Blocks whose brightness says which frame it is: video changes colours by a few levels, never a block."""
    image = np.zeros((*size, 3), np.uint8)
    image[: size[0] // 2, : size[1] // 2] = 40 + 15 * episode
    image[: size[0] // 2, size[1] // 2 :] = 20 + 16 * step
    image[size[0] // 2 :] = (200, 100 + 3 * step, 60)
    return image


def robomimic_arrays(episode: int, length: int) -> dict[str, Array]:
    rng = np.random.default_rng(episode)
    images = np.stack([picture(episode, step, (16, 16)) for step in range(length)])
    return {
        "actions": rng.uniform(-1, 1, (length, 7)),
        "obs/agentview_image": images,
        "obs/robot0_eye_in_hand_image": images[:, ::-1].copy(),
        "obs/robot0_eef_pos": rng.normal(size=(length, 3)),
        "obs/robot0_eef_quat": rng.normal(size=(length, 4)),
        "obs/robot0_gripper_qpos": rng.normal(size=(length, 2)),
        "obs/object": rng.normal(size=(length, 10)),
        "next_obs/robot0_eef_pos": rng.normal(size=(length, 3)),
        "states": rng.normal(size=(length, 5)),
        "rewards": np.zeros(length),
        "dones": np.zeros(length, np.int64),
    }


def write_robomimic(path: Path, compression: str | None = None) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(LENGTHS)
        env = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 25}}
        data.attrs["env_args"] = json.dumps(env)
        for episode, length in enumerate(LENGTHS):
            demo = data.create_group(f"demo_{episode}")
            demo.attrs["num_samples"] = length
            demo.attrs["model_file"] = "<mujoco/>"
            for key, values in robomimic_arrays(episode, length).items():
                demo.create_dataset(key, data=values, compression=compression)
        file["mask/train"] = np.array([b"demo_0", b"demo_2"])
    return path


FIRST_FRAME = 1234


def calvin_frame(number: int) -> dict[str, Array]:
    step = number % 13
    return {
        "actions": np.full(7, number, np.float64),
        "rel_actions": np.full(7, number / 1e4),
        "robot_obs": np.arange(15) + number / 10,
        "scene_obs": np.zeros(24),
        "rgb_static": picture(1, step, (20, 20)),
        "rgb_gripper": picture(2, step, (8, 8)),
        "rgb_tactile": np.full((10, 6, 6), step, np.uint8),
        "depth_static": np.full((20, 20), 3 + step / 8, np.float32),
        "depth_gripper": np.full((8, 8), step / 8, np.float32),
        "depth_tactile": np.zeros((10, 6, 2), np.float32),
    }


ANNOTATIONS = [("open the drawer", 1236, 1239), ("pousse le bloc à gauche", 1238, 1240)]


def write_calvin(path: Path, digits: int = 7, annotated: bool = True) -> Path:
    """Episodes 1234.., the next after a hole of 5 frames each."""
    path.mkdir(parents=True)
    first, ids = FIRST_FRAME, []
    for length in LENGTHS:
        ids.append((first, first + length - 1))
        for number in range(first, first + length):
            np.savez_compressed(path / f"episode_{number:0{digits}d}.npz", **calvin_frame(number))
        first += length + 5
    np.save(path / "ep_start_end_ids.npy", np.array(ids))
    if annotated:
        (path / "lang_annotations").mkdir()
        content = {
            "language": {
                "ann": [text for text, _, _ in ANNOTATIONS],
                "task": ["open_drawer", "push_block_left"],
                "emb": np.ones((2, 1, 384), np.float32),
            },
            "info": {"episodes": [], "indx": [(np.int64(a), b) for _, a, b in ANNOTATIONS]},
        }
        np.save(path / "lang_annotations/auto_lang_ann.npy", content, allow_pickle=True)  # type: ignore[arg-type]
    return path


FPS = 10
CAMERA = "observation.images.top"
TASKS = ["pick the cube", "place it on the plate"]


def write_video(path: Path, frames: list[Array], gop: int = 2) -> None:
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(FPS))
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv444p"
        stream.codec_context.options = {"g": str(gop), "qp": "0", "preset": "ultrafast"}
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def lerobot_rows(episode: int, length: int, before: int) -> dict[str, Array]:
    rng = np.random.default_rng(episode)
    return {
        "observation.state": rng.normal(size=(length, 6)).astype(np.float32),
        "action": rng.normal(size=(length, 4)).astype(np.float32),
        "next.reward": np.zeros(length, np.float32),
        "timestamp": (np.arange(length) / FPS).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, episode),
        "index": before + np.arange(length),
        "task_index": np.full(length, episode % 2),
    }


def table(columns: dict[str, Array]) -> Any:
    import pyarrow as pa

    return pa.table({k: pa.array(list(v)) if v.ndim > 1 else pa.array(v) for k, v in columns.items()})


def lerobot_info(version: str) -> dict[str, Any]:
    shapes: dict[str, tuple[str, list[int]]] = {
        "observation.state": ("float32", [6]),
        "action": ("float32", [4]),
        "next.reward": ("float32", [1]),
        **{k: ("int64", [1]) for k in ("frame_index", "episode_index", "index", "task_index")},
        "timestamp": ("float32", [1]),
    }
    features: dict[str, Any] = {k: {"dtype": d, "shape": s, "names": None} for k, (d, s) in shapes.items()}
    names = ["height", "width", "channels"]
    features[CAMERA] = {"dtype": "video", "shape": [32, 48, 3], "names": names, "info": {"video.fps": FPS}}
    v3 = version == "v3.0"
    chunk = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    old = "chunk-{episode_chunk:03d}"
    return {
        "codebase_version": version,
        "robot_type": "koch",
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": 2,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": "0:3"},
        "data_path": f"data/{chunk}.parquet" if v3 else f"data/{old}/episode_{{episode_index:06d}}.parquet",
        "video_path": f"videos/{{video_key}}/{chunk}.mp4"
        if v3
        else f"videos/{old}/{{video_key}}/episode_{{episode_index:06d}}.mp4",
        "features": features,
    }


def write_lerobot_v3(path: Path, gop: int = 2) -> Path:
    """Episodes 0 and 1 in one file, 2 in the next, as LeRobot does when a file is full."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (path / "meta/episodes/chunk-000").mkdir(parents=True)
    (path / "data/chunk-000").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(lerobot_info("v3.0")))
    (path / "meta/stats.json").write_text("{}")
    metadata = {"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": []}
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": TASKS})
    pq.write_table(tasks.replace_schema_metadata({b"pandas": json.dumps(metadata)}), path / "meta/tasks.parquet")
    starts = np.cumsum((0, *LENGTHS)).tolist()
    parts = [table(lerobot_rows(e, n, starts[e])) for e, n in enumerate(LENGTHS)]
    pq.write_table(pa.concat_tables(parts[:2]), path / "data/chunk-000/file-000.parquet", row_group_size=4)
    pq.write_table(parts[2], path / "data/chunk-000/file-001.parquet", write_page_checksum=True)
    frames = [[picture(e, step) for step in range(n)] for e, n in enumerate(LENGTHS)]
    write_video(path / f"videos/{CAMERA}/chunk-000/file-000.mp4", frames[0] + frames[1], gop)
    write_video(path / f"videos/{CAMERA}/chunk-000/file-001.mp4", frames[2], gop)
    begins = [0.0, LENGTHS[0] / FPS, 0.0]
    episodes = {
        "episode_index": [0, 1, 2],
        "tasks": [[TASKS[e % 2]] for e in range(3)],
        "length": list(LENGTHS),
        "data/chunk_index": [0, 0, 0],
        "data/file_index": [0, 0, 1],
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
        f"videos/{CAMERA}/chunk_index": [0, 0, 0],
        f"videos/{CAMERA}/file_index": [0, 0, 1],
        f"videos/{CAMERA}/from_timestamp": begins,
        f"videos/{CAMERA}/to_timestamp": [b + n / FPS for b, n in zip(begins, LENGTHS, strict=True)],
        "stats/action/min": [[0.0] * 4] * 3,
    }
    pq.write_table(pa.table(episodes), path / "meta/episodes/chunk-000/file-000.parquet")
    return path


def write_lerobot_v21(path: Path, gop: int = 2) -> Path:
    import pyarrow.parquet as pq

    (path / "meta").mkdir(parents=True)
    (path / "data/chunk-000").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(lerobot_info("v2.1")))
    episodes = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(LENGTHS)]
    tasks = [{"task_index": i, "task": task} for i, task in enumerate(TASKS)]
    for name, lines in (("episodes", episodes), ("tasks", tasks), ("episodes_stats", [])):
        (path / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = 0
    for episode, length in enumerate(LENGTHS):
        file = path / f"data/chunk-000/episode_{episode:06d}.parquet"
        pq.write_table(table(lerobot_rows(episode, length, before)), file)
        video = path / f"videos/chunk-000/{CAMERA}/episode_{episode:06d}.mp4"
        write_video(video, [picture(episode, step) for step in range(length)], gop)
        before += length
    return path
