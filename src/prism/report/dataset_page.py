"""The summary of a dataset as one HTML page that opens from disk: lengths, distributions, motion, frames."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
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
from prism.report.charts import page, table
from prism.report.recorded import recorded_section
from prism.sensors import action_spec_of

_BINS = 32
_MAX_DIMS = 48  # dimensions of one stream that are drawn; more would be a wall
_TRACES = 6  # episodes drawn over time
_TRACE_POINTS = 160
_FRAME_EPISODES, _FRAMES_EACH = 3, 6
_THUMB = 192  # pixels, longest side of a sample frame

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
    parts = [_head(summary), recorded_section(source), _lengths(summary)]
    parts += [_frames_section(source, s) for s in summary.sensors if s.kind in ("rgb", "depth", "tactile")]
    named = {"actions": action_spec_of(source).names, **{spec.name: spec.names for spec in source.sensors}}
    parts += [_stream_section(*drawn, named[drawn[0].name]) for drawn in zip(streams, histograms, traces, strict=True)]
    lead = escape(summary.format) + (f" &middot; task {escape(summary.task)}" if summary.task else "")
    return page(summary.path.name, lead, "".join(parts), "", style=_STYLE)


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


def _head(summary: Summary) -> str:
    lengths = summary.lengths
    tiles = {
        "episodes": f"{len(lengths):,}",
        "steps": f"{summary.steps:,}",
        "recorded": duration(summary.seconds),
        "steps a second": f"{summary.fps:g}",
        "on disk": size(summary.bytes_on_disk),
    }
    cells = "".join(f"<div><b>{escape(value)}</b><span>{key}</span></div>" for key, value in tiles.items())
    rows = [
        [
            *(escape(s.name), escape(s.kind), " &times; ".join(map(str, s.shape)), escape(s.dtype), escape(s.rate)),
            *(_number(s, s.low), _number(s, s.high), f"{s.present:.0%}"),
        ]
        for s in (summary.actions, *summary.sensors)
    ]
    names = ("stream", "kind", "shape of a step", "type", "rate", "lowest", "highest", "present")
    remarks = "".join(f'<li class="warn">{escape(text)}</li>' for text in summary.warnings)
    remarks += "".join(f"<li>{escape(text)}</li>" for text in summary.notes)
    streams = table(names, rows, "Streams of the dataset")
    return f'<div class="tiles">{cells}</div>{streams}' + (f'<ul class="hint">{remarks}</ul>' if remarks else "")


def _number(stream: StreamSummary, value: float) -> str:
    return "" if stream.kind == "text" else f"{value:.4g}"  # bytes of text have no range


def _lengths(summary: Summary) -> str:
    lengths = summary.lengths
    low, high = int(lengths.min()), int(lengths.max())
    counts, edges = np.histogram(lengths, bins=min(_BINS, max(high - low, 1)), range=(low, max(high, low + 1)))
    labels = [f"{edges[i]:.0f} to {edges[i + 1]:.0f} steps: {n} episodes" for i, n in enumerate(counts)]
    return (
        f"<h2>Episode lengths</h2><p class=sub>{low} to {high} steps, median {np.median(lengths):g}</p>"
        f'<figure class="panel wide">'
        f"{_bars(counts, labels, 640, 120)}"
        f"<figcaption><span>{low}</span><span>{high} steps</span></figcaption></figure>"
    )


def _stream_section(stream: StreamSummary, counts: Histogram, traces: list[Array], names: Sequence[str]) -> str:
    stats = stream.statistics
    assert stats is not None
    cards = []
    for dim in range(min(stream.shape[0], _MAX_DIMS)):
        low, high = float(stats.min[dim]), float(stats.max[dim])
        edges = np.linspace(low, high, _BINS + 1)
        labels = [f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {n} steps" for i, n in enumerate(counts[dim])]
        flat = bool(stats.constant[dim])
        body = f"<p class=flat>constant, {stats.mean[dim]:.4g}</p>" if flat else _bars(counts[dim], labels, 240, 56)
        if not flat:
            body += f"<figcaption><span>{low:.4g}</span><span>{high:.4g}</span></figcaption>"
            body += _lines([trace[:, dim] for trace in traces], low, high)
        mean, std, name = float(stats.mean[dim]), float(stats.std[dim]), escape(names[dim]) if names else f"[{dim}]"
        cards.append(
            f"<figure class=panel><h4>{name} <small>mean {mean:.4g}, std {std:.4g}</small></h4>{body}</figure>"
        )
    more = stream.shape[0] - len(cards)
    rest = f"<p class=sub>{more} more dimensions are not drawn.</p>" if more > 0 else ""
    return (
        f"<h2>{escape(stream.name)}</h2><p class=sub>each dimension: how often it has which value, and over time in "
        f"{len(traces)} episodes</p><div class=small>{''.join(cards)}</div>{rest}"
    )


def _frames_section(source: EpisodeSource, stream: StreamSummary) -> str:
    sensor = next(s for s in source.sensors if s.name == stream.name)
    frames = sample_frames(source, sensor, _FRAME_EPISODES, _FRAMES_EACH)
    rows: dict[int, str] = {}
    for episode, step, frame in frames:
        rows[episode] = rows.get(episode, "") + (
            f'<figure><img alt="episode {episode}, step {step}" src="{_png(as_picture(sensor, frame))}">'
            f"<figcaption><span>step {step}</span></figcaption></figure>"
        )
    body = "".join(f"<p class=sub>episode {episode}</p><div class=frames>{row}</div>" for episode, row in rows.items())
    return f"<h2>{escape(stream.name)}</h2>{body}"


def _png(frame: Array) -> str:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(frame, dtype=np.uint8))
    picture.thumbnail((_THUMB, _THUMB))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _bars(counts: NDArray[np.int64], labels: Sequence[str], width: int, height: int) -> str:
    """A histogram; each bar says its own numbers when pointed at."""
    step = width / len(counts)
    top = max(int(counts.max()), 1)
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{height - (h := height * int(n) / top):.1f}" width="{max(step - 1, 1):.1f}" '
        f'height="{h:.1f}"><title>{escape(label)}</title></rect>'
        for i, (n, label) in enumerate(zip(counts, labels, strict=True))
    )
    return f'<svg class="bars" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{bars}</svg>'


def _lines(traces: Sequence[Array], low: float, high: float, width: int = 240, height: int = 56) -> str:
    """Episodes over their own time, from the first step at the left to the last at the right."""
    paths = []
    for trace in traces:
        x = np.linspace(0, width, len(trace)) if len(trace) > 1 else np.array([0.0])
        y = height - 2 - (trace.astype(np.float64) - low) / (high - low) * (height - 4)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
        paths.append(f'<polyline points="{points}"/>')
    return f'<svg class="lines" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{"".join(paths)}</svg>'


_STYLE = (
    ".tiles{display:flex;flex-wrap:wrap;gap:.75rem 2.25rem;margin:1.1rem 0}.tiles b{display:block;font-size:1.4rem}"
    ".tiles span,small,.flat,.sub{color:var(--soft);font-weight:400}.sub{margin:.1rem 0 .9rem}.flat{margin:0}"
    "h1{overflow-wrap:anywhere}h2{margin:2.5rem 0 0}"
    ".small{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,14.5rem),1fr));"
    "gap:.75rem}.small h4{margin:0 0 .4rem}.small small{font-size:.75rem}.warn{color:var(--bad)}"
    ".frames{display:grid;grid-template-columns:repeat(auto-fill,minmax(7rem,1fr));gap:.6rem;margin-bottom:.6rem}"
    ".frames figure{margin:0}.frames img{width:100%;display:block;border-radius:4px;outline:1px solid var(--line)}"
    ".bars,.lines{display:block;width:100%;height:56px}.wide .bars{height:120px}.lines{margin-top:8px}"
    ".bars rect{fill:var(--m0)}.bars rect:hover{fill:var(--ink)}"
    ".lines polyline{fill:none;stroke:var(--m0);stroke-width:1.2;opacity:.6;vector-effect:non-scaling-stroke}"
    "figcaption{display:flex;justify-content:space-between;color:var(--soft);font-size:.75rem;margin-top:2px}"
)
