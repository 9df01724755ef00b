"""Robots of prism/robots/drivers with stand-ins at the other end: for the conformance suite and the drivers' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from prism.robots.base import Robot, make_robot
from tests.fakes.ur_controller import Controller

UR = """
name = "ur5e"
rate = 20
kind = "delta"

[arm]
driver = "ur"
host = "{host}"
watchdog = 1.0  # a busy computer is no fault here

[limits]
position = [[0.3, 0.7], [-0.3, 0.3], [0.05, 0.5], [-0.5, 0.5], [-0.5, 0.5], [-0.5, 0.5]]
speed = [0.05, 0.05, 0.05, 0.5, 0.5, 0.5]
workspace = [[0.28, 0.72], [-0.32, 0.32], [0.04, 0.52]]
force = 40
force_sensor = "force"
"""


def loopback() -> str:
    """An address of this process alone: vendors' ports are fixed, and tests run side by side."""
    number = os.getpid()
    return f"127.{1 + number // 62500 % 250}.{1 + number // 250 % 250}.{2 + number % 250}"


def written(folder: Path, text: str) -> Path:
    file = folder / "robot.toml"
    file.write_text(text, encoding="utf-8")
    return file


@contextmanager
def ur(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Robot]:
    """The real ur_rtde, and a controller that speaks its protocols."""
    pytest.importorskip("rtde_control")
    controller = Controller(loopback())
    try:
        yield make_robot(str(written(folder, UR.format(host=controller.host))))
    finally:
        controller.close()


DRIVEN: dict[str, Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[Robot]]] = {"ur": ur}
