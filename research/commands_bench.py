"""python -m research attention | train-step | global-batch | allocator | data | modality | modality-dropout"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.cli.style import OutputFile, option
from prism.errors import PrismError


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
class Modality:
    """What each sensor is worth: roll a policy out without each one, and without each pair.

    Try:
        prism train metaworld-reach --set policy.encoder.dropout=0.3 --out runs/dropped
        python -m research modality runs/dropped --episodes 20
        python -m research modality runs/mine --sensors rgb_wrist proprio --json modality.json

    Writes modality.json and modality.html (three bar charts) into the run. A policy trained without dropout never
    learned what to do without a sensor, which is said then.
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to roll out in; the one the policy was trained for unless told."""
    episodes: int = 20
    """How many episodes under each condition, the same ones everywhere."""
    sensors: Annotated[tuple[str, ...] | None, option("NAME ...")] = None
    """Drop only these; all of the policy's unless told."""
    workers: Annotated[int | None, option("N")] = None
    """Processes that roll out in parallel; one a core unless told."""
    json: OutputFile = None
    """Write the figures to this file too."""
    overwrite: bool = False
    """Replace that file if it exists."""

    def __post_init__(self) -> None:
        for name, value in (("episodes", self.episodes), ("workers", self.workers)):
            if value is not None and value < 1:
                raise PrismError(f"--{name} {value} is out of range: use 1 or more")

    def run(self) -> None:
        from prism.bench.output import refuse_existing
        from prism.cli.summary import print_modality
        from prism.rollout.results import write_json
        from prism.runs.run import EvalOptions, Run

        refuse_existing(self.json, overwrite=self.overwrite)
        options = EvalOptions(task=self.task, episodes=self.episodes, workers=self.workers)
        run = Run(self.run_folder)
        study = run.drop_sensors(options, self.sensors)
        if self.json is not None:
            write_json(self.json, study.to_json(), self.overwrite)
        print_modality(study)
        if study.note is not None:
            print(f"note: {study.note}")
        print(f"charts: {run.folder / 'modality.html'}")


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
