"""modality.html: the three bar charts of the paper's figure, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from prism.report.bars import STYLE, Bar, bar_chart
from prism.report.page import page
from prism.rollout.modality import Dropped, ModalityStudy
from prism.rollout.results import write_atomic


def write_page(path: Path, study: ModalityStudy, overwrite: bool = True) -> Path:
    write_atomic(path, render(study).encode(), overwrite)
    return path


def render(study: ModalityStudy) -> str:
    result = study.baseline
    title = f"What each sensor is worth: {result.task}"
    figures = "".join(
        f'<figure class="panel"><h4>{name}</h4>{chart}</figure>' for name, chart in charts(study) if chart
    )
    lead = f"""{len(result.episodes)} episodes under each condition, always on the same starting positions (seeds from
{result.first_seed}). A sensor that is dropped says nothing from the first step to the last. Lines are 95 % intervals;
dashed: nothing dropped."""
    if study.note is not None:
        lead += f" <b>Note:</b> {escape(study.note)}."
    content = f'<div class="charts">{figures}</div>\n<h3>All numbers</h3>\n{_table(study)}'
    footer = f"""<p>{escape(str(result.info.get("command", "")))}<br>{escape(str(result.info.get("date", "")))},
policy {escape(result.policy)}</p>"""
    return page(title, lead, content, footer, style=STYLE + ".charts{align-items:start}")


def charts(study: ModalityStudy) -> list[tuple[str, str]]:
    """(title, SVG): single sensors, pairs, change against nothing dropped."""
    metric = study.metric
    percent = metric == "success"
    full = float(study.baseline.summary()[metric])
    single = [dropped for dropped in study.results if len(dropped) == 1]
    several = [dropped for dropped in study.results if len(dropped) > 1]
    changes = sorted((*single, *several), key=lambda dropped: study.change(dropped, metric)[0])
    drawn = [Bar("nothing dropped", full, *_interval(study, ()), css="base")]
    return [
        (
            "Without one sensor",
            bar_chart([*drawn, *_bars(study, single)], "Without one sensor", metric, percent, mark=full),
        ),
        ("Without two", bar_chart(_bars(study, several), "Without two sensors", metric, percent, mark=full)),
        (
            "Change against all sensors",
            bar_chart(_changes(study, changes), "Change against all sensors", f"change of {metric}", percent),
        ),
    ]


def _interval(study: ModalityStudy, dropped: Dropped) -> tuple[float, float]:
    low, high = study.results[dropped].summary()[f"{study.metric}_ci"]
    return float(low), float(high)


def _bars(study: ModalityStudy, sets: Sequence[Dropped]) -> list[Bar]:
    values = {dropped: float(study.results[dropped].summary()[study.metric]) for dropped in sets}
    return [Bar(" + ".join(dropped), value, *_interval(study, dropped)) for dropped, value in values.items()]


def _changes(study: ModalityStudy, sets: Sequence[Dropped]) -> list[Bar]:
    bars = []
    for dropped in sets:
        mean, low, high = study.change(dropped, study.metric)
        bars.append(Bar(" + ".join(dropped), mean, low, high, css="loss" if mean < 0 else "gain"))
    return bars


def _table(study: ModalityStudy) -> str:
    rows = []
    for dropped, result in study.results.items():
        data: dict[str, Any] = result.summary()
        change, low, high = study.change(dropped, study.metric)
        cells = [
            f"{data['success']:.0%}", f"{data['success_ci'][0]:.0%} to {data['success_ci'][1]:.0%}",
            f"{data['score']:.3f}", f"{change:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{data['jerk']:.3f}",
        ]  # fmt: skip
        name = escape(" + ".join(dropped) or "nothing")
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    names = ("Dropped", "Success", "95 %", "Score", f"Change of {study.metric}", "95 %", "Jerk")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="panel scroll" tabindex="0" role="region" aria-label="All conditions"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
