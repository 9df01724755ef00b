"""Where the figures of a bench or a study go: the terminal, a JSON file, a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console

from prism.errors import PrismError
from prism.rollout.results import refuse_existing as refuse_existing
from prism.rollout.results import write_atomic, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")


class Figures(Protocol):
    """Anything that becomes a JSON object; a dict is one already."""

    def to_json(self) -> dict[str, Any]: ...


Result = TypeVar("Result", bound=dict[str, Any] | Figures)


@dataclass(frozen=True)
class Output:
    """Checked before the work, not after it."""

    json: Path | None = None
    plot: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in PICTURES:
            raise PrismError(f"{self.plot}: cannot draw a '{self.plot.suffix}' file; use .svg, .png or .pdf")

    def check(self) -> None:
        refuse_existing(self.json, self.plot, overwrite=self.overwrite)

    def carry_out(
        self,
        run: Callable[[Console], Result],
        show: Callable[[Result, Console], None],
        draw: Callable[[Result], Figure] | None = None,
    ) -> Result:
        """Measure with progress on stderr, show the figures, write them."""
        self.check()
        result = run(Console(stderr=True))
        show(result, Console())
        self.write(result, draw)
        return result

    def write(self, result: Result, draw: Callable[[Result], Figure] | None = None) -> None:
        if self.json is not None:
            write_json(self.json, result if isinstance(result, dict) else result.to_json(), self.overwrite)
        if self.plot is not None:
            if draw is None:
                raise PrismError(f"{self.plot}: there is no picture of these figures; leave --plot out")
            picture = io.BytesIO()
            draw(result).savefig(picture, format=self.plot.suffix.lstrip("."))
            write_atomic(self.plot, picture.getvalue(), self.overwrite)
