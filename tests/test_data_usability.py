"""Datasets as others publish them: other names of keys and folders, pointers for files, several cameras gone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.cli import main
from prism.data import open_dataset, parse_map
from prism.errors import PrismError
from prism.experiments.recipes import recipe
from tests.data_fakes import inspect
from tests.data_files import CAMERA, LENGTHS, write_lerobot_v3, write_lerobot_v21, write_robomimic

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 1234\n"


def edit_info(path: Path, change: Any) -> None:
    file = path / "meta/info.json"
    info = json.loads(file.read_text())
    change(info)
    file.write_text(json.dumps(info))


def renamed(path: Path, names: dict[str, str]) -> Path:
    """A LeRobot dataset v2.1 whose keys are called otherwise, in info.json, the rows and the videos."""
    import pyarrow.parquet as pq

    def change(info: dict[str, Any]) -> None:
        info["features"] = {names.get(key, key): value for key, value in info["features"].items()}

    edit_info(write_lerobot_v21(path), change)
    for file in path.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), file)
    for old, new in names.items():
        if (path / "videos/chunk-000" / old).exists():
            (path / "videos/chunk-000" / old).rename(path / "videos/chunk-000" / new)
    return path


def test_actions_state_and_image_are_what_they_are_called(tmp_path: Path) -> None:
    """The keys of openpi's LIBERO datasets; a reward is no sensor."""
    names = {"action": "actions", "observation.state": "state", CAMERA: "image"}
    source = open_dataset(renamed(tmp_path / "set", names))
    assert {(spec.name, spec.kind) for spec in source.sensors} >= {("state", "vector"), ("image", "rgb")}
    assert "reward" not in str([spec.name for spec in source.sensors])
    assert source.action_dim == 4
    assert any("'actions' is taken for the actions" in note for note in source.notes)
    plain = open_dataset(write_lerobot_v21(tmp_path / "plain"))
    np.testing.assert_array_equal(source.read(0).actions, plain.read(0).actions)
    one = open_dataset(tmp_path / "set", entries=parse_map(["state=proprio"]))
    assert {spec.name for spec in one.sensors} >= {"proprio", "image"}, "to rename one sensor loses no other"


def test_where_the_actions_are_not_clear_the_whole_table_is_printed(tmp_path: Path) -> None:
    path = renamed(tmp_path / "set", {"action": "joint_targets", "observation.state": "state", CAMERA: "image"})
    with pytest.raises(PrismError, match=r"there is no key 'action': which are the actions") as error:
        open_dataset(path)
    table = re.search(r"--map (KEY=action .*)$", str(error.value))
    assert table is not None
    words = table[1].replace("KEY", "joint_targets").split()
    taken = open_dataset(path, entries=parse_map([word for word in words if word != "joint_targets=joint_targets"]))
    assert {"state", "image"} <= {spec.name for spec in taken.sensors}
    assert taken.action_dim == 4


def test_a_folder_video_and_templates_with_chunk_index_are_read(tmp_path: Path) -> None:
    plain = open_dataset(write_lerobot_v21(tmp_path / "plain"))
    path = write_lerobot_v21(tmp_path / "set")
    (path / "videos").rename(path / "video")
    template = "data/chunk-{chunk_index:03d}/episode_{episode_index:06d}.parquet"
    edit_info(path, lambda info: info.update(data_path=template))
    source = open_dataset(path)
    for name, values in plain.read(2).streams.items():
        np.testing.assert_array_equal(source.read(2).streams[name], values)


def test_every_sensor_without_files_is_named_at_once(tmp_path: Path) -> None:
    """Two cameras were gone: one was tried at a time, and the remedy was to record it again."""
    path = write_lerobot_v21(tmp_path / "set")

    def add(info: dict[str, Any]) -> None:
        for name in ("front", "left"):
            info["features"][f"observation.images.{name}"] = info["features"][CAMERA]

    edit_info(path, add)
    with pytest.raises(PrismError) as error:
        open_dataset(path)
    helps = error.value.args[1] if len(error.value.args) > 1 else ""
    assert "leave out these sensors with --without front left" in f"{error.value} {helps}"
    assert "record it again" not in f"{error.value} {helps}"
    assert len(open_dataset(path, without=["front", "left"]).lengths) == len(LENGTHS)


@pytest.mark.parametrize(
    "place", ["meta/info.json", "meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet", "data", "hdf5"]
)
def test_pointers_of_git_lfs_are_called_so(place: str, tmp_path: Path) -> None:
    """They were "no JSON", "truncated", "not a parquet file"."""
    if place == "hdf5":
        path = write_robomimic(tmp_path / "lift.hdf5")
        path.write_text(POINTER)
    else:
        path = write_lerobot_v3(tmp_path / "set")
        for file in [path / place] if place != "data" else path.glob("data/*/*.parquet"):
            file.write_text(POINTER)
    with pytest.raises(PrismError, match="Git-LFS pointer") as error:
        open_dataset(path)
    assert "git lfs pull" in str(error.value)


def test_black_cameras_are_a_warning_of_inspect(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "lift.hdf5")
    import h5py

    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            demo["obs/agentview_image"][...] = 0
    warnings = inspect(path).warnings
    assert "'agentview_image' is black in every picture that was looked at: was the camera on?" in warnings
    assert not any("eye_in_hand" in warning for warning in warnings)


def test_names_are_suggested_only_where_one_is_near() -> None:
    with pytest.raises(
        PrismError, match="'nodir' is not a recipe, task or dataset: give the path of a dataset"
    ) as error:
        recipe("nodir")
    assert "did you mean" not in str(error.value)
    with pytest.raises(PrismError, match="did you mean metaworld-drawer-open"):
        recipe("drawer-opn")


def aloha(path: Path, compressed: bool = False) -> list[dict[str, Any]]:
    """Episodes as ALOHA writes them, with one camera; what they hold."""
    import io

    import h5py
    from PIL import Image

    path.mkdir()
    held = []
    for episode, length in enumerate((5, 7)):
        rng = np.random.default_rng(episode)
        keys = ("action", "qpos", "qvel", "effort")
        numbers = {key: rng.normal(size=(length, 14)).astype(np.float32) for key in keys}
        pictures = np.repeat(rng.integers(0, 256, (length, 6, 8, 3), dtype=np.uint8), 8, axis=1).repeat(8, axis=2)
        held.append({**numbers, "pictures": pictures})
        with h5py.File(path / f"episode_{episode}.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["action"] = numbers["action"]
            for key in ("qpos", "qvel", "effort"):
                file[f"observations/{key}"] = numbers[key]
            if not compressed:
                file["observations/images/cam_high"] = pictures
                continue
            file.attrs["compress"] = True
            packed = []
            for picture in pictures:
                content = io.BytesIO()
                Image.fromarray(picture).save(content, "JPEG", quality=95)
                packed.append(np.frombuffer(content.getvalue(), np.uint8))
            size = max(map(len, packed))
            rows = np.stack([np.pad(one, (0, size - len(one))) for one in packed])
            file["observations/images/cam_high"] = rows
            file["compress_len"] = np.array([[len(one) for one in packed]], np.float32)
    return held


@pytest.mark.parametrize("compressed", [False, True])
def test_alohas_episodes_are_read(compressed: bool, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    held = aloha(tmp_path / "aloha", compressed)
    source = open_dataset(tmp_path / "aloha")
    assert source.lengths.tolist() == [5, 7]
    assert source.fps == 50
    assert source.action_dim == 14
    assert {spec.name: spec.kind for spec in source.sensors} == {
        "qpos": "vector", "qvel": "vector", "effort": "vector", "cam_high": "rgb",
    }  # fmt: skip
    for episode, numbers in enumerate(held):
        part = source.read(episode, 1, 4)
        np.testing.assert_array_equal(part.actions, numbers["action"][1:4])
        np.testing.assert_array_equal(part.streams["qpos"], numbers["qpos"][1:4])
        off = np.abs(part.streams["cam_high"].astype(int) - numbers["pictures"][1:4])
        assert off.max() == 0 if not compressed else off.mean() < 20
    one = open_dataset(tmp_path / "aloha/episode_1.hdf5")
    np.testing.assert_array_equal(one.read(0).actions, held[1]["action"])
    assert main(["data", "inspect", str(tmp_path / "aloha")]) == 0


def test_a_damaged_or_different_episode_of_alohas_is_named(tmp_path: Path) -> None:
    import h5py

    aloha(tmp_path / "aloha")
    with h5py.File(tmp_path / "aloha/episode_1.hdf5", "r+") as file:
        del file["observations/qvel"]
    with pytest.raises(PrismError, match=r"episode_1\.hdf5.*'observations/qvel'"):
        open_dataset(tmp_path / "aloha")
    (tmp_path / "aloha/episode_1.hdf5").write_bytes(b"\x89HDF\r\n\x1a\nxxxx")
    with pytest.raises(PrismError, match=r"episode_1\.hdf5: .*truncated or not an HDF5 file"):
        open_dataset(tmp_path / "aloha")
