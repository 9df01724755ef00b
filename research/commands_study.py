"""lemmas | threshold | multimodality | ablations | ...: the paper's experiments, each with a verdict"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Lemmas:
    """The paper's theory as checks: quantile variance, FAVOR+ error, likelihood bound, soft term's limit. Seconds.

    Try:
        python -m research lemmas --json lemmas.json --plot lemmas.png
    """

    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import lemmas
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        carry_out(output, lambda console: lemmas.run(lemmas.LemmasConfig(), console), lemmas.show, lemmas.draw)


@dataclass(frozen=True)
class Threshold:
    """Rejection and fallback of each threshold rule in training; the threshold's variation against batch size.

    Try:
        python -m research threshold --tasks pusht metaworld-reach --json threshold.json --plot threshold.png

    Trains every rule on every task. Killed at any moment, the same command goes on where it was.
    """

    tasks: Annotated[tuple[str, ...], option("RECIPE ...")] = (
        "pusht", "pusht-human", "metaworld-reach", "metaworld-drawer-open",
    )  # fmt: skip
    """Recipes to train on; pusht-human needs `prism data download pusht`."""
    rules: Annotated[tuple[str, ...], option("RULE ...")] = ("own", "relative", "row", "batch", "paper")
    """own, relative, row (calibrated), batch (calibrated, any target rejects), paper (literal); all unless told."""
    runs: Annotated[tuple[str, ...], option("NAME=RUN ...")] = ()
    """Runs of PRISM that are there already: their logs are read, and count beside the others."""
    steps: int = 1500
    """Training steps of each."""
    warmup: int = 500
    """Steps at the beginning that do not count."""
    batch_sizes: Annotated[tuple[int, ...], option("N ...")] = (8, 16, 32, 64, 128, 256, 512)
    """Batch sizes at which the threshold's variation is measured."""
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
        from prism.bench.output import Output
        from research import threshold
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        config = threshold.ThresholdConfig(
            work=self.work,
            tasks=self.tasks,
            rules=self.rules,
            runs=self.runs,
            steps=self.steps,
            warmup=self.warmup,
            batch_sizes=self.batch_sizes,
            draws=self.draws,
            seed=self.seed,
        )
        carry_out(output, lambda console: threshold.run(config, console), threshold.show, threshold.draw)


@dataclass(frozen=True)
class Multimodality:
    """Push-T from starts with two equally good ways: which methods take both, and which the average?

    Try:
        python -m research multimodality --json multimodality.json --plot multimodality.png
        python -m research multimodality --methods --policies prism=runs/pusht-human mse=runs/mse      trained before

    Records demonstrations of the scripted expert, who goes either way, and trains each method on them. Killed, the same
    command goes on where it was.
    """

    recipe: str = "pusht-edge"
    """A Push-T recipe: pusht-edge (starts like those of the study), pusht or pusht-human (from everywhere)."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism", "mse")
    """Methods to train: prism, mse, flow_matching, imle, diffusion, act."""
    policies: Annotated[tuple[str, ...], option("NAME=RUN ...")] = ()
    """Runs that are there already, beside them."""
    steps: int = 3000
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
        from prism.bench.output import Output
        from research import multimodality
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
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
        carry_out(output, lambda console: multimodality.run(config, console), multimodality.show, multimodality.draw)


@dataclass(frozen=True)
class Ablations:
    """What each choice is worth: heads, features, depth, K, soft term, threshold rule, scope, observation horizon.

    Try:
        python -m research ablations --factors rule scope --steps 2500 --json ablations.json
        python -m research ablations --recipe metaworld-pick-place --factors candidates --seeds 0

    Uses the machinery of prism compare. Killed at any moment, the same command goes on where it was.
    """

    recipe: str = "pusht"
    """A recipe or task, as for prism train."""
    factors: Annotated[tuple[str, ...], option("FACTOR ...")] = (
        "rule", "scope", "candidates", "soft", "heads", "features", "depth", "obs_horizon",
    )  # fmt: skip
    """rule, scope, candidates, soft, heads, features, depth, obs_horizon; all unless told."""
    steps: int = 2500
    """Training steps of every variant."""
    minutes: Annotated[float | None, option("M")] = None
    """Minutes of CPU time of every variant, in place of the steps."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 50
    """Episodes of each evaluation."""
    jobs: int = 1
    """Runs at the same time, one thread each."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-ablations")
    """Where the runs are kept; runs/study-ablations unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw the differences into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import ablations
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        config = ablations.AblationsConfig(
            work=self.work,
            recipe=self.recipe,
            factors=self.factors,
            steps=self.steps,
            minutes=self.minutes,
            seeds=self.seeds,
            episodes=self.episodes,
            jobs=self.jobs,
        )
        carry_out(output, lambda console: ablations.run(config, console), ablations.show, ablations.draw)


@dataclass(frozen=True)
class DemonstrationCount:
    """Success against the number of demonstrations.

    Try:
        python -m research demonstrations --task metaworld-pick-place --counts 2 5 10 20 --json demonstrations.json

    Records, trains and evaluates for each number. Killed at any moment, the same command goes on where it was.
    """

    task: str = "metaworld-pick-place"
    """A task with a scripted expert."""
    counts: Annotated[tuple[int, ...], option("N ...")] = (2, 5, 10, 20)
    """Numbers of demonstrations, growing."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism",)
    """Methods to train."""
    steps: int = 1500
    """Training steps, whatever the number of demonstrations."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 20
    """Episodes of each evaluation."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-demonstrations")
    """Where data and runs are kept; runs/study-demonstrations unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw the curve into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import demonstrations
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        config = demonstrations.DemonstrationsConfig(
            work=self.work,
            task=self.task,
            counts=self.counts,
            methods=self.methods,
            steps=self.steps,
            seeds=self.seeds,
            episodes=self.episodes,
        )
        carry_out(output, lambda console: demonstrations.run(config, console), demonstrations.show, demonstrations.draw)


@dataclass(frozen=True)
class SelectionRules:
    """Which candidate to execute: success, jerk and mode switches of every rule, with the same policies.

    Try:
        python -m research selection runs/pusht-human --episodes 100 --json selection.json --plot selection.png
        python -m research selection compare/pusht/cells/pusht-human/prism/seed-* --json selection.json

    Seeds from 200,000, so that the test seeds are not used to choose. Killed, the same command goes on where it was.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, or checkpoints in them; one a training seed, for example."""
    rules: Annotated[tuple[str, ...], option("RULE ...")] = (
        "proxy_score", "last_action", "overlap", "commit", "first", "medoid",
    )  # fmt: skip
    """Rules of prism.selection; all unless told."""
    exec_horizons: Annotated[tuple[int, ...], option("N ...")] = (4, 8)
    """Steps executed of each plan."""
    episodes: int = 50
    """Episodes of each."""
    first_seed: int = 200_000
    """Seed of the first of them."""
    workers: int = 1
    """Processes that roll out in parallel."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-selection")
    """Where finished parts are kept; runs/study-selection unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw success against switches into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import selection_rules
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        config = selection_rules.SelectionStudyConfig(
            runs=self.runs,
            work=self.work,
            rules=self.rules,  # type: ignore[arg-type]  # checked there
            exec_horizons=self.exec_horizons,
            episodes=self.episodes,
            first_seed=self.first_seed,
            workers=self.workers,
        )
        carry_out(
            output, lambda console: selection_rules.run(config, console), selection_rules.show, selection_rules.draw
        )


@dataclass(frozen=True)
class Failures:
    """Why failed episodes failed, sorted into the paper's classes by measured signals.

    Try:
        python -m research failures runs/pusht-human --episodes 100 --json failures.json --plot failures.png
        python -m research failures compare/pusht/cells/pusht-human/prism/seed-* --rule proxy_score --json failures.json

    Killed at any moment, the same command goes on where it was.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders, or checkpoints in them; one a training seed, for example."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to roll out in; the one the policy was trained for unless told."""
    episodes: int = 100
    """How many of each policy."""
    first_seed: int = 100_000
    """Seed of the first of them."""
    rule: Annotated[str | None, option("RULE")] = None
    """Selection rule (proxy_score is the paper's); the run's own unless told."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-failures")
    """Where finished parts are kept; runs/study-failures unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    plot: OutputFile = None
    """Draw the classes into this one (.png, .svg, .pdf)."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import failures
        from research.report import carry_out

        output = Output(self.json, self.plot, self.overwrite)
        config = failures.FailuresConfig(self.runs, self.work, self.task, self.episodes, self.first_seed, self.rule)
        carry_out(output, lambda console: failures.run(config, console), failures.show, failures.draw)


@dataclass(frozen=True)
class ModalityStudy:
    """What a missing sensor costs, beside the paper's figures; measured by python -m research modality-dropout.

    Try:
        python -m research modality-claims --given modality-dropout.json         a file of modality-dropout --json
        python -m research modality-claims --json modality.json                trains and evaluates: half an hour
    """

    given: Annotated[Path | None, option("FILE")] = None
    """Judge this file of python -m research modality-dropout; without it, run that bench now."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import modality
        from research.report import carry_out

        output = Output(self.json, None, self.overwrite)
        carry_out(output, lambda console: modality.run(modality.ModalityConfig(self.given), console), modality.show)


@dataclass(frozen=True)
class Trends:
    """Do the baselines follow their own papers (more evaluations, more demonstrations are better)? On Push-T.

    Try:
        python -m research trends --json trends.json
        python -m research trends --recipe pusht-human --minutes 5 --episodes 50 --json trends.json
        python -m research trends --recipe pusht-human --minutes 2.5 --methods act mse --shares 0.01 0.05 0.95 --seeds 0
        python -m research trends --methods flow_matching rectified_flow --seeds 0 --steps 500
        python -m research trends --runs compare/pusht/cells/pusht-human/flow_matching/seed-* --episodes 50

    Trains each method on two shares of the demonstrations, rolls the same weights out with one evaluation of the
    network a plan and with five; few-step methods beside the one they were made from, if that is named too. Killed at
    any moment, the same command goes on where it was.
    """

    recipe: str = "pusht"
    """pusht (shipped demonstrations) or pusht-human (prism data download pusht)."""
    methods: Annotated[tuple[str, ...], option("NAME ...")] = (
        "flow_matching", "diffusion", "imle", "act", "mse",
    )  # fmt: skip
    """Methods of prism train --method; a distilled one's teacher is trained before it."""
    runs: Annotated[tuple[Path, ...], option("RUN ...")] = ()
    """Runs that are there already, one a method and seed, in place of training: more evaluations against fewer."""
    shares: Annotated[tuple[float, ...], option("SHARE ...")] = (0.05, 0.95)
    """Parts of the demonstrations to train on, growing."""
    evaluations: Annotated[tuple[int, ...], option("N ...")] = (1, 5)
    """Evaluations of the network a plan, growing, of diffusion and flow matching; the same weights for all of them."""
    steps: int = 1500
    """Training steps of each run."""
    minutes: Annotated[float | None, option("M")] = None
    """Minutes of CPU time of each run, in place of the steps."""
    episodes: int = 20
    """Rollouts of each."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of every training: --set train.batch_size=32."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-trends")
    """Where the runs and finished parts are kept; runs/study-trends unless told."""
    json: OutputFile = None
    """Write the figures and verdicts to this file."""
    overwrite: bool = False
    """Replace it if it exists."""

    def run(self) -> None:
        from prism.bench.output import Output
        from research import trends
        from research.report import carry_out

        output = Output(self.json, None, self.overwrite)
        config = trends.TrendsConfig(
            work=self.work,
            recipe=self.recipe,
            methods=() if self.runs else self.methods,
            runs=self.runs,
            shares=self.shares,
            evaluations=self.evaluations,
            steps=self.steps,
            minutes=self.minutes,
            episodes=self.episodes,
            seeds=self.seeds,
            settings=self.set,
        )
        carry_out(output, lambda console: trends.run(config, console), trends.show)
