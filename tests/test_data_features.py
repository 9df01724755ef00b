"""Features of a frozen network: computed once, found again, never taken for those of something else."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from prism.data import features
from prism.data.episodes import Episode
from prism.data.features import Look, keep_features
from prism.data.loader import BatchOrder, Loader
from prism.data.views import portion
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.sensors import SensorSpec
from tests.data_fakes import MemorySource

LENGTHS = (5, 3, 4)
SPEC = SensorSpec("rgb_wrist", "rgb", (4, 6, 3), random_shift=2)


def source(tmp_path: Path, brightness: int = 0) -> MemorySource:
    """Every frame is one grey: ten times its episode, and its step."""
    episodes = []
    for number, length in enumerate(LENGTHS):
        grey = (10 * (number + 1) + np.arange(length) + brightness)[:, None, None, None]
        streams = {
            "rgb_wrist": np.broadcast_to(grey, (length, 4, 6, 3)).astype(np.uint8),
            "s": np.zeros((length, 2), np.float32),
        }
        present = {"rgb_wrist": np.arange(length) != 1} if number == 2 else {}
        episodes.append(Episode(streams, np.full((length, 2), number, np.float32), present))
    made = MemorySource(episodes, [SPEC, SensorSpec("s", "vector", (2,))])
    made.path = tmp_path / "data"
    made.path.mkdir(exist_ok=True)
    return made


class Eye:
    """Sees the first pixel, and by how much the picture was moved; counts its pictures."""

    def __init__(self) -> None:
        self.seen = 0

    def look(self, spec: SensorSpec = SPEC, **key: object) -> Look:
        return Look(spec, self.run, 3, {"backbone": "eye", **key}, "rgb_wrist at 4x6")

    def run(self, pixels: Tensor, shift: Tensor | None) -> Tensor:
        self.seen += len(pixels)
        moved = torch.zeros(2, len(pixels)) if shift is None else shift
        return torch.stack([pixels[:, 0, 0, 0].float(), *moved.float()], dim=1)


def test_features_are_those_of_their_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PART_BYTES", 1)  # an episode a part
    said: list[str] = []
    kept = keep_features(source(tmp_path), [0, 1, 2], [Eye().look()], 3, 1000, said.append, tmp_path / "kept")
    assert "12 frames (rgb_wrist at 4x6), 3 views of each, are computed once" in said[0]
    assert "s per thousand frames" in said[0]
    episodes, steps = np.array([2, 0, 1]), np.array([[0, 3], [4, 4], [0, 2]])
    found, present = kept["rgb_wrist"].rows(episodes, steps, np.array([0, 3, 7]))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found[..., 0], [[30, 33], [14, 14], [20, 22]])
    np.testing.assert_array_equal(found[:2, :, 1:], 0.0)  # views 0 of 3: as they are
    assert np.abs(found[2, :, 1:]).max() <= 2
    assert present.all()
    assert not kept["rgb_wrist"].rows(np.array([2]), np.array([[1]]), np.array([0]))[1].any()
    views = [kept["rgb_wrist"].rows(np.array([0]), np.arange(5)[None], np.array([view]))[0] for view in range(3)]
    assert not np.array_equal(views[1], views[2])


def test_what_is_there_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PART_BYTES", 1)
    broken, data = Eye(), source(tmp_path)
    monkeypatch.setattr(features, "_seconds", lambda plan: 0.1)

    def stop(pixels: Tensor, shift: Tensor | None) -> Tensor:
        if broken.seen >= 10:
            raise KeyboardInterrupt
        return Eye.run(broken, pixels, shift)

    with pytest.raises(KeyboardInterrupt):
        keep_features(data, [0, 1, 2], [replace(broken.look(), run=stop)], 2, 1000, print, tmp_path / "kept")
    rest, said = Eye(), list[str]()
    keep_features(data, [0, 1, 2], [rest.look()], 2, 1000, said.append, tmp_path / "kept")
    assert rest.seen == 2 * (3 + 4)  # not the first episode
    assert "features of 7 frames" in said[0]
    again = Eye()
    first = keep_features(data, [0, 1, 2], [again.look()], 2, 1000, said.append, tmp_path / "kept")
    assert again.seen == 0
    assert len(said) == 3  # what is computed, and how far it has come
    alone = keep_features(data, [0, 1, 2], [Eye().look()], 2, 1000, print, tmp_path / "elsewhere")
    for view in (0, 1):
        asked = (np.array([0, 1, 2]), np.array([[4], [2], [3]]), np.full(3, view))
        np.testing.assert_array_equal(first["rgb_wrist"].rows(*asked)[0], alone["rgb_wrist"].rows(*asked)[0])


def test_only_the_episodes_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PART_BYTES", 1)
    monkeypatch.setattr(features, "_seconds", lambda plan: 0.1)
    eye = Eye()
    keep_features(source(tmp_path), [1], [eye.look()], 2, 1000, print, tmp_path / "kept")
    assert eye.seen == 2 * 3


@pytest.mark.parametrize("other", ["crop", "backbone", "frames", "views"])
def test_features_of_something_else_are_not_taken(tmp_path: Path, other: str) -> None:
    keep_features(source(tmp_path), [0, 1, 2], [Eye().look()], 2, 1000, print, tmp_path / "kept")
    eye, data, views = Eye(), source(tmp_path, brightness=100 if other == "frames" else 0), 3 if other == "views" else 2
    look = eye.look(replace(SPEC, crop=(2, 2))) if other == "crop" else eye.look(weights="others")
    kept = keep_features(
        data, [0], [look if other in ("crop", "backbone") else eye.look()], views, 1000, print, tmp_path / "kept"
    )
    assert eye.seen >= 5
    found, _ = kept["rgb_wrist"].rows(np.array([0]), np.array([[1]]), np.array([0]))
    assert found[0, 0, 0] == (111 if other == "frames" else 11)


def test_damaged_features_are_computed_again(tmp_path: Path) -> None:
    data = source(tmp_path)
    keep_features(data, [0, 1, 2], [Eye().look()], 1, 1000, print, tmp_path / "kept")
    (file,) = (tmp_path / "kept").rglob("features.npy")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    eye, said = Eye(), list[str]()
    kept = keep_features(data, [0, 1, 2], [eye.look()], 1, 1000, said.append, tmp_path / "kept")
    assert eye.seen == sum(LENGTHS)
    assert "damaged" in said[0]
    assert kept["rgb_wrist"].rows(np.array([2]), np.array([[3]]), np.array([0]))[0][0, 0, 0] == 33


def test_many_frames_get_fewer_views_and_a_full_disk_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = source(tmp_path)
    assert keep_features(data, [0, 1, 2], [Eye().look()], 4, 30, print, tmp_path / "a")["rgb_wrist"].views == 2
    assert keep_features(data, [0, 1, 2], [Eye().look()], 4, 3, print, tmp_path / "b")["rgb_wrist"].views == 1
    usage = namedtuple("usage", "free")(1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said: list[str] = []
    assert keep_features(data, [0], [Eye().look()], 1, 1000, said.append, tmp_path / "c") == {}
    assert "no room" in said[0]
    (tmp_path / "file").touch()
    with pytest.raises(PrismError, match="set PRISM_DATA"):
        keep_features(data, [0], [Eye().look()], 1, 1000, print, tmp_path / "file" / "kept")


def test_windows_show_kept_features_in_place_of_pictures(tmp_path: Path) -> None:
    data = source(tmp_path)
    kept = keep_features(data, [0, 1, 2], [Eye().look()], 2, 1000, print, tmp_path / "kept")
    windows = Windows(data, 2, 2, [2, 0], kept=kept)
    assert windows.lazy_sensors == ()
    batch = windows.batch(np.array([0, 3, 8]))
    stream = batch.observation.streams["rgb_wrist"]
    assert stream.dtype == torch.float16
    assert stream[..., 0].tolist() == [[30, 30], [32, 33], [13, 14]]
    assert windows.batch(np.array([1])).observation.present["rgb_wrist"].tolist() == [[True, False]]
    part = portion(data, [2], np.array([3]))
    shorter = Windows(part, 1, 2, kept={"rgb_wrist": kept["rgb_wrist"].chosen(np.array([2]))})
    assert shorter.batch(np.array([2])).observation.streams["rgb_wrist"][0, 0, 0] == 32


def test_views_are_drawn_by_step_and_alike_on_all_ranks(tmp_path: Path) -> None:
    data = source(tmp_path)
    kept = keep_features(data, [0, 1, 2], [Eye().look()], 4, 1000, print, tmp_path / "kept")
    windows = Windows(data, 1, 2, kept=kept)
    whole = BatchOrder(len(windows), 6, seed=3)
    parts = [BatchOrder(len(windows), 6, 3, rank, 2) for rank in range(2)]
    assert np.concatenate([part.views(5) for part in parts]).tolist() == whole.views(5).tolist()
    with Loader(windows, whole) as loader:
        first = [next(loader).observation.streams["rgb_wrist"] for _ in range(4)]
    with Loader(windows, whole, start_step=2) as loader:
        assert torch.equal(next(loader).observation.streams["rgb_wrist"], first[2])
    assert any(bool(stream[..., 1:].any()) for stream in first)  # moved
