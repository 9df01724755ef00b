"""Task names -> environments and experts. A new simulator adds one line to each function."""

from __future__ import annotations

import difflib

from prism.errors import PrismError
from prism.sims import calvin_checkout, metaworld, robosuite, tabletop
from prism.sims.base import Env, Expert, NoExpertError
from prism.sims.pusht_features import VARIANTS


def task_names() -> tuple[str, ...]:
    """Every task that make_env knows; needs no simulator installed."""
    return (*VARIANTS, *metaworld.NAMES, *robosuite.NAMES, *tabletop.NAMES, *calvin_checkout.NAMES)


def make_env(name: str) -> Env:
    if name in VARIANTS:
        from prism.sims.pusht import PushTEnv

        return PushTEnv(name)
    if name in metaworld.NAMES:
        return metaworld.MetaWorldEnv(*metaworld.NAMES[name])
    if name in robosuite.NAMES:
        return robosuite.RobosuiteEnv(*robosuite.NAMES[name])
    if name in tabletop.NAMES:
        return tabletop.TabletopEnv(*tabletop.NAMES[name])
    if name in calvin_checkout.NAMES:
        from prism.sims.calvin import CalvinEnv

        return CalvinEnv(calvin_checkout.NAMES[name])
    raise _unknown(name)


def make_expert(name: str, env: Env) -> Expert:
    """The expert of a task, acting in `env`, which make_env(name) made."""
    if name not in task_names():
        raise _unknown(name)
    if env.name != name:
        raise PrismError(f"the expert of '{name}' cannot act in '{env.name}': pass make_env('{name}')")
    if name in calvin_checkout.NAMES:
        raise NoExpertError(
            f"'{name}' has no scripted expert: train on CALVIN's recordings (prism train CALVIN/training)"
        )
    if isinstance(env, metaworld.MetaWorldEnv):
        return metaworld.MetaWorldExpert(env)
    if name in robosuite.NAMES:
        from prism.sims.robosuite_expert import make_robosuite_expert

        assert isinstance(env, robosuite.RobosuiteEnv)
        return make_robosuite_expert(env)
    if isinstance(env, tabletop.TabletopEnv):
        from prism.sims.tabletop_expert import TabletopExpert

        return TabletopExpert(env)
    from prism.sims.pusht import PushTEnv
    from prism.sims.pusht_expert import PushTExpert

    assert isinstance(env, PushTEnv)
    return PushTExpert(env)


def _unknown(name: str) -> PrismError:
    close = difflib.get_close_matches(name, task_names(), n=3, cutoff=0.5)
    close = close or difflib.get_close_matches(f"metaworld-{name}", task_names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"for example {', '.join(task_names()[:4])}"
    return PrismError(f"unknown task '{name}': {hint}")
