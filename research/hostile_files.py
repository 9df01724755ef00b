"""Damaged and hostile files of every format that is read: is each refused in one line, at once, and nothing else read?

Try:
    python -m research files --count 1000 --json files.json

Each file is opened and read in a process of its own, forked after the imports; bombs, links, code, lies about sizes
once each, and random damage (flipped bytes, cuts, holes, pieces in the wrong place) for the rest.

    tried         files, and how they ended: refused (one line), unharmed (the damage lay in what is not read),
                  changed (read as other data: random damage where the format has no checksum)
    silent        hostile files that were read without a word, and damage that a checksum should have seen
    unclear       another exception, or more than one line
    crashed       the process died, or took longer than 60 s
    read_outside  files outside of the folder were opened
    ran           code in a file was run
    max_mb        growth of a process's memory after the imports, processes that it started included
    max_seconds   processor time of one; max_wall_seconds on the clock, which other programs share
    faults        which they were
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from prism.errors import PrismError, check_numbers
from prism.evaluation.results import run_info
from research.report import Written

data_files: Any = importlib.import_module("tests.data_files")  # what the tests write
fuzz_data: Any = importlib.import_module("tests.fuzz_data")

SECRET = b"the content of a file that no dataset may show"
SECONDS = 60  # on the clock, of one file
_BOMB = 300 * 2**20  # bytes that a bomb decodes to
_IMPORTS = ["av", "h5py", "numcodecs", "pyarrow.parquet", "rosbags.highlevel", "zarr", "tests.policy_fakes"]
_IMPORTS += ["prism.experiments.run_folder", "prism.experiments.recipes", "prism.data.formats.film"]
_STEPS = 4000  # of an episode that are read at most: a size that is a lie may be any


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    count: int = 1000
    """Files in all."""
    seed: int = 0
    """Of the random damage."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "count", "[0, inf)": "seed"})


# ------------------------------------------------------------------ what is read, and how


class Leak(Exception):  # noqa: N818
    """What was read is the content of another file."""


def read_dataset(path: Path) -> Any:
    """Everything, in parts, as `prism data convert` does."""
    from prism.data import open_dataset
    from prism.data.episodes import read_in_parts, step_bytes

    source = open_dataset(path, fps=10.0 if path.is_dir() and (path / "metadata.yaml").exists() else None)
    steps = max(1, min(2**23 // step_bytes(source.sensors), 4096))
    found = []
    for episode in range(min(len(source.lengths), 20)):
        for where, part in read_in_parts(source, episode, steps):
            content = {name: (values.shape, zlib.crc32(values.tobytes())) for name, values in part.streams.items()}
            if any(SECRET[:16] in values.tobytes() for values in (part.actions, *part.streams.values())):
                raise Leak
            found.append((content, zlib.crc32(part.actions.tobytes())))
            if where.stop >= _STEPS:
                break
    return source.sensors, source.fps, found


def read_checkpoint(path: Path) -> Any:
    from prism.experiments.run_folder import Run

    run = Run(path)
    policy = run.policy("cpu")
    return run.has_experiment and str(run.experiment), {
        k: zlib.crc32(v.numpy().tobytes()) for k, v in policy.state_dict().items()
    }


def read_evaluation(path: Path) -> Any:
    from prism.evaluation.results import load_result

    return str(load_result(path))


def read_limits(path: Path) -> Any:
    from prism.robots.limits import Limits
    from prism.robots.limits import read_limits as read

    own = Limits(position=((-1.0, 1.0),) * 2, speed=(1.0, 1.0), acceleration=(2.0, 2.0))
    return read(path, own, 2)


def write_run(path: Path) -> Path:
    from prism.experiments.recipes import FILE, state

    fakes: Any = importlib.import_module("tests.policy_fakes")
    fakes.save_run(path, fakes.small_policy())
    (path / FILE).write_bytes(state("pusht").encoded())
    return path


def write_evaluation(path: Path) -> Path:
    from prism.evaluation.results import save_result

    save_result(path, importlib.import_module("tests.test_evaluation_report").make_result("pusht"))
    return path


def write_limits(path: Path) -> Path:
    path.write_text(json.dumps({"position": [[-0.5, 0.5], [-0.5, 0.5]], "speed": [0.1, 0.2]}))
    return path


def write_recording(path: Path) -> Path:
    from prism.data.formats.store_writer import DatasetWriter
    from prism.sensors import SensorSpec

    for episode in range(2):
        sensors = [SensorSpec("proprio", "vector", (3,)), SensorSpec("rgb", "rgb", (8, 8, 3))]
        with DatasetWriter(path / f"episode-{episode:06d}", sensors, 2, 10.0, "test") as writer:
            rng = np.random.default_rng(episode)
            pictures = rng.integers(0, 255, (6, 8, 8, 3)).astype(np.uint8)
            writer.add({"proprio": rng.normal(size=(6, 3)), "rgb": pictures}, rng.normal(size=(6, 2)))
    return path


# what it is called, how it is written and read, and whether checksums cover it
FORMATS: dict[str, tuple[str, Callable[[Path], Path], Callable[[Path], Any], bool]] = {
    **{kind: (name, write, read_dataset, checked) for kind, (name, write, checked) in fuzz_data.FORMATS.items()},
    "recording": ("set", write_recording, read_dataset, True),
    "run": ("run", write_run, read_checkpoint, False),  # experiment.json has no checksum
    "evaluation": ("pusht.npz", write_evaluation, read_evaluation, True),
    "limits": ("limits.json", write_limits, read_limits, False),
}


# ------------------------------------------------------------------ what strangers prepare


@dataclass(frozen=True)
class Place:
    """Where a case may put things: the dataset, and the world outside it."""

    path: Path
    secret: Path
    ran: Path


Attack = Callable[[Place], Any]


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def edit(file: Path, **changes: Any) -> None:
    data = json.loads(file.read_text())
    data.update(changes)
    data.pop("own_checksum", None)
    file.write_text(json.dumps(data))


def _objects(shape: str = "()") -> bytes:
    head = f"{{'descr': '|O', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + head.ljust(117) + b"\n"


def _npy(shape: str, descr: str = "<f4") -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + head.ljust(117) + b"\n"


def _deep(depth: int = 100_000) -> str:
    return "[" * depth + "]" * depth


def _many() -> str:
    return "[" + ",".join(["{}"] * 6_000_000) + "]"


def text_attacks(*names: str) -> dict[str, Attack]:
    """Of JSON files."""
    found: dict[str, Attack] = {}
    for name in names:

        def at(place: Place, name: str = name) -> Path:
            return place.path / name if place.path.is_dir() else place.path

        def replace(place: Place, make: Callable[[], str], at: Any = at) -> None:
            at(place).write_text(make())

        def fifo(place: Place, at: Any = at) -> None:
            at(place).unlink()
            os.mkfifo(at(place))

        def link(place: Place, at: Any = at) -> None:
            at(place).unlink()
            at(place).symlink_to(place.secret)

        def sparse(place: Place, at: Any = at) -> None:
            with at(place).open("r+b") as file:
                file.truncate(20 * 2**30)

        def escape(place: Place, at: Any = at) -> None:
            at(place).write_text('{"\\u001b[31mred": 1}')

        def binary(place: Place, at: Any = at) -> None:
            at(place).write_bytes(b"\xff\xfe{}\0")

        found |= {
            f"{name}: nested": partial(replace, make=lambda: _deep()),
            f"{name}: a nested value": partial(replace, make=lambda: '{"features": ' + _deep() + "}"),
            f"{name}: millions of objects": partial(replace, make=lambda: '{"sensors": ' + _many() + "}"),
            f"{name}: long number": partial(replace, make=lambda: '{"fps": ' + "9" * 5_000_000 + "}"),
            f"{name}: no UTF-8": binary,
            f"{name}: NaN": partial(replace, make=lambda: '{"fps": NaN, "format_version": 1e999}'),
            f"{name}: a pipe": fifo,
            f"{name}: a link outside": link,
            f"{name}: 20 GB of nothing": sparse,
            f"{name}: escape codes": escape,
        }
    return found


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _linked(file: Path, target: Path) -> None:
    file.unlink()
    file.symlink_to(target)


def link_attack(name: str) -> Attack:
    """The file, moved outside and linked."""

    def attack(place: Place) -> None:
        file = place.path / name
        shutil.move(file, place.secret.parent / "moved")
        file.symlink_to(place.secret.parent / "moved")

    return attack


def store_attacks(folder: str = "") -> dict[str, Attack]:
    manifest = f"{folder}dataset.json"

    def says(**changes: Any) -> Attack:
        return lambda place: edit(place.path / manifest, **changes)

    def rows(place: Place) -> None:
        edit(place.path / manifest, episode_ends=[10**12])

    def pickled(place: Place) -> None:
        (place.path / f"{folder}actions.npy").write_bytes(_objects("(1,)") + pickle.dumps(Runs(place.ran)))

    def header(place: Place) -> None:
        (place.path / f"{folder}actions.npy").write_bytes(_npy("(" + "1," * 40 + ")"))

    def sensor(place: Place, **changes: Any) -> None:
        data = json.loads((place.path / manifest).read_text())
        data["sensors"][0].update(changes)
        edit(place.path / manifest, sensors=data["sensors"])

    return text_attacks(manifest) | {
        "rows": rows,
        "action_dim": says(action_dim=10**9),
        "fps": says(fps=1e300),
        "pickled actions": pickled,
        "dimensions": header,
        "a sensor's name is a path": lambda p: sensor(p, name="../../secret"),
        "a sensor's name is absolute": lambda p: sensor(p, name=str(p.secret)),
        "a sensor's shape": lambda p: sensor(p, shape=[10**9]),
        "a video outside": says(videos={"../../secret": {"frames": 5, "fps": 10, "crc32": 0}}),
        "actions are a link": link_attack(f"{folder}actions.npy"),
    }


def zarr_attacks() -> dict[str, Attack]:
    import numcodecs

    def array(place: Place, key: str = "data/state", **changes: Any) -> None:
        edit(place.path / key / ".zarray", **changes)

    def chunks(place: Place, content: bytes, key: str = "data/state") -> None:
        for file in (place.path / key).iterdir():
            if not file.name.startswith("."):
                file.write_bytes(content)

    def codec(name: str, **more: Any) -> Attack:
        def attack(place: Place) -> None:
            values = np.empty(1, object)
            values[0] = Runs(place.ran)
            chunks(place, pickle.dumps(values, 5), "data/action")
            array(place, "data/action", compressor=None, filters=[{"id": name, **more}], dtype="|O")

        return attack

    def compressed(name: str, content: Callable[[], bytes]) -> Attack:
        def attack(place: Place) -> None:
            chunks(place, content())
            array(place, compressor={"id": name, **({"cname": "zstd"} if name == "blosc" else {})})

        return attack

    def zeros(name: str) -> Callable[[], bytes]:
        return lambda: bytes(numcodecs.get_codec({"id": name}).encode(np.zeros(_BOMB, np.uint8)))

    def large(place: Place) -> None:
        for child in (one for one in (place.path / "data").iterdir() if one.is_dir()):
            data = json.loads((child / ".zarray").read_text())
            shape = [10**9, *data["shape"][1:]]
            array(place, f"data/{child.name}", shape=shape, chunks=shape)

    def no_chunks(place: Place) -> None:
        for child in (one for one in (place.path / "data").iterdir() if one.is_dir()):
            data = json.loads((child / ".zarray").read_text())
            array(place, f"data/{child.name}", shape=[10**9, *data["shape"][1:]])

    def wide(place: Place) -> None:
        array(place, shape=[23, 10**9], chunks=[1, 10**9])

    def sharded(place: Place) -> None:
        nested = [{"name": "numcodecs.pickle", "configuration": {}}]
        place_file = place.path / "data/action"
        shutil.rmtree(place_file)
        place_file.mkdir()
        (place_file / "zarr.json").write_text(
            json.dumps({
                "zarr_format": 3, "node_type": "array", "shape": [23, 2], "data_type": "float32", "fill_value": 0,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [23, 2]}},
                "chunk_key_encoding": {"name": "default"}, "attributes": {},
                "codecs": [{"name": "sharding_indexed", "configuration": {
                    "chunk_shape": [23, 2], "codecs": nested, "index_codecs": [{"name": "bytes"}]}}],
            })
        )  # fmt: skip

    found: dict[str, Attack] = {
        f"codec {name}": codec(name) for name in ("pickle", "json2", "categorize", "msgpack2", "no-such-codec")
    }
    found |= {
        f"bomb {name}": compressed(name, zeros(name))
        for name in ("gzip", "zlib", "bz2", "lzma", "zstd", "lz4", "blosc")
    }
    found |= text_attacks("data/action/.zarray", "data/.zgroup", "meta/episode_ends/.zarray")
    found |= {
        "one large chunk": large,
        "no chunks": no_chunks,
        "wide rows": wide,
        "sharded pickle": sharded,
        "a chunk is a link": lambda p: link_attack("data/state/0.0")(p),
        "data is a link": lambda p: _swap(p, "data/state"),
        "two compressors": lambda p: array(p, compressor={"id": "zlib"}, filters=[{"id": "gzip"}]),
        "ends": lambda p: array(p, "meta/episode_ends", shape=[10**9], chunks=[10**9]),
    }
    return found


def _swap(place: Place, name: str) -> None:
    """A folder, moved outside and linked."""
    target = place.secret.parent / "moved-folder"
    shutil.move(place.path / name, target)
    (place.path / name).symlink_to(target)


def zip_attacks() -> dict[str, Attack]:
    def change(work: Callable[[dict[str, bytes], Place], None], method: int = zipfile.ZIP_STORED) -> Attack:
        def attack(place: Place) -> None:
            with zipfile.ZipFile(place.path) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            work(members, place)
            with zipfile.ZipFile(place.path, "w", method) as archive:
                for name, content in members.items():
                    archive.writestr(name, content)

        return attack

    def pickled(members: dict[str, bytes], place: Place) -> None:
        data = json.loads(members["data/action/.zarray"])
        data.update(compressor={"id": "pickle"}, filters=None, dtype="|O")
        members["data/action/.zarray"] = json.dumps(data).encode()

    def bomb(members: dict[str, bytes], place: Place) -> None:
        for name in list(members):
            if name.startswith("data/state/") and not name.endswith((".zarray", ".zattrs")):
                members[name] = bytes(_BOMB)

    def lying(place: Place) -> None:
        """Members that say they are small, and are not."""
        change(bomb, zipfile.ZIP_DEFLATED)(place)
        content = bytearray(place.path.read_bytes())
        content = content.replace(struct.pack("<I", _BOMB), struct.pack("<I", 80))
        place.path.write_bytes(content)

    def dots(members: dict[str, bytes], place: Place) -> None:
        members["../../../secret/zarr.json"] = b"{}"
        members["data/../../x/.zarray"] = b"{}"
        del members["data/action/.zarray"]

    return {
        "codec pickle": change(pickled),
        "bomb": change(bomb, zipfile.ZIP_DEFLATED),
        "bomb that lies": lying,
        "names that climb": change(dots),
        "metadata bomb": change(
            lambda m, _: m.update({".zmetadata": b" " * _BOMB, ".zgroup": b" " * _BOMB}), zipfile.ZIP_DEFLATED
        ),
        "no zip": lambda p: p.path.write_bytes(SECRET),
        "empty": lambda p: p.path.write_bytes(b""),
        "a pipe": lambda p: _pipe(p.path),
    }


def hdf5_attacks() -> dict[str, Attack]:
    import h5py

    def change(work: Callable[[Any, Place], None]) -> Attack:
        def attack(place: Place) -> None:
            with h5py.File(place.secret.parent / "other.hdf5", "w") as other:
                other["object"] = np.frombuffer((SECRET * 20)[:560]).reshape(7, 10)
            with h5py.File(place.path, "r+") as file:
                work(file, place)

        return attack

    KEY = "data/demo_0/obs/robot0_eef_pos"

    def external(file: Any, place: Place) -> None:
        del file[KEY]
        file.create_dataset(KEY, (7, 3), "f8", external=[(str(place.secret), 0, 168)])

    def linked(file: Any, place: Place) -> None:
        del file[KEY]
        file[KEY] = h5py.ExternalLink(str(place.secret.parent / "other.hdf5"), "/object")

    def group(file: Any, place: Place) -> None:
        del file["data/demo_0"]
        file["data/demo_0"] = h5py.ExternalLink(str(place.secret.parent / "other.hdf5"), "/")

    def soft(file: Any, place: Place) -> None:
        del file[KEY]
        file["a/b/c"] = h5py.ExternalLink(str(place.secret.parent / "other.hdf5"), "/object")
        file[KEY] = h5py.SoftLink("/a/b/c")

    def virtual(file: Any, place: Place) -> None:
        del file[KEY]
        layout = h5py.VirtualLayout((7, 3), "f8")
        layout[:] = h5py.VirtualSource(str(place.secret.parent / "other.hdf5"), "object", (7, 10))[:, :3]
        file.create_virtual_dataset(KEY, layout)

    def loop(file: Any, place: Place) -> None:
        file["data/demo_0/obs/again"] = file["data"]
        file["data/demo_0/around"] = h5py.SoftLink("/data/demo_0/around")

    def bomb(file: Any, place: Place) -> None:
        del file[KEY]
        data = file.create_dataset(KEY, (7, 3), "f8", chunks=(7, 3), compression="gzip")
        data.id.write_direct_chunk((0, 0), zlib.compress(bytes(_BOMB)))

    def shape(file: Any, place: Place) -> None:
        for key, size in (("actions", (10**9, 7)),):
            del file[f"data/demo_0/{key}"]
            file.create_dataset(f"data/demo_0/{key}", size, "f8", chunks=(10**6, 7), compression="gzip")
        file["data/demo_0"].attrs["num_samples"] = 10**9
        del file["data"].attrs["total"]

    def wide(file: Any, place: Place) -> None:
        for demo, length in enumerate(data_files.LENGTHS):
            key = f"data/demo_{demo}/obs/robot0_eef_pos"
            del file[key]
            file.create_dataset(key, (length, 10**9), "f8", chunks=(1, 10**5))

    def objects(file: Any, place: Place) -> None:
        del file[KEY]
        file.create_dataset(KEY, (7,), h5py.string_dtype())

    def total(file: Any, place: Place) -> None:
        file["data"].attrs["total"] = "x" * 100

    def env(file: Any, place: Place) -> None:
        file["data"].attrs["env_args"] = _deep(20_000)
        file["mask/long"] = np.zeros(10, "S1000")

    work = (external, linked, group, soft, virtual, loop, bomb, shape, wide, objects, total, env)
    found: dict[str, Attack] = {one.__name__: change(one) for one in work}
    return found | {
        "text": lambda p: p.path.write_bytes(SECRET),
        "signature alone": lambda p: p.path.write_bytes(b"\x89HDF\r\n\x1a\n"),
        "empty": lambda p: p.path.write_bytes(b""),
    }


def calvin_attacks() -> dict[str, Attack]:
    names = "lang_annotations/auto_lang_ann.npy"
    frame = "episode_0001237.npz"

    def annotations(payload: Callable[[Place], bytes]) -> Attack:
        return lambda place: (place.path / names).write_bytes(_objects() + payload(place)) and None

    def ids(content: Callable[[Place], bytes]) -> Attack:
        return lambda place: (place.path / "ep_start_end_ids.npy").write_bytes(content(place))

    pairs = b")" + b"q\x00h\x00\x86" * 60
    lists = b"]q\x00(" + b"h\x00" * 100_000 + b"e."

    def member(body: bytes | None, stated: int | None = None) -> Attack:
        """None: a bomb."""

        def attack(place: Place) -> None:
            content = bytes(_BOMB) if body is None else body
            with zipfile.ZipFile(place.path / frame, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("rel_actions.npy", content)
            if stated is not None:
                packed = (place.path / frame).read_bytes()
                packed = packed.replace(struct.pack("<I", len(content)), struct.pack("<I", stated))
                (place.path / frame).write_bytes(packed)

        return attack

    def large(place: Place) -> None:
        member(_npy("(78643200,)") + bytes(_BOMB))(place)  # made here, in the child
        for file in place.path.glob("*.npz"):
            if file.name != frame:
                shutil.copy(place.path / frame, file)

    return {
        "runs": annotations(lambda p: pickle.dumps(Runs(p.ran))),
        "runs inside": annotations(lambda p: pickle.dumps({"language": {"ann": [Runs(p.ran)]}})),
        "protocol 0 runs": annotations(lambda p: pickle.dumps(Runs(p.ran), 0)),
        "system": annotations(lambda p: b"cos\nsystem\n(S'touch %s'\ntR." % str(p.ran).encode()),
        "memo": annotations(lambda p: b"\x80\x04}r\xff\xff\xff\x0d."),
        "memo in text": annotations(lambda p: b"\x80\x02}p4000000000\n."),
        "long bytes": annotations(lambda p: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x."),
        "long text": annotations(lambda p: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 34) + b"x."),
        "frame": annotations(lambda p: b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"."),
        "bytearray": annotations(lambda p: b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b"x."),
        "key for ever": annotations(lambda p: b"\x80\x04}" + pairs + b"K\x01s."),
        "text for ever": annotations(lambda p: b"\x80\x04cnumpy\ndtype\n" + pairs + b"\x85R."),
        "list of itself": annotations(lambda p: b"\x80\x04" + lists),
        "reduce a list": annotations(lambda p: b"\x80\x04](R."),
        "extension": annotations(lambda p: b"\x80\x02\x82\x01."),
        "persistent": annotations(lambda p: b"Pid\n."),
        "deep": annotations(lambda p: b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."),
        "pickled ids": ids(lambda p: _objects("(1,)") + pickle.dumps(Runs(p.ran))),
        "ids of any size": lambda p: np.save(p.path / "ep_start_end_ids.npy", np.array([[0, 10**11]])),
        "ids' header": ids(lambda _: _npy("(10**9, 2)", "<i8")),
        "header is code": ids(lambda _: _npy("__import__('os').system('true')")),
        "a frame's bomb": member(None),
        "a frame's bomb that lies": member(None, 100),
        "large frames": large,
        "a frame is a link": link_attack(frame),
        "a frame is a pipe": lambda p: _pipe(p.path / frame),
        "annotations are a link": link_attack(names),
        "pickled frame": member(_objects("(1,)") + b"cos\nsystem\n(S'true'\ntR."),
    }


def lerobot_attacks(version: str) -> dict[str, Attack]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    v3 = version == "v3"
    data = "data/chunk-000/file-000.parquet" if v3 else "data/chunk-000/episode_000000.parquet"
    video = (
        f"videos/{data_files.CAMERA}/chunk-000/file-000.mp4"
        if v3
        else f"videos/chunk-000/{data_files.CAMERA}/episode_000000.mp4"
    )

    def info(**changes: Any) -> Attack:
        return lambda place: edit(place.path / "meta/info.json", **changes)

    def feature(key: str, **changes: Any) -> Attack:
        def attack(place: Place) -> None:
            file = place.path / "meta/info.json"
            found = json.loads(file.read_text())
            found["features"][key].update(changes)
            file.write_text(json.dumps(found))

        return attack

    def rows(place: Place) -> None:
        """A column of 400 MB in a few kB."""
        file = place.path / data
        table = pq.read_table(file)
        count = 10**7
        columns = {name: pa.array(np.zeros(count, np.float32)) for name in table.column_names}
        pq.write_table(pa.table(columns), file, compression="zstd", row_group_size=count)

    def lines(place: Place, text: str) -> None:
        (place.path / "meta/episodes.jsonl").write_text(text)

    def outside(key: str, template: str) -> Attack:
        return lambda p: edit(p.path / "meta/info.json", **{key: template.replace("SECRET", str(p.secret.parent))})

    found = text_attacks("meta/info.json") | {
        "data_path climbs": outside("data_path", "../../secret/x.parquet"),
        "data_path is absolute": outside("data_path", "SECRET/x.parquet"),
        "data_path by a key": outside("video_path", "{video_key}/../../../secret/x.mp4"),
        "video_path is absolute": outside("video_path", "SECRET/{video_key}.mp4"),
        "video_path is a URL": info(video_path="http://127.0.0.1:9/{video_key}.mp4"),
        "video_path is a list of files": info(video_path="concat:meta/info.json|meta/info.json"),
        "format of a template": info(data_path="data/{chunk_index.__class__}/x.parquet"),
        "a shape": feature("action", shape=[1 << 19]),
        "a shape of another size": feature("observation.state", shape=[10**9]),
        "a video's shape": feature(data_files.CAMERA, shape=[1 << 19, 1 << 19, 3]),
        "dtype is object": feature("action", dtype="object"),
        "rows": rows,
        "data is a link": link_attack(data),
        "video is a link": link_attack(video),
        "video is a playlist": lambda p: (p.path / video).write_text(
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{p.secret}\n#EXT-X-ENDLIST\n"
        ),
        "video is a list for ffmpeg": lambda p: (p.path / video).write_text(
            f"ffconcat version 1.0\nfile '{p.secret}'\n"
        ),
        "video is text": lambda p: (p.path / video).write_bytes(SECRET),
        "parquet is text": lambda p: (p.path / data).write_bytes(SECRET),
        "parquet is a pipe": lambda p: _pipe(p.path / data),
    }
    if v3:
        found |= {"episodes": lambda p: _large_parquet(p.path / "meta/episodes/chunk-000/file-000.parquet")}
        return found | {"tasks": lambda p: _large_parquet(p.path / "meta/tasks.parquet")}
    return (
        found
        | text_attacks("meta/episodes.jsonl")
        | {
            "empty objects": lambda p: lines(p, "{}\n" * 8_000_000),
            "a length": lambda p: lines(p, '{"episode_index": 0, "length": 2147483647}\n'),
            "one long line": lambda p: lines(p, " " * 40_000_000),
        }
    )


def _large_parquet(file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    old = pq.read_table(file)
    count = 10**7
    columns = {name: pa.array(np.zeros(count, np.int64)) for name in old.column_names[:3]}
    pq.write_table(pa.table(columns), file, compression="zstd", row_group_size=count)


def bag_attacks() -> dict[str, Attack]:
    def first(place: Place, end: str) -> Path:
        return next(file for file in sorted(place.path.rglob("*")) if file.name.endswith(end))

    def yaml(text: str) -> Attack:
        return lambda p: first(p, "metadata.yaml").write_text(text) and None

    def climbs(place: Place) -> None:
        file = first(place, "metadata.yaml")
        shutil.copy(
            next(f for f in place.path.rglob("*") if f.suffix in (".mcap", ".db3")), place.secret.parent / "x.db3"
        )
        text = file.read_text()
        names = [f.name for f in place.path.rglob("*") if f.suffix in (".mcap", ".db3")]
        for name in names:
            text = text.replace(name, "../../secret/x.db3")
        file.write_text(text)

    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    return {
        "yaml runs": yaml("!!python/object/apply:os.system ['true']"),
        "yaml laughs": yaml(laughs),
        "yaml is deep": yaml("[" * 50_000),
        "yaml is a link": lambda p: _linked(first(p, "metadata.yaml"), p.secret),
        "names climb": climbs,
        "yaml is a pipe": lambda p: _pipe(first(p, "metadata.yaml")),
    }


def run_attacks() -> dict[str, Attack]:
    step = "checkpoints/step-00000001"

    def weights(content: bytes) -> Attack:
        def attack(place: Place) -> None:
            (place.path / step / "model.safetensors").write_bytes(content)
            sums = json.loads((place.path / step / "checksums.json").read_text())
            sums["model.safetensors"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            (place.path / step / "checksums.json").write_text(json.dumps(sums))

        return attack

    def config(change: Callable[[dict[str, Any]], None]) -> Attack:
        def attack(place: Place) -> None:
            file = place.path / step / "config.json"
            data = json.loads(file.read_text())
            change(data["policy"])
            content = json.dumps(data).encode()
            file.write_bytes(content)
            sums = json.loads((place.path / step / "checksums.json").read_text())
            sums["config.json"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            (place.path / step / "checksums.json").write_text(json.dumps(sums))

        return attack

    def header(text: str, body: bytes = b"") -> bytes:
        return struct.pack("<Q", len(text)) + text.encode() + body

    def wide(policy: dict[str, Any]) -> None:
        policy["action"] = policy.get("action", {})
        for key in ("pred_horizon", "obs_horizon", "action_dim"):
            policy[key] = 10**9

    def deep(policy: dict[str, Any]) -> None:
        def change(value: Any) -> None:
            if isinstance(value, dict):
                for key, inner in value.items():
                    if key in ("width", "layers", "heads", "dim", "hidden") and isinstance(inner, int):
                        value[key] = 1 << 20
                    change(inner)

        change(policy)

    return text_attacks("experiment.json", f"{step}/config.json", f"{step}/checksums.json") | {
        "a pickle": weights(pickle.dumps(Runs(Path("/dev/null")))),
        "header of 1 TB": weights(struct.pack("<Q", 1 << 40) + b"{}"),
        "header lies": weights(
            header('{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}')
        ),
        "header overlaps": weights(
            header(
                '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
                bytes(8),
            )
        ),
        "horizons": config(wide),
        "widths": config(deep),
        "a method that is a path": config(lambda p: p.update(method="../../secret")),
        "weights are a link": link_attack(f"{step}/model.safetensors"),
        "weights are a pipe": lambda p: _pipe(p.path / step / "model.safetensors"),
        "experiment is a path": lambda p: edit(p.path / "experiment.json", policy="../../secret"),
    }


def evaluation_attacks() -> dict[str, Attack]:
    def member(name: str, content: bytes) -> Attack:
        def attack(place: Place) -> None:
            with zipfile.ZipFile(place.path) as archive:
                members = {one: archive.read(one) for one in archive.namelist()}
            members[name] = content
            with zipfile.ZipFile(place.path, "w", zipfile.ZIP_DEFLATED) as archive:
                for one, body in members.items():
                    archive.writestr(one, body)

        return attack

    return {
        "bomb": lambda p: member("meta.npy", _npy("(314572800,)", "|u1") + bytes(_BOMB))(p),
        "pickled": member("meta.npy", _objects("(1,)") + b"cos\nsystem\n(S'true'\ntR."),
        "nested meta": member("meta.npy", _npy(f"({200_000},)", "|u1") + _deep().encode()),
        "no meta": member("meta.npy", _npy("(2,)", "|u1") + b"[]"),
        "no zip": lambda p: p.path.write_bytes(SECRET) and None,
        "header": member("meta.npy", _npy("(10000000000,)", "|u1")),
    }


def attacks() -> list[tuple[str, str, Attack]]:
    """(format, name, what is done)."""
    found = {
        "prism": store_attacks(),
        "recording": store_attacks("episode-000000/"),
        "zarr": zarr_attacks(),
        "zarr_zip": zip_attacks(),
        "robomimic": hdf5_attacks(),
        "calvin": calvin_attacks(),
        "lerobot_v21": lerobot_attacks("v21"),
        "lerobot_v3": lerobot_attacks("v3"),
        "rosbag": bag_attacks(),
        "run": run_attacks(),
        "evaluation": evaluation_attacks(),
        "limits": text_attacks("limits.json"),
    }
    del found["limits"]["limits.json: a link outside"]  # the user names this file: where it leads is the user's choice
    return [(kind, name, attack) for kind, several in found.items() for name, attack in several.items()]


# ------------------------------------------------------------------ one of them, in a process of its own


def _memory(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1e3
    return 0.0


def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, with `mb`, `seconds`, `wall`; {"crashed": why} where the process dies."""
    ours, theirs = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.close(ours)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = _memory("VmRSS")
            found = work()
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = resource.getrusage(resource.RUSAGE_SELF)
            found["mb"] = max(_memory("VmHWM") - before, children.ru_maxrss / 1e3 - before)
            found["seconds"] = used.ru_utime + used.ru_stime + children.ru_utime + children.ru_stime
            os.write(theirs, json.dumps(found).encode()[:60000])
        except BaseException as error:  # of the preparation: `judge` answers for what is read
            failed = {"end": "failed", "why": f"{type(error).__name__}: {error}"[:300], "mb": 0.0, "seconds": 0.0}
            os.write(theirs, json.dumps(failed).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    answer = b""
    ready, _, _ = select.select([ours], [], [], SECONDS)
    if ready:
        answer = os.read(ours, 65536)
    else:
        os.killpg(child, signal.SIGKILL)
    os.close(ours)
    _, status = os.waitpid(child, 0)
    wall = time.monotonic() - start
    if not answer:
        why = f"no answer in {SECONDS} s" if not ready else f"status {status}"
        return {"end": "crashed", "why": why, "mb": 0.0, "seconds": wall, "wall": wall}
    return {**json.loads(answer), "wall": wall}


def judge(read: Callable[[Path], Any], path: Path, expected: str | None) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    try:
        found = read(path)
    except PrismError as error:
        clear = "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1500
        leaks = SECRET[:16].decode() in str(error)
        return {"end": "leaked" if leaks else "refused" if clear else "unclear", "why": str(error)[:400]}
    except Leak:
        return {"end": "leaked", "why": ""}
    except BaseException as error:
        return {"end": "unclear", "why": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"end": "unharmed" if _digest(found) == expected else "changed", "why": ""}


def _made(write: Callable[[Path], Path], read: Callable[[Path], Any], path: Path) -> dict[str, Any]:
    return {"end": "made", "why": _digest(read(write(path)))}


def _prepared(attack: Attack, place: Place) -> dict[str, Any]:
    attack(place)
    return {"end": "made", "why": ""}


def _digest(found: Any) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


class Watch:
    """Whether somebody opened a file of the folder, the kernel says (inotify)."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK)
        self._libc.inotify_add_watch(self._file, os.fsencode(folder), 0x20 | 0x1)  # IN_OPEN, IN_ACCESS

    def opened(self) -> bool:
        try:
            return bool(os.read(self._file, 65536))
        except BlockingIOError:
            return False


def run(config: Config, console: Console) -> dict[str, Any]:
    for module in _IMPORTS:
        __import__(module)
    prepared: list[tuple[str, str, Attack | None]] = list(attacks())
    rest = max(0, config.count - len(prepared))
    chosen = prepared[: config.count]
    kinds = list(FORMATS)
    chosen += [(kinds[i % len(kinds)], f"damage {i}", None) for i in range(rest)]
    ends: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    faults: list[str] = []
    counts: Counter[str] = Counter()
    worst = {"mb": (0.0, ""), "seconds": (0.0, ""), "wall": (0.0, "")}
    with tempfile.TemporaryDirectory() as home:
        root = Path(home)
        expected: dict[str, str] = {}
        for kind, (name, write, read, _) in FORMATS.items():
            folder = root / "good" / kind
            folder.mkdir(parents=True)
            # written in a child too: libraries start threads, and a process with threads must not fork
            made = in_a_process(partial(_made, write, read, folder / name))
            if made["end"] != "made":
                raise PrismError(f"{kind}: its own file cannot be read ({made['why']})")
            expected[kind] = made["why"]
        for number, (kind, name, attack) in enumerate(track(chosen, "files", console=console, transient=True)):
            folder, secret = root / "case" / kind, root / "case" / "secret"
            shutil.rmtree(root / "case", ignore_errors=True)
            secret.mkdir(parents=True)
            (secret / "secret").write_bytes(SECRET * 100)
            shutil.copytree(root / "good" / kind, folder, symlinks=True)
            name_of, _, read, checked = FORMATS[kind]
            place = Place(folder / name_of, secret / "secret", root / "case" / "ran")
            if attack is None:
                _damage(place.path, np.random.default_rng([config.seed, number]))
            else:
                prepared_it = in_a_process(partial(_prepared, attack, place))
                if prepared_it["end"] != "made":
                    raise PrismError(f"{kind}, {name}: could not be prepared ({prepared_it['why']})")
            watch = Watch(secret)
            found = in_a_process(partial(judge, read, place.path, expected[kind]))
            end = found["end"]
            outside, ran = watch.opened() or end == "leaked", place.ran.exists()
            os.close(watch._file)
            silent = end in ("unharmed", "changed") if attack is not None else end == "changed" and checked
            ends[kind][end] += 1
            counts.update(
                silent=silent, unclear=end == "unclear", crashed=end == "crashed", read_outside=outside, ran=ran
            )
            for key in worst:
                worst[key] = max(worst[key], (found[key], f"{kind}: {name}"))
            if silent or ran or outside or end in ("unclear", "crashed") or found["seconds"] > 2 or found["mb"] > 250:
                said = f"{found['mb']:.0f} MB, {found['seconds']:.1f} s"
                faults.append(
                    f"{kind}: {name}: {end}{' ran' * ran}{' outside' * outside}, {said}: {found['why'][:160]}"
                )
                console.print(faults[-1], highlight=False, markup=False)
    return {
        "tried": len(chosen),
        "hostile": min(len(prepared), config.count),
        **{end: sum(ends[kind][end] for kind in kinds) for end in ("refused", "unharmed", "changed")},
        **{key: counts[key] for key in ("silent", "unclear", "crashed", "read_outside", "ran")},
        "max_mb": worst["mb"][0],
        "max_seconds": worst["seconds"][0],
        "max_wall_seconds": worst["wall"][0],
        "worst": {key: name for key, (_, name) in worst.items()},
        "formats": {kind: dict(found) for kind, found in ends.items()},
        "faults": faults,
        "settings": config.settings(),
        **run_info(config.seed),
    }


def _damage(path: Path, rng: np.random.Generator) -> None:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    weights = np.array([max(file.stat().st_size, 1) for file in files]) ** 0.5
    file = files[int(rng.choice(len(files), p=weights / weights.sum()))]
    original = file.read_bytes()
    while (content := fuzz_data.damage(original, rng)) == original:
        pass
    file.write_bytes(content)


def show(result: dict[str, Any], console: Console) -> None:
    for key in (
        "tried",
        "hostile",
        "refused",
        "unharmed",
        "changed",
        "silent",
        "unclear",
        "crashed",
        "read_outside",
        "ran",
    ):
        console.print(f"{key}: {result[key]}", highlight=False)
    for key in ("mb", "seconds", "wall"):
        name = "max_wall_seconds" if key == "wall" else f"max_{key}"
        console.print(f"{name}: {result[name]:.2f} ({result['worst'][key]})", highlight=False, markup=False)
