"""Locks of folders, and folders that are replaced while others read or write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.errors import PrismError
from prism.io.files import exclusive


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
