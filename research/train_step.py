"""What back-propagating only the chosen candidates brings: time and memory against all K (Alg. 1).

Try:
    python -m research train-step --json train-step.json

Two ways to the same gradient, in turn within every round, on the same batch and latents:
  chosen  draw K candidates without gradient, choose, draw the chosen ones again with gradient (ours)
  all     draw K candidates with gradient, choose, back-propagate through all K (the literal Alg. 1)
A step is the loss and its backward pass, encoder included; the optimiser's step is the same for both and left out.

speedup_hard, speedup_soft: median over rounds of time(all) / time(chosen), with the hard term alone and with the soft
term at K'. On one thread (the default) it is CPU time, which a busy machine does not disturb and which is the wall
clock of an idle one; the wall clock's own ratio is speedup_wall. On several threads it is the wall clock.
memory_ratio: peak bytes of live tensors during the step, ours / all, the larger of the two objectives.
gradient_difference: largest |difference| over largest |gradient|, a check that the two are the same step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prism.bench.timing import interleave, paired_ratio, ratio_interval
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.methods.presets import PRESETS, preset
from prism.methods.prism import PrismPolicy
from prism.normalize import Normalizer
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.types import Batch, Observation
from research.report import Written

_MIB = 1024.0 * 1024.0


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    preset: str = "base"
    """tiny, base or paper."""
    candidates: int = 16
    """K."""
    soft_candidates: int = 3
    """K' of the soft term."""
    batch: int = 16
    """Rows."""
    state_dim: int = 16
    """Width of the one sensor."""
    action_dim: int = 7
    """Width of an action."""
    seconds: float = 20.0
    """CPU time of each of the two objectives."""
    threads: int = 1
    """Threads of PyTorch; 0: as many as it takes by itself."""
    seed: int = 0
    """Of weights, batch and latents."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise PrismError(f"preset is '{self.preset}'; use one of {', '.join(PRESETS)}")
        if not 1 <= self.soft_candidates <= self.candidates:
            raise PrismError(f"soft-candidates is {self.soft_candidates}; it must lie in 1..{self.candidates}")
        if min(self.batch, self.state_dim, self.action_dim) < 1:
            raise PrismError("batch, state-dim and action-dim must be at least 1")
        if self.seconds < 0 or self.threads < 0:
            raise PrismError("seconds and threads must be at least 0")


def make_policy(config: Config, soft: bool) -> PrismPolicy:
    base = preset(config.preset)
    objective = dataclasses.replace(
        base.objective,
        candidates=config.candidates,
        soft_weight=0.02 if soft else 0.0,  # paper
        soft_candidates=config.soft_candidates,
    )
    sensors = (SensorSpec("state", "vector", (config.state_dim,)),)
    spec = dataclasses.replace(base, objective=objective).spec(sensors, config.action_dim, fps=10.0)
    return PrismPolicy(spec, Normalizer.empty(sensors, config.action_dim), config.seed)


def make_batch(config: Config, policy: PrismPolicy) -> Batch:
    rng = torch.Generator().manual_seed(config.seed)
    spec = policy.spec
    state = torch.randn(config.batch, spec.obs_horizon, config.state_dim, generator=rng)
    present = torch.ones(config.batch, spec.obs_horizon, dtype=torch.bool)
    actions = torch.rand(config.batch, spec.pred_horizon, spec.action_dim, generator=rng) * 2 - 1
    valid = torch.ones(config.batch, spec.pred_horizon, dtype=torch.bool)
    return Batch(Observation({"state": state}, {"state": present}), actions, valid)


def chosen_loss(policy: PrismPolicy, batch: Batch, seed: int) -> Tensor:
    return policy.batch_loss(batch, Random(seed)).loss


def all_loss(policy: PrismPolicy, batch: Batch, seed: int) -> Tensor:
    """The same loss with one change: the candidates are drawn once, with gradient, all K of them."""
    rng = Random(seed)
    target = policy.normalizer.normalize_actions(batch.actions)
    context = policy.encoder(batch.observation, rng if policy.training else None)
    latent = policy.latents(target.shape[0], policy.config.objective.candidates, rng)
    candidates = policy.generator(policy.generator.prepare(context), latent)
    objective, valid = policy.objective, batch.action_valid
    distances = objective.distances(candidates.detach(), target, valid, objective.targets(target, valid))
    if policy.training:
        objective.calibrate(distances.pool)
    choice = objective.choose(distances.own, objective.reject(distances.near, rng))
    index = choice.index[:, :, None, None].expand(-1, -1, *candidates.shape[2:])
    loss, _ = objective.loss(candidates.gather(1, index), choice, target, valid)
    return loss


def gradients(loss: Callable[[], Tensor], policy: PrismPolicy) -> list[Tensor]:
    used = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(), used, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(used, found, strict=True)]


def gradient_difference(first: list[Tensor], second: list[Tensor]) -> float:
    scale = max(float(g.abs().max()) for g in first)
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) / scale


def measure(config: Config, soft: bool) -> dict[str, Any]:
    """One objective: times, ratio, memory and the check that both ways give the same gradient."""
    policy = make_policy(config, soft)
    batch = make_batch(config, policy)
    chosen_loss(policy, batch, config.seed)  # sets the threshold, which a first batch does outright
    losses = {
        "chosen": partial(chosen_loss, policy, batch, config.seed),
        "all": partial(all_loss, policy, batch, config.seed),
    }
    policy.eval()  # the threshold stays put: both must reject the same candidates
    difference = gradient_difference(gradients(losses["chosen"], policy), gradients(losses["all"], policy))
    policy.train()

    for parameter in policy.parameters():  # standing gradients are the optimiser's memory, not the step's
        parameter.grad = torch.zeros_like(parameter)

    def step(loss: Callable[[], Tensor]) -> None:
        torch.autograd.backward(loss())

    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    existing = [*policy.parameters(), *policy.buffers(), *grads, batch.actions, *batch.observation.streams.values()]
    peak = {name: peak_bytes(partial(step, loss), existing) for name, loss in losses.items()}
    saved = {name: saved_bytes(loss, existing) for name, loss in losses.items()}
    calls: dict[str, Callable[[], object]] = {name: partial(step, loss) for name, loss in losses.items()}
    times = interleave(calls, np.random.default_rng(config.seed), config.seconds, min_rounds=7)
    clock = "cpu" if config.threads == 1 else "wall"
    ratio = (getattr(times["all"], clock), getattr(times["chosen"], clock))
    return {
        "clock": clock,
        "speedup": paired_ratio(*ratio),
        "speedup_interval": ratio_interval(*ratio, np.random.default_rng(config.seed)),
        "speedup_wall": paired_ratio(times["all"].wall, times["chosen"].wall),
        "memory_ratio": peak["chosen"] / peak["all"],
        "saved_ratio": saved["chosen"] / saved["all"],
        "peak_mib": {name: value / _MIB for name, value in peak.items()},
        "saved_mib": {name: value / _MIB for name, value in saved.items()},
        "step_ms": {name: value.summary() for name, value in times.items()},
        "rounds": len(ratio[0]),
        "gradient_difference": difference,
    }


def run(config: Config, console: Console) -> dict[str, Any]:
    threads = torch.get_num_threads()
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("hard term", total=2)
            hard = measure(config, soft=False)
            progress.update(bar, advance=1, description=f"hard and soft term, K' = {config.soft_candidates}")
            soft = measure(config, soft=True)
            progress.advance(bar)
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    return {
        "speedup_hard": hard["speedup"],
        "speedup_soft": soft["speedup"],
        "memory_ratio": max(hard["memory_ratio"], soft["memory_ratio"]),
        "gradient_difference": max(hard["gradient_difference"], soft["gradient_difference"]),
        "hard": hard,
        "soft": soft,
        "settings": {**config.settings(), "threads": used},
        **run_info(config.seed),
    }


def show(result: dict[str, Any], console: Console) -> None:
    settings = result["settings"]
    table = Table(
        title=f"Training step, {settings['preset']} preset, K = {settings['candidates']}, "
        f"batch {settings['batch']}, {settings['threads']} thread(s), {result['hard']['clock']} time"
    )
    for column in ("objective", "all ms", "chosen ms", "speed-up", "all MiB", "chosen MiB", "memory"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    for name, label in (("hard", "hard"), ("soft", f"+ soft, {settings['soft_candidates']}")):
        entry = result[name]
        median = "cpu_median" if entry["clock"] == "cpu" else "median"
        table.add_row(
            label,
            *(f"{entry['step_ms'][way][median]:.0f}" for way in ("all", "chosen")),
            f"{entry['speedup']:.2f}x",
            *(f"{entry['peak_mib'][way]:.0f}" for way in ("all", "chosen")),
            f"{entry['memory_ratio']:.2f}",
        )
    console.print(table)
    console.print(f"same gradient to {result['gradient_difference']:.1e} of its largest entry")


# How much memory a step holds: bytes of tensors, not what the allocator keeps in reserve.


class LiveTensors(TorchDispatchMode):
    """Follows every storage that an operation creates until it is freed; `peak` is the most that lived at once.

    Views share a storage and count once. Scratch memory inside one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: list[Tensor]) -> None:
        """What existed before: in-place operations return it, and it is not ours to count."""
        self._known.update(t.untyped_storage()._cdata for t in tensors)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)  # runs when the last tensor on it goes

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(step: Callable[[], object], existing: list[Tensor]) -> int:
    """The most memory that `step` held at once in tensors of its own; `existing` ones are not counted."""
    tracker = LiveTensors()
    tracker.ignore(existing)
    with tracker:
        step()
    return tracker.peak


def saved_bytes(forward: Callable[[], object], existing: list[Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`; `existing` (parameters, inputs) not counted."""
    known = {t.untyped_storage()._cdata for t in existing}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # kept until here: a freed storage's address may be used again
    del result
    return sum(sizes.values())
