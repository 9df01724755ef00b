"""Looks over an HDF5 file in a process of its own: HDF5's library can hang or crash on damaged metadata.

Run as a script (it imports nothing of prism): python hdf5_probe.py FILE. It touches everything that
prism.data.formats.robomimic and aloha will, except the numbers: attributes, groups, the index of every chunk.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

CPU_SECONDS = 5  # of looking, and 1 more for every 20 MB: a tenth of a millisecond an array is plenty
WALL_SECONDS = 600
MEMORY = 8 << 30
LARGE = 64 << 20  # bytes of a chunk; a larger one must not be mostly compression
MOST_RATIO = 32
REFUSED = 3  # exit status: HDF5 raised an exception, as it should


def probe(path: Path) -> str:
    """What is wrong with the file, in words; empty if HDF5 can be trusted with it."""
    seconds = CPU_SECONDS + path.stat().st_size // (20 * 10**6)
    # -P: this folder has modules named as Python's own
    command = [sys.executable, "-P", str(Path(__file__)), str(path), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return "HDF5 hangs on it"
    if done.returncode in (0, REFUSED):  # what HDF5 says in words, the reader passes on
        return ""
    if done.returncode < 0:
        return f"HDF5 crashes on it (signal {-done.returncode})"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"it could not be checked ({last[0]:.100})"


def strange(file: Any) -> str:
    """What a dataset of demonstrations never has: data of another file, at any depth, and chunks that are nearly all
    compression. In words; empty if there is nothing of the kind. Follows hard links only."""
    import h5py

    seen: set[int] = set()
    waiting = [("", file)]
    while waiting:
        where, group = waiting.pop()
        for name in group:
            inside = f"{where}/{name}"
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                return f"'{inside}' is a link to another file, {link.filename!r:.60}"
            if not isinstance(link, h5py.HardLink):
                continue  # a soft link stays in this file, where each object is looked at
            address = h5py.h5o.get_info(group.id, name.encode("utf-8", "surrogateescape")).addr
            if address in seen:
                continue
            seen.add(address)
            item = group[name]
            if isinstance(item, h5py.Group):
                waiting.append((inside, item))
            elif isinstance(item, h5py.Dataset) and (problem := _strange_data(item)):
                return f"'{inside}' {problem}"
    return ""


def _strange_data(data: Any) -> str:
    import h5py

    settings = data.id.get_create_plist()
    if settings.get_external_count():
        return f"keeps its numbers in another file, {settings.get_external(0)[0]!r:.60}"
    if settings.get_layout() == h5py.h5d.VIRTUAL:
        return "is put together from other files (a virtual dataset)"
    filters = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
    if filters.count(h5py.h5z.FILTER_DEFLATE) > 1:
        return "is compressed twice"
    size = math.prod(data.chunks or ()) * data.dtype.itemsize
    if data.chunks and size > max(LARGE, MOST_RATIO * data.id.get_storage_size()):
        return f"has chunks of {size / 1e6:.0f} MB that hold next to nothing"
    return ""


def check_deflated(data: Any) -> None:
    """ValueError for a compressed chunk that is larger than it may be: HDF5 decodes all of it whatever it says.

    Counts those that are large enough (deflate makes at most 1032 bytes of one)."""
    import h5py

    settings = data.id.get_create_plist()
    filters = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
    if h5py.h5z.FILTER_DEFLATE not in filters:
        return
    limit = math.prod(data.chunks) * data.dtype.itemsize
    large: list[Any] = []
    data.id.chunk_iter(lambda info: large.append(info.chunk_offset) if info.size * 1032 > LARGE else None)
    for place in large:
        skipped, content = data.id.read_direct_chunk(place)
        if skipped & 1 << filters.index(h5py.h5z.FILTER_DEFLATE):
            continue
        decoder, found = zlib.decompressobj(), 0
        while content and found <= limit + 4:  # 4: a checksum
            found += len(decoder.decompress(content, 1 << 20))
            content = decoder.unconsumed_tail
        if found > limit + 4:
            raise ValueError(f"a chunk holds more than its {limit} bytes")


def look(path: str) -> None:
    import h5py

    def attributes(item: object) -> None:
        for name in ("total", "env_args", "num_samples"):
            item.attrs.get(name)  # type: ignore[attr-defined]

    def chunks(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        _ = (item.shape, item.dtype)
        if item.chunks:
            item.id.chunk_iter(lambda info: None)
        else:
            item.id.get_offset()

    with h5py.File(path, "r") as file:
        if strange(file):  # the reader says so
            return
        if "data" not in file:  # another layout: whatever arrays there are
            file.visititems(chunks)
            return
        data = file["data"]
        attributes(data)
        masks = file.get("mask")
        if isinstance(masks, h5py.Group):
            for name in masks:
                masks[name][()]
        for demo in data.values():
            attributes(demo)
            for item in (demo["actions"], *demo["obs"].values()):
                chunks("", item)


if __name__ == "__main__":
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2]) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import h5py  # noqa: F401  a missing package is not the file's fault

    try:
        look(sys.argv[1])
    except Exception:
        sys.exit(REFUSED)
