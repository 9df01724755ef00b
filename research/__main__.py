"""The benches and studies behind the figures, run from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prism.cli import Command, guard, parse, unknown
from research import commands_bench as bench
from research import commands_study as study
from research.benchmark import BenchmarkConfig
from research.sensor_dropping import SensorDroppingConfig

NAMES: dict[str, type[Command]] = {
    "attention": bench.Attention,
    "train-step": bench.TrainStep,
    "global-batch": bench.GlobalBatch,
    "data": bench.Data,
    "modality": SensorDroppingConfig,
    "benchmark": BenchmarkConfig,
    "modality-dropout": bench.ModalityDropout,
    "modality-claims": study.ModalityStudy,
    "scaling": bench.Scaling,
    "sims": bench.Sims,
    "size": bench.Size,
    "lemmas": study.Lemmas,
    "threshold": study.Threshold,
    "multimodality": study.Multimodality,
    "ablations": study.Ablations,
    "demonstrations": study.DemonstrationCount,
    "selection": study.SelectionRules,
    "failures": study.Failures,
    "trends": study.Trends,
}


def main(args: Sequence[str] | None = None) -> int:
    return guard("research", lambda: _dispatch(list(sys.argv[1:] if args is None else args)))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--list"):
        for name, command in NAMES.items():
            print(f"{name:<17} {(command.__doc__ or '').splitlines()[0]}")
        return 0
    if words[0] not in NAMES:
        raise unknown(words[0], NAMES, "python -m research")
    parse(NAMES[words[0]], f"python -m research {words[0]}", words[1:]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
