"""How options look in the help, and options that several commands have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from prism.errors import check_numbers


def option(metavar: str) -> Any:
    """An option that may be left out; its text says what happens then, so "(default: None)" is not shown."""
    return arg(metavar=metavar, help_behavior_hint="")


OutputFile = Annotated[Path | None, option("FILE")]


@dataclass(frozen=True, kw_only=True)
class CalvinOption:
    """A command that may make one of CALVIN's environments."""

    calvin: Annotated[Path | None, option("PATH")] = None
    """Path of the CALVIN checkout. Default: PRISM_CALVIN."""

    def find_calvin(self) -> None:
        if self.calvin is not None:  # the rollouts' processes inherit it
            os.environ["PRISM_CALVIN"] = str(self.calvin.expanduser().resolve())


@dataclass(frozen=True, kw_only=True)
class JsonOutput:
    """A command whose figures can be written to a file."""

    json: OutputFile = None
    """Also write the figures to this file."""
    overwrite: bool = False
    """Replace that file if it exists."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How a dataset is read."""

    fps: Annotated[float | None, option("RATE")] = None
    """Steps a second of the dataset, for formats that do not store it."""
    map: Annotated[tuple[str, ...], option("KEY=SENSOR")] = ()
    """Which key of the dataset becomes which sensor, KEY=SENSOR[:KIND[:SCALE]]. Default: a guess. KEY=
    ignores a key."""
    sensor: Annotated[tuple[str, ...], option("SENSOR.KEY=VALUE")] = ()
    """Preprocessing and health of a sensor of the dataset: rgb_static.crop=76,76."""
    tolerance: Annotated[float | None, option("SECONDS")] = None
    """ROS 2 bags: how far in time a reading may be from its step. Default: one step."""
    without: Annotated[tuple[str, ...], option("SENSOR")] = ()
    """Sensors of the dataset to leave out, for example a camera whose files are missing."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"(0, inf)": "fps tolerance"})
