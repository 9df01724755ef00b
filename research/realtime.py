"""The real-time loop: what kept tokens bring, and other methods in the same loop.

Try:
    python -m research realtime --sensors wrist --json wrist.json
    python -m research realtime --sensors calvin --compare --json calvin.json

The keys of `prism bench realtime` (src/prism/bench/realtime.py), and

    token_cache_ratio         median over rounds of time(encode all To frames, plan) / time(encode the new frame, plan),
                              both in the back end that is benchmarked
    token_cache_ratio_eager   the same in eager PyTorch
    token_cache_cached_ms, token_cache_window_ms   medians in the back end that is benchmarked
    token_cache_difference    eager: largest |difference| of the actions of the two, same latents, half ranges

With the wrist's sensors alone the keys end in _wrist: there the plan, which both pay for, costs more than the eight
small frames, so less is to be won.

    compare_METHOD_*   for prism (as benchmarked), prism_eager (its head in PyTorch), diffusion (DDIM, NFE 10, 79.9 M
                       UNet) and flow_matching (Euler, NFE 5, the same UNet); the heads of the last three run in
                       PyTorch, on one core. Diffusion and flow matching draw one plan, not K.
      plan_ms          the head alone, median: steps -> plan
      holds_share      of the actions: no plan was there when they were due (the old one was used up)
      plan_age_p50_ms  how old the observation behind an action is
      late_actions     actions that missed their slot
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from prism.bench import realtime
from prism.bench.realtime import ACTION_DIM, Ready, measure, prepare, synthetic_frames
from prism.bench.timing import interleave, paired_ratio
from prism.cli.bench import Realtime
from prism.errors import PrismError
from prism.inference.backends import Backend, BackendPolicy, EagerBackend, Frame
from prism.inference.lanes import steady
from prism.inference.tokens import Tokens
from prism.methods.base import ContextPolicy
from prism.methods.presets import as_method, build_policy, preset
from prism.rows import Random
from prism.types import Observation


@dataclass(frozen=True, kw_only=True)
class Config(Realtime):
    compare: bool = False
    """Also run Diffusion Policy (NFE 10) and Flow Matching (NFE 5) in the same loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare and self.checkpoint is not None:
            raise PrismError("--compare builds the other methods for --sensors: use it without --checkpoint")


def run(config: Config, console: Console) -> dict[str, Any]:
    ready = prepare(config)
    result = realtime.run(config, console, ready)
    if config.compare:
        with steady(realtime=True):
            result |= compare_methods(ready, config)
    return result | token_cache(ready.backend, config.candidates, config.seed)


show = realtime.show
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


def compare_methods(ready: Ready, config: Config) -> dict[str, Any]:
    result: dict[str, Any] = {}
    backend, policy = ready.backend, ready.policy
    slots = max(1, round(min(_SECONDS, config.seconds) * ready.rate))
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
        contest = dataclasses.replace(ready, backend=contestant, policy=own)
        found = measure(contest, slots, dataclasses.replace(config, candidates=one), saturated=0.0)
        result |= {
            f"compare_{name}_plan_ms": found["plan_compute_p50_ms"],
            f"compare_{name}_holds_share": found["holds"] / slots,
            f"compare_{name}_plan_age_p50_ms": found["plan_age_p50_ms"],
            f"compare_{name}_late_actions": found["late_actions"],
            f"compare_{name}_actions_per_s": found["actions_per_s"],
        }
    torch.set_num_threads(1)
    return result


def token_cache(backend: Backend, candidates: int, seed: int, seconds: float = 10.0) -> dict[str, Any]:
    policy = backend.policy
    frames = synthetic_frames(policy.spec.sensors, policy.spec.obs_horizon, np.random.default_rng(seed))
    present = {spec.name: True for spec in policy.spec.sensors}
    calls: dict[str, Callable[[], object]] = {}
    difference = 0.0
    for name, own in {"own": backend, "eager": EagerBackend(policy)}.items():
        own.threads(1)
        kept, whole = Tokens(own), BackendPolicy(own)
        for frame in frames:
            kept.observe(frame, present)
        if name == "eager":
            ours = kept.plan(candidates, Random(seed))
            anew = policy.sample(_window(frames), candidates, Random(seed))[0].numpy()
            difference = float((np.abs(ours - anew) / policy.normalizer.action_scale.abs().numpy()).max())

        arriving = itertools.cycle(frames)  # never the same frame twice in a row: that would not be encoded again

        def cached(kept: Tokens = kept, arriving: Iterator[Frame] = arriving) -> None:
            kept.observe(next(arriving), present)
            kept.plan(candidates, Random(seed))

        def window(whole: BackendPolicy = whole) -> None:
            whole.sample(_window(frames), candidates, Random(seed))

        calls |= {f"{name}_cached": cached, f"{name}_window": window}
    times = interleave(calls, np.random.default_rng(seed), seconds, min_rounds=7, max_rounds=40)
    end = "_wrist" if len(policy.spec.sensors) == 2 else ""
    return {
        f"token_cache_ratio{end}": paired_ratio(times["own_window"].cpu, times["own_cached"].cpu),
        f"token_cache_ratio_eager{end}": paired_ratio(times["eager_window"].cpu, times["eager_cached"].cpu),
        "token_cache_cached_ms": times["own_cached"].summary()["cpu_median"],
        "token_cache_window_ms": times["own_window"].summary()["cpu_median"],
        "token_cache_difference": difference,
    }


def _window(frames: list[Frame]) -> Observation:
    streams = {name: torch.from_numpy(np.stack([frame[name] for frame in frames])[None]) for name in frames[0]}
    return Observation(streams, {name: torch.ones(1, len(frames), dtype=torch.bool) for name in streams})
