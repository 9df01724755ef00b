"""What it brings to keep the token of every observation: replanning after every action (T_a = 1), eager, one thread.

token_cache_ratio         median over rounds of time(encode all To frames, plan) / time(encode the new frame, plan)
token_cache_cached_ms, token_cache_window_ms   medians of the two
token_cache_difference    largest |difference| of the actions, for the same window and latents, in half ranges

With the wrist's sensors alone the key is token_cache_ratio_wrist: there the plan, which both pay for, costs more than
the eight small frames, so less is to be won.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prism.bench.timing import interleave, paired_ratio
from prism.context_policy import ContextPolicy
from prism.deploy.backends import EagerBackend, Frame
from prism.deploy.runtime import Runtime
from prism.types import Observation


def token_cache(policy: ContextPolicy, candidates: int, seed: int, seconds: float = 12.0) -> dict[str, Any]:
    from prism.bench.realtime import synthetic_frames

    torch.set_num_threads(1)
    horizon = policy.spec.obs_horizon
    frames = synthetic_frames(policy.spec.sensors, horizon, np.random.default_rng(seed))
    present = {spec.name: True for spec in policy.spec.sensors}
    runtime = Runtime(EagerBackend(policy))
    for frame in frames:
        runtime.observe(frame, present)
    window = _window(frames)
    cached = runtime.plan(candidates, torch.Generator().manual_seed(seed))
    whole = policy.sample(window, candidates, torch.Generator().manual_seed(seed))[0].numpy()
    difference = np.abs(cached - whole) / policy.normalizer.action_scale.abs().numpy()

    def with_cache() -> None:
        runtime.observe(frames[-1], present)
        runtime.plan(candidates, torch.Generator().manual_seed(seed))

    def without() -> None:
        policy.sample(_window(frames), candidates, torch.Generator().manual_seed(seed))

    calls = {"cached": with_cache, "window": without}
    times = interleave(calls, np.random.default_rng(seed), seconds, min_rounds=7, max_rounds=40)
    suffix = "_wrist" if len(policy.spec.sensors) == 2 else ""
    return {
        f"token_cache_ratio{suffix}": paired_ratio(times["window"].cpu, times["cached"].cpu),
        "token_cache_cached_ms": times["cached"].summary()["cpu_median"],
        "token_cache_window_ms": times["window"].summary()["cpu_median"],
        "token_cache_difference": float(difference.max()),
    }


def _window(frames: list[Frame]) -> Observation:
    streams = {name: torch.from_numpy(np.stack([frame[name] for frame in frames])[None]) for name in frames[0]}
    return Observation(streams, {name: torch.ones(1, len(frames), dtype=torch.bool) for name in streams})
