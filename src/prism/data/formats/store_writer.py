"""Writing the project's own format (prism.data.formats.store): a stretch of steps at a time, whole or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from prism.data.episodes import Array, BoolArray, FloatArray
from prism.data.formats.film import FRAMES, Film, finished
from prism.data.formats.store import ACTIONS, CHECKSUM, MANIFEST, PRESENT, Checksums, Manifest, as_bytes
from prism.data.formats.video import VideoWriter
from prism.data.formats.writer import EpisodeWriter
from prism.io.files import sync, sync_folder, write_file
from prism.sensors import ActionSpec, SensorSpec


class DatasetWriter(EpisodeWriter):
    """Writes the own format. `add` refuses a bad episode: caught, that one is left out; not caught, all are discarded.

    with DatasetWriter(path, sensors, action_dim=4, fps=80.0, task="metaworld-reach") as writer:
        writer.add({"proprio": ...}, actions)  # the same as extend(...), end_episode()
    """

    words, sign = "prism", MANIFEST

    def __init__(
        self,
        path: Path,
        sensors: Sequence[SensorSpec],
        action_dim: int,
        fps: float,
        task: str,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
        action: ActionSpec | None = None,
        films: Mapping[str, Film] | None = None,  # cameras that are video: their streams are numbers of frames
        compress: Collection[str] = (),  # RGB cameras to be made h264 video: their streams are pictures
    ) -> None:
        super().__init__(path, sensors, action_dim, fps, task, overwrite, action)
        self.provenance, self._films = dict(provenance or {}), dict(films or {})
        self._videos = {
            sensor.name: VideoWriter(
                self._temp, "{}.mp4", sensor.name, self.fps, (sensor.shape[0], sensor.shape[1]), "h264"
            )
            for sensor in self.sensors
            if sensor.name in compress
        }
        self._absent: set[str] = set()
        self._files: dict[str, IO[bytes]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._checksums: dict[str, Checksums] = {}
        with self._or_nothing():
            self._start_file(ACTIONS, (action_dim,), np.dtype(np.float32))
            for sensor in self.sensors:
                if sensor.name in self._films or sensor.name in self._videos:
                    self._start_file(sensor.name + FRAMES, (), np.dtype(np.int64))
                else:
                    self._start_file(sensor.name, sensor.shape, sensor.dtype)
                self._start_file(sensor.name + PRESENT, (), np.dtype(np.bool_))

    def _write(self, streams: Mapping[str, Array], actions: FloatArray, masks: Mapping[str, BoolArray]) -> None:
        self._absent |= {name for name, mask in masks.items() if not mask.all()}
        present = {name + PRESENT: np.ascontiguousarray(mask) for name, mask in masks.items()}
        streams = dict(streams)
        for name, video in self._videos.items():
            video.add(streams[name])
            streams[name] = np.arange(self._rows, self._rows + len(actions), dtype=np.int64)
        films = (*self._films, *self._videos)
        named = {name + FRAMES if name in films else name: array for name, array in streams.items()}
        for name, array in {ACTIONS: actions, **named, **present}.items():
            content = as_bytes(array)
            self._files[name].write(content)
            self._checksums[name].add(content)

    def _checked(self, sensor: SensorSpec, values: ArrayLike, present: BoolArray, where: str) -> Array:
        if sensor.name in self._films:
            return np.ascontiguousarray(values, np.int64)
        return super()._checked(sensor, values, present, where)

    def attach(self, name: str, content: bytes) -> None:
        """One more file beside the episodes: there when they are."""
        write_file(self._temp / name, content)

    def _release(self) -> None:
        for video in self._videos.values():
            video.abandon()
        for file in self._files.values():
            with suppress(OSError):  # a full disk: there is no room for what it still held
                file.close()

    def _start_file(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._files[name] = (self._temp / f"{name}.npy").open("w+b")
        _write_header(self._files[name], (0, *shape), dtype)
        self._shapes[name] = shape, dtype
        self._checksums[name] = Checksums(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)

    def _finish(self) -> None:
        for name, (shape, dtype) in self._shapes.items():
            file = self._files[name]
            if name.endswith(PRESENT) and name.removesuffix(PRESENT) not in self._absent:
                file.close()
                (self._temp / f"{name}.npy").unlink()  # it was there all the time
                continue
            file.seek(0)
            # numpy pads the header so that a longer first axis fits in the same space.
            _write_header(file, (self._rows, *shape), dtype)
            sync(file)
            file.close()
            with (self._temp / f"{name}{CHECKSUM}.npy").open("wb") as sums:
                np.save(sums, self._checksums[name].result(), allow_pickle=False)
                sync(sums)
        for name, film in self._films.items():
            film.link(self._temp / f"{name}.mp4")
        for name, video in self._videos.items():
            self._films[name] = finished(video, self._temp / f"{name}.mp4", self._rows, self.fps)
        ends = np.array(self._ends[1:], np.int64)
        absent = tuple(sorted(self._absent))
        sizes = (self.sensors, self.action_dim, ends, self.provenance)
        manifest = Manifest(self.task, self.fps, *sizes, True, absent, self.action_spec, self._films)
        with (self._temp / MANIFEST).open("wb") as file:
            file.write(manifest.to_json().encode())
            sync(file)
        sync_folder(self._temp)


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)
