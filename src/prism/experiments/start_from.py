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
from prism.units import apart


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
        ("method", ours.method, theirs.method),
        ("actions", ours.action.kind, theirs.action.kind),
        ("units of actions", ours.action.units, theirs.action.units),
        ("scales of actions", ours.action.scale, theirs.action.scale),
    ):
        unknown = what.endswith("actions") and not (own and other)
        if own != other and not unknown:
            raise PrismError(f"--init {init}: the run's {what} are {other}, those of the data {own}; train without it")
    trained = found.policy()
    _check_statistics(policy, trained, init)
    try:
        policy.load_state_dict(trained.state_dict())
    except RuntimeError:
        raise PrismError(
            f"--init {init}: its network has another size; drop --preset, --set policy.* and exec_horizon"
        ) from None


def _check_statistics(policy: Policy, trained: Policy, init: str) -> None:
    """PrismError where the numbers of the data (`policy`) can only be in another unit than those of the run."""
    new, old = policy.normalizer, trained.normalizer
    moves = (new.action_moves * old.action_moves).double().numpy()
    times = apart(new.action_scale.double().numpy() * moves, old.action_scale.double().numpy() * moves)
    what = "actions"
    for sensor in policy.spec.sensors if times is None else ():
        if sensor.kind == "vector":  # less than the run has seen is a quieter scene
            found = apart(new.scale(sensor.name).double().numpy(), old.scale(sensor.name).double().numpy())
            if found is not None and found > 1:
                what, times = f"'{sensor.name}'", found
                break
    if times is not None:
        raise PrismError(
            f"--init {init}: {what} spread {times:.4g} times as far in the data as in the run's: another unit? convert "
            "the data (prism data convert --map KEY=NAME:vector:SCALE), or train without --init"
        )


def _sensors(spec: PolicySpec) -> str:
    return ", ".join(f"{s.name} {s.kind} {s.shape}" for s in spec.sensors)
