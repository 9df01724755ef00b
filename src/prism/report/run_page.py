"""report.html: one page that opens from disk, with no network and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.play import TEST_SEED
from prism.evaluation.results import EpisodeResult, EvaluationResult, write_atomic
from prism.report import charts
from prism.report.charts import Series, page
from prism.report.player import Film, fan_picture, films, player, telling_fans

Log = Sequence[Mapping[str, Any]]  # the lines of a run's log.jsonl
_ROWS = 20  # of the table of episodes; report.css hides the others until they are asked for


def write_report(
    path: Path,
    results: Sequence[EvaluationResult],
    logs: Mapping[str, Log] | None = None,
    title: str = "PRISM evaluation",
    overwrite: bool = True,
    overview: str = "",
) -> Path:
    """Write the page. `logs` holds, by task, what training logged (prism.training.log.read_log).

    `overview` is HTML above the tasks: a benchmark's own table (research/benchmark.py), which replaces their cards.
    It is made from recordings, so by default an older page is replaced: it can be made again at any time.
    """
    if not results:
        raise PrismError(f"{path}: there is no evaluation to report on; run prism eval first")
    write_atomic(path, render(results, logs or {}, title, overview).encode(), overwrite)
    return path


def render(results: Sequence[EvaluationResult], logs: Mapping[str, Log], title: str, overview: str = "") -> str:
    script = (resources.files("prism") / "assets" / "report.js").read_text()
    several = len(results) > 1
    links = "".join(f'<a href="#{_slug(r.task)}">{escape(_short(r.task))}</a>' for r in results)
    navigation = f'<nav aria-label="Tasks">{links}</nav>' if several and not overview else ""
    cards = "".join(_card(result) for result in results)
    cards = overview or f'<div class="cards{" one" * (not several)}">{cards}</div>'
    sections = "".join(_section(result, logs.get(result.task, ())) for result in results)
    header = f'<header class="top"><div class="wrap"><span class="brand">{_LOGO}PRISM</span>{navigation}</div></header>'
    content = f"{cards}\n{sections}"
    return page(title, _lead(results), content, _provenance(results[0]), header=header, script=script)


def _lead(results: Sequence[EvaluationResult]) -> str:
    seeds = sorted({result.first_seed for result in results})
    unseen = " the policy has never seen" * (seeds[0] >= TEST_SEED)  # demonstrations are recorded below
    episodes = sum(len(result.episodes) for result in results)
    tasks = "one task" if len(results) == 1 else f"{len(results)} tasks"
    return (
        f"{episodes} episodes of {tasks}, on starting positions{unseen} (seeds from {', '.join(map(str, seeds))}). "
        "Each plan comes from a single pass of the network; intervals are 95 %."
    )


def _card(result: EvaluationResult) -> str:
    data = result.summary()
    low, high = data["success_ci"]
    wins = f"{sum(episode.success for episode in result.episodes)} of {len(result.episodes)}"
    label = f"Success {data['success']:.0%}, 95 % interval {low:.0%} to {high:.0%}"
    facts = [
        ("Score", f"{data['score']:.3f}", _range(data["score_ci"], "{:.2f}"), "best progress in an episode"),
        ("Jerk", charts.number(data["jerk"]), _range(data["jerk_ci"], "{:.3f}"), "roughness of the motion"),
        (
            "Mode switches",
            f"{data['mode_switches']:.1f}",
            _range(data["mode_switches_ci"], "{:.1f}"),
            f"an episode; {data['avoidable_switches']:.1f} avoidable",
        ),
        (
            "Time to a plan",
            f"{_ms(data['latency_ms']['p50'])}<small> ms</small>",
            f"p99 {_ms(data['latency_ms']['p99'])} ms",
            f"{result.controller.candidates} candidates, one thread",
        ),
    ]
    if all(episode.score == float(episode.success) for episode in result.episodes):  # the score says nothing more
        lengths = [float(episode.success_step) for episode in result.episodes if episode.success_step is not None]
        count, interval = f"{metrics.mean(lengths):.0f}", _range(metrics.bootstrap_interval(lengths), "{:.0f}")
        facts[0] = ("Steps to success", *((count, interval) if lengths else ("none", "")), "in episodes that succeed")
    tiles = "".join(
        f'<div class="fact"><dt>{name}</dt><dd><b>{value}</b> <span class="ci">{interval}</span>'
        f'<span class="note">{note}</span></dd></div>'
        for name, value, interval, note in facts
    )
    return f"""<article class="card">
<h2><a href="#{_slug(result.task)}">{escape(_short(result.task))}</a></h2>
<p class="big"><b>{100 * data["success"]:.0f}<small> %</small></b>
<span>success<br><span class="ci">{wins}; {100 * low:.0f} to {100 * high:.0f} %</span></span></p>
{charts.interval_bar(data["success"], low, high, label)}
<dl>{tiles}</dl>
</article>"""


def _section(result: EvaluationResult, log: Log) -> str:
    shown = films(result.task, result.episodes, result.controller.exec_horizon)
    parts = [_watch(result, shown), _fans(result, shown), training_curves(log), _latency(result), _table(result)]
    heading = f"<h2>{escape(_short(result.task))}</h2>"
    return f'<section class="task" id="{_slug(result.task)}">{heading}{"".join(parts)}</section>'


def _watch(result: EvaluationResult, shown: Sequence[Film]) -> str:
    hint = f'<p class="hint">{escape(result.rendering_hint)}</p>' if result.rendering_hint else ""
    if not shown:
        return hint
    slug = _slug(result.task)
    tabs, panels = [], []
    for i, film in enumerate(shown):
        name = f"{slug}-{film.episode.seed}"
        mark = _mark(film.episode.success)
        tabs.append(
            f'<button type="button" role="tab" id="{name}-tab" aria-controls="{name}-panel" '
            f'aria-selected="{"true" if i == 0 else "false"}">{mark}seed {film.episode.seed}</button>'
        )
        hidden = "" if i == 0 else " hidden"
        panels.append(
            f'<div role="tabpanel" id="{name}-panel" aria-labelledby="{name}-tab"{hidden}>{player(film, name)}</div>'
        )
    rows = f'<div class="tabs" role="tablist" aria-label="Recorded episodes">{"".join(tabs)}</div>{"".join(panels)}'
    return f'<h3>Watch it</h3><div class="panel">{rows}{_legend(shown)}{hint}</div>'


def _legend(shown: Sequence[Film]) -> str:
    if not any(film.views for film in shown):
        return ""
    return (
        '<p class="legend scene-key"><span class="key hand">robot</span><span class="key object">object</span>'
        '<span class="key goal">goal</span><span class="key chosen">chosen plan</span>'
        '<span class="key m0">candidates, coloured by mode</span></p>'
    )


def _fans(result: EvaluationResult, shown: Sequence[Film]) -> str:
    cells = []
    for film, view, fan in telling_fans(shown):
        modes = int(fan.modes.max()) + 1
        caption = f"seed {film.episode.seed}, step {fan.step}: <b>{modes} mode{'s' * (modes > 1)}</b>"
        extra = "" if len(film.views) == 1 else f", {escape(view.title.lower())}"
        cells.append(f"<figure>{fan_picture(film, view, fan)}<figcaption>{caption}{extra}</figcaption></figure>")
    if not cells:
        return ""
    text = (
        f"All {result.controller.candidates} candidates of the replans where they differ most. The dark line is the "
        f"one chosen (rule: {escape(result.controller.selection.rule)}), solid as far as it is executed."
    )
    return f'<h3>Candidate fans</h3><p>{text}</p><div class="fans">{"".join(cells)}</div>'


def training_curves(log: Log) -> str:
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
    cells = "".join(f'<figure class="panel"><h4>{name}</h4>{chart}</figure>' for name, chart in drawn if chart)
    if not cells:
        return ""
    steps = max((int(row.get("step", 0)) for row in log), default=0)
    return f'<h3>Training</h3><p>{steps:,} steps.</p><div class="charts">{cells}</div>'


def _latency(result: EvaluationResult) -> str:
    values = [value for episode in result.episodes for value in episode.latency_ms]
    if not values:
        return ""
    p50, p99 = metrics.percentile(values, 50), metrics.percentile(values, 99)
    label = f"Time to a plan: median {p50:.2f} ms, p99 {p99:.2f} ms"
    marks = [(f"p50 {_ms(p50)}", p50), (f"p99 {_ms(p99)}", p99)]
    jerks = [episode.jerk for episode in result.episodes]
    mean_jerk = metrics.mean(jerks)
    drawn = (
        ("Time to a plan", charts.histogram(values, label, "ms a replan", marks)),
        ("Success by step", _success_by_step(result)),
        (
            "Jerk",
            charts.histogram(
                jerks, "Jerk of each episode", "jerk of an episode", [(f"mean {charts.number(mean_jerk)}", mean_jerk)]
            ),
        ),
    )
    due = 1000 / result.fps * result.controller.exec_horizon if result.fps else 0.0
    text = f"{len(values):,} replans of {result.controller.candidates} candidates each, one due every {_ms(due)} ms."
    panels = "".join(f'<figure class="panel"><h4>{name}</h4>{chart}</figure>' for name, chart in drawn)
    return f'<h3>Speed and smoothness</h3><p>{text}</p><div class="charts">{panels}</div>'


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


def _table(result: EvaluationResult) -> str:
    """Every episode. Beyond _ROWS they wait for a checkbox that says how many; it needs no script."""
    names = ("Seed", "Success", "Score", "Steps", "Jerk", "Switches", "Modes", "Plan, ms")
    table = charts.table(names, [_row(episode) for episode in result.episodes], "Table of episodes", sortable=True)
    more = ""
    if (total := len(result.episodes)) > _ROWS:
        text = f"Show all {total} episodes ({total - _ROWS} are hidden otherwise)"
        more = f'<label class="more"><input type="checkbox"> {text}</label>'
    died = "".join(f"<li>{escape(line)}</li>" for line in (*result.lost, *result.crashes))
    lost = f"; {len(result.lost)} episodes were lost, and are in no figure" * bool(result.lost)
    note = f'<p class="hint">Workers that died{lost}:</p><ul class="hint">{died}</ul>' * bool(died)
    return f'<h3>Episodes</h3><div class="rows">{table}{more}</div>{note}'


def _row(e: EpisodeResult) -> list[str]:
    filled = 100 * min(1.0, max(0.0, e.score))
    return [
        str(e.seed),
        f'<td data-v="{int(e.success)}">{_mark(e.success)}{"yes" if e.success else "no"}</td>',
        f'<td data-v="{e.score:.4f}"><span class="meter"><i style="width:{filled:.0f}%"></i></span>{e.score:.3f}</td>',
        *(str(e.steps), f"{e.jerk:.3f}", str(e.mode_switches), f"{e.modes:.1f}"),
        _ms(metrics.percentile(e.latency_ms, 50)),
    ]


def _provenance(result: EvaluationResult) -> str:
    info = result.info
    machine = info.get("machine", {})
    controller = f"{result.controller.candidates} candidates, {result.controller.exec_horizon} steps executed a plan, "
    controller += f"selection {result.controller.selection.rule}"
    rows = [
        ("Command", info.get("command", "")),
        ("Date", info.get("date", "")),
        ("Machine", f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())),
        ("Controller", controller),
    ]
    items = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in rows if value)
    definitions = (
        "Jerk: mean norm of the third difference of the executed actions, in units of half the demonstrations' range. "
        "Mode switch: a new plan farther than the mode radius from what was left of the old one; avoidable when "
        "another candidate was nearer. Success: Wilson interval; other means: bootstrap over episodes. All of it "
        "exactly: docs/reference/metrics.md."
    )
    return f"<dl>{items}</dl><p>{escape(definitions)}</p>"


def _mark(success: bool) -> str:
    path = "M3.5 8.5l3 3 6-7" if success else "M4.5 4.5l7 7m0-7l-7 7"
    css = "mark-yes" if success else "mark-no"
    return f'<svg class="{css}" viewBox="0 0 16 16" aria-hidden="true"><path d="{path}"/></svg>'


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


_LOGO = (
    '<svg viewBox="0 0 40 24" aria-hidden="true"><path class="ray" d="M0 15L13 12"/><path d="M18 3L28 21H8z"/>'
    '<path class="m0" d="M22 11L40 7"/><path class="m2" d="M22.5 12L40 12"/><path class="m1" d="M23 13L40 17"/></svg>'
)
