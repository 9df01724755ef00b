"""CALVIN as the user has checked it out: its 34 commands, what is read from the checkout, and chains of commands.

Nothing of CALVIN is part of prism. Its sentences, the conditions and effects of its commands, the placement of its
starts and its success functions are read from the checkout when they are needed:

    CALVIN/calvin_env/calvin_env/              the simulator, a package
    CALVIN/calvin_env/conf/                    scenes, cameras, success functions of the commands (YAML)
    CALVIN/calvin_models/conf/annotations/     the sentence of each command (YAML)
    CALVIN/calvin_models/calvin_agent/evaluation/multistep_sequences.py    conditions and effects
    CALVIN/calvin_models/calvin_agent/evaluation/utils.py                  where a start puts robot and blocks

The last two are modules that import Lightning and more; only literals are taken from the first, and one function from
the second, so that none of that has to be installed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.errors import PrismError

_COLOURS = ("red", "blue", "pink")
_SIDES = ("right", "left")

TASKS: tuple[str, ...] = (
    *(f"{verb}_{colour}_block_{side}" for verb in ("rotate", "push") for colour in _COLOURS for side in _SIDES),
    "move_slider_left", "move_slider_right", "open_drawer", "close_drawer",
    *(f"lift_{colour}_block_{place}" for colour in _COLOURS for place in ("table", "slider", "drawer")),
    "place_in_slider", "place_in_drawer", "push_into_drawer", "stack_block", "unstack_block",
    *(f"turn_{state}_{light}" for light in ("lightbulb", "led") for state in ("on", "off")),
)  # fmt: skip

# name -> command, and what a policy sees; None: chains of five
NAMES: dict[str, tuple[str | None, str]] = {
    f"calvin{command and '-'}{command}{suffix}": (command or None, inputs)
    for inputs, suffix in (("sensors", ""), ("state", "-state"))
    for command in ("", *TASKS)
}

VARIABLE = "PRISM_CALVIN"
PACKAGES = "pybullet gym==0.26.2 hydra-core hydra-colorlog gitpython numpy-quaternion opencv-python-headless scipy"
GET_IT = (
    "git clone --recursive https://github.com/mees/calvin && "
    f"pip install {PACKAGES}, then pass --calvin PATH or set {VARIABLE}=PATH"
)

Symbols = Mapping[str, Any]  # a symbolic state: {"drawer": "open", "red_block": "table", "grasped": 0, ...}


@dataclass(frozen=True)
class Rule:
    """One way to do a command: what must hold before, what holds after."""

    condition: Symbols  # a list of values: any of them
    effect: Symbols


@dataclass(frozen=True)
class Checkout:
    env: Path  # the repository calvin_env; calvin_models is beside it

    def sentences(self) -> dict[str, str]:
        """The command in words, as the evaluation gives it: one sentence a task."""
        found = _yaml(self._models("conf/annotations/new_playtable_validation.yaml"))
        return {str(task): str(texts[0]) for task, texts in found.items() if isinstance(texts, list) and texts}

    def rules(self) -> tuple[dict[str, tuple[Rule, ...]], dict[str, int]]:
        """Conditions and effects of each command, and its category: a chain has one of a category."""
        file = self._models("calvin_agent/evaluation/multistep_sequences.py")
        values = _literals(file, ("tasks", "task_categories"))
        ways = values["tasks"].items()
        rules = {task: tuple(Rule(way["condition"], way["effect"]) for way in of) for task, of in ways}
        return rules, dict(values["task_categories"])

    def placement(self) -> Callable[[Symbols], tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """The checkout's function from a symbolic start to robot_obs (15,), scene_obs (24,)."""
        file = self._models("calvin_agent/evaluation/utils.py")
        space = {"np": np, "pi": math.pi, "contextlib": contextlib, "hasher": fnv_32}
        place = _functions(file, ("temp_seed", "get_env_state_for_initial_condition"), space)
        function: Callable[[Symbols], tuple[Any, Any]] = place["get_env_state_for_initial_condition"]
        return lambda symbols: tuple(np.asarray(part, dtype=np.float64) for part in function(symbols))  # type: ignore[return-value]

    def _models(self, name: str) -> Path:
        file = self.env.parent / "calvin_models" / name
        if not file.is_file():
            raise PrismError(f"{file} is not there; give the whole checkout: {GET_IT}")
        return file


def find_checkout(path: Path | None = None) -> Checkout:
    """At `path`, at $PRISM_CALVIN, or where the package calvin_env is installed from."""
    given = path or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if given is not None:
        given = given.expanduser().resolve()
        for env in (given / "calvin_env", given):
            if (env / "calvin_env" / "envs").is_dir() and (env / "conf").is_dir():
                return Checkout(env)
        raise PrismError(f"{given} is not a checkout of CALVIN (calvin_env/calvin_env/envs is missing): {GET_IT}")
    spec = importlib.util.find_spec("calvin_env")
    if spec is None or not spec.submodule_search_locations:
        raise PrismError(f"CALVIN is not here: {GET_IT}")
    env = Path(next(iter(spec.submodule_search_locations))).resolve().parent
    if not (env / "conf").is_dir():
        raise PrismError(f"calvin_env is installed without its conf folder ({env}); use a checkout: {GET_IT}")
    return Checkout(env)


def fnv_32(text: str) -> int:
    """FNV-1, 32 bits, of UTF-16, started at 0: what pyhash's fnv1_32 gives, with which CALVIN seeds its starts."""
    value = 0
    for byte in text.encode("utf-16-le"):
        value = (value * 0x01000193) % 2**32 ^ byte
    return value


def _yaml(file: Path) -> Mapping[str, Any]:
    try:
        import yaml  # comes with hydra-core
    except ImportError as error:
        raise PrismError(f"CALVIN needs the package {error.name}: {GET_IT}") from error
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PrismError(f"{file}: not readable ({error}); check the checkout out again") from error
    if not isinstance(content, dict):
        raise PrismError(f"{file}: holds no table; check the checkout out again")
    return {str(key): value for key, value in content.items()}


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise PrismError(f"{file}: not readable ({error}); check the checkout out again") from error


def _literals(file: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Assignments of literals at the top of a module, without running it."""
    found: dict[str, Any] = {}
    for node in _parse(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return _all(file, names, found)


def _functions(file: Path, names: tuple[str, ...], space: Mapping[str, Any]) -> dict[str, Any]:
    """Functions of a module, defined with `space` as its globals: its imports are not run."""
    nodes: list[ast.stmt] = [n for n in _parse(file).body if isinstance(n, ast.FunctionDef) and n.name in names]
    scope = dict(space)
    exec(compile(ast.Module(nodes, []), str(file), "exec"), scope)  # the checkout's own code, as importing it would run
    return _all(file, names, scope)


def _all(file: Path, names: tuple[str, ...], found: dict[str, Any]) -> dict[str, Any]:
    if missing := [name for name in names if name not in found]:
        raise PrismError(f"{file}: '{missing[0]}' is not there; use CALVIN's main branch ({GET_IT})")
    return found


@contextlib.contextmanager
def quiet(errors: bool = False) -> Iterator[None]:
    """Nothing on stdout, from Python or from C, and with `errors` on stderr: pybullet, gym and calvin_env talk."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        if errors:
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        for number in (1, 2) if errors else (1,):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(nowhere.fileno(), number)
        yield


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

    def holds(key: str, value: Any) -> bool:
        return state.get(key) in (value if isinstance(value, list) else [value])

    return [{**state, **rule.effect} for rule in rules if all(holds(*item) for item in rule.condition.items())]


class Chains:
    """Draws chains of five commands that can be done one after the other, and starts from which one can be done.

    CALVIN's own: for each of 192 symbolic starts, uniform draws of five different commands until all are possible in
    turn, in one way each, and no two share a category. Drawing until it fits takes minutes; here the same distribution
    is drawn directly, by counting how many valid ways to go on every command leaves: the same distribution as the
    published chains, equally many from each start, and not the same thousand.
    """

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
