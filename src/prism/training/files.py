"""Folders that appear whole or not at all: written under a hidden name, flushed to disk, checksummed, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from prism.errors import PrismError
from prism.io.atomic import HIDDEN, atomic_file, hidden_beside, sync, sync_folder

CHECKSUMS = "checksums.json"
_BLOCK = 1 << 24


class DamagedError(PrismError):
    """A file is missing, cut short or altered: an older copy may still do."""


def encode_json(data: object) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. Not atomic: call it inside a hidden folder."""
    with open(path, "xb") as file:
        _write(file, data)
        sync(file)


def replace_file(path: Path, data: bytes) -> None:
    """Write or replace one file atomically."""
    with atomic_file(path, overwrite=True) as file:
        _write(file, data)


def _write(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    for start in range(0, len(view), _BLOCK):
        file.write(view[start : start + _BLOCK])


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Create `folder` with these files and their checksums, atomically. It must not exist.

    The sums are of the bytes in memory, so they also catch what the disk altered on the way.
    """
    hidden = hidden_beside(folder)
    sums = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    try:
        hidden.mkdir(parents=True)
        for name, data in files.items():
            write_file(hidden / name, data)
        write_file(hidden / CHECKSUMS, encode_json(sums))
        sync_folder(hidden)
        os.rename(hidden, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder. It loses its name first, so a kill in between leaves no half-empty folder behind that name."""
    hidden = hidden_beside(folder)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written in `folder`."""
    for path in folder.glob(f"{HIDDEN}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: use another checkpoint, or copy the whole folder again") from None
    except OSError as error:
        raise PrismError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: Path, remedy: str = "use another checkpoint") -> dict[str, Any]:
    try:
        data = json.loads(read_bytes(path))
    except ValueError:  # also a UnicodeDecodeError
        raise DamagedError(f"{path} is not JSON: it was cut short or altered; {remedy}") from None
    if not isinstance(data, dict):
        raise DamagedError(f"{path} does not hold a JSON object; {remedy}")
    return data


def read_sums(folder: Path) -> dict[str, dict[str, Any]]:
    return read_json(folder / CHECKSUMS)


def read_verified(folder: Path, name: str, sums: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The bytes of one file, after its size and its sum were compared with checksums.json."""
    data = read_bytes(folder / name)
    expected = sums.get(name)
    if not isinstance(expected, Mapping) or not {"bytes", "sha256"} <= set(expected):
        raise DamagedError(f"{folder / CHECKSUMS} has no entry '{name}': use another checkpoint")
    if len(data) != expected["bytes"]:
        raise DamagedError(
            f"{folder / name} has {len(data)} bytes instead of {expected['bytes']}: it was cut short or altered; "
            "use another checkpoint, or copy it again"
        )
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise DamagedError(f"{folder / name} is altered (its sha256 differs); use another checkpoint, or copy it again")
    return data


@contextmanager
def explain_write_errors(path: Path, intact: str) -> Iterator[None]:
    """Turn an OSError into one line: what could not be written, why, what is still there."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, remedy = "the disk is full", "free some space"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason, remedy = "the folder is read-only", "allow writing to it"
        else:
            reason, remedy = error.strerror or str(error), "mend that"
        raise PrismError(
            f"{path} could not be written: {reason}. {intact}; {remedy}, then the same command again "
            "(prism train: with --resume)"
        ) from error
