"""How far a long piece of work is: a bar on a terminal, and in a log file a line now and then."""

from __future__ import annotations

import time
from typing import Any

from rich import progress
from rich.console import Console

LINE_SECONDS = 10.0


class Bar(progress.Progress):
    """rich's, which shows nothing in a file before the work is over."""

    def __init__(self, *columns: progress.ProgressColumn, **settings: Any) -> None:
        super().__init__(*columns, **settings)
        self._said = time.monotonic()

    def update(self, task_id: progress.TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.disable or self.console.is_terminal or time.monotonic() - self._said < LINE_SECONDS:
            return
        self._said = time.monotonic()
        task = self.tasks[self.task_ids.index(task_id)]
        of = "" if task.total is None else f" of {task.total:g}"
        words = [
            f"{task.description}, {task.completed:g}{of}",
            *(f"{key} {value}" for key, value in task.fields.items()),
        ]
        self.console.print(", ".join(words), highlight=False, markup=False)


def short_bar(console: Console, words: str = "{task.fields[text]}") -> progress.Progress:
    """A title, a short bar and words. Nothing in a file: its owner knows better which lines are worth writing there."""
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=20), progress.TextColumn(words))
    return progress.Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal)
