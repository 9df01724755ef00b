"""The table at the end of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.evaluation.results import EvaluationResult


def print_summary(results: Sequence[EvaluationResult]) -> None:
    """One row a task: means, with 95 % intervals where they say how much to trust them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("task")
    for name in ("success", "score", "jerk", "switches", "plan p50", "p99", "episodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        row = result.summary()
        low, high = row["success_ci"]
        table.add_row(
            result.task,
            f"{row['success']:.0%} [{low:.0%}, {high:.0%}]",
            f"{row['score']:.3f}",
            f"{row['jerk']:.4f}",
            f"{row['mode_switches']:.1f}",
            f"{row['latency_ms']['p50']:.1f} ms",
            f"{row['latency_ms']['p99']:.1f} ms",
            str(row["episodes"]),
        )
    console = Console()
    console.print(table)
    for hint in dict.fromkeys(result.rendering_hint for result in results if result.rendering_hint):
        console.print(f"no pictures of the scenes: {hint}", highlight=False, markup=False, soft_wrap=True)
    for crash in (line for result in results for line in result.crashes):
        console.print(f"a rollout process died and was replaced: {crash}", highlight=False, markup=False)
