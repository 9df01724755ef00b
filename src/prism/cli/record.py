"""prism record"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.errors import PrismError, check_numbers

if TYPE_CHECKING:
    from prism.data.align import Gaps
    from prism.robots.guard import Guard
    from prism.robots.loop import Keys, Outcome
    from prism.robots.recording import Recording, Trace


@dataclass(frozen=True)
class Record:
    """Record demonstrations of a robot, or of its twin, by teleoperation.

    Try:
        prism record data/insert --robot ur5e-twin --teleop scripted --episodes 50
        prism record data/insert --robot ur5e-twin --teleop keyboard
        prism train data/insert && prism run runs/insert --robot ur5e-twin

    Each stream is recorded with its own time stamps and brought to the robot's rate. An episode is on disk as soon as
    it is over; Ctrl-C or a crash lose the one that is being recorded and no other. The same command adds episodes.
    Keys: s keeps an episode, d discards it, r discards it and begins the same one again, space or q stops the robot.
    """

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """The dataset; new episodes are added."""
    robot: Annotated[str, arg(metavar="NAME")] = ""
    """A twin (ur5e-twin), or a robot file such as my_ur.toml (docs/howto/robots.md)."""
    teleop: Annotated[str, arg(metavar="NAME")] = "keyboard"
    """Source of the commands: keyboard, gamepad, spacemouse, leader=ROBOT, or scripted (a twin's own demonstrator)."""
    noise: Annotated[float, arg(metavar="SHARE")] = 0.0
    """Disturb a script by this share of its commands, and record the undisturbed ones. 0.05 is good."""
    option: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Options of the robot, as task=tabletop-height realtime=false."""
    limits: Annotated[Path | None, option("FILE")] = None
    """Limits that narrow the robot's own, JSON or TOML (prism/robots/limits.py)."""
    episodes: int = 20
    """Number of episodes to record."""
    seconds: Annotated[float | None, option("S")] = None
    """Maximum length of an episode. Default: the robot's."""
    first_seed: Annotated[int | None, option("N")] = None
    """Seed of a twin's first scene. Default: after the last one in FOLDER."""
    text: Annotated[str | None, option("SENTENCE")] = None
    """Instruction of these episodes, stored as a text sensor. Another call may add others."""
    no_video: bool = False
    """Keep every pixel of the cameras. Default: h264 video, compressed meanwhile, about 30 times smaller."""
    on_overrun: Literal["drop", "stop"] = "drop"
    """If pictures arrive faster than they are compressed: drop some and mark the steps, or stop the episode."""
    lerobot: Annotated[Path | None, option("FOLDER")] = None
    """At the end, also write everything as a LeRobot v3 dataset to this folder."""
    failures: bool = False
    """Keep failed episodes of a twin, too."""

    def __post_init__(self) -> None:
        if not self.robot:
            raise PrismError("--robot NAME is missing: which robot shall move? ur5e-twin is a simulated one")
        ranges = {"[1, inf)": "episodes", "[0, inf)": "first_seed", "(0, inf)": "seconds", "[0, 1]": "noise"}
        check_numbers(self, "--", ranges)

    def run(self) -> None:
        from prism.io.files import explain_write_errors
        from prism.robots.contract import make_robot
        from prism.robots.guard import Guard
        from prism.robots.instruction import instruct
        from prism.robots.limits import read_limits
        from prism.robots.loop import Keys, TeleopCommander
        from prism.robots.program import announce, task_of
        from prism.robots.recording import Recording
        from prism.robots.teleop import make_teleop

        robot = make_robot(self.robot, self.option)
        if self.text is not None:
            instruct(robot, self.text)
        limits = robot.limits if self.limits is None else read_limits(self.limits, robot.limits, robot.actions.dim)
        recording = Recording(self.folder, robot, task_of(robot))
        self._check_lerobot()
        with recording.alone(), Keys() as keys, ExitStack() as stack:
            teleop = make_teleop(self.teleop, robot, keys.is_terminal, self.noise)
            stack.callback(teleop.close)  # a leader is connected already
            announce(robot, limits, keys.help("s: keep; d: discard; r: redo; space or q: stop now"))
            print(teleop.help, end="\n" if teleop.help else "")
            guard = Guard(robot, limits)
            robot.connect()
            try:
                self._record(guard, TeleopCommander(teleop), keys, recording)
            finally:
                guard.close()
                if recording.episodes:
                    with explain_write_errors(recording.path / "page.html", f"{recording.episodes} episodes are there"):
                        self._finish(recording)

    def _record(self, guard: Guard, commander: Any, keys: Keys, recording: Recording) -> None:
        from prism.robots.loop import drive
        from prism.robots.recording import Trace, choose_films

        robot, kept, attempts = guard.robot, 0, 0
        cameras = choose_films(robot, self.no_video)
        seed = recording.next_seed() if self.first_seed is None else self.first_seed
        polls = max(1, round(max(spec.fps or robot.rate for spec in robot.sensors) / robot.rate))
        while kept < self.episodes:
            attempts += 1
            if attempts > 4 * self.episodes + 20 and not keys.is_terminal:
                raise PrismError(f"{kept} of {attempts - 1} attempts were kept; look at the script, or use --failures")
            with recording.filming(cameras) as films:
                trace = Trace(robot, films, on_overrun=self.on_overrun)
                seconds = self.seconds or robot.episode_seconds
                end = drive(guard, commander, seed, seconds, keys, trace, polls, ends="dr")
                if end.by_operator:
                    raise KeyboardInterrupt
                if end.stopped and not robot.is_twin:
                    raise PrismError(f"the robot was stopped: {end.stopped}; look at it, then record again")
                verdict = self._verdict(end, trace, keys)
                gaps = self._keep(recording, trace, end, seed) if verdict == "keep" else ()
            kept += verdict == "keep"
            if verdict == "keep":
                said = "".join(f"; {gap}" for gap in gaps if gap.absent)
                print(f"episode {kept} of {self.episodes} (seed {seed}): {len(trace)} steps{said}")
            else:
                print(f"seed {seed}: {verdict}" + (f" ({end.stopped})" if end.stopped else ""))
            seed += verdict != "redo"

    def _verdict(self, end: Outcome, trace: Trace, keys: Keys) -> Literal["keep", "discard", "redo"]:
        pressed = end.keys
        if keys.is_terminal and self.teleop != "scripted" and end.success is None and not set(pressed) & set("sdr"):
            print("s: keep; d: discard; r: redo")
            while not set(pressed) & set("sdr"):
                pressed = keys.pressed(0.2)
        if "r" in pressed:
            return "redo"
        failed = end.success is False and not self.failures and "s" not in pressed
        return "discard" if "d" in pressed or failed or len(trace) < 2 else "keep"

    def _keep(self, recording: Recording, trace: Trace, end: Outcome, seed: int) -> tuple[Gaps, ...]:
        episode, gaps = trace.episode()
        told = {"commanded_by": trace.commanded_by(), "changed": trace.why, "stopped": end.stopped}
        made_by: dict[str, Any] = {"by": "prism record", "robot": trace.robot.name, "teleop": self.teleop}
        made_by |= {"noise": self.noise} if self.noise else {}
        made_by |= {"streams": trace.heard(gaps)}
        recording.add(episode, {**made_by, "seed": seed, "success": end.success, **told}, trace.details(), trace.films)
        return gaps

    def _check_lerobot(self) -> None:
        """PrismError where --lerobot would replace anything else than what was recorded here before."""
        from prism.data import open_dataset
        from prism.data.formats.episode_folders import RecordingSource, is_recording
        from prism.data.formats.lerobot import is_lerobot
        from prism.errors import need

        if self.lerobot is None:
            return
        for package in ("pyarrow", "av"):
            need(package, "data", "--lerobot")
        if self.lerobot.exists() and not is_lerobot(self.lerobot):
            raise PrismError(f"--lerobot {self.lerobot}: exists and is not a LeRobot dataset; choose another folder")
        if self.lerobot.exists():
            before = open_dataset(self.lerobot).lengths.tolist()
            ours = RecordingSource(self.folder).lengths.tolist() if is_recording(self.folder) else []
            if before != ours[: len(before)]:
                problem = f"--lerobot {self.lerobot}: exists, and holds other episodes than {self.folder}"
                raise PrismError(f"{problem}; choose another folder")

    def _finish(self, recording: Recording) -> None:
        """Summarise the recording in the terminal and as a page, and write it for LeRobot if requested."""
        from rich.console import Console

        from prism.cli.data import steps_bar
        from prism.data.convert import convert
        from prism.data.formats.episode_folders import RecordingSource
        from prism.data.inspect import print_summary
        from prism.report.dataset_page import write_page

        source, page = RecordingSource(recording.path), recording.path / "page.html"
        with steps_bar() as advance:
            summary = write_page(source, page, overwrite=True, progress=advance)
        print_summary(summary, Console())
        print(f"look at them: {page}")
        if self.lerobot is not None:
            with steps_bar() as advance:
                done = convert(source, self.lerobot, "lerobot", overwrite=True, progress=advance)
            print(f"LeRobot v3: {done.path}, {done.episodes} episodes")
