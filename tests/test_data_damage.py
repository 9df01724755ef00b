"""Data as people have it: missing files, LFS pointers, cameras to leave out, keys to ignore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism import cli
from prism.data import open_dataset, parse_map
from prism.data.damage import parse_episodes
from prism.errors import PrismError
from prism.runs.recipes import recipe
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
    with pytest.raises(PrismError, match=r"2 of 3 episodes are damaged.*not found.*--skip-damaged.*--without") as error:
        open_dataset(path)
    assert "\n" not in str(error.value)
    camera = next(s.name for s in open_dataset(path, skip_damaged=None).sensors if s.kind == "rgb")
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
    with pytest.raises(PrismError, match="all 3 episodes"):
        open_dataset(path, skip_damaged=True)


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
    assert any("left out: 0, 1" in note for note in notes)


def test_episodes_in_words() -> None:
    assert parse_episodes("0-2,5,8-", 10, "x") == [0, 1, 2, 5, 8, 9]
    assert parse_episodes("3", 4, "x") == [3]
    for wrong in ("4", "2-1", "a", "-3", "1--2", ","):
        with pytest.raises(PrismError, match=r"--episodes .*0-46,48-"):
            parse_episodes(wrong, 4, "x")


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
