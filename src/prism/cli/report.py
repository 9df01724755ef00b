"""prism report"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.cli.style import OutputFile


@dataclass(frozen=True)
class Report:
    """Write a report of a run: one self-contained report.html.

    Try:
        prism report runs/pusht-human
        prism report runs/my-task/robot                     what a robot did (prism run, prism record)
        prism report runs/pusht-human --rerun pusht.rrd     the recorded episodes for the rerun viewer, too
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run that has been evaluated (prism eval RUN), or a demo; of a run trained on a dataset alone, the page shows
    predicted beside recorded actions of held-out episodes. Or the folder of a robot's recorded episodes."""
    rerun: OutputFile = None
    """Write the episodes for the rerun viewer as well: pictures, candidates, executed actions, in one .rrd file
    (pip install 'prism-policy[rerun]')."""
    overwrite: bool = False
    """Replace that file if it exists."""

    def run(self) -> None:
        from prism.experiments.run_folder import write_run_report

        print(write_run_report(self.run_folder, self.rerun, self.overwrite))
        if self.rerun is not None:
            print(self.rerun)
