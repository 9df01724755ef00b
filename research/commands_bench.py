"""python -m research attention | train-step | global-batch | allocator | data | modality | modality-dropout"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Attention:
    """Exact softmax against FAVOR+: error by number of features, time by length, and the rule behind `auto`.

    Try:
        python -m research attention --json attention.json --plot attention.png
    """

    json: OutputFile = None
    """Write the figures to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from research.attention import AttentionBenchConfig, main

        main(AttentionBenchConfig(json=self.json, plot=self.plot, overwrite=self.overwrite))


@dataclass(frozen=True)
class TrainStep:
    """What back-propagating only the chosen candidates brings: time and memory against all K.

    Try:
        python -m research train-step --json train-step.json
    """

    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from research.train_step import TrainStepBenchConfig, main

        main(TrainStepBenchConfig(json=self.json, overwrite=self.overwrite))


@dataclass(frozen=True)
class GlobalBatch:
    """What it costs that rejection looks at the whole global batch, as that grows to 4096.

    Try:
        python -m research global-batch --json global-batch.json --plot global-batch.png
    """

    json: OutputFile = None
    """Write the figures to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from research.global_batch import GlobalBatchBenchConfig, main

        main(GlobalBatchBenchConfig(json=self.json, plot=self.plot, overwrite=self.overwrite))


@dataclass(frozen=True)
class Data:
    """Reading datasets: windows a second from every format, and memory as the data grow ten times.

    Try:
        python -m research data --json data.json
        python -m research data --formats prism lerobot_v3
    """

    formats: Annotated[tuple[str, ...], option("FORMAT")] = ()
    """prism, zarr, zarr_zip, robomimic, lerobot_v21, lerobot_v3, calvin; all of them unless told."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from research.data import DataBenchConfig, main

        main(DataBenchConfig(json=self.json, overwrite=self.overwrite, formats=self.formats))


@dataclass(frozen=True)
class ModalityDropout:
    """What dropping whole sensors in training brings, when one is missing afterwards: trains and evaluates.

    Try:
        python -m research modality-dropout --json modality-dropout.json

    A MetaWorld task whose object is seen twice: in the world and from the hand. docs/sensors.md has the results. Killed
    at any moment, the same command goes on where it was; with more --seeds it adds them.
    """

    task: str = "metaworld-reach"
    """A MetaWorld task."""
    seeds: int = 3
    """Policies of each kind, and seeds of their training."""
    steps: int = 2000
    """Training steps of each policy."""
    episodes: int = 10
    """Episodes under each condition."""
    dropout: float = 0.3
    """Chance of each sensor to be absent from a window, for the policies that are trained with it."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/bench-modality-dropout")
    """Where the runs and finished parts are kept; runs/bench-modality-dropout unless told."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from research.modality_dropout import ModalityDropoutConfig, main

        main(
            ModalityDropoutConfig(
                task=self.task,
                seeds=self.seeds,
                steps=self.steps,
                episodes=self.episodes,
                dropout=self.dropout,
                work=self.work,
                json=self.json,
                overwrite=self.overwrite,
            )
        )


@dataclass(frozen=True)
class Sims:
    """How fast each simulator runs on one core: steps and camera pictures a second.

    Try:
        python -m research sims --json sims.json
        python -m research sims --sims metaworld --seconds 10
    """

    sims: Annotated[tuple[str, ...], option("NAME ...")] = ()
    """pusht, metaworld, robosuite, ...; all that are installed unless told."""
    seconds: float = 30.0
    """Of CPU time, for all of them together."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from research.sims import SimsBenchConfig, main

        main(SimsBenchConfig(sims=self.sims, seconds=self.seconds, json=self.json, overwrite=self.overwrite))


@dataclass(frozen=True)
class Size:
    """Parameters, megabytes and FLOPs of every method and preset.

    Try:
        python -m research size
        python -m research size --presets paper --json size.json
    """

    presets: Annotated[tuple[str, ...], option("PRESET ...")] = ("tiny", "base", "paper")
    """Which sizes; all of them unless told."""
    json: OutputFile = None
    """Write the figures to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from research.size import SizeBenchConfig, main

        main(SizeBenchConfig(json=self.json, overwrite=self.overwrite, presets=self.presets))


@dataclass(frozen=True)
class Scaling:
    """How the time to a plan grows with its length (T_p to 1024) and the number of candidates (K to 64).

    Try:
        python -m research scaling --json scaling.json --plot scaling.svg
    """

    json: OutputFile = None
    """Write the figures to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from research.scaling import ScalingBenchConfig, main

        main(ScalingBenchConfig(json=self.json, plot=self.plot, overwrite=self.overwrite))
