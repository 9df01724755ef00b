"""Which expert demonstrates which robosuite task."""

from __future__ import annotations

from collections.abc import Callable

from prism.errors import PrismError
from prism.sims.robosuite_env import RobosuiteEnv
from prism.sims.robosuite_expert import ScriptedExpert
from prism.sims.robosuite_expert_tasks import CanExpert, LiftExpert, SquareExpert
from prism.sims.robosuite_expert_transport import TransportExpert

_EXPERTS: dict[str, Callable[[RobosuiteEnv], ScriptedExpert]] = {
    "lift": LiftExpert,
    "can": CanExpert,
    "square": SquareExpert,
    "transport": TransportExpert,
}


def make_robosuite_expert(env: RobosuiteEnv) -> ScriptedExpert:
    if env.task not in _EXPERTS:
        raise PrismError(f"{env.name} has no scripted expert: train on recordings of people (docs/robosuite.md)")
    return _EXPERTS[env.task](env)
