"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from prism.errors import PrismError


def hidden_beside(path: Path) -> Path:
    """A name in the same folder (so that a rename is atomic) that no other process uses."""
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, and leaves nothing behind when it does not."""
    if path.exists() and not overwrite:
        raise PrismError(f"{path}: exists already; choose another path or pass overwrite")
    if path.is_dir():
        raise PrismError(f"{path}: is a folder, a file is to be written there; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_beside(path)
    try:
        with hidden.open("xb") as file:
            yield file
            sync(file)
        os.replace(hidden, path)
        sync_folder(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """What a library's exception says, on one line of a message."""
    return " ".join((str(error) or type(error).__name__).split())[:120]
