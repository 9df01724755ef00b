"""The top of a benchmark's page: its own table; below it the report's section of every task, with videos."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from prism.report.charts import interval_bar
from prism.report.run import Log, write_report
from prism.runs.benchmarks import BenchmarkResult, Row
from prism.runs.published import OTHERS


def write_benchmark(path: Path, table: BenchmarkResult, logs: Mapping[str, Log] | None = None) -> Path:
    """`logs` by task, as for write_report."""
    results = [result for task in table.benchmark.tasks for result in table.results.get(task, ())]
    return write_report(path, results, logs, title=f"PRISM on {table.benchmark.title}", overview=overview(table))


def overview(table: BenchmarkResult) -> str:
    rows = "".join(_row(row, table) for row in table.rows())
    head = "".join(f'<th scope="col">{name}</th>' for name in columns(table))
    departures = "".join(f"<li>{escape(line)}</li>" for line in table.departures())
    warning = f'<p class="hint">Not the whole protocol:</p><ul class="hint">{departures}</ul>' if departures else ""
    published = OTHERS.get(table.benchmark.name, "")
    note = f'<p class="hint">{escape(published)}.</p>' if published else ""
    return (
        f"<p>Protocol: {escape(table.benchmark.rule)}. Inputs: {escape(', '.join(table.settings))}.</p>{warning}"
        '<div class="panel scroll" tabindex="0" role="region" aria-label="Table of the benchmark">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def columns(table: BenchmarkResult) -> list[str]:
    names = ["Task", "Success", "95 % interval", "Episodes", "Score"]
    return [*names, *["Expert"] * bool(table.expert), "Paper's", "Note"]


def _row(row: Row, table: BenchmarkResult) -> str:
    label = f"<b>{escape(row.label)}</b>" if row.is_mean else escape(row.label)
    bar = ""
    if row.success is not None and row.interval is not None:
        bar = interval_bar(row.success, *row.interval, f"{row.label}: {row.success:.0%}")
    cells = [
        percent(row.success) + bar,
        "" if row.interval is None else f"{100 * row.interval[0]:.0f} to {100 * row.interval[1]:.0f}",
        str(row.episodes or ""),
        "" if row.score is None else f"{row.score:.3f}",
        *([percent(row.expert)] if table.expert else []),
        percent(row.paper),
        escape(row.note),
    ]
    return f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}".removesuffix(".0") + " %"
