"""Parameters, megabytes and FLOPs of every method and preset.

Try:
    python -m research size
    python -m research size --presets paper --json size.json

FLOPs are those of matrix products and convolutions (torch.utils.flop_counter; a multiply and an add count as two),
for one context: to one plan, and to K = 8, at the method's NFE. The encoders, the same for all, are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from prism.bench.latency import CANDIDATES, WAYS, Bench, config_of
from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.methods.presets import PRESETS
from research.report import Written

_NETWORKS = {way.method: way for way in WAYS if not way.key.endswith(("nfe1", "nfe100"))}  # one a method


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    presets: Annotated[tuple[str, ...], option("PRESET ...")] = tuple(PRESETS)
    """Which sizes; default: all of them."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.presets if name not in PRESETS]:
            raise PrismError(f"unknown preset '{unknown[0]}'; use one of {', '.join(PRESETS)}")


def run(config: Config, console: Console) -> dict[str, Any]:
    sizes = {}
    for preset in config.presets:
        with console.status(f"counting {preset}"):
            sizes[preset] = _measure(preset)
    return {
        "presets": sizes,
        "candidates": CANDIDATES,
        "note": "head: everything but the encoders; megabytes of 10^6 bytes in float32; flops of one context",
        **run_info(0),
    }


def _measure(preset: str) -> dict[str, Any]:
    shared = config_of("prism", preset)
    bench = Bench.make(preset, shared.obs_horizon, shared.pred_horizon, tuple(_NETWORKS))
    methods = {}
    for method, way in _NETWORKS.items():
        policy = bench.policies[method]
        encoder = sum(parameter.numel() for parameter in policy.encoder.parameters())
        total = sum(parameter.numel() for parameter in policy.parameters())
        methods[method] = {
            "parameters": total,
            "head_parameters": total - encoder,
            "megabytes": sum(p.numel() * p.element_size() for p in policy.parameters()) / 1e6,
            "evaluations": int(dict(way.changes).get("evaluations", 1)),
            "flops_one_plan": flops(bench.planner(way, 1)),
            f"flops_{CANDIDATES}_plans": flops(bench.planner(way, CANDIDATES)),
        }
    return {
        "obs_horizon": shared.obs_horizon,
        "pred_horizon": shared.pred_horizon,
        "encoder_flops": flops(bench.encoder()),
        "encoder_parameters": methods["prism"]["parameters"] - methods["prism"]["head_parameters"],
        "methods": methods,
    }


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return int(counter.get_total_flops())


def show(result: Mapping[str, Any], console: Console) -> None:
    for preset, data in result["presets"].items():
        words = (
            f"{preset}: To {data['obs_horizon']}, Tp {data['pred_horizon']}; encoders "
            f"{data['encoder_parameters'] / 1e6:.1f} M parameters, {data['encoder_flops'] / 1e9:.2f} GFLOP"
        )
        table = Table(box=None, padding=(0, 1, 0, 0), title=words, title_justify="left")
        table.add_column("method", no_wrap=True)
        for column in ("head", "total", "MB", "NFE", "GFLOP, 1 plan", f"{CANDIDATES} plans"):
            table.add_column(column, justify="right", no_wrap=True)
        for method, row in data["methods"].items():
            table.add_row(
                method,
                f"{row['head_parameters'] / 1e6:.2f} M",
                f"{row['parameters'] / 1e6:.2f} M",
                f"{row['megabytes']:.0f}",
                str(row["evaluations"]),
                f"{row['flops_one_plan'] / 1e9:.3g}",
                f"{row[f'flops_{CANDIDATES}_plans'] / 1e9:.3g}",
            )
        console.print(table)
