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
    """See PRISM work: record demonstrations, train, evaluate, report. About three minutes on two idle cores.

    A button is pressed from the state of the scene, a drawer is opened from two cameras. Without OSMesa or the extra
    `vision` both tasks are learned from their state, and the command says what to install.

    Try:
        prism demo                    writes runs/demo/report.html and runs/demo/metrics.json
        prism demo --out runs/again   keeps the first one

    What is already there is used: a finished stage is not repeated, an interrupted training continues.
    """

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/demo")
    """Output folder."""
    minutes: Annotated[float | None, option("M")] = None
    """CPU minutes of training for each task. Default: the demo's own."""
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
        console = Console(stderr=True)
        config = default_config(lambda line: console.print(line, highlight=False, soft_wrap=True), self.minutes)
        results = run_demo(self.out, config, console, self.fresh)
        report = write_run_report(self.out)
        print_summary(results)
        print(f"{(time.monotonic() - started) / 60:.1f} minutes; numbers in {self.out / 'metrics.json'}")
        print(f"open {report.resolve()} in a browser")
