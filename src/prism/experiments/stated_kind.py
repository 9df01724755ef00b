"""Whether a policy's actions are poses or changes of a pose, from its data to the robot: it decides what a hold is.

The data say it (`ActionSpec.kind`), a simulated task does, or a person: `--action-kind` of train, serve and run. Where
nobody did, `prism run` and prism-client refuse to drive a robot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prism.controller import ControllerConfig
from prism.data.action_kind import KINDS
from prism.errors import PrismError
from prism.selection import SelectionConfig
from prism.sensors import ActionSpec

if TYPE_CHECKING:
    from prism.experiments.run_folder import Run


def as_the_data_say(selection: SelectionConfig, action: ActionSpec) -> SelectionConfig:
    """With the kind of the actions, and which entries are grippers, where the data know them."""
    if not selection.grippers and len(action.grippers) not in (0, len(action.names)):
        selection = replace(selection, grippers=action.grippers)
    if not action.kind:
        return selection
    if (action.kind, selection.action_kind) == ("absolute", "delta"):
        raise PrismError("the dataset says that its actions are absolute: drop action_kind=delta, or mend the data")
    # a velocity is a change, too: standing still is 0
    return replace(selection, action_kind="absolute" if action.kind == "absolute" else "delta")


def as_stated(run: Run, config: ControllerConfig, stated: str | None) -> tuple[ControllerConfig, bool]:
    """The controller's settings with what a person says of the actions; whether anybody said it."""
    known = run.spec.action.kind
    if stated is not None and stated not in KINDS:
        raise PrismError(f"--action-kind {stated}: use one of {', '.join(KINDS)}")
    if known and stated not in (None, known):
        raise PrismError(f"--action-kind {stated}: the policy's data say that its actions are '{known}'; drop it")
    if known or stated is None:
        tasks = run.has_experiment and bool(run.experiment.tasks)
        return config, bool(known) or tasks or config.selection.action_kind == "delta"
    kind: str = "absolute" if stated == "absolute" else "delta"
    return replace(config, selection=replace(config.selection, action_kind=kind)), True  # type: ignore[arg-type]
