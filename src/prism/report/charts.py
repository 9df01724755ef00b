"""Charts as inline SVG, and the frame of every page: no library, no network; colours come from the page's style sheet,
so dark mode works."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from markupsafe import Markup

from prism.report.pages import render_page

_WIDTH, _HEIGHT = 360, 216
LEFT, RIGHT, TOP, BASE = 46, 348, 12, 182  # edges of the plot


def page(title: str, lead: str, content: str, footer: str, style: str = "", header: str = "", script: str = "") -> str:
    """A whole HTML page. `title` is text, the rest is HTML; `style` comes after that of every report."""
    drawn = {"style": style, "header": header, "lead": lead, "content": content, "footer": footer, "script": script}
    made = {name: Markup(part) for name, part in drawn.items()}  # the caller escapes
    return render_page("plain.html", title=title, **made)


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    css: str  # class of the line: s0, s1, ...


def line_chart(
    series: Sequence[Series],
    label: str,
    x_label: str,
    log_y: bool = False,
    percent: bool = False,
    top: float = 0.05,
    last: bool = True,
    zero: bool = True,
) -> Markup:
    """Curves over a common axis; a percent axis reaches at least up to `top`.

    `last`: the legend has the value at the end of each curve, where it is a result; `zero`: the axis includes 0.
    Points that are not finite, or not positive on a log axis, are left out.
    """
    kept = [_clean(one, log_y) for one in series]
    kept = [one for one in kept if len(one.x)]
    if not kept:
        return Markup("")
    x_low, x_high = min(min(one.x) for one in kept), max(max(one.x) for one in kept)
    y_low, y_high = min(min(one.y) for one in kept), max(max(one.y) for one in kept)
    if percent and not log_y:
        y_low, y_high = 0.0, max(top, y_high)
    elif not log_y and zero:
        y_low = min(0.0, y_low)
    if x_high <= x_low:
        x_high = x_low + 1.0
    if y_high <= y_low:
        y_high = y_low * 1.5 if y_low > 0 else y_low + 1.0
    ticks = log_ticks(y_low, y_high) if log_y else linear_ticks(y_low, y_high)
    if not log_y:
        y_high = max(y_high, ticks[-1])

    def at_x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (RIGHT - LEFT)

    def at_y(value: float) -> float:
        low, high, here = (math.log(v) for v in (y_low, y_high, value)) if log_y else (y_low, y_high, value)
        return BASE - (here - low) / (high - low) * (BASE - TOP)

    parts = [y_axis(at_y, ticks, percent), x_axis(at_x, linear_ticks(x_low, x_high), x_high, x_label)]
    for one in kept:
        points = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(one.x, one.y, strict=True))
        parts.append(f'<polyline class="curve {one.css}" points="{points}"/>')
        parts.append(f'<circle class="end {one.css}" cx="{at_x(one.x[-1]):.1f}" cy="{at_y(one.y[-1]):.1f}" r="3"/>')
    ends = [number(one.y[-1], percent) for one in kept]
    said = "; at the end: " + ", ".join(f"{one.name} {end}" for one, end in zip(kept, ends, strict=True))
    legend = "".join(
        f'<span class="key {one.css}">{escape(one.name)}{f" <b>{end}</b>" * last}</span>'
        for one, end in zip(kept, ends, strict=True)
    )
    return drawing(f'{svg(parts, label + said * last)}<p class="legend">{legend}</p>')


def drawing(markup: str) -> Markup:
    """Markup that is escaped already; a template inserts it unchanged."""
    return Markup(markup)


def histogram(values: Sequence[float], label: str, x_label: str, marks: Sequence[tuple[str, float]]) -> Markup:
    """Counts in about 30 bins up to a little above the largest mark; the last bin holds everything beyond."""
    if not len(values):
        return Markup("")
    data = np.asarray(values, dtype=np.float64)
    if data.max() - data.min() < 1e-9:
        return drawing(f'<p class="hint">{escape(label)}: always {number(float(data[0]))}.</p>')
    high = min(float(data.max()), 1.15 * max(value for _, value in marks)) * 1.0001
    low = max(0.0, float(data.min()) - 0.05 * high)
    edges = np.linspace(low, high, 31)
    counts, _ = np.histogram(np.minimum(data, high * 0.9999), bins=edges)
    top = float(counts.max())

    def at_x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (RIGHT - LEFT)

    def at_y(value: float) -> float:
        return BASE - value / top * (BASE - TOP - 14)

    parts = [
        y_axis(at_y, [t for t in linear_ticks(0, top, 4) if t == int(t)], False),
        x_axis(at_x, linear_ticks(low, high), high, x_label),
    ]
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            x, y = at_x(left), at_y(count)
            width, height = at_x(right) - x - 1.2, BASE - y
            parts.append(
                f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="1.5">'
                f"<title>{left:.2f} to {right:.2f}: {count}</title></rect>"
            )
    for name, value in marks:
        x = at_x(value)
        anchor = "end" if x > _WIDTH * 0.7 else "start"
        shift = -4 if anchor == "end" else 4
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BASE}"/>')
        parts.append(
            f'<text class="strong" x="{x + shift:.1f}" y="{TOP + 9}" text-anchor="{anchor}">{escape(name)}</text>'
        )
    return svg(parts, label)


def interval_bar(value: float, low: float, high: float, label: str) -> Markup:
    """A proportion with its interval on a line from 0 to 1."""
    x, a, b = (4 + 192 * v for v in (value, low, high))
    return drawing(
        f'<svg class="interval" viewBox="0 0 200 14" role="img" aria-label="{escape(label)}">'
        f'<line class="rail" x1="4" x2="196" y1="7" y2="7"/>'
        f'<line class="range" x1="{a:.1f}" x2="{b:.1f}" y1="7" y2="7"/>'
        f'<circle class="point" cx="{x:.1f}" cy="7" r="4.5"/></svg>'
    )


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2, 2.5, 5 times a power of ten) that cover low..high from inside, at least two."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next((m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if span / (m * power) <= count + 0.5), 10 * power)
    first = math.ceil(low / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within low..high; sparser for many decades; the ends if there is none inside."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [d * 10.0**e for e in decades for d in digits if low * 0.999 <= d * 10.0**e <= high * 1.001]
    return ticks if len(ticks) > 1 else [low, high]


def number(value: float, percent: bool = False) -> str:
    """The fewest digits that distinguish it."""
    if percent:
        return f"{100 * value:.0f} %"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 1000 else 0
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def thin(values: Sequence[float], limit: int = 240) -> list[int]:
    """Indices of at most `limit` values, evenly, first and last included."""
    count = len(values)
    return list(range(count)) if count <= limit else [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _clean(one: Series, log_y: bool) -> Series:
    pairs = [
        (x, y)
        for x, y in zip(one.x, one.y, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_y)
    ]
    pairs = [pairs[i] for i in thin([x for x, _ in pairs])]
    return Series(one.name, [x for x, _ in pairs], [y for _, y in pairs], one.css)


def y_axis(at_y: Callable[[float], float], ticks: Sequence[float], percent: bool) -> str:
    rows = []
    for tick in ticks:
        y = at_y(tick)
        rows.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        rows.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick, percent)}</text>')
    return "".join(rows)


def x_axis(at_x: Callable[[float], float], ticks: Sequence[float], end: float, label: str) -> str:
    base = BASE
    rows = [f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{base}" y2="{base}"/>']
    rows += [
        f'<text x="{at_x(tick):.1f}" y="{base + 14}" text-anchor="middle">{number(tick)}</text>'
        for tick in ticks
        if tick <= end * 1.0001
    ]
    rows.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>')
    return "".join(rows)


def svg(parts: Sequence[str], label: str, height: int = _HEIGHT) -> Markup:
    return drawing(
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


_SIDE, _ABOVE, _ROW, _BAR, _BELOW = 14, 4, 34, 12, 34

# Beside the report's style sheet.
BAR_STYLE = (
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


def bar_chart(
    bars: Sequence[Bar], label: str, x_label: str, percent: bool = False, mark: float | None = None
) -> Markup:
    """One row a bar, from 0; the axis covers all intervals and `mark`, a dashed line to compare with."""
    if not bars:
        return Markup("")
    low = min(0.0, *(bar.low for bar in bars), *(bar.value for bar in bars), mark or 0.0)
    high = max(0.0, *(bar.high for bar in bars), *(bar.value for bar in bars), mark or 0.0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    height = _ABOVE + _ROW * len(bars) + _BELOW
    base = height - _BELOW

    def at(value: float) -> float:
        return _SIDE + (value - low) / (high - low) * (_WIDTH - 2 * _SIDE)

    parts = []
    for tick in linear_ticks(low, high):
        x = at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_ABOVE}" y2="{base}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{_signed(tick, percent)}</text>')
    if mark is not None:
        parts.append(f'<line class="mark" x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="{_ABOVE}" y2="{base}"/>')
    for i, bar in enumerate(bars):
        y = _ABOVE + _ROW * i
        middle = y + 18 + _BAR / 2
        left, right = sorted((at(0.0), at(bar.value)))
        words = (
            f"{_signed(bar.value, percent)}, 95 % interval {_signed(bar.low, percent)} to {_signed(bar.high, percent)}"
        )
        parts.append(
            f'<text class="strong" x="{_SIDE}" y="{y + 13}">{escape(bar.name)}</text>'
            f'<text x="{_WIDTH - _SIDE}" y="{y + 13}" text-anchor="end">{_signed(bar.value, percent)}</text>'
            f'<rect class="bar {bar.css}" x="{left:.1f}" y="{y + 18}" width="{max(right - left, 0.8):.1f}" '
            f'height="{_BAR}" rx="2"><title>{escape(bar.name)}: {words}</title></rect>'
            f'<line class="whisker" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle}" y2="{middle}"/>'
        )
    parts.append(f'<line class="axis" x1="{at(0):.1f}" x2="{at(0):.1f}" y1="{_ABOVE}" y2="{base}"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>')
    said = "; ".join(f"{bar.name} {_signed(bar.value, percent)}" for bar in bars)
    return svg(parts, f"{label}: {said}", height)


def _signed(value: float, percent: bool) -> str:
    return number(value, percent).replace("-0 %", "0 %") if abs(value) < 0.005 and percent else number(value, percent)
