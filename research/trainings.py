"""A training as part of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.io.jsonconfig import to_json
from prism.runs.recipes import Experiment
from prism.runs.workflow import train_experiment
from prism.training.monitor import read_log


def train_run(experiment: Experiment, run: Path, console: Console) -> list[dict[str, Any]]:
    """Train, or go on with, a run; the lines of its log. Ctrl-C and SIGTERM save it and end the study."""
    result = train_experiment(experiment, run, "auto", console)
    if result.stopped_by:
        raise KeyboardInterrupt
    return read_log(run)


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What determines a run, without where its data happened to lie."""
    demonstrations = experiment.demonstrations
    shown = Path(demonstrations.path).name if demonstrations.path else None
    plain = to_json(replace(experiment, demonstrations=replace(demonstrations, path=shown)))
    return {"method": experiment.method, **plain}
