"""prism eval"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.cli.style import CalvinOption, JsonOutput, option
from prism.cli.summary import print_summary
from prism.errors import PrismError, check_numbers


@dataclass(frozen=True)
class Eval(JsonOutput, CalvinOption):
    """Evaluate a trained policy on unseen seeds.

    Try:
        prism eval runs/pusht-human --episodes 50 --json result.json
        prism eval runs/pusht-human --report        writes runs/pusht-human/report.html as well
        prism eval runs/cups --task tabletop-ball --text "hang the green cup on the hook"
        prism eval runs/insert --without tactile    how much it needs that sensor

    Measures success, score, jerk, mode switches and replanning latency, with 95 % confidence
    intervals; docs/reference/metrics.md defines each.
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to evaluate on. Default: all tasks the policy was trained for."""
    episodes: int = 50
    """Number of episodes per task, each with its own seed."""
    text: Annotated[str | None, option("SENTENCE")] = None
    """Instruction in place of the task's. The result is not stored in the run."""
    without: Annotated[tuple[str, ...], option("SENSOR")] = ()
    """Sensors to remove for the whole evaluation. The result is not stored in the run."""
    first_seed: int = 100_000  # sims.base.TEST_SEED, which would import numpy; a test compares them
    """Seed of the first episode. Test seeds start at 100,000; tune on other seeds."""
    report: bool = False
    """Write report.html into the run: curves, candidate fans, a table of episodes, videos."""
    candidates: Annotated[int | None, option("K")] = None
    """Candidates to draw at each replan. Default: the recipe's."""
    selection: Annotated[str | None, option("RULE")] = None
    """Which of them to execute: commit, overlap, last_action, proxy_score, medoid, first. Default: the recipe's."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the controller: --set exec_horizon=4 selection.centrality=0.5; the run's experiment.json
    lists them all."""
    workers: Annotated[int | None, option("N")] = None
    """Parallel worker processes. Default: one per core."""
    backend: Annotated[str, option("NAME")] = "eager"
    """Back end: eager, compile, onnx, onnx-int8 (docs/explanation/realtime.md)."""
    device: Annotated[str, option("NAME")] = "cpu"
    """Device: cpu, cuda, mps, or auto (cuda if available). Every worker has a copy of the policy there."""
    ray: bool = False
    """Run on a Ray cluster (RAY_ADDRESS, or one on this machine); same results. pip install 'prism-policy[ray]'"""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "episodes candidates workers"})

    def run(self) -> None:
        from prism.evaluation.play import IncompleteError, RecordConfig
        from prism.evaluation.results import evaluation_json, refuse_existing, write_json
        from prism.experiments.run_folder import EvalOptions, Run, write_run_report
        from prism.inference.backends import check_backend

        check_backend(self.backend)
        refuse_existing(self.json, overwrite=self.overwrite)
        others = {f"--backend {self.backend}": self.backend != "eager", "--text": self.text is not None}
        if self.report and (other := next((o for o, on in {**others, "--without": self.without}.items() if on), "")):
            raise PrismError(
                f"--report shows the recording in the run, which {other} does not change: "
                "drop one of the two, or write the numbers with --json"
            )
        self.find_calvin()
        options = EvalOptions(
            task=self.task,
            episodes=self.episodes,
            first_seed=self.first_seed,
            candidates=self.candidates,
            selection=self.selection,
            set=self.set,
            workers=self.workers,
            ray=self.ray,
            backend=self.backend,
            device=self.device,
            text=self.text,
            without=self.without,
            record=RecordConfig() if self.report else None,
        )
        run = Run(self.run_folder)
        try:
            results = run.evaluate_all(options)
        except IncompleteError as error:
            print_summary([error.result])  # what there is; only eager's is in the run too
            raise
        if self.json is not None:
            write_json(self.json, evaluation_json(results, run.name), self.overwrite)
        print_summary(results)
        if self.report:
            print(f"report: {write_run_report(run.folder)}")
