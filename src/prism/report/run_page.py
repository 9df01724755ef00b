"""report.html: one page that opens from disk, with no network and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.play import TEST_SEED
from prism.evaluation.results import EpisodeResult, EvaluationResult, write_atomic
from prism.evaluation.sensor_use import SensorReport, percent
from prism.report import charts
from prism.report.charts import Series
from prism.report.pages import render_page
from prism.report.player import Film, fan_picture, film_data, films, telling_fans

Log = Sequence[Mapping[str, Any]]  # the lines of a run's log.jsonl
_ROWS = 20  # of the table of episodes; report.css hides the others until they are asked for


def write_report(
    path: Path,
    results: Sequence[EvaluationResult],
    logs: Mapping[str, Log] | None = None,
    title: str = "PRISM evaluation",
    overwrite: bool = True,
    overview: str = "",
    sensors: SensorReport | None = None,
) -> Path:
    """Write the page. `logs` holds, by task, what training logged (prism.training.log.read_log).

    `overview` is HTML above the tasks: a benchmark's own table (research/benchmark.py), which replaces their cards.
    `sensors`: which of them the policy uses. It is made from recordings, so by default an older page is replaced: it
    can be made again at any time.
    """
    if not results:
        raise PrismError(f"{path}: there is no evaluation to report on; run prism eval first")
    write_atomic(path, render(results, logs or {}, title, overview, sensors).encode(), overwrite)
    return path


def render(
    results: Sequence[EvaluationResult],
    logs: Mapping[str, Log],
    title: str,
    overview: str = "",
    sensors: SensorReport | None = None,
) -> str:
    seeds = sorted({result.first_seed for result in results})
    return render_page(
        "run.html",
        title=title,
        overview=charts.drawing(overview),
        tasks=[_task(result, logs.get(result.task, ())) for result in results],
        count=sum(len(result.episodes) for result in results),
        unseen=seeds[0] >= TEST_SEED,  # demonstrations are recorded below
        seeds=seeds,
        rows=_ROWS,
        sensors=sensors,
        percent=percent,
        provenance=_provenance(results[0]),
    )


def _task(result: EvaluationResult, log: Log) -> dict[str, Any]:
    """The template's data of one task."""
    data = result.summary()
    low, high = data["success_ci"]
    wins = f"{sum(episode.success for episode in result.episodes)} of {len(result.episodes)}"
    label = f"Success {data['success']:.0%}, 95 % interval {low:.0%} to {high:.0%}"
    shown = films(result.task, result.episodes, result.controller.exec_horizon)
    return {
        "slug": _slug(result.task),
        "name": _short(result.task),
        "percent": f"{100 * data['success']:.0f}",
        "wins": f"{wins}; {100 * low:.0f} to {100 * high:.0f} %",
        "interval": charts.interval_bar(data["success"], low, high, label),
        "facts": _facts(result, data),
        "films": [film_data(film) for film in shown],
        "drawn": any(film.views for film in shown),
        "hint": result.rendering_hint,
        "fans": _fans(shown),
        "candidates": result.controller.candidates,
        "rule": result.controller.selection.rule,
        "training": training_curves(log),
        "speed": _speed(result),
        "rows": [_row(episode) for episode in result.episodes],
        "died": (*result.lost, *result.crashes),
        "lost": len(result.lost),
    }


def _facts(result: EvaluationResult, data: Mapping[str, Any]) -> list[dict[str, str]]:
    names = ("name", "value", "unit", "interval", "note")
    score, score_ci = f"{data['score']:.3f}", _range(data["score_ci"], "{:.2f}")
    facts = [
        ("Score", score, "", score_ci, "best progress in an episode"),
        ("Jerk", charts.number(data["jerk"]), "", _range(data["jerk_ci"], "{:.3f}"), "roughness of the motion"),
        (
            "Mode switches",
            f"{data['mode_switches']:.1f}",
            "",
            _range(data["mode_switches_ci"], "{:.1f}"),
            f"an episode; {data['avoidable_switches']:.1f} avoidable",
        ),
        (
            "Time to a plan",
            _ms(data["latency_ms"]["p50"]),
            "ms",
            f"p99 {_ms(data['latency_ms']['p99'])} ms",
            f"{result.controller.candidates} candidates, one thread",
        ),
    ]
    if all(episode.score == float(episode.success) for episode in result.episodes):  # the score says nothing more
        lengths = [float(episode.success_step) for episode in result.episodes if episode.success_step is not None]
        count, interval = f"{metrics.mean(lengths):.0f}", _range(metrics.bootstrap_interval(lengths), "{:.0f}")
        steps = (count, "", interval) if lengths else ("none", "", "")
        facts[0] = ("Steps to success", *steps, "in episodes that succeed")
    return [dict(zip(names, fact, strict=True)) for fact in facts]


def _fans(shown: Sequence[Film]) -> list[dict[str, Any]]:
    cells = []
    for film, view, fan in telling_fans(shown):
        modes = int(fan.modes.max()) + 1
        cells.append(
            {
                "drawing": fan_picture(film, view, fan),
                "seed": film.episode.seed,
                "step": fan.step,
                "modes": f"{modes} mode{'s' * (modes > 1)}",
                "view": "" if len(film.views) == 1 else view.title.lower(),
            }
        )
    return cells


def training_curves(log: Log) -> dict[str, Any] | None:
    """Charts of what training logged, for the macro `training`; None: nothing was."""

    def curve(key: str, name: str, css: str) -> Series:
        rows = [
            row for row in log if isinstance(row.get(key), int | float) and isinstance(row.get("seconds"), int | float)
        ]
        return Series(name, [row["seconds"] / 60 for row in rows], [row[key] for row in rows], css)

    axis = "minutes of training"
    losses = [curve("loss", "training", "s0"), curve("val_loss", "validation", "s1")]
    rates = [curve("rejection_rate", "rejected", "s0"), curve("fallback_rate", "fallback", "s1")]
    success = [curve("success", "success", "s0"), curve("score", "score", "s1")]
    drawn = [
        ("Loss", charts.line_chart(losses, "Loss", axis, log_y=True)),
        ("Rejection", charts.line_chart(rates, "Rejection", axis, percent=True)),
        ("Success on the way", charts.line_chart(success, "Success on the way", axis, percent=True)),
        ("Rejection threshold", charts.line_chart([curve("threshold", "threshold", "s0")], "Threshold", axis)),
    ]
    found = [(name, chart) for name, chart in drawn if chart]
    return {"steps": max(int(row.get("step", 0)) for row in log), "charts": found} if found else None


def _speed(result: EvaluationResult) -> dict[str, Any] | None:
    values = [value for episode in result.episodes for value in episode.latency_ms]
    if not values:
        return None
    p50, p99 = metrics.percentile(values, 50), metrics.percentile(values, 99)
    label = f"Time to a plan: median {p50:.2f} ms, p99 {p99:.2f} ms"
    marks = [(f"p50 {_ms(p50)}", p50), (f"p99 {_ms(p99)}", p99)]
    jerks = [episode.jerk for episode in result.episodes]
    mean_jerk = metrics.mean(jerks)
    mean = [(f"mean {charts.number(mean_jerk)}", mean_jerk)]
    drawn = [
        ("Time to a plan", charts.histogram(values, label, "ms a replan", marks)),
        ("Success by step", _success_by_step(result)),
        ("Jerk", charts.histogram(jerks, "Jerk of each episode", "jerk of an episode", mean)),
    ]
    due = 1000 / result.fps * result.controller.exec_horizon if result.fps else 0.0
    words = f"{len(values):,} replans of {result.controller.candidates} candidates each, one due every {_ms(due)} ms."
    return {"words": words, "charts": drawn}


def _success_by_step(result: EvaluationResult) -> str:
    """Share of episodes that had succeeded by each step."""
    solved = sorted(episode.success_step for episode in result.episodes if episode.success_step is not None)
    last = max(episode.steps for episode in result.episodes)
    x, y = [0.0], [0.0]
    for count, step in enumerate(solved):
        x += [float(step), float(step)]
        y += [count / len(result.episodes), (count + 1) / len(result.episodes)]
    curve = Series("succeeded", [*x, float(last)], [*y, y[-1]], "s0")
    return charts.line_chart(
        [curve], "Share of episodes that had succeeded, by step", "control steps", percent=True, top=1.0
    )


def _row(e: EpisodeResult) -> dict[str, Any]:
    return {
        "seed": e.seed,
        "success": e.success,
        "score": e.score,
        "filled": f"{100 * min(1.0, max(0.0, e.score)):.0f}",
        "steps": e.steps,
        "jerk": e.jerk,
        "switches": e.mode_switches,
        "modes": e.modes,
        "plan": _ms(metrics.percentile(e.latency_ms, 50)),
    }


def _provenance(result: EvaluationResult) -> list[tuple[str, Any]]:
    info = result.info
    machine = info.get("machine", {})
    controller = f"{result.controller.candidates} candidates, {result.controller.exec_horizon} steps executed a plan, "
    controller += f"selection {result.controller.selection.rule}"
    return [
        ("Command", info.get("command", "")),
        ("Date", info.get("date", "")),
        ("Machine", f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())),
        ("Controller", controller),
    ]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 20 else f"{value:.0f}"


def _range(interval: Sequence[float], form: str) -> str:
    low, high = (form.format(value) for value in interval)
    return f"{low} to {high}"


def _short(task: str) -> str:
    """Push-T and MetaWorld by the names people know."""
    if task.startswith("pusht"):
        return "Push-T" + (f" ({task.removeprefix('pusht-')})" if task != "pusht" else "")
    name = task.removeprefix("metaworld-").replace("-", " ")
    return name[:1].upper() + name[1:]


def _slug(task: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in task)
