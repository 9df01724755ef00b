"""The figure of the README, drawn from the results files.

Try:
    python -m research overview --plot docs/images/results.svg --overwrite

Keys: `panels`, a list of {title, note, file, unit, rows: {label: {mean, trainings, interval}}}. A bar is a mean, a dot
is one training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from prism.errors import PrismError
from prism.evaluation.results import run_info
from research.report import Drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "prism": "PRISM",
    "flow_matching": "flow matching",
    "flow_matching_4": "flow matching, 4 actions",
    "act": "ACT",
    "diffusion": "diffusion",
    "diffusion_sample": "diffusion (predicts the plan)",
    "imle": "IMLE Policy",
    "diffusion_nfe10": "diffusion, 10 passes",
    "flow_matching_nfe5": "flow matching, 5 passes",
}
OURS, THEIRS = "#2f6fde", "#9aa3b2"


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    pass


@dataclass(frozen=True)
class Panel:
    """One results file as rows of the figure."""

    title: str
    note: str  # what it shows, and under which conditions
    file: str
    rows: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    unit: str = "success, %"


def _trainings(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A table with one value a training."""
    return {
        method: {"mean": 100 * sum(values) / len(values), "trainings": [100 * value for value in values]}
        for method, values in data["success"].items()
    }


def _means(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A table of many tasks: the mean over them."""
    return {method: {"mean": 100 * mean["all"], "trainings": []} for method, mean in data["mean_by_method"].items()}


def _senses(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for sense, task in data["tasks"].items():
        for key, label in (("all", f"{sense}: with it"), ("without", f"{sense}: trained without")):
            low, high = task[key]["ci"]
            rows[label] = {"mean": 100 * task[key]["success"], "trainings": [], "interval": [100 * low, 100 * high]}
    return rows


def _ratios(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {"prism": 1.0, **{name: data["ratio"][name] for name in ("act", "flow_matching_nfe5", "diffusion_nfe10")}}
    return {name: {"mean": mean, "trainings": []} for name, mean in rows.items()}


PANELS = (
    Panel("Human Push-T", "30 CPU minutes, 100 unseen episodes a training", "pusht_human_fresh.json", _trainings),
    Panel(
        "MetaWorld, 12 tasks, from the true state",
        "one CPU minute, three trainings; execution tuned for PRISM alone",
        "metaworld_methods.json",
        _means,
    ),
    Panel("A simulated arm that needs a sense", "one CPU minute, three trainings", "senses.json", _senses),
    Panel(
        "Time to a plan, paper's size", "of PRISM's eight plans, on two cores", "bench_latency.json", _ratios, "times"
    ),
)


def run(config: Config, console: Console) -> dict[str, Any]:
    found = []
    for panel in PANELS:
        path = RESULTS / panel.file
        try:
            rows = panel.rows(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError) as error:
            raise PrismError(
                f"{path}: {type(error).__name__}: {error}; make it again with its command in RESULTS.md"
            ) from None
        named = {NAMES.get(name, name): row for name, row in rows.items()}
        found.append({"title": panel.title, "note": panel.note, "file": panel.file, "unit": panel.unit, "rows": named})
    return {"panels": found, **run_info(0)}


def show(result: dict[str, Any], console: Console) -> None:
    for panel in result["panels"]:
        console.print(f"[bold]{panel['title']}[/] ({panel['note']}; {panel['file']})", highlight=False)
        for label, row in panel["rows"].items():
            console.print(f"  {label:32} {row['mean']:6.1f} {panel['unit']}", highlight=False)


def draw(result: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, result["panels"], strict=True):
        labels = list(panel["rows"])[::-1]
        for height, label in enumerate(labels):
            row = panel["rows"][label]
            colour = OURS if label == "PRISM" or label.endswith("with it") else THEIRS
            axes.barh(height, row["mean"], color=colour, height=0.62, alpha=0.85)
            axes.plot(row["trainings"], [height] * len(row["trainings"]), "o", color="black", markersize=3.5)
            if interval := row.get("interval"):
                axes.plot(interval, [height, height], color="black", linewidth=1.2)
            end = max([row["mean"], *row["trainings"], *row.get("interval", [])])
            axes.annotate(
                f"{row['mean']:.3g}", (end, height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.set_xlim(0, 112 if panel["unit"].startswith("success") else None)
        axes.set_title(f"{panel['title']}\n", loc="left", fontsize=11, fontweight="bold")
        axes.annotate(
            panel["note"], (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8.5
        )
        axes.set_xlabel(panel["unit"] if panel["unit"] != "times" else "times PRISM's", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
