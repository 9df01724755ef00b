"""Conversion keeps every number and every absence, holds little in memory, and is whole or absent."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.cli import main
from prism.data import open_dataset, parse_map, with_sensors
from prism.data.convert import convert
from prism.data.episodes import Episode
from prism.data.views import with_sensor_settings
from prism.errors import PrismError
from prism.report.dataset_page import write_page
from prism.sensors import ActionSpec, SensorSpec, action_spec_of, encode_text
from tests.data_fakes import MemorySource, inspect
from tests.data_files import LENGTHS, picture, write_calvin, write_lerobot_v3, write_robomimic

SENSORS = (
    SensorSpec("cam", "rgb", (64, 66, 3), random_shift=4),
    SensorSpec("proprio", "vector", (5,)),
    SensorSpec("force", "vector", (1,)),
    SensorSpec("depth", "depth", (6, 8), clip=(0.1, 2.0)),
    SensorSpec("digit", "tactile", (6, 4, 6)),
    SensorSpec("mic", "audio", (80,), sample_rate=800),
    SensorSpec("text", "text", (48,)),
)


def everything() -> MemorySource:
    episodes = []
    for number, length in enumerate(LENGTHS):
        rng = np.random.default_rng(number)
        streams: dict[str, Any] = {
            "cam": np.stack([picture(number, step, (64, 66)) for step in range(length)]),
            "proprio": rng.normal(size=(length, 5)).astype(np.float32),
            "force": rng.normal(size=(length, 1)).astype(np.float32),
            "depth": rng.uniform(0, 3, (length, 6, 8)).astype(np.float32),
            "digit": rng.integers(0, 256, (length, 6, 4, 6), dtype=np.uint8),
            "mic": rng.uniform(-1, 1, (length, 80)).astype(np.float32),
            "text": np.stack([encode_text(f"Schiebe Würfel {number}", 48)] * length),
        }
        present = {"force": np.arange(length) != 1, "text": np.arange(length) > 0}
        episodes.append(Episode(streams, rng.normal(size=(length, 3)).astype(np.float32), present))
    return MemorySource(episodes, SENSORS, fps=12.5)


def assert_equal(source: Any, expected: Any, lossy: tuple[str, ...] = ()) -> None:
    assert source.lengths.tolist() == expected.lengths.tolist()
    assert (source.sensors, source.fps) == (expected.sensors, expected.fps)
    for episode in range(len(source.lengths)):
        a, b = source.read(episode), expected.read(episode)
        np.testing.assert_array_equal(a.actions, b.actions)
        for name in b.streams:
            here = [e.present.get(name, np.ones(e.length, np.bool_)) for e in (a, b)]
            np.testing.assert_array_equal(*here)
            x, y = a.streams[name][here[0]], b.streams[name][here[1]]
            if name in lossy:
                assert np.abs(x.astype(int) - y).mean() < 6
            else:
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_there_and_back(tmp_path: Path, codec: Any) -> None:
    source = everything()
    seen: list[tuple[int, int]] = []
    done = convert(source, tmp_path / "lerobot", "lerobot", codec=codec, progress=lambda *at: seen.append(at))
    assert (done.episodes, done.steps, seen[-1]) == (3, 22, (22, 22))
    assert any("proprio is observation.state" in note for note in done.notes)
    assert any(codec in note for note in done.notes)
    if (threads := Path("/proc/self/task")).is_dir():  # the AV1 encoder of a root process asks for real-time priority
        assert {os.sched_getscheduler(int(thread.name)) for thread in threads.iterdir()} == {os.SCHED_OTHER}
    lerobot = open_dataset(tmp_path / "lerobot")
    assert_equal(lerobot, source, lossy=("cam",))
    convert(lerobot, tmp_path / "own", task="again", pictures="pixels")
    own = open_dataset(tmp_path / "own")
    assert_equal(own, lerobot)
    assert own.task == "again"  # type: ignore[attr-defined]
    assert own.provenance["converted_from"] == "lerobot"  # type: ignore[attr-defined]


def test_lerobot_keeps_what_the_actions_are(tmp_path: Path) -> None:
    """A controller that takes changes of a pose for poses drives a robot away."""
    source = with_sensor_settings(everything(), ["action.kind=delta"])
    convert(source, tmp_path / "lerobot", "lerobot")
    for renamed in ([], parse_map(["observation.state=joints"])):
        assert action_spec_of(open_dataset(tmp_path / "lerobot", entries=renamed)) == ActionSpec(kind="delta")


def test_what_lerobot_expects_to_find(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = convert(everything(), tmp_path / "set", "lerobot").path
    info = json.loads((path / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 22, 4)
    assert info["features"]["observation.images.cam"]["dtype"] == "video"
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [5], "names": None}
    assert "present.observation.force" in info["features"]
    data = pq.read_table(path / info["data_path"].format(chunk_index=0, file_index=0))
    assert {"timestamp", "frame_index", "episode_index", "index", "task_index"} < set(data.column_names)
    assert data["index"].to_pylist() == list(range(22))
    video = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    assert set(info["features"]) - set(video) == set(data.column_names)
    episodes = pq.read_table(path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["length"] for e in episodes] == list(LENGTHS)
    assert [e["dataset_to_index"] for e in episodes] == [7, 10, 22]
    assert episodes[1]["videos/observation.images.cam/from_timestamp"] == pytest.approx(7 / 12.5)
    tasks = pq.read_table(path / "meta/tasks.parquet")
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert tasks["task_index"].to_pylist() == [0, 1, 2, 3]
    stats = json.loads((path / "meta/stats.json").read_text())
    assert np.shape(stats["observation.images.cam"]["mean"]) == (3, 1, 1)
    np.testing.assert_allclose(
        stats["action"]["mean"], np.concatenate([e.actions for e in everything().episodes]).mean(0), atol=1e-6
    )


@pytest.mark.parametrize("to", ["prism", "lerobot"])
def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path, to: Any) -> None:
    source = everything()
    convert(source, tmp_path / "set", to)
    with pytest.raises(PrismError, match="exists already"):
        convert(source, tmp_path / "set", to)
    (tmp_path / "photos").mkdir()
    with pytest.raises(PrismError, match="not overwritten"):
        convert(source, tmp_path / "photos", to, overwrite=True)
    source.episodes[2].actions[5, 0] = np.nan if to == "prism" else 0
    source.episodes[2].present["cam"] = np.arange(12) != 3
    source.sometimes_absent = ("force", "text")  # type: ignore[attr-defined]
    if to == "prism":
        with pytest.raises(PrismError, match="NaN or infinite"):
            convert(source, tmp_path / "set", to, overwrite=True)
    else:
        with pytest.raises(PrismError, match="'cam' is absent, unannounced"):
            convert(source, tmp_path / "set", to, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", "set"]
    assert open_dataset(tmp_path / "set").lengths.tolist() == list(LENGTHS)
    convert(everything(), tmp_path / "set", to, overwrite=True, episodes=[1])
    assert open_dataset(tmp_path / "set").lengths.tolist() == [LENGTHS[1]]
    with pytest.raises(PrismError, match="is the dataset itself"):
        convert(open_dataset(tmp_path / "set"), tmp_path / "set", to, overwrite=True)

    def full(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write does: without the name of the file

    with pytest.raises(PrismError, match=r"new could not be written: the disk is full. Nothing was written"):
        convert(everything(), tmp_path / "new", to, progress=full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", "set"]


def test_inspect_shows_every_kind(tmp_path: Path) -> None:
    path = write_calvin(tmp_path / "set")
    summary = inspect(path)
    assert summary.format == "CALVIN"
    assert {s.name: s.kind for s in summary.sensors}["rgb_tactile"] == "tactile"
    assert any("open the drawer" in note for note in summary.notes)
    assert any("'text' is absent from" in warning for warning in summary.warnings)
    write_page(open_dataset(path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for name in ("rgb_static", "rgb_gripper", "rgb_tactile", "depth_static", "depth_gripper"):
        assert f"<h2>{name}</h2>" in page
    assert page.count("data:image/png;base64,") == 5 * (6 + 3 + 6)
    assert inspect(write_robomimic(tmp_path / "set.hdf5")).format == "robomimic HDF5"


def test_what_was_video_stays_video_and_the_size_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """302 MB of video became 30 GB of pixels, and nothing said so."""
    pytest.importorskip("av")
    path = write_lerobot_v3(tmp_path / "v3")
    assert main(["data", "convert", str(path), str(tmp_path / "own")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'own'}: 22 steps, about ")
    assert "free there" in said.splitlines()[0]
    camera = next(sensor.name for sensor in open_dataset(path).sensors if sensor.kind == "rgb")
    assert (tmp_path / f"own/{camera}.mp4").is_file()
    assert f"nearly the same pixels (--pictures pixels keeps all): {camera}" in said
    video, source = open_dataset(tmp_path / "own"), open_dataset(path)
    for episode in range(3):
        a, b = (one.read(episode).streams[camera].astype(int) for one in (video, source))
        assert np.abs(a - b).mean() < 6
    assert_equal(with_sensors(video, ["state"]), with_sensors(source, ["state"]))
    assert main(["data", "convert", str(path), str(tmp_path / "pixels"), "--pictures", "pixels"]) == 0
    assert_equal(open_dataset(tmp_path / "pixels"), source)
    convert(video, tmp_path / "again")
    assert (tmp_path / f"again/{camera}.mp4").is_file(), "video of our own stays video too"

    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("prism.data.convert.shutil.disk_usage", lambda folder: full)
    with pytest.raises(PrismError, match=r"are needed, 1 kB are free: --pictures video is about 30 times smaller, or"):
        convert(everything(), tmp_path / "large")
    assert not (tmp_path / "large").exists()
