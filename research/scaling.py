"""How the time to a plan grows with its length (T_p to 1024) and the number of candidates (K to 64).

Try:
    python -m research scaling --json scaling.json --plot scaling.svg

The paper-size generator, eager, one thread, one context of To = 8 tokens; keys and values, K candidates and all blocks
included, the encoder not (it knows neither T_p nor K). CPU time, medians of interleaved rounds.

    pred_horizon_ms, candidates_ms   by T_p at K = 8, and by K at T_p = 16, with the preset's attention (auto)
    linear_ms, exact_ms              by T_p with linear (FAVOR+) and with exact attention at every length
    pred_horizon_exponent            slope of log time over log T_p, least squares over all lengths; 1 is linear
    pred_horizon_exponent_upper      over the longer half of them, where fixed costs hide no growth
    linear_exponent, exact_exponent, candidates_exponent and their _upper   likewise
    pred_horizon_growth, linear_growth, ...   time(largest) / time(smallest), beside largest / smallest (_range)
    auto_over_linear                 the largest of time(auto) / time(linear) over the lengths: 1 or less
                                     where auto lies below the straight line of linear attention
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from rich.console import Console

from prism.attention import Kind
from prism.bench.timing import interleave
from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.methods.presets import build_policy, preset
from prism.methods.prism import PrismPolicy
from prism.rows import Random
from prism.sensors import SensorSpec
from research.report import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    size: str = "paper"
    """tiny, base or paper."""
    pred_horizons: Annotated[tuple[int, ...], option("TP ...")] = (16, 32, 64, 128, 256, 512, 1024)
    """Lengths of a plan."""
    candidates: Annotated[tuple[int, ...], option("K ...")] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of candidates."""
    fixed_candidates: int = 8
    """K while the length grows."""
    fixed_horizon: int = 16
    """T_p while K grows."""
    seconds: float = 40.0
    """CPU time of each of the two."""
    seed: int = 0
    """Of weights and latents."""

    def __post_init__(self) -> None:
        if min(len(self.pred_horizons), len(self.candidates)) < 2:
            raise PrismError("scaling needs at least two lengths and two numbers of candidates")


def run(config: Config, console: Console) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with console.status("plans of growing length"):
            auto, linear, exact = _lengths(config)
        with console.status("more and more candidates"):
            calls = {str(k): _plan(config, config.fixed_horizon, k) for k in config.candidates}
            times = _times(calls, config.seconds, config.seed)
            by_count = {k: times[str(k)] for k in config.candidates}
    finally:
        torch.set_num_threads(threads)
    return {
        "pred_horizon_ms": _named(auto),
        "linear_ms": _named(linear),
        "exact_ms": _named(exact),
        "candidates_ms": _named(by_count),
        **_growth("pred_horizon", auto),
        **_growth("linear", linear),
        **_growth("exact", exact),
        **_growth("candidates", by_count),
        "auto_over_linear": max(auto[tp] / linear[tp] for tp in auto),
        "size": config.size,
        "fixed_candidates": config.fixed_candidates,
        "fixed_horizon": config.fixed_horizon,
        **run_info(config.seed),
    }


SHOWN = (
    ("pred_horizon", "T_p, attention auto"),
    ("linear", "T_p, linear attention"),
    ("exact", "T_p, exact attention"),
    ("candidates", "K"),
)


def show(result: Mapping[str, Any], console: Console) -> None:
    for key, label in SHOWN:
        console.print(
            f"{label}: exponent {result[f'{key}_exponent']:.3f}, upper half {result[f'{key}_exponent_upper']:.3f}; "
            f"{result[f'{key}_range']:g}x as many take {result[f'{key}_growth']:.1f}x the time"
        )
    console.print(f"auto takes at most {result['auto_over_linear']:.2f}x the time of linear attention at any length")


def _plan(config: Config, pred_horizon: int, candidates: int, kind: Kind = "auto") -> Callable[[], object]:
    own = preset(config.size)
    attention = replace(own.generator.attention, kind=kind)
    own = replace(own, pred_horizon=pred_horizon, generator=replace(own.generator, attention=attention))
    policy = build_policy(own.spec((SensorSpec("proprio", "vector", (15,)),), 7, 30.0), config.seed)
    assert isinstance(policy, PrismPolicy)
    policy.eval()
    rng = Random(config.seed)
    context = rng.randn((1, policy.encoder.tokens, policy.encoder.width))

    def call() -> object:
        with torch.inference_mode():
            return policy.plan(context, candidates, rng)

    return call


def _lengths(config: Config) -> list[dict[int, float]]:
    """Milliseconds by T_p for auto, linear and exact attention, in the same rounds."""
    kinds: tuple[Kind, ...] = ("auto", "favor", "softmax")
    calls = {
        f"{kind} {tp}": _plan(config, tp, config.fixed_candidates, kind)
        for kind in kinds
        for tp in config.pred_horizons
    }
    times = _times(calls, len(kinds) * config.seconds, config.seed)
    return [{tp: times[f"{kind} {tp}"] for tp in config.pred_horizons} for kind in kinds]


def _times(calls: Mapping[str, Callable[[], object]], seconds: float, seed: int) -> dict[str, float]:
    times = interleave(calls, np.random.default_rng(seed), seconds, min_rounds=5, max_rounds=40)
    return {name: taken.summary()["cpu_median"] for name, taken in times.items()}


def _named(times: Mapping[int, float]) -> dict[str, float]:
    return {str(size): ms for size, ms in times.items()}


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
    _panel(axes[0], "plan length T_p (K = 8)", result, {"auto": "pred_horizon", "linear": "linear", "exact": "exact"})
    _panel(axes[1], "candidates K (T_p = 16)", result, {"measured": "candidates"})
    return figure


def _panel(axis: Axes, label: str, result: Mapping[str, Any], curves: Mapping[str, str]) -> None:
    for name, key in list(curves.items())[::-1]:
        times = {int(size): ms for size, ms in result[f"{key}_ms"].items()}
        style = "o-" if name == next(iter(curves)) else ".:"
        axis.loglog(list(times), list(times.values()), style, label=f"{name}, exponent {exponent(times):.2f}")
    sizes = np.array(sorted(times))
    axis.loglog(sizes, times[int(sizes[-1])] * sizes / sizes[-1], "--", color="0.6", label="straight line")
    axis.set_xlabel(label)
    axis.set_ylabel("ms a plan, one core")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(frameon=False)
