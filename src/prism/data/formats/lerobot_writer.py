"""Writing LeRobot v3: parquet for numbers, one video a camera (h264 or AV1, lossy), whole or not at all.

RGB streams become videos; an instruction becomes the task; everything else is a column. What LeRobot has no word
for (depth, tactile images of other than 3 channels, audio, absent sensors) is stored as columns that LeRobot
shows as numbers, and described for prism in meta/prism.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, BoolArray, FloatArray
from prism.data.formats.lerobot import PRESENT, SPECS, TASK
from prism.data.formats.lerobot_files import INFO
from prism.data.formats.video import CHUNK, Codec, VideoWriter
from prism.data.formats.writer import EpisodeWriter
from prism.errors import PrismError, need
from prism.io.files import sync
from prism.normalize import RunningStatistics
from prism.sensors import ActionSpec, SensorSpec, decode_text

_FILE_BYTES = 200 * 2**20  # of one video file, as LeRobot does
_DATA = "data/chunk-{:03d}/file-{:03d}.parquet"
_VIDEO = "videos/{}/chunk-{:03d}/file-{:03d}.mp4"
_STATE = "observation.state"


def feature_keys(sensors: Sequence[SensorSpec]) -> dict[str, str]:
    """The LeRobot key of every sensor. The vector that is the robot's own state is `observation.state`."""
    vectors = [sensor.name for sensor in sensors if sensor.kind == "vector"]
    state = next((name for name in ("state", "proprio") if name in vectors), vectors[0] if len(vectors) == 1 else "")
    keys = {}
    for sensor in sensors:
        if sensor.kind == "text":
            keys[sensor.name] = TASK
        elif _is_video(sensor):
            keys[sensor.name] = f"observation.images.{sensor.name}"
        else:
            keys[sensor.name] = _STATE if sensor.name == state else f"observation.{sensor.name}"
    return keys


def _is_video(sensor: SensorSpec) -> bool:
    return sensor.kind in ("rgb", "tactile") and sensor.shape[2] == 3


class LeRobotWriter(EpisodeWriter):
    """Writes LeRobot v3; sensors in `sometimes_absent` get a column that says where they were."""

    words, sign = "LeRobot", INFO

    def __init__(
        self,
        path: Path,
        sensors: Sequence[SensorSpec],
        action_dim: int,
        fps: float,
        task: str,
        overwrite: bool = False,
        codec: Codec = "h264",
        sometimes_absent: Collection[str] = (),
        action: ActionSpec | None = None,
    ) -> None:
        if sum(sensor.kind == "text" for sensor in sensors) > 1:
            raise PrismError(f"{path}: LeRobot has one instruction a step; choose one of the text sensors")
        self._pa: Any = need("pyarrow", "data", f"{path}: parquet")
        self._parquet: Any = need("pyarrow.parquet", "data", f"{path}: parquet")
        super().__init__(path, sensors, action_dim, fps, task or "no instruction", overwrite, action)
        self._keys = feature_keys(sensors)
        self._sometimes_absent = frozenset(sometimes_absent)
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._episode_tasks: dict[str, None] = {}
        self._stats = {"action": RunningStatistics(action_dim)}
        self._stats |= {
            self._keys[s.name]: RunningStatistics(3 if _is_video(s) else int(np.prod(s.shape)))
            for s in sensors
            if s.kind != "text"
        }
        self._data: Any = None
        self._videos: dict[str, VideoWriter] = {}
        with self._or_nothing():
            for s in filter(_is_video, sensors):
                size = (s.shape[0], s.shape[1])
                self._videos[s.name] = VideoWriter(self._temp, _VIDEO, self._keys[s.name], fps, size, codec)

    def _write(self, streams: Mapping[str, Array], actions: FloatArray, masks: Mapping[str, BoolArray]) -> None:
        length, step = len(actions), self._rows - self._ends[-1]
        steps = np.arange(step, step + length)
        columns: dict[str, Any] = {"action": self._column(actions)}
        tasks = [self.task] * length
        for sensor in self.sensors:
            array, mask, key = streams[sensor.name], masks[sensor.name], self._keys[sensor.name]
            if sensor.kind == "text":
                tasks = [decode_text(row) if here else "" for row, here in zip(array, mask, strict=True)]
                continue
            if _is_video(sensor):
                self._videos[sensor.name].add(array)
                pixels = array[:: max(length // 8, 1), ::4, ::4].reshape(-1, 3)
                self._stats[key].add(pixels.astype(np.float32) / 255)
            else:
                wide = mask.reshape(-1, *[1] * (array.ndim - 1))
                columns[key] = self._column(np.where(wide, array, 0).astype(array.dtype))
                self._stats[key].add(array[mask].reshape(int(mask.sum()), int(np.prod(array.shape[1:]))))
            if sensor.name in self._sometimes_absent:
                columns[PRESENT + key] = self._pa.array(mask)
            elif not mask.all():
                raise PrismError(f"{self.path}: episode {self.episodes}: '{sensor.name}' is absent, unannounced")
        self._stats["action"].add(actions)
        for text in dict.fromkeys(tasks):
            self._tasks.setdefault(text, len(self._tasks))
            self._episode_tasks[text] = None
        columns |= {
            "timestamp": self._pa.array((steps / self.fps).astype(np.float32)),
            "frame_index": self._pa.array(steps),
            "episode_index": self._pa.array(np.full(length, self.episodes)),
            "index": self._pa.array(self._rows + np.arange(length)),
            "task_index": self._pa.array(np.array([self._tasks[text] for text in tasks], np.int64)),
        }
        self._write_rows(columns)

    def end_episode(self) -> None:
        super().end_episode()
        begin, stop = self._ends[-2:]
        entry: dict[str, Any] = {
            "episode_index": self.episodes - 1,
            "tasks": list(self._episode_tasks),
            "length": stop - begin,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": begin,
            "dataset_to_index": stop,
        }
        for name, video in self._videos.items():
            prefix = f"videos/{self._keys[name]}"
            file, first, last = video.end_episode(_FILE_BYTES)
            entry |= {f"{prefix}/chunk_index": file // CHUNK, f"{prefix}/file_index": file % CHUNK}
            entry |= {f"{prefix}/from_timestamp": first, f"{prefix}/to_timestamp": last}
        self._episodes.append({**entry, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._episode_tasks = {}

    def _release(self) -> None:
        for video in self._videos.values():
            video.abandon()
        if self._data is not None:
            self._data.close()

    def _column(self, values: Array) -> Any:
        """(T, ...) as a column: numbers where there is one a step, else (nested) lists."""
        flat = self._pa.array(np.ascontiguousarray(values).reshape(-1))
        if values.shape[1:] == (1,):
            return flat
        for size in reversed(values.shape[1:]):
            flat = self._pa.FixedSizeListArray.from_arrays(flat, int(size))
        return flat

    def _write_rows(self, columns: dict[str, Any]) -> None:
        table = self._pa.table(columns)
        if self._data is None:
            file = self._temp / _DATA.format(0, 0)
            file.parent.mkdir(parents=True)
            self._data = self._parquet.ParquetWriter(
                file, table.schema, compression="zstd", write_page_checksum=True, use_dictionary=False
            )
        self._data.write_table(table)

    def _finish(self) -> None:
        for video in self._videos.values():
            video.close()
        self._data.close()
        meta = self._temp / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        episodes = {key: [episode[key] for episode in self._episodes] for key in self._episodes[0]}
        for table, name in (
            (self._pa.table(episodes), "episodes/chunk-000/file-000.parquet"),
            (self._tasks_table(), "tasks.parquet"),
        ):
            self._parquet.write_table(table, meta / name, write_page_checksum=True)
        info, features = self._info()
        stats = {key: _stats_json(running, features[key]) for key, running in self._stats.items() if running.count}
        specs = {self._keys[s.name]: s.to_json() for s in self.sensors}
        for name, content in (
            (INFO, info),
            ("meta/stats.json", stats),
            (SPECS, {"sensors": specs, "action": self.action_spec.to_json()}),
        ):
            (self._temp / name).write_text(json.dumps(content, indent=1))
        for file in self._temp.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    sync(opened)

    def _tasks_table(self) -> Any:
        """A pandas table with the text as its index, which is how LeRobot reads it."""
        table = self._pa.table({"task_index": list(self._tasks.values()), "task": list(self._tasks)})
        kinds = (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in kinds
        ]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        return table.replace_schema_metadata({b"pandas": json.dumps(pandas).encode()})

    def _info(self) -> tuple[dict[str, Any], dict[str, Any]]:
        names = list(self.action_spec.names) or None
        action = {"dtype": "float32", "shape": [self.action_dim], "names": names}
        features: dict[str, Any] = {"action": action}
        for sensor in self.sensors:
            key = self._keys[sensor.name]
            if sensor.kind == "text":
                continue
            known = list(sensor.names) or None
            entry: dict[str, Any] = {"dtype": str(sensor.dtype), "shape": list(sensor.shape), "names": known}
            if _is_video(sensor):
                entry |= {"dtype": "video", "names": ["height", "width", "channels"]}
                entry["info"] = self._videos[sensor.name].info()
            features[key] = entry
            if sensor.name in self._sometimes_absent:
                features[PRESENT + key] = {"dtype": "bool", "shape": [1], "names": None}
        index = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64"}
        for key, dtype in {**index, "index": "int64", "task_index": "int64"}.items():
            features[key] = {"dtype": dtype, "shape": [1], "names": None}
        info = {
            "codebase_version": "v3.0",
            "robot_type": self.action_spec.robot or None,
            "total_episodes": self.episodes,
            "total_frames": self._rows,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": _FILE_BYTES >> 20,
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
            "features": features,
        }
        return info, features


def _stats_json(running: RunningStatistics, feature: dict[str, Any]) -> dict[str, Any]:
    result = running.result("statistics")
    shape = (3, 1, 1) if feature["dtype"] == "video" else tuple(feature["shape"])
    values = {name: getattr(result, name).reshape(shape).tolist() for name in ("min", "max", "mean", "std")}
    return {**values, "count": [running.count]}
