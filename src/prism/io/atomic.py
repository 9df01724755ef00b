"""Files and folders that are whole or not there: written under a hidden name, flushed to disk, renamed."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from prism.errors import PrismError

HIDDEN = ".tmp-"  # how the names of unfinished files and folders begin


def hidden_beside(path: Path) -> Path:
    """A name in the same folder (so that a rename is atomic) that no other process uses."""
    return path.with_name(f"{HIDDEN}{secrets.token_hex(8)}-{path.name}")


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


def replace_folder(new: Path, path: Path) -> None:
    """Give the finished folder `new` the name `path`; what had it disappears only now."""
    old = new.with_name(f"{new.name}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


class AtomicWriter(ABC):
    """What it writes gets its name when the `with` block ends well, and disappears when it does not."""

    @abstractmethod
    def close(self) -> None:
        """Completes what was written and gives it its name."""

    @abstractmethod
    def abandon(self) -> None:
        """Removes everything written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make a rename or a new name in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(folder: Path, name: str = ".lock", patience: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock; it goes with the process, however that ends, so a killed run leaves none behind.

    `patience`: seconds to wait for a process that is still saving.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks; the user sees to it
        yield
        return
    deadline = time.monotonic() + patience
    with open(folder / name, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise PrismError(
                        f"{folder} is in use by another prism process: wait for it, or stop it first"
                    ) from None
                time.sleep(0.5)
        yield
