"""`prism train A B --init RUN`: begin with the network of another run, to learn more from more data.

Policy and controller are the run's, and so is the normaliser: its weights mean nothing without it. The data must have
actions of the run's kind: poses and changes of a pose are other numbers. The optimiser and the learning rate begin
anew. With what people corrected (`prism run --teleop`) this is human-gated DAgger.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prism.data.action_kind import KINDS
from prism.errors import PrismError
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import Run
from prism.policy import Policy, PolicySpec


def with_init(experiment: Experiment, run: Path) -> Experiment:
    begun = Run(run).experiment
    if experiment.tasks:  # a task says what its actions are
        _refuse_other(str(run), _kinds("", experiment.controller.selection.action_kind))
    return replace(experiment, policy=begun.policy, controller=begun.controller, init=str(run))


def check_kind(experiment: Experiment, data: str) -> None:
    """PrismError where the actions of the data ("": nobody knows what they are) are of another kind than the run's, or
    a person says so: the controller is the run's, unless --set changed it."""
    for ours in (_kinds(data, ""), _kinds("", experiment.controller.selection.action_kind)):
        _refuse_other(str(experiment.init), ours)


def _refuse_other(init: str, ours: set[str]) -> None:
    run = Run(init)
    selection = run.experiment.controller.selection.action_kind
    theirs = _kinds(run.spec.action.kind, selection if run.experiment.tasks or selection == "delta" else "")
    if not ours & theirs:
        there, here = (" or ".join(sorted(kinds)) for kinds in (theirs, ours))
        raise PrismError(
            f"--init {init}: the run's actions are {there}, those of the data {here}; train without --init "
            "(where data do not say what their actions are, --action-kind does)"
        )


def _kinds(said: str, selection: str) -> set[str]:
    """What actions may be: as data say it, or as a controller has it, for which a velocity is a change too; "": all."""
    if said or not selection:
        return {said} if said else set(KINDS)
    return {"absolute"} if selection == "absolute" else {"delta", "velocity"}


def begin_with(policy: Policy, init: str) -> None:
    """The weights of that run; PrismError where it is of another shape."""
    found = Run(init)
    ours, theirs = policy.spec, found.spec
    for what, own, other in (
        ("sensors", _sensors(ours), _sensors(theirs)),
        ("numbers an action", ours.action_dim, theirs.action_dim),
        ("method", ours.method, theirs.method),
    ):
        if own != other:
            raise PrismError(f"--init {init}: the run's {what} are {other}, those of the data {own}; train without it")
    try:
        policy.load_state_dict(found.policy().state_dict())
    except RuntimeError:
        raise PrismError(
            f"--init {init}: its network has another size; drop --preset, --set policy.* and exec_horizon"
        ) from None


def _sensors(spec: PolicySpec) -> str:
    return ", ".join(f"{s.name} {s.kind} {s.shape}" for s in spec.sensors)
