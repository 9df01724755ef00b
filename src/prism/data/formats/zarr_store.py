"""Opening a zarr archive that may be damaged: every problem is a PrismError, and none is read as data."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.data.episodes import IntArray, checked_ends
from prism.errors import PrismError, reason

if TYPE_CHECKING:
    from zarr.abc.store import Store

ENDS = "meta/episode_ends"
AGAIN = "copy or download it again"
_METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
_GROUP = (".zgroup", "zarr.json")
_BLOSC_HEADER = 16


def open_arrays(path: Path, notes: list[str]) -> tuple[dict[str, Any], IntArray]:
    """The zarr arrays under `data` by name, and the episode ends. Reads metadata and the ends only."""
    import zarr

    try:
        store, root, children, stored = _folder_store(path) if path.is_dir() else _zip_store(path)
        checked, blosc = _checking(store)
        group = zarr.open_group(checked, path=root, mode="r")
        for key in (ENDS, "data"):
            if key not in group:
                raise PrismError(f"{path}: key '{key}' is missing; this is not Diffusion Policy's layout")
        data, ends = group["data"], group[ENDS]
        if not isinstance(data, zarr.Group) or not isinstance(ends, zarr.Array):
            raise PrismError(f"{path}: 'data' must be a group and '{ENDS}' an array; this is another layout")
        arrays = dict(data.arrays())
        # zarr passes over metadata that it cannot read, or takes it for a group: a sensor would be lost silently
        for child in sorted(set(children) - set(arrays)):
            if children[child]:
                notes.append(f"'{child}' is a group, not an array, and is left out")
            else:
                raise PrismError(f"{path}: 'data/{child}' has no readable metadata; {AGAIN}")
        # a chunk under a damaged name is lost, and zarr would read zeros in its place
        there = {array.path: int(array.nchunks_initialized) for array in (ends, *arrays.values())}
        lost = [a.path for a in (ends, *arrays.values()) if there[a.path] < int(a.nchunks)]
        if lost and stored > sum(there.values()):
            raise PrismError(f"{path}: '{lost[0]}' lacks chunks and there are files that belong to no array; {AGAIN}")
        for array in (ends, *arrays.values()):
            if _uses_blosc(array):
                if getattr(array, "shards", None) is not None:
                    raise PrismError(f"{path}: '{array.path}' is sharded and blosc-compressed; write it without shards")
                blosc.add(array.path.strip("/") + "/")
        return arrays, checked_ends(np.asarray(ends[...]), f"{path}: '{ENDS}'")
    except PrismError:
        raise
    except Exception as error:  # damaged metadata surfaces as KeyError, JSON errors, zip errors, ...
        raise PrismError(f"{path}: not readable as zarr ({reason(error)}); {AGAIN}") from None


def _folder_store(path: Path) -> tuple[Store, str, dict[str, bool], int]:
    """The store, the dataset's place in it, what `data` holds (True: a group), its files but metadata (zip)."""
    from zarr.storage import LocalStore

    data = path / "data"
    folders = [child for child in data.iterdir() if child.is_dir()] if data.is_dir() else []
    children = {child.name: any((child / marker).exists() for marker in _GROUP) for child in folders}
    return LocalStore(path, read_only=True), "", children, 0


def _zip_store(path: Path) -> tuple[Store, str, dict[str, bool], int]:
    """People zip the folder's content, or the folder: the dataset may be anywhere in the archive, but only once."""
    from zarr.storage import ZipStore

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise PrismError(f"{path}: truncated or not a zip archive ({reason(error)}); {AGAIN}") from None
    if len(set(names)) < len(names):
        raise PrismError(f"{path}: holds two files of one name; {AGAIN}")
    ends = [f"{ENDS}/{meta}" for meta in (".zarray", "zarr.json")]
    roots = {name[: -len(end)].strip("/") for name in names for end in ends if ("/" + name).endswith("/" + end)}
    if not roots:
        raise PrismError(f"{path}: key '{ENDS}' is missing from the archive; this is not Diffusion Policy's layout")
    if len(roots) > 1:
        raise PrismError(f"{path}: holds {len(roots)} datasets ({', '.join(sorted(roots))}); unpack it and choose one")
    root = roots.pop()
    prefix = f"{root}/data/" if root else "data/"
    inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    folders = {name.split("/")[0] for name in inside if "/" in name}
    children = {child: any(f"{child}/{marker}" in inside for marker in _GROUP) for child in folders}
    files = [name for name in names if not name.endswith(("/", *_METADATA))]
    stored = sum(not name.rsplit("/", 1)[-1].startswith(".") for name in files)
    return ZipStore(path, mode="r", read_only=True), root, children, stored


def _uses_blosc(array: Any) -> bool:
    codecs = [*(getattr(array, "compressors", None) or ())]
    return any("blosc" in type(codec).__name__.lower() for codec in codecs)


def _checking(store: Store) -> tuple[Store, set[str]]:
    """The store, refusing blosc chunks of a wrong size, and the set of array prefixes that it checks.

    Blosc states its own size (a little-endian uint32 at byte 12), but its decoder trusts it: from a
    chunk that was cut short it reads on past the end and returns whatever memory was there.
    """
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.storage import WrapperStore

    blosc: set[str] = set()

    class Checking(WrapperStore[Store]):
        async def get(
            self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            value = await self._store.get(key, prototype, byte_range)
            if value is None or key.endswith(_METADATA) or not any(key.startswith(prefix) for prefix in blosc):
                return value
            content = value.to_bytes()
            stated = int.from_bytes(content[12:_BLOSC_HEADER], "little")
            if len(content) < _BLOSC_HEADER or stated != len(content):
                raise ValueError(f"chunk {key} has {len(content)} bytes, not the {stated} that it states")
            return value

    return Checking(store), blosc
