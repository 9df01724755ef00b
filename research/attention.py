"""Exact softmax against FAVOR+: error by number of features, time by length, and the rule behind `auto`.

Try:
    python -m research attention --json attention.json --plot attention.png

Error: relative error in the Frobenius norm against exact softmax, median over random inputs and features, for the
correct FAVOR+ and for the paper's literal form, by number of features. Inputs are Gaussian; their scale sets how
peaked the attention is, and the variance of any random-feature estimate grows exponentially with its square.

Time: one sequence of T queries and T keys, heads and head width as in the `paper` preset, forward (and forward
plus backward), all variants in turn within every round. `auto_worst_ratio` is the largest, over T, of the time of
`auto` against the faster of softmax and favor in the same rounds, forward, CPU time of the process (the same in wall
clock is beside it). Where `auto` runs the very kernel that it is compared with, what differs from 1 is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from prism.attention import (
    Kind,
    Linear,
    choose,
    gaussian_features,
    linear_attend,
    linear_keys,
    orthogonal_features,
    softmax_attention,
)
from prism.bench.timing import Times, interleave, paired_ratio, ratio_interval
from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from research.report import Drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: tuple[Kind, ...] = ("softmax", "favor", "favor_paper", "auto")


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    lengths: Annotated[tuple[int, ...], option("T ...")] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    """Numbers of queries and keys to time."""
    heads: int = 8
    """Heads; 8 in the preset `paper`."""
    head_dim: int = 64
    """Width of a head; 512 / 8 in the preset `paper`."""
    features: int = 256
    """Random features when timing."""
    error_features: Annotated[tuple[int, ...], option("M ...")] = (16, 64, 256, 1024, 4096, 16384, 65536)
    """Random features when measuring the error."""
    error_seeds: int = 9
    """Random inputs of each."""
    error_head_dim: int = 16
    """Width of a head when measuring the error; 64 / 4 in the preset `tiny`."""
    error_scale: float = 0.5
    """Scale of the entries of queries and keys."""
    backward: bool = True
    """Time forward plus backward too."""
    seconds: float = 3.0
    """CPU time of each length; the longest takes what its least number of rounds takes."""
    threads: int = 1
    """Threads of PyTorch."""
    seed: int = 0
    """Of inputs and features."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise PrismError(f"lengths is {self.lengths}; name at least one length, each at least 1")
        if not self.error_features or min(self.error_features) < 1:
            raise PrismError(f"error-features is {self.error_features}; name at least one number, each at least 1")
        for name in ("heads", "head_dim", "features", "error_seeds", "error_head_dim", "threads"):
            if getattr(self, name) < 1:
                raise PrismError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.seconds < 0 or self.error_scale <= 0:
            raise PrismError("seconds must be at least 0 and error-scale above 0")


def linear_attention(kind: Linear, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """FAVOR+'s estimate of `softmax_attention` (w from `orthogonal_features`), or Eq. 3 to the letter
    (`gaussian_features`)."""
    return linear_attend(kind, q, linear_keys(kind, k, v, w), w)


def attend(kind: Kind, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Any kind by name; `softmax` ignores the random features."""
    resolved = choose(kind, q.shape[2], k.shape[2], *w.shape)
    if resolved == "softmax":
        return softmax_attention(q, k, v)
    assert resolved != "uniform"
    return linear_attention(resolved, q, k, v, w)


def measure_errors(config: Config, scale: float, advance: Callable[[], None]) -> dict[str, dict[str, float]]:
    """{"favor": {"16": error, ...}, "favor_paper": {...}}: 2 heads, 64 queries, 64 keys."""
    head_dim = config.error_head_dim
    errors: dict[str, dict[str, float]] = {"favor": {}, "favor_paper": {}}
    for m in config.error_features:
        samples: dict[str, list[float]] = {"favor": [], "favor_paper": []}
        for i in range(config.error_seeds):
            rng = torch.Generator().manual_seed(config.seed + i)  # the same inputs for every m
            q, k = (scale * torch.randn(1, 2, 64, head_dim, generator=rng) for _ in range(2))
            v = torch.randn(1, 2, 64, head_dim, generator=rng)
            exact = softmax_attention(q, k, v)
            estimates = {
                "favor": linear_attention("favor", q, k, v, orthogonal_features(m, head_dim, rng)),
                "favor_paper": linear_attention("favor_paper", q, k, v, gaussian_features(m, head_dim, rng)),
            }
            for name, estimate in estimates.items():
                samples[name].append(float((estimate - exact).norm() / exact.norm()))
            advance()
        for name, values in samples.items():
            errors[name][str(m)] = float(np.median(values))
    return errors


def measure_times(config: Config, length: int, backward: bool) -> dict[str, Times]:
    rng = torch.Generator().manual_seed(config.seed)
    shape = (1, length, config.heads, config.head_dim)  # as the projections leave it
    q, k, v = (0.5 * torch.randn(shape, generator=rng).transpose(1, 2) for _ in range(3))
    w = orthogonal_features(config.features, config.head_dim, rng)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def call(kind: Kind) -> Tensor | None:
        out = attend(kind, inputs[0], inputs[1], inputs[2], w)
        if not backward:
            return out
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return None

    calls: dict[str, Callable[[], object]] = {kind: partial(call, kind) for kind in KINDS}
    least = 5 if backward else 15
    with torch.set_grad_enabled(backward):
        return interleave(calls, np.random.default_rng(config.seed), config.seconds, min_rounds=least)


def compare_auto(times: dict[str, Times], resolved: str, rng: np.random.Generator) -> dict[str, Any]:
    """`auto` against the faster of exact and linear, both found and compared within the same rounds."""
    best_cpu = min(("softmax", "favor"), key=lambda name: float(np.median(times[name].cpu)))
    best_wall = min(("softmax", "favor"), key=lambda name: float(np.median(times[name].wall)))
    return {
        "resolved": resolved,
        "fastest": best_cpu,
        "ratio": paired_ratio(times["auto"].cpu, times[best_cpu].cpu),
        "ratio_interval": ratio_interval(times["auto"].cpu, times[best_cpu].cpu, rng),
        "ratio_wall": paired_ratio(times["auto"].wall, times[best_wall].wall),
        "rounds": len(times["auto"].cpu),
    }


def run(config: Config, console: Console) -> dict[str, Any]:
    """All figures as JSON values; see the module's docstring for what they mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    modes = ("forward", "forward_backward") if config.backward else ("forward",)
    scales = (config.error_scale, 2.0 * config.error_scale)
    steps = len(scales) * len(config.error_features) * config.error_seeds
    rng = np.random.default_rng(config.seed)
    time_ms: dict[str, dict[str, dict[str, dict[str, float]]]] = {mode: {kind: {} for kind in KINDS} for mode in modes}
    auto: dict[str, dict[str, dict[str, Any]]] = {mode: {} for mode in modes}
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("error against exact softmax", total=steps)
            error, peaked = (measure_errors(config, scale, lambda: progress.advance(bar)) for scale in scales)
            bar = progress.add_task("time", total=len(modes) * len(config.lengths))
            for mode in modes:
                for length in config.lengths:
                    progress.update(bar, description=f"time, {mode.replace('_', ' + ')}, T = {length}")
                    times = measure_times(config, length, backward=mode == "forward_backward")
                    for kind in KINDS:
                        time_ms[mode][kind][str(length)] = times[kind].summary()
                    resolved = choose("auto", length, length, config.features, config.head_dim)
                    auto[mode][str(length)] = compare_auto(times, resolved, rng)
                    progress.advance(bar)
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = {
        "error": error,
        "error_at_twice_the_scale": peaked,
        "auto_worst_ratio": max(entry["ratio"] for entry in auto["forward"].values()),
        "auto_worst_ratio_wall": max(entry["ratio_wall"] for entry in auto["forward"].values()),
    }
    if config.backward:
        result["auto_worst_ratio_training"] = max(entry["ratio"] for entry in auto["forward_backward"].values())
    names = ("heads", "head_dim", "features", "error_head_dim", "error_scale", "error_seeds", "threads")
    settings = {name: getattr(config, name) for name in names}
    return {**result, "auto": auto, "time_ms": time_ms, "settings": settings, **run_info(config.seed)}


def _clock(result: dict[str, Any]) -> tuple[str, str]:
    """What to show: on one thread CPU time, which a busy machine does not disturb; else the wall clock."""
    return ("CPU", "cpu_median") if result["settings"]["threads"] == 1 else ("wall clock", "median")


def show(result: dict[str, Any], console: Console) -> None:
    errors = Table(title="Relative error against exact softmax (median)")
    errors.add_column("features m", justify="right")
    errors.add_column("favor", justify="right")
    errors.add_column("favor_paper (literal)", justify="right")
    for m, value in result["error"]["favor"].items():
        errors.add_row(m, f"{value:.4f}", f"{result['error']['favor_paper'][m]:.4f}")
    console.print(errors)
    clock, median = _clock(result)
    for mode, by_kind in result["time_ms"].items():
        table = Table(title=f"Milliseconds of {clock} time, {mode.replace('_', ' + ')} (median)")
        for column in ("T", *by_kind, "auto is", "auto / fastest"):
            table.add_column(column, justify="right")
        for length, entry in result["auto"][mode].items():
            cells = [f"{by_kind[kind][length][median]:.3g}" for kind in by_kind]
            table.add_row(length, *cells, entry["resolved"], f"{entry['ratio']:.2f}")
        console.print(table)
    console.print(f"auto against the fastest, worst length: {result['auto_worst_ratio']:.3f} (forward)")


def draw(result: dict[str, Any]) -> Figure:
    """Error by m and time by T, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = {"softmax": "#333333", "favor": "#0072b2", "favor_paper": "#d55e00", "auto": "#009e73"}
    for kind, by_m in result["error"].items():
        left.loglog([int(m) for m in by_m], list(by_m.values()), "o-", color=colors[kind], label=kind)
    left.set(xlabel="random features m", ylabel="relative error against softmax")
    clock, median = _clock(result)
    for kind, by_length in result["time_ms"]["forward"].items():
        values = [entry[median] for entry in by_length.values()]
        style = {"linestyle": "--", "linewidth": 2.5} if kind == "auto" else {"marker": "o", "markersize": 3}
        right.loglog([int(t) for t in by_length], values, color=colors[kind], label=kind, **style)
    lengths = [int(t) for t in result["time_ms"]["forward"]["auto"]]
    right.set(xlabel="queries and keys T", ylabel=f"ms of {clock} time, forward")
    right.set_xticks(lengths[::2], [str(t) for t in lengths[::2]])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
