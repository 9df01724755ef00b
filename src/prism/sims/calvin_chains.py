"""Chains of five commands that can be done one after the other, and starts from which one command can be done.

CALVIN's own chains: for each of 192 symbolic starts, uniform draws of five different commands until all are possible in
turn, in one way each, and no two share a category. Drawing until it fits takes its script minutes; here the same
distribution is drawn directly, by counting how many valid ways to go on every command leaves. So these are chains from
the same distribution as the published ones, equally many from each start, and not the same thousand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prism.errors import PrismError
from prism.sims.calvin_checkout import Rule, Symbols

LENGTH = 5
BLOCKS = ("red_block", "blue_block", "pink_block")
# What a start may be; CALVIN's hash of a start depends on this order.
_VALUES: dict[str, tuple[Any, ...]] = {
    "led": (0, 1),
    "lightbulb": (0, 1),
    "slider": ("right", "left"),
    "drawer": ("closed", "open"),
    **dict.fromkeys(BLOCKS, ("table", "slider_right", "slider_left")),
    "grasped": (0,),
}
_Frozen = tuple[tuple[str, Any], ...]


def starts() -> list[dict[str, Any]]:
    """Symbolic starts: one or two blocks on the table, the others alone on a side of the cabinet."""
    found = []
    for values in itertools.product(*_VALUES.values()):
        start = dict(zip(_VALUES, values, strict=True))
        places = [start[block] for block in BLOCKS]
        if places.count("table") in (1, 2) and max(places.count("slider_right"), places.count("slider_left")) < 2:
            found.append(start)
    return found


def after(state: Symbols, rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """The states that a command can lead to; none: it is not possible here."""
    return [{**state, **rule.effect} for rule in rules if _holds(state, rule.condition)]


def _holds(state: Symbols, condition: Symbols) -> bool:
    return all(
        state.get(key) in value if isinstance(value, list) else state.get(key) == value
        for key, value in condition.items()
    )


class Chains:
    """Draws chains for a table of rules."""

    def __init__(self, rules: Mapping[str, Sequence[Rule]], categories: Mapping[str, int]) -> None:
        if missing := [task for task in rules if task not in categories]:
            raise PrismError(f"CALVIN's table of categories lacks '{missing[0]}': use its main branch")
        self._rules, self._categories = rules, categories
        self._starts = starts()
        self._order = np.random.default_rng(0).permutation(len(self._starts))
        self._count = functools.cache(self._count_ways)

    def _moves(self, state: _Frozen, used: frozenset[int]) -> Iterator[tuple[str, _Frozen, frozenset[int]]]:
        for task, rules in self._rules.items():
            category = self._categories[task]
            if category in used:
                continue
            states = after(dict(state), rules)
            if len(states) == 1:  # possible, in one way
                yield task, tuple(states[0].items()), used | {category}

    def _count_ways(self, state: _Frozen, used: frozenset[int], left: int) -> int:
        if left == 0:
            return 1
        return sum(self._count(to, also, left - 1) for _, to, also in self._moves(state, used))

    def chain(self, number: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The start and the commands of chain `number`; the same for ever, whatever else is drawn."""
        start = self._starts[self._order[number % len(self._starts)]]
        rng = np.random.default_rng((5, number))
        state, used, tasks = tuple(start.items()), frozenset[int](), []
        for left in range(LENGTH, 0, -1):
            moves = list(self._moves(state, used))
            ways = np.array([self._count(to, also, left - 1) for _, to, also in moves], dtype=np.float64)
            if not ways.sum():
                raise PrismError(f"no chain of {LENGTH} commands begins at {start}: CALVIN's rules have changed")
            task, state, used = moves[int(rng.choice(len(moves), p=ways / ways.sum()))]
            tasks.append(task)
        return dict(start), tuple(tasks)

    def start_for(self, task: str, number: int) -> dict[str, Any]:
        """A symbolic state in which the command can be done, drawn uniformly from the fewest commands away."""
        options = self._possible(task)
        return dict(options[int(np.random.default_rng((1, number)).integers(len(options)))])

    @functools.cache  # noqa: B019 - lives as long as the environment
    def _possible(self, task: str) -> tuple[_Frozen, ...]:
        level: dict[_Frozen, None] = dict.fromkeys(tuple(start.items()) for start in self._starts)
        seen = dict(level)
        for _ in range(LENGTH):
            if found := tuple(state for state in level if len(after(dict(state), self._rules[task])) == 1):
                return found
            further = (to for state in level for _, to, _ in self._moves(state, frozenset()))
            level = dict.fromkeys(state for state in further if state not in seen)
            seen.update(level)
        raise PrismError(f"CALVIN's '{task}' is possible from no start within {LENGTH} commands")
