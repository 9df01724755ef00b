"""Diffusion Policy's zarr: `data/<key>` time-major, `meta/episode_ends` cumulative; a folder or a zip of one.

Every array of `data` but `action` can be a sensor (prism.data.formats.table says which). Zarr stores chunks of many
steps; the decoded chunks last used are kept, within `cache_bytes`, and nothing else is. A zip has checksums; a
folder has none, so damage that still decodes cannot be seen there.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.data.episodes import Array, IntArray, checked_ends
from prism.data.formats.recent import Recent, nbytes
from prism.data.formats.table import AGAIN, Absent, Column, Columns, Entry, Raw, Stream, TableSource, make_table
from prism.errors import PrismError, unreadable
from prism.io.files import LFS_POINTER

if TYPE_CHECKING:
    from zarr.abc.store import Store


# ---------------------------------------------------------------------------
# Opening a zarr archive that may be damaged: every problem is a PrismError, and none is read as data.

ENDS = "meta/episode_ends"
_METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")
_GROUP = (".zgroup", "zarr.json")
_BLOSC_HEADER = 16
# Codecs of numbers, texts and their checksums. Metadata may name any other, Pickle included, which runs code.
_COMPRESSING = frozenset(("blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"))
_CODECS = _COMPRESSING | {"astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle"}
_CODECS |= {"adler32", "crc32", "crc32c", "fletcher32"}
_CODECS |= {"bytes", "endian", "sharding_indexed", "transpose", "vlen-bytes", "vlen-utf8"}
_LARGE = 64 * 2**20  # bytes of a decoded chunk; a larger one must not be mostly compression
_MOST_RATIO = 32
_SLACK = 2**16
_METADATA_BYTES = 8 * 2**20  # of one file


def open_arrays(path: Path, notes: list[str]) -> tuple[dict[str, Any], IntArray]:
    """The zarr arrays under `data` by name, and the episode ends. Reads metadata and the ends only."""
    import zarr

    with unreadable(f"{path}: not readable as zarr", AGAIN):  # damaged metadata: KeyError, JSON errors, zip errors, ...
        store, root, children, stored = _folder_store(path) if path.is_dir() else _zip_store(path)
        checked, sizes = _checking(store, path)
        group = zarr.open_group(checked, path=root, mode="r")
        for key in (ENDS, "data"):
            if key not in group:
                raise PrismError(f"{path}: key '{key}' is missing; this is not Diffusion Policy's layout")
        data, ends = group["data"], group[ENDS]
        if not isinstance(data, zarr.Group) or not isinstance(ends, zarr.Array):
            raise PrismError(f"{path}: 'data' must be a group and '{ENDS}' an array; this is another layout")
        arrays = dict(data.arrays())
        # zarr passes over metadata that it cannot read, or takes it for a group: a sensor would be lost silently
        for child in sorted(set(children) - set(arrays)):
            if children[child]:
                notes.append(f"'{child}' is a group, not an array, and is left out")
            else:
                raise PrismError(f"{path}: 'data/{child}' has no readable metadata; {AGAIN}")
        for array in (ends, *arrays.values()):
            # zarr looks for each of them
            if int(array.nchunks) > 10_000 and int(array.nchunks) > 100 * (files := _count_files(path, array.path)):
                raise PrismError(f"{path}: '{array.path}' says {array.nchunks} chunks, and has {files} files; {AGAIN}")
        # a chunk under a damaged name is lost, and zarr would read zeros in its place
        there = {array.path: int(array.nchunks_initialized) for array in (ends, *arrays.values())}
        lost = [a.path for a in (ends, *arrays.values()) if there[a.path] < int(a.nchunks)]
        if lost and stored > sum(there.values()):
            raise PrismError(f"{path}: '{lost[0]}' lacks chunks and there are files that belong to no array; {AGAIN}")
        for array in (ends, *arrays.values()):
            codecs = _names((*array.compressors, *array.filters))
            if len(codecs & _COMPRESSING) > 1:
                raise PrismError(f"{path}: '{array.path}' is compressed twice; write it with one compressor")
            if array.shards is not None and "blosc" in codecs:
                raise PrismError(f"{path}: '{array.path}' is sharded and blosc-compressed; write it without shards")
            sizes[array.path.strip("/") + "/"] = codecs, math.prod(array.shards or array.chunks) * array.dtype.itemsize
        if ends.size > max((array.shape[0] for array in arrays.values() if array.shape), default=0):
            raise PrismError(f"{path}: '{ENDS}' has {ends.size} entries, more than there are steps; {AGAIN}")
        return arrays, checked_ends(np.asarray(ends[...]), f"{path}: '{ENDS}'")


def _count_files(path: Path, array: str) -> int:
    if path.is_dir():
        return sum(len(files) for _, _, files in os.walk(path / array))
    with zipfile.ZipFile(path) as archive:
        return sum(name.startswith(f"{array}/") for name in archive.namelist())


def _folder_store(path: Path) -> tuple[Store, str, dict[str, bool], int]:
    """The store, the dataset's place in it, what `data` holds (True: a group), its files but metadata (zip)."""
    from zarr.storage import LocalStore

    data = path / "data"
    folders = [child for child in data.iterdir() if child.is_dir()] if data.is_dir() else []
    children = {child.name: any((child / marker).exists() for marker in _GROUP) for child in folders}
    return LocalStore(path, read_only=True), "", children, 0


def _zip_store(path: Path) -> tuple[Store, str, dict[str, bool], int]:
    """People zip the folder's content, or the folder: the dataset may be anywhere in the archive, but only once."""
    from zarr.storage import ZipStore

    with unreadable(f"{path}: truncated or not a zip archive", AGAIN), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if len(set(names)) < len(names):
        raise PrismError(f"{path}: holds two files of one name; {AGAIN}")
    ends = [f"{ENDS}/{meta}" for meta in (".zarray", "zarr.json")]
    roots = {name[: -len(end)].strip("/") for name in names for end in ends if ("/" + name).endswith("/" + end)}
    if not roots:
        raise PrismError(f"{path}: key '{ENDS}' is missing from the archive; this is not Diffusion Policy's layout")
    if len(roots) > 1:
        raise PrismError(f"{path}: holds {len(roots)} datasets ({', '.join(sorted(roots))}); unpack it and choose one")
    root = roots.pop()
    prefix = f"{root}/data/" if root else "data/"
    inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    folders = {name.split("/")[0] for name in inside if "/" in name}
    children = {child: any(f"{child}/{marker}" in inside for marker in _GROUP) for child in folders}
    files = [name for name in names if not name.endswith(("/", *_METADATA))]
    stored = sum(not name.rsplit("/", 1)[-1].startswith(".") for name in files)
    return ZipStore(path, mode="r", read_only=True), root, children, stored


def _names(codecs: Sequence[Any]) -> set[str]:
    """Codecs by their names in the metadata."""
    found = set()
    for codec in codecs:
        name = getattr(codec, "codec_id", None) or getattr(codec, "codec_name", None) or type(codec).__name__
        found.add(str(name).removeprefix("numcodecs.").removesuffix("Codec").lower())
    return found


def _check_codecs(key: str, content: bytes) -> None:
    """Every codec that this metadata file names, at any depth, is one of `_CODECS`."""
    if len(content) > _METADATA_BYTES:
        raise ValueError(f"{key} has {len(content)} bytes, too many for metadata")
    for name in _named(json.loads(content)):
        if name not in _CODECS:
            raise ValueError(f"{key} asks for the codec {name!r:.40}, which prism does not run; write it with blosc")


def _named(data: object) -> Iterator[object]:
    if isinstance(data, list):
        for entry in data:
            yield from _named(entry)
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        listed = [value] if key == "compressor" else value
        if key in ("compressor", "filters", "codecs", "index_codecs") and isinstance(listed, list):
            for codec in listed:
                name = codec.get("id", codec.get("name")) if isinstance(codec, dict) else codec
                if name is not None:
                    yield name.removeprefix("numcodecs.") if isinstance(name, str) else name
        if key not in ("attributes", "fill_value") and not key.endswith(".zattrs"):  # the user's own words
            yield from _named(value)


def _check_size(key: str, stored: int, decoded: int) -> None:
    """Of a file, before it is read: what is not there may be as large as it likes to say."""
    if stored > (_METADATA_BYTES if key.endswith(_METADATA) else max(_LARGE, 2 * decoded)):
        raise ValueError(f"{key} has {stored} bytes, more than it can need")


def _members(path: Path) -> dict[str, zipfile.ZipInfo]:
    if path.is_dir():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {member.filename: member for member in archive.infolist()}


def _check_member(path: Path, said: zipfile.ZipInfo) -> None:
    """Deflated members may decode to much more than they state, so check before decoding."""
    if said.compress_type == zipfile.ZIP_STORED or said.compress_size * 1032 <= _LARGE:
        return
    with zipfile.ZipFile(path) as archive, archive.open(said.filename) as member:
        while member.read(2**20):  # bounded, as read() is not
            pass
        if not member._decompressor.eof:  # type: ignore[attr-defined]
            raise ValueError(f"{said.filename} holds more than the {said.file_size} bytes that it states")


def _checking(store: Store, path: Path) -> tuple[Store, dict[str, tuple[set[str], int]]]:
    """The store, refusing codecs that are not on the list and chunks of a wrong size; and, to be filled in, the codecs
    and the decoded bytes of a chunk by array prefix.

    Blosc states its own size (a little-endian uint32 at byte 12), but its decoder trusts it: from a
    chunk that was cut short it reads on past the end and returns whatever memory was there.
    """
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.storage import WrapperStore

    sizes: dict[str, tuple[set[str], int]] = {}
    members = _members(path)

    class Checking(WrapperStore[Store]):
        async def get(
            self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            decoded = next((size for prefix, (_, size) in sizes.items() if key.startswith(prefix)), 0)
            if key in members:
                _check_size(key, members[key].file_size, decoded)
                _check_member(path, members[key])
                members[key].compress_type = zipfile.ZIP_STORED  # once is enough
            elif path.is_dir() and (path / key).is_file():
                _check_size(key, (path / key).stat().st_size, decoded)
            value = await self._store.get(key, prototype, byte_range)
            if value is None:
                return None
            if key.endswith(_METADATA):
                if not key.endswith(".zattrs"):
                    _check_codecs(key, value.to_bytes())
                return value
            for prefix, (codecs, size) in sizes.items():
                if key.startswith(prefix) and byte_range is None:
                    _check_chunk(key, value.to_bytes(), codecs, size)
            return value

    return Checking(store), sizes


def _check_chunk(key: str, content: bytes, codecs: set[str], size: int) -> None:
    """A chunk that decodes to `size` bytes: its compressor must not be made to write much more than that."""
    if content.startswith(LFS_POINTER):
        raise ValueError(f"chunk {key} is a Git-LFS pointer, not the file itself: run `git lfs pull` there")
    stored, limit = len(content), 8 * size + _SLACK  # filters may make a number eight times as long
    if size > max(_LARGE, _MOST_RATIO * stored):
        raise ValueError(f"chunk {key} has {stored} bytes and is said to hold {size}; write smaller chunks")
    if "blosc" in codecs:
        stated = int.from_bytes(content[12:_BLOSC_HEADER], "little")
        if stored < _BLOSC_HEADER or stated != stored:
            raise ValueError(f"chunk {key} has {stored} bytes, not the {stated} that it states")
        decoded = int.from_bytes(content[4:8], "little")
    elif "lz4" in codecs:
        decoded = int.from_bytes(content[:4], "little")
    else:
        decoded = _decoded_bytes(content, codecs, limit)
    if decoded > limit:
        raise ValueError(f"chunk {key} decodes to more than the {size} bytes that it should hold")


def _decoded_bytes(content: bytes, codecs: set[str], limit: int) -> int:
    """How much these make of it: counted, where they do not say, until it is more than `limit`."""
    import bz2
    import lzma

    decoder: Any
    if "zstd" in codecs:
        return _zstd_bytes(content)
    if codecs & {"gzip", "zlib"}:
        decoder = zlib.decompressobj(47)  # either header
        if len(content) * 1032 <= max(limit, _LARGE):
            return 0  # deflate cannot do more
    elif "bz2" in codecs:
        decoder = bz2.BZ2Decompressor()
    elif "lzma" in codecs:
        decoder = lzma.LZMADecompressor()
    else:
        return len(content)
    found, rest = 0, content
    while found <= limit and not decoder.eof:
        part = decoder.decompress(rest, 2**20)
        rest = getattr(decoder, "unconsumed_tail", b"")
        if not part and not rest:
            break
        found += len(part)
    return found


def _zstd_bytes(content: bytes) -> int:
    """The size in a frame's header (RFC 8878, 3.1.1); optional there, but zarr always writes it."""
    if len(content) < 5 or content[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("a chunk is not zstd")
    flags = content[4]
    single, dictionary = flags >> 5 & 1, (0, 1, 2, 4)[flags & 3]
    size = (single, 2, 4, 8)[flags >> 6]
    start = 5 + (not single) + dictionary
    if not size or len(content) < start + size:
        raise ValueError("a chunk does not state how many bytes it decodes to")
    return int.from_bytes(content[start : start + size], "little") + (256 if size == 2 else 0)


DEFAULT_FPS = 10.0  # the format stores no rate; this is Push-T's
DEFAULT_CACHE_BYTES = 64 * 2**20
_MIN_ROWS = 1024  # vectors stored in tiny chunks are read this many steps at a time,
_BLOCK_BYTES = 8 * 2**20  # and at most this much


@dataclass(frozen=True)
class _Stream:
    """One zarr array and how its blocks are read."""

    key: str
    array: Any  # zarr.Array
    block: int  # steps decoded together: whole chunks
    image: bool  # pixels stored as floats
    scale: float  # float pixels: what makes them 0..255


class ZarrSource(TableSource):
    """A Diffusion Policy dataset. Opening it reads the vectors once (for NaN), pixels only on demand."""

    def __init__(
        self,
        path: Path,
        fps: float | None = None,
        entries: Sequence[Entry] = (),
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        fps = DEFAULT_FPS if fps is None else fps
        if not fps > 0:
            raise PrismError(f"{path}: fps must be positive, not {fps}")
        self.path, self.fps = path, float(fps)
        self._arguments = (path, fps, tuple(entries), cache_bytes)
        self._cache: Recent[tuple[str, int], Array] = Recent(cache_bytes, nbytes)
        self._lock = threading.Lock()
        notes = [f"the format stores no rate: {fps:g} steps a second are assumed"]
        arrays, ends = open_arrays(path, notes)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths: IntArray = ends - self._starts
        action = next((entry.sources[0] for entry in entries if entry.name == "action"), "action")
        self._check_lengths(arrays, action, int(ends[-1]), notes)
        # Float pixels are kept as uint8. Key points of two hands may have their shape: then the table says so.
        numbers = {
            key
            for entry in entries
            if entry.kind == "vector" or entry.name == "action" or len(entry.sources) > 1
            for key in entry.sources
        }
        self._float_pixels = {key for key in arrays if _float_pixels(arrays[key])} - numbers - {action}
        columns = [
            Column(key, tuple(map(int, a.shape[1:])), np.dtype(np.uint8 if key in self._float_pixels else a.dtype))
            for key, a in sorted(arrays.items())
        ]
        self._use(make_table(path, columns, "action", entries, self.fps, notes))
        scales = {key: entry.scale for entry in entries for key in entry.sources}
        self._arrays: dict[str, _Stream] = {}
        for stream in (*self.table.streams, self.table.action):
            for key in (column.key for column in stream.columns):
                self._arrays[key] = self._stream(key, arrays[key], stream, scales.get(key, 0.0), notes)
        self.notes = tuple(notes)

    def _check_lengths(self, arrays: dict[str, Any], action: str, end: int, notes: list[str]) -> None:
        rows = {key: int(array.shape[0]) if array.shape else 0 for key, array in arrays.items()}
        if action not in arrays:
            raise PrismError(
                f"{self.path}: key 'data/{action}' is missing; found {', '.join(sorted(arrays)) or 'nothing'}"
            )
        commands = arrays[action]
        if commands.ndim < 2 or 0 in commands.shape or commands.dtype.kind not in "fiu":
            raise PrismError(
                f"{self.path}: 'data/{action}' is {commands.dtype} {commands.shape}, needs numbers (T, Da)"
            )
        for key, count in rows.items():
            if count != rows[action]:
                raise PrismError(
                    f"{self.path}: 'data/{key}' has {count} steps, 'data/{action}' {rows[action]}; {AGAIN}"
                )
        if end > rows[action]:
            raise PrismError(f"{self.path}: '{ENDS}' goes to {end}, the data to {rows[action]}; {AGAIN}")
        if end < rows[action]:
            notes.append(f"the last {rows[action] - end} steps belong to no episode and are left out")

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        first = int(self._starts[episode])
        return {key: self._rows(self._arrays[key], first + start, first + stop) for key in columns}, {}

    def _stream(self, key: str, array: Any, stream: Stream, scale: float, notes: list[str]) -> _Stream:
        image = stream.spec.is_image
        chunk = max(int(array.chunks[0]), 1)
        rows = min(_MIN_ROWS, _BLOCK_BYTES // max(math.prod(array.shape[1:]) * array.dtype.itemsize, 1))
        block = chunk if image else chunk * max(rows // chunk, 1)
        with unreadable(f"{self.path}: 'data/{key}' cannot be listed", AGAIN):  # names that make no sense
            missing = int(array.nchunks) - int(array.nchunks_initialized)
        if missing and (image or stream is self.table.action):
            raise PrismError(f"{self.path}: 'data/{key}' lacks {missing} of its {array.nchunks} chunks; {AGAIN}")
        if missing:  # legal in zarr: a chunk of nothing but the fill value need not be stored
            notes.append(f"'{key}' lacks {missing} of its chunks: they read as {array.fill_value}")
        if (pixels := key in self._float_pixels) and not scale:
            steps = np.linspace(0, int(array.shape[0]) - 1, 8).astype(int).tolist()  # a camera may begin in the dark
            top = max(float(np.max(self._decode(key, array, step, step + 1))) for step in steps)
            scale = 255.0 if 0 < top <= 1 else 1.0
            notes.append(f"'{key}' holds floats, read as pixels from 0 to {255 / scale:g}")
        return _Stream(key, array, block, pixels, scale or 1.0)

    def _decode(self, key: str, array: Any, start: int, stop: int) -> Array:
        with unreadable(f"{self.path}: 'data/{key}' cannot be decoded near step {start}", AGAIN):
            values: Array = array[start:stop]
            return values

    def _block(self, stream: _Stream, number: int) -> Array:
        """Block `number`, (rows, ...); pixels stored as floats are kept as uint8, a quarter of the size."""
        with self._lock:
            if (found := self._cache.get((stream.key, number))) is not None:
                return found
        start = number * stream.block
        values = self._decode(stream.key, stream.array, start, start + stream.block)
        if stream.image:
            values = self._pixels(stream, values, start)
        with self._lock:
            return self._cache.keep((stream.key, number), values)

    def _pixels(self, stream: _Stream, values: Array, start: int) -> Array:
        numbers = values.astype(np.float32, copy=False)
        # written so that NaN fails too
        if not (numbers.min() >= 0 and numbers.max() <= 255 / stream.scale):
            top = 255 / stream.scale
            raise PrismError(
                f"{self.path}: 'data/{stream.key}' has pixels outside 0..{top:g} near step {start}; fix it"
            )
        scaled = numbers if stream.scale == 1 else numbers * stream.scale
        pixels: Array = np.rint(scaled).astype(np.uint8)
        return pixels

    def _rows(self, stream: _Stream, start: int, stop: int) -> Array:
        """Steps start..stop of the whole dataset, a copy."""
        first, last = start // stream.block, max(stop - 1, start) // stream.block
        parts = []
        for number in range(first, last + 1):
            offset = number * stream.block
            parts.append(self._block(stream, number)[max(start - offset, 0) : stop - offset])
        return np.concatenate(parts)


def is_zarr(path: Path) -> bool:
    """A folder that looks like a zarr group, or a zip (whatever is in it: opening it says what is wrong)."""
    if path.is_dir():
        return any((path / name).exists() for name in (".zgroup", "zarr.json", "meta/episode_ends", "data/action"))
    return path.suffix == ".zip" or zipfile.is_zipfile(path)


def _float_pixels(array: Any) -> bool:
    return bool(array.dtype.kind == "f" and array.ndim == 4 and array.shape[3] == 3)
