"""The contract of a method: three phases of a training step, and sample(observation, K).

A training step has three phases (Alg. 1). Most methods choose nothing and implement only `loss`.

    draw(batch, rng)       targets, context with gradient, random numbers of every row
    choose(draws, share)   which candidates are trained, over the global batch and without gradient
    loss(draw, choice)     the chosen candidates with gradient, and their loss
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from prism_client import ActionKind
from torch import Tensor, nn

from prism.errors import PrismError
from prism.normalize import Normalizer
from prism.rows import Random, Share
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Batch, Observation


@dataclass(frozen=True)
class PolicySpec:
    """Everything needed to rebuild a policy without its weights: stored as config.json beside them."""

    method: str  # "prism", or a baseline's name
    config: dict[str, Any]  # the method's own frozen dataclass, as JSON
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    fps: float
    obs_horizon: int
    pred_horizon: int
    action: ActionSpec = field(default_factory=ActionSpec)
    absent: tuple[str, ...] = ()  # sensors without which it was trained: absent from whole windows of the data
    missed: tuple[str, ...] = ()  # measured after training: without one of them the held-out error rises

    def trained_on(self, windows: Mapping[str, int]) -> PolicySpec:
        """With the sensors that a tenth of all windows of the training lacked: `windows` counts all under "", and those
        without a sensor under its name. Rarer absence is not enough to learn from."""
        gone = (s.name for s in self.sensors if 10 * windows[s.name] >= windows[""])
        return dataclasses.replace(self, absent=tuple(gone))

    def stated(self, kind: str | None) -> PolicySpec:
        """With the kind of its actions from --action-kind, if the data did not state it."""
        if kind is None or kind == self.action.kind:
            return self
        if self.action.kind is not None:
            raise PrismError(f"--action-kind {kind}: the policy's actions are '{self.action.kind}'; drop the option")
        known = ActionKind.parse(kind)
        if known is None:
            raise PrismError(f"--action-kind {kind}: use one of {ActionKind.words()}")
        return dataclasses.replace(self, action=dataclasses.replace(self.action, kind=known))

    def to_json(self) -> dict[str, Any]:
        seldom = ("absent", "missed")
        data = {key: value for key, value in dataclasses.asdict(self).items() if value or key not in seldom}
        data["sensors"] = [sensor.to_json() for sensor in self.sensors]
        data["action"] = self.action.to_json()
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> PolicySpec:
        older: dict[str, Any] = {
            "action": {},
            "absent": (),
            "missed": (),
        }  # what policies from before they were stored lack
        data = {**older, **data}
        known = {field.name for field in dataclasses.fields(PolicySpec)}
        if set(data) != known:
            raise PrismError(f"policy spec needs exactly the keys {sorted(known)}, found {sorted(data)}")
        sensors = tuple(SensorSpec.from_json(s) for s in data["sensors"])
        action = ActionSpec.from_json(data["action"], "policy")
        names = {key: tuple(data[key]) for key in ("absent", "missed")}
        return PolicySpec(**{**data, "sensors": sensors, "action": action, **names})


@dataclass(frozen=True)
class Draw:
    """Result of the first phase for some rows of a batch. Methods add their own fields."""

    batch: Batch
    rng: Random  # for what the loss itself draws


@dataclass(frozen=True)
class LossOutput:
    loss: Tensor  # scalar, differentiable
    logs: dict[str, Tensor]  # detached scalars by metric name; plain numbers will do


class Policy(nn.Module, ABC):
    """A method. Robot units outside, normalised inside. It has no rollout state; the controller has."""

    spec: PolicySpec
    normalizer: Normalizer

    def draw(self, batch: Batch, rng: Random) -> Any:
        """Phase 1: a Draw of the rows of `batch`. The parts of a batch are drawn twice, with equal random numbers."""
        return Draw(batch, rng)

    def choose(self, draws: Iterable[Any], share: Share) -> Any:
        """Phase 2: a dataclass of tensors with the rows of all `draws`, or None if there is nothing to choose.

        `draws` are the rows at hand in one or several parts; `share` gives access to the other ranks' rows. A
        buffer that follows the training, such as a threshold, moves here and nowhere else: once a step.
        """
        return None

    @abstractmethod
    def loss(self, draw: Any, choice: Any) -> LossOutput:
        """Phase 3: the mean over the rows of `draw`; `choice` has the same rows."""

    def batch_loss(self, batch: Batch, rng: Random) -> LossOutput:
        """The three phases for a batch in one part."""
        draw = self.draw(batch, rng)
        return self.loss(draw, self.choose([draw], batch.share))

    @abstractmethod
    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        """K action sequences per context, in robot units, in one pass, without gradient."""
