"""Shapes in signatures, checked at run time: in tests only, on the files that hold the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype

CHECKED = tuple(
    f"prism.{name}"
    for name in (
        *("attention", "distance", "encoder", "generator", "objective", "types", "methods.prism"),
        *("encoders.audio", "encoders.kinds", "encoders.text", "encoders.vision"),
    )
)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, but for constructors: a config checks itself, and its message is what the tests are about."""
    return function if function.__name__ == "__init__" else beartype(function)
