"""prism run"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from prism.cli.style import OutputFile, option
from prism.errors import PrismError, check_numbers
from prism.io.hub import is_hub, name_of

if TYPE_CHECKING:
    from prism_client import Planner

    from prism.controller import ControllerConfig
    from prism.experiments.run_folder import Run as Trained
    from prism.report.rerun_log import RerunLog
    from prism.robots.contract import Robot
    from prism.robots.limits import Limits
    from prism.robots.loop import Commander, Keys


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

    Before anything moves, the policy must fit the robot: sensors, shapes, rate, actions. Limits are printed and always
    on. Space, q or Ctrl-C stop the robot; s and f mark an episode as success or failure. Each episode is recorded;
    corrections of a person who took over are recorded beside them, to learn from:
        prism train data/my-task runs/my-task/robot-corrections --init runs/my-task
    """

    run_folder: Annotated[Path | None, Positional, arg(metavar="RUN")] = None
    """A run folder, or one checkpoint in it; not needed with --server."""
    robot: Annotated[str, arg(metavar="NAME")] = ""
    """A twin (ur5e-twin), or a robot file such as my_ur.toml (docs/howto/robots.md)."""
    option: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Options of the robot, as task=tabletop-height realtime=false. A twin's task is by default that of RUN's data."""
    limits: Annotated[Path | None, option("FILE")] = None
    """Limits that narrow the robot's own, JSON or TOML (prism/robots/limits.py)."""
    server: Annotated[str | None, option("URL")] = None
    """Get plans from `prism serve` at this address, instead of computing them here."""
    api_key_file: Annotated[Path | None, option("FILE")] = None
    """File with the server's key; PRISM_API_KEY does the same."""
    silence: Annotated[float, option("S")] = 0.03
    """Hold the robot after this long without a sign of life from the server; use more if the network pauses."""
    replay: Annotated[Path | None, option("EPISODE")] = None
    """Do what was done in a recorded episode (a folder episode-000000) once more: the robot goes slowly to where it
    began, then along its path. A twin begins in the same scene."""
    live: Annotated[int | None, option("PORT")] = None
    """Show a live page meanwhile, http://127.0.0.1:PORT: sensors, candidates, latency. 0: a free port."""
    episodes: int = 1
    """Number of episodes."""
    seconds: Annotated[float | None, option("S")] = None
    """Maximum length of an episode. Default: the robot's."""
    teleop: Annotated[str | None, option("NAME")] = None
    """Device for taking over from the policy: keyboard (t), gamepad, spacemouse, leader=ROBOT, or scripted (a twin)."""
    slow: Annotated[float, arg(metavar="FACTOR")] = 1.0
    """Move at this share of the speed: 0.25 for the first time."""
    dry_run: bool = False
    """Read the sensors and plan, but send nothing."""
    text: Annotated[str | None, option("SENTENCE")] = None
    """Instruction for a language-conditioned policy. Default: the robot's own text sensor, if it has one."""
    resize: bool = False
    """Resize the robot's pictures to the policy's size."""
    trust_sensors: bool = False
    """Do not compare the first readings with the training data (units, sizes, colours, cameras)."""
    action_kind: Annotated[str | None, option("KIND")] = None
    """Kind of the policy's actions, if unknown: absolute, delta or velocity."""
    trained_on: Annotated[str | None, option("NAME")] = None
    """The robot that the policy was trained on, if it is another one. Actions must mean the same on both."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change any setting of the controller: --set exec_horizon=2 plans more often."""
    backend: Annotated[str, arg(metavar="NAME")] = "eager"
    """Back end: eager, compile, onnx, onnx-int8."""
    device: Annotated[str, option("NAME")] = "auto"
    """Device: cpu, cuda, mps, or auto (cuda if available)."""
    first_seed: int = 100_000
    """Seed of the first episode, for the policy and for a twin's scene."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Folder for the recorded episodes; new ones are added. Default: RUN/robot."""
    no_video: bool = False
    """Keep every pixel of the cameras. Default: h264 video, compressed meanwhile, about 30 times smaller."""
    on_overrun: Literal["drop", "stop"] = "drop"
    """If pictures arrive faster than they are compressed: drop some and mark the steps, or stop the episode."""
    json: OutputFile = None
    """Write the measurements to this file too."""
    rerun: OutputFile = None
    """Write every episode for the rerun viewer, after it: sensors, candidates, commands; one .rrd file
    (pip install 'prism-policy[rerun]')."""

    def __post_init__(self) -> None:
        if not self.robot:
            raise PrismError("--robot NAME is missing: which robot shall move? ur5e-twin is a simulated one")
        if [self.run_folder, self.server, self.replay].count(None) != 2:
            raise PrismError("give a run folder or --server URL, one of them; or an episode to --replay")
        if not 0.01 <= self.silence <= 10:
            raise PrismError(f"--silence {self.silence:g} is out of range: use 0.01 to 10 seconds")
        if self.server is not None and (self.set or self.device != "auto"):
            raise PrismError("--set and --device are of a policy that is computed here: give them to prism serve")
        if self.server is None and self.api_key_file is not None:
            raise PrismError("--api-key-file needs --server")
        ranges = {"[1, inf)": "episodes", "[0, inf)": "first_seed", "(0, inf)": "seconds", "(0, 1]": "slow"}
        check_numbers(self, "--", ranges)

    def run(self) -> None:
        from prism.robots.guard import Guard
        from prism.robots.limits import read_limits
        from prism.robots.loop import Keys
        from prism.robots.program import Program, task_of, without_pauses
        from prism.robots.recording import Recording

        for file in (self.json, self.rerun):
            if file is not None and file.exists():
                raise PrismError(f"{file} exists already: remove it, or choose another name")
        robot = self._robot()
        own = robot.limits if self.limits is None else read_limits(self.limits, robot.limits, robot.actions.dim)
        limits = own.slowed(self.slow)
        with ExitStack() as stack:
            keys = stack.enter_context(Keys())
            stack.enter_context(without_pauses(robot))  # before a policy's threads start: they go behind it, not last
            commander, needs = self._commander(robot, limits, keys, stack)
            out, recording, corrections = self._out(robot), None, None
            if not self.dry_run:
                recording = Recording(out, robot, task_of(robot))
                stack.enter_context(recording.alone())
                if self.teleop is not None:
                    corrections = Recording(out.with_name(f"{out.name}-corrections"), robot, task_of(robot))
            program = Program(
                Guard(robot, limits, needs, self.dry_run),
                commander,
                keys,
                made_by=str(self.run_folder or self.server or self.replay),
                recording=recording,
                corrections=corrections,
                open_log=None if self.rerun is None else lambda: self._open_log(robot),
                seconds=self.seconds or robot.episode_seconds / self.slow + (60 if self.replay else 0),  # to its start
                no_video=self.no_video,
                on_overrun=self.on_overrun,
                json=self.json,
            )
            program.run([self._seed(number) for number in range(self.episodes)])

    def _robot(self) -> Robot:
        """A twin of several scenes shows that of the run, or of the episode to replay, where no option says which."""
        from prism.robots.contract import ROBOTS, make_robot
        from prism.robots.program import task_of

        scenes = getattr(ROBOTS[self.robot], "tasks", ()) if self.robot in ROBOTS else ()
        if not scenes or any(given.startswith("task=") for given in self.option):
            return make_robot(self.robot, self.option)
        shown = [task for task in self._shown() if task in scenes]
        if len(shown) > 1:
            raise PrismError(f"{self.run_folder} learned {len(shown)} tasks: choose one, --option task={shown[0]}")
        robot = make_robot(self.robot, (*self.option, *(f"task={task}" for task in shown)))
        said = f"as {self.run_folder or self.replay} says" if shown else f"its default: {self._why_unknown()}"
        warning = "" if shown else "warning: "
        print(f"{warning}{self.robot}: task={task_of(robot)}, {said} (--option task=... decides)")
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

    def _commander(self, robot: Robot, limits: Limits, keys: Keys, stack: ExitStack) -> tuple[Commander, list[str]]:
        """The commander, and the sensors that it needs."""
        from prism.robots.loop import Takeover
        from prism.robots.program import by_policy
        from prism.robots.replay import ReplayCommander, read_recorded
        from prism.robots.teleop import make_teleop

        if self.replay is not None:
            return ReplayCommander(robot, read_recorded(self.replay, robot), self.slow, self.dry_run), []
        planner = stack.enter_context(self._planner(robot))
        policy, needs = by_policy(
            planner, robot, limits, text=self.text, resize=self.resize, action_kind=self.action_kind,
            look=not self.trust_sensors, slow=self.slow, trained_on=self.trained_on,
        )  # fmt: skip
        if self.teleop is None:
            return policy, needs
        teleop = make_teleop(self.teleop, robot, keys.is_terminal)
        stack.callback(teleop.close)
        print(teleop.help, end="\n" if teleop.help else "")
        return Takeover(policy, teleop), needs

    def _out(self, robot: Robot) -> Path:
        if self.out is not None:
            return self.out
        if self.run_folder is None:
            return Path("recordings") / robot.name
        if is_hub(self.run_folder):  # what is in the cache is not ours to write to
            return Path("recordings") / name_of(self.run_folder)
        return self.run_folder / "robot"

    @contextmanager
    def _planner(self, robot: Robot) -> Iterator[Planner]:
        if self.server is not None:
            from prism_client import PlanError, RemotePlanner

            from prism.cli.serve import read_key

            key, silence = read_key(self.api_key_file), self.silence if robot.realtime else None
            try:
                remote = RemotePlanner(self.server, api_key=key, silence=silence, all_candidates=True)
            except PlanError as error:
                raise PrismError(f"--server {error}") from None
            try:
                yield remote
            finally:
                remote.close()
            return
        from prism.experiments.run_folder import Run as Trained
        from prism.inference.backends import backend_device, check_backend, load_backend
        from prism.inference.lanes import LocalPlanner
        from prism.inference.tokens import warm_up
        from prism.robots.guard import watched_by_guard

        check_backend(self.backend)
        assert self.run_folder is not None
        trained = Trained(self.run_folder)
        device = backend_device(self.device, self.backend)
        if self.live is not None:
            with self._live(trained, device) as beside:
                yield beside
            return
        policy, settings = trained.policy(device, action_kind=self.action_kind), self._settings(trained)
        frames = trained.example_frames() if self.backend == "onnx-int8" else ()
        backend, _ = load_backend(self.backend, policy, frames)
        warm_up(backend, settings.candidates)
        local = LocalPlanner(backend, settings, watched=watched_by_guard(robot, policy.spec.sensors))
        try:
            yield local
        finally:
            local.close()

    def _settings(self, trained: Trained) -> ControllerConfig:
        from prism.experiments.run_folder import changed

        return changed(trained.settings, set=self.set)

    @contextmanager
    def _live(self, trained: Trained, device: Any) -> Iterator[Planner]:
        from prism_client import RemotePlanner

        from prism.server.beside import served
        from prism.server.policy_server import PolicyServer, ServerConfig

        policy = trained.policy(device, backend=self.backend, action_kind=self.action_kind)
        config = ServerConfig(port=self.live or 0, rate=0.0)
        with served(PolicyServer(policy, self._settings(trained), config, trained.name)) as server:
            print(f"live page: http://127.0.0.1:{server.port}/")
            remote = RemotePlanner(f"ws://127.0.0.1:{server.port}", all_candidates=True)
            try:
                yield remote
            finally:
                remote.close()

    def _open_log(self, robot: Robot) -> RerunLog:
        from prism.report.rerun_log import RerunLog

        assert self.rerun is not None
        return RerunLog(self.rerun, robot.name, keep=True)

    def _seed(self, number: int) -> int:
        """Seed of an episode's scene; a replay uses the recorded one."""
        if self.replay is None:
            return self.first_seed + number
        from prism.data.formats.store import MANIFEST, read_manifest

        seed = read_manifest(self.replay / MANIFEST).provenance.get("seed")
        return seed if isinstance(seed, int) else self.first_seed
