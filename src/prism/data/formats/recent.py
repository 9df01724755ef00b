"""A cache of what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def nbytes(array: Any) -> int:
    return int(array.nbytes)


class Recent(Generic[K, V]):
    """The values last used, as many as fit `limit`, each at its `cost`. Not for several threads at once."""

    def __init__(
        self, limit: int, cost: Callable[[V], int] = lambda value: 1, drop: Callable[[V], object] = lambda value: None
    ) -> None:
        self.limit, self._cost, self._drop = limit, cost, drop
        self._values: OrderedDict[K, V] = OrderedDict()
        self.total = 0

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def keep(self, key: K, value: V) -> V:
        """The value itself; one that alone is over the limit is not kept."""
        self.forget(key)
        if (cost := self._cost(value)) <= self.limit:
            self._values[key] = value
            self.total += cost
            while self.total > self.limit:
                self.forget(next(iter(self._values)))
        return value

    def forget(self, key: K) -> None:
        if key in self._values:
            value = self._values.pop(key)
            self.total -= self._cost(value)
            self._drop(value)
