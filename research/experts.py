"""How often the scripted experts of a simulator succeed: the ceiling of imitation. Records a dataset of each task.

Try:
    python -m research experts metaworld --episodes 20 --failures --json experts.json
    python -m research experts 'metaworld-*-wall' --episodes 5
    python -m research experts robosuite --episodes 50 --episodes-of robosuite-transport=6 --failures

    success.TASK, attempts.TASK    of the attempts from seed on; with --failures exactly --episodes of them
    mean.GROUP, mean.all           means of the tasks' rates

A task's dataset goes to OUT/TASK. One that is there, of the same settings, is not recorded again: interrupted, the same
command goes on.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional

from prism.cli.style import option
from prism.data.formats.store import StoreSource, is_store
from prism.errors import PrismError
from prism.evaluation.metrics import wilson_interval
from prism.evaluation.results import run_info
from prism.sims.collect import TooFewError, collect, cores, settings
from prism.sims.environment import NoExpertError
from prism.sims.task_table import TASKS, task_names
from research.report import Written, show_rows

VARIANTS = (
    "-pixels",
    "-rgbd",
    "-keypoints",
    "-edge",
    "-state",
)  # other sensors or starts: only where asked for


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    tasks: Positional[str]
    """A simulator (metaworld: its tasks without their variants for pixels), or a pattern (metaworld-*-pixels)."""
    episodes: int = 20
    """Successful episodes of each task."""
    episodes_of: Annotated[tuple[str, ...], option("TASK=N")] = ()
    """Another number for some tasks."""
    out: Annotated[Path, option("FOLDER")] = Path("data")
    """The datasets go to FOLDER/TASK."""
    seed: int = 0
    """Of the first attempt; each one has its own."""
    noise: float = 0.0
    """As in prism data collect."""
    failures: bool = False
    """Keep attempts that fail as well: --episodes attempts, whatever becomes of them."""
    workers: Annotated[int | None, option("N")] = None
    """Processes; default: one a core."""

    def episodes_by_task(self) -> dict[str, int]:
        names = tasks_of(self.tasks)
        wanted = dict.fromkeys(names, self.episodes)
        for word in self.episodes_of:
            task, _, number = word.partition("=")
            if task not in wanted or not number.isdecimal() or int(number) < 1:
                raise PrismError(f"--episodes-of {word}: use TASK=NUMBER, with one of {', '.join(names)}")
            wanted[task] = int(number)
        return wanted


@dataclass(frozen=True)
class Row:
    task: str
    successes: int
    attempts: int
    error: str = ""  # why there is no dataset

    @property
    def success(self) -> float:
        return self.successes / self.attempts if self.attempts else 0.0


def tasks_of(pattern: str) -> tuple[str, ...]:
    """The tasks of a simulator by its name ("metaworld"), or those that match a pattern ("metaworld-*-pixels")."""
    wanted = pattern if "*" in pattern else f"{pattern}-*"
    plain = not pattern.endswith(VARIANTS)
    found = [name for name in task_names() if fnmatch.fnmatchcase(name, wanted) or name == pattern]
    names = [name for name in found if not (plain and name.endswith(VARIANTS))]
    if not names:
        known = ", ".join(dict.fromkeys(name.partition("-")[0] for name in task_names()))
        raise PrismError(f"no task matches '{pattern}': use a simulator ({known}) or a pattern like 'metaworld-*-wall'")
    return tuple(names)


def run(config: Config, console: Console) -> dict[str, Any]:
    wanted = config.episodes_by_task()
    there = {task: _recorded(config, task, wanted[task]) for task in wanted if not config.overwrite}
    rows = [there.get(task) or _record(config, task, episodes, console) for task, episodes in wanted.items()]
    return {**table(rows), "missing": [row.error for row in rows if row.error], **run_info(config.seed)}


def _recorded(config: Config, task: str, episodes: int) -> Row | None:
    """The row of a dataset that is there, if it is the one that would be recorded."""
    path = config.out / task
    if not path.exists():
        return None
    wanted = settings(task, episodes, config.seed, config.noise, config.failures)
    found = StoreSource(path).provenance if is_store(path) else {}
    if not found.keys() >= {"successes", "attempts"} or any(found.get(key) != wanted[key] for key in wanted):
        raise PrismError(f"{path} exists already and is another recording: choose another --out, or pass --overwrite")
    return Row(task, int(found["successes"]), int(found["attempts"]))


def _record(config: Config, task: str, episodes: int, console: Console) -> Row:
    try:
        done = collect(
            task, episodes, config.out / task, seed=config.seed, console=console, overwrite=config.overwrite,
            workers=config.workers or cores(), noise=config.noise, failures=config.failures,
        )  # fmt: skip
    except TooFewError as error:  # the other tasks are recorded all the same
        return Row(task, error.successes, error.attempts, str(error))
    except NoExpertError as error:
        return Row(task, 0, 0, str(error))
    return Row(task, done.successes, done.attempts)


def table(rows: Sequence[Row]) -> dict[str, float]:
    """Of the tasks that were tried: one without an expert has no rate."""
    rows = [row for row in rows if row.attempts]
    figures: dict[str, float] = {f"success.{row.task}": row.success for row in rows}
    figures |= {f"attempts.{row.task}": row.attempts for row in rows}
    for group in dict.fromkeys(TASKS[row.task].group for row in rows):
        members = [row.success for row in rows if TASKS[row.task].group == group]
        if group:
            figures[f"mean.{group}"] = sum(members) / len(members)
    if rows:
        figures["mean.all"] = sum(row.success for row in rows) / len(rows)
    return figures


def show(result: dict[str, Any], console: Console) -> None:
    shown = []
    for key, attempts in result.items():
        if key.startswith("attempts."):
            task = key.removeprefix("attempts.")
            success = result[f"success.{task}"]
            low, high = wilson_interval(round(success * attempts), attempts)
            shown.append([task, f"{success:.0%} [{low * 100:.0f}, {high * 100:.0f}]", str(attempts)])
    shown += [[f"mean, {key[5:]}", f"{value:.1%}", ""] for key, value in result.items() if key.startswith("mean.")]
    show_rows("experts", ("expert of", "success [95 %]", "attempts"), shown, console)


def check(result: dict[str, Any]) -> None:
    if result["missing"]:
        raise PrismError(f"{result['missing'][0]} ({len(result['missing'])} tasks have no dataset)")
