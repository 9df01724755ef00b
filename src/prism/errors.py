"""The one exception meant for people: a single line that names the file, the key and the remedy."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class PrismError(Exception):
    """Something the user can fix. The command line prints it as one line and exits with status 2.

    Messages quote names from files, which strangers write: control characters in them are escaped.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(str(part), keep="\n\t") for part in parts))


def printable(text: str, keep: str = "") -> str:
    """Escape terminal control characters: names in files and messages may come from strangers."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def reason(error: BaseException) -> str:
    """The text of a library's exception, in one line."""
    return printable(" ".join((str(error) or type(error).__name__).split()))[:120]


@contextmanager
def unreadable(problem: str, remedy: str) -> Iterator[None]:
    """Whatever a library raises over a damaged file (each raises many kinds) becomes one line, its words in it."""
    try:
        yield
    except PrismError:
        raise
    except Exception as error:
        raise PrismError(f"{problem} ({reason(error)}); {remedy}") from None


def check_numbers(config: Any, where: str, intervals: Mapping[str, str]) -> None:
    """PrismError for a field outside its interval, {"[1, inf)": "names of fields"}; None is no number and passes.

    `where` names the config, or is "--" for a command, whose fields are options.
    """
    words = {"[1, inf)": "1 or more", "[0, inf)": "0 or more", "(0, inf)": "a positive number"}
    for interval, names in intervals.items():
        low, high = map(float, interval[1:-1].split(","))
        for name in names.split():
            value = getattr(config, name)
            at_end = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
            if value is None or at_end or low < value < high:
                continue
            said = f"{value:g}" if isinstance(value, float) else value
            subject = f"--{name.replace('_', '-')} {said}" if where == "--" else f"{where}.{name} = {said}"
            raise PrismError(f"{subject} is out of range: use {words.get(interval, f'a value in {interval}')}")


def check_choices(config: Any, where: str) -> None:
    """PrismError for a field of type Literal that has none of its values."""
    hints = get_type_hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value, choices = getattr(config, name), get_args(hints[name])
        if get_origin(hints[name]) is Literal and value not in choices:
            raise PrismError(f"{where}.{name} = '{value}' is unknown: use one of {', '.join(choices)}")


def need(module: str, extra: str, what: str) -> ModuleType:
    """Imports `module`, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise PrismError(f"{what} needs the package {package}: pip install 'prism-policy[{extra}]'") from None
