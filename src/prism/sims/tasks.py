"""The table of tasks: name -> environment, expert, and how it is learned. A new simulator is a family of rows here; a
task of another package is an entry point of the group prism.tasks (examples/my_task)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

from prism.errors import PrismError
from prism.io.plugins import Table
from prism.sims import calvin_checkout, metaworld, robosuite, tabletop
from prism.sims.base import Env, Expert, NoExpertError
from prism.sims.pusht_features import VARIANTS


@dataclass(frozen=True)
class Task:
    """A row of the table. Simulators know no policy, so its recipe is a name: a key of runs/recipes.RECIPES."""

    env: Callable[[], Env]
    expert: Callable[[Any], Expert] | None = None  # of that environment; None: nothing here can demonstrate it
    recipe: str = "state"
    actions: Literal["absolute", "delta"] = "absolute"  # does an action name a pose, or a change of pose?
    grippers: tuple[int, ...] = ()  # entries of an action that are no motion
    packages: tuple[str, ...] = ()  # whose versions determine the physics
    remedy: str = "train on a recording of it (prism train PATH)"  # where there is no expert


def _make(path: str, *arguments: Any) -> Any:
    """ "module:class", imported when it is needed: a simulator that is not installed is not missed before."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"prism.sims.{module}"), name)(*arguments)


def _family(names: Mapping[str, Any], env: str, **row: Any) -> dict[str, Task]:
    """Tasks of one simulator: a name -> what its environment is made with. `recipe`: one, or one for each variant."""
    expert = row.pop("expert", None)
    recipe = row.pop("recipe")
    rows = {}
    for name, made_with in names.items():
        arguments = made_with if isinstance(made_with, tuple) else (made_with,)
        rows[name] = Task(
            partial(_make, env, *arguments),
            None if expert is None else partial(_make, expert),
            recipe if isinstance(recipe, str) else recipe[arguments[-1]],
            **row,
        )
    return rows


_ARM = {"actions": "delta", "grippers": (6,), "packages": ("robosuite", "mujoco")}
_BY_INPUTS = {"state": "disturbed", "pixels": "pixels", "rgbd": "pixels"}

TASKS: Table[Task] = Table(
    "prism.tasks",
    "task",
    {
        **_family(
            {name: name for name in VARIANTS},
            "pusht:PushTEnv",
            expert="pusht_expert:PushTExpert",
            recipe={name: "pusht-edge" if name == "pusht-edge" else "pusht" for name in VARIANTS},
            packages=("gym-pusht", "pymunk"),
        ),
        **_family(
            metaworld.NAMES,
            "metaworld:MetaWorldEnv",
            expert="metaworld:MetaWorldExpert",
            recipe={**_BY_INPUTS, "state": "state"},
            actions="delta",
            grippers=(3,),
            packages=("metaworld", "mujoco"),
        ),
        **_family(
            {name: what for name, what in robosuite.NAMES.items() if what[0] != "transport"},
            "robosuite:RobosuiteEnv",
            expert="robosuite_expert:make_robosuite_expert",
            recipe=_BY_INPUTS,
            **_ARM,
        ),
        **_family(
            {name: what for name, what in robosuite.NAMES.items() if what[0] == "transport"},
            "robosuite:RobosuiteEnv",
            expert="robosuite_expert:make_robosuite_expert",
            recipe=_BY_INPUTS,
            **{**_ARM, "grippers": (6, 13)},  # two arms
        ),
        **_family(
            tabletop.NAMES,
            "tabletop:make_tabletop",
            expert="tabletop_expert:make_tabletop_expert",
            recipe=_BY_INPUTS,
            actions="delta",
            grippers=(3,),
            packages=("mujoco",),
        ),
        **_family(
            calvin_checkout.NAMES,
            "calvin:CalvinEnv",
            recipe="state",
            actions="delta",
            grippers=(6,),
            remedy="train on CALVIN's recordings (prism train CALVIN/training)",
        ),
    },
    also="metaworld-",
)


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
