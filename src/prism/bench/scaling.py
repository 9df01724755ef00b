"""`prism bench scaling`: how the time to a plan grows with its length T_p and with the number of candidates K.

The paper-size generator, eager, one thread, one context of To = 8 tokens; keys and values, K candidates and all blocks
included, the encoder not (it knows neither T_p nor K). CPU time, medians of interleaved rounds.

pred_horizon_ms, candidates_ms   by T_p at K = 8, and by K at T_p = 16
pred_horizon_exponent            slope of log time over log T_p, least squares over all lengths; 1 is linear
pred_horizon_exponent_upper      over the longer half of them, where fixed costs hide no growth
candidates_exponent, candidates_exponent_upper   likewise for K
pred_horizon_growth, candidates_growth   time(largest) / time(smallest), beside largest / smallest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from prism.bench.output import Output
from prism.bench.timing import interleave, provenance
from prism.errors import PrismError
from prism.presets import build_policy, preset
from prism.prism_policy import PrismPolicy
from prism.sensors import SensorSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ScalingBenchConfig:
    json: Path | None = None
    plot: Path | None = None
    overwrite: bool = False
    size: str = "paper"
    pred_horizons: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    candidates: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    fixed_candidates: int = 8
    fixed_horizon: int = 16
    seconds: float = 40.0  # of CPU time, for each of the two
    seed: int = 0

    def __post_init__(self) -> None:
        if min(len(self.pred_horizons), len(self.candidates)) < 2:
            raise PrismError("scaling needs at least two lengths and two numbers of candidates")
        Output(plot=self.plot)  # refuses what it cannot draw


def main(config: ScalingBenchConfig) -> None:
    output = Output(config.json, config.plot, config.overwrite)
    output.carry_out(lambda console: run(config, console), show, draw)


def run(config: ScalingBenchConfig, console: Console) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with console.status("plans of growing length"):
            lengths = {tp: _plan(config, tp, config.fixed_candidates) for tp in config.pred_horizons}
            by_length = _times(lengths, config)
        with console.status("more and more candidates"):
            by_count = _times({k: _plan(config, config.fixed_horizon, k) for k in config.candidates}, config)
    finally:
        torch.set_num_threads(threads)
    return {
        "pred_horizon_ms": {str(k): v for k, v in by_length.items()},
        "candidates_ms": {str(k): v for k, v in by_count.items()},
        **_growth("pred_horizon", by_length),
        **_growth("candidates", by_count),
        "size": config.size,
        "fixed_candidates": config.fixed_candidates,
        "fixed_horizon": config.fixed_horizon,
        **provenance(config.seed),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    for key in ("pred_horizon", "candidates"):
        console.print(
            f"{key}: exponent {result[f'{key}_exponent']:.3f}, upper half {result[f'{key}_exponent_upper']:.3f}; "
            f"{result[f'{key}_range']:g}x as many take {result[f'{key}_growth']:.1f}x the time"
        )


def _plan(config: ScalingBenchConfig, pred_horizon: int, candidates: int) -> Callable[[], object]:
    own = replace(preset(config.size), pred_horizon=pred_horizon)
    policy = build_policy(own.spec((SensorSpec("proprio", "vector", (15,)),), 7, 30.0), config.seed)
    assert isinstance(policy, PrismPolicy)
    policy.eval()
    rng = torch.Generator().manual_seed(config.seed)
    context = torch.randn(1, policy.encoder.tokens, policy.encoder.width, generator=rng)

    def call() -> object:
        with torch.inference_mode():
            return policy.plan(context, candidates, rng)

    return call


def _times(calls: Mapping[int, Callable[[], object]], config: ScalingBenchConfig) -> dict[int, float]:
    named = {str(size): call for size, call in calls.items()}
    times = interleave(named, np.random.default_rng(config.seed), config.seconds, min_rounds=5, max_rounds=40)
    return {size: times[str(size)].summary()["cpu_median"] for size in calls}


def exponent(times: Mapping[int, float]) -> float:
    """Least-squares slope of log time over log size."""
    slope, _ = np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)
    return float(slope)


def _growth(name: str, times: dict[int, float]) -> dict[str, float]:
    sizes = sorted(times)
    upper = {size: times[size] for size in sizes[len(sizes) // 2 :]} if len(sizes) > 2 else times
    return {
        f"{name}_exponent": exponent(times),
        f"{name}_exponent_upper": exponent(upper),
        f"{name}_growth": times[sizes[-1]] / times[sizes[0]],
        f"{name}_range": sizes[-1] / sizes[0],
    }


def draw(result: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = (("pred_horizon", "plan length T_p (K = 8)"), ("candidates", "candidates K (T_p = 16)"))
    for axis, (key, label) in zip(axes, panels, strict=True):
        times = {int(size): ms for size, ms in result[f"{key}_ms"].items()}
        sizes = np.array(sorted(times))
        values = np.array([times[size] for size in sizes])
        axis.loglog(sizes, values, "o-", label=f"measured, exponent {exponent(times):.2f}")
        axis.loglog(sizes, values[-1] * sizes / sizes[-1], "--", color="0.6", label="linear")
        axis.set_xlabel(label)
        axis.set_ylabel("ms a plan, one core")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(frameon=False)
    return figure
