"""Demonstrations: formats on disk, windows, loading. Never imports a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism.data.damage import chosen, named_pointers
from prism.data.episodes import Episode, EpisodeSource
from prism.data.formats import FORMATS, format_of
from prism.data.formats.table import Entry, parse_map
from prism.data.views import with_sensor_settings, with_sensors
from prism.errors import PrismError
from prism.io import hub
from prism.io.files import check_inside

__all__ = ["Episode", "EpisodeSource", "format_name", "open_dataset", "parse_map", "with_sensors"]


def open_dataset(
    path: Path,
    fps: float | None = None,
    entries: Sequence[Entry] = (),
    sensors: Sequence[str] = (),
    tolerance: float | None = None,
    episodes: str = "",
    without: Sequence[str] = (),
    skip_damaged: bool | None = False,
) -> EpisodeSource:
    """The dataset at `path`, its format recognised from what is there; hf://USER/NAME is one on the Hugging Face hub.

    `fps`: steps a second, for formats that do not store it. `entries`: which key becomes which sensor
    (prism.data.formats.table.parse_map); without it a guess, explained in the source's `notes`. `sensors`: their
    preprocessing, SENSOR.KEY=VALUE (prism.data.views). `tolerance`: seconds, for recordings with time stamps.
    `episodes`: only these, as '0-46,48-'. `without`: sensors that are left out. Episodes whose files are missing are
    refused, left out (`skip_damaged`; those with NaN too), or not looked for (None: who reads meets them).
    """
    given, path = path, hub.fetch(path, "dataset") if hub.is_hub(path) else Path(path)
    if not path.exists():
        raise PrismError(f"{path}: not found; give the path of a dataset")
    if not (path.is_file() or path.is_dir()):
        raise PrismError(f"{path}: is neither a file nor a folder; give the path of a dataset")
    if not hub.is_hub(given):
        check_inside(path)
    found = format_of(path)
    if found is None:
        if (missing := named_pointers(path)) is not None:
            raise missing
        known = "; ".join(format.signs for format in FORMATS)
        raise PrismError(f"{path}: not a dataset that prism recognises; it reads {known}")
    if tolerance is not None and not found.time_stamps:
        raise PrismError(f"{path}: is aligned already; a tolerance is for recordings with time stamps, ROS 2 bags")
    more = {} if tolerance is None else {"tolerance": tolerance}
    try:
        source = found.open(path, fps, entries, **more)
    except PrismError:
        if (missing := named_pointers(path)) is not None:
            raise missing from None
        raise
    if skip_damaged is not None or episodes or without:
        source = chosen(source, episodes, without, skip_damaged)
    return with_sensor_settings(source, sensors)


def format_name(path: Path) -> str:
    """The format that `open_dataset` recognises, in words; empty if none."""
    found = format_of(Path(path))
    return "" if found is None else found.name
