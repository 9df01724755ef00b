"""Frozen dataclass configs to JSON and back: every field is written, an unknown key is an error, types are checked.

A key that is missing has its default, so a file from before a field was added can be read.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prism.errors import PrismError
from prism.io.old_keys import RETIRED

T = TypeVar("T")
_OTHER = "it was written by another version of prism: use that one, or make it again"


def to_json(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values (tuples become lists)."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_json(kind: type[T], data: Any, where: str = "config", kinds: Mapping[str, type] | None = None) -> T:
    """Rebuild a dataclass; every key must be known or retired (io/old_keys.py), and there unless it has a default.

    `kinds`: the class of a field that may hold any of several, by the field's name.
    """
    if not isinstance(data, dict):
        raise PrismError(f"{where}: expected an object with the fields of {kind.__name__}, found {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(fields) - set(RETIRED.get(kind.__name__, ()))):
        raise PrismError(f"{where}: unknown key '{unknown[0]}'; {_OTHER}")
    none = dataclasses.MISSING
    needed = {name for name, field in fields.items() if field.default is none and field.default_factory is none}
    if missing := sorted(needed - set(data)):
        raise PrismError(f"{where}: key '{missing[0]}' is missing; {_OTHER}")
    hints = {**get_type_hints(kind), **(kinds or {})}
    return kind(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in fields if name in data})


def with_settings(config: T, settings: typing.Sequence[str]) -> T:
    """The same config with fields changed by their path: with_settings(c, ["objective.scope=batch", "anchor=null"]).

    Values are JSON, or bare strings; the config's own checks apply to the result.
    """
    data = to_json(config)
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator:
            raise PrismError(f"--set {setting}: write it as KEY=VALUE, for example objective.candidates=16")
        *parents, last = path.split(".")
        target: Any = data
        for i, key in enumerate([*parents, last]):
            if (old := {name: hint for keys in RETIRED.values() for name, hint in keys.items()}).get(key):
                raise PrismError(f"--set {setting}: '{key}' is not a setting any more; {old[key]}")
            if not isinstance(target, dict) or key not in target:
                known = list(target) if isinstance(target, dict) else []
                close = difflib.get_close_matches(key, known, n=1) or known
                where = ".".join(parents[:i]) or type(config).__name__
                raise PrismError(f"--set {setting}: {where} has no '{key}'; it has {', '.join(close) or 'no fields'}")
            if i < len(parents):
                target = target[key]
        try:
            target[last] = json.loads(text)
        except json.JSONDecodeError:
            target[last] = text
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    kinds = {name: type(value) for name, value in fields.items() if dataclasses.is_dataclass(value)}
    return from_json(type(config), data, "--set", kinds)


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
        if not isinstance(value, list):
            raise PrismError(f"{where}: expected a list, found {value!r}")
        if args[-1:] == (...,):
            args = args[:1] * len(value)
        if len(args) != len(value):
            raise PrismError(f"{where}: expected {len(args)} values, found {len(value)}")
        return tuple(_value(inner, v, f"{where}[{i}]") for i, (inner, v) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise PrismError(f"{where}: expected an object of names and values, found {value!r}")
        return {k: _value(get_args(hint)[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        return value  # the dataclass checks its own choices, with a better message
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and not isinstance(value, hint):
        raise PrismError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value
