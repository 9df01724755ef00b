"""One array of an .npz or .npy file that may be damaged or hostile: checked, and never unpickled."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib import format as npy

from prism.data.episodes import Array

MAX_BYTES = 1 << 27  # of one array: one time step of one sensor, or an index of episodes
_LENGTH = {(1, 0): 2, (2, 0): 4}  # by .npy version: bytes that state the header's length
_MAX_HEADER = 10_000  # numpy's own limit


def npz_member(archive: zipfile.ZipFile, key: str) -> Array:
    """Array `key` of the archive. Its CRC-32 is checked; ValueError, KeyError or BadZipFile say what is wrong."""
    info = archive.getinfo(f"{key}.npy")
    if info.file_size > MAX_BYTES:
        raise ValueError(f"claims to be {info.file_size} bytes")
    with archive.open(info) as member:  # read(): all that the member decodes to, whatever its size is said to be
        content = member.read(info.file_size)
        if member.read(1):  # also checks the CRC-32
            raise ValueError(f"holds more than its {info.file_size} bytes")
    return parse_npy(content)


def parse_npy(content: bytes) -> Array:
    """A .npy file's content as an array, read-only. Objects (pickles) are refused."""
    file = io.BytesIO(content)
    shape, fortran, dtype = npy_header(file)
    if dtype.hasobject:
        raise ValueError("holds pickled objects, which are never loaded")
    count = 1
    for size in shape:
        count *= size
    body = len(content) - file.tell()
    if body != count * dtype.itemsize:
        raise ValueError(f"holds {body} bytes for {dtype} {shape}")
    array: Array = np.frombuffer(content, dtype, count, file.tell()).reshape(shape, order="F" if fortran else "C")
    return array


def npy_header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, Fortran order, dtype); the file stands behind the header."""
    start = file.tell()
    version = npy.read_magic(file)
    if version not in _LENGTH:
        raise ValueError(f"is of .npy version {version}")
    size = int.from_bytes(file.read(_LENGTH[version]), "little")
    if size > _MAX_HEADER:
        raise ValueError(f"has a header of {size} bytes")
    file.seek(start)
    return _parsed(file.read(8 + _LENGTH[version] + size), version)


@lru_cache(maxsize=256)
def _parsed(head: bytes, version: tuple[int, int]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """A header is Python source, which takes long to read, and thousands of files have the same few."""
    file = io.BytesIO(head)
    npy.read_magic(file)
    return npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)


def check_sizes(archive: zipfile.ZipFile) -> None:
    """ValueError for an archive that says it holds far more than its bytes can, unless it is small."""
    stated, stored = (sum(getattr(i, name) for i in archive.infolist()) for name in ("file_size", "compress_size"))
    if stated > max(1 << 26, 200 * stored):
        raise ValueError(f"says that its {stored} bytes hold {stated}")
