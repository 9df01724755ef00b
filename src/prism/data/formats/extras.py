"""Packages that only some formats need."""

from __future__ import annotations

import importlib
from types import ModuleType

from prism.errors import PrismError


def need(module: str, extra: str, what: str) -> ModuleType:
    """Imports `module`, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise PrismError(f"{what} needs the package {package}: pip install 'prism-policy[{extra}]'") from None
