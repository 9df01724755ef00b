"""The same loop with other methods, in the same run: same sensors, same encoders in the same back end, other heads.

compare_METHOD_*   for prism (as benchmarked), prism_eager (its head in PyTorch), diffusion (DDIM, NFE 10, 79.9 M
                   UNet) and flow_matching (Euler, NFE 5, the same UNet); the heads of the last three run in PyTorch,
                   on one core, as PRISM's does beside the encoders. Diffusion and flow matching draw one plan, not K.
  plan_ms          the head alone, median: steps -> plan
  holds_share      of the actions: no plan was there when they were due (the old one was used up)
  plan_age_p50_ms  how old the observation behind an action is
  late_actions     actions that missed their slot
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prism.bench.realtime import ACTION_DIM, RealtimeBenchConfig, measure
from prism.methods.context import ContextPolicy
from prism.methods.table import as_method, build_policy, preset
from prism.serve.backends import Backend, Frame

_SECONDS = 8.0


class GraftedBackend(Backend):
    """The encoders of one back end, the head of another policy in PyTorch."""

    name = "eager"

    def __init__(self, encoders: Backend, policy: ContextPolicy) -> None:
        super().__init__(policy)
        self._from = encoders

    def features(self, sensor: int, stream: Tensor) -> Float[Tensor, "N F"]:
        return self._from.features(sensor, stream)

    def fuse(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N W"]:
        return self._from.fuse(features)


def compare(
    config: RealtimeBenchConfig, backend: Backend, policy: ContextPolicy, frames: list[Frame], rate: float
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    slots = max(1, round(min(_SECONDS, config.seconds) * rate))
    size = preset(config.size)
    for name in ("prism", "prism_eager", "diffusion", "flow_matching"):
        one = 1 if name in ("diffusion", "flow_matching") else config.candidates
        contestant: Backend = backend
        own: ContextPolicy = policy
        if name == "prism_eager":
            contestant = GraftedBackend(backend, policy)
        elif name != "prism":
            spec = as_method(size, name, config.size).spec(policy.spec.sensors, ACTION_DIM, policy.spec.fps)
            built = build_policy(spec, config.seed)
            assert isinstance(built, ContextPolicy)
            own = built.eval()
            contestant = GraftedBackend(backend, own)
        found = measure(contestant, own, frames, slots, rate, _with_candidates(config, one), saturated=0.0)
        result |= {
            f"compare_{name}_plan_ms": found["plan_compute_p50_ms"],
            f"compare_{name}_holds_share": found["holds"] / slots,
            f"compare_{name}_plan_age_p50_ms": found["plan_age_p50_ms"],
            f"compare_{name}_late_actions": found["late_actions"],
            f"compare_{name}_actions_per_s": found["actions_per_s"],
        }
    torch.set_num_threads(1)
    return result


def _with_candidates(config: RealtimeBenchConfig, candidates: int) -> RealtimeBenchConfig:
    import dataclasses

    return dataclasses.replace(config, candidates=candidates)
