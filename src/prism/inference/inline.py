"""A policy in this thread as a planner: it answers at once, or a stated number of control steps late.

`controller.delay` simulates the latency of planning: the plan is drawn and chosen with the observation of its step, and
answered that many steps later. The first plan of an episode is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client.messages import PolicyInfo, Reply, Step

from prism.errors import PrismError
from prism.inference.about import about_policy
from prism.inference.chooser import Chooser, ControllerConfig, action_scale
from prism.inference.window import Window, batched
from prism.policy import Policy
from prism.rows import EachRandom, Random
from prism.selection import FloatArray
from prism.types import Observation


@runtime_checkable
class WarmStart(Protocol):
    """A policy that can start from the last plan; the planner keeps that plan."""

    def sample_near(
        self, observation: Observation, candidates: int, rng: Random, previous: torch.Tensor
    ) -> torch.Tensor:
        """Like `sample`, near `previous` (B, R, Da), the unexecuted remainder of the old plan in robot units."""
        ...


class InlinePlanner:
    """Window, random numbers and chooser of one robot. `tick` before each step: its clock counts control steps."""

    def __init__(
        self, policy: Policy, config: ControllerConfig, seed: int = 0, scale: NDArray[np.floating] | None = None
    ) -> None:
        if config.warm_start and not isinstance(policy, WarmStart):
            raise PrismError(
                f"controller.warm_start: a policy of method '{policy.spec.method}' cannot start from an old plan"
            )
        self.policy = policy.eval()
        parameter = next(policy.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.scale: FloatArray = action_scale(policy) if scale is None else np.asarray(scale, dtype=np.float64)
        self.window = Window(policy.spec)
        self.chooser = Chooser(policy.spec, config, self.scale)
        self.rng = Random()
        self.info: PolicyInfo = about_policy(policy, config, self.scale)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        self.rng.manual_seed(0 if seed is None else seed)
        self.window.reset()
        self.chooser.reset()
        self._time = 0
        self._replies: deque[Reply] = deque()
        self._sent: list[NDArray[Any]] = []  # commands since the last request
        self._done = 0  # actions executed before it
        self._wanted: Step | None = None  # a plan for it has to be drawn
        self._answer: tuple[int, Reply] | None = None  # a plan on its way, and the control step at which it comes

    def tick(self) -> None:
        self._time += 1

    def clock(self) -> float:
        """Seconds in a world that stops while it waits for a plan."""
        return self._time / (self.policy.spec.fps or 1.0)

    def submit(self, step: Step) -> None:
        """PrismError if the observation cannot be used."""
        self.window.observe(step.observation, step.ages)
        self._sent += step.sent
        self._replies.append(Reply(step, self.window.absent))
        if step.wants_plan:
            self.chooser.advance(step.done - self._done, self._sent)
            self._wanted, self._sent, self._done = step, [], step.done

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if self._wanted is not None:
            draw([self])
        if self._replies:
            return self._replies.popleft()
        if self._answer is None or (self._time < self._answer[0] and not timeout > 0):
            return None
        (_, reply), self._answer = self._answer, None
        return reply

    def take(self, candidates: NDArray[np.float32], latency_ms: float) -> None:
        """The candidates (K, Tp, Da) for the step that wanted a plan."""
        step, self._wanted = self._wanted, None
        assert step is not None
        late = 0 if self.chooser.plan is None else self.chooser.config.delay
        try:
            plan = self.chooser.choose(candidates, self.window.newest, latency_ms)
        except PrismError as error:
            self._replies.append(Reply(step, self.window.absent, is_plan=True, error=error))
            return
        self._answer = self._time + late, Reply(step, self.window.absent, plan, is_plan=True)

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


def draw(planners: Sequence[InlinePlanner]) -> None:
    """Candidates for all planners with a due plan, in one pass; each has its own random numbers."""
    due = [planner for planner in planners if planner._wanted is not None]
    if not due:
        return
    start = time.perf_counter()
    with torch.inference_mode():
        sample = _near(due[0]) if len(due) == 1 else None
        if sample is None:
            observation = batched([planner.window for planner in due], due[0].device)
            rng = due[0].rng if len(due) == 1 else EachRandom([planner.rng for planner in due])
            sample = due[0].policy.sample(observation, due[0].chooser.config.candidates, rng)
    candidates = sample.float().cpu().numpy()  # (B, K, Tp, Da)
    latency = (time.perf_counter() - start) * 1e3
    for planner, row in zip(due, candidates, strict=True):
        planner.take(row, latency)


def _near(planner: InlinePlanner) -> torch.Tensor | None:
    """Candidates near the rest of the old plan; None: from noise."""
    config, remainder = planner.chooser.config, planner.chooser.remainder
    if not config.warm_start or remainder is None or not isinstance(planner.policy, WarmStart):
        return None
    previous = torch.from_numpy(remainder[None]).float().to(planner.device)
    observation = batched([planner.window], planner.device)
    return planner.policy.sample_near(observation, config.candidates, planner.rng, previous)
