"""Demonstrations: formats on disk, windows, loading. Never imports a policy."""

from __future__ import annotations

from pathlib import Path

from prism.data.episodes import Episode, EpisodeSource, with_sensors
from prism.data.store import StoreSource, is_store
from prism.data.zarr_format import DEFAULT_FPS, ZarrSource, is_zarr
from prism.errors import PrismError

__all__ = ["Episode", "EpisodeSource", "open_dataset", "with_sensors"]

FORMATS = (
    "a prism folder (dataset.json)",
    "Diffusion Policy's zarr, as a folder or a .zarr.zip (data/, meta/episode_ends)",
)


def open_dataset(path: Path, fps: float | None = None) -> EpisodeSource:
    """The dataset at `path`, its format recognised from what is there.

    `fps`: steps a second, for formats that do not store it.
    """
    path = Path(path)
    if not path.exists():
        raise PrismError(f"{path}: not found; give the path of a dataset")
    if is_store(path):
        return StoreSource(path)
    if is_zarr(path):
        return ZarrSource(path, DEFAULT_FPS if fps is None else fps)
    raise PrismError(f"{path}: not a dataset that prism recognises; it reads {'; '.join(FORMATS)}")


def format_name(path: Path) -> str:
    """What `open_dataset` takes the path for, in words."""
    if is_store(path):
        return "prism"
    return "Diffusion Policy zarr" + ("" if path.is_dir() else " (zip)")
