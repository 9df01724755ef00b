"""prism export"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Export:
    """Write a trained policy as ONNX graphs: one a sensor, the fusion, and the plan with any number of candidates.

    Try:
        prism export runs/pusht --onnx exported

    exported/metadata.json says what each graph takes and gives. Needs: pip install 'prism-policy[onnx]'.
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    onnx: Annotated[Path, arg(metavar="DIR")]
    """The folder to write; it appears whole or not at all."""
    overwrite: bool = False
    """Replace it if it is an older export."""

    def run(self) -> None:
        from rich.console import Console

        from prism.runs.run import Run
        from prism.serve.export_onnx import export_onnx

        console = Console(stderr=True)
        policy = Run(self.run_folder).policy()
        with console.status("export") as status:
            export_onnx(policy, self.onnx, self.overwrite, lambda graph: status.update(f"export {graph}"))
        print(f"exported: {self.onnx}")
