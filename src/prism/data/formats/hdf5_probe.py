"""Looks over an HDF5 file in a process of its own: HDF5's library can loop for ever, or crash, on damaged metadata.

Run as a script (it imports nothing of prism): python hdf5_probe.py FILE. It touches everything that
prism.data.formats.robomimic will, except the numbers themselves: attributes, groups, and the index of every chunk.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

CPU_SECONDS = 5  # of looking, and 1 more for every 20 MB: a tenth of a millisecond an array is plenty
WALL_SECONDS = 600
MEMORY = 8 << 30
REFUSED = 3  # exit status: HDF5 raised an exception, as it should


def probe(path: Path) -> str:
    """What is wrong with the file, in words; empty if HDF5 can be trusted with it."""
    seconds = CPU_SECONDS + path.stat().st_size // (20 * 10**6)
    # -P: this folder has modules named as Python's own
    command = [sys.executable, "-P", str(Path(__file__)), str(path), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return "HDF5 does not come to an end with it"
    if done.returncode in (0, REFUSED):  # what HDF5 says in words, the reader passes on
        return ""
    if done.returncode < 0:
        return f"HDF5 does not survive it (signal {-done.returncode})"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"it could not be looked over ({last[0]:.100})"


def look(path: str) -> None:
    import h5py

    def attributes(item: object) -> None:
        for name in ("total", "env_args", "num_samples"):
            item.attrs.get(name)  # type: ignore[attr-defined]

    with h5py.File(path, "r") as file:
        data = file["data"]
        attributes(data)
        masks = file.get("mask")
        if isinstance(masks, h5py.Group):
            for name in masks:
                masks[name][()]
        for demo in data.values():
            attributes(demo)
            for item in (demo["actions"], *demo["obs"].values()):
                _ = (item.shape, item.dtype)
                if item.chunks:
                    item.id.chunk_iter(lambda info: None)
                else:
                    item.id.get_offset()


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
