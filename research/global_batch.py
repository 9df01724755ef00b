"""What "batch-global" rejection costs as the global batch grows to 4096 (docs/howto/distributed.md).

Try:
    python -m research global-batch --json global-batch.json --plot global-batch.png

One rank's step: `rows` rows of a global batch of G. Its candidates are compared with the targets of all G rows and the
threshold follows the distances of all of them, so this part grows with G while the rest of the step does not:
  own          calibrated rule, own scope: own targets only; the quantile is over G K distances
  batch        calibrated rule, batch scope (the default): min over targets, at most max_targets of them
  paper        the paper's rule: the same, and the quantile of all pairs, sampled where they are too many
  batch_exact  batch scope without the bound: every target

share_of_step: the choice's share of the whole step at the largest G, the largest of own, batch and paper. A choice is
measure + calibrate + decide of prism.objective; the rest of the step is the loss and its backward pass with no
rejection. CPU time on one thread, contestants in turn. Messages between ranks are not in it: they are G K floats (own),
G (Tp Da + Tp) floats more (batch, paper). memory_mib: peak bytes of tensors that the choice holds at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prism.bench.timing import Times, interleave, paired_ratio
from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.methods.presets import PRESETS, preset
from prism.methods.prism import PrismPolicy
from prism.normalize import Normalizer
from prism.objective import RSIMLE, ObjectiveConfig, Targets
from prism.rows import Random
from prism.sensors import SensorSpec
from research import train_step
from research.report import Drawn
from research.train_step import chosen_loss, make_batch, peak_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1024.0 * 1024.0


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    preset: str = "base"
    """tiny, base or paper."""
    candidates: int = 16
    """K."""
    rows: int = 16
    """Rows of this rank."""
    sizes: Annotated[tuple[int, ...], option("G ...")] = (64, 256, 1024, 4096)
    """Global batches."""
    state_dim: int = 16
    """Width of the one sensor."""
    action_dim: int = 7
    """Width of an action."""
    padded: float = 0.1
    """Share of targets that run past the end of their episode."""
    seconds: float = 10.0
    """CPU time of each G."""
    seed: int = 0
    """Of weights, targets and candidates."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise PrismError(f"preset is '{self.preset}'; use one of {', '.join(PRESETS)}")
        if min(self.candidates, self.rows, self.state_dim, self.action_dim) < 1 or not 0 <= self.padded <= 1:
            raise PrismError("candidates, rows, state-dim and action-dim must be at least 1, padded in [0, 1]")
        if not self.sizes or min(self.sizes) < self.rows or self.seconds < 0:
            raise PrismError(f"sizes must be at least the {self.rows} rows of a rank, seconds at least 0")


def make_objectives(config: Config) -> dict[str, RSIMLE]:
    base = ObjectiveConfig(candidates=config.candidates, scope="own")
    kinds = {
        "own": base,
        "batch": dataclasses.replace(base, scope="batch"),
        "paper": dataclasses.replace(base, rule="paper"),
        "batch_exact": dataclasses.replace(base, scope="batch", max_targets=max(config.sizes)),
    }
    return {name: RSIMLE(kind, config.action_dim) for name, kind in kinds.items()}


def make_step(config: Config) -> tuple[PrismPolicy, Callable[[], None]]:
    """The policy, and a step of this rank's rows in which nothing is rejected."""
    base = preset(config.preset)
    objective = ObjectiveConfig(candidates=config.candidates, rule="none")
    sensors = (SensorSpec("state", "vector", (config.state_dim,)),)
    spec = dataclasses.replace(base, objective=objective).spec(sensors, config.action_dim, fps=10.0)
    policy = PrismPolicy(spec, Normalizer.empty(sensors, config.action_dim), config.seed)
    sizes = train_step.Config(batch=config.rows, state_dim=config.state_dim, action_dim=config.action_dim)
    batch = make_batch(sizes, policy)
    return policy, lambda: torch.autograd.backward(chosen_loss(policy, batch, config.seed))


def choose(objective: RSIMLE, candidates: Tensor, everybody: Targets) -> None:
    """What one rank does: its own rows against the targets of all ranks, the quantile over what all ranks sent."""
    rows, total = len(candidates), len(everybody.actions)
    target, valid = everybody.actions[:rows], everybody.valid[:rows]
    compared = None if objective.targets(target, valid) is None else everybody
    distances = objective.distances(candidates, target, valid, compared)
    pool = distances.pool
    if objective.config.rule == "calibrated":  # the other ranks' distances: as many as there would be
        pool = distances.near.repeat(-(-total // rows), 1)[:total]
    objective.calibrate(pool)
    objective.choose(distances.own, objective.reject(distances.near, Random(0)))


def measure(config: Config, total: int) -> dict[str, Any]:
    """One G: milliseconds, share of the step and memory of each kind of choice."""
    policy, step = make_step(config)
    rng = torch.Generator().manual_seed(config.seed)
    shape = (policy.spec.pred_horizon, config.action_dim)
    target = torch.rand(total, *shape, generator=rng) * 2 - 1
    candidates = target[: config.rows, None] + 0.3 * torch.randn(config.rows, config.candidates, *shape, generator=rng)
    lengths = torch.randint(1, shape[0], (total,), generator=rng)
    lengths[torch.rand(total, generator=rng) >= config.padded] = shape[0]
    everybody = Targets(target, torch.arange(shape[0]) < lengths[:, None])
    choices = {name: partial(choose, o, candidates, everybody) for name, o in make_objectives(config).items()}
    times = interleave({"rest": step, **choices}, np.random.default_rng(config.seed), config.seconds, min_rounds=5)
    rest = times["rest"]
    return {
        "rest_ms": rest.summary(),
        "kinds": {name: _entry(times[name], rest, choices[name], [target, candidates]) for name in choices},
    }


def _entry(times: Times, rest: Times, call: Callable[[], None], existing: list[Tensor]) -> dict[str, Any]:
    return {
        "ms": times.summary(),
        "share_of_step": paired_ratio(times.cpu, rest.cpu + times.cpu),
        "memory_mib": peak_bytes(call, existing) / _MIB,
    }


def run(config: Config, console: Console) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with console.status("one global batch after another"):
            sizes = {str(total): measure(config, total) for total in config.sizes}
    finally:
        torch.set_num_threads(threads)
    largest = sizes[str(max(config.sizes))]["kinds"]
    return {
        "share_of_step": max(largest[name]["share_of_step"] for name in ("own", "batch", "paper")),
        "share_of_step_without_bound": largest["batch_exact"]["share_of_step"],
        "largest_batch": max(config.sizes),
        "sizes": sizes,
        "settings": {**config.settings("seed", "sizes"), "threads": 1},
        **run_info(config.seed),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="The choice's share of a step, CPU ms and MiB, by global batch G")
    names = list(next(iter(result["sizes"].values()))["kinds"])
    for column in ("G", *names):
        table.add_column(column, justify="right")
    for total, entry in result["sizes"].items():
        cells = (entry["kinds"][name] for name in names)
        texts = (f"{c['share_of_step']:.1%} {c['ms']['cpu_median']:.3g} {c['memory_mib']:.3g}" for c in cells)
        table.add_row(total, *texts)
    console.print(table)
    console.print(f"share of the step at G = {result['largest_batch']}: {result['share_of_step']:.1%}")


def draw(result: dict[str, Any]) -> Figure:
    """Time and memory of the choice by G."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [int(total) for total in result["sizes"]]
    colors = {"own": "#009e73", "batch": "#0072b2", "paper": "#d55e00", "batch_exact": "#999999"}
    for name, color in colors.items():
        entries = [entry["kinds"][name] for entry in result["sizes"].values()]
        left.loglog(sizes, [e["ms"]["cpu_median"] for e in entries], "o-", color=color, label=name)
        right.loglog(sizes, [e["memory_mib"] for e in entries], "o-", color=color, label=name)
    rest = [entry["rest_ms"]["cpu_median"] for entry in result["sizes"].values()]
    left.loglog(sizes, rest, "k--", label="rest of the step")
    left.set(xlabel="global batch G", ylabel=f"ms of CPU time, {result['settings']['rows']} rows")
    right.set(xlabel="global batch G", ylabel="peak MiB of the choice")
    for axes in (left, right):
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.set_ylim(top=axes.get_ylim()[1] * 6)  # room for the legend
        axes.legend(frameon=False, ncols=2, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    return figure
