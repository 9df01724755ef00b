"""The cells of a table inside its results file, so that it can be gone on with where its work folder is not.

A cell is a training and its evaluation (experiments/cell.py). Of its result.json a file keeps what rows and intervals
are made of: one number an episode of each measure. `put_back` makes finished cells of them in a work folder; the
comparison then trains only what is missing. Weights are not kept: such a cell cannot play other episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism.errors import PrismError
from prism.evaluation.metrics import FloatArray
from prism.experiments.cell import CellSpec
from prism.experiments.comparison import (
    CellId,
    CompareConfig,
    Comparison,
    Contestant,
    cell_ids,
    check_cells,
    experiments_of,
    folder_of,
    table,
)
from prism.experiments.grid import RESULT, Cell, refuse_other
from prism.experiments.recipes import Experiment
from prism.io import files
from prism.io.jsonconfig import to_json

MEASURES = ("score", "success", "jerk", "mode_switches")
_WHOLE = ("method", "seed", "steps", "train_seconds", "parameters", "trained_by")
_EXECUTION = ("candidates", "exec_horizon")
_PARTS = {"controller": _EXECUTION, "evaluation": ("score", "success", "latency_ms")}  # of these entries only that


def kept(cell: Cell) -> dict[str, Any]:
    """What a results file keeps of a result.json."""
    return {
        **{key: cell[key] for key in _WHOLE},
        **{key: {name: cell[key][name] for name in names} for key, names in _PARTS.items()},
        "info": {"commit": cell["info"].get("commit"), "date": cell["info"].get("date"), "processor": _processor(cell)},
        "curve": cell["curve"][-1:],  # the end
        "per_episode": {  # a line each: 20 numbers a measure would be 80 lines of a file
            name: " ".join(f"{float(row[name]):.6g}" for row in cell["per_episode"]) for name in MEASURES
        },
    }


def _processor(cell: Cell) -> str | None:
    """Where it was made; None of cells that were kept before this was."""
    info = cell["info"]
    name: str | None = info.get("processor") or info.get("machine", {}).get("processor")
    return name


def several_processors(comparisons: Iterable[Comparison]) -> str:
    """A line where cells with the same CPU time had several kinds of processors."""
    found = {name for one in comparisons for cell in one.cells.values() if (name := _processor(cell))}
    return f"the same CPU time, but of several processors: {', '.join(sorted(found))}" * (len(found) > 1)


def restored(stored: Mapping[str, Any], episodes: int) -> dict[str, Any]:
    """A result.json again, one row an episode; ValueError, KeyError ... where it is not whole."""
    columns = [[float(word) for word in stored["per_episode"][name].split()] for name in MEASURES]
    if any(len(column) != episodes or not all(map(math.isfinite, column)) for column in columns):
        raise ValueError(f"not {episodes} finite numbers of each measure")
    rows = [dict(zip(MEASURES, values, strict=True)) for values in zip(*columns, strict=True)]
    if not all(0 <= row["score"] <= 1 and row["success"] in (0, 1) for row in rows):
        raise ValueError("a score or success is out of range")
    if not all(math.isfinite(stored["evaluation"]["latency_ms"][name]) for name in ("p50", "p99")):
        raise ValueError("a latency is not finite")
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
    stands for another variation, where today's recipe executes plans in another way, where a cell is damaged, and where
    a folder has another result of it. Not known of a cell is its whole recipe: the commits say that it may be another.
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
        if nameless := sorted({id.contestant for id in found} - theirs.keys()):
            raise ValueError(f"{nameless[0]} is not among its methods")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PrismError(f"--add {file}: no results file with whole cells ({reason})") from None
    new: list[tuple[Path, Experiment, CellSpec, dict[str, Any]]] = []
    for out, grid in grids.items():
        check_cells(out, grid)
        experiments, ours = experiments_of(out, grid, None), {one.name: one for one in grid.contestants}
        for id in (id for id in cell_ids(grid) if id in found):
            result, cell, controller = folder_of(out, id) / RESULT, found[id], to_json(experiments[id].controller)
            refuse_other(file, to_json(theirs[id.contestant]), to_json(ours[id.contestant]))
            refuse_other(file, cell["controller"], {key: controller[key] for key in _EXECUTION})
            if not result.exists():
                new.append((result.parent, experiments[id], grid.spec(id), cell))
            elif kept(files.read_json(result))["per_episode"] != kept(cell)["per_episode"]:
                raise PrismError(f"--add {file}: {result} is another result of {id}; use another --work")
    for folder, experiment, spec, cell in new:  # nothing was refused
        folder.mkdir(parents=True, exist_ok=True)
        experiment.save(folder)  # what it counts as: a later call with another budget is refused
        spec.save(folder)
        files.replace_file(folder / RESULT, files.encode_json(cell))


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
