"""Rows of a .npy file, read by position and checked against checksums.

Not a memory map: its pages count as the process's memory until the system is short of it, and a file that
shrinks while it is mapped kills the process.

Checksums are CRC-32 over blocks of rows of about 16 kB (a picture is a block of its own), so that any slice can be
checked without reading much beyond it.
"""

from __future__ import annotations

import io
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.episodes import Array, IntArray
from prism.data.formats.npz import npy_header
from prism.errors import PrismError, reason

BLOCK_BYTES = 16384
AGAIN = "collect or convert the dataset again"
_HEADER = 4096  # bytes that hold any header numpy writes for a plain array


def block_rows(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(row_bytes, 1))


def as_bytes(values: Array) -> memoryview:
    """The array's own memory (it must be contiguous)."""
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


class RowFile:
    """A .npy file of exactly this shape and type. Reading is safe from several threads."""

    def __init__(self, file: Path, shape: tuple[int, ...], dtype: np.dtype[Any], said_by: str) -> None:
        self.file, self.shape, self.dtype = file, shape, dtype
        self._checksums: IntArray | None = None
        try:
            self._descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            raise PrismError(f"{file}: not found, but {said_by} names it; {AGAIN}") from None
        weakref.finalize(self, os.close, self._descriptor)
        try:
            head = io.BytesIO(os.pread(self._descriptor, _HEADER, 0))
            found, fortran, kind = npy_header(head)
        except Exception as error:  # numpy raises many kinds on a damaged header
            raise PrismError(f"{file}: truncated or not a .npy file ({reason(error)}); {AGAIN}") from None
        self._offset = head.tell()
        if kind.hasobject:
            raise PrismError(f"{file}: not a .npy file of numbers (it holds pickled objects, never loaded); {AGAIN}")
        if found != shape or kind != dtype or (fortran and len(shape) > 1):
            raise PrismError(f"{file}: holds {kind} {found}, {said_by} says {dtype} {shape}; {AGAIN}")
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._block = block_rows(self._row_bytes)
        size = os.fstat(self._descriptor).st_size
        if size != self._offset + shape[0] * self._row_bytes:
            what = "truncated" if size < self._offset + shape[0] * self._row_bytes else "has bytes behind the array"
            raise PrismError(f"{file}: {what}; {AGAIN}")

    def check_with(self, checksums: Array) -> None:
        """From now on every read is compared with these, one a block."""
        self._checksums = checksums.astype(np.int64)

    @property
    def blocks(self) -> int:
        return -(-self.shape[0] // self._block)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Rows start..stop, a fresh array."""
        if self._checksums is None or stop <= start:
            return self._fetch(start, stop)
        first = start // self._block * self._block
        last = min(-(-stop // self._block) * self._block, self.shape[0])
        values = self._fetch(first, last)
        content = as_bytes(values)
        step = self._block * self._row_bytes
        for number in range(first // self._block, -(-last // self._block)):
            begin = (number * self._block - first) * self._row_bytes
            if zlib.crc32(content[begin : begin + step]) != self._checksums[number]:
                row = number * self._block
                raise PrismError(f"{self.file}: damaged: rows {row}..{row + self._block} fail their checksum; {AGAIN}")
        return values[start - first : stop - first]

    def _fetch(self, start: int, stop: int) -> Array:
        values = np.empty((stop - start, *self.shape[1:]), self.dtype)
        content = as_bytes(values)
        position, done = self._offset + start * self._row_bytes, 0
        while done < len(content):
            got = os.preadv(self._descriptor, [content[done:]], position + done)
            if got <= 0:
                raise PrismError(f"{self.file}: became shorter while it was read; {AGAIN}")
            done += got
        return values


class Checksums:
    """CRC-32 of the blocks of rows that are written, in order."""

    def __init__(self, row_bytes: int) -> None:
        self._step = block_rows(row_bytes) * row_bytes
        self._done: list[int] = []
        self._running, self._filled = 0, 0

    def add(self, content: memoryview) -> None:
        """Bytes of whole rows."""
        at = 0
        while at < len(content):
            piece = content[at : at + self._step - self._filled]
            self._running = zlib.crc32(piece, self._running)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == self._step:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._running)
        self._running, self._filled = 0, 0

    def result(self) -> Array:
        if self._filled:
            self._close_block()
        return np.array(self._done, np.uint32)
