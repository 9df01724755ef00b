"""prism demo"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from prism.cli.style import option
from prism.cli.summary import print_summary
from prism.errors import check_numbers


@dataclass(frozen=True)
class Demo:
    """See PRISM work: record demonstrations, train, evaluate, report. At most 12 minutes on two cores.

    Try:
        prism demo                    writes runs/demo/report.html and runs/demo/metrics.json
        prism demo --out runs/again   keeps the first one

    What is already there is used: a finished stage is not repeated, an interrupted training continues.
    """

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/demo")
    """Output folder."""
    minutes: Annotated[float | None, option("M")] = None
    """Minutes of training for each task. Default: the demo's own."""
    fresh: bool = False
    """Start over. Existing results are moved aside, not deleted."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"(0, inf)": "minutes"})

    def run(self) -> None:
        import time

        from rich.console import Console

        from prism.experiments.demo_tasks import default_config, run_demo
        from prism.experiments.run_folder import write_run_report

        started = time.monotonic()
        results = run_demo(self.out, default_config(self.minutes), Console(stderr=True), self.fresh)
        report = write_run_report(self.out)
        print_summary(results)
        print(f"{(time.monotonic() - started) / 60:.1f} minutes; numbers in {self.out / 'metrics.json'}")
        print(f"open {report.resolve()} in a browser")
