"""The one exception meant for people: a single line that names the file, the key and the remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class PrismError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with status 2."""


def reason(error: BaseException) -> str:
    """What a library's exception says, on one line of a message."""
    return " ".join((str(error) or type(error).__name__).split())[:120]


@contextmanager
def unreadable(problem: str, remedy: str) -> Iterator[None]:
    """Whatever a library raises over a damaged file (each raises many kinds) becomes one line, its words in it."""
    try:
        yield
    except PrismError:
        raise
    except Exception as error:
        raise PrismError(f"{problem} ({reason(error)}); {remedy}") from None


def need(module: str, extra: str, what: str) -> ModuleType:
    """Imports `module`, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        remedy = "packages/prism-client" if package == "prism_client" else f"'prism-policy[{extra}]'"
        raise PrismError(f"{what} needs the package {package}: pip install {remedy}") from None
