"""`prism run` on the UR5e twin in real time beside `prism eval` of the same policy: success, late commands, limits.

Try:
    prism train tabletop-insert-left && prism train tabletop-stack-blue && prism train tabletop-can
    python -m research robots runs/tabletop-insert-left --beside runs/tabletop-stack-blue runs/tabletop-can --json F
    python -m research robots runs/tabletop-insert-left --simulated --episodes 3       on a busy machine

    run_success    of `prism run RUN --robot ur5e-twin`, its clock real
    eval_success   of `prism eval RUN`, the same seeds; `agree` is the share of episodes with the same outcome
    late_share     of the commands: sent after the end of their slot
    violations     of all commands that were sent: beyond the speed or the acceleration limit
    limited        commands that the guard replaced by others
    beside.TASK    the same for each task of the other runs (stacking: tabletop-stack-blue; placing: tabletop-can)

The policy makes 10 steps a second, as in its data; the twin gets 50 commands a second, a fifth of a step each, and its
physics goes on by each. Nothing of it was tried on hardware.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from tyro.conf import Positional, arg

from prism.cli.run import Run as Command
from prism.cli.style import option
from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.experiments.run_folder import EvalOptions, Run
from prism.robots.contract import Robot, make_robot
from prism.robots.guard import LATE
from research.report import Written


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run of `prism train` on a task of the tabletop."""
    task: Annotated[str | None, arg(metavar="NAME")] = None
    """Which of the tasks of a run that has several, or another than its own. Default: the run's."""
    beside: Annotated[tuple[Path, ...], option("RUN ...")] = ()
    """Other runs to play afterwards, each of their tasks."""
    episodes: int = 20
    """Of each task."""
    first_seed: int = 100_000
    """Of the first one."""
    simulated: bool = False
    """The twin's clock stands still while anything is computed: no command is ever late."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise PrismError(f"--episodes {self.episodes} is out of range: use 1 or more")


def run(config: Config, console: Console) -> dict[str, Any]:
    trained, others = Run(config.run_folder), [Run(folder) for folder in config.beside]
    first = (trained, trained.task(config.task))
    rest = [(other, task) for other in others for task in other.tasks()]
    if len({task for _, task in (first, *rest)}) < 1 + len(rest):
        raise PrismError("--beside: each task once; leave the run of one out")
    found = {task: play(one, task, config) for one, task in (first, *rest)}
    bar = found.pop(first[1])
    return {**bar, "beside": found, "simulated": config.simulated, **run_info(config.first_seed)}


def play(trained: Run, task: str, config: Config) -> dict[str, Any]:
    """One task: `prism eval`, then `prism run` of the same seeds."""
    options = (f"task={task}", *(["realtime=false"] if config.simulated else []))
    how = EvalOptions(task=task, episodes=config.episodes, first_seed=config.first_seed, workers=1)
    played = trained.play(how, progress=False)
    expected = {episode.seed: episode.success for episode in played.episodes}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "episodes"
        Command(
            trained.given, robot="ur5e-twin", option=options, episodes=config.episodes,
            first_seed=config.first_seed, out=out,
        ).run()  # fmt: skip
        robot = make_robot("ur5e-twin", options)
        violations = 0
        for file in sorted(out.glob(f"*/{COMMANDS}")):
            with np.load(file, allow_pickle=False) as sent:
                violations += beyond(robot, sent["command"], sent["sent"])
        rows = RecordingSource(out).provenances
    outcomes = {int(row["seed"]): bool(row["success"]) for row in rows}
    commands = sum(int(row["commands"]) for row in rows)
    return {
        "task": task,
        "run_success": sum(outcomes.values()) / config.episodes,
        "eval_success": sum(expected.values()) / config.episodes,
        "agree": sum(outcomes.get(seed, False) == success for seed, success in expected.items()) / config.episodes,
        "late_share": sum(int(row["late"]) for row in rows) / commands,
        "violations": violations,
        "limited": sum(int(row["limited"]) for row in rows),
        "commands": commands,
        "episodes": config.episodes,
        "rate": robot.rate,
    }


def beyond(robot: Robot, actions: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> int:
    """Commands of an episode, sent at `times`, that move faster, or speed up more, than the robot's limits allow. One
    that comes too late (safety.LATE) finds the robot standing still."""
    speed = actions[:, :3].astype(np.float64) * robot.actions.scales[:3] * robot.rate
    waited = np.diff(times, prepend=-np.inf) > LATE / robot.rate
    before = np.where(waited[:, None], 0.0, np.vstack([np.zeros((1, 3)), speed[:-1]]))
    fast = np.abs(speed) > np.array(robot.limits.speed[:3]) + 1e-4
    growth = np.abs(speed - before) * robot.rate
    return int((fast | (growth > np.array(robot.limits.acceleration[:3]) + 1e-2)).any(1).sum())


def show(result: dict[str, Any], console: Console) -> None:
    for task, found in {result["task"]: result, **result["beside"]}.items():
        console.print(task, highlight=False)
        for key in ("run_success", "eval_success", "agree", "late_share", "violations", "limited", "commands"):
            console.print(f"  {key}: {found[key]:.4g}", highlight=False)
