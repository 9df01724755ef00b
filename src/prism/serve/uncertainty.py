"""What to do when the candidates disagree: they are there anyway, so their disagreement costs no extra pass.

`spread` is the mean distance between two candidates and `modes` how many ways to go they show, in half ranges of an
action (docs/metrics.md); both come with every plan (`Replan`). A hook turns them into a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from prism.controller import Replan
from prism.errors import PrismError

Decision = Literal["continue", "slow", "stop"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
Hook = Callable[[Replan], Decision]


@dataclass(frozen=True)
class UncertaintyConfig:
    max_spread: float | None = None  # half ranges of an action; None: no limit
    max_modes: int | None = None
    then: Decision = "continue"  # beyond a limit; every such plan is counted in any case

    def __post_init__(self) -> None:
        if self.then not in DECISIONS:
            raise PrismError(f"uncertainty.then is '{self.then}'; use one of {', '.join(DECISIONS)}")
        if self.max_spread is not None and not 0 <= self.max_spread < math.inf:
            raise PrismError(f"uncertainty.max_spread is {self.max_spread}; it must be 0 or more")
        if self.max_modes is not None and self.max_modes < 1:
            raise PrismError(f"uncertainty.max_modes is {self.max_modes}; it must be at least 1")

    def exceeded(self, replan: Replan) -> bool:
        spread = self.max_spread is not None and replan.spread > self.max_spread
        return spread or (self.max_modes is not None and replan.modes > self.max_modes)

    def decide(self, replan: Replan) -> Decision:
        """The hook that this config describes."""
        return self.then if self.exceeded(replan) else "continue"
