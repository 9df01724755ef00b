"""prism.train and prism.evaluate: recipe -> demonstrations -> statistics -> policy -> the loop -> a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from prism_client import ActionKind
from rich.console import Console

from prism import ranks
from prism.controller import check_controller
from prism.data import EpisodeSource
from prism.data.guess_kind import guess_kind
from prism.data.history import unseen
from prism.data.pictures import DEFAULT_SIDE, FROZEN_SIDE, as_recorded
from prism.data.statistics import with_seen
from prism.data.views import portion
from prism.data.windows import Windows
from prism.encoder import load_pretrained
from prism.encoders.frozen import FROZEN
from prism.errors import PrismError
from prism.evaluation.play import TEST_SEED
from prism.evaluation.results import EvaluationResult, pooled, write_json
from prism.experiments.combined_recipe import mixed
from prism.experiments.demonstrations import open_demonstrations, split_demonstrations
from prism.experiments.kept_features import features_of, restore_backbone
from prism.experiments.options import TrainOptions, customized, fitted_to_data
from prism.experiments.recipes import FILE, Experiment, recipe
from prism.experiments.robust import health_limits
from prism.experiments.run_folder import EvalOptions, Run, is_run, measure_run
from prism.experiments.start_from import begin_with
from prism.io import files
from prism.io.jsonconfig import from_json, to_json
from prism.methods import METHODS
from prism.methods.presets import build_policy
from prism.methods.unet import Student
from prism.normalize import Normalizer, Statistics, compute_statistics
from prism.policy import Policy, PolicySpec
from prism.sensors import ActionSpec, SensorSpec, action_spec_of
from prism.training import trainer
from prism.training.checkpoint import check_resume, list_checkpoints
from prism.training.log import Curves
from prism.training.trainer import TrainResult

CURVE = "curve.json"
TUNING_SEED = 2 * TEST_SEED  # to look at on the way: neither of demonstrations nor of tests


def train(
    recipe: str | Path | Experiment | Sequence[str | Path],
    out: Path | str | None = None,
    resume: bool | Literal["auto"] = False,
    progress: bool = True,
    device: str = "auto",
    eval_every: float | None = None,
    eval_episodes: int = 20,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train a policy, as `prism train` does: on a recipe, a task, the path of a dataset, several of these, or an
    experiment.

        run = prism.train("pusht", minutes=5)
        run = prism.train(["tabletop-ball", "tabletop-hang"], weights=[1, 2])
        run = prism.train("my.zarr.zip", steps=2000, out="runs/mine", set=["train.batch_size=32"])

    The options are those of `prism train --help`, also `device`, `eval_every` and `eval_episodes`. `out`: the run's
    folder, runs/NAME by default; it must not hold a run, unless `resume`. "auto" continues a run that is there and
    starts one that is not. Ctrl-C and SIGTERM save it, then KeyboardInterrupt is raised.
    """
    console = Console(stderr=True, quiet=not progress)
    with ranks.session():
        folder, _, result = train_recipe(recipe, out, resume, console, device, eval_every, eval_episodes, **options)
    if result.stopped_by:  # the script must not go on with half a training
        raise KeyboardInterrupt(f"{folder}: stopped by {result.stopped_by} at step {result.step}, all saved")
    return Run(folder)


def load_run(path: Path | str) -> Run:
    """A run by its folder, or by one checkpoint in it: run.controller() acts, run.experiment has its settings."""
    return Run(path)


def evaluate(
    run: Run | Path | str,
    episodes: int = 50,
    task: str | None = None,
    first_seed: int = TEST_SEED,
    candidates: int | None = None,
    selection: str | None = None,
    set: Sequence[str] = (),
    workers: int | None = None,
    progress: bool = True,
    text: str | None = None,
    without: Sequence[str] = (),
) -> EvaluationResult:
    """Evaluate a run, as `prism eval` does, on seeds first_seed, first_seed + 1, ...; result.summary() has the means.

        result = prism.evaluate("runs/mine", episodes=20, set=["exec_horizon=2"])

    None: as the run's experiment says. The recording and metrics.json stay in the run. `text`: the policy gets this
    sentence; `without`: these sensors are absent; then nothing is stored.
    """
    found = (task, episodes, first_seed, candidates, selection, tuple(set), workers)
    options = EvalOptions(*found, text=text, without=tuple(without))
    return (run if isinstance(run, Run) else Run(run)).evaluate(options, progress)


def train_recipe(
    name: str | Path | Experiment | Sequence[str | Path],
    out: Path | str | None,
    resume: bool | Literal["auto"],
    console: Console,
    device: str = "auto",
    eval_every: float | None = None,
    eval_episodes: int = 20,
    **options: Unpack[TrainOptions],
) -> tuple[Path, Experiment, TrainResult]:
    """The folder of the run, its experiment and how the training ended. Call it inside ranks.session().

    `eval_every`: roll out `eval_episodes` tuning seeds each time that many minutes or steps of the budget are used.

    A run that is continued keeps the options that it was started with; those that are given here replace them.
    """
    with ranks.share_errors():  # what one rank does not find, all learn
        experiment = name if isinstance(name, Experiment) else _named(name)
        method = options.get("method") or experiment.method
        other = "" if method == experiment.method else f"-{method}"
        folder = Path(out) if out is not None else Path("runs") / f"{experiment.name}{other}"
        there = ranks.is_leader() and ((resume is True and folder.is_dir()) or (resume == "auto" and is_run(folder)))
        stored = Experiment.load(folder) if there else None
    stored = broadcast_experiment(stored)
    with ranks.share_errors():
        if stored is None:
            speaker = console if ranks.is_leader() else Console(quiet=True)
            experiment = fitted_to_data(experiment, partial(_say, speaker), **options)
        experiment = customized(stored or experiment, **options)
        looks = () if eval_every is None else evaluation_fractions(experiment, eval_every)

    def look(fraction: float, trained: TrainResult) -> None:
        if experiment.train.fraction(trained.step, trained.seconds) > fraction + 0.5 * looks[0]:
            return  # a run that is continued was past it already
        how = EvalOptions(episodes=eval_episodes, first_seed=TUNING_SEED)
        played = pooled(Run(folder).play_all(how, progress=not console.quiet), experiment.name)
        point = add_point(folder, fraction, trained, played)
        shown = {name: point[name] for name in ("step", "seconds", "success", "score")}
        curves = Curves(folder, experiment.train)
        curves.write(shown)
        curves.close()
        console.print(
            f"evaluated at step {trained.step}: success {point['success']:.0%}, score {point['score']:.3f} "
            f"({eval_episodes} tuning episodes)",
            highlight=False,
        )

    result = train_experiment(experiment, folder, resume, console, experiment.name, 1.0, looks, look, device)
    with ranks.share_errors():
        if stored is not None and ranks.is_leader() and stored.train != experiment.train:  # a larger budget
            replace(stored, train=experiment.train).save(folder)
        if looks and ranks.is_leader() and not result.stopped_by:
            look(1.0, result)
        if ranks.is_leader() and not result.stopped_by:
            _measure(Run(folder), console, device)
    return folder, experiment, result


def _measure(run: Run, console: Console, device: str) -> None:
    """Which sensors it uses. A failure here does not fail the finished training."""
    try:
        measure_run(run, console, ranks.choose_device(device), small=True)
    except PrismError as error:
        console.print(f"the sensors were not measured: {error}", highlight=False, markup=False, soft_wrap=True)


def _named(name: str | Path | Sequence[str | Path]) -> Experiment:
    names = [str(name)] if isinstance(name, str | Path) else [str(one) for one in name]
    return recipe(names[0]) if len(names) == 1 else mixed(names)


def evaluation_fractions(experiment: Experiment, every: float) -> tuple[float, ...]:
    """Fractions of the budget at which evaluations are due, every `every` minutes or steps."""
    if not experiment.tasks:
        raise PrismError("--eval-every rolls out in a task, and a dataset alone has none: leave it out")
    config = experiment.train
    budget, unit = (config.minutes, "minutes") if config.minutes else (float(config.steps), "steps")
    if not 0 < every < budget:
        raise PrismError(f"--eval-every {every:g}: use less than the budget of {budget:g} {unit}, and more than 0")
    return tuple(at * every / budget for at in range(1, math.ceil(budget / every)))


def read_curve(run: Path) -> list[dict[str, Any]]:
    """curve.json of a run: evaluations during the training, in order."""
    if not (run / CURVE).is_file():
        return []
    points = files.read_json(run / CURVE).get("points")
    if not isinstance(points, list):
        raise PrismError(f"{run / CURVE} has no list 'points': remove the file")
    return points


def curve_point(fraction: float, trained: TrainResult, result: EvaluationResult) -> dict[str, Any]:
    summary = result.summary()
    return {
        "fraction": fraction,
        "seconds": trained.seconds,
        "step": trained.step,
        "val_loss": trained.val_loss,
        "episodes": len(result.episodes),
        "score": summary["score"],
        "success": summary["success"],
    }


def add_point(run: Path, fraction: float, trained: TrainResult, result: EvaluationResult) -> dict[str, Any]:
    """Add an evaluation during the training; replaces one at the same fraction."""
    point = curve_point(fraction, trained, result)
    points = [known for known in read_curve(run) if known["fraction"] != fraction]
    write_json(run / CURVE, {"points": [*points, point]}, overwrite=True)
    return point


def train_experiment(
    experiment: Experiment,
    run: Path,
    resume: bool | Literal["auto"] = False,
    console: Console | None = None,
    title: str = "train",
    until: float = 1.0,
    looks: Sequence[float] = (),
    look: Callable[[float, TrainResult], None] | None = None,
    device: str = "auto",
) -> TrainResult:
    """Demonstrations -> statistics -> policy -> the loop, up to `until` of its budget; the run folder then explains
    itself. At the fractions `looks` of the budget rank 0 calls `look`, off the training's clock.

    `resume` "auto": go on with a run that is there, start one that is not. On several ranks all do the same; rank 0
    records what has to be recorded, before the others look, and writes the files.
    """
    leader = ranks.is_leader()
    console = (console or Console(stderr=True)) if leader else Console(quiet=True)
    opened, begun, asked = None, False, resume
    side = FROZEN_SIDE if experiment.policy.encoder.rgb in FROZEN else DEFAULT_SIDE
    with ranks.share_errors():
        if leader:
            resume = _check_folder(run, resume)
            begun = resume and bool(list_checkpoints(run))
            opened = open_demonstrations(experiment.demonstrations, experiment.task, console, True, side)
    agreed = ranks.max_over_ranks([float(leader and bool(resume)), float(begun)])
    resume, begun = (value > 0 for value in agreed)
    with ranks.share_errors():
        opened = opened or open_demonstrations(experiment.demonstrations, experiment.task, console, True, side)
        demonstrations, source, copies = opened
        action, how = _known_action(source, experiment)
        experiment = _with_actions(replace(experiment, demonstrations=demonstrations), action, bool(how))
        config = experiment.train

        split = split_demonstrations(demonstrations, source, copies, config.val_fraction, config.seed)
        training, held_out, trained_on = split.training.tolist(), split.held_out, source
        weights = getattr(source, "weights", None)
        weights = None if weights is None else weights[split.training]
        if demonstrations.fraction is not None:  # perhaps not to their ends
            trained_on = portion(source, training, split.steps)
            training = list(range(len(training)))

        reading = f"reading the actions and vectors of {len(training)} episodes"
        with console.status(reading):
            statistics = compute_statistics(trained_on, training)
            sensors = _sensors(experiment, as_recorded(source), trained_on, training, statistics)
        spec = experiment.policy.spec(sensors, source.action_dim, source.fps, action)
        policy = build_policy(spec, config.seed, Normalizer.from_statistics(statistics))
        if begun:
            restore_backbone(policy, run)
        else:
            begin_with(policy, experiment.init) if experiment.init else load_pretrained(policy)
        on_device = ranks.choose_device(device)
        _teach(policy, experiment.teacher, on_device)
        policy.to(on_device)
    used = [*split.training.tolist(), *held_out.tolist()]
    kept = features_of(
        policy, source, used, config, lambda words: console.print(words, highlight=False, soft_wrap=True)
    )
    shown = kept if trained_on is source else {name: one.chosen(split.training) for name, one in kept.items()}
    with ranks.share_errors():
        horizons = (experiment.policy.obs_horizon, experiment.policy.pred_horizon)
        history = {sensor.name: sensor.steps for sensor in sensors}
        with console.status(reading):
            windows = Windows(trained_on, *horizons, training, weights=weights, history=history, kept=shown)
            windows_val = (
                Windows(source, *horizons, held_out.tolist(), history=history, kept=kept) if len(held_out) else None
            )
    on = ("" if on_device.type == "cpu" else f", on {on_device}") + (
        f", {ranks.world_size()} ranks" if ranks.world_size() > 1 else ""
    )
    mirrored = f" ({len(training) // copies} and their mirror images)" if copies > 1 else ""
    size = f"{len(windows)} windows, {sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters{on}"
    told = f"{len(training)} episodes{mirrored}, {len(held_out) or 'none'} held out for validation, {size}"
    console.print(f"{title}: {told} -> {run}\n{_in_and_out(spec, experiment, how)}", highlight=False, soft_wrap=True)
    with ranks.share_errors():
        if leader:
            run.mkdir(parents=True, exist_ok=True)
            if asked is False or not is_run(run):
                experiment.save(run)
    stretch = partial(trainer.train, policy, windows, windows_val, config, run, console=console, title=title)
    for fraction in (at for at in looks if at < until and look is not None):
        result = stretch(resume=resume, until=fraction)
        if result.stopped_by:
            return result
        with ranks.share_errors():
            if leader and look is not None:
                look(fraction, result)
        resume = True
    return stretch(resume=resume, until=until)


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def _check_folder(run: Path, resume: bool | Literal["auto"]) -> bool:
    """check_resume; never replaces an experiment.json without its training."""
    if resume is False and is_run(run) and not (run / "log.jsonl").exists():
        raise PrismError(f"{run / FILE} is there without its training: move it, or choose another --out")
    return check_resume(run, resume)


def _sensors(
    experiment: Experiment,
    recorded: tuple[SensorSpec, ...],
    source: EpisodeSource,
    episodes: Sequence[int],
    statistics: Statistics,
) -> tuple[SensorSpec, ...]:
    """The policy's sensors, with health limits if the experiment sets them."""
    sensors = with_seen(experiment.sensors(recorded), source, statistics)
    return health_limits(sensors, source, episodes, statistics) if experiment.train.robust.limits else sensors


def _known_action(source: EpisodeSource, experiment: Experiment) -> tuple[ActionSpec, str]:
    """Kind of the actions of a dataset, and how it was found."""
    action = action_spec_of(source)
    if action.kind is not None:
        return action, ""
    guess = guess_kind(source)
    if guess.kind is not None:
        return replace(action, kind=guess.kind), "seen in the data"
    if experiment.init and (kind := Run(experiment.init).spec.action.kind):
        return replace(action, kind=kind), f"as in {experiment.init}"
    raise PrismError(f"{source.path}: unknown kind of action: {guess.why}")


def _in_and_out(spec: PolicySpec, experiment: Experiment, how: str) -> str:
    """Sensors and kind of the actions, in words: a controller with the wrong kind is dangerous."""
    known = spec.action.kind
    assert known is not None
    other = ActionKind.DELTA if known is ActionKind.ABSOLUTE else ActionKind.ABSOLUTE
    kind = f"{known} ({known.meaning})" + (f", {words}" if (words := spec.action.in_words()) else "")
    wrong = f"; {how}; if not: --action-kind {other}" if how else ""
    names = ", ".join(s.name + (f" ({s.steps} readings in a time step)" if s.steps > 1 else "") for s in spec.sensors)
    steps = experiment.controller.exec_horizon
    lost = "".join(
        f"\n  warning: steps of '{name}' between two plans are never seen: --sensor {name}.history={steps}, or plan "
        "at every step: --set controller.exec_horizon=1"
        for name in unseen(spec.sensors, spec.obs_horizon, steps)
    )
    try:
        check_controller(experiment.controller, spec)
    except PrismError as error:  # it can be trained, and then not be rolled out without --set
        lost += f"\n  warning: {error}"
    return f"  sensors: {names}; {spec.action_dim} actions, {kind}{wrong}{lost}"


def broadcast_experiment(experiment: Experiment | None) -> Experiment | None:
    """Rank 0's, on every rank: the others need not see the resumed run."""
    if ranks.world_size() == 1:
        return experiment
    text = "" if experiment is None else json.dumps([experiment.method, to_json(experiment)])
    sent = ranks.broadcast(text.encode() if ranks.is_leader() else b"")
    if ranks.is_leader() or not sent:
        return experiment
    method, data = json.loads(sent)
    return from_json(Experiment, data, f"{FILE} of rank 0", {"policy": METHODS[method].config})


def _with_actions(experiment: Experiment, action: ActionSpec, found: bool) -> Experiment:
    """What its data say of the actions: which entries are grippers, by their names, and their kind, where it was found
    (`found`): written down, so that a resumed run need not find it again. Tasks state both."""
    if experiment.tasks:
        return experiment
    selection = experiment.controller.selection.of_actions(action)
    data = experiment.demonstrations
    if found:
        data = replace(data, sensors=(*data.sensors, f"action.kind={action.kind}"))
    return replace(experiment, demonstrations=data, controller=replace(experiment.controller, selection=selection))


def _teach(policy: Policy, teacher: str | None, device: torch.device) -> None:
    """Give a distilled method its teacher."""
    if isinstance(policy, Student):
        if teacher is None:
            raise PrismError(f"{policy.spec.method} is distilled from another method: name the run with --teacher")
        policy.learn_from(Run(teacher).policy(device))
    elif teacher is not None:
        raise PrismError(f"method '{policy.spec.method}' has no teacher: drop --teacher")
