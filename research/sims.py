"""How fast each simulator runs on one core: steps and camera pictures a second.

Try:
    python -m research sims --json sims.json
    python -m research sims --sims metaworld --seconds 10

    steps_per_s.SIM    steps of its first task without pictures, random actions, resets included
    frames_per_s.SIM   camera pictures of its first task with pixels (all its cameras), physics and resets included

Medians over rounds in which all take turns; this process and the threads of the software renderer are held on one
core. The seconds are those that the process computed, which a busy machine does not disturb and which are the wall
clock of an idle one; wall_steps_per_s and wall_frames_per_s are beside them. A simulator that is not installed is left
out with a line that says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from prism.bench.timing import interleave
from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.sims.environment import Env
from prism.sims.task_table import make_env, task_names
from research.report import Written

PIXELS = "-pixels"
_CHUNK = 16  # steps a sample


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    sims: Annotated[tuple[str, ...], option("NAME ...")] = ()
    """pusht, metaworld, robosuite, ...; default: all that are installed."""
    seconds: float = 30.0
    """Of CPU time, for all of them."""
    seed: int = 0
    """Of resets and actions."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise PrismError(f"--seconds {self.seconds:g} is out of range: use a positive number")
        if unknown := set(self.sims) - set(simulators()):
            raise PrismError(f"unknown simulator '{min(unknown)}': use some of {', '.join(simulators())}")


def simulators() -> dict[str, tuple[str, str | None]]:
    """By the first word of its tasks' names: its first task, and its first task with pixels (None: it has none)."""
    found: dict[str, tuple[str, str | None]] = {}
    for name in task_names():
        sim = name.partition("-")[0]
        plain, pixels = found.get(sim, (name, None))
        if pixels is None and name.endswith(PIXELS):
            pixels = name
        found[sim] = plain, pixels
    return found


@contextmanager
def one_core() -> Iterator[None]:
    """Hold this process and the threads it starts on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Player:
    """Random actions in an environment, `_CHUNK` steps a call, episode after episode."""

    def __init__(self, env: Env, seed: int) -> None:
        self.env = env
        self.pictures = sum(sensor.kind == "rgb" for sensor in env.sensors)
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        env.reset(seed)

    def __call__(self) -> None:
        env = self.env
        for _ in range(_CHUNK):
            if env.step(self._rng.uniform(env.action_low, env.action_high).astype(np.float32)).done:
                self._seed += 1
                env.reset(self._seed)


def measure(sims: Sequence[str], seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, float]:
    """The flat keys of the module's docstring, and p99_ms_step.SIM, p99_ms_frame.SIM (of means over a few steps)."""
    players: dict[str, Player] = {}
    table = simulators()
    for sim in sims:
        plain, pixels = table[sim]
        for key, task in ((f"steps_per_s.{sim}", plain), (f"frames_per_s.{sim}", pixels)):
            if task is None:
                continue
            try:
                players[key] = Player(make_env(task), seed)
            except PrismError as error:
                say(f"{key} left out: {error}")
    if not players:
        raise PrismError("no simulator can be measured here: pip install 'prism-policy[sims]'")
    times = interleave(players, np.random.default_rng(seed), seconds, min_rounds=5)
    figures: dict[str, float] = {}
    for key, player in players.items():
        count = _CHUNK * (player.pictures if key.startswith("frames") else 1)
        figures[key] = count / float(np.median(times[key].cpu))
        figures[f"wall_{key}"] = count / float(np.median(times[key].wall))
        figures[f"p99_ms_{key.replace('s_per_s', '')}"] = 1e3 * float(np.quantile(times[key].cpu, 0.99)) / count
        player.env.close()
    return figures


def run(config: Config, console: Console) -> dict[str, Any]:
    table = simulators()
    sims = config.sims or tuple(table)
    with one_core(), console.status(f"measuring {', '.join(sims)}: about {config.seconds:.0f} s of one core"):
        figures = measure(sims, config.seconds, config.seed, lambda line: console.print(line, highlight=False))
    return {**figures, "tasks": {sim: list(table[sim]) for sim in sims}, **run_info(config.seed)}


def show(result: dict[str, Any], console: Console) -> None:
    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("simulator")
    for name in ("steps/s", "frames/s", "wall: steps/s", "frames/s"):
        shown.add_column(name, justify="right")
    for sim in result["tasks"]:
        keys = (f"{wall}{what}_per_s.{sim}" for wall in ("", "wall_") for what in ("steps", "frames"))
        shown.add_row(sim, *(f"{result[key]:.0f}" if key in result else "-" for key in keys))
    console.print(shown)
