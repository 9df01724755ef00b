"""Recorded episodes of a robot as one HTML page: what was commanded, by whom, among which candidates, how late, and
what was seen. From the dataset and the commands.npz of each episode (robots/recording.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.data.inspect import as_picture
from prism.errors import PrismError
from prism.io.files import replace_file
from prism.report.charts import Series, line_chart, number, page, table
from prism.report.dataset_page import _png

_SHOWN, _FRAMES = 6, 6  # episodes with all their curves, failures first; pictures of each camera
_STYLE = """
.who { display: flex; height: 10px; border-radius: 5px; overflow: hidden; margin: 4px 0 2px }
.who i { display: block; height: 100% }
.who .policy { background: var(--m0) } .who .other { background: var(--m1) }
td.words { text-align: left; white-space: normal; min-width: 14em } th:last-child { text-align: left }
.frames { display: flex; gap: 6px; overflow-x: auto } .frames img { border-radius: 4px }
"""
Details = Mapping[str, NDArray[Any]]


def write_robot_report(folder: Path) -> Path:
    """FOLDER/report.html"""
    source = RecordingSource(folder)
    path = folder / "report.html"
    replace_file(path, render(source).encode())
    return path


def render(source: RecordingSource) -> str:
    rows = source.provenances
    judged = [row["success"] for row in rows if isinstance(row.get("success"), bool)]
    robot = escape(str(rows[0].get("robot", "a robot")))
    rate = f"{sum(judged)} of {len(judged)} succeeded. " if judged else ""
    lead = f"{len(rows)} episodes of {robot}, task {escape(source.task)}. {rate}Recorded by {_by(rows)}."
    order = sorted(range(len(rows)), key=lambda i: (rows[i].get("success") is not False, i))
    parts = [_table(source), *(_episode(source, i) for i in order[:_SHOWN])]
    note = "Candidates: the lowest and highest of the plan that was in use. Late: sent after the end of its slot."
    return page(f"PRISM: {source.path.resolve().name}", lead, "".join(parts), f"<p>{note}</p>", style=_STYLE)


def _by(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{escape(str(who))} ({count})" for who, count in Counter(r.get("by", "?") for r in rows).items())


def _outcome(row: Mapping[str, Any]) -> str:
    return {True: "success", False: "failure"}.get(row.get("success"), "not judged")  # type: ignore[arg-type]


def _table(source: RecordingSource) -> str:
    rows = []
    for i, row in enumerate(source.provenances):
        details = read_details(source, i)
        latency = details.get("latency_ms", np.zeros(0))
        rows.append(
            [
                *(str(i), escape(str(row.get("seed", ""))), _outcome(row), str(int(source.lengths[i]))),
                *(str(row.get("commands", len(latency))), str(row.get("late", ""))),
                *(f"{np.quantile(latency, 0.99):.1f}" if len(latency) else "", str(row.get("limited", ""))),
                *(_commanded(row), f'<td class="words">{escape(str(row.get("stopped") or ""))}</td>'),
            ]
        )
    heads = ("episode", "seed", "outcome", "steps", "commands", "late", "p99 ms", "limited", "who", "stopped")
    return f"<h2>Episodes</h2>{table(heads, rows, 'Episodes')}"


def _commanded(row: Mapping[str, Any]) -> str:
    said = row.get("commanded_by")
    if not isinstance(said, list):
        return escape(str(said or ""))
    steps: Counter[str] = Counter()
    for who, count in said:
        steps[str(who)] += int(count)
    return ", ".join(f"{escape(who)} {count}" for who, count in steps.items())


def read_details(source: RecordingSource, episode: int) -> dict[str, NDArray[Any]]:
    """commands.npz of an episode; nothing where there is none."""
    file = source.folder(episode) / COMMANDS
    if not file.is_file():
        return {}
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError) as error:
        raise PrismError(f"{file} cannot be read ({error}); remove it, the episode itself is beside it") from None


def _episode(source: RecordingSource, number_: int) -> str:
    row, details = source.provenances[number_], read_details(source, number_)
    length, fps = int(source.lengths[number_]), source.fps
    names = [spec.name for spec in source.sensors if spec.kind == "vector"]
    part = source.read(number_, streams=names)
    seconds = [i / fps for i in range(length)]
    labels = source.action_spec.names or tuple(f"action {i}" for i in range(source.action_dim))
    low, high = _candidates(details, length)
    figures = []
    for i, label in enumerate(labels):
        curves = [Series("executed", seconds, part.actions[:, i].tolist(), "s0")]
        if low is not None and high is not None:
            curves += [
                Series("lowest candidate", seconds, low[:, i].tolist(), "s1"),
                Series("highest candidate", seconds, high[:, i].tolist(), "s2"),
            ]
        figures.append(_figure(label, line_chart(curves, label, "seconds")))
    for spec in (s for s in source.sensors if s.kind == "vector"):
        values = part.streams[spec.name].reshape(length, -1)
        said = spec.names or tuple(map(str, range(values.shape[1])))
        curves = [Series(said[i], seconds, values[:, i].tolist(), f"s{i % 4}") for i in range(min(len(said), 8))]
        figures.append(_figure(spec.name, line_chart(curves, spec.name, "seconds")))
    if details.get("latency_ms", np.zeros(1)).max(initial=0.0) > 1e-3:  # in real time
        when = (details["time"] - details["time"][0]).tolist()
        late = Series("ms from its tick", when, details["latency_ms"].tolist(), "s3")
        figures.append(_figure("Commands", line_chart([late], "latency of the commands", "seconds")))
    stopped = f", stopped: {escape(str(row['stopped']))}" if row.get("stopped") else ""
    return (
        f"<h2>Episode {number_}: {_outcome(row)}{stopped}</h2>{_strip(row)}{_pictures(source, number_)}"
        f'<div class="charts">{"".join(figures)}</div>'
    )


def _figure(title: str, chart: str) -> str:
    return f'<figure class="panel"><h4>{escape(title)}</h4>{chart}</figure>'


def _candidates(details: Details, length: int) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Of each step: the lowest and highest of what the plan in use might have been, (T, D)."""
    if "candidates" not in details:
        return None, None
    plans, first = details["candidates"], details["plan_step"]
    low = np.full((length, plans.shape[-1]), np.nan)
    high = low.copy()
    for plan, begin, end in zip(plans, first, [*first[1:], length], strict=True):
        steps = max(0, min(int(end), length, int(begin) + plan.shape[1]) - int(begin))
        low[begin : begin + steps] = plan[:, :steps].min(0)
        high[begin : begin + steps] = plan[:, :steps].max(0)
    return low, high


def _strip(row: Mapping[str, Any]) -> str:
    """Who commanded, over time."""
    said = row.get("commanded_by")
    if not isinstance(said, list) or not said:
        return ""
    bars = "".join(
        f'<i class="{"policy" if who == "policy" else "other"}" style="flex:{int(count)}" title="{escape(str(who))}: '
        f'{int(count)} steps"></i>'
        for who, count in said
    )
    changed = "".join(f"; {escape(str(why))} {count} times" for why, count in (row.get("changed") or {}).items())
    return f'<div class="who">{bars}</div><p class="sub">steps: {_commanded(row)}{changed}</p>'


def _pictures(source: RecordingSource, episode: int) -> str:
    length, rows = int(source.lengths[episode]), []
    steps = np.unique(np.linspace(0, length - 1, _FRAMES).round().astype(int)).tolist()
    for spec in (s for s in source.sensors if s.kind in ("rgb", "depth", "tactile")):
        shown = [source.read(episode, step, step + 1, streams=[spec.name]).streams[spec.name][0] for step in steps]
        images = "".join(
            f'<img alt="{escape(spec.name)}, {number(step / source.fps)} s" src="{_png(as_picture(spec, frame))}">'
            for step, frame in zip(steps, shown, strict=True)
        )
        rows.append(f'<p class="sub">{escape(spec.name)}</p><div class="frames">{images}</div>')
    return "".join(rows)
