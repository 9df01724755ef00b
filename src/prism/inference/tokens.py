"""Tokens: every observation is encoded once, when it arrives; a plan needs only the kept tokens.

    observe(o_t):  sensors -> features -> fused token           once an observation
                   window: token[t-To+1] .. token[t]            slides by one
    plan(K):       context, its keys and values -> K candidates in one batch

Encoding the window anew at every plan costs To frames where this costs one. With the eager back end the results are
those of `Policy.sample` on the whole window, to rounding. Both functions take several robots at once: a server's batch.
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
from prism.inference.backends import Backend
from prism.rows import Random
from prism.types import Observation

Array = NDArray[np.generic]
_READINGS = 2  # of a sensor whose features are kept: between two observations, a camera shows one of them


@dataclass(frozen=True)
class Token:
    """One observation, encoded: all that plans will ever need of it."""

    vector: Float[Tensor, " W"]
    anchor: Float[Tensor, "1 1 Da"] | None  # None also where its sensor was absent


class Known:
    """The features of each sensor's latest readings. What is read again (an instruction) is not encoded again."""

    def __init__(self) -> None:
        self._readings: dict[int, deque[tuple[Array, Tensor]]] = {}

    def recall(self, sensor: int, reading: Array) -> Tensor | None:
        kept = tuple(self._readings.get(sensor, ()))
        return next((own for known, own in kept if known is reading or np.array_equal(known, reading)), None)

    def keep(self, sensor: int, reading: Array, features: Tensor) -> None:
        self._readings.setdefault(sensor, deque(maxlen=_READINGS)).append((reading, features))


@dataclass(frozen=True)
class Arrival:
    """One time step of each sensor of one robot, as `Window.observe` took it in."""

    known: Known
    streams: Mapping[str, Array]
    present: Mapping[str, bool]


@torch.inference_mode()
def encode_sensor(backend: Backend, sensor: int, arrivals: Sequence[Arrival]) -> list[Float[Tensor, " F"]]:
    """The features of one sensor, for each arrival; readings that are not known in one call of the back end."""
    encoder = backend.encoders[sensor]
    name = encoder.spec.name
    found: list[Tensor | None] = []
    new: dict[int, list[int]] = {}  # by the reading's identity: its rows
    for row, arrival in enumerate(arrivals):
        reading = arrival.streams[name]
        if not arrival.present[name]:
            found.append(encoder.absent.detach())
            continue
        found.append(arrival.known.recall(sensor, reading))
        if found[row] is None:
            new.setdefault(id(reading), []).append(row)
    if new:
        stack = np.stack([arrivals[rows[0]].streams[name] for rows in new.values()])
        features = backend.features(sensor, torch.from_numpy(stack).to(backend.device))
        for rows, own in zip(new.values(), features, strict=True):
            arrivals[rows[0]].known.keep(sensor, arrivals[rows[0]].streams[name], own)
            for row in rows:
                found[row] = own
    return [own for own in found if own is not None]


@torch.inference_mode()
def fuse(backend: Backend, features: Sequence[Sequence[Tensor]], arrivals: Sequence[Arrival]) -> list[Token]:
    """`features[sensor][row]`, in the order of the policy's sensors -> one token a row."""
    policy, name = backend.policy, backend.policy.config.anchor
    columns = [torch.stack(list(column)) for column in features]
    tokens = []
    for vector, arrival in zip(backend.fuse(torch.cat(columns, dim=-1)), arrivals, strict=True):
        anchor = None
        if name is not None and arrival.present[name]:
            latest = torch.from_numpy(np.asarray(arrival.streams[name]))[None, None].to(backend.device)
            found = policy.anchor(
                Observation({name: latest}, {name: torch.ones(1, 1, dtype=torch.bool).to(latest.device)})
            )
            anchor = None if found is None else found[0]
        tokens.append(Token(vector, anchor))
    return tokens


@torch.inference_mode()
def plan(backend: Backend, windows: Sequence[Sequence[Token]], candidates: int, rng: Random) -> NDArray[np.float32]:
    """(B, K, Tp, Da) in robot units, from To tokens a robot."""
    if not all(windows):
        raise PrismError("there is no observation to plan from: call observe first")
    plans = backend.plan(torch.stack([torch.stack([t.vector for t in window]) for window in windows]), candidates, rng)
    newest = [next((t.anchor for t in reversed(window) if t.anchor is not None), None) for window in windows]
    anchor = None
    if any(found is not None for found in newest):  # 0 where a window has none, as in ContextPolicy.anchor
        zero = torch.zeros(1, 1, plans.shape[-1], device=plans.device)
        anchor = torch.stack([zero if found is None else found for found in newest])
    finished: NDArray[np.float32] = backend.policy.finish(plans, anchor).float().cpu().numpy()
    return finished


class Tokens:
    """The cached tokens of one robot's window. The first observation fills it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.known = Known()
        self.window: deque[Token] = deque(maxlen=backend.policy.spec.obs_horizon)

    def reset(self) -> None:
        """Start an episode."""
        self.window.clear()

    def push(self, token: Token) -> None:
        for _ in range(1 if self.window else self.window.maxlen or 1):
            self.window.append(token)

    def observe(self, streams: Mapping[str, Array], present: Mapping[str, bool]) -> None:
        observe(self.backend, [(self, streams, present)])

    def plan(self, candidates: int, rng: Random) -> NDArray[np.float32]:
        """(K, Tp, Da) in robot units, for the window as it is."""
        found: NDArray[np.float32] = plan(self.backend, [self.window], candidates, rng)[0]
        return found


def observe(backend: Backend, rows: Sequence[tuple[Tokens, Mapping[str, Array], Mapping[str, bool]]]) -> None:
    """Encode time steps, of several robots or several of one in order, and slide their windows."""
    arrivals = [Arrival(tokens.known, streams, present) for tokens, streams, present in rows]
    features = [encode_sensor(backend, sensor, arrivals) for sensor in range(len(backend.encoders))]
    for (tokens, _, _), token in zip(rows, fuse(backend, features, arrivals), strict=True):
        tokens.push(token)


def warm_up(backend: Backend, candidates: int) -> None:
    """Run everything once or twice: the first calls allocate, compile and page in."""
    specs = [encoder.spec for encoder in backend.encoders]
    for _ in range(2):
        tokens = Tokens(backend)
        zeros: dict[str, Array] = {spec.name: np.zeros(spec.step_shape, spec.dtype) for spec in specs}
        tokens.observe(zeros, {spec.name: True for spec in specs})
        tokens.plan(candidates, Random(0))
