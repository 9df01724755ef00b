"""The trials of a table inside its results file, so that it can be resumed on another machine.

Of a trial's result.json a results file keeps what rows and intervals are made of: one number an episode of each
measure. `put_back` makes finished trials of them in a work folder; the comparison then trains only what is missing.
Weights are not kept: such a trial cannot play other episodes.
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
from prism.experiments.comparison import (
    CompareConfig,
    Comparison,
    Contestant,
    check_trials,
    experiments_of,
    folder_of,
    table,
    trial_ids,
)
from prism.experiments.recipes import Experiment
from prism.experiments.trial import RESULT, TrialId, TrialResult, TrialSpec
from prism.experiments.trials import refuse_other
from prism.io import files
from prism.io.jsonconfig import to_json

MEASURES = ("score", "success", "jerk", "mode_switches")
_WHOLE = ("method", "seed", "steps", "train_seconds", "parameters", "trained_by")
_PROTOCOL = ("protocol", "chosen_on")
_EXECUTION = ("candidates", "exec_horizon")
_PARTS = {"controller": _EXECUTION, "evaluation": ("score", "success", "latency_ms")}  # of these entries only that


def kept(trial: TrialResult) -> dict[str, Any]:
    """The part of a result.json that a results file keeps."""
    return {
        **{key: trial[key] for key in _WHOLE},
        **{key: trial[key] for key in _PROTOCOL if key in trial},  # not in results from before 2026-11-19
        **{key: {name: trial[key][name] for name in names} for key, names in _PARTS.items()},
        "info": {
            "commit": trial["info"].get("commit"),
            "date": trial["info"].get("date"),
            "processor": _processor(trial),
        },
        "curve": trial["curve"][-1:],  # the end
        "per_episode": {  # a line each: 20 numbers a measure would be 80 lines of a file
            name: " ".join(f"{float(row[name]):.6g}" for row in trial["per_episode"]) for name in MEASURES
        },
    }


def _processor(trial: TrialResult) -> str | None:
    """The processor of a trial's machine; None for older trials."""
    info = trial["info"]
    name: str | None = info.get("processor") or info.get("machine", {}).get("processor")
    return name


def several_processors(comparisons: Iterable[Comparison]) -> str:
    """A line where trials with the same CPU time had several kinds of processors."""
    found = {name for one in comparisons for trial in one.trials.values() if (name := _processor(trial))}
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
    trial = {**stored, "per_episode": rows}
    kept(trial)  # nothing is missing
    return trial


def contestant(text: str, theirs: Mapping[str, Sequence[str]]) -> Contestant:
    """One of --methods; it has the settings of its method in `theirs`, but for those that it names itself."""
    one = Contestant.parse(text)
    named = {setting.partition("=")[0] for setting in one.settings}
    settings = [setting for setting in theirs.get(one.method, ()) if setting.partition("=")[0] not in named]
    return replace(one, settings=(*settings, *one.settings))


def successes(comparisons: Sequence[Comparison], method: str) -> FloatArray | None:
    """(seeds, episodes of all tasks), a comparison a task; None where a trial is missing."""
    found = []
    for comparison in comparisons:
        trials = {id.seed: trial for id, trial in comparison.trials.items() if id.contestant == method}
        if sorted(trials) != sorted(comparison.config.seeds):
            return None
        found.append(table(trials, sorted(trials), "success"))
    return np.concatenate(found, axis=1)


def trials_of(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """The `trials` of a results file."""
    return [
        {"recipe": id.recipe, "contestant": id.contestant, "trial": kept(trial)}
        for comparison in comparisons
        for id, trial in comparison.trials.items()
    ]


def put_back(
    file: Path,
    asked: Mapping[str, Any],
    asked_by_folder: Mapping[Path, CompareConfig],
    parse: Callable[[str], Contestant] = Contestant.parse,
) -> None:
    """Put the finished trials of a results file into the folders of the comparisons that ask for them.

    `asked`: what must be the same there (episodes, budget of each task ...). Refused: other settings, a name that
    stands for another variation, a recipe that executes plans in another way today, a damaged trial, a folder with
    another result. A results file does not hold the whole recipe of a trial, so the commits are shown.
    """
    if not file.is_file():
        raise PrismError(f"--add {file}: there is no such file")
    stored = files.read_json(file, "give a results file that --json wrote")
    try:
        settings = dict(stored["settings"])
        old = [{**one, "trial": one["cell"]} for one in stored.get("cells", ())]  # files from before 2026-11-19
        trials = [*stored["trials"]] if "trials" in stored else old
        theirs = {one.name: one for one in map(parse, settings["methods"])}
        refuse_other(file, *_compared(settings, asked))
        found = {
            TrialId(one["recipe"], one["contestant"], one["trial"]["seed"]): restored(one["trial"], asked["episodes"])
            for one in trials
        }
        if nameless := sorted({id.contestant for id in found} - theirs.keys()):
            raise ValueError(f"{nameless[0]} is not among its methods")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PrismError(f"--add {file}: no results file with whole trials ({reason})") from None
    new: list[tuple[Path, Experiment, TrialSpec, dict[str, Any]]] = []
    for out, config in asked_by_folder.items():
        check_trials(out, config)
        experiments, ours = experiments_of(out, config, None), {one.name: one for one in config.contestants}
        for id in (id for id in trial_ids(config) if id in found):
            result, trial, controller = folder_of(out, id) / RESULT, found[id], to_json(experiments[id].controller)
            refuse_other(file, to_json(theirs[id.contestant]), to_json(ours[id.contestant]))
            refuse_other(file, trial["controller"], {key: controller[key] for key in _EXECUTION})
            if not result.exists():
                new.append((result.parent, experiments[id], config.spec(id), trial))
            elif kept(files.read_json(result))["per_episode"] != kept(trial)["per_episode"]:
                raise PrismError(f"--add {file}: {result} is another result of {id}; use another --work")
    for folder, experiment, spec, trial in new:  # nothing was refused
        folder.mkdir(parents=True, exist_ok=True)
        experiment.save(folder)  # what it counts as: a later call with another budget is refused
        spec.save(folder)
        files.replace_file(folder / RESULT, files.encode_json(trial))


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
