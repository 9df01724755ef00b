"""Work that survives being killed: each cell of a study is one file, written whole or not at all.

    WORK/cells/NAME.json   {"settings": what determines the cell, "result": what it gave}
    WORK/runs/NAME/        the run folder of a cell that trains; goes on from its checkpoint

A cell that is there is not computed again. One that was made with other settings is an error, not a surprise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.errors import PrismError
from prism.evaluation.results import write_json
from prism.experiments import Experiment
from prism.jsonconfig import to_json
from prism.training import files
from prism.training.monitor import read_log
from prism.workflow import train_experiment

Result = dict[str, Any]


class Cells:
    """The cells of one study in a folder of their own."""

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder = folder
        self.console = console or Console(stderr=True)
        self.missing: list[str] = []

    def get(self, name: str, settings: dict[str, Any], compute: Callable[[], Result]) -> Result | None:
        """The result of a cell: stored, or computed and stored now. None where it failed (a PrismError: a diverged
        run, a full disk, a simulator that is not there): `missing` then says so, the others go on, and the next
        call of the study tries again."""
        path = self.folder / "cells" / f"{name}.json"
        if path.exists():
            stored = files.read_json(path)
            if stored.get("settings") != settings:
                raise PrismError(f"{path} was made with other settings: use another --work folder, or remove it")
            self.console.print(f"{name}: done before", highlight=False)
            result: Result = stored["result"]
            return result
        self.console.print(f"{name}: ...", highlight=False)
        try:
            result = compute()
        except PrismError as error:
            self.missing.append(f"{name}: {error}")
            self.console.print(f"{name}: failed: {error}", highlight=False, markup=False)
            return None
        write_json(path, {"settings": settings, "result": result}, overwrite=True)
        return result

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name


def train_quietly(experiment: Experiment, run: Path, console: Console | None = None) -> list[dict[str, Any]]:
    """Train, or go on with, a run; the lines of its log. Ctrl-C and SIGTERM save it and end the study."""
    result = train_experiment(experiment, run, "auto", console or Console(quiet=True))
    if result.stopped_by:
        raise KeyboardInterrupt
    return read_log(run)


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What determines a run, without where its data happened to lie."""
    demonstrations = experiment.demonstrations
    shown = Path(demonstrations.path).name if demonstrations.path else None
    plain = to_json(replace(experiment, demonstrations=replace(demonstrations, path=shown)))
    return {"method": experiment.method, **plain}
