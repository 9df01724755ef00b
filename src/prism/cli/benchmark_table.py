"""The table of a benchmark on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.runs.benchmarks import BenchmarkResult


def print_benchmark(table: BenchmarkResult) -> None:
    """One row a task, means below their group; the paper's numbers are marked as such, what is missing is named."""
    from rich.console import Console
    from rich.table import Table

    from prism.runs.benchmark_page import percent
    from prism.runs.published import OTHERS

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    rows = table.rows()
    absent = [row for row in rows if row.success is None and not row.is_mean and row.note == "missing"]
    line(f"{table.benchmark.title}: {table.benchmark.rule}; inputs: {', '.join(table.settings) or 'none'}")
    grid = Table(box=None, padding=(0, 1, 0, 0))
    grid.add_column("task", no_wrap=True)
    names = ("success [95 %]", "of", "score", *(["expert"] if table.expert else []), "paper's")
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("")
    for row in rows:
        if row in absent:  # listed below: 47 empty lines help nobody
            continue
        success = ""
        if row.success is not None and row.interval is not None:
            success = f"{percent(row.success)} [{100 * row.interval[0]:.0f}, {100 * row.interval[1]:.0f}]"
        score = "" if row.score is None else f"{row.score:.3f}"
        cells = [success, str(row.episodes or ""), score, *([percent(row.expert)] if table.expert else [])]
        style = "bold" if row.is_mean else None
        grid.add_row(row.label, *cells, percent(row.paper), row.note, style=style)
    console.print(grid)
    if absent:
        line(f"missing ({len(absent)}): {', '.join(row.label.partition('-')[2] or row.label for row in absent)}")
    for departure in table.departures():
        if not departure.startswith("missing"):
            line(f"not the protocol: {departure}")
    for crash in (crash for several in table.results.values() for result in several for crash in result.crashes):
        line(f"a rollout process died and was replaced: {crash}")
    if published := OTHERS.get(table.benchmark.name):
        line(f"published: {published}.")
