"""prism train"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from prism.cli.style import CalvinOption, DatasetOptions, option
from prism.errors import PrismError, check_numbers

if TYPE_CHECKING:
    from prism.experiments.recipes import Experiment
    from prism.experiments.run_folder import Run as TrainedRun
    from prism.training.trainer import TrainResult

Preset = Literal["tiny", "base", "paper", "fast", "paper-literal"]


@dataclass(frozen=True)
class Train(DatasetOptions, CalvinOption):
    """Train a policy on a recipe, a task, your own dataset, or several of these.

    Try:
        prism train pusht-human --minutes 15        human demonstrations of Push-T
        prism train pusht                           the demonstrations that ship with prism
        prism train metaworld-drawer-open           records demonstrations first, then trains
        prism train pusht --data my.zarr.zip --out runs/mine
        prism train my.zarr.zip                     your own dataset, all its sensors, no simulator
        prism train lift.hdf5 --demonstrations 50 --sensor '*_image.crop=76,76' '*_image.random_shift=4'
        prism train data/insert data/stack --weights 1 2 --out runs/both      one policy, from both
        prism train tabletop-stack-blue tabletop-ball --episodes 25     two tasks, each with its instruction
        prism train tabletop-insert-left --without tactile
        prism train pusht-human --steps 5000 --set policy.objective.rule=paper --out runs/literal
        prism train pusht-human --method diffusion  another method on the same encoder and data
        prism train pusht-human --eval-every 3      evaluates every 3 minutes of training
        prism train data/insert runs/insert/robot-corrections --init runs/insert --out runs/better
        prism train pusht-human --resume            continues runs/pusht-human
        torchrun --nproc-per-node 8 -m prism.cli train pusht-human    the same training on 8 GPUs

    A run is a folder: checkpoints, logs for TensorBoard, and the whole configuration. Afterwards:
        prism eval runs/pusht-human
    """

    recipe: Annotated[tuple[str, ...], Positional, arg(metavar="RECIPE ...", help_behavior_hint="")]
    """A recipe (pusht-human, pusht), the name of a task (metaworld-drawer-open), or the path of a dataset; several: one
    policy for all of them."""
    weights: Annotated[tuple[float, ...] | None, option("W")] = None
    """For several datasets: how often a step of each is drawn, relative to the others. Default: equal."""
    text: Annotated[tuple[str, ...], option("SENTENCE")] = ()
    """For several datasets: the instruction of each. Default: their own text, or the words of their task."""
    sensors: Annotated[tuple[str, ...], option("SENSOR")] = ()
    """Train on these sensors only. Default: all except those of --without."""
    data: Annotated[Path | None, option("PATH")] = None
    """Train on this dataset (a folder or a .zarr.zip) instead of the recipe's."""
    fraction: Annotated[float | None, option("F")] = None
    """Train on this fraction of the training data, drawn by the seed: 0.1 is a tenth of its steps."""
    demonstrations: Annotated[int | None, option("N")] = None
    """Train on exactly N of the demonstrations (of each dataset), drawn by the seed; subsets are nested for a fixed
    seed."""
    minutes: Annotated[float | None, option("M")] = None
    """Stop after this many minutes of training; the learning rate follows this budget."""
    steps: Annotated[int | None, option("N")] = None
    """Stop after this many steps; the learning rate follows this budget."""
    clock: Literal["wall", "cpu"] | None = None
    """What the minutes count: wall-clock time, or the CPU time of the process (on a busy machine the same amount of
    computing). Default: wall, or the clock of the resumed run."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Folder of the run. Default: runs/RECIPE, or runs/RECIPE-METHOD."""
    method: Annotated[str | None, option("NAME")] = None
    """prism, or a baseline: diffusion, flow_matching, imle, act, mse, and the few-step methods
    rectified_flow, consistency (both with --teacher), consistency_fm, adaflow."""
    teacher: Annotated[Path | None, option("RUN")] = None
    """The run that a distilled method learns from: flow_matching for rectified_flow, diffusion for consistency."""
    init: Annotated[Path | None, option("RUN")] = None
    """Start from the network of this run, to learn from more data such as corrections (prism run --teleop). Their
    actions must be of the run's kind."""
    action_kind: Annotated[str | None, option("KIND")] = None
    """Kind of the actions: absolute, delta or velocity. Default: from the data; required if they do not show it."""
    preset: Annotated[Preset | None, option("NAME")] = None
    """Network, horizons and objective, in place of the recipe's (anchor, observation noise, encoder.text.things stay):
    tiny learns in minutes on CPU, base, paper (the publication's), fast (paper, about half of the time to a plan).
    paper-literal: the publication to the letter, with its optimiser, targets and ProxyScore. Default: the recipe's."""
    episodes: Annotated[str | None, option("N|0-46,48-")] = None
    """How many demonstrations to record, if the task has an expert; for a dataset, which episodes to use."""
    skip_damaged: bool = False
    """Leave out episodes of the dataset that hold NaN, or whose files are missing or cannot be decoded."""
    robust: bool = False
    """Train for sensors that fail: absent, frozen, covered, noisy (docs/reference/sensors.md)."""
    seed: Annotated[int | None, option("N")] = None
    """Same seed, same machine, same numbers. Default: 0."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the recipe: --set policy.objective.scope=batch train.learning_rate=5e-4; the run's
    experiment.json lists them all."""
    device: Annotated[str, option("NAME")] = "auto"
    """Device: cpu, cuda, mps, or auto (cuda if available)."""
    eval_every: Annotated[float | None, option("M|N")] = None
    """Roll out each time M minutes (of a budget in minutes) or N steps are used; curve.json, the log and the report
    have the curve. The time for it does not count."""
    eval_episodes: int = 20
    """Episodes of each such evaluation, on seeds that are not test seeds."""
    resume: bool = False
    """Continue from the newest checkpoint of the run."""
    auto_resume: bool = False
    """Continue the run if it exists, else start it: for jobs that are restarted (torchrun --max-restarts)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "--", {"(0, inf)": "minutes", "[1, inf)": "steps eval_episodes", "[0, inf)": "seed"})
        if not self.recipe:
            raise PrismError("give a recipe, the name of a task or the path of a dataset: prism train pusht-human")
        if self.resume and self.auto_resume:
            raise PrismError("give --resume or --auto-resume, not both: the second also starts a run that is not there")
        if self.minutes is not None and self.steps is not None:
            raise PrismError("give --minutes or --steps, not both: each is the whole training budget")
        if self.episodes == "0":
            raise PrismError("--episodes 0 is out of range: use 1 or more, or which: 0-46,48-")

    def run(self) -> None:
        from prism.io.processes import sleep_at_barriers

        sleep_at_barriers()
        from prism import ranks

        with ranks.session():
            try:
                self._train()
            except ranks.ReportedError:
                raise SystemExit(2) from None  # rank 0 says what is wrong

    def _train(self) -> None:
        from rich.console import Console

        from prism import ranks
        from prism.experiments.workflow import train_recipe

        self.find_calvin()
        given: Any = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "calvin"}
        name, out, resume = given.pop("recipe"), given.pop("out"), given.pop("resume")
        go_on: bool | Literal["auto"] = "auto" if given.pop("auto_resume") else resume
        run, experiment, result = train_recipe(name, out, go_on, Console(stderr=True), **given)
        if ranks.is_leader():
            self._say(run, experiment, result)
        if result.stopped_by:
            raise SystemExit(130)  # saved, but not done: `prism train ... && prism eval ...` ends here

    def _say(self, run: Path, experiment: Experiment, result: TrainResult) -> None:
        from prism.experiments.run_folder import Run

        measured = "" if result.val_loss is None else f", validation loss {result.val_loss:.4f}"
        print(f"{run}: {result.step} steps in {result.seconds / 60:.1f} minutes{measured}")
        used = None if result.stopped_by else Run(run).sensors_used()
        if used is not None:
            print("\n".join(used.lines()))
        elif not experiment.tasks and not result.stopped_by:
            print("\n".join(self._unmeasured(Run(run))))
        again = f"prism train {' '.join(self.recipe)}" + (f" --method {self.method}" if self.method is not None else "")
        again += (f" --out {self.out}" if self.out is not None else "") + " --resume"
        there = f"prism eval {run}" if experiment.tasks else f"prism report {run} (or prism run, on a robot)"
        print(f"next: {again if result.stopped_by else there}")

    @staticmethod
    def _unmeasured(run: TrainedRun) -> list[str]:
        from prism.evaluation.sensor_use import NEVER_ABSENT
        from prism.inference.about import needed_sensors

        policy = run.policy()
        needs = needed_sensors(policy)
        others = [spec.name for spec in policy.spec.sensors if spec.name not in needs]
        lines = ["sensors: not measured, which needs held-out episodes (--set train.val_fraction=0.2)"]
        lines += [f"requires {', '.join(needs)}: {NEVER_ABSENT}"] * bool(needs)
        return lines + [f"sometimes absent in training, effect not measured: {', '.join(others)}"] * bool(others)
