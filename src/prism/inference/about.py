"""The PolicyInfo of a policy, for executors."""

from __future__ import annotations

from prism_client import ActionKind, PolicyInfo
from prism_client.messages import ActionInfo

from prism.data.history import memory
from prism.inference.backends import BackendPolicy
from prism.inference.chooser import ControllerConfig
from prism.inference.health import trained_on
from prism.methods.base import ContextPolicy
from prism.policy import Policy
from prism.selection import FloatArray


def about_policy(policy: Policy, config: ControllerConfig, scale: FloatArray) -> PolicyInfo:
    spec, selection = policy.spec, config.selection
    moving = selection.motion(spec.action_dim)  # a gripper says where it is, also where the others are changes
    kept = [entry for entry in range(spec.action_dim) if entry not in moving]
    about = spec.action
    return PolicyInfo(
        action_dim=spec.action_dim,
        action=ActionInfo.from_wire(about.to_json()),
        pred_horizon=spec.pred_horizon,
        exec_horizon=config.exec_horizon,
        obs_horizon=spec.obs_horizon,
        memory=memory(spec.sensors, spec.obs_horizon),
        fps=spec.fps,
        candidates=config.candidates,
        sensors=tuple(trained_on(sensor, policy.normalizer) for sensor in spec.sensors),
        needs=tuple(needed_sensors(policy)),
        keep=() if about.kind is ActionKind.ABSOLUTE else tuple(kept),
        action_scale=tuple(scale.tolist()),
        action_range=_action_range(policy),
        method=spec.method,
        join=config.join,
        margin=config.margin,
    )


def _action_range(policy: Policy) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lowest and highest of each number of an action in the demonstrations; the same where it is constant."""
    known = policy.normalizer
    half = known.action_scale * known.action_moves
    return tuple((known.action_center - half).tolist()), tuple((known.action_center + half).tolist())


def needed_sensors(policy: Policy) -> list[str]:
    """Those that a robot must have: training never lacked them, or the held-out error rises without them
    (prism.evaluation.sensor_use). A policy that was not measured, such as an older one, is judged by its training."""
    own = policy.backend.policy if isinstance(policy, BackendPolicy) else policy
    known = trained_without(policy)
    return [spec.name for spec in own.spec.sensors if spec.name not in known or spec.name in own.spec.missed]


def trained_without(policy: Policy) -> list[str]:
    """Sensors that training sometimes lacked, by dropout or in its data: of the others it is unknown what the policy
    does without them."""
    own = policy.backend.policy if isinstance(policy, BackendPolicy) else policy
    names = [spec.name for spec in own.spec.sensors]
    chances = own.encoder.dropout if isinstance(own, ContextPolicy) else [0.0] * len(names)
    return [name for name, chance in zip(names, chances, strict=True) if chance > 0 or name in own.spec.absent]
