"""The cells of a table inside its results file, so that it can be gone on with where its work folder is not.

A cell is a training and its evaluation (runs/cell.py). Of its result.json a file keeps what rows and intervals are made
of: one number an episode of each measure. `put_back` makes finished cells of them in a work folder; the comparison then
trains only what is missing. Weights are not kept: such a cell cannot play other episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism.errors import PrismError
from prism.io import files
from prism.io.jsonconfig import to_json
from prism.rollout.metrics import FloatArray
from prism.runs.comparison import CellId, CompareConfig, Comparison, Contestant, cell_ids, folder_of, table
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


def restored(stored: Mapping[str, Any], episodes: int) -> dict[str, Any]:
    """A result.json again, one row an episode; ValueError, KeyError ... where it is not whole."""
    columns = [[float(word) for word in stored["per_episode"][name].split()] for name in MEASURES]
    if any(len(column) != episodes or not all(map(math.isfinite, column)) for column in columns):
        raise ValueError(f"not {episodes} finite numbers of each measure")
    rows = [dict(zip(MEASURES, values, strict=True)) for values in zip(*columns, strict=True)]
    if not all(0 <= row["score"] <= 1 and row["success"] in (0, 1) for row in rows):
        raise ValueError("a score or success is out of range")
    cell = {**stored, "per_episode": rows}
    kept(cell)  # nothing is missing
    return cell


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
    file: Path,
    asked: Mapping[str, Any],
    grids: Mapping[Path, CompareConfig],
    parse: Callable[[str], Contestant] = Contestant.parse,
) -> None:
    """Finished cells of a results file in the folders of these comparisons, where they ask for them and have none yet.

    `asked`: what must be the same there (episodes, budget of each task ...). PrismError where it is not, where a name
    stands for another variation, where a cell is damaged, and where a folder has another result of it.
    """
    if not file.is_file():
        raise PrismError(f"--add {file}: there is no such file")
    stored = files.read_json(file, "give a results file that --json wrote")
    try:
        settings, cells = dict(stored["settings"]), list(stored["cells"])  # since 2026-11-18
        theirs = {one.name: one for one in map(parse, settings["methods"])}
        refuse_other(file, *_compared(settings, asked))
        found = {
            CellId(one["recipe"], one["contestant"], one["cell"]["seed"]): restored(one["cell"], asked["episodes"])
            for one in cells
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PrismError(f"--add {file}: no results file with whole cells ({reason})") from None
    for out, grid in grids.items():
        ours = {one.name: one for one in grid.contestants}
        for id in (id for id in cell_ids(grid) if id in found):
            refuse_other(file, to_json(theirs[id.contestant]), to_json(ours[id.contestant]))
            result = folder_of(out, id) / RESULT
            if not result.exists():
                result.parent.mkdir(parents=True, exist_ok=True)
                files.replace_file(result, files.encode_json(found[id]))
            elif kept(files.read_json(result))["per_episode"] != kept(found[id])["per_episode"]:
                raise PrismError(f"--add {file}: {result} is another result of {id}; use another --work")


def _compared(there: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked and what stands for it there; of settings by task only the tasks that both have."""
    found: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for key, now in asked.items():
        was = there.get(key)
        if isinstance(now, Mapping) and isinstance(was, Mapping):
            was, now = ({k: one[k] for k in now.keys() & was.keys()} for one in (was, now))
        found[key], wanted[key] = was, now
    return found, wanted
