"""comparison.html: the table, learning curves over training time, success against latency. One file, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from prism.evaluation.play import TEST_SEED
from prism.evaluation.results import write_atomic
from prism.report import charts
from prism.report.charts import BAR_STYLE, Bar, Series, bar_chart, drawing, line_chart
from prism.report.pages import render_page

if TYPE_CHECKING:
    from prism.experiments.comparison import Comparison, Row

# For up to eight contestants, the same in every picture; apart for the colour-blind, on light and on dark (Okabe, Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_STYLE = "".join(
    f".curve.c{i}{{stroke:{colour}}}.end.c{i}{{fill:{colour}}}.key.c{i}::before{{background:{colour}}}"
    for i, colour in enumerate(_COLOURS)
) + (
    ".charts{align-items:start}.wide{overflow:auto}.frontier{fill:none;stroke:var(--object);stroke-dasharray:3 3}"
    ".whisker{stroke:var(--ink);stroke-width:1.1;opacity:.5}"
    ".missing li{overflow-wrap:anywhere}.scroll td,.scroll th{padding-inline:9px}"
)

_PARETO_NOTE = (
    "Up and to the left is better; the line joins the best. A plan is of K candidates and lasts Ta steps (table): who "
    "executes one step of it plans that much more often."
)


def write_page(path: Path, comparison: Comparison) -> Path:
    write_atomic(path, render(comparison).encode(), overwrite=True)
    return path


def render(comparison: Comparison) -> str:
    config = comparison.config
    plan, machine = config.evaluation, comparison.info.get("machine", {})
    return render_page(
        "comparison.html",
        title=f"{', '.join(config.recipes)}: {len(config.contestants)} methods side by side",
        style=drawing(BAR_STYLE + _STYLE),
        budget=config.budget,
        seeds=len(config.seeds),
        plan=plan,
        unseen=plan.first_seed >= TEST_SEED,
        total=len(comparison.trials) + len(comparison.missing),
        mixed=comparison.mixed.capitalize(),
        beside=comparison.beside,
        sections=[_section(comparison, recipe) for recipe in config.recipes],
        missing=[(str(one.trial), one.reason) for one in comparison.missing],
        provenance=[
            ("Command", comparison.info.get("command", "")),
            ("Date", comparison.info.get("date", "")),
            ("Commit", ", ".join(comparison.commits)),
            ("Machine", f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores"),
        ],
    )


def _section(comparison: Comparison, recipe: str) -> dict[str, Any]:
    rows = [row for row in comparison.rows if row.recipe == recipe]
    if not rows:
        return {"recipe": recipe, "names": (), "rows": (), "figures": ()}
    css = {contestant.name: f"c{i % len(_COLOURS)}" for i, contestant in enumerate(comparison.config.contestants)}
    episodes = comparison.config.evaluation.looked_at
    figures = (
        ("Score", bar_chart([_bar(row) for row in rows], "Score", "mean score, 95 %"), ""),
        ("Learning", _curves(rows, css), f"Score on the first {episodes} episodes, mean over seeds."),
        ("Success against time to a plan", pareto(rows, css), _PARETO_NOTE),
    )
    names, lines = comparison.table(recipe)
    return {"recipe": recipe, "names": names, "rows": lines, "figures": [one for one in figures if one[1]]}


def _bar(row: Row) -> Bar:
    seeds = "" if row.complete else f" ({len(row.seeds)} of {row.of} seeds)"
    return Bar(row.contestant + seeds, row.score, *row.score_ci)


def _curves(rows: Sequence[Row], css: dict[str, str]) -> Markup:
    series = [
        Series(
            row.contestant,
            [point["seconds"] / 60 for point in row.curve],
            [point["score"] for point in row.curve],
            css[row.contestant],
        )
        for row in rows
        if len(row.curve) > 1  # without looks on the way there is only the end, which the table has
    ]
    return line_chart(series, "Score over training time", "minutes of training")


def pareto(rows: Sequence[Row], css: dict[str, str]) -> Markup:
    """Success over the median time to a plan, log axis; the methods that no other beats in both are joined."""
    shown = [row for row in rows if row.latency_p50_ms > 0]
    if not shown:
        return Markup("")
    low, high = min(r.latency_p50_ms for r in shown) / 1.4, max(r.latency_p50_ms for r in shown) * 1.4

    def at_x(value: float) -> float:
        return charts.LEFT + math.log(value / low) / math.log(high / low) * (charts.RIGHT - charts.LEFT)

    def at_y(value: float) -> float:
        return charts.BASE - value * (charts.BASE - charts.TOP)

    ticks = [tick for tick in charts.log_ticks(low, high) if low <= tick <= high]
    parts = [
        charts.y_axis(at_y, (0.0, 0.25, 0.5, 0.75, 1.0), percent=True),
        charts.x_axis(at_x, ticks, high, "ms to a plan (median, log)"),
    ]
    corners: list[str] = []
    for row in frontier(shown):
        x, y = at_x(row.latency_p50_ms), at_y(row.success)
        corners += [f"{x:.1f},{corners[-1].split(',')[1]}", f"{x:.1f},{y:.1f}"] if corners else [f"{x:.1f},{y:.1f}"]
    parts.append(f'<polyline class="frontier" points="{" ".join(corners)}"/>')
    keys, said = [], []
    for row in shown:
        x, y = at_x(row.latency_p50_ms), at_y(row.success)
        a, b = (at_y(value) for value in row.success_ci)
        name, words = escape(row.contestant), f"{row.success:.0%}, {row.latency_p50_ms:.1f} ms"
        parts.append(f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{a:.1f}" y2="{b:.1f}"/>')
        parts.append(f'<circle class="end {css[row.contestant]}" cx="{x:.1f}" cy="{y:.1f}" r="5">')
        parts.append(f"<title>{name}: success {words}</title></circle>")
        keys.append(f'<span class="key {css[row.contestant]}">{name} <b>{words}</b></span>')
        said.append(f"{row.contestant} {words}")
    picture = charts.svg(parts, "Success against time: " + "; ".join(said))
    return drawing(f'{picture}<p class="legend">{"".join(keys)}</p>')


def frontier(rows: Sequence[Row]) -> list[Row]:
    """By latency: each is better than everything that is as fast."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.latency_p50_ms, -row.success)):
        if not best or row.success > best[-1].success:
            best.append(row)
    return best
