"""The table of tasks: name -> environment, expert, and how it is learned.

Every row comes from a package that adds it by an entry point of the group prism.tasks: prism-sims, or one of yours
(examples/my_task, docs/howto/extend.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism_client import ActionKind

from prism.errors import PrismError
from prism.io.plugins import Table
from prism.sims.environment import Env, Expert, NoExpertError

if TYPE_CHECKING:
    from prism.data.episodes import EpisodeSource


@dataclass(frozen=True)
class Task:
    """A row of the table. Simulators know no policy, so its recipe is a name: a key of runs/recipes.RECIPES."""

    env: Callable[[], Env]
    expert: Callable[[Any], Expert] | None = None  # of that environment; None: nothing here can demonstrate it
    recipe: str = "state"
    actions: ActionKind = ActionKind.ABSOLUTE
    grippers: tuple[int, ...] = ()  # entries of an action that are not motion
    packages: tuple[str, ...] = ()  # whose versions determine the physics
    remedy: str = "train on a recording of it (prism train PATH)"  # where there is no expert
    scene: Callable[[], Any] | None = None  # how a report draws its states: a report.player.Scene
    # recordings of its states -> what its environment shows of them, and their mirror images if asked for
    as_shown: Callable[[EpisodeSource, str, bool], EpisodeSource] | None = None
    # what in such recordings speaks against the task
    contradictions: Callable[[EpisodeSource], list[str]] | None = None
    text: str = ""  # what to do, in words; "": its name (prism.sims.view)
    group: str = ""  # the part of its benchmark that it belongs to, for means
    first_seed: int = 0  # of its demonstrations: tasks that share scenes begin apart, one policy sees all of them
    # steps that its demonstrations go on after success: where success is to be at a point, it must be seen how to stop
    beyond: int = 0
    quick: bool = True  # twenty demonstrations are recorded before a second process has started


TASKS: Table[Task] = Table("prism.tasks", "task", {}, remedy="the simulators are in packages/prism-sims")


def task_names() -> tuple[str, ...]:
    """Every task that make_env knows; needs no simulator installed."""
    return tuple(TASKS)


def make_env(name: str) -> Env:
    return TASKS[name].env()


def make_expert(name: str, env: Env) -> Expert:
    """The expert of a task, acting in `env`, which make_env(name) made."""
    task = TASKS[name]
    if env.name != name:
        raise PrismError(f"the expert of '{name}' cannot act in '{env.name}': pass make_env('{name}')")
    if task.expert is None:
        raise NoExpertError(f"'{name}' has no scripted expert: {task.remedy}")
    return task.expert(env)
