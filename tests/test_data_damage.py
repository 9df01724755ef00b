"""Data as people have it: missing files, LFS pointers, cameras to leave out, keys to ignore."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prism_client import ActionKind
from rich.console import Console

from prism import cli
from prism.data import open_dataset, parse_map
from prism.data.damage import parse_episodes, remedies_as_settings
from prism.data.formats.store import Checksums, as_bytes
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations, open_demonstrations
from prism.experiments.recipes import recipe
from prism.experiments.trials import Trials
from prism.io.jsonconfig import with_settings
from prism.normalize import compute_statistics
from prism.sensors import ActionSpec, SensorSpec
from tests.data_fakes import inspect
from tests.data_files import LENGTHS, write_lerobot_v3, write_lerobot_v21, write_robomimic

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"


def videos(path: Path) -> list[Path]:
    return sorted(path.glob("videos/**/*.mp4"))


def broken(tmp_path: Path) -> Path:
    """Two of three episodes lack a video: one is gone, one is a pointer."""
    path = write_lerobot_v21(tmp_path / "set")
    missing, pointer = videos(path)[0], videos(path)[1]
    missing.unlink()
    pointer.write_text(POINTER)
    return path


def test_a_missing_file_is_named_with_what_helps(tmp_path: Path) -> None:
    path = broken(tmp_path)
    with pytest.raises(PrismError, match=r"2 of 3 episodes are damaged \(episode 0: videos/.*not found\); ") as error:
        open_dataset(path)
    assert "\n" not in str(error.value)
    camera = next(s.name for s in open_dataset(path, skip_damaged=None).sensors if s.kind == "rgb")
    ways = f"leave out the episodes with --skip-damaged or --episodes 2, or that sensor with --without {camera}"
    assert str(error.value).endswith(ways)
    assert len(open_dataset(path, skip_damaged=True).lengths) == 1
    assert len(open_dataset(path, without=[camera]).lengths) == 3
    assert open_dataset(path, episodes="2").lengths.tolist() == [LENGTHS[2]]
    with pytest.raises(PrismError, match="Git-LFS pointer"):
        open_dataset(path, episodes="1")
    with pytest.raises(PrismError, match=r"--without nose: .* has the sensors"):
        open_dataset(path, without=["nose"])


def test_pointers_of_a_whole_dataset_are_recognised(tmp_path: Path) -> None:
    path = write_lerobot_v3(tmp_path / "set")
    for file in videos(path):
        file.write_text(POINTER)
    with pytest.raises(PrismError, match=r"Git-LFS pointer.*git lfs pull"):
        open_dataset(path)
    with pytest.raises(PrismError, match=r"all 3 episodes.*; leave out that sensor with --without \w+$") as error:
        open_dataset(path, skip_damaged=True)
    assert "--skip-damaged" not in str(error.value)


def test_inspect_lists_everything_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(tmp_path)
    summary = inspect(path)
    assert len(summary.lengths) == 1
    assert [w.split(" is damaged")[0] for w in summary.warnings if " is damaged" in w] == ["episode 0", "episode 1"]
    assert cli.main(["data", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "not found" in out
    assert "Git-LFS" in " ".join(out.split())


def test_convert_leaves_damaged_episodes_out(tmp_path: Path) -> None:
    path = broken(tmp_path)
    assert cli.main(["data", "convert", str(path), str(tmp_path / "out")]) == 2
    assert cli.main(["data", "convert", str(path), str(tmp_path / "out"), "--skip-damaged"]) == 0
    assert open_dataset(tmp_path / "out").lengths.tolist() == [LENGTHS[2]]
    notes = json.loads((tmp_path / "out/dataset.json").read_text())["provenance"]["notes"]
    assert any("2 of 3 episodes are damaged and left out" in note for note in notes)


def nan_robomimic(path: Path) -> Path:
    import h5py

    with h5py.File(write_robomimic(path.with_suffix(".hdf5")), "r+") as file:
        file["data/demo_1/obs/robot0_eef_pos"][1, 0] = np.nan
    return path.with_suffix(".hdf5")


def nan_lerobot(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = sorted(write_lerobot_v21(path).glob("data/**/*.parquet"))[1]
    table = pq.read_table(file)
    rows = np.stack(table["action"].to_pylist()).astype(np.float32)
    rows[1, 0] = np.inf
    at = table.column_names.index("action")
    pq.write_table(table.set_column(at, "action", pa.array(list(rows), table.schema.field("action").type)), file)
    return path


def nan_zarr(path: Path) -> Path:
    import zarr

    rows = np.random.default_rng(0).normal(size=(sum(LENGTHS), 2)).astype(np.float32)
    bad = rows.copy()
    bad[LENGTHS[0] + 1, 1] = np.nan
    root = zarr.open_group(str(path), mode="w")
    root["data/state"], root["data/action"] = rows, bad
    root["meta/episode_ends"] = np.cumsum(LENGTHS)
    return path


def nan_store(path: Path) -> Path:
    rng = np.random.default_rng(0)
    sensors = SensorSpec("force", "vector", (3,)), SensorSpec("pose", "vector", (2,))
    with DatasetWriter(path, sensors, 2, 10.0, "reach", action=ActionSpec(kind=ActionKind.ABSOLUTE)) as writer:
        for length in LENGTHS:
            streams = {spec.name: rng.normal(size=(length, *spec.shape)) for spec in sensors}
            writer.add(streams, rng.normal(size=(length, 2)))
    return put_nan(path, "force", LENGTHS[0] + 1)


def nan_pushes(path: Path) -> Path:
    """Push-T's state, NaN in the second of four episodes."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, (SensorSpec("state", "vector", (5,)),), 2, 10.0, "pusht") as writer:
        for _ in range(4):
            state = np.cumsum(rng.normal(0, 3, (30, 5)), axis=0) + np.array([256, 256, 200, 300, 1])
            writer.add({"state": state}, state[:, :2] + 5)
    return put_nan(path, "state", 35)


def put_nan(path: Path, sensor: str, row: int) -> Path:
    rows = np.load(path / f"{sensor}.npy")
    rows[row, 1] = np.nan
    np.save(path / f"{sensor}.npy", rows)
    sums = Checksums(rows[0].nbytes)
    sums.add(as_bytes(rows))
    np.save(path / f"{sensor}.crc.npy", sums.result())
    return path


def test_an_episode_of_a_recording_has_its_number(tmp_path: Path) -> None:
    for number in range(3):
        sensors = (SensorSpec("pose", "vector", (2,)),)
        with DatasetWriter(tmp_path / f"episode-{number:06}", sensors, 2, 10.0, "reach") as writer:
            writer.add({"pose": np.zeros((5, 2))}, np.zeros((5, 2)))
    rows = tmp_path / "episode-000001" / "pose.npy"
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    with pytest.raises(
        PrismError, match=r"^episode 1: .*pose.npy: damaged: .*; --skip-damaged leaves that episode out$"
    ):
        compute_statistics(open_dataset(tmp_path))
    assert len(open_dataset(tmp_path, skip_damaged=True).lengths) == 2


HOLES = {nan_robomimic: "robot0_eef_pos", nan_lerobot: "action", nan_zarr: "action", nan_store: "force"}


@pytest.mark.parametrize("write", HOLES)
def test_an_episode_with_nan_is_damaged(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path / "set")
    what = rf"episode 1.*{HOLES[write]}|{HOLES[write]}.*episode 1"
    with pytest.raises(PrismError, match=r"NaN or infinity at step 1; .*--skip-damaged") as error:
        compute_statistics(open_dataset(path))
    assert re.search(what, str(error.value))
    left = open_dataset(path, skip_damaged=True)
    assert left.lengths.tolist() == [LENGTHS[0], LENGTHS[2]]
    (note,) = (note for note in left.notes if "NaN" in note)
    assert re.fullmatch(rf"episode 1 is damaged and left out: .*{HOLES[write]}.*: NaN or infinity at step 1", note)
    assert note.count("episode 1") == 1
    (note,) = (note for note in open_dataset(path, episodes="1-", skip_damaged=True).notes if "NaN" in note)
    assert note.startswith("episode 1 is damaged"), "as the dataset calls it"
    compute_statistics(left)
    found = inspect(path)
    assert len(found.lengths) == 2
    assert any(re.match(rf"episode 1 is damaged: .*{HOLES[write]}", warning) for warning in found.warnings)
    assert any("--skip-damaged or --episodes 0,2" in warning for warning in found.warnings)


def test_training_leaves_an_episode_with_nan_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = nan_store(tmp_path / "set")
    command = ["train", str(path), "--steps", "2", "--preset", "tiny", "--out", str(tmp_path / "run")]
    assert cli.main(command) == cli.EXIT_USER
    error = capfd.readouterr().err
    assert "force.npy: episode 1: NaN or infinity at step 1" in error
    assert "--skip-damaged" in error
    assert cli.main([*command, "--skip-damaged"]) == 0
    said = capfd.readouterr().err
    assert "set: episode 1 is damaged and left out: force.npy: NaN or infinity at step 1\n" in said
    assert "--skip-damaged" not in said
    assert cli.main([*command[:-1], str(tmp_path / "fewer"), "--without", "force"]) == 0  # nobody reads it


def test_a_comparison_names_the_settings_that_leave_damage_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prism compare` has no --skip-damaged and no --without, and its --episodes are others: what it says must work."""
    path = nan_pushes(tmp_path / "pushes")
    data = ["demonstrations.kind=path", f"demonstrations.path={path}", "demonstrations.mirror=false"]
    command = ["compare", "pusht", "--methods", "mse", "--steps", "1", "--out", str(tmp_path / "out"), "--set", *data]
    assert cli.main(command) == cli.EXIT_USER
    error = capfd.readouterr().err
    assert "state.npy: episode 1: NaN or infinity at step 5" in error
    assert "; --set demonstrations.skip_damaged=true leaves that episode out" in error
    assert "--skip-damaged" not in error
    monkeypatch.setattr(Trials, "run", lambda *_: {})  # nothing is trained
    capfd.readouterr()
    assert cli.main([*command, "demonstrations.skip_damaged=true"]) == cli.EXIT_USER
    assert "3 of 3 trials are missing" in capfd.readouterr().err, "nothing else is wrong"

    with pytest.raises(PrismError) as refused, remedies_as_settings():
        open_dataset(broken(tmp_path))
    skip, only, without = (word for word in shlex.split(str(refused.value)) if word.startswith("demonstrations."))
    kept = Demonstrations("path", path=str(tmp_path / "set"))
    for setting, episodes in ((skip, 1), (only.rstrip(","), 1), (without, 3)):
        _, source, _ = open_demonstrations(with_settings(kept, [setting.partition(".")[2]]), None, Console(quiet=True))
        assert len(source.lengths) == episodes, setting


def test_episodes_in_words() -> None:
    assert parse_episodes("0-2,5,8-", 10, "x") == [0, 1, 2, 5, 8, 9]
    assert parse_episodes("3", 4, "x") == [3]
    for wrong in ("4", "2-1", "a", "-3", "1--2", ","):
        with pytest.raises(PrismError, match=r"--episodes .*for example 0,2-"):
            parse_episodes(wrong, 4, "x")
    assert parse_episodes("0,2-", 3, "x") == [0, 2]
    with pytest.raises(PrismError, match=r"has episodes 0-1; write for example 0$"):
        parse_episodes("2", 2, "x")


def test_a_key_without_a_sensor_is_ignored(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "set.hdf5")
    guessed = {s.name for s in open_dataset(path).sensors}
    fewer = {s.name for s in open_dataset(path, entries=parse_map(["robot0_eef_quat="])).sensors}
    assert guessed - fewer == {"robot0_eef_quat"}
    both = open_dataset(path, entries=parse_map(["robot0_eef_pos=proprio", "robot0_eef_quat="]))
    assert [s.name for s in both.sensors] == ["proprio"]
    assert not any("robot0_eef_quat" in note for note in both.notes)
    with pytest.raises(PrismError, match="no key 'robot0_eef_qat'"):
        open_dataset(path, entries=parse_map(["robot0_eef_qat="]))


def test_a_path_that_is_not_there_is_no_task() -> None:
    with pytest.raises(PrismError, match=r"/no/such/path: not found; give the path of a dataset") as error:
        recipe("/no/such/path")
    assert "metaworld" not in str(error.value)
