"""What it brings to keep the token of every observation: replanning after every action (T_a = 1), one thread.

token_cache_ratio         median over rounds of time(encode all To frames, plan) / time(encode the new frame, plan),
                          both in the back end that is benchmarked
token_cache_ratio_eager   the same in eager PyTorch
token_cache_cached_ms, token_cache_window_ms   medians in the back end that is benchmarked
token_cache_difference    eager: largest |difference| of the actions of the two, same window, same latents, half ranges

With the wrist's sensors alone the keys end in _wrist: there the plan, which both pay for, costs more than the eight
small frames, so less is to be won.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from prism.bench.timing import interleave, paired_ratio
from prism.distributed.rows import Random
from prism.serve.backends import Backend, BackendPolicy, EagerBackend, Frame
from prism.serve.tokens import Tokens
from prism.types import Observation


def token_cache(backend: Backend, candidates: int, seed: int, seconds: float = 10.0) -> dict[str, Any]:
    from prism.bench.realtime import synthetic_frames

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
