"""prism study lemmas | threshold | multimodality | ...: the paper's experiments, each with a verdict"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prism.commands.style import option

OutputFile = Annotated[Path | None, option("FILE")]


@dataclass(frozen=True)
class Lemmas:
    """The paper's theory as checks: quantile variance, FAVOR+ error, likelihood bound, soft term's limit. Seconds.

    Try:
        prism study lemmas --json lemmas.json --plot lemmas.png
    """

    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from rich.console import Console

        from prism.studies import lemmas
        from prism.studies.report import Output, show_claims

        output = Output(self.json, self.plot, self.overwrite)
        output.check()
        study = lemmas.run(lemmas.LemmasConfig())
        console = Console()
        lemmas.show(study, console)
        show_claims(study, console)
        output.write(study, lemmas.draw)


@dataclass(frozen=True)
class Threshold:
    """Rejection and fallback of each threshold rule in training; the threshold's variation against batch size.

    Try:
        prism study threshold --tasks pusht metaworld-reach --json threshold.json --plot threshold.png

    Trains every rule on every task. Killed at any moment, the same command goes on where it was.
    """

    tasks: Annotated[tuple[str, ...], option("RECIPE ...")] = (
        "pusht", "pusht-human", "metaworld-reach", "metaworld-drawer-open",
    )  # fmt: skip
    """Recipes to train on; pusht-human needs `prism data download pusht`."""
    rules: Annotated[tuple[str, ...], option("RULE ...")] = ("own", "relative", "row", "batch", "paper")
    """own, relative, row (calibrated), batch (calibrated, any target rejects), paper (literal); all unless told."""
    steps: int = 1500
    """Training steps of each."""
    warmup: int = 500
    """Steps at the beginning that do not count."""
    draws: int = 100
    """Random batches of each size, for the variation."""
    seed: int = 0
    """Of the trainings and the batches."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-threshold")
    """Where the runs and finished parts are kept; runs/study-threshold unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from rich.console import Console

        from prism.studies import threshold
        from prism.studies.report import Output, show_claims

        output = Output(self.json, self.plot, self.overwrite)
        output.check()
        config = threshold.ThresholdConfig(
            work=self.work,
            tasks=self.tasks,
            rules=self.rules,
            steps=self.steps,
            warmup=self.warmup,
            draws=self.draws,
            seed=self.seed,
        )
        study = threshold.run(config, Console(stderr=True))
        console = Console()
        threshold.show(study, console)
        show_claims(study, console)
        output.write(study, threshold.draw)


@dataclass(frozen=True)
class Multimodality:
    """Push-T from starts with two equally good ways: which methods take both, and which the average?

    Try:
        prism study multimodality --json multimodality.json --plot multimodality.png
        prism study multimodality --methods --policies prism=runs/pusht-human mse=runs/mse      trained before

    Trains each method on the demonstrations that ship with prism. Killed, the same command goes on where it was.
    """

    recipe: str = "pusht"
    """A Push-T recipe: pusht (shipped, goes round the block either way) or pusht-human."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism", "mse")
    """Methods to train: prism, mse, flow_matching, imle, diffusion, act."""
    policies: Annotated[tuple[str, ...], option("NAME=RUN ...")] = ()
    """Runs that are there already, beside them."""
    steps: int = 4000
    """Training steps of each method."""
    rollouts: int = 40
    """From each start."""
    offsets: Annotated[tuple[float, ...], option("PX ...")] = (-60.0, -40.0, -20.0, 0.0, 20.0, 40.0, 60.0)
    """Starts along the block's top edge, in pixels from its middle; 0 must be among them."""
    seed: int = 0
    """Of the trainings."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-multimodality")
    """Where the runs and finished parts are kept; runs/study-multimodality unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw the paths into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from rich.console import Console

        from prism.studies import multimodality
        from prism.studies.report import Output, show_claims

        output = Output(self.json, self.plot, self.overwrite)
        output.check()
        config = multimodality.MultimodalityConfig(
            work=self.work,
            recipe=self.recipe,
            methods=self.methods,
            policies=self.policies,
            steps=self.steps,
            rollouts=self.rollouts,
            offsets=self.offsets,
            seed=self.seed,
        )
        study = multimodality.run(config, Console(stderr=True))
        console = Console()
        multimodality.show(study, console)
        show_claims(study, console)
        output.write(study, multimodality.draw)
