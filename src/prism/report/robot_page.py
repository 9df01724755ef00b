"""Recorded episodes of a robot as one HTML page: what was commanded, by whom, among which candidates, how late, and
what was seen. From the dataset and the commands.npz of each episode (robots/recording.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.data.inspect import as_picture
from prism.errors import PrismError
from prism.io.files import replace_file
from prism.report.charts import Series, line_chart, number
from prism.report.pages import picture, render_page

_SHOWN, _FRAMES = 6, 6  # episodes with all their curves, failures first; pictures of each camera
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
    order = sorted(range(len(rows)), key=lambda i: (rows[i].get("success") is not False, i))
    by = Counter(str(row.get("by", "?")) for row in rows)
    moved = np.ptp(np.concatenate([source.read(i, streams=()).actions for i in range(len(rows))]), axis=0) > 0
    return render_page(
        "robot.html",
        title=f"PRISM: {source.path.resolve().name}",
        count=len(rows),
        robot=rows[0].get("robot", "a robot"),
        task=source.task,
        judged=f"{sum(judged)} of {len(judged)}" if judged else "",
        by=", ".join(f"{who} ({count})" for who, count in by.items()),
        rows=[_row(source, i) for i in range(len(rows))],
        constant=[name for name, moves in zip(_labels(source), moved, strict=True) if not moves],
        episodes=[_episode(source, i, moved) for i in order[:_SHOWN]],
    )


def _outcome(row: Mapping[str, Any]) -> str:
    return {True: "success", False: "failure"}.get(row.get("success"), "not judged")  # type: ignore[arg-type]


def _row(source: RecordingSource, number_: int) -> list[object]:
    row = source.provenances[number_]
    latency = read_details(source, number_).get("latency_ms", np.zeros(0))
    return [
        *(number_, row.get("seed", ""), _outcome(row), int(source.lengths[number_])),
        *(row.get("commands", len(latency)), row.get("late", "")),
        *(f"{np.quantile(latency, 0.99):.1f}" if len(latency) else "", row.get("limited", "")),
        *(_commanded(row), row.get("stopped") or ""),
    ]


def _commanded(row: Mapping[str, Any]) -> str:
    said = row.get("commanded_by")
    if not isinstance(said, list):
        return str(said or "")
    steps: Counter[str] = Counter()
    for who, count in said:
        steps[str(who)] += int(count)
    return ", ".join(f"{who} {count}" for who, count in steps.items())


def read_details(source: RecordingSource, episode: int) -> dict[str, NDArray[Any]]:
    """commands.npz of an episode; empty if missing."""
    file = source.folder(episode) / COMMANDS
    if not file.is_file():
        return {}
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError) as error:
        raise PrismError(f"{file} cannot be read ({error}); remove it, the episode itself is beside it") from None


def _labels(source: RecordingSource) -> tuple[str, ...]:
    return source.action_spec.names or tuple(f"action {i}" for i in range(source.action_dim))


def _episode(source: RecordingSource, number_: int, moved: NDArray[np.bool_]) -> dict[str, Any]:
    row, details = source.provenances[number_], read_details(source, number_)
    length, fps = int(source.lengths[number_]), source.fps
    names = [spec.name for spec in source.sensors if spec.kind == "vector"]
    part = source.read(number_, streams=names)
    seconds = [i / fps for i in range(length)]
    low, high = _candidates(details, length)
    figures = []
    for i, label in ((i, label) for i, label in enumerate(_labels(source)) if moved[i]):
        curves = [Series("executed", seconds, part.actions[:, i].tolist(), "s0")]
        if low is not None and high is not None:
            curves += [
                Series("lowest candidate", seconds, low[:, i].tolist(), "s1"),
                Series("highest candidate", seconds, high[:, i].tolist(), "s2"),
            ]
        figures.append((label, line_chart(curves, label, "seconds", last=False, zero=False)))
    for spec in (s for s in source.sensors if s.kind == "vector"):
        values = part.streams[spec.name].reshape(length, -1)
        said = spec.names or tuple(map(str, range(values.shape[1])))
        curves = [Series(said[i], seconds, values[:, i].tolist(), f"s{i % 4}") for i in range(min(len(said), 8))]
        figures.append((spec.name, line_chart(curves, spec.name, "seconds", last=False)))
    if details.get("latency_ms", np.zeros(1)).max(initial=0.0) > 1e-3:  # in real time
        when = (details["time"] - details["time"][0]).tolist()
        late = Series("ms from its tick", when, details["latency_ms"].tolist(), "s3")
        figures.append(("Commands", line_chart([late], "latency of the commands", "seconds", last=False)))
    by = row.get("commanded_by")
    return {
        "number": number_,
        "outcome": _outcome(row),
        "stopped": row.get("stopped") or "",
        "strip": [(str(who), int(count)) for who, count in by] if isinstance(by, list) else [],
        "commanded": _commanded(row),
        "changed": list((row.get("changed") or {}).items()),
        "films": _films(source, number_),
        "figures": figures,
    }


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


def _films(source: RecordingSource, episode: int) -> list[tuple[str, list[dict[str, str]]]]:
    """Pictures of each camera, evenly over an episode."""
    steps = np.unique(np.linspace(0, int(source.lengths[episode]) - 1, _FRAMES).round().astype(int)).tolist()
    films = []
    for spec in (s for s in source.sensors if s.kind in ("rgb", "depth", "tactile")):
        shown = [source.read(episode, step, step + 1, streams=[spec.name]).streams[spec.name][0] for step in steps]
        addresses = [picture(as_picture(spec, frame)) for frame in shown]
        times = [number(step / source.fps) for step in steps]
        films.append((spec.name, [{"time": t, "address": a} for t, a in zip(times, addresses, strict=True)]))
    return films
