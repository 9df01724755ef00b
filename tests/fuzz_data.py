"""Damage datasets at random and read them: every one must be refused in one line, or read as it was written.

    python -m tests.fuzz_data 1000 [FORMAT ...]

Runs each format in a process of its own, so that a crash of the interpreter is seen and named by its seed. Formats
without checksums can be damaged without a trace: for those, differences are counted and not an error.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prism.data import open_dataset
from prism.data.convert import convert
from prism.errors import PrismError
from tests import data_files

SECONDS = 300  # for one dataset of a few kilobytes: more is a hang


def write_prism(path: Path) -> Path:
    convert(open_dataset(data_files.write_calvin(path.with_name("calvin"))), path)
    return path


def write_zarr(path: Path) -> Path:
    from tests.test_data_zarr import arrays, write

    return write(path, arrays())


def write_zip(path: Path) -> Path:
    folder = write_zarr(path.with_name("set.zarr"))
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, str(file.relative_to(folder)))
    return path


def write_bag(path: Path) -> Path:
    from tests.test_data_rosbag import write_bag as write

    return write(path, seconds=0.6)


# how each is written, and whether checksums cover all of it
FORMATS: dict[str, tuple[str, Callable[[Path], Path], bool]] = {
    "prism": ("set", write_prism, True),
    "zarr_zip": ("set.zarr.zip", write_zip, True),
    "calvin": ("set", data_files.write_calvin, True),
    "zarr": ("set.zarr", write_zarr, False),
    "robomimic": ("set.hdf5", lambda p: data_files.write_robomimic(p, "gzip"), False),
    "lerobot_v21": ("set", data_files.write_lerobot_v21, False),
    "lerobot_v3": ("set", data_files.write_lerobot_v3, False),
    "rosbag": ("set", write_bag, False),
}


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """One of the ways in which disks, networks and people ruin files."""
    data = bytearray(content)
    at = int(rng.integers(len(data))) if data else 0
    match rng.integers(6):
        case 0 | 1:  # a flipped byte
            data[at : at + 1] = bytes([data[at] ^ int(rng.integers(1, 256))]) if data else b"x"
        case 2:  # several
            for place in rng.integers(len(data), size=8).tolist() if data else []:
                data[place] ^= int(rng.integers(1, 256))
        case 3:  # cut short
            del data[at:]
        case 4:  # a hole of zeros, as after a crash of the machine
            stop = min(at + int(rng.integers(1, 4096)), len(data))
            data[at:stop] = bytes(stop - at)
        case _:  # a piece of itself in the wrong place
            size = int(rng.integers(1, 512))
            start = int(rng.integers(len(data))) if data else 0
            data[at : at + size] = data[start : start + size]
    return bytes(data)


def read_all(path: Path) -> Any:
    source = open_dataset(path, fps=10.0 if path.is_dir() and (path / "metadata.yaml").exists() else None)
    parts = [source.read(episode) for episode in range(len(source.lengths))]
    return source.sensors, source.fps, parts


def same(a: Any, b: Any) -> bool:
    if a[:2] != b[:2] or len(a[2]) != len(b[2]):
        return False
    for x, y in zip(a[2], b[2], strict=True):
        if x.streams.keys() != y.streams.keys() or not np.array_equal(x.actions, y.actions):
            return False
        for name in x.streams:
            here = [part.present.get(name, np.ones(part.length, np.bool_)) for part in (x, y)]
            if not np.array_equal(*here) or not np.array_equal(x.streams[name][here[0]], y.streams[name][here[1]]):
                return False
    return True


def fuzz(kind: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """refused, unharmed (damage in a part that is not read) and changed (read, and different)."""
    name, write, checked = FORMATS[kind]
    path = write(folder / name)
    expected = read_all(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    weights = np.array([max(file.stat().st_size, 1) for file in files]) ** 0.5
    found: Counter[str] = Counter()
    for number in range(seed, seed + count):
        rng = np.random.default_rng([7, number])
        file = files[int(rng.choice(len(files), p=weights / weights.sum()))]
        original = file.read_bytes()
        print(f"{kind} {number} {file.relative_to(folder)}", file=sys.stderr, flush=True)
        signal.alarm(SECONDS)
        try:
            while (content := damage(original, rng)) == original:
                pass
            file.write_bytes(content)
            result = read_all(path)
            if same(result, expected):
                found["unharmed"] += 1
            else:
                found["changed"] += 1
                assert not checked, f"{kind}: seed {number}: {file} is damaged and read as other data"
        except PrismError as error:
            found["refused"] += 1
            if "\n" in str(error) or "/" not in str(error):
                raise ValueError(f"not one line that names a file: {error}") from None
        finally:
            signal.alarm(0)
            file.write_bytes(original)
    return found


def run(kind: str, count: int, batch: int = 500) -> tuple[Counter[str], list[str]]:
    """In processes of their own; what went wrong, one line each."""
    total: Counter[str] = Counter()
    problems = []
    for start in range(0, count, batch):
        command = [sys.executable, "-m", "tests.fuzz_data", "--one", kind, str(min(batch, count - start)), str(start)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        if done.returncode == 0:
            total.update(json.loads(done.stdout.splitlines()[-1]))
        else:
            problems.append(f"{kind}: status {done.returncode}: {' | '.join(done.stderr.splitlines()[-6:])}")
    return total, problems


def main(words: list[str]) -> None:
    if words[:1] == ["--one"]:
        faulthandler.enable()
        folder = Path(tempfile.mkdtemp())
        try:
            print(json.dumps(fuzz(words[1], int(words[2]), int(words[3]), folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    failed = False
    for kind in words[1:] or list(FORMATS):
        found, problems = run(kind, int(words[0]))
        print(f"{kind:12} {dict(found)}", *problems, sep="\n  ", flush=True)
        failed |= bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
