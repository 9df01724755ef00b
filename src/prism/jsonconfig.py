"""Frozen dataclass configs to JSON and back, exactly: unknown and missing keys are errors, types are checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prism.errors import PrismError

T = TypeVar("T")


def to_json(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values (tuples become lists)."""
    data = dataclasses.asdict(config)
    return typing.cast(dict[str, Any], _plain(data))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "config") -> T:
    """Rebuild a dataclass; every key must be there and known, so that a file of another version is refused."""
    if not isinstance(data, dict):
        raise PrismError(f"{where}: expected an object with the fields of {kind.__name__}, found {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(fields)):
        raise PrismError(f"{where}: unknown key '{unknown[0]}'; it was written by another version of prism")
    if missing := sorted(set(fields) - set(data)):
        raise PrismError(f"{where}: key '{missing[0]}' is missing; it was written by another version of prism")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in fields})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        options = [arg for arg in get_args(hint) if arg is not type(None)]
        return _value(options[0], value, where) if len(options) == 1 else value
    if origin is tuple:
        args = get_args(hint)
        inner = args[0] if args else Any
        if not isinstance(value, list):
            raise PrismError(f"{where}: expected a list, found {value!r}")
        return tuple(_value(inner, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        return {k: _value(get_args(hint)[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        return value  # the dataclass checks its own choices, with a better message
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and not isinstance(value, hint):
        raise PrismError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value
