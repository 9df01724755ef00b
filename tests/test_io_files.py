"""Locks of folders, and folders that are replaced while others read or write them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.io import files
from prism.io.files import exclusive, replace_folder
from prism.sensors import SensorSpec


def test_a_lock_that_is_a_link_empties_no_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(PrismError, match=r"\.lock is a symbolic link"), exclusive(folder):
        pass
    (folder / ".lock").unlink()
    (folder / ".lock").hardlink_to(precious)  # may be locked, and is not written to
    with exclusive(folder):
        pass
    assert precious.read_text() == "years of work"


def dataset(path: Path, value: float, overwrite: bool = False, steps: int = 5) -> DatasetWriter:
    writer = DatasetWriter(path, [SensorSpec("proprio", "vector", (2,))], 1, 10.0, "test", overwrite=overwrite)
    writer.add({"proprio": np.full((steps, 2), value)}, np.full((steps, 1), value))
    return writer


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    first = dataset(tmp_path / "set", 1.0)
    with pytest.raises(PrismError, match="set is in use by another prism process"):
        dataset(tmp_path / "set", 2.0)
    first.close()
    assert StoreSource(tmp_path / "set").read(0).actions[0, 0] == 1.0
    assert [child.name for child in tmp_path.iterdir()] == ["set"], "the lock is gone"
    dataset(tmp_path / "set", 3.0, overwrite=True).close()
    assert StoreSource(tmp_path / "set").read(0).actions[0, 0] == 3.0


def test_a_folder_that_another_program_made_meanwhile_is_kept(tmp_path: Path) -> None:
    writer = dataset(tmp_path / "set", 1.0)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "precious").touch()
    with pytest.raises(PrismError, match="the new data are in") as error:
        writer.close()
    assert (tmp_path / "set" / "precious").exists()
    other = Path(str(error.value).rpartition(" ")[2])
    assert StoreSource(other).read(0).actions[0, 0] == 1.0


def test_readers_find_a_dataset_while_it_is_overwritten(tmp_path: Path) -> None:
    """The old one or the new one, and none of a half."""
    path = tmp_path / "set"
    dataset(path, 0.0).close()
    over, found = threading.Event(), list[str]()

    def read() -> None:
        while not over.is_set():
            try:
                episode = StoreSource(path).read(0)
                if len(set(episode.actions.ravel()) | set(episode.streams["proprio"].ravel())) > 1:
                    found.append("mixed")
            except PrismError as error:
                found.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for round_number in range(1, 40):
        dataset(path, float(round_number), overwrite=True, steps=5 + round_number).close()
    over.set()
    reader.join()
    assert not found


def test_what_killed_writers_left_goes_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.test_io_files import dataset\n"
        "dataset(Path(sys.argv[1]) / 'killed', 1.0); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent)
    assert list(tmp_path.glob(".tmp-*-killed")), "it died in the middle"
    (tmp_path / ".tmp-0123456789abcdef.old-half").mkdir()
    (tmp_path / ".tmp-0123456789abcdef-half").mkdir()  # killed between the two renames
    (tmp_path / ".tmp-lock-gone").touch()
    working = dataset(tmp_path / "working", 1.0)
    dataset(tmp_path / "other", 1.0).close()
    working.close()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["half", "other", "working"]


def test_names_are_exchanged_where_the_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        monkeypatch.setattr("prism.io.files._exchange", files._exchange if name == "here" else lambda *_: False)
        (tmp_path / name).mkdir()
        (tmp_path / f".tmp-0123456789abcdef-{name}").mkdir()
        (tmp_path / f".tmp-0123456789abcdef-{name}" / "new").touch()
        replace_folder(tmp_path / f".tmp-0123456789abcdef-{name}", tmp_path / name)
        assert (tmp_path / name / "new").exists()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["here", "there"]
