"""prism study trends"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prism.cli.style import OutputFile, option


@dataclass(frozen=True)
class Trends:
    """Do the baselines follow their own papers (more evaluations, more demonstrations are better)? On Push-T.

    Try:
        prism study trends --json trends.json
        prism study trends --recipe pusht-human --minutes 5 --episodes 50 --json trends.json      three hours of a core
        prism study trends --recipe pusht-human --minutes 2.5 --methods act mse --shares 0.01 0.05 0.95 --seeds 0
        prism study trends --methods flow_matching rectified_flow --seeds 0 --steps 500
        prism study trends --runs compare/pusht/cells/pusht-human/flow_matching/seed-* --episodes 50

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
        from prism.studies import trends
        from prism.studies.report import carry_out

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
