"""The program of `prism run`: episodes of one commander on one robot, each recorded, and what is said of them.

    what will be driven, within which limits -> connect -> drive (loop.py), keep, say -> ... -> close -> summary

It knows no run folder and no server: who commands, where to record and what to say are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_client import Executor, Planner, PolicyInfo

from prism.data.formats.film import FilmWriter
from prism.data.formats.store import StoreSource
from prism.errors import PrismError
from prism.evaluation.results import write_json
from prism.inference.lanes import steady
from prism.robots.contract import Robot
from prism.robots.guard import Guard
from prism.robots.instruction import instruct_for
from prism.robots.limits import Limits
from prism.robots.loop import KEYS, Commander, Keys, Outcome, PolicyCommander, ask_success, check_fit, drive
from prism.robots.recording import Overrun, Recording, Trace, choose_films

if TYPE_CHECKING:
    from prism.report.rerun_log import RerunLog

Say = Callable[[str], None]


@dataclass
class Program:
    """Limits, commander and folders are checked when it is made; nothing is connected before `run`."""

    guard: Guard
    commander: Commander
    keys: Keys
    made_by: str  # what commands, in recordings: a run folder, a server, an episode
    recording: Recording | None = None  # None: nothing is recorded
    corrections: Recording | None = None  # of what a person did after taking over
    open_log: Callable[[], RerunLog] | None = None  # opened when the robot is connected
    seconds: float | None = None  # of an episode at most; default: the robot's own
    no_video: bool = False
    on_overrun: Overrun = "drop"
    json: Path | None = None
    say: Say = print
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)  # what was measured, an episode each
    _log: RerunLog | None = field(default=None, init=False)

    @property
    def robot(self) -> Robot:
        return self.guard.robot

    def run(self, seeds: Sequence[int]) -> None:
        """One episode a seed. PrismError where a real robot was stopped, KeyboardInterrupt where a person stopped."""
        dry = "dry run: nothing is sent. " if self.guard.dry else ""
        announce(self.robot, self.guard.limits, dry + self.keys.help(KEYS), self.say)
        with ExitStack() as stack:
            stack.callback(self._summarise)  # after a stop too, when the robot is let go
            self.robot.connect()
            stack.callback(self.guard.close)
            self._log = None if self.open_log is None else stack.enter_context(self.open_log())
            cameras = [] if self.recording is None else choose_films(self.robot, self.no_video, self.say)
            for number, seed in enumerate(seeds, 1):
                end = self._episode(seed, cameras)
                self._say_episode(f"episode {number} of {len(seeds)} (seed {seed})", end)
                if end.by_operator:
                    raise KeyboardInterrupt
                if end.stopped and not self.robot.is_twin:
                    raise PrismError(f"the robot was stopped: {end.stopped}; look at it, then run again")

    def _say_episode(self, which: str, end: Outcome) -> None:
        row = self.rows[-1]
        said = {True: "success", False: "failure", None: "not judged"}[row["success"]]
        counted = f"{row['commands']} commands, {row['late']} late, {row['limited']} limited"
        self.say(f"{which}: {said}, {counted}" + (f"; stopped: {end.stopped}" if end.stopped else ""))

    def _episode(self, seed: int, cameras: Sequence[str]) -> Outcome:
        """One, recorded; what was measured is the last of `rows`."""
        filming: AbstractContextManager[dict[str, FilmWriter]] = (
            nullcontext({}) if self.recording is None else self.recording.filming(cameras)
        )
        with filming as films:
            trace, stopped = Trace(self.robot, films, on_overrun=self.on_overrun), None
            try:
                seconds = self.seconds or self.robot.episode_seconds
                end = drive(self.guard, self.commander, seed, seconds, self.keys, trace)
                success, stopped = end.success, end.stopped
                if success is None and not stopped and not self.guard.dry:
                    success = ask_success(self.keys)
            except KeyboardInterrupt as error:
                self.guard.stop(why := str(error) or "by the operator")
                self._keep(trace, {"stopped": why if stopped is None else stopped, "seed": seed, "success": None})
                raise
            executor = getattr(self.commander, "executor", None)
            row = {
                "seed": seed,
                "success": success,
                "stopped": end.stopped,
                "commands": len(trace.latency_ms),
                "late": trace.late(),
                "limited": self.guard.changed,
                "plans": {} if executor is None else executor.stats.summary(),
            }
            self._keep(trace, row)
        self.rows.append(row)
        return end

    def _keep(self, trace: Trace, row: dict[str, Any]) -> None:
        if (self.recording is None and self._log is None) or len(trace) < 2:
            return
        episode, gaps = trace.episode()
        streams = episode.streams
        if self.recording is not None:
            made_by = {"by": "prism run", "run": self.made_by, "robot": self.robot.name}
            told = {"commanded_by": trace.commanded_by(), "changed": trace.why, "streams": trace.heard(gaps)}
            times = {"latency_ms": [round(ms, 3) for ms in trace.latency_ms]}
            kept = self.recording.add(episode, {**made_by, **row, **told, **times}, trace.details(), trace.films)
            fixed = {**made_by, "seed": row["seed"], "commanded_by": "operator"}
            for part in trace.corrections(episode) if self.corrections is not None else ():
                self.corrections.add(part, fixed, films=trace.films)  # type: ignore[union-attr]  # checked above
            if self._log is not None and trace.films:
                streams = StoreSource(kept).read(0).streams
        if self._log is not None:
            said = f"seed {row['seed']}, success {row['success']}"
            shown = replace(episode, streams=streams)
            self._log.episode(self.robot, shown, trace.details(), said, sent=not self.guard.dry)

    def _summarise(self) -> None:
        if not self.rows:
            return
        judged = [row["success"] for row in self.rows if row["success"] is not None]
        commands = sum(row["commands"] for row in self.rows)
        late = sum(row["late"] for row in self.rows) / max(commands, 1)
        rate = f"{sum(judged)} of {len(judged)} succeeded, " if judged else ""
        where = "nothing was sent or recorded" if self.recording is None else f"recorded in {self.recording.path}"
        self.say(f"{rate}{commands} commands, {late:.2%} late; {where}")
        if self.json is not None:
            success = sum(judged) / len(judged) if judged else None
            found = {"robot": self.robot.name, "success": success, "late_share": late, "episodes": self.rows}
            write_json(self.json, found)


def by_policy(
    planner: Planner, robot: Robot, limits: Limits, *, text: str | None = None, resize: bool = False,
    action_kind: str | None = None, look: bool = True, slow: float = 1.0, trained_on: str | None = None,
) -> tuple[PolicyCommander, list[str]]:  # fmt: skip
    """The commander of a policy that fits the robot, and the sensors that it needs. PrismError where it does not fit.

    text         instruction for a language-conditioned policy
    resize       bring pictures to the policy's size
    action_kind  of the policy's actions, where its data did not say
    look         compare the first readings with what the policy was trained on
    trained_on   the robot that it was trained on, where that is another one
    """
    check_robot(robot, planner.info, trained_on)
    if text is not None:
        instruct_for(robot, text, planner.info)
    sizes = check_fit(robot, planner.info, resize, action_kind)
    executor = Executor(
        planner,
        asynchronous=robot.realtime,
        patience=(0.4 if robot.parts == 1 else 0.2) / robot.rate,  # a plan that comes within its step serves it
        lost="stop",
        action_kind=action_kind,
        base=robot.actions.base,
        margin=min(limits.margin, limits.margin if planner.info.margin is None else planner.info.margin),
        look=look,
        clock=robot.now,
        hook=(lambda _: "slow") if slow < 1 else None,
        slow_factor=slow,
    )
    here = {spec.name for spec in robot.sensors}
    return PolicyCommander(executor, sizes), [name for name in planner.info.needs if name in here]


def check_robot(robot: Robot, info: PolicyInfo, trained_on: str | None = None) -> None:
    """PrismError if the policy was trained on another robot, unless --trained-on names it."""
    theirs, own = info.action.robot, robot.actions.spec.robot
    if trained_on is not None and trained_on != theirs:
        told = f"its data name '{theirs}'" if theirs else "its data name no robot"
        raise PrismError(f"--trained-on {trained_on}: {told}; drop it")
    if theirs and own and theirs != own and trained_on is None:
        raise PrismError(
            f"the policy was trained on robot '{theirs}', and this is '{own}': if its actions mean the same here, pass "
            f"--trained-on {theirs}"
        )


def task_of(robot: Robot) -> str:
    """Description of its recordings: a twin's scene, or the robot's name."""
    return str(getattr(robot, "task", robot.name))


def announce(robot: Robot, limits: Limits, keys: str, say: Say = print) -> None:
    """Announce the robot, its limits and how to stop it."""
    space = robot.actions
    names = tuple(space.name(i) for i in range(space.dim))
    steps = "" if robot.parts == 1 else f", {robot.fps:g} steps of {robot.parts}"
    say(f"{robot.name}: {robot.rate:g} commands a second{steps} ({space.spec.kind}); limits, always on:")
    for line in limits.describe(names, space.units):
        say(f"  {line}")
    say(keys)


@contextmanager
def without_pauses(robot: Robot) -> Iterator[None]:
    """Around a loop in real time: no pauses of Python's making."""
    if not robot.realtime:
        yield
        return
    with steady(realtime=True):
        yield
