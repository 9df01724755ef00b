"""Tables of what there is by name: rows of this package, and rows that other packages add by entry points.

    [project.entry-points."prism.methods"]      in the pyproject.toml of that package
    my_method = "my_method:METHOD"

Names are known without importing anything; a row is imported when it is asked for. A name of this package cannot be
replaced from outside. Groups: prism.methods, prism.tasks, prism.sensors, prism.robots.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from prism.errors import PrismError

T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """Rows by name. A row that is a string, "module:object", is imported when it is first asked for."""

    def __init__(self, group: str, what: str, rows: Mapping[str, T | str], also: str = "") -> None:
        self._group, self._what, self._also = group, what, also
        self._rows: dict[str, T | str] = dict(rows)
        self._built_in = tuple(rows)

    def __getitem__(self, name: str) -> T:
        """PrismError, not KeyError, for a name that is unknown."""
        if name not in self._rows:
            self._rows[name] = self._load(self._added().get(name), name)
        row = self._rows[name]
        if isinstance(row, str):
            module, _, attribute = row.partition(":")
            row = self._rows[name] = getattr(import_module(module), attribute)
        return row

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._added()

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from (name for name in self._added() if name not in self._built_in)

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def unknown(self, name: str) -> PrismError:
        names = tuple(self)
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        close = close or difflib.get_close_matches(self._also + name, names, n=3, cutoff=0.5)
        few = ", ".join(names) if len(names) < 20 else f"for example {', '.join(names[:4])}"
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {few}"
        return PrismError(f"unknown {self._what} '{name}': {hint}")

    def _added(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._group)}

    def _load(self, entry: EntryPoint | None, name: str) -> T:
        if entry is None:
            raise self.unknown(name)
        try:
            row: T = entry.load()
        except Exception as error:  # whatever a stranger's module raises
            package = entry.dist.name if entry.dist is not None else "?"
            raise PrismError(
                f"{self._what} '{name}' comes from the package {package}, and its {entry.value} cannot be imported "
                f"({type(error).__name__}: {error}): mend or remove that package"
            ) from error
        return row
