"""CALVIN as the user has checked it out: where it is, and what is read from it.

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
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError

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
    env: Path  # the repository calvin_env
    models: Path | None  # the folder calvin_models

    def sentences(self) -> dict[str, str]:
        """The command in words, as the evaluation gives it: one sentence a task."""
        file = self._models("conf/annotations/new_playtable_validation.yaml")
        found = _yaml(file)
        return {str(task): str(texts[0]) for task, texts in found.items() if isinstance(texts, list) and texts}

    def rules(self) -> tuple[dict[str, tuple[Rule, ...]], dict[str, int]]:
        """Conditions and effects of each command, and its category: a chain has one of a category."""
        file = self._models("calvin_agent/evaluation/multistep_sequences.py")
        values = _literals(file, ("tasks", "task_categories"))
        rules = {
            task: tuple(Rule(way["condition"], way["effect"]) for way in ways) for task, ways in values["tasks"].items()
        }
        return rules, dict(values["task_categories"])

    def placement(self) -> Callable[[Symbols], tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """The checkout's function from a symbolic start to robot_obs (15,), scene_obs (24,)."""
        file = self._models("calvin_agent/evaluation/utils.py")
        space = {"np": np, "pi": math.pi, "contextlib": contextlib, "hasher": fnv_32}
        place = _functions(file, ("temp_seed", "get_env_state_for_initial_condition"), space)
        function: Callable[[Symbols], tuple[Any, Any]] = place["get_env_state_for_initial_condition"]
        return lambda symbols: tuple(np.asarray(part, dtype=np.float64) for part in function(symbols))  # type: ignore[return-value]

    def _models(self, name: str) -> Path:
        if self.models is None or not (self.models / name).is_file():
            where = self.models or self.env.parent
            raise PrismError(f"{where}: {name} is not there; give the whole checkout: {GET_IT}")
        return self.models / name


def find_checkout(path: Path | None = None) -> Checkout:
    """At `path`, at $PRISM_CALVIN, or where the package calvin_env is installed from."""
    given = path or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if given is not None:
        given = given.expanduser().resolve()
        for env in (given / "calvin_env", given):
            if (env / "calvin_env" / "envs").is_dir() and (env / "conf").is_dir():
                return _with_models(env)
        raise PrismError(f"{given} is no checkout of CALVIN (calvin_env/calvin_env/envs is missing): {GET_IT}")
    spec = importlib.util.find_spec("calvin_env")
    if spec is None or not spec.submodule_search_locations:
        raise PrismError(f"CALVIN is not here: {GET_IT}")
    env = Path(next(iter(spec.submodule_search_locations))).resolve().parent
    if not (env / "conf").is_dir():
        raise PrismError(f"calvin_env is installed without its conf folder ({env}); use a checkout: {GET_IT}")
    return _with_models(env)


def _with_models(env: Path) -> Checkout:
    models = env.parent / "calvin_models"
    return Checkout(env, models if models.is_dir() else None)


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
