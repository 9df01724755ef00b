"""Demonstrations: formats on disk, windows, loading. Never imports a policy."""

from __future__ import annotations

from pathlib import Path

from prism.data.episodes import Episode, EpisodeSource, with_sensors
from prism.data.store import StoreSource, is_store
from prism.errors import PrismError

__all__ = ["Episode", "EpisodeSource", "open_dataset", "with_sensors"]


def open_dataset(path: Path) -> EpisodeSource:
    """The dataset at `path`, its format recognised from what is there."""
    path = Path(path)
    if not path.exists():
        raise PrismError(f"{path}: not found; give the path of a dataset")
    if is_store(path):
        return StoreSource(path)
    raise PrismError(f"{path}: not a dataset that prism recognises; it reads a prism folder (dataset.json)")
