"""Every reader against files written by that format's own library: content, slices, names, worker processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.data import format_name, open_dataset, parse_map
from prism.data.episodes import EpisodeSource
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.sensors import decode_text, encode_text
from tests.data_files import (
    ANNOTATIONS,
    CAMERA,
    FIRST_FRAME,
    LENGTHS,
    TASKS,
    calvin_frame,
    lerobot_rows,
    picture,
    robomimic_arrays,
    write_calvin,
    write_lerobot_v3,
    write_lerobot_v21,
    write_robomimic,
)

WRITERS: dict[str, Callable[[Path], Path]] = {
    "robomimic HDF5": lambda p: write_robomimic(p / "set.hdf5"),
    "CALVIN": lambda p: write_calvin(p / "set"),
    "LeRobot v2.1": lambda p: write_lerobot_v21(p / "set"),
    "LeRobot v3": lambda p: write_lerobot_v3(p / "set"),
}


@pytest.fixture(scope="module", params=WRITERS)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, WRITERS[request.param](tmp_path_factory.mktemp("set"))


def assert_same(a: Any, b: Any) -> None:
    assert list(a.streams) == list(b.streams)
    np.testing.assert_array_equal(a.actions, b.actions)
    for name in a.streams:
        np.testing.assert_array_equal(a.streams[name], b.streams[name])
        np.testing.assert_array_equal(a.present.get(name, True), b.present.get(name, True))


def test_what_every_source_promises(dataset: tuple[str, Path]) -> None:
    name, path = dataset
    assert name.startswith(format_name(path))
    source = open_dataset(path)
    assert source.lengths.tolist() == list(LENGTHS)
    assert any("guessed" in note for note in source.notes)
    again = pickle.loads(pickle.dumps(source))
    rng = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS):
        whole = source.read(episode)
        assert whole.actions.shape == (length, source.action_dim)
        assert whole.actions.dtype == np.float32
        for sensor in source.sensors:
            assert whole.streams[sensor.name].shape == (length, *sensor.shape)
            assert whole.streams[sensor.name].dtype == sensor.dtype
        for _ in range(6):  # any slice, in any order, is that part of the whole
            start = int(rng.integers(length + 1))
            stop = int(rng.integers(start, length + 1))
            part = again.read(episode, start, stop)
            np.testing.assert_array_equal(part.actions, whole.actions[start:stop])
            for sensor in source.sensors:
                np.testing.assert_array_equal(part.streams[sensor.name], whole.streams[sensor.name][start:stop])
                if sensor.name in whole.present:
                    here = part.present.get(sensor.name, np.ones(stop - start, np.bool_))
                    np.testing.assert_array_equal(here, whole.present[sensor.name][start:stop])
    assert source.read(1, streams=()).streams == {}
    batch = Windows(source, 2, 4).batch(np.array([0, 7, 21]))
    assert batch.actions.shape == (3, 4, source.action_dim)
    for bad in ((3, 0, 1), (0, 0, 8), (0, 5, 4), (-1, 0, 1)):
        with pytest.raises(PrismError, match=path.name):
            source.read(*bad)


def test_robomimic(tmp_path: Path) -> None:
    for compression in (None, "gzip"):
        path = write_robomimic(tmp_path / f"{compression}.hdf5", compression)
        source = open_dataset(path)
        assert source.fps == 25
        assert [(s.name, s.kind) for s in source.sensors] == [
            ("agentview_image", "rgb"),
            ("robot0_eef_pos", "vector"),
            ("robot0_eef_quat", "vector"),
            ("robot0_eye_in_hand_image", "rgb"),
            ("robot0_gripper_qpos", "vector"),
        ]
        assert any("'object' is left out" in note for note in source.notes)
        assert any("masks (train)" in note for note in source.notes)
        for episode, length in enumerate(LENGTHS):
            expected, part = robomimic_arrays(episode, length), source.read(episode)
            np.testing.assert_array_equal(part.actions, expected["actions"].astype(np.float32))
            for sensor in source.sensors:
                values = expected[f"obs/{sensor.name}"].astype(sensor.dtype)
                np.testing.assert_array_equal(part.streams[sensor.name], values)
    joined = open_dataset(path, entries=parse_map(["robot0_eef_pos+robot0_eef_quat=proprio", "object=object"]))
    assert [(s.name, s.shape) for s in joined.sensors] == [("proprio", (7,)), ("object", (10,))]


def test_a_demonstration_that_is_not_there_is_said(tmp_path: Path) -> None:
    import h5py

    path = write_robomimic(tmp_path / "set.hdf5")
    assert not any("demo_1" in note for note in open_dataset(path).notes)
    with h5py.File(path, "a") as file:
        del file["data/demo_1"], file["mask"]
        del file["data"].attrs["total"]
    assert any("demo_1 is not there, though demo_2 is" in note for note in open_dataset(path).notes)


def test_robomimic_masks(tmp_path: Path) -> None:
    from prism.data.formats.robomimic import RobomimicSource

    path = write_robomimic(tmp_path / "set.hdf5")
    source = RobomimicSource(path, mask="train")
    assert source.lengths.tolist() == [LENGTHS[0], LENGTHS[2]]
    np.testing.assert_array_equal(source.read(1).actions, robomimic_arrays(2, 12)["actions"].astype(np.float32))
    with pytest.raises(PrismError, match="no mask 'valid'; it has train"):
        RobomimicSource(path, mask="valid")


@pytest.mark.parametrize("digits", [4, 7])
def test_calvin(tmp_path: Path, digits: int) -> None:
    write_calvin(tmp_path / "set/training", digits)
    source = open_dataset(tmp_path / "set")
    assert [(s.name, s.kind, s.shape) for s in source.sensors] == [
        ("robot_obs", "vector", (15,)),
        ("rgb_static", "rgb", (20, 20, 3)),
        ("rgb_gripper", "rgb", (8, 8, 3)),
        ("rgb_tactile", "tactile", (10, 6, 6)),
        ("depth_static", "depth", (20, 20)),
        ("depth_gripper", "depth", (8, 8)),
        ("text", "text", (64,)),
    ]
    first = FIRST_FRAME
    for episode, length in enumerate(LENGTHS):
        part = source.read(episode)
        for step in range(length):
            frame = calvin_frame(first + step)
            np.testing.assert_array_equal(part.actions[step], frame["rel_actions"].astype(np.float32))
            for sensor in source.sensors[:-1]:
                np.testing.assert_array_equal(part.streams[sensor.name][step], frame[sensor.name].astype(sensor.dtype))
        first += length + 5
    part = source.read(0)
    assert part.present["text"].tolist() == [False, False, True, True, True, True, True]
    texts = [decode_text(row) for row in part.streams["text"]]
    drawer, block = ANNOTATIONS[0][0], ANNOTATIONS[1][0]
    assert texts == ["", "", drawer, drawer, block, block, block]
    assert not source.read(1).present["text"].any()
    absolute = open_dataset(tmp_path / "set", entries=parse_map(["actions=action", "robot_obs=proprio"]))
    assert absolute.read(0, 0, 1).actions.tolist() == [[FIRST_FRAME] * 7]


def check_lerobot(source: EpisodeSource) -> None:
    assert source.fps == 10
    assert [(s.name, s.kind, s.shape) for s in source.sensors] == [
        ("state", "vector", (6,)),
        ("top", "rgb", (32, 48, 3)),
        ("task", "text", (64,)),
    ]
    assert any("'next.reward' is left out" in note for note in source.notes)
    for episode, length in enumerate(LENGTHS):
        expected, part = lerobot_rows(episode, length, 0), source.read(episode)
        np.testing.assert_array_equal(part.actions, expected["action"])
        np.testing.assert_array_equal(part.streams["state"], expected["observation.state"])
        assert {decode_text(row) for row in part.streams["task"]} == {TASKS[episode % 2]}
        for step in range(length):
            difference = part.streams["top"][step].astype(int) - picture(episode, step)
            assert np.abs(difference).max() <= 3


@pytest.mark.parametrize("gop", [1, 2, 250])
@pytest.mark.parametrize("write", [write_lerobot_v21, write_lerobot_v3])
def test_lerobot(tmp_path: Path, write: Callable[[Path, int], Path], gop: int) -> None:
    source = open_dataset(write(tmp_path / "set", gop))
    check_lerobot(source)
    # frames asked for backwards, one at a time, are the same frames: every one is a seek
    whole = source.read(2)
    for step in reversed(range(12)):
        np.testing.assert_array_equal(source.read(2, step, step + 1).streams["top"][0], whole.streams["top"][step])


def test_lerobot_with_pictures_in_parquet(tmp_path: Path) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    path = write_lerobot_v21(tmp_path / "set")
    info = json.loads((path / "meta/info.json").read_text())
    info["features"][CAMERA] |= {"dtype": "image", "shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    (path / "meta/info.json").write_text(json.dumps(info))
    for episode, length in enumerate(LENGTHS):
        file = path / f"data/chunk-000/episode_{episode:06d}.parquet"
        cells = []
        for step in range(length):
            buffer = io.BytesIO()
            Image.fromarray(picture(episode, step)).save(buffer, format="PNG")
            cells.append({"bytes": buffer.getvalue(), "path": f"frame_{step:06d}.png"})
        pq.write_table(pq.read_table(file).append_column(CAMERA, pa.array(cells)), file)
    check_lerobot(open_dataset(path))


def test_lerobot_depth_in_pictures_is_left_out_and_said(tmp_path: Path) -> None:
    path = write_lerobot_v21(tmp_path / "set")
    info = json.loads((path / "meta/info.json").read_text())
    names = ["height", "width", "channels"]
    info["features"]["observation.images.depth"] = {"dtype": "image", "shape": [32, 48, 1], "names": names}
    (path / "meta/info.json").write_text(json.dumps(info))
    source = open_dataset(path)
    check_lerobot(source)
    assert any("'observation.images.depth' is left out: pictures of depth" in note for note in source.notes)


def test_consecutive_frames_are_decoded_once(tmp_path: Path) -> None:
    from prism.data.formats.video import VideoFrames, _Decoder

    file = write_lerobot_v3(tmp_path / "set", 250) / f"videos/{CAMERA}/chunk-000/file-001.mp4"
    decoded = 0

    class Counting(_Decoder):
        def _seek(self, time: float) -> None:
            super()._seek(time)
            inner = self._frames

            def count() -> Any:
                nonlocal decoded
                for frame in inner:
                    decoded += 1
                    yield frame

            self._frames = count()

    frames = VideoFrames()
    frames._open.keep(file, Counting(file))
    for first in range(0, 12, 2):
        frames.read(file, 0.0, first, 2, 10.0, (32, 48, 3), "here")
    assert decoded == 12
    frames.read(file, 0.0, 3, 2, 10.0, (32, 48, 3), "here")  # from the cache
    assert decoded == 12


def test_memory_of_the_frame_cache_is_bounded(tmp_path: Path) -> None:
    from prism.data.formats.video import VideoFrames

    file = write_lerobot_v3(tmp_path / "set") / f"videos/{CAMERA}/chunk-000/file-001.mp4"
    frames = VideoFrames(cache_bytes=3 * 32 * 48 * 3)
    for first in (0, 4, 8, 2, 0):
        frames.read(file, 0.0, first, 4, 10.0, (32, 48, 3), "here")
        assert 0 < frames._frames.total <= 3 * 32 * 48 * 3


def test_text() -> None:
    assert decode_text(encode_text("grüße", 16)) == "grüße"
    with pytest.raises(PrismError, match="does not fit"):
        encode_text("x" * 17, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state", "write SOURCE=SENSOR"),
        ("=x", "write SOURCE=SENSOR"),
        ("a+=x", "write SOURCE=SENSOR"),
        ("a=x:smell", "unknown kind of sensor 'smell'"),
        ("a=x:depth:far", "scale 'far'"),
        ("a=x:depth:0", "scale '0'"),
        ("a=x:depth:1:2", "write SOURCE"),
    ],
)
def test_wrong_tables(text: str, message: str) -> None:
    with pytest.raises(PrismError, match=message):
        parse_map([text])
    with pytest.raises(PrismError, match="two entries make the sensor 'x'"):
        parse_map(["a=x", "b=x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agentview_imag=cam", "no key 'agentview_imag'; near it are agentview_image"),
        ("agentview_image+robot0_eef_pos=cam", "only vectors can be joined"),
        ("agentview_image=cam:depth", r"a depth image has shape \(H, W\)"),
        ("robot0_eef_pos=cam:rgb", "holds float64 pixels"),
        ("robot0_eef_pos=words:text", "cannot be text"),
        ("robot0_eef_pos=../x", "letters, digits"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = write_robomimic(tmp_path / "set.hdf5")
    with pytest.raises(PrismError, match=message) as error:
        open_dataset(path, entries=parse_map([text]))
    assert str(path) in str(error.value)
