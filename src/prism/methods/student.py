"""Methods that are distilled from another one: they start as a copy of it, and ask it while they train.

The teacher is no part of the student: it is not saved, not averaged, and not needed to use what was learned.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from prism.errors import PrismError
from prism.methods.base import BaselineConfig, BaselinePolicy
from prism.methods.context import Example
from prism.methods.unet import Films
from prism.methods.unet_policy import UNetPolicy
from prism.policy import Policy
from prism.types import Batch

T = TypeVar("T", bound=UNetPolicy)


class _Held(Generic[T]):
    """Keeps the teacher out of the student's modules, and out of copies of the student."""

    def __init__(self, policy: T) -> None:
        self.policy = policy.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Student(BaselinePolicy, Generic[T]):
    """A policy of the same architecture as its teacher's."""

    teacher_method: ClassVar[str]
    _held: _Held[T] | None = None

    def learn_from(self, teacher: Policy) -> None:
        """Take over the teacher's weights and normaliser; ask it from now on. Call before training."""
        config = getattr(teacher, "config", None)
        if (
            not isinstance(config, BaselineConfig)
            or not isinstance(teacher, UNetPolicy)
            or teacher.spec.method != self.teacher_method
        ):
            raise PrismError(f"a {self.spec.method} policy cannot learn from one of method '{teacher.spec.method}'")
        mine = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        for name in ("obs_horizon", "pred_horizon", "encoder", "anchor", "offset_scale", "width", "unet"):
            if mine[name] != getattr(config, name):
                raise PrismError(f"the teacher's {name} is {getattr(config, name)}, the student's {mine[name]}")
        if teacher.spec.sensors != self.spec.sensors or teacher.spec.action_dim != self.spec.action_dim:
            raise PrismError("the teacher was trained on other sensors or actions: train both on the same data")
        self.load_state_dict(teacher.state_dict())
        self._held = _Held(teacher)  # type: ignore[arg-type]

    @property
    def teacher(self) -> T:
        if self._held is None:
            raise PrismError(f"{self.spec.method} is distilled: train it with --teacher RUN")
        return self._held.policy

    @torch.no_grad()
    def teachers_films(self, batch: Batch) -> Films:
        """The teacher sees the observation as it is; only the student is disturbed."""
        return self.teacher.films(self.teacher.encoder(batch.observation))

    def in_my_space(self, plans: Float[Tensor, "B Tp Da"], batch: Batch, example: Example) -> Float[Tensor, "B Tp Da"]:
        """The teacher's plans as offsets from the student's anchor, which is 0 where its sensor was dropped."""
        anchor = self.teacher.anchor(batch.observation)
        if anchor is None or example.anchor is None:
            return plans
        return plans + (anchor - example.anchor)[:, 0] / self.config.offset_scale
