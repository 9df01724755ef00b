"""The summary of a dataset as one HTML page that opens from disk: lengths, distributions, motion, frames."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from prism.data import format_name
from prism.data.episodes import Array, Episode, EpisodeSource
from prism.data.inspect import (
    Progress,
    StreamSummary,
    Summary,
    as_picture,
    duration,
    numbers,
    sample_frames,
    size,
    summarise,
)
from prism.io.files import atomic_file
from prism.report.charts import drawing
from prism.report.pages import picture, render_page
from prism.report.recorded import recorded_rows
from prism.sensors import action_spec_of

_BINS = 32
_MAX_DIMS = 48  # dimensions of one stream that are drawn; more would be a wall
_TRACES = 6  # episodes drawn over time
_TRACE_POINTS = 160
_FRAME_EPISODES, _FRAMES_EACH = 3, 6

Histogram = NDArray[np.int64]  # (D, bins)


def write_page(
    source: EpisodeSource,
    out: Path,
    overwrite: bool = False,
    progress: Progress | None = None,
    problems: Sequence[str] = (),
) -> Summary:
    """Inspects the dataset and writes the page to `out`, whole or not at all."""
    summary = summarise(source, format_name(Path(source.path)), progress, problems)
    content = render(source, summary, progress)
    with atomic_file(Path(out), overwrite) as file:
        file.write(content.encode())
    return summary


def render(source: EpisodeSource, summary: Summary, progress: Progress | None = None) -> str:
    streams = [summary.actions, *(s for s in summary.sensors if s.statistics is not None)]
    histograms = _histograms(source, streams, progress)
    traces = _traces(source, streams)
    named = {"actions": action_spec_of(source).names, **{spec.name: spec.names for spec in source.sensors}}
    lengths = summary.lengths
    return render_page(
        "dataset.html",
        title=summary.path.name,
        format=summary.format,
        task=summary.task,
        tiles=[
            ("episodes", f"{len(lengths):,}"),
            ("steps", f"{summary.steps:,}"),
            ("recorded", duration(summary.seconds)),
            ("steps a second", f"{summary.fps:g}"),
            ("on disk", size(summary.bytes_on_disk)),
        ],
        streams=[_row(stream) for stream in (summary.actions, *summary.sensors)],
        warnings=summary.warnings,
        notes=summary.notes,
        recorded=recorded_rows(source),
        lengths=_lengths(summary),
        films=[_film(source, s) for s in summary.sensors if s.kind in ("rgb", "depth", "tactile")],
        drawn=[_drawn(*one, named[one[0].name]) for one in zip(streams, histograms, traces, strict=True)],
    )


def _histograms(
    source: EpisodeSource, streams: Sequence[StreamSummary], progress: Progress | None = None
) -> list[Histogram]:
    """Counts over [min, max] of each dimension, in one more streaming pass."""
    counts = [np.zeros((stream.shape[0], _BINS), np.int64) for stream in streams]
    for part in numbers(source, progress):
        for stream, count in zip(streams, counts, strict=True):
            rows = _rows(stream, part)
            if stream.kind != "action" and stream.name in part.present:
                rows = rows[part.present[stream.name]]
            stats = stream.statistics
            assert stats is not None
            span = np.where(stats.max > stats.min, stats.max - stats.min, 1.0)
            bins = np.clip((rows.astype(np.float64) - stats.min) / span * _BINS, 0, _BINS - 1).astype(np.int64)
            for dim in range(min(stream.shape[0], _MAX_DIMS)):
                count[dim] += np.bincount(bins[:, dim], minlength=_BINS)
    return counts


def _traces(source: EpisodeSource, streams: Sequence[StreamSummary]) -> list[list[Array]]:
    """A few whole episodes of each stream, thinned to what a small picture can show."""
    traces: list[list[Array]] = [[] for _ in streams]
    wanted = [stream.name for stream in streams if stream.kind != "action"]
    for episode in np.unique(np.linspace(0, len(source.lengths) - 1, _TRACES).round().astype(int)).tolist():
        whole = source.read(episode, streams=wanted)
        keep = np.unique(np.linspace(0, whole.length - 1, _TRACE_POINTS).round().astype(int))
        for stream, found in zip(streams, traces, strict=True):
            found.append(_rows(stream, whole)[keep])
    return traces


def _rows(stream: StreamSummary, episode: Episode) -> Array:
    return episode.actions if stream.kind == "action" else episode.streams[stream.name]


def _row(stream: StreamSummary) -> tuple[str, ...]:
    shape = " \u00d7 ".join(map(str, stream.shape))
    span = (_number(stream, stream.low), _number(stream, stream.high))
    return (stream.name, stream.kind, shape, stream.dtype, stream.rate, *span, f"{stream.present:.0%}")


def _number(stream: StreamSummary, value: float) -> str:
    return "" if stream.kind == "text" else f"{value:.4g}"  # bytes of text have no range


def _lengths(summary: Summary) -> dict[str, Any]:
    lengths = summary.lengths
    low, high = int(lengths.min()), int(lengths.max())
    counts, edges = np.histogram(lengths, bins=min(_BINS, max(high - low, 1)), range=(low, max(high, low + 1)))
    labels = [f"{edges[i]:.0f} to {edges[i + 1]:.0f} steps: {n} episodes" for i, n in enumerate(counts)]
    return {"low": low, "high": high, "median": f"{np.median(lengths):g}", "bars": _bars(counts, labels, 640, 120)}


def _drawn(stream: StreamSummary, counts: Histogram, traces: list[Array], names: Sequence[str]) -> dict[str, Any]:
    """The distributions of a stream's dimensions; those that are constant by their names alone."""
    stats = stream.statistics
    assert stats is not None
    cards, constant = [], []
    shown = min(stream.shape[0], _MAX_DIMS)
    for dim in range(shown):
        name, mean = names[dim] if names else f"[{dim}]", f"{float(stats.mean[dim]):.4g}"
        if stats.constant[dim]:
            constant.append((name, mean))
            continue
        low, high = float(stats.min[dim]), float(stats.max[dim])
        edges = np.linspace(low, high, _BINS + 1)
        labels = [f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {n} steps" for i, n in enumerate(counts[dim])]
        cards.append(
            {
                "name": name,
                "mean": mean,
                "std": f"{float(stats.std[dim]):.4g}",
                "low": f"{low:.4g}",
                "high": f"{high:.4g}",
                "bars": _bars(counts[dim], labels, 240, 56),
                "lines": _lines([trace[:, dim] for trace in traces], low, high),
            }
        )
    more = stream.shape[0] - shown
    return {"name": stream.name, "episodes": len(traces), "cards": cards, "constant": constant, "more": more}


def _film(source: EpisodeSource, stream: StreamSummary) -> dict[str, Any]:
    sensor = next(s for s in source.sensors if s.name == stream.name)
    rows: dict[int, list[tuple[int, str]]] = {}
    for episode, step, frame in sample_frames(source, sensor, _FRAME_EPISODES, _FRAMES_EACH):
        rows.setdefault(episode, []).append((step, picture(as_picture(sensor, frame))))
    return {"name": stream.name, "rows": list(rows.items())}


def _bars(counts: NDArray[np.int64], labels: Sequence[str], width: int, height: int) -> Markup:
    """A histogram; each bar says its own numbers when pointed at."""
    step = width / len(counts)
    top = max(int(counts.max()), 1)
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{height - (h := height * int(n) / top):.1f}" width="{max(step - 1, 1):.1f}" '
        f'height="{h:.1f}"><title>{escape(label)}</title></rect>'
        for i, (n, label) in enumerate(zip(counts, labels, strict=True))
    )
    return drawing(f'<svg class="bars" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{bars}</svg>')


def _lines(traces: Sequence[Array], low: float, high: float, width: int = 240, height: int = 56) -> Markup:
    """Episodes over their own time, from the first step at the left to the last at the right."""
    paths = []
    for trace in traces:
        x = np.linspace(0, width, len(trace)) if len(trace) > 1 else np.array([0.0])
        y = height - 2 - (trace.astype(np.float64) - low) / (high - low) * (height - 4)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
        paths.append(f'<polyline points="{points}"/>')
    return drawing(
        f'<svg class="lines" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{"".join(paths)}</svg>'
    )
