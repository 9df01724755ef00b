"""prism report"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Report:
    """Write the page that shows a run: one self-contained report.html that opens from disk.

    Try:
        prism report runs/pusht-human
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run that has been evaluated (prism eval RUN), or a demo; of a run trained on a dataset alone, the page shows
    predicted beside recorded actions of held-out episodes."""

    def run(self) -> None:
        from prism.runs.run import write_run_report

        print(write_run_report(self.run_folder))
