"""prism eval"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.commands.style import option
from prism.commands.summary import print_summary
from prism.errors import PrismError


@dataclass(frozen=True)
class Eval:
    """Roll a trained policy out on seeds it has never seen, and measure it.

    Try:
        prism eval runs/pusht-human --episodes 50 --json result.json
        prism eval runs/pusht-human --report        writes runs/pusht-human/report.html as well

    Measures success, score, jerk, mode switches and replanning latency, with 95 % confidence
    intervals; docs/metrics.md defines each.
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to roll out in; the one the policy was trained for unless told."""
    episodes: int = 50
    """How many episodes, each with a seed of its own."""
    first_seed: int = 100_000
    """Seed of the first episode. Tune on other seeds than the test seeds, which start at 100,000."""
    json: Annotated[Path | None, option("FILE")] = None
    """Write the metrics to this file too."""
    overwrite: bool = False
    """Replace that file if it exists."""
    report: bool = False
    """Write report.html into the run: curves, candidate fans, a table of episodes, videos."""
    candidates: Annotated[int | None, option("K")] = None
    """Action sequences to draw at each replanning; the recipe's own unless told."""
    selection: Annotated[str | None, option("RULE")] = None
    """Which of them to execute: commit, overlap, last_action, proxy_score, medoid, first; as the recipe unless told."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the controller: --set exec_horizon=4 selection.centrality=0.5; the run's experiment.json
    lists them all."""
    workers: Annotated[int | None, option("N")] = None
    """Processes that roll out in parallel; one a core unless told."""

    def __post_init__(self) -> None:
        for name, value in (("episodes", self.episodes), ("candidates", self.candidates), ("workers", self.workers)):
            if value is not None and value < 1:
                raise PrismError(f"--{name} {value} is out of range: use 1 or more")

    def run(self) -> None:
        from prism.evaluation.results import flat_json, write_json
        from prism.evaluation.rollout import RecordConfig
        from prism.workflow import EvalOptions, evaluate_run, run_folder, write_run_report

        if self.json is not None and self.json.exists() and not self.overwrite:  # now, not after minutes of rollouts
            raise PrismError(f"{self.json} exists already: remove it, choose another name, or pass --overwrite")
        options = EvalOptions(
            task=self.task,
            episodes=self.episodes,
            first_seed=self.first_seed,
            candidates=self.candidates,
            selection=self.selection,
            settings=self.set,
            workers=self.workers,
            record=RecordConfig() if self.report else None,
        )
        result = evaluate_run(self.run_folder, options)
        if self.json is not None:
            write_json(self.json, flat_json(result), self.overwrite)
        print_summary([result])
        if self.report:
            print(f"report: {write_run_report(run_folder(self.run_folder))}")
