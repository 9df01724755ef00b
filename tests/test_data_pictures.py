"""Big pictures are brought to the policy's size once; the policy still takes the camera's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from prism_client import ActionKind

import prism
from prism import cli
from prism.data import open_dataset, parse_map
from prism.data.episodes import Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.data.pictures import as_recorded, cached_pictures, resized, with_default_sizes
from prism.data.views import with_sensor_settings
from prism.encoders.vision import prepare_image
from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorSpec
from tests.data_fakes import MemorySource

LENGTHS = (5, 4, 6)


def big_source() -> MemorySource:
    rng = np.random.default_rng(0)
    episodes = []
    for length in LENGTHS:
        wave = np.linspace(0, 255, 200 * 240 * 3).reshape(200, 240, 3)
        streams: dict[str, Any] = {
            "cam": np.stack([np.roll(wave, 7 * t + 1, axis=1) for t in range(length)]).astype(np.uint8),
            "depth": rng.uniform(0, 3, (length, 200, 240)).astype(np.float32),
            "s": rng.normal(size=(length, 2)).astype(np.float32),
        }
        present = {"cam": np.arange(length) != 1}
        episodes.append(Episode(streams, rng.normal(size=(length, 2)).astype(np.float32), present))
    sensors = [SensorSpec("cam", "rgb", (200, 240, 3), random_shift=10), SensorSpec("depth", "depth", (200, 240))]
    return MemorySource(episodes, [*sensors, SensorSpec("s", "vector", (2,))])


def test_small_pictures_are_what_the_encoder_makes_of_big_ones(tmp_path: Path) -> None:
    source = with_sensor_settings(big_source(), ["cam.resize=50,60", "depth.resize=20,24"])
    said: list[str] = []
    cached = cached_pictures(source, said.append, tmp_path / "cache")
    assert "MB in" in said[0]
    assert [s.shape for s in cached.sensors] == [(50, 60, 3), (20, 24), (2,)]
    assert as_recorded(cached) == source.sensors
    assert {s.name: s.random_shift for s in cached.sensors}["cam"] == 2  # of 10 stored pixels, a quarter
    for episode in range(3):
        a, b, whole = cached.read(episode, 1), resized(source).read(episode, 1), source.read(episode, 1)
        for name in ("cam", "depth", "s"):
            np.testing.assert_array_equal(a.streams[name], b.streams[name])
        np.testing.assert_array_equal(a.present["cam"], whole.present["cam"])
        np.testing.assert_array_equal(a.actions, whole.actions)
        spec = source.sensors[0]
        eager = prepare_image(torch.from_numpy(whole.streams["cam"]), spec)
        kept = prepare_image(torch.from_numpy(a.streams["cam"]), spec)
        assert float((eager - kept).abs().max()) < 1.5 / 255


def test_an_interrupted_cache_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism.data.pictures._PART_BYTES", 50 * 60 * 3 * 6)
    source = with_sensor_settings(big_source(), ["cam.resize=50,60"])
    folder = tmp_path / "cache"
    read, left = MemorySource.read, 6

    class StopHereError(Exception):
        pass

    def tired(self: MemorySource, *args: Any, **kwargs: Any) -> Episode:
        nonlocal left
        left -= 1
        if left < 0:
            raise StopHereError
        return read(self, *args, **kwargs)

    monkeypatch.setattr(MemorySource, "read", tired)
    left = 2
    with pytest.raises(StopHereError):
        cached_pictures(source, lambda words: None, folder)
    assert 0 < len(list(folder.glob("part-*"))) < 3
    assert not list(folder.glob(".tmp-*"))
    left = 10**6
    said: list[str] = []
    cached = cached_pictures(source, said.append, folder)
    assert said
    np.testing.assert_array_equal(cached.read(2).streams["cam"], resized(source).read(2).streams["cam"])
    said.clear()
    cached_pictures(source, said.append, folder)
    assert not said  # all there


def test_other_episodes_have_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "home"))
    path = write(tmp_path / "set")
    for episodes in ("0", "2"):
        source = open_dataset(path, sensors=["cam.resize=50,60"], episodes=episodes)
        cached = cached_pictures(source, lambda words: None)
        np.testing.assert_array_equal(cached.read(0).streams["cam"], resized(source).read(0).streams["cam"])
    assert len(list((tmp_path / "home/pictures").iterdir())) == 2


def test_another_camera_under_the_same_name_has_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "home"))
    rng, path = np.random.default_rng(0), tmp_path / "two.hdf5"
    with h5py.File(path, "w") as file:
        file["data/demo_0/actions"] = rng.normal(size=(4, 2)).astype(np.float32)
        for key in ("front", "wrist"):
            file[f"data/demo_0/obs/{key}"] = rng.integers(0, 256, (4, 32, 48, 3), np.uint8)
    for key in ("front", "wrist"):
        source = open_dataset(path, 20.0, parse_map([f"{key}=rgb"]), ["rgb.resize=16,24"])
        cached = cached_pictures(source, lambda words: None)
        np.testing.assert_array_equal(cached.read(0).streams["rgb"], resized(source).read(0).streams["rgb"])


def write(path: Path) -> Path:
    source = big_source()
    with DatasetWriter(path, source.sensors, 2, 10.0, "look", action=ActionSpec(kind=ActionKind.ABSOLUTE)) as writer:
        for episode in source.episodes:
            writer.add(episode.streams, episode.actions, episode.present)
    return path


def test_convert_stores_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "set")
    assert cli.main(["data", "convert", str(path), str(tmp_path / "out"), "--sensor", "cam.resize=50,60"]) == 0
    assert "'cam' is stored small: 50 x 60, not 200 x 240" in capsys.readouterr().out
    spec = open_dataset(tmp_path / "out").sensors[0]
    assert (spec.shape, spec.resize) == ((50, 60, 3), None)
    assert (tmp_path / "out/cam.npy").stat().st_size < (path / "cam.npy").stat().st_size / 15


def test_own_data_get_a_size_and_the_policy_takes_the_cameras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    source, said = with_default_sizes(big_source())
    assert [s.resize for s in source.sensors] == [(80, 96), (80, 96), None]
    assert len(said) == 2
    path = write(tmp_path / "set")
    run = prism.train(path, steps=2, set=["train.batch_size=4"], out=tmp_path / "run")
    words = " ".join(capfd.readouterr().err.split())
    assert "'cam': 200 x 240 is brought to 133 x 160" in words  # a frozen backbone was measured with larger ones
    assert "'depth': 200 x 240 is brought to 80 x 96" in words
    camera = next(s for s in run.policy().spec.sensors if s.name == "cam")
    assert (camera.shape, camera.resize) == ((200, 240, 3), (133, 160))
    controller = run.controller()
    reading = {"cam": big_source().episodes[0].streams["cam"][0], "depth": np.ones((200, 240), np.float32)}
    assert controller.act({**reading, "s": np.zeros(2, np.float32)}).shape == (2,)
    with pytest.raises(PrismError, match="shape"):
        controller.act({**reading, "cam": np.zeros((80, 96, 3), np.uint8), "s": np.zeros(2, np.float32)})
