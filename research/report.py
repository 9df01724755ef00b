"""What every module here shares: where its figures go, what a study hands back, and how one is carried out.

A module of `python -m research` has
    a docstring       the help of the command: its first line is the list's, the rest says what the keys of the JSON are
    Config(Written)   its options, declared once; `Drawn` if there is a picture
    run(config, console) -> dict or Study
    show(result, console), and draw(result) -> Figure if there is a picture
    check(result)     optional: raises what the figures lack, after they are written
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from prism.cli.style import JsonOutput, OutputFile
from prism.errors import PrismError
from prism.evaluation.results import refuse_existing, run_info, write_atomic, write_json
from prism.experiments.comparison import TRAININGS
from prism.experiments.recipes import Experiment
from prism.experiments.trial import REMEDY, RESULT, TRIAL, spec_file
from prism.experiments.trials import Trials, refuse_other, several_versions
from prism.experiments.workflow import train_experiment
from prism.io import files
from prism.io.jsonconfig import to_json
from prism.objective import ObjectiveConfig
from prism.training.log import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
Verdict = Literal["confirmed", "not confirmed", "cannot be tested here"]
SEEDS = TRAININGS  # before anything is said of a method: two trainings of one recipe differ, too


_ABSOLUTE = re.compile(r"""(?<![^\s=,"'\[(])/[^\s,"'\])]+""")  # a path from the root, in the words of a command


@dataclass(frozen=True, kw_only=True)
class Written(JsonOutput):
    """Options of every command."""

    def settings(self, *left_out: str) -> dict[str, Any]:
        """Every option that determines the figures."""
        without = {"json", "plot", "overwrite", "work", *left_out}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in without}


@dataclass(frozen=True, kw_only=True)
class Drawn(Written):
    plot: OutputFile = None
    """Draw them into this one (.png, .svg, .pdf)."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with a number in it, and what became of it here."""

    where: str  # section, table or lemma
    paper: str  # what it says
    ours: str  # what we measured
    verdict: Verdict
    note: str = ""  # why not, or under which conditions


@dataclass(frozen=True)
class Study:
    """The outcome of one study. `figures` are JSON values under documented keys."""

    name: str
    figures: dict[str, Any]
    claims: tuple[Claim, ...]
    settings: dict[str, Any]
    seeds: tuple[int, ...] = (0,)
    missing: tuple[str, ...] = ()  # trials that failed, each with its reason: never averaged over silently
    commits: Sequence[str] = ()  # of the code that made the trials; several: the terminal says so

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.name,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            **self.figures,
            "missing": list(self.missing),
            "settings": self.settings,
            "seeds": list(self.seeds),
            **({"commits": list(self.commits)} if self.commits else {}),
            **run_info(self.seeds[0] if self.seeds else 0),
        }


class Figures(Protocol):
    """Anything that becomes a JSON object; a dict is one already."""

    def to_json(self) -> dict[str, Any]: ...


Outcome = TypeVar("Outcome", bound=dict[str, Any] | Figures)


@dataclass(frozen=True)
class Output:
    """Checked before the work, not after it."""

    json: Path | None = None
    plot: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in (".svg", ".png", ".pdf"):
            raise PrismError(f"{self.plot}: cannot draw a '{self.plot.suffix}' file; use .svg, .png or .pdf")

    def check(self) -> None:
        refuse_existing(self.json, self.plot, overwrite=self.overwrite)

    def carry_out(
        self,
        run: Callable[[Console], Outcome],
        show: Callable[[Outcome, Console], None],
        draw: Callable[[Outcome], Figure] | None = None,
    ) -> Outcome:
        """Measure with progress on stderr, show the figures, write them."""
        self.check()
        result = run(Console(stderr=True))
        show(result, Console())
        self.write(result, draw)
        return result

    def write(self, result: Outcome, draw: Callable[[Outcome], Figure] | None = None) -> None:
        if self.json is not None:
            write_json(self.json, portable(result if isinstance(result, dict) else result.to_json()), self.overwrite)
        if self.plot is not None:
            if draw is None:
                raise PrismError(f"{self.plot}: there is no picture of these figures; leave --plot out")
            picture = io.BytesIO()
            draw(result).savefig(picture, format=self.plot.suffix.lstrip("."))
            write_atomic(self.plot, picture.getvalue(), self.overwrite)


def carry_out(module: Any, config: Any) -> None:
    """What every command does: measure with progress on stderr, show the figures and the verdicts, write."""

    def show(result: Any, console: Console) -> None:
        module.show(result, console)
        if isinstance(result, Study):
            show_claims(result, console)

    output = Output(config.json, getattr(config, "plot", None), config.overwrite)
    result = output.carry_out(lambda console: module.run(config, console), show, getattr(module, "draw", None))
    getattr(module, "check", lambda _: None)(result)


def portable(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures whose `command` has no path of this machine: relative to the working folder, or the last name alone."""

    def short(found: re.Match[str]) -> str:
        path, here = Path(found[0]), Path.cwd()
        return str(path.relative_to(here)) if path.is_relative_to(here) else path.name

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(inner, name) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [walk(inner) for inner in value]
        return _ABSOLUTE.sub(short, value) if key == "command" and isinstance(value, str) else value

    found: dict[str, Any] = walk(figures)
    if str(found.get("command")).startswith("__main__.py "):
        found["command"] = found["command"].replace("__main__.py", "python -m research", 1)
    return found


def show_claims(study: Study, console: Console) -> None:
    table = Table(title=f"study {study.name}: the paper and what we measured", show_lines=True)
    for column in ("where", "the paper says", "we measured", "verdict"):
        table.add_column(column)
    for claim in study.claims:
        verdict = claim.verdict + (f": {claim.note}" if claim.note else "")
        table.add_row(claim.where, claim.paper, claim.ours, verdict)
    console.print(table)
    for line in study.missing:
        console.print(f"missing: {line}", highlight=False, markup=False)
    if several := several_versions(study.commits):
        console.print(several, highlight=False, soft_wrap=True)


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


class ComputedTrials(Trials):
    """Trials that are computed in this process.

    OUT/runs/NAME/ holds the trainings that several trials look at.
    """

    def __init__(self, out: Path, console: Console) -> None:
        super().__init__(out, console)
        self.out = out
        self.missing: list[str] = []  # a line for each trial that `get` could not give
        self._commits: set[str] = set()

    @property
    def commits(self) -> list[str]:
        """Of the code that computed the trials that `get` gave."""
        return sorted(self._commits)

    def training(self, name: str) -> Path:
        """The run folder of a training that trials share."""
        return self.out / "runs" / name

    def get(self, name: str, spec: dict[str, Any], compute: Callable[[], Result] | None) -> Result | None:
        """The result of a trial: stored, or computed in this process and stored now. None where it failed (a diverged
        run, a simulator that is not there): `missing` then says so, the others go on, and the next call tries again. A
        result that could not be stored (a full disk) is in `missing` too, but counts now. `compute` None: only what is
        stored."""
        folder = self.folder(name)
        if (folder / RESULT).exists():
            there = files.read_json(spec_file(folder), REMEDY)
            self._commits.add(str(there.pop("commit", "unknown")))
            refuse_other(folder, there, spec)
            self.say(f"{name}: done before")
            return files.read_json(folder / RESULT, REMEDY)
        if compute is None:
            self._miss(f"{name}: not there")
            return None
        self.say(f"{name}: ...")
        try:
            result = compute()
        except Exception as error:  # whatever it was, the other trials are worth having
            reason = str(error) if isinstance(error, PrismError) else f"{type(error).__name__}: {error}"
            self._miss(f"{name}: {reason}")
            return None
        commit = str(run_info(0).get("commit", "unknown"))
        self._commits.add(commit)
        try:
            write_json(folder / TRIAL, {**spec, "commit": commit}, overwrite=True)
            write_json(folder / RESULT, result, overwrite=True)
        except PrismError as error:
            self._miss(f"{name}: counted, but not kept for the next time: {error}")
        return result

    def _miss(self, line: str) -> None:
        self.missing.append(line)
        self.say(f"missing: {line}")


def confirmed(condition: bool) -> Verdict:
    return "confirmed" if condition else "not confirmed"


def decided(difference: Mapping[str, Any], bar: float = 0.0, trained: bool = True) -> tuple[Verdict, str]:
    """The verdict on "better", or better by more than `bar`, from a paired difference (rollout.metrics.Difference as
    JSON): its 95 % interval has to exclude the bar, p must not contradict an interval that excludes 0, and a verdict on
    trainings takes SEEDS of them; what to add to the note where that is not so. `trained` False: a verdict on how given
    policies are executed. It holds of those alone, and the note has to say how many they are."""
    low, high, p = (difference[key] for key in ("low", "high", "p"))
    if low <= bar <= high or (p >= 0.05 and not low <= 0 <= high):
        told = f"cannot be told from {low:+.0%} to {high:+.0%}, p = {p:.2g}"
        return "cannot be tested here", f"; {told if bar else 'no difference beyond chance at this budget'}"
    if trained and difference["seeds"] < SEEDS:
        return "cannot be tested here", f"; {few_seeds(difference['seeds'], low > bar)}"
    return confirmed(low > bar), ""


def few_seeds(seeds: int, held: bool) -> str:
    """What to say of a claim that held, or did not, in fewer trainings than it takes."""
    way = "so" if held else "against it"
    return f"{seeds} of the {SEEDS} training seeds that a claim takes: {way}, beyond chance on these alone"


def defaults() -> dict[str, Any]:
    """What trials of PRISM have and no setting names: --add refuses trials that were made with other defaults."""
    return {"objective": to_json(ObjectiveConfig())}


def train_run(experiment: Experiment, run: Path, console: Console) -> list[dict[str, Any]]:
    """Train, or go on with, a run; the lines of its log. Ctrl-C and SIGTERM save it and end the study."""
    result = train_experiment(experiment, run, "auto", console)
    if result.stopped_by:
        raise KeyboardInterrupt
    return read_log(run)


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What determines a run, without where its data happened to lie."""
    demonstrations = experiment.demonstrations
    shown = Path(demonstrations.path).name if demonstrations.path else None
    plain = to_json(replace(experiment, demonstrations=replace(demonstrations, path=shown)))
    return {"method": experiment.method, **plain}
