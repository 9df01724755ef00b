"""Where named datasets are, and how to get the public ones.

| name         | what it is                                                        |
| ------------ | ----------------------------------------------------------------- |
| pusht-human  | Diffusion Policy's 206 human demonstrations of Push-T (MIT)       |
| pusht-expert | demonstrations of this project's own expert, inside the package   |
"""

from __future__ import annotations

import difflib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import IO

from prism.errors import PrismError, reason
from prism.io.files import atomic_file, new_folder, sync

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where known


@dataclass(frozen=True)
class Download:
    url: str
    file: str  # the name it is kept under
    max_bytes: int


DOWNLOADS = {
    "pusht-human": Download(
        url="https://diffusion-policy.cs.columbia.edu/data/training/pusht.zip",
        file="pusht_cchi_v7_replay.zarr.zip",
        max_bytes=200_000_000,  # it is about 31 MB
    )
}
# Places inside a data folder where the dataset may be: as downloaded here, or as unpacked by hand.
_PLACES = {
    "pusht-human": (
        "pusht_cchi_v7_replay.zarr.zip",
        "pusht_cchi_v7_replay.zarr",
        "pusht/pusht_cchi_v7_replay.zarr",
        "pusht.zip",
    )
}
_SHIPPED = {"pusht-expert": "assets/pusht_expert"}
_PIECE = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte


def dataset_names() -> tuple[str, ...]:
    return (*_PLACES, *_SHIPPED)


def data_folder() -> Path:
    """PRISM_DATA, or the user's cache folder: where downloads go."""
    if named := os.environ.get("PRISM_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "prism"


def find_dataset(name: str, data: Path | None = None) -> Path:
    """The path of a named dataset: `data` (itself, or a folder that holds it), PRISM_DATA, the cache folder."""
    if name not in dataset_names():
        close = difflib.get_close_matches(name, dataset_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(dataset_names())}"
        raise PrismError(f"there is no dataset named '{name}'; {hint}")
    if data is not None:
        path = Path(data).expanduser()
        if not path.exists():
            raise PrismError(f"--data {data}: not found; give the path of the dataset")
        return _inside(name, path) or path
    if name in _SHIPPED:
        shipped = Path(str(files("prism"))) / _SHIPPED[name]
        if not shipped.is_dir():
            raise PrismError(f"{shipped}: not found; install prism again, or give --data PATH")
        return shipped
    if found := _inside(name, data_folder()):
        return found
    raise PrismError(f"{name}: not found in {data_folder()}; run `prism data collect {name}`, or set PRISM_DATA")


def download(
    name: str,
    folder: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    url: str | None = None,
) -> Path:
    """Fetches a public dataset into `folder` (data_folder() by default) and returns its path.

    The archive is kept unchanged and read in place: nothing is unpacked, so no name inside it can
    reach outside. It is opened, which checks it, before it gets its name.
    """
    from prism.data import open_dataset

    if name not in DOWNLOADS:
        raise PrismError(f"there is nothing to download named '{name}'; known are {', '.join(DOWNLOADS)}")
    item = DOWNLOADS[name]
    source = url or item.url
    target = (folder or data_folder()).expanduser() / item.file
    with _writable(target.parent, item.max_bytes), atomic_file(target, overwrite) as file:
        _fetch(source, file, item.max_bytes, progress)
        try:
            open_dataset(Path(file.name))
        except PrismError as error:
            problem = str(error).removeprefix(f"{file.name}: ")
            raise PrismError(f"{source}: the download is not the dataset: {problem}") from None
    return target


def _inside(name: str, folder: Path) -> Path | None:
    for place in _PLACES.get(name, ()):
        if (folder / place).exists():
            return folder / place
    return None


@contextmanager
def _writable(folder: Path, needed: int) -> Iterator[None]:
    try:
        with new_folder(folder):
            if (free := shutil.disk_usage(folder).free) < needed:
                space = f"{free // 10**6} MB free, {needed // 10**6} MB needed"
                raise PrismError(f"{folder}: {space}; set PRISM_DATA to another disk")
            yield
    except OSError as error:
        raise PrismError(f"{folder}: cannot write there ({reason(error)}); set PRISM_DATA to another folder") from None


def _fetch(url: str, file: IO[bytes], max_bytes: int, progress: Progress | None) -> None:
    elsewhere = "check the connection, or fetch it by other means (prism train takes it with --data PATH)"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
            stated = reply.headers.get("Content-Length", "")
            total = int(stated) if stated.isdigit() else None
            if total is not None and total > max_bytes:
                raise PrismError(f"{url}: is {total} bytes, more than the {max_bytes} expected; {elsewhere}")
            done = 0
            while piece := reply.read(_PIECE):
                done += len(piece)
                if done > max_bytes:
                    raise PrismError(f"{url}: sends more than the {max_bytes} bytes expected; {elsewhere}")
                file.write(piece)
                if progress is not None:
                    progress(done, total)
            if total is not None and done != total:
                raise PrismError(f"{url}: broke off after {done} of {total} bytes; {elsewhere}")
            sync(file)
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise PrismError(f"{url}: download failed ({reason(error)}); {elsewhere}") from None
