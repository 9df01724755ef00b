"""Which expert demonstrates which robosuite task."""

from __future__ import annotations

from prism.sims.robosuite_env import RobosuiteEnv
from prism.sims.robosuite_expert import ScriptedExpert
from prism.sims.robosuite_expert_tasks import CanExpert, LiftExpert, SquareExpert

_EXPERTS: dict[str, type[LiftExpert | CanExpert | SquareExpert]] = {
    "lift": LiftExpert,
    "can": CanExpert,
    "square": SquareExpert,
}


def make_robosuite_expert(env: RobosuiteEnv) -> ScriptedExpert:
    return _EXPERTS[env.task](env)
