"""How options look in the help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg


def option(metavar: str) -> Any:
    """An option that may be left out; its text says what happens then, so "(default: None)" is not shown."""
    return arg(metavar=metavar, help_behavior_hint="")


OutputFile = Annotated[Path | None, option("FILE")]
