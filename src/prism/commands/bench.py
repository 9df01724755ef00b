"""prism bench attention | train-step | allocator"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prism.commands.style import option
from prism.errors import PrismError

JsonPath = Annotated[Path | None, option("FILE")]


@dataclass(frozen=True)
class Attention:
    """FAVOR+ against exact softmax: error by number of features, time by length, and the rule behind `auto`."""

    json: JsonPath = None
    """Write the figures to this file too."""

    def run(self) -> None:
        raise PrismError("prism bench attention is not wired up yet")


@dataclass(frozen=True)
class TrainStep:
    """What it brings to back-propagate the chosen candidates only: time and memory against all K."""

    json: JsonPath = None
    """Write the figures to this file too."""

    def run(self) -> None:
        raise PrismError("prism bench train-step is not wired up yet")


@dataclass(frozen=True)
class Allocator:
    """What keeping freed memory in the process brings to a training step on this CPU."""

    json: JsonPath = None
    """Write the figures to this file too."""

    def run(self) -> None:
        raise PrismError("prism bench allocator is not wired up yet")
