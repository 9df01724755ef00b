"""The cells of a table inside its results file, so that it can be gone on with where its work folder is not.

A cell is a training and its evaluation (runs/cell.py). Of its result.json a file keeps what rows and intervals are made
of: one number an episode of each measure. `put_back` makes finished cells of them in a work folder; the comparison then
trains only what is missing. Weights are not kept: such a cell cannot play other episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism.errors import PrismError
from prism.io import files
from prism.io.jsonconfig import to_json
from prism.rollout.metrics import FloatArray
from prism.runs.comparison import CellId, Comparison, Contestant, folder_of, table
from prism.runs.grid import RESULT, Cell, refuse_other

MEASURES = ("score", "success", "jerk", "mode_switches")
_WHOLE = ("method", "seed", "steps", "train_seconds", "parameters", "trained_by")
_PARTS = {  # of the other entries only these
    "controller": ("candidates", "exec_horizon"),
    "evaluation": ("score", "success", "latency_ms"),
    "info": ("commit", "date"),
}


def kept(cell: Cell) -> dict[str, Any]:
    """What a results file keeps of a result.json."""
    return {
        **{key: cell[key] for key in _WHOLE},
        **{key: {name: cell[key].get(name) for name in names} for key, names in _PARTS.items()},
        "curve": cell["curve"][-1:],  # the end
        "per_episode": {  # a line each: 20 numbers a measure would be 80 lines of a file
            name: " ".join(f"{float(row[name]):.6g}" for row in cell["per_episode"]) for name in MEASURES
        },
    }


def restored(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A result.json again, one row an episode."""
    columns = [map(float, stored["per_episode"][name].split()) for name in MEASURES]
    rows = [dict(zip(MEASURES, values, strict=True)) for values in zip(*columns, strict=True)]
    return {**stored, "per_episode": rows}


def contestant(text: str, theirs: Mapping[str, Sequence[str]]) -> Contestant:
    """One of --methods; it has the settings of its method in `theirs`, but for those that it names itself."""
    one = Contestant.parse(text)
    named = {setting.partition("=")[0] for setting in one.settings}
    settings = [setting for setting in theirs.get(one.method, ()) if setting.partition("=")[0] not in named]
    return replace(one, settings=(*settings, *one.settings))


def successes(comparisons: Sequence[Comparison], method: str) -> FloatArray | None:
    """(seeds, episodes of all tasks), a comparison a task; None where a cell is missing."""
    found = []
    for comparison in comparisons:
        cells = {id.seed: cell for id, cell in comparison.cells.items() if id.contestant == method}
        if sorted(cells) != sorted(comparison.config.seeds):
            return None
        found.append(table(cells, sorted(cells), "success"))
    return np.concatenate(found, axis=1)


def cells_of(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Of a results file, under `cells`."""
    return [
        {"recipe": id.recipe, "contestant": id.contestant, "cell": kept(cell)}
        for comparison in comparisons
        for id, cell in comparison.cells.items()
    ]


def put_back(
    file: Path, asked: Mapping[str, Any], contestants: Sequence[Contestant], out: Callable[[str], Path]
) -> None:
    """Finished cells of the file that are not there yet, as far as they are of `contestants`. `out`: the folder of a
    recipe's comparison.

    `asked`: what must be the same there (episodes, budget of each task ...); PrismError where it is not, or where a
    name stands for another variation.
    """
    stored = files.read_json(file, "give a results file of this table")
    if not isinstance(cells := stored.get("cells"), list):
        raise PrismError(f"{file}: has no 'cells'; results files of tables have them since 2026-11-18")
    settings = stored["settings"]
    for key, now in asked.items():
        there = settings.get(key)
        if isinstance(now, Mapping) and isinstance(there, Mapping):  # by task: those that both have
            shared = now.keys() & there.keys()
            refuse_other(file, {key: {k: there[k] for k in shared}}, {key: {k: now[k] for k in shared}})
        else:
            refuse_other(file, {key: there}, {key: now})
    there_too = {one.name: to_json(one) for one in map(Contestant.parse, settings["methods"])}
    wanted = {one.name: to_json(one) for one in contestants}
    for one in cells:
        id = CellId(one["recipe"], one["contestant"], one["cell"]["seed"])
        if id.contestant not in wanted:
            continue
        refuse_other(file, there_too[id.contestant], wanted[id.contestant])
        folder = folder_of(out(id.recipe), id)
        if not (folder / RESULT).exists():
            folder.mkdir(parents=True, exist_ok=True)
            files.replace_file(folder / RESULT, files.encode_json(restored(one["cell"])))
