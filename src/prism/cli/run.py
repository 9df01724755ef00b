"""prism run"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from prism.cli.style import OutputFile, option
from prism.errors import PrismError, check_numbers

if TYPE_CHECKING:
    from prism_client import Planner

    from prism.controller import ControllerConfig
    from prism.data.formats.film import FilmWriter
    from prism.experiments.run_folder import Run as Trained
    from prism.report.rerun_log import RerunLog
    from prism.robots.contract import Robot
    from prism.robots.guard import Guard
    from prism.robots.limits import Limits
    from prism.robots.loop import Keys, Outcome
    from prism.robots.recording import Recording, Trace


@dataclass(frozen=True)
class Run:
    """Drive a robot, or its twin, with a trained policy.

    Try:
        prism run runs/tabletop-insert-left --robot ur5e-twin --episodes 5
        prism run runs/my-task --robot my-robot --limits limits.toml --dry-run
        prism run runs/my-task --robot my-robot --limits limits.toml --slow 0.25
        prism run runs/my-task --robot ur5e-twin --rerun run.rrd         for the rerun viewer
        prism run --replay runs/my-task/robot/episode-000003 --robot ur5e-twin
        prism run runs/my-task --robot my-robot --teleop keyboard        t takes over, and gives back

    Nothing moves before the policy fits the robot: sensors, shapes, rate, action space. Limits are printed and always
    on. Space, q or Ctrl-C stop the robot; s and f say that an episode succeeded or failed. Each episode is recorded;
    what somebody who took over did is recorded beside them, to learn from it:
        prism train data/my-task runs/my-task/robot-corrections --init runs/my-task
    """

    run_folder: Annotated[Path | None, Positional, arg(metavar="RUN")] = None
    """A run folder, or one checkpoint in it; not needed with --server."""
    robot: Annotated[str, arg(metavar="NAME")] = ""
    """A twin (ur5e-twin), or a robot's file, as my_ur.toml (docs/howto/robots.md)."""
    option: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Options of the robot, as task=tabletop-height realtime=false. A twin's task is by default that of RUN's data."""
    limits: Annotated[Path | None, option("FILE")] = None
    """Limits that narrow the robot's own, JSON or TOML (prism/robots/limits.py)."""
    server: Annotated[str | None, option("URL")] = None
    """Get plans from `prism serve` at this address, instead of computing them here."""
    api_key_file: Annotated[Path | None, option("FILE")] = None
    """Send that server the key in this file; PRISM_API_KEY does the same."""
    silence: Annotated[float, option("S")] = 0.03
    """Stand still where the server gives no sign of life for so long; more for a network that pauses now and then."""
    replay: Annotated[Path | None, option("EPISODE")] = None
    """Do what was done in a recorded episode (a folder episode-000000) once more; a twin begins in the same scene."""
    live: Annotated[int | None, option("PORT")] = None
    """Show a live page meanwhile, http://127.0.0.1:PORT: sensors, candidates, latency. 0: a free port."""
    episodes: int = 1
    """How many."""
    seconds: Annotated[float | None, option("S")] = None
    """Length of an episode at most. Default: the robot's own."""
    teleop: Annotated[str | None, option("NAME")] = None
    """Who may take over from the policy: keyboard (t), gamepad, spacemouse, leader=ROBOT, or scripted (a twin)."""
    slow: Annotated[float, arg(metavar="FACTOR")] = 1.0
    """Move at this share of the speed: 0.25 for the first time. A replay has the speed of its recording."""
    dry_run: bool = False
    """Read the sensors, plan and limit, and send nothing."""
    text: Annotated[str | None, option("SENTENCE")] = None
    """What to do, for a policy that is told. Default: what the robot's own text sensor says, if it has one."""
    resize: bool = False
    """Bring the robot's pictures to the size that the policy was trained with."""
    trust_sensors: bool = False
    """Do not compare the first readings with what the policy was trained on: units, sizes, colours."""
    action_kind: Annotated[str | None, option("KIND")] = None
    """What the policy's actions are, absolute, delta or velocity, where its data did not say."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the controller: --set exec_horizon=2 plans more often."""
    backend: Annotated[str, arg(metavar="NAME")] = "eager"
    """What computes the policy here: eager, compile, onnx, onnx-int8."""
    device: Annotated[str, option("NAME")] = "auto"
    """Where it is computed: cpu, cuda, mps, or auto (cuda where there is one)."""
    first_seed: int = 100_000
    """Of the first episode: of the policy's random numbers, and of a twin's scene."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Where the episodes are recorded; they are added to those that are there. Default: RUN/robot."""
    no_video: bool = False
    """Keep every pixel of the cameras. Default: h264 video, compressed meanwhile, about 30 times smaller."""
    json: OutputFile = None
    """Write what was measured to this file too."""
    rerun: OutputFile = None
    """Write every episode for the rerun viewer, after it: sensors, candidates, commands; one .rrd file
    (pip install 'prism-policy[rerun]')."""

    def __post_init__(self) -> None:
        if not self.robot:
            raise PrismError("--robot NAME is missing: which robot shall move? ur5e-twin is a simulated one")
        if [self.run_folder, self.server, self.replay].count(None) != 2:
            raise PrismError("give a run folder or --server URL, one of them; or an episode to --replay")
        if self.replay is not None and self.slow != 1:
            raise PrismError("--slow would only cut the speeds of a --replay, which is then another path: drop --slow")
        if not 0.01 <= self.silence <= 10:
            raise PrismError(f"--silence {self.silence:g} is out of range: use 0.01 to 10 seconds")
        if self.server is not None and (self.set or self.device != "auto"):
            raise PrismError("--set and --device are of a policy that is computed here: give them to prism serve")
        if self.server is None and self.api_key_file is not None:
            raise PrismError("--api-key-file is for a --server, and there is none")
        ranges = {"[1, inf)": "episodes", "[0, inf)": "first_seed", "(0, inf)": "seconds", "(0, 1]": "slow"}
        check_numbers(self, "--", ranges)

    def run(self) -> None:
        need_client("prism run")
        from prism.robots.guard import Guard
        from prism.robots.limits import read_limits
        from prism.robots.loop import KEYS, Keys
        from prism.robots.recording import Recording

        for file in (self.json, self.rerun):
            if file is not None and file.exists():
                raise PrismError(f"{file} exists already: remove it, or choose another name")
        robot = self._robot()
        own = robot.limits if self.limits is None else read_limits(self.limits, robot.limits, robot.actions.dim)
        limits = own.slowed(self.slow)
        with ExitStack() as stack:
            keys = stack.enter_context(Keys())
            stack.enter_context(_steady(robot))  # before the threads of a policy start: they go behind it, not last
            commander, needs = self._commander(robot, limits, keys, stack)
            recording = None if self.dry_run else Recording(self._out(robot), robot, _task(robot))
            if recording is not None:
                stack.enter_context(recording.alone())
            announce(robot, limits, f"{'dry run: nothing is sent. ' if self.dry_run else ''}{KEYS}")
            guard, rows = Guard(robot, limits, needs, self.dry_run), list[dict[str, Any]]()
            stack.callback(self._summarise, rows, robot, recording)  # after a stop too, when the robot is let go
            robot.connect()
            stack.callback(guard.close)
            self._episodes(guard, commander, keys, recording, stack.enter_context(self._rerun(robot)), rows)

    def _robot(self) -> Robot:
        """A twin of several scenes shows that of the run, or of the episode to replay, where no option says which."""
        from prism.robots.contract import ROBOTS, make_robot

        scenes = getattr(ROBOTS[self.robot], "tasks", ()) if self.robot in ROBOTS else ()
        if not scenes or any(given.startswith("task=") for given in self.option):
            return make_robot(self.robot, self.option)
        shown = [task for task in self._shown() if task in scenes]
        if len(shown) > 1:
            raise PrismError(f"{self.run_folder} learned {len(shown)} tasks: say which, --option task={shown[0]}")
        robot = make_robot(self.robot, (*self.option, *(f"task={task}" for task in shown)))
        said = f"as {self.run_folder or self.replay} says" if shown else f"its default: {self._why_unknown()}"
        warning = "" if shown else "warning: "
        print(f"{warning}{self.robot}: task={_task(robot)}, {said} (--option task=... decides)")
        return robot

    def _why_unknown(self) -> str:
        """Why nothing names a scene of the twin."""
        from prism.experiments.run_folder import Run as Trained

        trained = None if self.run_folder is None else Trained(self.run_folder)
        data = trained.experiment.demonstrations.path if trained is not None and trained.has_experiment else None
        if data is not None and "://" not in str(data) and not Path(data).exists():
            return f"{self.run_folder} learned from {data}, which is not there any more"
        return f"{self.run_folder or self.replay or self.server} names no scene of this twin"

    def _shown(self) -> tuple[str, ...]:
        """The tasks of what the policy learned from, or of the episode to replay."""
        from prism.data.formats.store import StoreSource, is_store
        from prism.experiments.run_folder import Run as Trained

        if self.run_folder is not None:
            return Trained(self.run_folder).shown()
        return (StoreSource(self.replay).task,) if self.replay is not None and is_store(self.replay) else ()

    def _commander(self, robot: Robot, limits: Limits, keys: Keys, stack: ExitStack) -> tuple[Any, list[str]]:
        """Who commands, and the sensors that it needs."""
        from prism_client import Executor

        from prism.robots.instruction import instruct_for
        from prism.robots.loop import PolicyCommander, ReplayCommander, Takeover, check_fit
        from prism.robots.teleop import make_teleop

        if self.replay is not None:
            return ReplayCommander(_recorded(self.replay, robot)), []
        planner = stack.enter_context(self._planner(robot))
        if self.text is not None:
            instruct_for(robot, self.text, planner.info)
        sizes = check_fit(robot, planner.info, self.resize, self.action_kind)
        executor = Executor(
            planner,
            asynchronous=robot.realtime,
            patience=(0.4 if robot.parts == 1 else 0.2) / robot.rate,  # a plan that comes within its step serves it
            lost="stop",
            action_kind=self.action_kind if planner.info.get("action_kind") is None else None,
            base=robot.actions.base,
            margin=limits.margin,
            look=not self.trust_sensors,
            clock=robot.now,
            hook=(lambda _: "slow") if self.slow < 1 else None,
            slow_factor=self.slow,
        )
        commander: Any = PolicyCommander(executor, sizes)
        if self.teleop is not None:
            teleop = make_teleop(self.teleop, robot, keys.is_terminal)
            stack.callback(teleop.close)
            print(teleop.help, end="\n" if teleop.help else "")
            commander = Takeover(commander, teleop)
        needs = [name for name in planner.info.get("needs", ()) if name in {s.name for s in robot.sensors}]
        return commander, needs

    def _out(self, robot: Robot) -> Path:
        if self.out is not None:
            return self.out
        return Path("recordings") / robot.name if self.run_folder is None else self.run_folder / "robot"

    @contextmanager
    def _planner(self, robot: Robot) -> Iterator[Planner]:
        if self.server is not None:
            from prism_client import PlanError, RemotePlanner

            from prism.cli.serve import read_key

            key, silence = read_key(self.api_key_file), self.silence if robot.realtime else None
            try:
                remote = RemotePlanner(self.server, api_key=key, silence=silence)
            except PlanError as error:
                raise PrismError(f"--server {error}") from None
            try:
                yield remote
            finally:
                remote.close()
            return
        from prism.controller import Controller
        from prism.experiments.run_folder import Run as Trained
        from prism.inference.backends import backend_device, check_backend, load_backend
        from prism.inference.lanes import LocalPlanner
        from prism.inference.tokens import warm_up

        check_backend(self.backend)
        assert self.run_folder is not None
        trained = Trained(self.run_folder)
        device = backend_device(self.device, self.backend)
        if self.live is not None:
            with self._live(trained, device) as beside:
                yield beside
            return
        controller = Controller(trained.policy(device), self._settings(trained), self.first_seed)
        frames = trained.example_frames() if self.backend == "onnx-int8" else ()
        backend, _ = load_backend(self.backend, controller.policy, frames)
        warm_up(backend, controller.config.candidates)
        local = LocalPlanner(controller, backend)
        try:
            yield local
        finally:
            local.close()

    def _settings(self, trained: Trained) -> ControllerConfig:
        from prism.experiments.run_folder import changed
        from prism.experiments.stated_kind import as_stated

        return as_stated(trained, changed(trained.settings, set=self.set), self.action_kind)[0]

    @contextmanager
    def _live(self, trained: Trained, device: Any) -> Iterator[Planner]:
        from prism_client import RemotePlanner

        from prism.server.beside import served
        from prism.server.policy_server import PolicyServer, ServerConfig

        policy = trained.policy(device, backend=self.backend)
        config = ServerConfig(port=self.live or 0, rate=0.0)
        with served(PolicyServer(policy, self._settings(trained), config, trained.name)) as server:
            print(f"live page: http://127.0.0.1:{server.port}/")
            remote = RemotePlanner(f"ws://127.0.0.1:{server.port}")
            try:
                yield remote
            finally:
                remote.close()

    def _rerun(self, robot: Robot) -> AbstractContextManager[RerunLog | None]:
        if self.rerun is None:
            return nullcontext()
        from prism.report.rerun_log import RerunLog

        return RerunLog(self.rerun, robot.name, keep=True)

    def _episodes(
        self, guard: Guard, commander: Any, keys: Keys, recording: Recording | None, log: RerunLog | None,
        rows: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        from prism.robots.recording import Trace, choose_films

        robot = guard.robot
        cameras = [] if recording is None else choose_films(robot, self.no_video)
        for number in range(self.episodes):
            seed = self._seed(number)
            filming: AbstractContextManager[dict[str, FilmWriter]] = (
                nullcontext({}) if recording is None else recording.filming(cameras)
            )
            with filming as films:
                end, row = self._episode(guard, commander, seed, keys, Trace(robot, films), recording, log)
            rows.append(row)
            said = {True: "success", False: "failure", None: "not judged"}[row["success"]]
            print(
                f"episode {number + 1} of {self.episodes} (seed {seed}): {said}, {row['commands']} commands, "
                f"{row['late']} late, {guard.changed} limited" + (f"; stopped: {end.stopped}" if end.stopped else "")
            )
            if end.by_operator:
                raise KeyboardInterrupt
            if end.stopped and not robot.is_twin:
                raise PrismError(f"the robot was stopped: {end.stopped}; look at it, then run again")

    def _episode(
        self, guard: Guard, commander: Any, seed: int, keys: Keys, trace: Trace, recording: Recording | None,
        log: RerunLog | None,
    ) -> tuple[Outcome, dict[str, Any]]:  # fmt: skip
        """One, recorded; and what is said of it."""
        from prism.robots.loop import ask_success, drive

        stopped = "by the operator"
        try:
            seconds = self.seconds or guard.robot.episode_seconds / self.slow
            end = drive(guard, commander, seed, seconds, keys, trace)
            success, stopped = end.success, end.stopped
            if success is None and not stopped and not self.dry_run:
                success = ask_success(keys)
        except KeyboardInterrupt:
            guard.stop("by the operator")
            self._keep(recording, log, trace, {"stopped": stopped, "seed": seed, "success": None})
            raise
        row = {
            "seed": seed,
            "success": success,
            "stopped": end.stopped,
            "commands": len(trace.latency_ms),
            "late": trace.late(),
            "limited": guard.changed,
            "plans": commander.executor.stats.summary() if hasattr(commander, "executor") else {},
        }
        self._keep(recording, log, trace, row)
        return end, row

    def _seed(self, number: int) -> int:
        """Of an episode's scene; a replay is in the recorded one, each time."""
        if self.replay is None:
            return self.first_seed + number
        from prism.data.formats.store import MANIFEST, read_manifest

        seed = read_manifest(self.replay / MANIFEST).provenance.get("seed")
        return seed if isinstance(seed, int) else self.first_seed

    def _keep(self, recording: Recording | None, log: RerunLog | None, trace: Trace, row: dict[str, Any]) -> None:
        if (recording is None and log is None) or len(trace) < 2:
            return
        from prism.data.formats.store import StoreSource

        episode, gaps = trace.episode()
        streams = episode.streams
        if recording is not None:
            by = str(self.run_folder or self.server or self.replay)
            made_by = {"by": "prism run", "run": by, "robot": trace.robot.name}
            told = {"commanded_by": trace.commanded_by(), "changed": trace.why, "streams": trace.heard(gaps)}
            times = {"latency_ms": [round(ms, 3) for ms in trace.latency_ms]}
            kept = recording.add(episode, {**made_by, **row, **told, **times}, trace.details(), trace.films)
            mended = {**made_by, "seed": row["seed"], "commanded_by": "operator"}
            for part in trace.corrections(episode) if self.teleop is not None else ():
                self._corrections(trace.robot).add(part, mended, films=trace.films)
            if log is not None and trace.films:
                streams = StoreSource(kept).read(0).streams
        if log is not None:
            said = f"seed {row['seed']}, success {row['success']}"
            log.episode(trace.robot, replace(episode, streams=streams), trace.details(), said)

    def _corrections(self, robot: Robot) -> Recording:
        from prism.robots.recording import Recording

        out = self._out(robot)
        return Recording(out.with_name(f"{out.name}-corrections"), robot, _task(robot))

    def _summarise(self, rows: list[dict[str, Any]], robot: Robot, recording: Recording | None) -> None:
        from prism.evaluation.results import write_json

        if not rows:
            return
        judged = [row["success"] for row in rows if row["success"] is not None]
        commands = sum(row["commands"] for row in rows)
        late = sum(row["late"] for row in rows) / max(commands, 1)
        rate = f"{sum(judged)} of {len(judged)} succeeded, " if judged else ""
        where = f"; recorded in {recording.path}" if recording is not None else "; nothing was sent or recorded"
        print(f"{rate}{commands} commands, {late:.2%} late{where}")
        if self.json is not None:
            success = sum(judged) / len(judged) if judged else None
            write_json(self.json, {"robot": robot.name, "success": success, "late_share": late, "episodes": rows})


def _recorded(episode: Path, robot: Robot) -> Any:
    """The actions of one recorded episode, of this robot."""
    from prism.data.formats.store import StoreSource, is_store

    if not is_store(episode):
        raise PrismError(
            f"--replay {episode}: is no recorded episode; give a folder episode-000000 of prism run or record"
        )
    source = StoreSource(episode)
    mine, theirs = robot.actions.spec, source.action_spec
    if source.action_dim != robot.actions.dim or (theirs.kind, theirs.robot) != (mine.kind, mine.robot):
        raise PrismError(f"--replay {episode}: was recorded with '{theirs.robot}' ({theirs.kind}), not with this robot")
    if abs(source.fps - robot.fps) > 0.02 * robot.fps:
        raise PrismError(f"--replay {episode}: has {source.fps:g} steps a second, robot '{robot.name}' {robot.fps:g}")
    return source.read(0, streams=()).actions


def _task(robot: Robot) -> str:
    return str(getattr(robot, "task", robot.name))


def need_client(command: str) -> None:
    from prism.errors import need

    need("prism_client", "serve", command)


def announce(robot: Robot, limits: Limits, keys: str) -> None:
    """What will be driven, within which limits, and how to stop it."""
    space = robot.actions
    names = tuple(space.name(i) for i in range(space.dim))
    steps = "" if robot.parts == 1 else f", {robot.fps:g} steps of {robot.parts}"
    print(f"{robot.name}: {robot.rate:g} commands a second{steps} ({space.spec.kind}); limits, always on:")
    for line in limits.describe(names, space.units):
        print(f"  {line}")
    print(keys)


@contextmanager
def _steady(robot: Robot) -> Iterator[None]:
    """Around a loop in real time: no pauses of Python's making."""
    if not robot.realtime:
        yield
        return
    from prism.inference.lanes import steady

    with steady(realtime=True):
        yield
