"""Inference for one robot: every observation is encoded once, when it arrives; a plan needs only the kept tokens.

    observe(o_t):  sensors -> features -> fused step            once a frame
                   window: step[t-To+1] .. step[t]              slides by one
    plan(K):       context, its keys and values -> K candidates in one batch

Encoding the window anew at every plan costs To frames where this costs one. With the eager back end the results are
those of `Policy.sample` on the whole window, to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prism.errors import PrismError
from prism.serve.backends import Backend
from prism.types import Observation

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Step:
    """One observation, encoded: all that plans will ever need of it."""

    token: Float[Tensor, " W"]
    anchor: Float[Tensor, "1 1 1 Da"] | None  # None also where its sensor was absent


class StepEncoder:
    """One time step -> Step, sensor by sensor, so that sensors can be encoded on different cores."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._texts: dict[int, tuple[Array, Tensor]] = {}  # an instruction stays the same for long: encoded once

    @torch.inference_mode()
    def features(self, sensor: int, reading: Array, present: bool) -> Float[Tensor, "1 F"]:
        encoder = self.backend.encoders[sensor]
        if not present:
            return encoder.absent.detach()[None]
        if encoder.spec.kind != "text":
            return self.backend.features(sensor, torch.from_numpy(np.ascontiguousarray(reading)[None]))
        known = self._texts.get(sensor)
        if known is None or not np.array_equal(known[0], reading):
            known = (reading.copy(), self.backend.features(sensor, torch.from_numpy(reading.copy()[None])))
            self._texts[sensor] = known
        return known[1]

    @torch.inference_mode()
    def finish(self, features: Sequence[Tensor], streams: Mapping[str, Array], present: Mapping[str, bool]) -> Step:
        """`features`: of every sensor, in the order of the policy's."""
        token = self.backend.fuse(torch.cat(list(features), dim=-1))[0]
        policy = self.backend.policy
        name = policy.config.anchor
        if name is None or not present[name]:
            return Step(token, None)
        latest = Observation(
            {name: torch.from_numpy(np.asarray(streams[name]))[None, None]}, {name: torch.tensor([[True]])}
        )
        return Step(token, policy.anchor(latest))


class Runtime:
    """A window of encoded observations and the plans drawn from it, in the thread of the caller."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.encoder = StepEncoder(backend)
        self.window: deque[Step] = deque(maxlen=backend.policy.spec.obs_horizon)

    def reset(self) -> None:
        """Start an episode."""
        self.window.clear()

    def encode(self, streams: Mapping[str, Array], present: Mapping[str, bool]) -> Step:
        """One time step of each sensor, as `Controller.latest` gives it."""
        specs = [encoder.spec for encoder in self.backend.encoders]
        parts = [self.encoder.features(i, streams[s.name], present[s.name]) for i, s in enumerate(specs)]
        return self.encoder.finish(parts, streams, present)

    def observe(self, streams: Mapping[str, Array], present: Mapping[str, bool]) -> None:
        """Encode one time step and slide the window; the first fills it."""
        self.push(self.encode(streams, present))

    def push(self, step: Step) -> None:
        for _ in range(1 if self.window else self.window.maxlen or 1):
            self.window.append(step)

    def plan(self, candidates: int, rng: torch.Generator) -> NDArray[np.float32]:
        """(K, Tp, Da) in robot units, for the window as it is."""
        return plan(self.backend, tuple(self.window), candidates, rng)

    def warm_up(self, candidates: int) -> None:
        """Run everything once or twice: the first calls allocate, compile and page in. Forgets the window."""
        specs = [encoder.spec for encoder in self.backend.encoders]
        streams: dict[str, Array] = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs}
        for _ in range(2):
            self.reset()
            self.observe(streams, {spec.name: True for spec in specs})
            self.plan(candidates, torch.Generator().manual_seed(0))
        self.reset()


@torch.inference_mode()
def plan(backend: Backend, window: Sequence[Step], candidates: int, rng: torch.Generator) -> NDArray[np.float32]:
    """(K, Tp, Da) in robot units, from To encoded steps."""
    if not window:
        raise PrismError("there is no observation to plan from: call observe first")
    plans = backend.plan(torch.stack([step.token for step in window])[None], candidates, rng)
    anchor = next((step.anchor for step in reversed(window) if step.anchor is not None), None)  # the newest there is
    finished = backend.policy.finish(plans, anchor)
    found: NDArray[np.float32] = finished[0].float().cpu().numpy()
    return found
