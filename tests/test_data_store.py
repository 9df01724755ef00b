"""The own format: round trips, atomicity, and one clear line for each way a dataset can be broken."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.data import open_dataset, with_sensors
from prism.data.episodes import Episode
from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorSpec
from tests.data_fakes import read_all

SENSORS = (SensorSpec("proprio", "vector", (3,)), SensorSpec("cam", "rgb", (4, 5, 3)))
LENGTHS = (4, 1, 6)


def make_episodes(seed: int = 0) -> list[tuple[dict[str, Any], Any]]:
    rng = np.random.default_rng(seed)
    return [
        (
            {
                "proprio": rng.normal(size=(length, 3)).astype(np.float32),
                "cam": rng.integers(0, 256, (length, 4, 5, 3), dtype=np.uint8),
            },
            rng.normal(size=(length, 2)).astype(np.float32),
        )
        for length in LENGTHS
    ]


def write(path: Path, **options: Any) -> Path:
    with DatasetWriter(path, SENSORS, 2, 20.0, "toy", **options) as writer:
        for streams, actions in make_episodes():
            writer.add(streams, actions)
    return path


def assert_one_line(error: pytest.ExceptionInfo[PrismError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_round_trip(tmp_path: Path) -> None:
    source = open_dataset(write(tmp_path / "set", provenance={"expert": "me"}))
    assert isinstance(source, StoreSource)
    assert (source.task, source.fps, source.action_dim, source.sensors) == ("toy", 20.0, 2, SENSORS)
    assert source.provenance == {"expert": "me"}
    assert source.lengths.tolist() == list(LENGTHS)
    for index, (streams, actions) in enumerate(make_episodes()):
        episode = source.read(index)
        assert episode.length == len(actions)
        np.testing.assert_array_equal(episode.actions, actions)
        for name, values in streams.items():
            assert episode.streams[name].dtype == values.dtype
            np.testing.assert_array_equal(episode.streams[name], values)
    part = source.read(2, 1, 4, streams=("proprio",))
    assert list(part.streams) == ["proprio"]
    np.testing.assert_array_equal(part.streams["proprio"], make_episodes()[2][0]["proprio"][1:4])


def test_presence_round_trip(tmp_path: Path) -> None:
    (streams, actions), *rest = make_episodes()
    broken = {**streams, "proprio": np.where(np.arange(4)[:, None] == 2, np.nan, streams["proprio"])}
    with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy") as writer:
        writer.add(broken, actions, present={"proprio": np.arange(4) != 2})  # NaN is fine where it was absent
        writer.add(*rest[0])
    source = open_dataset(tmp_path / "set")
    assert source.read(0).present["proprio"].tolist() == [True, True, False, True]
    assert source.read(1).present["proprio"].all()
    assert "cam" not in source.read(0).present


def test_sensor_subset_reads_nothing_else(tmp_path: Path) -> None:
    class Watched(StoreSource):
        asked: list[Any] = []  # noqa: RUF012

        def read(self, episode: int, start: int = 0, stop: int | None = None, streams: Any = None) -> Episode:
            self.asked.append(streams)
            return super().read(episode, start, stop, streams)

    source = Watched(write(tmp_path / "set"))
    view = with_sensors(source, ["proprio"])
    assert [s.name for s in view.sensors] == ["proprio"]
    assert list(view.read(0).streams) == ["proprio"]
    assert source.asked == [["proprio"]]
    with pytest.raises(PrismError, match="no sensor named lidar"):
        with_sensors(source, ["lidar"])
    with pytest.raises(PrismError, match="no sensor named cam"):
        view.read(0, streams=["cam"])


def test_pickled_source_is_small_and_works(tmp_path: Path) -> None:
    source = open_dataset(write(tmp_path / "set"))
    data = pickle.dumps(source)
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data).read(2).actions, source.read(2).actions)


@pytest.mark.parametrize(("episode", "start", "stop"), [(3, 0, None), (-1, 0, None), (0, 0, 5), (0, 3, 2), (0, -1, 2)])
def test_steps_that_do_not_exist(tmp_path: Path, episode: int, start: int, stop: int | None) -> None:
    source = open_dataset(write(tmp_path / "set"))
    with pytest.raises(PrismError, match="set: "):
        source.read(episode, start, stop)


class TestWriter:
    def test_an_exception_leaves_nothing_behind(self, tmp_path: Path) -> None:
        def interrupted() -> None:
            with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy") as writer:
                writer.add(*make_episodes()[0])
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_visible_before_close(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy") as writer:
            writer.add(*make_episodes()[0])
            assert not (tmp_path / "set").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["set"]

    def test_overwriting_must_be_asked_for(self, tmp_path: Path) -> None:
        write(tmp_path / "set")
        with pytest.raises(PrismError, match="exists already") as error:
            write(tmp_path / "set")
        assert_one_line(error, str(tmp_path / "set"))
        with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "new", overwrite=True) as writer:
            writer.add(*make_episodes()[0])
            assert open_dataset(tmp_path / "set").lengths.tolist() == list(LENGTHS)  # until the new one is complete
        assert open_dataset(tmp_path / "set").lengths.tolist() == [4]
        assert [p.name for p in tmp_path.iterdir()] == ["set"]

    def test_another_folder_is_never_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.txt").write_text("years of work")
        with pytest.raises(PrismError, match="not a prism dataset"):
            write(tmp_path / "home", overwrite=True)
        assert (tmp_path / "home" / "thesis.txt").exists()

    def test_no_episode_is_no_dataset(self, tmp_path: Path) -> None:
        with (
            pytest.raises(PrismError, match="no episode was recorded"),
            DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy"),
        ):
            pass
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"actions": np.full((4, 2), np.nan)}, "'actions' is NaN or infinite at step 0"),
            ({"actions": np.zeros((4, 3))}, "'actions' has shape (4, 3)"),
            ({"actions": np.zeros((0, 2))}, "is empty"),
            ({"proprio": np.zeros((3, 3))}, "'proprio' has shape (3, 3), needs (4, 3)"),
            ({"proprio": np.full((4, 3), np.inf)}, "'proprio' is NaN or infinite"),
            ({"cam": np.zeros((4, 4, 5, 3))}, "'cam' is float64, pixels must be uint8"),
            ({"extra": np.zeros((4, 3))}, "needs the streams"),
        ],
    )
    def test_bad_episodes_are_refused_and_the_rest_kept(
        self, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        streams, actions = make_episodes()[0]
        bad = {**streams, **change}
        bad_actions = bad.pop("actions", actions)
        with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy") as writer:
            writer.add(streams, actions)
            with pytest.raises(PrismError) as error:
                writer.add(bad, bad_actions)
            assert_one_line(error, "episode 1", message)
            writer.add(streams, actions)
        source = open_dataset(tmp_path / "set")
        assert source.lengths.tolist() == [4, 4]
        np.testing.assert_array_equal(source.read(1).actions, actions)

    @pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "actions", "x.present"])
    def test_names_that_cannot_be_files(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(PrismError):
            DatasetWriter(tmp_path / "set", [SensorSpec(name, "vector", (1,))], 2, 20.0, "toy")
        assert list(tmp_path.iterdir()) == []

    def test_two_sensors_of_one_name(self, tmp_path: Path) -> None:
        with pytest.raises(PrismError, match="two sensors are named 'a'"):
            DatasetWriter(tmp_path / "set", [SensorSpec("a", "vector", (1,))] * 2, 2, 20.0, "toy")


def rewrite(path: Path, data: dict[str, Any]) -> None:
    """As a person would: without the checksum of the whole."""
    data.pop("own_checksum", None)
    (path / "dataset.json").write_text(json.dumps(data))


def edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rewrite(path, {**json.loads((path / "dataset.json").read_text()), key: value})

    return change


def drop(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = json.loads((path / "dataset.json").read_text())
        del data[key]
        rewrite(path, data)

    return change


def unchecked(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """The change to a dataset that was recorded before there were checksums."""

    def both(path: Path) -> None:
        drop("checksums")(path)
        change(path)

    return both


def flip(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[-3] ^= 0x10
        (path / name).write_bytes(bytes(data))

    return change


def save(name: str, array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path / name, array, allow_pickle=True)


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: int(len(data) * keep)])

    return change


def nan_action(path: Path) -> None:
    actions = np.load(path / "actions.npy")
    actions[6, 1] = np.nan  # episode 2 begins at row 5
    np.save(path / "actions.npy", actions)


def twin_sensors(path: Path) -> None:
    data = json.loads((path / "dataset.json").read_text())
    data["sensors"].append(data["sensors"][0])
    rewrite(path, data)


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "not JSON": (lambda p: (p / "dataset.json").write_text("{"), ("dataset.json", "not readable as JSON")),
    "not text": (lambda p: (p / "dataset.json").write_bytes(b"\xff\xfe\x00"), ("dataset.json", "not readable")),
    "a list": (lambda p: (p / "dataset.json").write_text("[]"), ("dataset.json", "holds a list")),
    "deep": (lambda p: (p / "dataset.json").write_text("[" * 100_000), ("dataset.json", "not readable")),
    "version": (edit("format_version", 99), ("dataset.json", "'format_version' is 99", "use the prism that wrote it")),
    "fps": (edit("fps", -1), ("dataset.json", "'fps'")),
    "fps kind": (edit("fps", "fast"), ("dataset.json", "'fps'")),
    "task kind": (edit("task", 3), ("dataset.json", "'task'")),
    "action_dim kind": (edit("action_dim", 2.5), ("dataset.json", "'action_dim'")),
    "action_dim": (edit("action_dim", 3), ("actions.npy", "(11, 2)", "(11, 3)")),
    "provenance": (edit("provenance", "me"), ("dataset.json", "'provenance'")),
    "sensors": (edit("sensors", "cam"), ("dataset.json", "'sensors'")),
    "no sensors": (edit("sensors", []), ("dataset.json", "'sensors'", "at least one")),
    "sensor kind": (edit("sensors", [{"name": "x", "kind": "smell", "shape": [1]}]), ("'sensors'", "smell")),
    "sensor keys": (edit("sensors", [{"name": "x"}]), ("dataset.json", "'sensors'")),
    "sensor path": (edit("sensors", [{"name": "../x", "kind": "vector", "shape": [1]}]), ("'sensors'", "../x")),
    "twins": (twin_sensors, ("dataset.json", "two sensors are named 'proprio'")),
    "ends kind": (edit("episode_ends", [4, 5.5, 11]), ("dataset.json", "'episode_ends'")),
    "ends nested": (edit("episode_ends", [[4], [5]]), ("dataset.json", "'episode_ends'")),
    "no ends": (edit("episode_ends", []), ("dataset.json", "'episode_ends'")),
    "empty episode": (edit("episode_ends", [4, 4, 11]), ("dataset.json", "episode 1 is empty")),
    "falling ends": (edit("episode_ends", [5, 4, 11]), ("dataset.json", "episode 1 ends before it starts")),
    "ends beyond": (edit("episode_ends", [4, 5, 12]), ("actions.npy", "(12, 2)")),
    "missing stream": (lambda p: (p / "cam.npy").unlink(), ("cam.npy", "not found")),
    "missing actions": (lambda p: (p / "actions.npy").unlink(), ("actions.npy", "not found")),
    "truncated actions": (cut("actions.npy", 0.9), ("actions.npy", "truncated")),
    "truncated header": (cut("actions.npy", 0.1), ("actions.npy", "truncated")),
    "truncated images": (cut("cam.npy", 0.5), ("cam.npy", "truncated")),
    "empty file": (cut("cam.npy", 0), ("cam.npy", "truncated")),
    "trailing bytes": (lambda p: (p / "cam.npy").open("ab").write(b"x"), ("cam.npy", "bytes behind")),
    "NaN action": (unchecked(nan_action), ("actions.npy", "episode 2: NaN or infinity at step 1")),
    "NaN vector": (
        unchecked(save("proprio.npy", np.full((11, 3), np.inf, np.float32))),
        ("proprio.npy", "episode 0: NaN or infinity at step 0"),
    ),
    "dtype": (save("proprio.npy", np.zeros((11, 3))), ("proprio.npy", "float64")),
    "shape": (save("cam.npy", np.zeros((11, 5, 4, 3), np.uint8)), ("cam.npy", "(11, 5, 4, 3)")),
    "Fortran": (save("proprio.npy", np.asfortranarray(np.zeros((11, 3), np.float32))), ("proprio.npy",)),
    "objects": (save("proprio.npy", np.array([{"run": "me"}])), ("proprio.npy", "pickled objects")),
    "archive": (lambda p: np.savez((p / "proprio.npy").open("wb"), a=np.zeros(3)), ("proprio.npy", "not a .npy file")),
    "edited": (
        lambda p: (p / "dataset.json").write_text((p / "dataset.json").read_text().replace("20.0", "30.0")),
        ("dataset.json", "own_checksum"),
    ),
    "flipped action": (flip("actions.npy"), ("actions.npy", "fail their checksum")),
    "flipped checksum": (flip("proprio.crc.npy"), ("proprio.npy", "fail their checksum")),
    "missing checksum": (lambda p: (p / "cam.crc.npy").unlink(), ("cam.crc.npy", "not found")),
    "presence": (save("cam.present.npy", np.ones(3, np.bool_)), ("cam.present.npy", "(3,)")),
    **{
        f"no {key}": (drop(key), ("dataset.json", f"'{key}' is missing"))
        for key in ("format_version", "task", "fps", "sensors", "action_dim", "episode_ends")
    },
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_datasets(tmp_path: Path, name: str) -> None:
    change, parts = BROKEN[name]
    path = write(tmp_path / "set")
    change(path)
    with pytest.raises(PrismError) as error:
        read_all(path)
    assert_one_line(error, str(path), *parts)


def test_pixels_are_checked_when_read(tmp_path: Path) -> None:
    path = write(tmp_path / "set")
    flip("cam.npy")(path)
    source = open_dataset(path)
    source.read(2, streams=["proprio"])
    with pytest.raises(PrismError, match=r"episode 2: .*cam\.npy: damaged: rows 0\.\.273 .*--skip-damaged"):
        source.read(2)


def test_datasets_without_checksums_are_read_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "set")
    drop("checksums")(path)
    source = open_dataset(path)
    assert any("without checksums" in note for note in source.notes)
    np.testing.assert_array_equal(source.read(2).streams["cam"], make_episodes()[2][0]["cam"])


def test_long_episodes_in_parts(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", SENSORS, 2, 20.0, "toy") as writer:
        for streams, actions in make_episodes():
            for step in range(len(actions)):
                writer.extend({k: v[step : step + 1] for k, v in streams.items()}, actions[step : step + 1])
            with pytest.raises(PrismError, match="still open"):
                writer.add(streams, actions)
            writer.end_episode()
    for name in sorted(p.name for p in write(tmp_path / "whole").iterdir()):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path / "set")
    source = open_dataset(path)
    cut("cam.npy", 0.3)(path)
    with pytest.raises(PrismError, match="became shorter"):  # a memory map would kill the process
        source.read(2)


def test_unknown_paths(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="not found"):
        open_dataset(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(PrismError) as error:
            open_dataset(path)
        assert_one_line(error, str(path), "dataset.json", "zarr")


def test_a_recording_of_two_kinds_of_actions_is_refused(tmp_path: Path) -> None:
    """Somebody has moved the episodes of two recordings into one folder."""
    streams, actions = make_episodes()[0]
    for number, kind in enumerate(("delta", "delta", "absolute")):
        folder = tmp_path / f"episode-{number:06d}"
        with DatasetWriter(folder, SENSORS, 2, 20.0, "toy", action=ActionSpec(kind=kind)) as writer:
            writer.add(streams, actions)
    with pytest.raises(PrismError, match="episode-000002: has other sensors, actions"):
        open_dataset(tmp_path)
