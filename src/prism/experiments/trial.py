"""What a trial is: one training and its evaluation, in a folder of its own that is also a run of `prism train`.

experiment.json    everything that determines the training
trial.json         its spec: who it is, and how it is evaluated (cell.json in folders from before 2026-11-19)
result.json        there when the trial is done, written whole or not at all
failed.json        why it is not
output.txt         what its process printed
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prism.errors import PrismError
from prism.evaluation.play import TEST_SEED
from prism.experiments.recipes import Experiment
from prism.io import files
from prism.io.jsonconfig import from_json, to_json

FORMAT_VERSION = 1
OLD_TRIAL = "cell.json"
EVALUATE = "evaluate: "  # begins a trial's lines while it plays
TRIAL, RESULT, FAILED, LOG, DATA = "trial.json", "result.json", "failed.json", "output.txt", "data.json"
REMEDY = "remove it, and run the same command again"  # where a file of a trial is damaged
EXIT_FAILED, EXIT_STOPPED = 2, 130

State = Literal["done", "failed", "open"]
TrialResult = Mapping[str, Any]  # a result.json


def state_of(folder: Path) -> tuple[State, str]:
    """State on disk: done, failed (with the reason), or still to do. Writes nothing."""
    for name, state in ((RESULT, "done"), (FAILED, "failed")):
        if (folder / name).is_file():
            try:
                reason = str(files.read_json(folder / name, REMEDY).get("reason", "no reason given"))
            except PrismError as error:
                return "failed", str(error)
            return ("done", "") if state == "done" else ("failed", reason)
    return "open", "not finished yet" if (folder / LOG).exists() else "not started yet"


def spec_file(folder: Path) -> Path:
    """File of the spec of a trial."""
    old = folder / OLD_TRIAL
    return old if old.is_file() and not (folder / TRIAL).is_file() else folder / TRIAL


def write_failed(folder: Path, reason: str) -> None:
    """For whoever looks at the folder later; a disk that is full does not take it, and the caller has heard it."""
    with suppress(OSError):
        files.replace_file(folder / FAILED, files.encode_json({"reason": reason}))


@dataclass(frozen=True)
class EvaluationPlan:
    """Which episodes a trial is judged by; nothing is chosen by them, the last weights are what counts."""

    episodes: int = 50
    first_seed: int = TEST_SEED
    curve: tuple[float, ...] = (0.1, 0.25, 0.5)  # fractions of the budget at which to look on the way
    curve_episodes: int = 20  # the first of the episodes; not more than there are
    videos: int = 0  # episodes that are played again with the camera on

    @property
    def looked_at(self) -> int:
        """Episodes of a look on the way."""
        return min(self.curve_episodes, self.episodes)

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.curve_episodes < 1:
            raise PrismError(f"episodes {self.episodes} and curve_episodes {self.curve_episodes} must be at least 1")
        if any(not 0 < fraction < 1 for fraction in self.curve) or list(self.curve) != sorted(set(self.curve)):
            raise PrismError(f"curve {self.curve}: give growing fractions between 0 and 1, for example 0.1 0.25 0.5")


@dataclass(frozen=True)
class TrialId:
    recipe: str
    contestant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.recipe} {self.contestant} seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.contestant}/seed-{self.seed}"


@dataclass(frozen=True)
class TrialSpec:
    """trial.json; with experiment.json beside it, all that its process needs."""

    id: TrialId
    method: str
    evaluation: EvaluationPlan

    protocol: str = ""  # the written protocol that the comparison keeps; "": none
    chosen_on: tuple[str, ...] = ()  # episodes that settings were chosen on: "200000-200029"

    def save(self, folder: Path) -> None:
        files.replace_file(folder / TRIAL, files.encode_json({"format_version": FORMAT_VERSION, **to_json(self)}))

    @staticmethod
    def load(folder: Path) -> TrialSpec:
        file = spec_file(folder)
        data = files.read_json(file)
        if (version := data.pop("format_version", None)) != FORMAT_VERSION:
            raise PrismError(f"{file} has format_version {version}, this prism reads {FORMAT_VERSION}")
        return from_json(TrialSpec, data, str(file))


def definition(experiment: Experiment) -> dict[str, Any]:
    """What is trained, wherever it lies: the teacher by the name of its trial, and no path of the demonstrations, which
    are known by their content (Trials.check_data)."""
    teacher = None if experiment.teacher is None else "/".join(Path(experiment.teacher).parts[-3:])
    return to_json(replace(experiment, teacher=teacher, demonstrations=replace(experiment.demonstrations, path="")))
