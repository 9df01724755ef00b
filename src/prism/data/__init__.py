"""Demonstrations: formats on disk, windows, loading. Never imports a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism.data.episodes import Episode, EpisodeSource, with_sensors
from prism.data.formats.calvin import CalvinSource, is_calvin
from prism.data.formats.lerobot import LeRobotSource, is_lerobot
from prism.data.formats.mapping import Entry, parse_map
from prism.data.formats.robomimic import RobomimicSource, is_robomimic
from prism.data.formats.store import StoreSource, is_store
from prism.data.formats.zarr_format import DEFAULT_FPS, ZarrSource, is_zarr
from prism.data.settings import with_sensor_settings
from prism.errors import PrismError

__all__ = ["Episode", "EpisodeSource", "format_name", "open_dataset", "parse_map", "with_sensors"]

FORMATS = (
    "a prism folder (dataset.json)",
    "Diffusion Policy's zarr, as a folder or a .zarr.zip (data/, meta/episode_ends)",
    "robomimic's HDF5 (.hdf5)",
    "LeRobot v2.1 and v3 (meta/info.json)",
    "CALVIN (ep_start_end_ids.npy)",
    "ROS 2 bags (metadata.yaml), one an episode",
)


def open_dataset(
    path: Path,
    fps: float | None = None,
    entries: Sequence[Entry] = (),
    sensors: Sequence[str] = (),
    tolerance: float | None = None,
) -> EpisodeSource:
    """The dataset at `path`, its format recognised from what is there.

    `fps`: steps a second, for formats that do not store it. `entries`: which key becomes which sensor
    (prism.data.formats.mapping.parse_map); without it a guess, explained in the source's `notes`. `sensors`: their
    preprocessing, SENSOR.KEY=VALUE (prism.data.settings). `tolerance`: seconds, for recordings with time stamps.
    """
    if tolerance is not None and format_name(Path(path)) not in ("ROS 2 bags", ""):
        raise PrismError(f"{path}: is aligned already; a tolerance is for recordings with time stamps, ROS 2 bags")
    return with_sensor_settings(_open(Path(path), fps, entries, tolerance), sensors)


def _open(path: Path, fps: float | None, entries: Sequence[Entry], tolerance: float | None) -> EpisodeSource:
    if not path.exists():
        raise PrismError(f"{path}: not found; give the path of a dataset")
    name = format_name(path)
    if name == "prism":
        if entries:
            raise PrismError(f"{path}: a prism dataset has its sensors already; --map is for other formats")
        source = StoreSource(path)
        if fps is not None and fps != source.fps:
            raise PrismError(f"{path}: dataset.json says {source.fps:g} steps a second, not {fps:g}; leave --fps out")
        return source
    if name == "robomimic HDF5":
        return RobomimicSource(path, fps, entries)
    if name == "LeRobot":
        return LeRobotSource(path, fps, entries)
    if name == "CALVIN":
        return CalvinSource(path, fps, entries)
    if name == "ROS 2 bags":
        from prism.data.formats.rosbag import RosbagSource

        return RosbagSource(path, fps, entries, tolerance)
    if name:
        return ZarrSource(path, DEFAULT_FPS if fps is None else fps, entries=entries)
    raise PrismError(f"{path}: not a dataset that prism recognises; it reads {'; '.join(FORMATS)}")


def format_name(path: Path) -> str:
    """What `open_dataset` takes the path for, in words; empty if for nothing."""
    if is_store(path):
        return "prism"
    if is_robomimic(path):
        return "robomimic HDF5"
    if is_lerobot(path):
        return "LeRobot"
    if is_calvin(path):
        return "CALVIN"
    if _is_rosbag(path):
        return "ROS 2 bags"
    if is_zarr(path):
        return "Diffusion Policy zarr" + ("" if path.is_dir() else " (zip)")
    return ""


def _is_rosbag(path: Path) -> bool:
    """A bag (a folder with metadata.yaml), or a folder of bags."""
    return path.is_dir() and ((path / "metadata.yaml").is_file() or any(path.glob("*/metadata.yaml")))
