"""Diffusion Policy's zarr, written with zarr itself, as a folder and as a zip."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from prism.data import open_dataset, parse_map, with_sensors
from prism.data.formats.recent import Recent
from prism.data.formats.zarr_format import ZarrSource
from prism.data.windows import Windows
from prism.errors import PrismError
from tests.data_fakes import read_all

ROWS, ENDS = 23, (7, 8, 23)


def arrays(rows: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "action": rng.uniform(0, 512, (rows, 2)).astype(np.float32),
        "state": rng.normal(size=(rows, 5)).astype(np.float32),
        "keypoint": rng.normal(size=(rows, 9, 2)).astype(np.float32),
        "n_contacts": rng.integers(1, 3, (rows, 1)).astype(np.float32),
        "img": rng.integers(0, 256, (rows, 6, 8, 3)).astype(np.float32),
    }


def write(path: Path, data: dict[str, Any], ends: Any = ENDS, version: int = 2, chunk: int = 4) -> Path:
    root = zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
    for key, values in data.items():
        chunks = (chunk, *values.shape[1:]) if values.ndim else values.shape
        root.create_array(f"data/{key}", data=values, chunks=chunks)
    if ends is not None:
        root.create_array("meta/episode_ends", data=np.asarray(ends))
    return path


def pack(folder: Path, inside: str = "") -> Path:
    path = folder.with_suffix(".zarr.zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{inside}{file.relative_to(folder)}")
    shutil.rmtree(folder)
    return path


def layout(tmp_path: Path, name: str) -> Path:
    folder = write(tmp_path / "set.zarr", arrays(), version=3 if name == "v3" else 2)
    return {
        "folder": lambda: folder,
        "v3": lambda: folder,
        "zip": lambda: pack(folder),
        "zip of the folder": lambda: pack(folder, "pusht/set.zarr/"),
    }[name]()


@pytest.mark.parametrize("name", ["folder", "v3", "zip", "zip of the folder"])
def test_reads_what_zarr_wrote(tmp_path: Path, name: str) -> None:
    source = open_dataset(layout(tmp_path, name))
    assert isinstance(source, ZarrSource)
    expected = arrays()
    assert {s.name: (s.kind, s.shape) for s in source.sensors} == {
        "img": ("rgb", (6, 8, 3)),
        "keypoint": ("vector", (18,)),
        "n_contacts": ("vector", (1,)),
        "state": ("vector", (5,)),
    }
    assert (source.action_dim, source.fps, source.lengths.tolist()) == (2, 10.0, [7, 1, 15])
    assert any("keypoint" in note for note in source.notes)
    for episode, (start, stop) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        part = source.read(episode)
        assert part.actions.dtype == np.float32
        assert part.streams["img"].dtype == np.uint8
        np.testing.assert_array_equal(part.actions, expected["action"][start:stop])
        np.testing.assert_array_equal(part.streams["img"], expected["img"][start:stop])
        np.testing.assert_array_equal(part.streams["state"], expected["state"][start:stop])
        np.testing.assert_array_equal(part.streams["keypoint"], expected["keypoint"][start:stop].reshape(-1, 18))
    part = source.read(2, 2, 9, streams=["state"])
    assert list(part.streams) == ["state"]
    np.testing.assert_array_equal(part.streams["state"], expected["state"][10:17])
    assert source.read(0, 3, 3).length == 0
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.read(1).actions, expected["action"][7:8])


def test_decodes_only_the_chunks_it_needs_and_keeps_few(tmp_path: Path) -> None:
    frame_bytes = 6 * 8 * 3
    source = ZarrSource(write(tmp_path / "set.zarr", arrays()), cache_bytes=2 * 4 * frame_bytes + 200)
    decoded: list[tuple[str, int, int]] = []
    decode = source._decode
    source._decode = lambda key, array, start, stop: (
        decoded.append((key, start, stop))
        or decode(  # type: ignore[method-assign, func-returns-value]
            key, array, start, stop
        )
    )
    images = with_sensors(source, ["img"])
    images.read(2, 5, 7)
    assert [entry for entry in decoded if entry[0] == "img"] == [("img", 12, 16)]
    for start in range(15):
        images.read(2, start, start + 1)
    assert 0 < source._cache.total <= source._cache.limit


def test_what_was_used_last_is_kept() -> None:
    closed: list[str] = []
    recent: Recent[str, str] = Recent(5, len, closed.append)
    for word in ("one", "to", "too long", "to"):
        assert recent.keep(word, word) == word
    assert (recent.get("one"), recent.get("too long"), recent.total) == ("one", None, 5)
    recent.keep("six", "six")
    assert (closed, recent.get("six"), recent.total) == (["to", "to", "one"], "six", 3)
    recent.forget("six")
    assert (closed[-1], recent.total) == ("six", 0)


def test_pixels_of_other_types(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 4, 3), dtype=np.uint8)
    data = {"action": arrays()["action"], "bytes": pixels, "unit": pixels.astype(np.float32) / 255}
    source = open_dataset(write(tmp_path / "set.zarr", data))
    part = source.read(2)
    np.testing.assert_array_equal(part.streams["bytes"], pixels[8:])
    np.testing.assert_array_equal(part.streams["unit"], pixels[8:])
    assert any("'unit'" in note and "0 to 1" in note for note in source.notes)
    assert not any("'bytes'" in note for note in source.notes)


def test_float_pixels_that_begin_in_the_dark(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 8, 3)).astype(np.uint8)
    pixels[:8] = 0
    data = {"action": arrays()["action"], "unit": pixels.astype(np.float32) / 255}
    source = open_dataset(write(tmp_path / "set.zarr", data, chunk=12))
    np.testing.assert_array_equal(source.read(2).streams["unit"], pixels[ENDS[1] :])


def test_arrays_that_are_no_sensor_are_left_out_and_said(tmp_path: Path) -> None:
    data = {**arrays(), "odd": np.zeros((ROWS, 4, 4, 5), np.float32) + 1, "flag": np.ones(ROWS, np.bool_)}
    source = open_dataset(write(tmp_path / "set.zarr", {**data, "depth": np.ones((ROWS, 4, 5, 1), np.float32)}))
    names = {sensor.name: sensor.shape for sensor in source.sensors}
    assert "odd" not in names
    assert names["flag"] == (1,)
    assert names["depth"] == (4, 5)
    assert any("'odd'" in note and "left out" in note for note in source.notes)
    assert source.read(0).streams["flag"].shape == (7, 1)


def test_a_table_of_sensors(tmp_path: Path) -> None:
    path = write(tmp_path / "set.zarr", arrays())
    table = parse_map(["state+n_contacts=proprio", "img=rgb_static:rgb", "keypoint=action"])
    source = open_dataset(path, entries=table)
    assert [(s.name, s.kind, s.shape) for s in source.sensors] == [
        ("proprio", "vector", (6,)),
        ("rgb_static", "rgb", (6, 8, 3)),
    ]
    part, expected = source.read(1), arrays()
    np.testing.assert_array_equal(part.actions, expected["keypoint"][7:8].reshape(1, 18))
    np.testing.assert_array_equal(part.streams["proprio"][:, :5], expected["state"][7:8])
    np.testing.assert_array_equal(part.streams["proprio"][:, 5:], expected["n_contacts"][7:8])
    np.testing.assert_array_equal(part.streams["rgb_static"], expected["img"][7:8])
    assert any("left out: action" in note for note in source.notes)


def test_key_points_that_the_table_calls_a_vector_are_no_pixels(tmp_path: Path) -> None:
    hands = np.random.default_rng(0).uniform(0, 1, (ROWS, 2, 21, 3)).astype(np.float32)
    path = write(tmp_path / "set.zarr", {**arrays(), "hands": hands})
    for sources, offset in (("hands=proprio:vector", 0), ("state+hands=proprio", 5)):
        source = open_dataset(path, entries=parse_map([sources]))
        np.testing.assert_array_equal(source.read(2).streams["proprio"][:, offset:], hands[8:].reshape(15, 126))
        assert not any("pixels" in note and "hands" in note for note in source.notes)
    moves = open_dataset(path, entries=parse_map(["state=proprio", "hands=action"]))
    np.testing.assert_array_equal(moves.read(2).actions, hands[8:].reshape(15, 126))


def test_a_chunk_that_is_a_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    """It was a chunk of 67 bytes "not the 791624307 that it states"."""
    path = write(tmp_path / "set.zarr", arrays())
    (path / "data/action/5.0").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 1234\n")
    source = open_dataset(path)
    with pytest.raises(PrismError, match=r"chunk data/action/5\.0 is a Git-LFS pointer.*git lfs pull"):
        source.read(len(source.lengths) - 1)


def test_a_lost_chunk_of_actions_of_another_name(tmp_path: Path) -> None:
    path = write(tmp_path / "set.zarr", {**arrays(), "rel_action": arrays()["action"]})
    (path / "data/rel_action/1.0").unlink()
    with pytest.raises(PrismError, match="'data/rel_action' lacks 1 of its 6 chunks"):
        open_dataset(path, entries=parse_map(["rel_action=action", "state=proprio"]))


def test_trailing_steps_are_said(tmp_path: Path) -> None:
    source = open_dataset(write(tmp_path / "set.zarr", arrays(), ends=(7, 20)))
    assert source.lengths.tolist() == [7, 13]
    assert any("last 3 steps" in note for note in source.notes)


def test_chunks_of_nothing_but_zero_may_be_missing_from_a_vector(tmp_path: Path) -> None:
    data = {**arrays(), "reward": np.zeros((ROWS, 1), np.float32)}
    source = open_dataset(write(tmp_path / "set.zarr", data))
    assert any("'reward' lacks" in note for note in source.notes)
    assert not source.read(0).streams["reward"].any()


def with_value(key: str, row: int, value: float) -> dict[str, Any]:
    data = arrays()
    data[key][row] = value
    return data


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in arrays().items() if k != key}


BROKEN_CONTENT: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no action": (without("action"), ENDS, "'data/action' is missing"),
    "no ends": (arrays(), None, "'meta/episode_ends' is missing"),
    "no data": ({}, ENDS, "'data' is missing"),
    "no sensor": ({"action": arrays()["action"]}, ENDS, "no key looks like a sensor"),
    "ends beyond": (arrays(), (7, 24), "goes to 24, the data to 23"),
    "empty episode": (arrays(), (7, 7, 23), "episode 1 is empty"),
    "falling ends": (arrays(), (8, 7, 23), "episode 1 ends before"),
    "float ends": (arrays(), (7.0, 23.0), "list of integers"),
    "no episode": (arrays(), np.zeros(0, np.int64), "list of integers"),
    "flat action": ({**arrays(), "action": np.ones(ROWS, np.float32)}, ENDS, "'data/action' is float32 (23,)"),
    "short state": ({**arrays(), "state": arrays(20)["state"]}, ENDS, "'data/state' has 20 steps"),
    "NaN action": (with_value("action", 9, np.nan), ENDS, "episode 2, 'action': NaN or infinity at step 1"),
    "inf state": (with_value("state", 7, np.inf), ENDS, "episode 1, 'state': NaN or infinity at step 0"),
}


@pytest.mark.parametrize("name", BROKEN_CONTENT)
def test_broken_content(tmp_path: Path, name: str) -> None:
    data, ends, message = BROKEN_CONTENT[name]
    path = write(tmp_path / "set.zarr", data, ends)
    with pytest.raises(PrismError) as error:
        read_all(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, -1.0, 256.0])
def test_bad_pixels_are_found_when_read(tmp_path: Path, value: float) -> None:
    source = open_dataset(write(tmp_path / "set.zarr", with_value("img", 20, value)))
    source.read(0)
    with pytest.raises(PrismError, match=r"'data/img' has pixels outside 0\.\.255 near step 20"):
        source.read(2)


def shorten(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "metadata is not JSON": (lambda p: (p / "data/action/.zarray").write_text("{"), "not readable as zarr"),
    "metadata lacks a key": (
        lambda p: (p / "data/state/.zarray").write_text("{}"),
        "'data/state' has no readable metadata",
    ),
    "a codec nobody has": (
        lambda p: (p / "data/state/.zarray").write_text(
            json.dumps({**json.loads((p / "data/state/.zarray").read_text()), "compressor": {"id": "nonsense"}})
        ),
        "set.zarr",
    ),
    "a chunk cut short": (lambda p: shorten(p / "data/state/0.0", 0.5), "'data/state' cannot be decoded"),
    "an empty chunk": (lambda p: shorten(p / "data/action/1.0", 0), "'data/action' cannot be decoded"),
    "a missing chunk of actions": (lambda p: (p / "data/action/1.0").unlink(), "'data/action' lacks 1 of its 6 chunks"),
    "a missing chunk of pixels": (lambda p: (p / "data/img/1.0.0.0").unlink(), "'data/img' lacks 1 of its 6 chunks"),
    "ends cut short": (lambda p: shorten(p / "meta/episode_ends/0", 0.5), "set.zarr"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders(tmp_path: Path, name: str) -> None:
    change, message = DAMAGE[name]
    path = write(tmp_path / "set.zarr", arrays())
    change(path)
    with pytest.raises(PrismError) as error:
        read_all(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_truncated_zips(tmp_path: Path, keep: float) -> None:
    path = pack(write(tmp_path / "set.zarr", arrays()))
    shorten(path, keep)
    with pytest.raises(PrismError, match="truncated or not a zip") as error:
        open_dataset(path)
    assert str(path) in str(error.value)


def test_zip_with_flipped_bytes_never_reads_as_other_data(tmp_path: Path) -> None:
    path = pack(write(tmp_path / "set.zarr", arrays()))
    original, expected = path.read_bytes(), arrays()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        damaged = bytearray(original)
        damaged[int(rng.integers(len(damaged)))] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            source = open_dataset(path)
            parts = [source.read(episode) for episode in range(len(source.lengths))]
        except PrismError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
            continue
        np.testing.assert_array_equal(np.concatenate([part.actions for part in parts]), expected["action"])
        for key in parts[0].streams:
            got = np.concatenate([part.streams[key] for part in parts])
            np.testing.assert_array_equal(got, expected[key].reshape(got.shape))
    assert refused > 10


def test_other_zips(tmp_path: Path) -> None:
    for name, entries in {
        "photos": ["a.jpg"],
        "twins": ["a/meta/episode_ends/.zarray", "b/meta/episode_ends/.zarray"],
    }.items():
        path = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for entry in entries:
                archive.writestr(entry, b"x")
        with pytest.raises(PrismError, match=name):
            open_dataset(path)


def test_human_pusht(human_pusht: Path) -> None:
    source = open_dataset(human_pusht)
    assert len(source.lengths) == 206
    assert int(source.lengths.sum()) == 25650
    assert {s.name: s.shape for s in source.sensors} == {
        "img": (96, 96, 3),
        "keypoint": (18,),
        "n_contacts": (1,),
        "state": (5,),
    }
    batch = Windows(with_sensors(source, ["state"]), 2, 16).batch(np.array([0, 161, 25649]))
    assert batch.actions.shape == (3, 16, 2)
    # the first window of episode 1 repeats its own first observation, not the end of episode 0
    np.testing.assert_array_equal(batch.observation.streams["state"][1, 0], batch.observation.streams["state"][1, 1])
    assert source.read(3, 5, 7, streams=["img"]).streams["img"].dtype == np.uint8
