"""Plain values in a pickle: texts, numbers, lists, dicts and numpy arrays, read without calling anything.

A pickle is a program that names functions and has them called. This reads its opcodes one by one and knows only those
that build plain values; the four names that numpy needs become records here, and every other name is refused.
Python's own unpickler is not used: besides calling what it is asked to, it reserves gigabytes for a few bytes (a memo
index of 4 billion), and hashes keys that take very long.
"""

from __future__ import annotations

import io
import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_NAMES = ("dtype", "ndarray", "scalar", "_reconstruct")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING"))
_VALUES |= {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_VALUES |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass
class _Dtype:
    code: str
    order: str = "<"

    def real(self) -> np.dtype[Any]:
        if self.code[:1] not in ("f", "i", "u", "b") or len(self.code) > 3:
            raise ValueError(f"it holds an array of type {self.code!r:.20}")
        return np.dtype(self.code if self.order in "|=" else self.order + self.code)


@dataclass
class NumpyArray:
    """The stored description of an array."""

    size: tuple[int, ...] = ()
    kind: _Dtype | None = None
    body: Any = b""

    def values(self) -> Any:
        """As nested lists; of an array of objects its list, and the object where it is one."""
        if self.kind is None:
            raise ValueError("an array in it is malformed")
        if self.kind.code.startswith("O"):
            if not isinstance(self.body, list):
                raise ValueError("an array in it is malformed")
            return self.body[0] if self.size == () and len(self.body) == 1 else self.body
        if not isinstance(self.body, bytes):
            raise ValueError("an array in it is malformed")
        flat = np.frombuffer(self.body, self.kind.real())
        if math.prod(self.size) != flat.size:
            raise ValueError(f"an array in it has {flat.size} numbers for another shape")
        return flat.reshape(self.size).tolist()


class _Mark:
    pass


def read_plain(file: io.BytesIO) -> Any:
    """The one value. ValueError where it holds anything else; what pickletools raises, where it is damaged."""
    opcodes: Any = pickletools.genops(file)
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = next(i for i in range(len(stack) - 1, -1, -1) if isinstance(stack[i], _Mark))
        found = stack[at + 1 :]
        del stack[at:]
        return found

    for opcode, argument, _ in opcodes:
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "STOP":
            return _only(stack)
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("LIST", "TUPLE"):
            found = since_mark()
            stack.append(found if name == "LIST" else tuple(found))
        elif name == "DICT":
            values = since_mark()
            stack.append({})
            _put(stack[-1], values)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise ValueError("it ends too early")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "APPEND":
            value = stack.pop()
            _list(stack).append(value)
        elif name == "APPENDS":
            values = since_mark()
            _list(stack).extend(values)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _put(stack[-1], [key, value])
        elif name == "SETITEMS":
            values = since_mark()
            _put(stack[-1], values)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "POP":
            stack.pop()
        elif name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(module, attribute))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_called(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        else:
            raise ValueError(f"it asks for '{name}', which is refused")
    raise ValueError("it ends too early")


def _only(stack: list[Any]) -> Any:
    if len(stack) != 1:
        raise ValueError("it holds more than one value")
    return stack[0]


def _list(stack: list[Any]) -> list[Any]:
    if not stack or not isinstance(stack[-1], list):
        raise ValueError("it appends to something that is not a list")
    return stack[-1]


def _put(target: Any, entries: list[Any]) -> None:
    if not isinstance(target, dict) or len(entries) % 2:
        raise ValueError("it sets a key of something that is not a dict")
    for key, value in zip(entries[::2], entries[1::2], strict=True):
        if not isinstance(key, str | int):  # the hash of a nested tuple can take very long
            raise ValueError(f"it has a {type(key).__name__} as a key")
        target[key] = value


def _named(module: object, name: object) -> _Global:
    if module in _MODULES and name in _NAMES:
        return _Global(str(name))
    words = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "a name that is not text"
    raise ValueError(f"it asks for {words:.80}, which is refused")


def _called(called: object, arguments: object) -> Any:
    """The result of numpy's own functions, as a record."""
    if not isinstance(called, _Global) or not isinstance(arguments, tuple):
        raise ValueError("it calls something that is not a function, which is refused")
    if called.name == "_reconstruct":
        return NumpyArray()
    if called.name == "dtype" and arguments and isinstance(arguments[0], str):
        return _Dtype(arguments[0])
    if called.name == "scalar" and len(arguments) == 2:
        kind, body = arguments
        if isinstance(kind, _Dtype) and isinstance(body, bytes):
            return np.frombuffer(body, kind.real(), 1)[0].item()
    raise ValueError(f"it calls {called.name} in a way that numpy does not, which is refused")


def _build(target: object, state: object) -> None:
    if not isinstance(state, tuple):
        raise ValueError("a state in it is malformed")
    if isinstance(target, _Dtype):
        if len(state) > 1 and state[1] in ("<", ">", "|", "="):
            target.order = str(state[1])
        return
    if not isinstance(target, NumpyArray) or len(state) != 5 or not isinstance(state[2], _Dtype):
        raise ValueError("an array in it is malformed")
    size = state[1]
    if not isinstance(size, tuple) or not all(type(n) is int and 0 <= n < 1 << 40 for n in size):
        raise ValueError("an array in it has an invalid shape")
    target.size, target.kind, target.body = size, state[2], state[4]


def items(value: object, most: int) -> list[Any]:
    """A list, a tuple or an array as a list. `most`: a short array can be named a million times in a file."""
    if isinstance(value, NumpyArray):
        if not isinstance(value.body, bytes | list) or len(value.body) > 8 * most:
            raise ValueError(f"an array in it has more than {most} numbers")
        value = value.values()
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"a {type(value).__name__} where a list of at most {most} entries should be")
    return list(value)


def entry(value: object, key: str) -> Any:
    """Of a dict, which may be in an array of one object."""
    value = value.values() if isinstance(value, NumpyArray) else value
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"'{key}' is missing")
    return value[key]
