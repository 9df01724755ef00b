"""Work that survives being killed: each cell of a study is one file, written whole or not at all.

    WORK/cells/NAME.json   {"settings": what determines the cell, "result": what it gave}
    WORK/runs/NAME/        the run folder of a cell that trains; goes on from its checkpoint

A cell that is there is not computed again. One that was made with other settings is an error, not a surprise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.errors import PrismError
from prism.rollout.results import write_json
from prism.training import files

Result = dict[str, Any]


class Cells:
    """The cells of one study in a folder of their own."""

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder = folder
        self.console = console or Console(stderr=True)
        self.missing: list[str] = []

    def get(self, name: str, settings: dict[str, Any], compute: Callable[[], Result]) -> Result | None:
        """The result of a cell: stored, or computed and stored now. None where it failed (a diverged run, a simulator
        that is not there): `missing` then says so, the others go on, and the next call of the study tries again. A
        result that could not be stored (a full disk) is in `missing` too, but counts now."""
        path = self.folder / "cells" / f"{name}.json"
        if path.exists():
            stored = files.read_json(path, "remove it, and run the same command again")
            if stored.get("settings") != settings:
                raise PrismError(f"{path} was made with other settings: use another --work folder, or remove it")
            self._say(f"{name}: done before")
            result: Result = stored["result"]
            return result
        self._say(f"{name}: ...")
        try:
            result = compute()
        except Exception as error:  # whatever it was, the other cells are worth having
            reason = str(error) if isinstance(error, PrismError) else f"{type(error).__name__}: {error}"
            self._missing(f"{name}: {reason}")
            return None
        try:
            write_json(path, {"settings": settings, "result": result}, overwrite=True)
        except PrismError as error:
            self._missing(f"{name}: counted, but not kept for the next time: {error}")
        return result

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _missing(self, line: str) -> None:
        self.missing.append(line)
        self._say(f"missing: {line}")
