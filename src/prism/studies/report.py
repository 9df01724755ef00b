"""What every study hands back: figures, and claims of the paper with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from prism.bench.timing import provenance, refuse_existing
from prism.errors import PrismError
from prism.evaluation.results import write_atomic, write_json

Verdict = Literal["confirmed", "not confirmed", "cannot be tested here"]
PICTURES = (".svg", ".png", ".pdf")

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    missing: tuple[str, ...] = ()  # cells that failed, each with its reason: never averaged over silently

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.name,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            **self.figures,
            "missing": list(self.missing),
            "settings": self.settings,
            "seeds": list(self.seeds),
            **provenance(self.seeds[0] if self.seeds else 0),
        }


@dataclass(frozen=True)
class Output:
    """Where a study goes; checked before the work, not after it."""

    json: Path | None = None
    plot: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in PICTURES:
            raise PrismError(f"{self.plot}: cannot draw a '{self.plot.suffix}' file; use .svg, .png or .pdf")

    def check(self) -> None:
        refuse_existing(self.json, self.plot, overwrite=self.overwrite)

    def write(self, study: Study, draw: Callable[[Study], Figure] | None = None) -> None:
        if self.json is not None:
            write_json(self.json, study.to_json(), self.overwrite)
        if self.plot is not None:
            if draw is None:
                raise PrismError(f"study {study.name} has no picture: leave --plot out")
            write_atomic(self.plot, picture(draw(study), self.plot), self.overwrite)


def picture(figure: Figure, path: Path) -> bytes:
    import io

    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lstrip("."))
    return drawn.getvalue()


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


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def confirmed(condition: bool) -> Verdict:
    return "confirmed" if condition else "not confirmed"
