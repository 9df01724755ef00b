"""prism export"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.errors import PrismError


@dataclass(frozen=True)
class Export:
    """Export a trained policy: as ONNX graphs, for LeRobot, or to the Hugging Face hub.

    Try:
        prism export runs/pusht --onnx exported
        prism export runs/pusht --lerobot pusht-lerobot       lerobot-eval --policy.path=pusht-lerobot ...
        prism export runs/pusht --hub USER/pusht              prism serve hf://USER/pusht

    --onnx: one graph a sensor, the fusion, and the plan with any number of candidates; exported/metadata.json says
    what each takes and gives, and examples/onnx_robot.py acts with them without prism (pip install
    'prism-policy[onnx]'). --lerobot: the checkpoint with a model card, for lerobot_policy_prism and for every command
    of prism. --hub: the same, uploaded (pip install 'prism-policy[hub]', then hf auth login).
    """

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, one checkpoint in it, the folder of a training with lerobot-train, or hf://USER/NAME."""
    onnx: Annotated[Path | None, option("DIR")] = None
    """Folder for the graphs; written completely or not at all."""
    lerobot: Annotated[Path | None, option("DIR")] = None
    """Folder for LeRobot's checkpoint; written completely or not at all."""
    hub: Annotated[str | None, option("USER/NAME")] = None
    """Model on the Hugging Face hub; created if missing."""
    private: bool = False
    """--hub: create the model as private."""
    license: str = "mit"
    """--lerobot, --hub: the policy's licence, for its model card."""
    overwrite: bool = False
    """Replace the folder if it is an older export."""

    def __post_init__(self) -> None:
        if sum(target is not None for target in (self.onnx, self.lerobot, self.hub)) != 1:
            raise PrismError("name the target with one of --onnx DIR, --lerobot DIR and --hub USER/NAME")

    def run(self) -> None:
        import tempfile

        from rich.console import Console

        from prism.experiments.run_folder import Run
        from prism.experiments.share import write_lerobot
        from prism.io import hub

        run, console = Run(self.run_folder), Console(stderr=True)
        if self.lerobot is not None:
            write_lerobot(run, self.lerobot, self.overwrite, self.license)
            print(f"exported: {self.lerobot}")
        elif self.hub is not None:
            with tempfile.TemporaryDirectory() as scratch, console.status(f"uploading to {self.hub}"):
                folder = Path(scratch) / "model"
                write_lerobot(run, folder, license_=self.license, name=self.hub)
                print(f"pushed: {hub.push(folder, self.hub, self.private)}")
        elif self.onnx is not None:
            from prism.inference.export_onnx import export_onnx

            policy = run.policy()
            with console.status("export") as status:
                tell = lambda graph: status.update(f"export {graph}")  # noqa: E731
                export_onnx(policy, self.onnx, self.overwrite, tell, run.settings.exec_horizon)
            print(f"exported: {self.onnx}")
