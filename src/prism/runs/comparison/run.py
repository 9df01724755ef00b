"""The whole comparison: cells that are missing are run, then everything that is there is summed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from prism.errors import PrismError
from prism.rollout.results import write_json
from prism.runs.comparison.grid import CellId, CompareConfig, prepare, state_of
from prism.runs.comparison.local import run_local
from prism.runs.comparison.page import write_page
from prism.runs.comparison.summary import Comparison, summarise
from prism.training.signals import exclusive

JSON, PAGE = "comparison.json", "comparison.html"

# Runs cells, calls back after each that is done, returns the reasons of those that came to nothing.
Runner = Callable[[Path, Sequence[CellId], int, Console, Callable[[CellId], object]], dict[CellId, str]]


def compare(
    out: Path,
    config: CompareConfig,
    jobs: int,
    console: Console,
    runner: Runner = run_local,
    trained: Path | None = None,
) -> Comparison:
    """Run what is missing in `out`, `jobs` cells at a time; comparison.json and .html are renewed after each cell.

    Calling it again, after whatever ended the last call, goes on where that was; a larger grid adds to it. `trained`:
    another comparison's folder, whose finished trainings are taken: there is only evaluating to do.
    """
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out):
        ids = prepare(out, config, console, trained)
        todo = [id for id in ids if state_of(id.folder(out))[0] != "done"]
        kept = f", {len(ids) - len(todo)} done before" if len(todo) < len(ids) else ""
        at_once = f"{jobs} at a time" if jobs else "one a free processor of the cluster"
        console.print(
            f"compare: {len(ids)} cells of {config.budget}{kept}, {at_once} -> {out}",
            highlight=False,
            soft_wrap=True,
        )
        failed: dict[CellId, str] = {}
        if todo:
            write_summary(out, config, {}, console)
            failed = runner(out, todo, jobs, console, lambda _: write_summary(out, config, {}, console))
        return write_summary(out, config, failed, console)


def write_summary(out: Path, config: CompareConfig, failed: Mapping[CellId, str], console: Console) -> Comparison:
    """What is there now, as comparison.json and comparison.html; a full disk must not end the comparison."""
    comparison = summarise(out, config, failed)
    try:
        write_json(out / JSON, comparison.to_json(), overwrite=True)
        write_page(out / PAGE, comparison)
    except PrismError as error:
        console.print(f"warning: {error}", highlight=False, markup=False, soft_wrap=True)
    return comparison
