"""The formats that are read: a new one is a file here and a line in the table.

A reader is an EpisodeSource (prism.data.episodes), most of them a TableSource (prism.data.formats.table).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.data.episodes import EpisodeSource
from prism.data.formats.aloha import AlohaSource, is_aloha
from prism.data.formats.calvin_format import CalvinSource, is_calvin
from prism.data.formats.episode_folders import RecordingSource, is_recording
from prism.data.formats.lerobot import LeRobotSource, is_lerobot
from prism.data.formats.robomimic import RobomimicSource, is_robomimic
from prism.data.formats.rosbag import RosbagSource, is_rosbag
from prism.data.formats.store import StoreSource, is_store
from prism.data.formats.table import Entry
from prism.data.formats.zarr_format import ZarrSource, is_zarr


@dataclass(frozen=True)
class Format:
    name: str
    signs: str  # what is recognised, in words
    recognised: Callable[[Path], bool]
    open: Callable[[Path, float | None, Sequence[Entry]], EpisodeSource]  # path, --fps, --map
    time_stamps: bool = False  # `open` takes a tolerance, too


FORMATS = (
    Format("prism", "a prism folder (dataset.json)", is_store, StoreSource),
    Format("prism recording", "a recording of a robot (episode-000000, ...)", is_recording, RecordingSource),
    Format("ALOHA HDF5", "ALOHA's HDF5 (episode_0.hdf5, ...)", is_aloha, AlohaSource),
    Format("robomimic HDF5", "robomimic's HDF5 (.hdf5)", is_robomimic, RobomimicSource),
    Format("LeRobot", "LeRobot v2.0, v2.1 and v3 (meta/info.json)", is_lerobot, LeRobotSource),
    Format("CALVIN", "CALVIN (ep_start_end_ids.npy)", is_calvin, CalvinSource),
    Format("ROS 2 bags", "ROS 2 bags (metadata.yaml, .mcap, .db3), one an episode", is_rosbag, RosbagSource, True),
    Format("Diffusion Policy zarr", "Diffusion Policy's zarr, as a folder or a .zarr.zip", is_zarr, ZarrSource),
)


def format_of(path: Path) -> Format | None:
    """The first format that recognises the path."""
    return next((format for format in FORMATS if format.recognised(path)), None)
