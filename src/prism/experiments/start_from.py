"""`prism train A B --init RUN`: begin with the network of another run, to learn more from more data.

Policy and controller are the run's, and so is the normaliser: its weights mean nothing without it. The data must have
actions of the run's kind: poses and changes of a pose are other numbers. The optimiser and the learning rate begin
anew. With what people corrected (`prism run --teleop`) this is human-gated DAgger.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prism.errors import PrismError
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import Run
from prism.policy import Policy, PolicySpec


def with_init(experiment: Experiment, run: Path) -> Experiment:
    begun = Run(run).experiment
    return replace(experiment, policy=begun.policy, controller=begun.controller, init=str(run))


def begin_with(policy: Policy, init: str) -> None:
    """The weights of that run; PrismError where it is of another shape, or of actions of another kind."""
    found = Run(init)
    ours, theirs = policy.spec, found.spec
    for what, own, other in (
        ("sensors", _sensors(ours), _sensors(theirs)),
        ("numbers an action", ours.action_dim, theirs.action_dim),
        ("actions", ours.action.kind, theirs.action.kind or ours.action.kind),
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
