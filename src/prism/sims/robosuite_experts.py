"""Which expert demonstrates which robosuite task."""

from __future__ import annotations

from collections.abc import Callable

from prism.sims.robosuite_env import RobosuiteEnv
from prism.sims.robosuite_expert import ScriptedExpert
from prism.sims.robosuite_expert_tasks import CanExpert, LiftExpert, SquareExpert
from prism.sims.robosuite_expert_toolhang import ToolHangExpert
from prism.sims.robosuite_expert_transport import TransportExpert

_EXPERTS: dict[str, Callable[[RobosuiteEnv], ScriptedExpert]] = {
    "lift": LiftExpert,
    "can": CanExpert,
    "square": SquareExpert,
    "transport": TransportExpert,
    "tool-hang": ToolHangExpert,
}


def make_robosuite_expert(env: RobosuiteEnv) -> ScriptedExpert:
    return _EXPERTS[env.task](env)
