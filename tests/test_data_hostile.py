"""Datasets that somebody prepared: nothing they name is run, no other file is read, and memory stays bounded."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from prism.data import open_dataset
from prism.data.formats.calvin_format import read_annotations
from prism.data.formats.npz import npz_member
from prism.errors import PrismError
from tests.data_files import ANNOTATIONS, write_calvin, write_lerobot_v3, write_lerobot_v21, write_robomimic
from tests.test_data_zarr import arrays, pack, write

SECRET = b"the text of another file, which no dataset may show. " * 40


def edit(file: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def pickled(path: Path) -> None:
    """Actions as objects behind the codec Pickle, as numcodecs writes them."""
    values = np.empty(1, object)
    values[0] = "x"
    (path / "data/action/0.0").write_bytes(numcodecs.Pickle().encode(values))
    edit(path / "data/action/.zarray", lambda d: d.update(filters=[{"id": "pickle"}], compressor=None))


@pytest.mark.parametrize("packed", [False, True])
def test_a_codec_that_is_not_on_the_list_is_refused_before_anything_is_decoded(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    path = write(tmp_path / "set.zarr", arrays())
    pickled(path)
    monkeypatch.setattr(numcodecs.Pickle, "__init__", lambda self, **_: made.append(True))
    with pytest.raises(PrismError, match="asks for the codec 'pickle', which prism does not run"):
        open_dataset(pack(path) if packed else path)
    assert not made, "the codec was built"


def test_codecs_are_checked_at_any_depth(tmp_path: Path) -> None:
    path = write(tmp_path / "set.zarr", arrays(), version=3)
    shard = {"name": "numcodecs.pickle", "configuration": {}}
    codec = {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [4, 2], "codecs": [shard], "index_codecs": [{"name": "bytes"}]},
    }
    edit(path / "data/action/zarr.json", lambda d: d.update(codecs=[codec]))
    with pytest.raises(PrismError, match="codec 'pickle'"):
        open_dataset(path)


def test_zarr_bombs(tmp_path: Path) -> None:
    """A small file that decodes to a lot is refused before it does."""
    data = arrays()
    for name, compressor, bomb in (
        ("gzip", {"id": "gzip", "level": 9}, gzip.compress(bytes(80 * 2**20))),
        ("zstd", {"id": "zstd", "level": 1}, bytes(numcodecs.Zstd().encode(bytes(80 * 2**20)))),
        ("lz4", {"id": "lz4"}, bytes(numcodecs.LZ4().encode(bytes(80 * 2**20)))),
    ):
        path = write(tmp_path / f"{name}.zarr", data)
        edit(path / "data/state/.zarray", lambda d, c=compressor: d.update(compressor=c, filters=None))
        for chunk in range(6):
            (path / f"data/state/{chunk}.0").write_bytes(bomb)
        with pytest.raises(PrismError, match="more than the 80 bytes"):
            open_dataset(path).read(0)
    path = write(tmp_path / "large.zarr", data)
    for name in data:
        file = path / f"data/{name}/.zarray"
        edit(file, lambda d: d.update(shape=[10**8, *d["shape"][1:]], chunks=[10**8, *d["chunks"][1:]]))
    with pytest.raises(PrismError, match=r"is said to hold|lacks chunks|decodes to"):
        open_dataset(path)


def external(file: h5py.File, tmp_path: Path) -> None:
    del file["data/demo_0/obs/object"]
    file["data/demo_0/obs"].create_dataset("object", (7, 10), "f8", external=[(str(tmp_path / "secret"), 0, 560)])


def linked(file: h5py.File, tmp_path: Path) -> None:
    del file["data/demo_0/obs/object"]
    file["data/demo_0/obs/object"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "/object")


def deep(file: h5py.File, tmp_path: Path) -> None:
    del file["data/demo_0/obs/object"]
    file["elsewhere/a/b"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "/object")
    file["data/demo_0/obs/object"] = h5py.SoftLink("/elsewhere/a/b")


def virtual(file: h5py.File, tmp_path: Path) -> None:
    del file["data/demo_0/obs/object"]
    layout = h5py.VirtualLayout((7, 10), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "object", (7, 10))
    file.create_virtual_dataset("data/demo_0/obs/object", layout)


@pytest.mark.parametrize("change", [external, linked, deep, virtual])
def test_hdf5_reads_no_other_file(tmp_path: Path, change: Callable[[h5py.File, Path], None]) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["object"] = np.frombuffer(SECRET[:560]).reshape(7, 10)
    path = write_robomimic(tmp_path / "set.hdf5")
    with h5py.File(path, "r+") as file:
        change(file, tmp_path)
    with pytest.raises(PrismError, match=r"another file|other files") as error:
        open_dataset(path)
    assert "\n" not in str(error.value)


def test_hdf5_bomb(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "set.hdf5", "gzip")
    with h5py.File(path, "r+") as file:
        pos = file["data/demo_0/obs/robot0_eef_pos"]
        pos.id.write_direct_chunk((0, 0), zlib.compress(bytes(80 * 2**20)))
    with pytest.raises(PrismError, match="a chunk holds more than its 168 bytes"):
        open_dataset(path).read(0)


HEADER = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
HEADER += b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"


def test_a_small_pickle_reserves_no_memory(tmp_path: Path) -> None:
    """A memo index of 100 million: Python's unpickler makes room for all of them."""
    file = tmp_path / "auto_lang_ann.npy"
    file.write_bytes(HEADER + b"\x80\x04}r\xff\xe0\xf5\x05.")
    assert file.stat().st_size < 150
    tracemalloc.start()
    with pytest.raises(PrismError, match="'language' is missing"):
        read_annotations(file)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_pickles_that_multiply_are_refused(tmp_path: Path) -> None:
    """A tuple of two of itself, 18 times over: its hash, or its text, takes 2**18 steps; 60 times, for ever."""
    file = tmp_path / "auto_lang_ann.npy"
    pairs = b")" + b"q\x00h\x00\x86" * 18
    dtype = b"cnumpy\ndtype\n" + pairs + b"\x85R"
    for content, message in ((b"}" + pairs + b"K\x01s.", "a tuple as a key"), (dtype + b".", "calls dtype in a way")):
        file.write_bytes(HEADER + b"\x80\x04" + content)
        with pytest.raises(PrismError, match=message):
            read_annotations(file)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_every_protocol_that_numpy_wrote_is_read(tmp_path: Path, protocol: int) -> None:
    content = {
        "language": {"ann": [text for text, _, _ in ANNOTATIONS], "emb": [0.5, -1, 2**40, None, True]},
        "info": {"episodes": [], "indx": [(np.int64(a), b) for _, a, b in ANNOTATIONS]},
    }
    if protocol > 2:  # protocol 2 has no bytes
        content["language"]["emb"] = np.ones((2, 3), np.float32)  # type: ignore[assignment]
    else:
        content["info"]["indx"] = [(a, b) for _, a, b in ANNOTATIONS]
    file = tmp_path / "auto_lang_ann.npy"
    file.write_bytes(HEADER + pickle.dumps(content, protocol))
    assert [(one.text, one.first, one.last) for one in read_annotations(file)] == ANNOTATIONS


def test_a_split_of_calvin_with_arrays_of_spans(tmp_path: Path) -> None:
    path = write_calvin(tmp_path / "set")
    spans = np.array([(a, b) for _, a, b in ANNOTATIONS])
    content = {"language": {"ann": np.array([t for t, _, _ in ANNOTATIONS], object)}, "info": {"indx": spans}}
    np.save(path / "lang_annotations/auto_lang_ann.npy", content, allow_pickle=True)  # type: ignore[arg-type]
    assert [(one.text, one.first, one.last) for one in read_annotations(path / "lang_annotations/auto_lang_ann.npy")]


def test_zarr_is_what_wrote_the_list() -> None:
    """What zarr writes by default is read."""
    group = zarr.open_group(store={}, mode="w", zarr_format=3)
    array = group.create_array("a", data=np.zeros((4, 2), np.float32))
    assert {type(codec).__name__ for codec in array.compressors} == {"ZstdCodec"}


def test_links_out_of_a_dataset_and_pipes_are_refused(tmp_path: Path) -> None:
    """A stranger's dataset reads nothing but its own files; links inside it, and those of the hub's cache, are fine."""
    path = write_calvin(tmp_path / "set")
    frame = path / "episode_0001237.npz"
    frame.rename(tmp_path / "outside.npz")
    frame.symlink_to(tmp_path / "outside.npz")
    with pytest.raises(PrismError, match=r"episode_0001237\.npz: is a link out of"):
        open_dataset(path)
    frame.unlink()
    os.mkfifo(frame)
    with pytest.raises(PrismError, match="is neither file nor folder"):
        open_dataset(path)
    frame.unlink()
    (path / "inside").mkdir()
    (tmp_path / "outside.npz").rename(path / "inside" / "frame")
    frame.symlink_to(path / "inside" / "frame")
    assert len(open_dataset(path).read(0).actions)
    cache = tmp_path / "datasets--me--demos"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    path = path.rename(cache / "snapshots" / "abc")
    (path / "inside" / "frame").rename(cache / "blobs" / "frame")
    (path / "episode_0001237.npz").unlink()
    (path / "episode_0001237.npz").symlink_to(Path("../../blobs/frame"))
    assert len(open_dataset(path).read(0).actions)


def test_a_members_size_in_a_zip_is_not_believed(tmp_path: Path) -> None:
    """Stored as 80 bytes in the directory, 80 MB when it is decoded."""
    content = bytes(80 * 2**20)
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    file.write_bytes(file.read_bytes().replace(struct.pack("<I", len(content)), struct.pack("<I", 80)))
    tracemalloc.start()
    with pytest.raises(Exception, match=r"CRC|holds|magic"), zipfile.ZipFile(file) as archive:
        npz_member(archive, "a")
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["dataset.json", "meta/info.json"])
def test_lists_that_are_nested_or_endless_are_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "set"
    (path / name).parent.mkdir(parents=True)
    for content in ("[" * 100_000, '{"fps": ' + "[" * 100_000 + "]" * 100_000 + "}", "[" + "{}," * 3_000_000 + "{}]"):
        (path / name).write_text(content)
        with pytest.raises(PrismError) as error:
            open_dataset(path)
        assert "\n" not in str(error.value)
    with (path / name).open("r+b") as file:
        file.truncate(20 * 2**30)
    with pytest.raises(PrismError, match=r"larger than|more than such a file ever has"):
        open_dataset(path)


def test_lists_of_lerobot_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a list are read one at a time; rows of a table are counted before they are read."""
    path = write_lerobot_v21(tmp_path / "v21")
    (path / "meta/episodes.jsonl").write_text("{}\n" * 300_000)
    tracemalloc.start()
    with pytest.raises(PrismError, match=r"episodes\.jsonl: line 1 "):
        open_dataset(path)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()

    path = write_lerobot_v3(tmp_path / "v3")
    tasks = path / "meta/tasks.parquet"
    rows = np.zeros(2**20 + 1, np.int8)
    pq.write_table(pa.table(dict.fromkeys(pq.read_table(tasks).column_names, rows)), tasks)
    with pytest.raises(PrismError, match=r"tasks\.parquet: has 1048577 rows, more than 1048576"):
        open_dataset(path)
