"""A run: the folder of a training, and what can be done with it.

run = Run("runs/pusht")             the folder, or one checkpoint in it; hf://USER/NAME; what lerobot-train made
run.experiment                      its settings: task, data, policy, training, controller
run.policy()                        averaged weights of its newest intact checkpoint
run.controller()                    the same, controlled by the settings that are stored in the run
run.evaluate(EvalOptions(...))      rollouts; evaluation/ and metrics.json stay in the run

runs/pusht/experiment.json          recipes.Experiment
           checkpoints/step-...     training/checkpoint.py
           log.jsonl  tensorboard/  training/log.py
           evaluation/TASK.npz  metrics.json  report.html
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from prism.controller import Controller, ControllerConfig, check_controller
from prism.data import EpisodeSource, open_dataset
from prism.data.formats.episode_folders import is_recording
from prism.data.formats.store import is_store
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.evaluation import ray_workers
from prism.evaluation.play import TEST_SEED, IncompleteError, PolicyFactory, RecordConfig, evaluate
from prism.evaluation.results import (
    FOLDER,
    EvaluationResult,
    load_results,
    metrics_json,
    recording_path,
    save_result,
    write_json,
)
from prism.evaluation.sensor_use import SensorReport, measure_sensors, read_sensor_report, write_sensor_report
from prism.experiments.demonstrations import (
    Demonstrations,
    Part,
    Split,
    open_demonstrations,
    split_demonstrations,
)
from prism.experiments.recipes import FILE, Experiment
from prism.inference.backends import Frame, backend_device, load_behind
from prism.io import files, hub
from prism.io.jsonconfig import from_json, with_settings
from prism.io.progress import Bar
from prism.policy import Policy, PolicySpec
from prism.report.held_out import write_held_out
from prism.report.rerun_log import RerunLog, log_results
from prism.report.run_page import write_report
from prism.selection import SelectionConfig
from prism.sims.task_table import make_env
from prism.sims.view import make_view
from prism.training import checkpoint
from prism.training.log import read_log

_ON_THE_HUB = ("*.json", "model.safetensors", "*.md")
_PATIENCE = 2.0  # seconds without a bar
_LEROBOT = "checkpoints/last/pretrained_model"


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation. None: the experiment's setting."""

    task: str | None = None
    episodes: int = 50
    first_seed: int = TEST_SEED
    candidates: int | None = None
    selection: str | None = None
    set: tuple[str, ...] = ()  # settings of the controller, KEY=VALUE
    workers: int | None = None  # None: one a core of the machine or cluster
    record: RecordConfig | None = None
    ray: bool = False
    backend: str = "eager"  # inference/backends.py
    device: str = "cpu"  # of the eager policy; every worker has a copy there
    text: str | None = None  # instruction of the policy, whatever the task says
    without: tuple[str, ...] = ()  # sensors that are absent

    def parallel(self) -> int:
        if self.workers is not None:
            return self.workers
        return max(1, min(ray_workers.cpus() if self.ray else os.cpu_count() or 1, self.episodes))

    def controller(self, config: ControllerConfig) -> ControllerConfig:
        return changed(config, self.candidates, self.selection, set=self.set)


def changed(
    config: ControllerConfig,
    candidates: int | None = None,
    selection: str | None = None,
    exec_horizon: int | None = None,
    set: Sequence[str] = (),
) -> ControllerConfig:
    """A controller's settings with some of them replaced. `selection` is a rule; `set` are KEY=VALUE."""
    if candidates is not None:
        config = replace(config, candidates=candidates)
    if exec_horizon is not None:
        config = replace(config, exec_horizon=exec_horizon)
    if selection is not None:
        config = replace(config, selection=replace(config.selection, rule=selection))  # type: ignore[arg-type]  # checked there
    return with_settings(config, set)


def default_controller(spec: PolicySpec) -> ControllerConfig:
    """Where no settings are stored. Of plans no longer than the default exec_horizon half is executed: the selection
    compares the next plan with the rest."""
    config = ControllerConfig(selection=SelectionConfig().of_actions(spec.action))
    fits = config.exec_horizon < spec.pred_horizon
    return config if fits else replace(config, exec_horizon=max(1, spec.pred_horizon // 2))


class Run:
    """The folder of a run, or of one checkpoint, which may have been copied alone.

    Opening it reads only names; PrismError if there is no run.
    """

    def __init__(self, path: Path | str) -> None:
        self.is_hub = hub.is_hub(path)
        self.given = hub.fetch(path, "model", _ON_THE_HUB) if self.is_hub else Path(path)
        if (last := self.given / _LEROBOT).is_dir():  # the folder of a training with lerobot-train
            self.given = last
        if not self.given.exists():
            raise PrismError(f"{path} does not exist: give the folder of a run (prism train says its name at the end)")
        if not self.is_hub:
            files.check_inside(self.given)
        homes = [home for home in (self.given, *self.given.resolve().parents[:2]) if (home / FILE).is_file()]
        alone = (self.given / "config.json").is_file() or checkpoint.list_checkpoints(self.given)
        if not homes and not alone:
            raise PrismError(f"{path} is not a run of `prism train`: {FILE} is missing")
        self.folder = homes[0] if homes else self.given

    def __repr__(self) -> str:
        return f"Run({str(self.given)!r})"

    # ----------------------------------------------------------------- what it is

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def has_experiment(self) -> bool:
        return is_run(self.folder)

    @cached_property
    def experiment(self) -> Experiment:
        """All settings of the run. PrismError for a checkpoint that was copied alone."""
        return Experiment.load(self.folder)

    def task(self, asked: str | None = None) -> str:
        """The task to evaluate on: `task`, or the experiment's."""
        tasks = self.tasks(asked)
        if len(tasks) > 1:
            raise PrismError(f"{self.folder} was trained for {len(tasks)} tasks: choose one, {', '.join(tasks)}")
        return tasks[0]

    def tasks(self, asked: str | None = None) -> tuple[str, ...]:
        """The tasks to evaluate on: `task`, or all of the experiment."""
        tasks = (asked,) if asked else self.experiment.tasks
        if not tasks:
            raise PrismError(f"{self.folder} was trained on a dataset alone: choose a task with --task")
        return tasks

    def shown(self) -> tuple[str, ...]:
        """The tasks of its demonstrations, by name: of the experiment, or as the datasets call them, if still there."""
        own = self.experiment.demonstrations if self.has_experiment else None
        parts = () if own is None else own.parts or (Part(self.experiment.task, own),)
        found = {part.task or _task_of(part.demonstrations): None for part in parts}
        return tuple(name for name in found if name)

    # ----------------------------------------------------------------- its checkpoints

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first, intact or not."""
        return checkpoint.list_checkpoints(self.folder)

    def weights(self) -> Path:
        """The given checkpoint, or the newest intact one."""
        return checkpoint.resolve(self.given)

    def weights_id(self) -> dict[str, str]:
        """Name and sha256 of the weights, to recognise stale results."""
        folder = self.weights()
        sums = files.read_sums(folder).get("model.safetensors", {})
        return {"name": folder.name, "sha256": str(sums.get("sha256", ""))}

    @property
    def spec(self) -> PolicySpec:
        """Sensors, horizons and method of the policy, without its weights."""
        return checkpoint.read_spec(self.weights())

    # ----------------------------------------------------------------- policy and controller

    def policy(
        self,
        device: torch.device | str = "cpu",
        which: Literal["latest", "best"] = "latest",
        backend: str = "eager",
        threads: int = 1,
        action_kind: str | None = None,
    ) -> Policy:
        """The policy, in evaluation mode. `backend` (inference/backends.py) computes it on the CPU with `threads`;
        `action_kind` states what its actions are, where its data did not."""
        if backend == "eager":
            policy = checkpoint.load_policy(self.given, which).to(device)
        else:
            frames = self.example_frames() if backend == "onnx-int8" else ()
            policy = load_behind(checkpoint.resolve(self.given, which), backend, frames, threads)
        policy.spec = policy.spec.stated(action_kind)
        return policy

    @property
    def settings(self) -> ControllerConfig:
        """The controller's settings that are stored in the run; the defaults for a checkpoint that was copied alone."""
        if self.has_experiment:
            return self.experiment.controller
        path = self.weights() / "config.json"
        stored = files.read_json(path).get("controller")  # LeRobot's checkpoints have them there
        if stored is not None:
            return from_json(ControllerConfig, stored, str(path))
        return default_controller(self.spec)

    def controller(
        self,
        device: torch.device | str = "cpu",
        seed: int = 0,
        candidates: int | None = None,
        exec_horizon: int | None = None,
        selection: str | None = None,
        set: Sequence[str] = (),
    ) -> Controller:
        """The policy under the stored settings, changed by what is given; `set` as in prism eval --set.

        controller.reset(seed) begins an episode, controller.act({sensor: reading}) gives its next action.
        """
        config = changed(self.settings, candidates, selection, exec_horizon, set)
        return Controller(self.policy(device), config, seed)

    # ----------------------------------------------------------------- what was measured

    def sensors_used(self) -> SensorReport | None:
        """Which sensors its weights use (evaluation/sensor_use.py); None: not measured, as of older runs."""
        return read_sensor_report(self.weights())

    def play(self, options: EvalOptions | None = None, progress: bool = True) -> EvaluationResult:
        """Evaluate the policy without storing it. IncompleteError holds the finished episodes if some were lost."""
        options = options or EvalOptions()
        task, controller = self.task(options.task), options.controller(self.settings)
        check_controller(controller, self.spec)  # before any process is started
        weights = self.weights()  # once: the run may be in training, and every worker has to play the same policy
        policy: Path | PolicyFactory = weights
        origin: dict[str, Any] = {"checkpoint": Run(weights).weights_id()}
        if options.backend != "eager":
            policy = partial(load_behind, weights, options.backend, self.example_frames(task))
            origin["backend"] = options.backend
        if (device := backend_device(options.device, options.backend)).type != "cpu":
            if options.ray:
                raise PrismError(f"--device {options.device}: Ray's workers compute on CPUs; leave --ray or it out")
            policy = partial(_load_on, weights, device)
        several = self.has_experiment and bool(self.experiment.demonstrations.parts)
        env = None
        if several or options.text is not None or options.without:
            env = partial(make_view, task, self.spec.sensors, options.text, options.without, several)
            origin |= {"text": options.text} if options.text is not None else {}
            origin |= {"without": list(options.without)} if options.without else {}

        def named(result: EvaluationResult) -> EvaluationResult:
            return replace(result, policy=str(self.given), info={**result.info, **origin})

        try:
            result = evaluate(
                policy,
                task,
                options.episodes,
                options.first_seed,
                controller=controller,
                workers=options.parallel(),
                record=options.record,
                progress=progress,
                env=env,
                ray=options.ray,
            )
        except IncompleteError as error:
            raise IncompleteError(named(error.result)) from error
        return named(result)

    def evaluate(self, options: EvalOptions | None = None, progress: bool = True) -> EvaluationResult:
        """`play`; the recording and metrics.json stay in the run, unless a back end computed it, it is the hub's, or
        the policy was told something else or lacked a sensor."""
        options = options or EvalOptions()
        return self.evaluate_all(replace(options, task=self.task(options.task)), progress)[0]

    def play_all(self, options: EvalOptions | None = None, progress: bool = True) -> list[EvaluationResult]:
        """`play` on every task of the training."""
        options = options or EvalOptions()
        return [self.play(replace(options, task=task), progress) for task in self.tasks(options.task)]

    def evaluate_all(self, options: EvalOptions | None = None, progress: bool = True) -> list[EvaluationResult]:
        """`evaluate` on every task of the training."""
        options = options or EvalOptions()
        stored = options.backend == "eager" and not self.is_hub and options.text is None and not options.without
        results: list[EvaluationResult] = []
        for task in self.tasks(options.task):
            try:
                results.append(self.play(replace(options, task=task), progress))
            except IncompleteError as error:  # what there is is worth keeping
                if stored:
                    self._store([*results, error.result])
                raise
            if stored:
                self._store(results)
        return results

    def _store(self, results: Sequence[EvaluationResult]) -> None:
        save_result(self.recording(results[-1].task), results[-1], overwrite=True)
        write_json(self.folder / "metrics.json", metrics_json(results), overwrite=True)

    def recording(self, task: str | None = None) -> Path:
        """File of the recorded episodes of a task."""
        return recording_path(self.folder, self.task(task))

    @property
    def metrics(self) -> dict[str, Any]:
        """metrics.json of the last evaluation."""
        path = self.folder / "metrics.json"
        if not path.is_file():
            raise PrismError(f"{path} does not exist: evaluate the run first (prism eval {self.folder})")
        return files.read_json(path, f"evaluate the run again (prism eval {self.folder})")

    # ----------------------------------------------------------------- what its sensors see

    def example_frames(self, task: str | None = None, count: int = 32) -> list[Frame]:
        """Observations that calibrate int8: of the task's first steps, or of the dataset without a task."""
        task = task or self.experiment.task
        return self._dataset_frames(count) if task is None else self._task_frames(task, count)

    def _task_frames(self, task: str, count: int, every: int = 4) -> list[Frame]:
        """Observations of the policy's own rollouts, on seeds that are not test seeds."""
        env = make_env(task)
        controller = Controller(self.policy(), ControllerConfig(exec_horizon=1, candidates=1))
        names = [spec.name for spec in controller.policy.spec.sensors]
        frames: list[Frame] = []
        for seed in range(count):
            controller.reset(seed)
            observation = env.reset(seed)
            for step in range(8 * every):
                frame = {name: np.asarray(observation[name]) for name in names if name in observation}
                if step % every == 0:
                    frames.append(frame)
                result = env.step(np.clip(controller.act(frame), env.action_low, env.action_high))
                observation = result.observation
                if len(frames) == count:
                    return frames
                if result.done:
                    break
        return frames

    def _dataset_frames(self, count: int) -> list[Frame]:
        _, source, _ = open_demonstrations(self.experiment.demonstrations, None, Console(quiet=True))
        lengths = np.cumsum(source.lengths)
        frames: list[Frame] = []
        for step in np.linspace(0, lengths[-1] - 1, count).astype(int):
            number = int(np.searchsorted(lengths, step, side="right"))
            at = int(step - (lengths[number - 1] if number else 0))
            episode = source.read(number, at, at + 1)
            there = [name for name in episode.streams if name not in episode.present or episode.present[name][0]]
            frames.append({name: episode.streams[name][0] for name in there})
        return frames


def measure_run(
    run: Run, console: Console, device: torch.device | str = "cpu", small: bool = False
) -> SensorReport | None:
    """Which sensors its weights use, on the episodes that were held out; stored beside the weights. None: none was.

    `small`: from pictures at the policy's size, which a training has made.
    """
    source, split = _demonstrations(run, small)
    if not len(split.held_out):
        return None
    policy = run.policy(device)
    spec, history = policy.spec, {sensor.name: sensor.steps for sensor in policy.spec.sensors}
    horizons = (spec.obs_horizon, spec.pred_horizon)
    held_out = Windows(source, *horizons, split.held_out.tolist(), history=history)
    others = Windows(source, *horizons, history=history)
    with Bar(console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task("which sensors are used", total=None, visible=False)
        began = time.monotonic()

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - began > _PATIENCE)

        report = measure_sensors(policy, held_out, others, progress=show)
    write_sensor_report(run.weights(), report)
    return report


def _demonstrations(run: Run, small: bool) -> tuple[EpisodeSource, Split]:
    """The data that a run was trained on, and which episodes of them were held out."""
    experiment, quiet = run.experiment, Console(quiet=True)
    demonstrations, source, copies = open_demonstrations(experiment.demonstrations, experiment.task, quiet, small)
    train = experiment.train
    return source, split_demonstrations(demonstrations, source, copies, train.val_fraction, train.seed)


def _load_on(path: Path, device: torch.device) -> Policy:
    return checkpoint.load_policy(path).to(device)


def _task_of(demonstrations: Demonstrations) -> str:
    path = Path(demonstrations.path or "")
    return str(getattr(open_dataset(path), "task", "")) if is_recording(path) or is_store(path) else ""


def is_run(folder: Path) -> bool:
    """Whether `folder` itself is a run of `prism train`."""
    return (folder / FILE).is_file()


def write_run_report(folder: Path, rerun: Path | None = None, overwrite: bool = False) -> Path:
    """report.html of a run or of a demo from its recordings; it can be made again at any time. Of a run that was
    trained on a dataset alone, without recordings: predicted beside recorded actions. `rerun`: the same episodes as a
    .rrd file (report/rerun_log.py)."""
    if not folder.is_dir():
        raise PrismError(f"{folder} does not exist: give the folder of a run, or of a demo")
    if is_recording(folder):
        from prism.report.robot_page import write_robot_report

        return write_robot_report(folder)
    if not any((folder / FOLDER).glob("*.npz")) and is_run(folder) and not Run(folder).experiment.tasks:
        with nullcontext() if rerun is None else RerunLog(rerun, Run(folder).name, overwrite) as log:
            return _write_held_out(Run(folder), log)
    results = load_results(folder)
    homes = {result.task: folder / result.task if (folder / result.task).is_dir() else folder for result in results}
    logs = {task: read_log(home) for task, home in homes.items()}
    if rerun is not None:
        log_results(results, rerun, overwrite)
    used = Run(folder).sensors_used() if is_run(folder) else None
    title = f"PRISM: {folder.resolve().name}"
    return write_report(folder / "report.html", results, logs, title=title, sensors=used)


def _write_held_out(run: Run, rerun: RerunLog | None) -> Path:
    source, split = _demonstrations(run, small=False)
    held_out, trained = split.held_out.tolist(), split.training.tolist()
    used = run.sensors_used() or measure_run(run, Console(stderr=True))  # of an older run: now
    page, log = run.folder / "report.html", read_log(run.folder)
    return write_held_out(page, run.controller(), source, held_out, trained, log, rerun, used)
