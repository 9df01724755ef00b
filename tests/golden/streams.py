"""The commands of every way to execute plans, from a policy whose numbers are the same on every computer.

| way      | observation to command                                                             |
| -------- | ---------------------------------------------------------------------------------- |
| eval     | run_episode with a Controller: its executor with InlinePlanner                     |
| run      | prism_client.Executor with LocalPlanner                                            |
| serve    | prism_client.Executor with RemotePlanner and a server in this process              |
| broker   | a server, asked by openpi's ActionChunkBroker once in exec_horizon steps           |
| lerobot  | select_action and predict_action_chunk of the LeRobot policy; LeRobot is faked     |

A plan that comes late comes a stated number of steps after its observation, by a counted clock.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client import Executor, Planner, RemotePlanner, Reply, Step
from torch import Tensor

from prism.controller import Controller, ControllerConfig
from prism.evaluation.play import run_episode
from prism.inference.backends import BackendPolicy, EagerBackend
from prism.inference.lanes import LocalPlanner
from prism.methods.presets import build_policy
from prism.methods.prism import PrismPolicy
from prism.rows import Random
from prism.selection import SelectionConfig
from prism.sensors import ActionSpec, SensorSpec
from prism.sims.environment import StepResult
from tests.policy_fakes import small_config
from tests.server_fakes import ChunkBroker, OpenPi, serving

FOLDER = Path(__file__).parent
FILE = FOLDER / "streams.npz"
PLUGIN = FOLDER.parents[1] / "packages" / "lerobot_policy_prism" / "src"
TP, FPS, STEPS, SEED = 8, 8.0, 40, 7  # a step is 1/8 s: times are exact numbers
Stream = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Arm:
    """What is driven: positions and a gripper (4), changes of them, or a rotation and a gripper (5)."""

    kind: str = "absolute"
    turning: bool = False

    @property
    def dim(self) -> int:
        return 5 if self.turning else 4

    @property
    def spec(self) -> ActionSpec:
        names = ("qx", "qy", "qz", "qw", "gripper") if self.turning else ("x", "y", "z", "gripper")
        return ActionSpec(names, (0,) if self.turning else (), "", self.kind)

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return (SensorSpec("proprio", "vector", (self.dim,)), SensorSpec("goal", "vector", (3,)))


class World:
    """Moves half of the way to a position, or by a change. `lost`: steps at which the goal is not seen."""

    def __init__(self, arm: Arm, lost: tuple[int, ...] = ()) -> None:
        self.name, self.sensors, self.fps, self.max_steps = "arm", arm.sensors, FPS, STEPS
        self.action_dim = arm.dim
        self.action_low, self.action_high = np.full(arm.dim, -9, np.float32), np.full(arm.dim, 9, np.float32)
        self._arm, self._lost = arm, lost

    def reset(self, seed: int) -> dict[str, NDArray[np.generic]]:
        self._at = np.array([0.5] * 4 + [1.0] if self._arm.turning else [0.0] * 4)
        self._goal = np.random.default_rng(seed).uniform(-1, 1, 3)
        self._steps = 0
        return self.see()

    def see(self) -> dict[str, NDArray[np.generic]]:
        goal = {} if self._steps in self._lost else {"goal": self._goal.astype(np.float32)}
        return {"proprio": self._at.astype(np.float32), **goal}

    def step(self, action: NDArray[np.float32]) -> StepResult:
        asked = np.asarray(action, np.float64)
        self._at = self._at + asked if self._arm.kind == "delta" else self._at + 0.5 * (asked - self._at)
        self._steps += 1
        return StepResult(self.see(), 0.0, False, self._steps >= self.max_steps)

    def state(self) -> NDArray[np.float64]:
        return self._at

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


class Candidates(EagerBackend):
    """Candidates that depend on the window and on one drawn number alone, made with + - * / of float64."""

    def __init__(self, policy: PrismPolicy, arm: Arm) -> None:
        super().__init__(policy)
        self.arm = arm

    def features(self, sensor: int, stream: Tensor) -> Tensor:
        return stream.float()

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def plan(self, steps: Tensor, candidates: int, rng: Random) -> Tensor:
        drawn = rng.randint(2**31 - 1, (len(steps),)).tolist()
        rows = [self._row(window.numpy(), candidates, seed) for window, seed in zip(steps, drawn, strict=True)]
        return self.policy.normalizer.normalize_actions(torch.from_numpy(np.stack(rows)).float())

    def _row(self, window: NDArray[np.float32], count: int, seed: int) -> NDArray[np.float64]:
        """(K, Tp, Da): towards the goal, past it on the left or on the right."""
        dim, arm = self.arm.dim, self.arm
        rng = np.random.default_rng([zlib.crc32(window.tobytes()), seed])
        at, goal = window[-1, :dim].astype(np.float64), window[-1, dim:].astype(np.float64)
        rows = np.arange(1, TP + 1)[:, None] / TP
        plans = np.zeros((count, TP, dim))
        for plan in plans:
            side = 0.4 if rng.random() < 0.6 else -0.4
            noise = 0.04 * (rng.random((TP, dim)) - 0.5) + 0.1 * (rng.random(dim) - 0.5)
            if arm.turning:
                turn = np.array([goal[0], goal[1], side, 1.0])
                plan[:, :4] = (at[:4] + rows * (turn - at[:4])) * (1.0 if rng.random() < 0.5 else -1.0)
            else:
                way = goal + np.array([side, 0.0, -side]) - at[:3]
                plan[:, :3] = way / TP if arm.kind == "delta" else at[:3] + rows * way
            plan += noise
            plan[:, -1] = 1.0 if rng.random() < 0.7 else -1.0
        return plans


def backend_for(arm: Arm) -> Candidates:
    policy = build_policy(small_config(pred_horizon=TP).spec(arm.sensors, arm.dim, FPS, arm.spec), seed=0)
    assert isinstance(policy, PrismPolicy)
    policy.normalizer.action_scale.copy_(torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0][: arm.dim]))
    for encoder in policy.encoder.encoders:  # as wide as what `features` gives
        encoder.absent = torch.nn.Parameter(torch.zeros(encoder.spec.shape))  # type: ignore[union-attr,assignment]
    return Candidates(policy.eval(), arm)


@dataclass(frozen=True)
class Case:
    controller: ControllerConfig
    arm: Arm = Arm()
    lost: tuple[int, ...] = ()


def case(arm: Arm | None = None, lost: tuple[int, ...] = (), selection: Any = None, **controller: Any) -> Case:
    arm = arm or Arm()
    chosen = {"grippers": (arm.dim - 1,), **(selection or {})}
    settings = {"exec_horizon": 4, "candidates": 6, "selection": SelectionConfig(**chosen), **controller}
    return Case(ControllerConfig(**settings), arm, lost)


TURNING, CHANGES = Arm(turning=True), Arm("delta")
CASES = {
    "commit": case(),
    "overlap": case(selection={"rule": "overlap"}),
    "last_action": case(selection={"rule": "last_action"}),
    "proxy_score": case(selection={"rule": "proxy_score"}),
    "medoid": case(selection={"rule": "medoid"}),
    "first": case(selection={"rule": "first"}),
    "restless": case(selection={"restless": 2}),
    "smoothing": case(smoothing=3),
    "ensemble": case(ensemble=0.01, exec_horizon=1),
    "jerk": case(jerk_weight=3.0),
    "turning": case(TURNING),
    "turning-smoothing": case(TURNING, smoothing=3),
    "turning-ensemble": case(TURNING, ensemble=0.1, exec_horizon=2),
    "turning-jerk": case(TURNING, jerk_weight=3.0),
    "changes": case(CHANGES),
    "changes-smoothing": case(CHANGES, smoothing=2),
    "absent": case(lost=(3, 4, 5, 12, 20)),
    "delay": case(exec_horizon=3, delay=2),
    "delay-one": case(exec_horizon=1, delay=3),
    "delay-smoothing": case(exec_horizon=3, delay=2, smoothing=2),
    "delay-ensemble": case(exec_horizon=3, delay=2, ensemble=0.01),
    "delay-jerk": case(exec_horizon=3, delay=2, jerk_weight=3.0),
    "delay-turning": case(TURNING, exec_horizon=3, delay=2),
    "delay-restless": case(exec_horizon=3, delay=2, selection={"restless": 1}),
}
# Numbers of a linear solve, an exponential or a norm: equal to rounding on another CPU, to the last bit on one.
ROUNDED = ("ensemble", "jerk", "turning")


# ------------------------------------------------------------------------------------------------------------- eval


def evaluated(one: Case) -> Stream:
    controller = Controller(BackendPolicy(backend_for(one.arm)), one.controller)
    result = run_episode(World(one.arm, one.lost), controller, SEED)
    chosen = [[replan.step, replan.index, replan.modes] for replan in controller.replans]
    return {"commands": result.actions, "choices": np.array(chosen)}


# ---------------------------------------------------------------------------------------------- run, serve + client


class Late:
    """A planner whose plans come `steps` after their observation; the first, which is waited for, at once."""

    def __init__(self, inner: Planner, steps: float) -> None:
        self._inner, self._steps = inner, steps
        self.now = 0.0  # in steps
        self._ready: deque[tuple[float, Reply]] = deque()

    @property
    def info(self) -> Any:
        return self._inner.info

    def submit(self, step: Step) -> None:
        self._inner.submit(step)
        answered = False
        while not answered:
            reply = self._inner.poll(30.0)
            assert reply is not None
            answered = reply.step.number == step.number and (reply.is_plan or not step.wants_plan)
            self._ready.append((self.now + self._steps * reply.is_plan, replace(reply, latency_ms=None)))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if self._ready and (self._ready[0][0] <= self.now or timeout > 0):
            return self._ready.popleft()[1]
        return None

    def trouble(self) -> str:
        return self._inner.trouble()

    def reset(self, seed: int | None = None) -> None:
        self._ready.clear()
        self._inner.reset(seed)

    def close(self) -> None:
        self._inner.close()


def driven(one: Case, planner: Planner, late: float, revise: bool = False, **options: Any) -> Stream:
    """STEPS commands of an executor, and where each came from: 1 a plan, 0 a hold; 2 at a new plan."""
    world, slow = World(one.arm, one.lost), Late(planner, late)
    clock: Callable[[], float] = lambda: slow.now / FPS  # noqa: E731
    with Executor(slow, look=False, clock=clock, **options) as executor:
        executor.reset(SEED)
        observation, commands, sources = world.reset(SEED), [], []
        for step in range(STEPS):
            slow.now = float(step)
            command = executor.step(observation)
            if revise:
                slow.now = step + 0.5
                command = executor.revise() or command
            commands.append(command.action)
            sources.append(2 if command.plan is not None else int(command.source == "plan"))
            observation = world.step(command.action).observation
    return {"commands": np.stack(commands), "sources": np.array(sources)}


def run_here(one: Case, late: float, **options: Any) -> Stream:
    backend = backend_for(one.arm)
    threads = torch.get_num_threads()
    try:
        return driven(one, LocalPlanner(backend, one.controller, 1), late, **options)
    finally:
        torch.set_num_threads(threads)


def served(one: Case, late: float, **options: Any) -> Stream:
    with serving(BackendPolicy(backend_for(one.arm)), one.controller) as server:
        return driven(one, RemotePlanner(f"ws://127.0.0.1:{server.port}"), late, **options)


def brokered(one: Case) -> Stream:
    """openpi's client shows one observation a plan; the history between is filled in by the server."""
    world, commands = World(one.arm, one.lost), []
    with (
        serving(BackendPolicy(backend_for(one.arm)), one.controller, seed=SEED, allow_absent=True) as server,
        OpenPi(server.port) as client,
    ):
        broker = ChunkBroker(client.infer, one.controller.exec_horizon)
        observation: dict[str, Any] = world.reset(SEED)
        for _ in range(STEPS):
            commands.append(broker.infer(observation)["actions"])
            observation = dict(world.step(commands[-1]).observation)
    return {"commands": np.stack(commands)}


WAITING = {"asynchronous": False, "absent": "continue"}
SLOW = {"hook": lambda plan: "slow" if plan.spread > 0.5 else "continue"}
DRIVEN: dict[str, tuple[str, float, dict[str, Any]]] = {
    **{f"{name}.waiting": (name, 0.0, WAITING) for name in CASES if "delay" not in name},
    **{f"{name}.late2": (name, 2.0, {}) for name in ("commit", "smoothing", "jerk", "turning", "changes", "restless")},
    **{f"{name}.at-once": (name, 0.0, {}) for name in ("commit", "smoothing", "turning", "changes")},
    "commit.late2-jumping": ("commit", 2.0, {"blend": 0}),
    "commit.late2-bounded": ("commit", 2.0, {"blend": 4, "max_step": 0.05, "margin": 0.0}),
    "commit.late5-holding": ("commit", 5.0, {"exec_horizon": 7}),
    "changes.late5-holding": ("changes", 5.0, {"exec_horizon": 7}),
    "commit.late2-slow": ("commit", 2.0, SLOW),
    "changes.late2-slow": ("changes", 2.0, SLOW),
    "absent.late1-going-on": ("absent", 1.0, {"absent": "continue"}),
    "absent.late1-stopping": ("absent", 1.0, {"absent": "stop"}),
    "commit.late-half-revised": ("commit", 0.5, {"revise": True}),
}


# ---------------------------------------------------------------------------------------------------------- LeRobot


@contextlib.contextmanager
def faked_lerobot() -> Iterator[Any]:
    """The class PrismPolicy of the plugin, with stand-ins for the few names of LeRobot that it imports."""
    before = dict(sys.modules)

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made

    class Config:
        @staticmethod
        def register_subclass(name: str) -> Callable[[type], type]:
            return lambda kind: kind

        def __post_init__(self) -> None:
            pass

    modes = SimpleNamespace(IDENTITY="identity")
    features = SimpleNamespace(VISUAL="visual", STATE="state", ACTION="action")
    stand_in = type("StandIn", (), {})
    for name in [one for one in sys.modules if one.split(".")[0] in ("lerobot", "lerobot_policy_prism")]:
        del sys.modules[name]
    for package in ("lerobot", "lerobot.policies", "lerobot.utils"):
        module(package)
    module(
        "lerobot.configs", NormalizationMode=modes, PreTrainedConfig=Config, FeatureType=features,
        PolicyFeature=stand_in,
    )  # fmt: skip
    module("lerobot.optim", AdamWConfig=stand_in)
    module("lerobot.optim.schedulers", CosineAnnealingWithWarmupSchedulerConfig=stand_in)
    module("lerobot.policies.pretrained", PreTrainedPolicy=torch.nn.Module)
    module("lerobot.utils.constants", ACTION="action", OBS_STATE="observation.state", PRETRAINED_MODEL_DIR="model")
    module("lerobot_policy_prism")
    sys.modules["lerobot_policy_prism"].__path__ = [str(PLUGIN / "lerobot_policy_prism")]
    try:
        from lerobot_policy_prism.modeling_prism import PrismPolicy as Plugin

        yield Plugin
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("lerobot", "lerobot_policy_prism"):
                del sys.modules[name]
        sys.modules.update({name: one for name, one in before.items() if name.split(".")[0].startswith("lerobot")})


def plugin_policy(kind: Any, one: Case) -> Any:
    """A PrismPolicy of the plugin around the candidates of this file, without LeRobot's own set-up."""
    policy = kind.__new__(kind)
    torch.nn.Module.__init__(policy)
    keys = {"proprio": "observation.state", "goal": "observation.goal"}
    policy.config = SimpleNamespace(
        control=lambda: one.controller, candidates=one.controller.candidates, keys=keys, device="cpu", depth_scale=1.0
    )
    policy.policy = BackendPolicy(backend_for(one.arm))
    policy._average = []
    policy.reset()
    return policy


def batch_of(observations: list[dict[str, Any]]) -> dict[str, Tensor]:
    names = {"proprio": "observation.state", "goal": "observation.goal"}
    return {
        key: torch.from_numpy(np.stack([one[name] for one in observations])) for name, key in names.items()
    }  # fmt: skip


def selected(one: Case, rows: int = 3) -> Stream:
    """select_action in several environments at once."""
    with faked_lerobot() as kind:
        policy, worlds = plugin_policy(kind, one), [World(one.arm) for _ in range(rows)]
        seen, commands = [world.reset(SEED + i) for i, world in enumerate(worlds)], []
        for _ in range(STEPS):
            actions = policy.select_action(batch_of(seen)).numpy()
            commands.append(actions)
            seen = [world.step(action).observation for world, action in zip(worlds, actions, strict=True)]
    return {"commands": np.stack(commands)}


def chunked(one: Case, late: int = 2, every: bool = False) -> Stream:
    """predict_action_chunk as real-time chunking uses it: the rest goes in, a plan comes `late` steps on. `every`: its
    window sees the steps between two plans too, which real-time chunking does not show."""
    with faked_lerobot() as kind:
        policy, world = plugin_policy(kind, one), World(one.arm)
        policy.policy.spec = replace(policy.policy.spec, fps=0.0)  # no step is filled in by the clock
        seen, commands = world.reset(SEED), []
        plan, row = policy.predict_action_chunk(batch_of([seen]))[0].numpy(), 0
        plans = [plan]
        waiting: tuple[int, NDArray[np.float32]] | None = None
        for step in range(STEPS):
            if waiting is not None and step >= waiting[0]:
                plan, row, waiting = waiting[1], late, None
            if waiting is None and row >= one.controller.exec_horizon:
                rest = torch.from_numpy(np.concatenate([plan[row:], np.zeros((row, one.arm.dim), np.float32)]))
                found = policy.predict_action_chunk(batch_of([seen]), late, rest)[0].numpy()
                plans.append(found)
                waiting = (step + late, found)
            elif every and step:
                policy._controllers[0].planner.window.observe(seen)
            commands.append(plan[min(row, TP - 1)])
            row += 1
            seen = world.step(commands[-1]).observation
    return {"commands": np.stack(commands), "plans": np.stack(plans)}


# -------------------------------------------------------------------------------------------------------------- all

LEROBOT = ("commit", "smoothing", "jerk", "turning", "turning-smoothing", "changes")
STREAMS: dict[str, Callable[[], Stream]] = {
    **{f"eval/{name}": lambda one=one: evaluated(one) for name, one in CASES.items()},  # type: ignore[misc]
    **{
        f"{way}/{name}": lambda make=make, of=of, late=late, how=how: make(CASES[of], late, **how)  # type: ignore[misc]
        for way, make in (("run", run_here), ("serve", served))
        for name, (of, late, how) in DRIVEN.items()
    },
    **{
        f"broker/{name}": lambda name=name: brokered(CASES[name])  # type: ignore[misc]
        for name in ("commit", "smoothing", "turning", "absent")
    },
    **{f"lerobot-select/{name}": lambda name=name: selected(CASES[name]) for name in LEROBOT},  # type: ignore[misc]
    **{f"lerobot-chunk/{name}": lambda name=name: chunked(CASES[name]) for name in LEROBOT},  # type: ignore[misc]
}


def compute(name: str) -> Stream:
    with torch.inference_mode():
        return STREAMS[name]()


def write() -> None:
    arrays = {f"{name}/{key}": value for name in STREAMS for key, value in compute(name).items()}
    np.savez_compressed(FILE, allow_pickle=False, **arrays)


def stored() -> dict[str, Stream]:
    found: dict[str, Stream] = {name: {} for name in STREAMS}
    with np.load(FILE, allow_pickle=False) as file:
        for key in file.files:
            name, _, part = key.rpartition("/")
            found.setdefault(name, {})[part] = file[key]
    return found
