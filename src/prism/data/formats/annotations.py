"""CALVIN's language annotations: a pickle, read without ever running what it asks for.

A pickle is a program: it names functions and has them called. Here every name that it may use is replaced by a
stand-in that only records what it is given, so no function of numpy, of Python or of anybody else is called on
a file's behalf, and every other name is refused. The stand-ins understand plain arrays and numpy's numbers.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.formats.npz import npy_header
from prism.errors import PrismError, reason

_MAX_FILE = 1 << 30
_MAX_TEXT = 4096  # characters of one instruction
_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


@dataclass(frozen=True)
class Annotation:
    """One instruction and the frames that it describes, both ends included."""

    text: str
    first: int
    last: int


def read_annotations(file: Path) -> tuple[Annotation, ...]:
    """`language.ann` and `info.indx` of an auto_lang_ann.npy."""
    try:
        if file.stat().st_size > _MAX_FILE:
            raise ValueError("it is larger than 1 GB")
        texts, spans = (_items(part) for part in _load(file.read_bytes()))
        if len(texts) != len(spans):
            raise ValueError(f"{len(texts)} instructions for {len(spans)} spans of frames")
        found = [_annotation(text, span) for text, span in zip(texts, spans, strict=True)]
    except FileNotFoundError:
        raise PrismError(f"{file}: not found; copy the dataset again") from None
    except Exception as error:  # a pickle can fail in any way
        raise PrismError(
            f"{file}: not CALVIN's language annotations ({reason(error)}); remove it to read the dataset without them"
        ) from None
    return tuple(found)


def _annotation(text: object, span: object) -> Annotation:
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ValueError("an instruction of 'language.ann' is no text of sensible length")
    ends = _items(span)
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ValueError("an entry of 'info.indx' is no pair of frame numbers")
    first, last = ends
    if not 0 <= first <= last:
        raise ValueError(f"'info.indx' has frames {first}..{last}")
    return Annotation(text, first, last)


def _items(value: object) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(f"a {type(value).__name__} where a list should be")


def _load(content: bytes) -> tuple[Any, Any]:
    """`language.ann` and `info.indx` of the one dict in a .npy file of shape (), with arrays as nested lists."""
    file = io.BytesIO(content)
    shape, _, dtype = npy_header(file)
    if shape != () or not dtype.hasobject:
        raise ValueError(f"it holds {dtype} {shape}, not one object")

    # Made anew for every file: a pickle may set attributes on what it is given, and nothing of that must stay.
    class Dtype:
        def __init__(self, code: object = "", *_: object) -> None:
            self.code, self.order = str(code), "<"

        def __setstate__(self, state: object) -> None:
            if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
                self.order = str(state[1])

        def real(self) -> np.dtype[Any]:
            if self.code[:1] not in ("f", "i", "u", "b") or len(self.code) > 3:
                raise ValueError(f"it holds an array of type {self.code!r:.20}")
            return np.dtype(self.code if self.order in "|=" else self.order + self.code)

    class NumpyArray:
        def __init__(self, *_: object) -> None:
            self.state: tuple[Any, ...] = ()

        def __setstate__(self, state: object) -> None:
            if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], Dtype):
                raise ValueError("an array in it is malformed")
            self.state = state

        def values(self) -> Any:
            _, size, kind, _, body = self.state
            if kind.code.startswith("O"):
                return body[0] if size == () and isinstance(body, list) and len(body) == 1 else body
            flat = np.frombuffer(body, kind.real())
            if int(np.prod([int(n) for n in size], dtype=np.int64)) != flat.size:
                raise ValueError(f"an array in it has {flat.size} numbers for shape {size!r:.40}")
            return flat.reshape(size).tolist()

    def scalar(kind: object, body: object) -> object:
        if not isinstance(kind, Dtype) or not isinstance(body, bytes):
            raise ValueError("a number in it is malformed")
        return np.frombuffer(body, kind.real(), 1)[0].item()

    def reconstruct(*_: object) -> NumpyArray:
        return NumpyArray()

    stand_ins = {"dtype": Dtype, "ndarray": NumpyArray, "scalar": scalar, "_reconstruct": reconstruct}

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module in _MODULES and name in stand_ins:
                return stand_ins[name]
            raise ValueError(f"it asks for {module}.{name}, which is refused")

    def plain(value: Any, depth: int = 0) -> Any:
        value = value.values() if isinstance(value, NumpyArray) else value
        if depth < 2 and isinstance(value, list | tuple):  # a list of pairs
            return [plain(item, depth + 1) for item in value]
        return value

    def entry(value: Any, key: str) -> Any:
        value = value.values() if isinstance(value, NumpyArray) else value
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"'{key}' is missing")
        return value[key]

    top = Reader(file).load()
    return plain(entry(entry(top, "language"), "ann")), plain(entry(entry(top, "info"), "indx"))
