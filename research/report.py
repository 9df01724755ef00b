"""What every study hands back: figures, and claims of the paper with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from prism.bench.output import Output
from prism.rollout.results import run_info

Verdict = Literal["confirmed", "not confirmed", "cannot be tested here"]

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
            **run_info(self.seeds[0] if self.seeds else 0),
        }


def carry_out(
    output: Output,
    run: Callable[[Console], Study],
    show: Callable[[Study, Console], None],
    draw: Callable[[Study], Figure] | None = None,
) -> None:
    """What every `prism study` does: run, show the figures and the verdicts, write."""

    def show_all(study: Study, console: Console) -> None:
        show(study, console)
        show_claims(study, console)

    output.carry_out(run, show_all, draw)


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


def decided(difference: Mapping[str, Any]) -> tuple[Verdict, str]:
    """The verdict on "better" from a paired difference (evaluation.statistics.Difference as JSON): its 95 % interval
    and p have to exclude 0; what to add to the note where they do not."""
    if difference["low"] <= 0 <= difference["high"] or difference["p"] >= 0.05:
        return "cannot be tested here", "; no difference beyond chance at this budget"
    return confirmed(difference["low"] > 0), ""
