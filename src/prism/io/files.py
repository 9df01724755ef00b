"""Files and folders that are whole or not there: written under a hidden name, flushed to disk, renamed; verified when
read; and the lock of a folder."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from prism.errors import PrismError

HIDDEN = ".tmp-"  # how the names of unfinished files and folders begin
_HELD = f"{HIDDEN}lock-"  # the lock of a name
_OLD = ".old"  # between the number and the name of a folder that is about to be replaced
_HIDDEN_FOLDER = re.compile(re.escape(HIDDEN) + r"([0-9a-f]{16})(\.old)?-(.+)")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how what git keeps in place of a large file begins
CHECKSUMS, LOCK = "checksums.json", ".lock"
JSON_BYTES = 8 << 20  # of one file: parsed, it can be thirty times as large
_BLOCK = 1 << 24


class DamagedError(PrismError):
    """A file is missing, cut short or altered: an older copy may still do."""


def hidden_beside(path: Path) -> Path:
    """A name in the same folder (so that a rename is atomic) that no other process uses."""
    return path.with_name(f"{HIDDEN}{secrets.token_hex(8)}-{path.name}")


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, and leaves nothing behind when it does not."""
    if path.exists() and not overwrite:
        raise PrismError(f"{path}: exists already; choose another path or pass --overwrite")
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
    """Give the finished folder `new` the name `path`; what had it disappears only now. Who opens `path` meanwhile finds
    the old folder or the new one, where the system can exchange names (Linux)."""
    if path.is_dir() and _exchange(new, path):
        sync_folder(path.parent)
        shutil.rmtree(new, ignore_errors=True)
        return
    old = new.with_name(f"{new.name.removesuffix(f'-{path.name}')}{_OLD}-{path.name}")
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Their names, in one step; False where the system, or this disk, cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


class AtomicWriter(ABC):
    """A file that gets its name when the `with` block succeeds, and is deleted otherwise."""

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
    """Create `folder` with these files and their checksums, atomically; what had its name disappears only then.

    The sums are of the bytes in memory, so they also catch what the disk altered on the way.
    """
    sums = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder):
        _write_folder(folder, {**files, CHECKSUMS: encode_json(sums)})


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    hidden = hidden_beside(folder)
    try:
        hidden.mkdir()
        for name, data in files.items():
            write_file(hidden / name, data)
        sync_folder(hidden)
        replace_folder(hidden, folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder. It loses its name first, so a kill in between leaves no half-empty folder behind that name."""
    hidden = hidden_beside(folder)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written in `folder`. What `replace_folder` was about to name gets its
    name: between its two renames the old folder and the new one are both hidden, and neither may be lost."""
    for child in folder.glob(f"{HIDDEN}*"):
        _finish_replacing(child)
    for path in folder.glob(f"{HIDDEN}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[list[Path]]:
    """Make a folder. At the end go what the block has put on the list, and the folder and its parents, where they were
    not there and hold nothing but a lock."""
    new, undo = [path for path in (folder, *folder.parents) if not path.exists()], list[Path]()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield undo
    finally:
        for path in undo:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            if new and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
            for path in new:
                path.rmdir()


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """PrismError if the file is missing, not a regular file (a pipe would block), or larger than `most`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{path} is not a file: use another checkpoint, or copy the whole folder again")
        if most is not None and found.st_size > most:
            raise DamagedError(
                f"{path} has {found.st_size / 1e6:.0f} MB, more than such a file ever has: remove it, or copy it again"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: use another checkpoint, or copy the whole folder again") from None
    except OSError as error:
        raise PrismError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: Path, remedy: str = "use another checkpoint") -> dict[str, Any]:
    try:
        data = json.loads(read_bytes(path, JSON_BYTES))
    except (ValueError, RecursionError):  # also a UnicodeDecodeError
        raise DamagedError(f"{path} is not JSON: it was cut short or altered; {remedy}") from None
    if not isinstance(data, dict):
        raise DamagedError(f"{path} does not hold a JSON object; {remedy}")
    return data


def check_inside(folder: Path) -> None:
    """PrismError for a link that leads out of the folder, and for what is neither file nor folder: who gets a folder
    from a stranger reads nothing else. Links into the blobs of the Hugging Face cache that it is in are those of the
    cache."""
    if not folder.is_dir():
        return
    root = folder.resolve()
    homes = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    waiting = [root]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = Path(entry.path).resolve()
                    if not any(target.is_relative_to(home) for home in homes):
                        raise PrismError(f"{entry.path}: is a link out of {folder}; put the file itself there")
                    if target.exists() and not (target.is_file() or target.is_dir()):
                        raise PrismError(f"{entry.path}: is neither file nor folder; remove it")
                elif entry.is_dir():
                    waiting.append(Path(entry.path))
                elif not entry.is_file():
                    raise PrismError(f"{entry.path}: is neither file nor folder; remove it")


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


def explain(error: OSError) -> tuple[str, str]:
    """The reason in plain words, and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full", "free some space"
    if error.errno == errno.EROFS:
        return "the folder is read-only", "allow writing to it, or choose another path"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "permission denied", "allow it, or choose another path"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file is where a folder should be", "choose another path"
    return error.strerror or str(error), "check the path and the disk"


@contextmanager
def explain_write_errors(path: Path, intact: str) -> Iterator[None]:
    """Turn an OSError into one line: what could not be written, why, what is still there."""
    try:
        yield
    except OSError as error:
        reason, remedy = explain(error)
        raise PrismError(f"{path} could not be written: {reason}. {intact}; {remedy}, and try again") from error


@contextmanager
def exclusive(folder: Path, name: str = LOCK, patience: float = 0.0, of: Path | None = None) -> Iterator[int]:
    """Hold the folder's lock; it goes with the process, however that ends, so a killed run leaves none behind.

    `patience`: seconds to wait for a process that is still saving. `of`: what it locks, where not the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks; the user sees to it
        yield -1
        return
    deadline = time.monotonic() + patience
    try:  # never through a link, and nothing is ever written: a stranger's folder may hold a link to any file
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PrismError(f"{folder / name} is a symbolic link, not a lock: remove it") from None
        raise
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise PrismError(
                        f"{of or folder} is in use by another prism process: wait for it, or stop it first"
                    ) from None
                time.sleep(0.5)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody else makes a folder of this name meanwhile: a lock beside it, which is gone afterwards."""
    lock = path.with_name(f"{_HELD}{path.name}")
    while True:
        with exclusive(path.parent, lock.name, of=path) as file:
            if file >= 0 and not _is(lock, file):
                continue  # who held it has just removed it
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def remove_abandoned(parent: Path) -> None:
    """Delete the hidden folders of writers that were killed: those without a lock."""
    hidden: dict[str, list[Path]] = {}
    for child in parent.glob(f"{HIDDEN}*"):
        if (match := _HIDDEN_FOLDER.fullmatch(child.name)) and child.is_dir() and not child.is_symlink():
            hidden.setdefault(match[3], []).append(child)
        elif child.name.startswith(_HELD):  # goes with `held`
            hidden.setdefault(child.name.removeprefix(_HELD), [])
    for name, mine in hidden.items():
        with suppress(PrismError, OSError), held(parent / name):
            for child in mine:
                _finish_replacing(child)
            for child in mine:
                shutil.rmtree(child, ignore_errors=True)


def _finish_replacing(old: Path) -> None:
    """Where a process was killed between the two renames of `replace_folder`, the new folder gets its name."""
    match = _HIDDEN_FOLDER.fullmatch(old.name)
    if match and match[2]:
        new, path = old.with_name(f"{HIDDEN}{match[1]}-{match[3]}"), old.with_name(match[3])
        if new.is_dir() and not path.exists():
            os.replace(new, path)
