"""Horizontal bars with intervals as inline SVG: names of any length, as many rows as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from prism.report.charts import linear_ticks, number

_WIDTH, _SIDE, _TOP, _ROW, _BAR, _BOTTOM = 360, 14, 4, 34, 12, 34

# Beside the report's style sheet.
STYLE = (
    ".bar.base{fill:var(--object)}.bar.loss{fill:var(--bad)}.bar.gain{fill:var(--good)}"
    ".whisker{stroke:var(--ink);stroke-width:1.3;opacity:.75}"
)


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    low: float  # interval
    high: float
    css: str = ""  # base, loss, gain


def bar_chart(bars: Sequence[Bar], label: str, x_label: str, percent: bool = False, mark: float | None = None) -> str:
    """One row a bar, from 0; the axis covers all intervals. `mark`: a dashed line to compare with."""
    if not bars:
        return ""
    low = min(0.0, *(bar.low for bar in bars), *(bar.value for bar in bars))
    high = max(0.0, *(bar.high for bar in bars), *(bar.value for bar in bars))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    height = _TOP + _ROW * len(bars) + _BOTTOM
    base = height - _BOTTOM

    def at(value: float) -> float:
        return _SIDE + (value - low) / (high - low) * (_WIDTH - 2 * _SIDE)

    parts = []
    for tick in linear_ticks(low, high):
        x = at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{base}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{_number(tick, percent)}</text>')
    for i, bar in enumerate(bars):
        y = _TOP + _ROW * i
        middle = y + 18 + _BAR / 2
        left, right = sorted((at(0.0), at(bar.value)))
        words = (
            f"{_number(bar.value, percent)}, 95 % interval {_number(bar.low, percent)} to {_number(bar.high, percent)}"
        )
        parts.append(
            f'<text class="strong" x="{_SIDE}" y="{y + 13}">{escape(bar.name)}</text>'
            f'<text x="{_WIDTH - _SIDE}" y="{y + 13}" text-anchor="end">{_number(bar.value, percent)}</text>'
            f'<rect class="bar {bar.css}" x="{left:.1f}" y="{y + 18}" width="{max(right - left, 0.8):.1f}" '
            f'height="{_BAR}" rx="2"><title>{escape(bar.name)}: {words}</title></rect>'
            f'<line class="whisker" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle}" y2="{middle}"/>'
        )
    parts.append(f'<line class="axis" x1="{at(0):.1f}" x2="{at(0):.1f}" y1="{_TOP}" y2="{base}"/>')
    if mark is not None:
        parts.append(f'<line class="mark" x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="{_TOP}" y2="{base}"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>')
    said = "; ".join(f"{bar.name} {_number(bar.value, percent)}" for bar in bars)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(f"{label}: {said}")}">'
        f"{''.join(parts)}</svg>"
    )


def _number(value: float, percent: bool) -> str:
    return number(value, percent).replace("-0 %", "0 %") if abs(value) < 0.005 and percent else number(value, percent)
