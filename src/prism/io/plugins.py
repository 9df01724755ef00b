"""Tables of what there is by name: rows of this package, and rows that other packages add by entry points.

    [project.entry-points."prism.methods"]      in the pyproject.toml of that package
    my_method = "my_method:METHOD"

Names are known without importing anything; a row is imported when it is asked for. An entry point whose name ends in *
is a family: a mapping of such rows, in a module that is quick to import. A name of this package cannot be replaced from
outside. Groups: prism.methods, prism.tasks, prism.sensors, prism.robots.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from prism.errors import PrismError

T = TypeVar("T")
_NEAR = 0.65  # of a name's letters that two names share in order


class Table(Mapping[str, T], Generic[T]):
    """Rows by name. A row that is a string, "module:object", is imported when it is first asked for."""

    def __init__(self, group: str, what: str, rows: Mapping[str, T | str], remedy: str = "") -> None:
        self._group, self._what, self._remedy = group, what, remedy
        self._rows: dict[str, T | str] = dict(rows)
        self._built_in = tuple(rows)

    def __getitem__(self, name: str) -> T:
        """PrismError, not KeyError, for a name that is unknown."""
        if name not in self._rows:
            self._rows[name] = self._load_row(name)
        row = self._rows[name]
        if isinstance(row, str):
            module, _, attribute = row.partition(":")
            row = self._rows[name] = getattr(import_module(module), attribute)
        return row

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in tuple(self)

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        for name, entry in self._added().items():
            names = tuple(self._load(entry)) if name.endswith("*") else (name,)
            yield from (name for name in names if name not in self._built_in)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def unknown(self, name: str) -> PrismError:
        names = tuple(self)
        close = near(name, names)
        few = ", ".join(names) if len(names) < 20 else f"for example {', '.join(names[:4])}"
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {few}" if names else self._remedy
        return PrismError(f"unknown {self._what} '{name}': {hint}")

    def _added(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in _found(entry_points, self._group, tuple(sys.path))}

    def _load_row(self, name: str) -> T:
        added = self._added()
        if name in added and not name.endswith("*"):
            row: T = self._load(added[name])
            return row
        for pattern, entry in added.items():
            if pattern.endswith("*") and name.startswith(pattern[:-1]) and name in (family := self._load(entry)):
                found: T = family[name]
                return found
        raise self.unknown(name)

    def _load(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:  # whatever a stranger's module raises
            package = entry.dist.name if entry.dist is not None else "?"
            raise PrismError(
                f"{self._what} '{entry.name}' comes from the package {package}, and its {entry.value} cannot be "
                f"imported ({type(error).__name__}: {error}): fix or remove that package"
            ) from error


@functools.cache  # a scan of every installed package; a table is asked for hundreds of rows
def _found(look: Callable[..., Iterable[EntryPoint]], group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(look(group=group))


def near(name: str, names: Iterable[str]) -> list[str]:
    """At most three of the names that one could have meant, best first, also without the first word of a name:
    drawer-open for metaworld-drawer-open. Empty where none is near."""
    scores: dict[str, float] = {}
    for known in names:
        for form in (known, known.partition("-")[2]):
            score = difflib.SequenceMatcher(None, name.lower(), form.lower()).ratio()
            if score >= _NEAR:
                scores[known] = max(score, scores.get(known, 0.0))
    return sorted(scores, key=lambda known: -scores[known])[:3]
