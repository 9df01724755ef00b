"""The robot's side of PRISM: `Executor` executes plans in time, `RemotePlanner` and `Client` get them from a server."""

from prism_client.action_kind import ActionKind
from prism_client.client import Client, ConnectionLostError, ServerError
from prism_client.executor import Command, Executor
from prism_client.messages import HoldError, Plan, PlanError, PlanInfo, PolicyInfo, RefusedError, Reply, Step
from prism_client.planner import Planner
from prism_client.remote import RemotePlanner
from prism_client.stats import Stats, limit_uncertainty

__version__ = "0.1.0"
__all__ = [
    "ActionKind",
    "Client",
    "Command",
    "ConnectionLostError",
    "Executor",
    "HoldError",
    "Plan",
    "PlanError",
    "PlanInfo",
    "Planner",
    "PolicyInfo",
    "RefusedError",
    "RemotePlanner",
    "Reply",
    "ServerError",
    "Stats",
    "Step",
    "limit_uncertainty",
]
