"""What users' disks really hold: each problem is one line that names the file, the episode and the key."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.errors import PrismError
from tests.data_fakes import read_all
from tests.data_files import CAMERA, table, write_calvin, write_lerobot_v3, write_lerobot_v21, write_robomimic


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(PrismError) as error:
        read_all(path)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def cut(file: Path, keep: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def hdf5(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        import h5py

        with h5py.File(path, "r+") as file:
            change(file)

    return apply


def replace(key: str, values: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[key]
        file[key] = values

    return change


def drop(key: str) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[key]

    return change


NAN = np.zeros((3, 7))
NAN[2, 1] = np.nan
ROBOMIMIC: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing demo": (hdf5(drop("data/demo_1")), ("says 22 samples", "have 19", "demo_1 is missing")),
    "mask of a missing demo": (
        hdf5(lambda f: (f["data"].attrs.pop("total"), drop("data/demo_2")(f))),
        ("'mask/train' lists demo_2",),
    ),
    "no data": (hdf5(drop("data")), ("group 'data' is missing",)),
    "no actions": (hdf5(drop("data/demo_1/actions")), ("episode 1", "demo_1/actions")),
    "no obs": (hdf5(drop("data/demo_2/obs")), ("episode 2", "demo_2/obs")),
    "a key less": (hdf5(drop("data/demo_2/obs/object")), ("episode 2", "'object'")),
    "short images": (
        hdf5(replace("data/demo_1/obs/agentview_image", np.zeros((2, 16, 16, 3), np.uint8))),
        ("episode 1", "'agentview_image'", "(2, 16, 16, 3)"),
    ),
    "other dtype": (
        hdf5(replace("data/demo_1/obs/robot0_eef_pos", np.zeros((3, 3), np.int16))),
        ("episode 1", "'robot0_eef_pos'", "int16"),
    ),
    "NaN": (hdf5(replace("data/demo_1/actions", NAN)), ("episode 1 (demo_1)", "'actions'", "step 2")),
    "samples": (hdf5(lambda f: f["data/demo_0"].attrs.modify("num_samples", 8)), ("data", "23", "22")),
    "truncated": (lambda p: cut(p, 0.6), ("truncated or not an HDF5 file",)),
    "empty": (lambda p: cut(p, 0), ("truncated or not an HDF5 file",)),
}


@pytest.mark.parametrize("name", ROBOMIMIC)
def test_robomimic(tmp_path: Path, name: str) -> None:
    change, parts = ROBOMIMIC[name]
    path = write_robomimic(tmp_path / "set.hdf5")
    change(path)
    if name == "samples":
        parts = ("says 22 samples", "have 23")
    refused(path, str(path), *parts)


def npz(number: int, **changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / f"episode_{number:07d}.npz"
        with np.load(file) as archive:
            content = dict(archive)
        content = {**content, **changes}
        np.savez(file, **{key: value for key, value in content.items() if value is not None})

    return change


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def annotate(content: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path / "lang_annotations/auto_lang_ann.npy", content, allow_pickle=True)


FRAME = "episode_0001237.npz"
CALVIN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a frame missing in the middle": (
        lambda p: (p / FRAME).unlink(),
        (FRAME, "not found", "episode 0 lacks its step 3"),
    ),
    "the last frame missing": (lambda p: (p / "episode_0001240.npz").unlink(), ("episode 0 lacks its step 6",)),
    "truncated zip": (lambda p: cut(p / FRAME, 0.7), (FRAME, "episode 0, step 3")),
    "a key missing": (npz(1237, rgb_static=None), (FRAME, "episode 0, step 3", "'rgb_static': is missing")),
    "another shape": (npz(1237, robot_obs=np.zeros(14)), (FRAME, "'robot_obs'", "(14,)")),
    "objects": (npz(1237, robot_obs=np.array([{}] * 15)), (FRAME, "'robot_obs'", "pickled objects")),
    "NaN": (npz(1237, robot_obs=np.full(15, np.nan)), ("episode 0", "'robot_obs'", "step 3")),
    "objects in the ids": (
        lambda p: np.save(p / "ep_start_end_ids.npy", np.array([[{}, {}]])),
        ("ep_start_end_ids.npy", "pickled objects"),
    ),
    "ids the wrong way round": (
        lambda p: np.save(p / "ep_start_end_ids.npy", np.array([[1234, 1240], [1250, 1246]])),
        ("ep_start_end_ids.npy", "episode 1"),
    ),
    "ids of another shape": (
        lambda p: np.save(p / "ep_start_end_ids.npy", np.arange(4)),
        ("ep_start_end_ids.npy", "(4,)"),
    ),
    "annotations of another kind": (annotate({"language": {}}), ("auto_lang_ann.npy", "'ann' is missing")),
    "annotations that do not match": (
        annotate({"language": {"ann": ["a", "b"]}, "info": {"indx": [(1, 2)]}}),
        ("auto_lang_ann.npy", "2 instructions for 1 spans"),
    ),
    "annotations cut": (
        lambda p: cut(p / "lang_annotations/auto_lang_ann.npy", 0.5),
        ("auto_lang_ann.npy", "not CALVIN's"),
    ),
}


@pytest.mark.parametrize("name", CALVIN)
def test_calvin(tmp_path: Path, name: str) -> None:
    change, parts = CALVIN[name]
    path = write_calvin(tmp_path / "set")
    change(path)
    refused(path, str(path), *parts)


def test_nothing_is_executed_from_annotations(tmp_path: Path) -> None:
    path = write_calvin(tmp_path / "set")
    mark = tmp_path / "executed"
    for evil in (Evil(mark), {"language": {"ann": [Evil(mark)]}, "info": {"indx": [(1, 2)]}}):
        annotate(evil)(path)
        refused(path, "auto_lang_ann.npy", "refused")
        assert not mark.exists()
    for module, name in (("os", "system"), ("builtins", "eval"), ("numpy", "load"), ("builtins", "getattr")):
        payload = b"c" + f"{module}\n{name}\n".encode() + b"(S'x'\ntR."
        header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
        header += b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"
        (path / "lang_annotations/auto_lang_ann.npy").write_bytes(header + payload)
        refused(path, "auto_lang_ann.npy", f"{module}.{name}")
    with pytest.raises(TypeError):  # the same bytes would run in numpy
        pickle.loads(b"cbuiltins\nlen\n(I1\ntR.")


def parquet(name: str, **columns: Any) -> Callable[[Path], None]:
    """Columns replaced (None: left out)."""

    def change(path: Path) -> None:
        import pyarrow.parquet as pq

        old = pq.read_table(path / name)
        values = {key: np.array(old[key].to_pylist()) for key in old.column_names}
        values |= columns
        pq.write_table(table({k: v for k, v in values.items() if v is not None}), path / name)

    return change


DATA3 = "data/chunk-000/file-001.parquet"
VIDEO3 = f"videos/{CAMERA}/chunk-000/file-001.mp4"


def wrong_shape(info: dict[str, Any]) -> None:
    info["features"][CAMERA]["shape"] = [30, 48, 3]


LEROBOT: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "wrong dtype": (
        parquet(DATA3, action=np.array(["left"] * 12)),
        (DATA3, "episode 2", "'action'", "string"),
    ),
    "wrong width": (parquet(DATA3, action=np.zeros((12, 3), np.float32)), (DATA3, "episode 2", "'action'", "4")),
    "integers": (parquet(DATA3, action=np.zeros((12, 4), np.int64)), (DATA3, "episode 2", "'action'", "int64")),
    "no column": (parquet(DATA3, action=None), (DATA3, "episode 2", "'action'", "missing")),
    "NaN": (parquet(DATA3, action=np.full((12, 4), np.nan, np.float32)), ("episode 2", "'action'", "step 0")),
    "rows of another episode": (parquet(DATA3, episode_index=np.ones(12, np.int64)), (DATA3, "episode 2")),
    "rows out of order": (parquet(DATA3, frame_index=np.arange(12)[::-1].copy()), (DATA3, "'frame_index'")),
    "unknown task": (parquet(DATA3, task_index=np.full(12, 7)), ("episode 2", "'task_index' 7")),
    "truncated parquet": (lambda p: cut(p / DATA3, 0.8), (DATA3, "episode 2")),
    "no parquet": (lambda p: (p / DATA3).unlink(), (DATA3, "episode 2", "not found")),
    "time goes back": (
        parquet(DATA3, timestamp=(np.r_[0:6, 3, 7:12] / 10).astype(np.float32)),
        (DATA3, "episode 2", "'timestamp' goes backwards", "step 6"),
    ),
    "time of another rate": (
        lambda p: edit_json(p / "meta/info.json", lambda d: d.update(fps=12)),
        ("episode 0", "'timestamp' is not that of 12 steps a second"),
    ),
    "truncated video": (lambda p: cut(p / VIDEO3, 0.5), (VIDEO3, "episode 2", CAMERA)),
    "empty video": (lambda p: cut(p / VIDEO3, 0), (VIDEO3, "episode 2", CAMERA)),
    "no video": (lambda p: (p / VIDEO3).unlink(), (VIDEO3, "episode 2", "not found")),
    "a page for a video": (lambda p: (p / VIDEO3).write_text("<html>404"), (VIDEO3, "cannot be read")),
    "video of another size": (
        lambda p: edit_json(p / "meta/info.json", wrong_shape),
        (CAMERA, "has pictures of 32 x 48, meta/info.json says 30 x 48: fix 'shape' of this feature there"),
    ),
    "no info": (lambda p: (p / "meta/info.json").write_text("{"), ("meta/info.json", "JSON")),
    "version": (
        lambda p: edit_json(p / "meta/info.json", lambda d: d.update(codebase_version="v1.6")),
        ("'v1.6'", "v2.1 and v3.0"),
    ),
    "fps": (lambda p: edit_json(p / "meta/info.json", lambda d: d.update(fps=0)), ("'fps'",)),
    "features": (lambda p: edit_json(p / "meta/info.json", lambda d: d.update(features={})), ("'features'",)),
    "episodes": (
        lambda p: edit_json(p / "meta/info.json", lambda d: d.update(total_episodes=4)),
        ("'total_episodes' is 4",),
    ),
    "outside": (
        lambda p: edit_json(p / "meta/info.json", lambda d: d.update(data_path="../../etc/{file_index}")),
        ("'data_path'", "not a path inside the dataset"),
    ),
    "attribute of a field": (
        lambda p: edit_json(p / "meta/info.json", lambda d: d.update(data_path="data/{file_index.real}")),
        ("'data_path'",),
    ),
    "episode list": (lambda p: cut(p / "meta/episodes/chunk-000/file-000.parquet", 0.5), ("meta/episodes",)),
    "tasks": (lambda p: cut(p / "meta/tasks.parquet", 0.5), ("meta/tasks.parquet",)),
}


@pytest.mark.parametrize("name", LEROBOT)
def test_lerobot(tmp_path: Path, name: str) -> None:
    change, parts = LEROBOT[name]
    path = write_lerobot_v3(tmp_path / "set")
    change(path)
    refused(path, str(path), *parts)


def test_lerobot_v21(tmp_path: Path) -> None:
    path = write_lerobot_v21(tmp_path / "set")
    lines = (path / "meta/episodes.jsonl").read_text().splitlines()
    (path / "meta/episodes.jsonl").write_text("\n".join(lines[:1] + lines[2:]))
    refused(path, "episodes.jsonl", "line 2")
    (path / "meta/episodes.jsonl").write_text("\n".join([lines[0], "{", lines[2]]))
    refused(path, "episodes.jsonl", "line 2 is not JSON")


def test_two_sensors_of_one_name(tmp_path: Path) -> None:
    path = write_lerobot_v3(tmp_path / "set")
    edit_json(
        path / "meta/info.json",
        lambda d: d["features"].update({"observation.top": {"dtype": "float32", "shape": [2], "names": None}}),
    )
    refused(path, "two sensors are named 'top'", "--map")
