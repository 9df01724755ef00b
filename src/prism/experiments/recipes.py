"""Recipes: one function an experiment, each returns everything that determines a run.

Each states its command, its cost and what to expect; the measured results and the files behind them are in
research/RESULTS.md. A recipe is data: change a field with dataclasses.replace, or from the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prism.controller import ControllerConfig
from prism.data.history import with_history
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations
from prism.io import files, hub
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.io.plugins import near
from prism.methods import METHODS, presets
from prism.methods.base import ContextConfig
from prism.methods.prism import PrismConfig
from prism.selection import SelectionConfig
from prism.sensors import SensorSpec
from prism.sims.task_table import TASKS
from prism.training.config import TrainConfig

FORMAT_VERSION = 1
# Of a new run, in every loop; runs from before these were stored have neither (ControllerConfig).
AS_STORED: Mapping[str, Any] = {"join": 3, "margin": 0.05}
FILE = "experiment.json"


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run; stored in it as experiment.json, so that a run explains itself."""

    name: str
    task: str | None  # where it is rolled out; None: no simulator, a dataset alone
    demonstrations: Demonstrations
    policy: ContextConfig = field(default_factory=presets.tiny)  # of any method
    train: TrainConfig = field(default_factory=lambda: TrainConfig(minutes=5.0))
    controller: ControllerConfig = field(default_factory=lambda: ControllerConfig(**AS_STORED))
    teacher: str | None = None  # the run that a distilled method learns from
    # readings of touch and sound that a time step holds (prism.data.history); 0: all since the last plan
    history: int = 0
    init: str | None = None  # the run whose weights it begins with

    @property
    def method(self) -> str:
        return self.policy.method

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that it is rolled out in: of a mixture several, of a dataset alone none."""
        named = (self.task, *(part.task for part in self.demonstrations.parts))
        return tuple(task for task in named if task is not None)

    def sensors(self, recorded: tuple[SensorSpec, ...]) -> tuple[SensorSpec, ...]:
        """Of the policy: as recorded, and of touch and sound what happens between two plans."""
        return with_history(recorded, self.policy.obs_horizon, self.controller.exec_horizon, self.history)

    def save(self, run: Path) -> None:
        files.replace_file(run / FILE, self.encoded())

    def encoded(self) -> bytes:
        """experiment.json"""
        head = {"format_version": FORMAT_VERSION, "method": self.method}
        return files.encode_json({**head, **to_json(self)})

    @staticmethod
    def load(run: Path) -> Experiment:
        path = run / FILE
        if not path.is_file():
            raise PrismError(f"{path} does not exist: {run} is not a run of `prism train`")
        data = files.read_json(path)
        if (version := data.pop("format_version", None)) != FORMAT_VERSION:
            raise PrismError(f"{path} has format_version {version}, this prism reads {FORMAT_VERSION}: train again")
        method = data.pop("method", None)
        if method not in METHODS:
            raise PrismError(f"{path}: {METHODS.unknown(str(method))}")
        return from_json(Experiment, data, str(path), {"policy": METHODS[method].config})


def controller_of(task: str) -> ControllerConfig:
    """The controller's defaults, with the grippers of the task."""
    return ControllerConfig(selection=SelectionConfig(grippers=TASKS[task].grippers), **AS_STORED)


def state(task: str) -> Experiment:
    """A task from 20 demonstrations of its scripted expert, played with a little noise, so that they show how to come
    back to the way; vectors as inputs. Short plans, made anew at every step: as successful as after two, and smoother.

    Command: prism train metaworld-drawer-open && prism eval runs/metaworld-drawer-open --episodes 20
    Cost:    3 minutes of one core to train, seconds to record and evaluate.
    """
    return Experiment(
        name=task,
        task=task,
        demonstrations=Demonstrations("expert", episodes=20, noise=0.1, beyond=TASKS[task].beyond),
        policy=short_plans(),
        train=TrainConfig(minutes=3.0, val_fraction=0.05, threads=1, log_every=20),
        controller=replace(controller_of(task), exec_horizon=1),
    )


def short_plans() -> PrismConfig:
    """Tiny with plans of 8 actions: half of a step's computing, and what comes later is planned anew anyway."""
    tiny = presets.tiny()
    return replace(tiny, pred_horizon=8, encoder=replace(tiny.encoder, mix_width=256))


def state_long(task: str) -> Experiment:
    """`state` for longer tasks: twice the demonstrations, a wider encoder, more time.

    Command: prism train robosuite-lift --minutes 4 && prism eval runs/robosuite-lift --episodes 20
    Cost:    half a minute to record Lift, two or three times that for Can and Square.
    """
    one = state(task)
    return replace(
        one,
        demonstrations=replace(one.demonstrations, episodes=40),
        policy=replace(presets.tiny(), pred_horizon=8),
        train=replace(one.train, minutes=5.0),
    )


def state_fine(task: str) -> Experiment:
    """`state-long` where millimetres decide. An expert disturbed at every step would lose its way, so the noise is
    little; it is pushed now and then instead (docs/reference/robosuite.md). What is executed of a plan weighs more.

    Command: prism train robosuite-tool-hang && prism eval runs/robosuite-tool-hang --episodes 20
    Cost:    10 minutes of one core to record ToolHang, 20 for Transport, 12 to train.
    """
    one, tiny = state_long(task), presets.tiny()
    return replace(
        one,
        demonstrations=replace(one.demonstrations, episodes=200, noise=0.03),
        policy=replace(tiny, pred_horizon=8, objective=replace(tiny.objective, discount=0.85)),
        train=replace(one.train, minutes=12.0),
    )


def sensed(task: str) -> Experiment:
    """A task in which a short reading of one sense decides: many plans, so that a contact or a sound reaches the next
    one. With 8 actions of a plan executed tabletop-insert-left succeeds in 40 % of the episodes, with 2 in 95 %.

    Command: prism train tabletop-insert-left && prism eval runs/tabletop-insert-left --episodes 50
    Cost:    half a minute to record, a minute and a half of one core to train.
    """
    one = state(task)
    return replace(
        one,
        demonstrations=replace(one.demonstrations, episodes=200, noise=0.05),
        policy=sensed_policy(),
        train=replace(one.train, minutes=1.5),
        controller=replace(one.controller, exec_horizon=2),
    )


def grasped(task: str) -> Experiment:
    """`sensed` with more noise: where things are picked up first, demonstrations must show how a grasp that is a
    centimetre off is fixed.

    Command: prism train tabletop-rattle && prism eval runs/tabletop-rattle --episodes 50
    """
    return replace(sensed(task), demonstrations=Demonstrations("expert", episodes=200, noise=0.1))


def commanded(task: str) -> Experiment:
    """`grasped` where a sentence says what to do: it picks the things that count, so that what is learned of one cup
    holds for all. Few candidates: among many there is always one near the demonstration, whatever was said.

    Command: prism train tabletop-stack-blue tabletop-stack-yellow tabletop-ball tabletop-hang --episodes 25
    Cost:    half a minute to record, two and a half minutes of one core to train.
    """
    one = grasped(task)
    policy = sensed_policy()
    encoder = replace(policy.encoder, text=replace(policy.encoder.text, things={"object_state": 9}))
    objective = replace(policy.objective, candidates=2, soft_candidates=2)
    return replace(
        one,
        policy=replace(policy, encoder=encoder, objective=objective, pred_horizon=4),
        train=replace(one.train, minutes=0.625, batch_size=192),
    )


def sensed_policy() -> PrismConfig:
    """Tiny, with small networks for depth and sound, which otherwise are two thirds of a step, and short plans: what
    comes after the reading that decides cannot be foreseen."""
    short = short_plans()
    sound = replace(short.encoder.audio, mels=20, hop_ms=20.0, hidden=8, features=32)
    return replace(short, encoder=replace(short.encoder, audio=sound, depth_widths=(16, 32, 32), depth_features=64))


def loco(task: str) -> Experiment:
    """A task of the Go2 with an arm, as the paper's hardware: 35 demonstrations, actions that name the hand's pose and
    the base's velocity. Short plans and one reading of touch: the experts act on what is sensed now.

    Command: prism train go2-insert && prism eval runs/go2-insert --episodes 50
    Cost:    a minute to record, 5 minutes of one core to train.
    """
    return Experiment(
        name=task,
        task=task,
        demonstrations=Demonstrations("expert", episodes=35, noise=0.015),
        policy=replace(short_plans(), observation_noise=0.005),
        train=TrainConfig(minutes=5.0, val_fraction=0.0, threads=1, log_every=20),
        controller=replace(controller_of(task), exec_horizon=4),
        history=1,
    )


def pixels(task: str) -> Experiment:
    """A task from its cameras and proprioception, as own data with cameras are learned (`from_cameras`).

    Command: prism train metaworld-drawer-open-pixels && prism eval runs/metaworld-drawer-open-pixels --episodes 20
    Cost:    a minute of two cores to record, one for the features, three to train.
    """
    one = Experiment(
        name=task,
        task=task,
        # Disturbed a little, to show how to recover; much noise makes the rest of a plan unpredictable.
        demonstrations=Demonstrations("expert", episodes=20, noise=0.05),
        train=TrainConfig(minutes=3.0, log_every=20),
        controller=controller_of(task),
    )
    return from_cameras(one)


def pixels_long(task: str) -> Experiment:
    """`pixels` for longer tasks: more demonstrations, disturbed as those of `state-long`, and more time.

    Command: prism train robosuite-lift-pixels && prism eval runs/robosuite-lift-pixels --episodes 20
    Cost:    a minute of two cores to record Lift, some for Can, two for the features, five to train.
    """
    one = pixels(task)
    return replace(
        one,
        demonstrations=Demonstrations("expert", episodes=40, noise=0.1),
        train=replace(one.train, minutes=5.0),
    )


def from_cameras(experiment: Experiment) -> Experiment:
    """Settings of every experiment with a camera, for tasks and own data: a frozen backbone whose features are computed
    once, the robot's state left out of half of the windows so that the cameras are looked at, one time step, short
    plans of which two actions are executed.

    Measured: docs/howto/cameras.md.
    """
    tiny = presets.tiny()
    encoder = replace(tiny.encoder, vector_hidden=64, rgb="efficientnet-lite0", state_dropout=0.5)
    return replace(
        experiment,
        policy=replace(tiny, obs_horizon=1, pred_horizon=8, encoder=encoder),
        train=replace(experiment.train, minutes=3.0, batch_size=32),
        controller=replace(experiment.controller, exec_horizon=2),
    )


def pusht_human() -> Experiment:
    """Push-T from 206 human demonstrations (Diffusion Policy's), state inputs.

    Command: prism train pusht-human --minutes 30 && prism eval runs/pusht-human --episodes 50 --json F
    Cost:    30 minutes of one core for a success of .91 with a jerk of .0033 (research/results/pusht_human_fresh.json).
    """
    policy = pusht_policy()
    return Experiment(
        name="pusht-human",
        task="pusht",
        demonstrations=Demonstrations("human", mirror=True),
        policy=replace(
            policy,
            generator=replace(policy.generator, smooth=1.0),
            objective=replace(policy.objective, discount=0.85),  # 6 of 16 actions have two thirds
        ),
        train=pusht_training(),
        # Looks again after four actions, so that a smooth motion need not be a late one. People stop and think, and a
        # policy of theirs may stop and stay (restless): docs/reference/metrics.md.
        controller=ControllerConfig(
            exec_horizon=4, jerk_weight=16.0, selection=SelectionConfig(restless=8), **AS_STORED
        ),
    )


def pusht_training() -> TrainConfig:
    return TrainConfig(minutes=15.0, learning_rate=7e-4, weight_decay=1e-2, betas=(0.9, 0.95), ema_max_decay=0.9995)


def pusht_policy() -> PrismConfig:
    """Tiny, with plans as offsets from the agent: the action is a position, and it starts where the agent is."""
    return replace(presets.tiny(), anchor="proprio", observation_noise=0.02)


def pusht(task: str = "pusht") -> Experiment:
    """Push-T from the demonstrations that ship with prism: an expert that goes round the block either way.

    Command: prism train pusht && prism eval runs/pusht
    Cost:    15 minutes on two cores.
    """
    return Experiment(
        name=task,
        task=task,
        demonstrations=Demonstrations("shipped", mirror=True),
        policy=pusht_policy(),
        train=pusht_training(),
    )


def pusht_edge(task: str = "pusht-edge") -> Experiment:
    """Push-T from starts with two ways round the block, left and right, from the scripted expert, who takes both.

    Command: python -m research multimodality
    Cost:    ten minutes on two cores, the recording of its demonstrations included.
    """
    demonstrations = Demonstrations("expert", episodes=60, mirror=True)
    return replace(pusht(task), demonstrations=demonstrations)


def own_data(path: Path) -> Experiment:
    """A dataset of your own, all its sensors, no simulator. A new plan after two actions: a contact, a sound or a slip
    must reach the next one soon. A peg by touch, 100 recordings: 13 of 40 with 8 actions of a plan, 40 of 40 with 2.
    With cameras it becomes `from_cameras` (prism.experiments.options.fitted_to_data).

    Command: prism train my.zarr.zip --minutes 30
    """
    name = path.name.removesuffix(".zip").removesuffix(".zarr") or "own-data"
    return Experiment(
        name=name,
        task=None,
        demonstrations=Demonstrations("path", path=str(path)),
        train=TrainConfig(minutes=15.0),
        controller=ControllerConfig(exec_horizon=2, **AS_STORED),
    )


def demo_tasks(cameras: bool = True) -> tuple[Experiment, ...]:
    """The tasks of `prism demo`: a button is pressed from the true state of the scene, a drawer is opened from two
    `cameras` and proprioception. Both are easy, and need less than their recipes. The budgets are CPU minutes: a busy
    machine takes longer and learns as much.

    Command: prism demo
    Cost:    three minutes of two cores, all included.
    """
    button, drawer = state("metaworld-button-press-topdown"), state("metaworld-drawer-open")
    if cameras:
        drawer = pixels("metaworld-drawer-open-pixels")
        drawer = replace(drawer, demonstrations=replace(drawer.demonstrations, episodes=10, noise=0.1))
    return _for_demo(button, 1.5), _for_demo(drawer, 1.0 if cameras else 1.5)


def _for_demo(experiment: Experiment, minutes: float) -> Experiment:
    train = replace(experiment.train, minutes=minutes, clock="cpu", threads=1, val_fraction=0.0)
    return replace(experiment, train=train)


RECIPES = {
    "state": state,
    "state-long": state_long,
    "state-fine": state_fine,
    "sensed": sensed,
    "grasped": grasped,
    "loco": loco,
    "commanded": commanded,
    "pixels": pixels,
    "pixels-long": pixels_long,
    "pusht": pusht,
    "pusht-edge": pusht_edge,
}


def names() -> tuple[str, ...]:
    """Every recipe: pusht-human, and one for each task."""
    return ("pusht-human", *TASKS)


def recipe(name: str) -> Experiment:
    """By the name of a recipe or of a task, or by the path of a dataset."""
    if name == "pusht-human":
        return pusht_human()
    if name in TASKS:
        if (wanted := TASKS[name].recipe) not in RECIPES:
            raise PrismError(f"task '{name}' names the recipe '{wanted}'; there are {', '.join(RECIPES)}")
        return RECIPES[wanted](name)
    if Path(name).exists() or hub.is_hub(name):
        return own_data(Path(name))
    if "/" in name or Path(name).suffix:
        raise PrismError(f"{name}: not found; give the path of a dataset, or the name of a recipe or task")
    hint = f"did you mean {' or '.join(close)}?" if (close := near(name, names())) else "give the path of a dataset"
    more = "" if close else f", or a name such as {', '.join(names()[:4])}"
    raise PrismError(f"'{name}' is not a recipe, task or dataset: {hint}{more}")


def with_preset(experiment: Experiment, name: str) -> Experiment:
    """The same experiment with another size of network; what belongs to the task stays."""
    policy = experiment.policy
    sized = replace(presets.preset(name), anchor=policy.anchor, observation_noise=policy.observation_noise)
    text = replace(sized.encoder.text, things=policy.encoder.text.things)
    sized = replace(sized, encoder=replace(sized.encoder, text=text))
    experiment = replace(experiment, policy=presets.as_method(sized, experiment.method, name))
    return as_paper(experiment) if name == "paper-literal" else experiment


def as_paper(experiment: Experiment) -> Experiment:
    """The paper's training and control to the letter, with the settings of its benchmarks (App. A.3, Sec. 4.5): targets
    from the next step, one reading of each sensor a step, AdamW with its defaults, batches of 128, no averaged weights,
    ProxyScore over 8 candidates, plans executed as they are."""
    rate = 5e-5 if (experiment.task or "").startswith("calvin") else 1e-4
    train = replace(
        experiment.train, batch_size=128, learning_rate=rate, weight_decay=0.01, betas=(0.9, 0.999), ema_power=0.0
    )
    selection = replace(experiment.controller.selection, rule="proxy_score", restless=0)
    return replace(
        experiment,
        policy=replace(experiment.policy, anchor=None, observation_noise=0.0),
        demonstrations=replace(experiment.demonstrations, mirror=False, next_actions=True),
        train=train,
        controller=ControllerConfig(exec_horizon=8, candidates=8, selection=selection, join=0),
        history=1,
    )


def with_method(experiment: Experiment, method: str, preset: str | None = None) -> Experiment:
    """The same experiment with another method: its head on the same encoder, and its selection rule.

    Data, horizons, encoder, anchor, observation noise, optimiser, batch size, budget and seed stay. `preset` is the
    head's size (default: that of the experiment).
    """
    if not isinstance(experiment.policy, PrismConfig):
        raise PrismError(
            f"experiment '{experiment.name}' is of method '{experiment.method}' already: start from PRISM's"
        )
    policy = presets.as_method(experiment.policy, method, preset)
    controller = with_settings(experiment.controller, METHODS[method].controller)
    return replace(experiment, policy=policy, controller=controller)


def with_teacher(experiment: Experiment, run: Path) -> Experiment:
    """A distilled method and the run that it learns from: the student has the teacher's network."""
    policy = presets.student_config(experiment.method, Experiment.load(run).policy)
    return replace(experiment, policy=policy, teacher=str(run))


def with_budget(
    experiment: Experiment, minutes: float | None = None, steps: int | None = None, seed: int | None = None
) -> Experiment:
    """The same experiment with another training budget (one replaces the other) or seed."""
    if minutes is not None and steps is not None:
        raise PrismError("give minutes or steps, not both: each is the whole training budget")
    changes: dict[str, Any] = {} if seed is None else {"seed": seed}
    if minutes is not None or steps is not None:
        changes |= {"minutes": minutes or 0.0, "steps": steps or 0}
    return replace(experiment, train=replace(experiment.train, **changes))
