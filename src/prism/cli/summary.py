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

    table = Table(box=None, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column("task", no_wrap=True)
    for name in ("success [95 %]", "of", "score", "jerk", "p50, p99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        row = result.summary()
        low, high = row["success_ci"]
        latency = row["latency_ms"]
        table.add_row(
            result.task,
            f"{row['success']:.0%} [{low * 100:.0f}, {high * 100:.0f}]",
            str(row["episodes"]),
            f"{row['score']:.3f}",
            f"{row['jerk']:.4f}",
            f"{latency['p50']:.1f}, {latency['p99']:.1f}",
        )
    console = Console()
    console.print(table)
    for hint in dict.fromkeys(result.rendering_hint for result in results if result.rendering_hint):
        console.print(f"no pictures of the scenes: {hint}", highlight=False, markup=False, soft_wrap=True)
    for crash in (line for result in results for line in result.crashes):
        console.print(f"a rollout process died and was replaced: {crash}", highlight=False, markup=False)
