"""Keys that files of earlier versions have, in one table: each is read, and what it meant is found where it is now.

| class           | key         | now                                                                              |
| --------------- | ----------- | -------------------------------------------------------------------------------- |
| Demonstrations  | pushes      | nothing: no recipe pushes any more                                               |
| SelectionConfig | action_kind | `action.kind` of the policy; `kind_of_action` finds it where a policy lacks that |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism.errors import PrismError
from prism.io import files

# class -> key -> what to do instead of setting it
RETIRED: Mapping[str, Mapping[str, str]] = {
    "Demonstrations": {"pushes": "leave it out"},
    "SelectionConfig": {"action_kind": "use --action-kind"},
}
EXPERIMENT = "experiment.json"


def experiment_of(checkpoint: Path) -> Path | None:
    """experiment.json of the run that a checkpoint is of: beside its config.json, or in the run's folder."""
    homes = (checkpoint, *checkpoint.resolve().parents[:2])
    return next((home / EXPERIMENT for home in homes if (home / EXPERIMENT).is_file()), None)


def kind_of_action(stored: Mapping[str, Any]) -> str | None:
    """`controller.selection.action_kind` of an experiment.json, or of a config.json of LeRobot; None: unknown.

    "absolute" was also the default, so it counts only where there was a task to say so.
    """
    try:
        kind = stored["controller"]["selection"]["action_kind"]
        parts = (stored.get("demonstrations") or {}).get("parts", ())
        tasks = [stored.get("task"), *(part.get("task") for part in parts)]
    except (KeyError, TypeError, AttributeError):
        return None
    return kind if kind == "delta" or (kind == "absolute" and any(tasks)) else None


def kind_of_checkpoint(checkpoint: Path, config: Mapping[str, Any]) -> str | None:
    """The same of a checkpoint whose config.json is `config`."""
    experiment = experiment_of(checkpoint)
    if experiment is None:
        return kind_of_action(config)
    try:
        return kind_of_action(files.read_json(experiment))
    except PrismError:
        return None
