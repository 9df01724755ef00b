"""The training loop, top to bottom: batch, gradient, AdamW, average, validate, log, save.

Everything that a step needs is a function of its number: the windows (BatchOrder), the random numbers (a generator
seeded from (seed, step)), the learning rate (with a step budget). So a checkpoint holds no generator and no iterator,
and a resumed run goes on bit for bit as if it had never stopped, on the same machine with the same thread count.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import torch
from rich.console import Console
from torch import Tensor

from prism.data.loader import BatchOrder, Loader
from prism.data.windows import Windows
from prism.distributed import ranks
from prism.errors import PrismError
from prism.policy import Policy, PolicySpec
from prism.training import checkpoint, files
from prism.training.agreement import check_same_start, tell_state
from prism.training.batches import dump_batch, fingerprint, non_finite_names, validation_indices
from prism.training.checkpoint import TrainingState
from prism.training.config import FREE_ON_RESUME, TrainConfig
from prism.training.learner import Learner
from prism.training.monitor import Monitor, Silent
from prism.training.optim import derive_seed, ema_decay, learning_rate
from prism.training.signals import StopRequest, exclusive
from prism.types import Batch

_TRAINING, _VALIDATION = 1, 2  # streams of random numbers
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class TrainResult:
    policy: Policy  # averaged weights, evaluation mode: what load_policy(run_dir) gives
    checkpoint: Path
    step: int
    seconds: float  # in the loop, over all sittings, by the clock of the config
    loss: float | None  # of the last step
    val_loss: float | None  # the last one measured
    best_val_loss: float | None
    skipped_steps: int
    stopped_by: str  # the signal's name, also of one that came after the last step; "" when none did


def train(
    policy: Policy,
    windows_train: Windows,
    windows_val: Windows | None,
    config: TrainConfig,
    run_dir: Path,
    resume: bool | Literal["auto"] = False,
    console: Console | None = None,
    title: str = "train",
    until: float = 1.0,
) -> TrainResult:
    """Train `policy` in place, on the device it is on; checkpoints and logs go to `run_dir`.

    `run_dir` must not hold a run yet, unless `resume`: then its newest intact checkpoint is continued, and policy,
    data and config have to be those it was started with (config.FREE_ON_RESUME may differ). "auto" continues a run
    that is there and starts one that is not. SIGTERM and Ctrl-C finish the step, save and return. What is deployed is
    the average: result.policy, or load_policy(run_dir).

    `until` < 1 stops at that fraction of the budget, saved; a resume goes on as if it had not: to look at a run on
    its way, off its clock.

    Inside ranks.session() every rank calls this with the same arguments; rank 0 alone writes to `run_dir`.
    """
    leader = ranks.is_leader()
    with ExitStack() as stack:
        with ranks.together():
            if len(windows_train) == 0:
                raise PrismError("there is nothing to train on: the dataset has no training window")
            if leader:
                resume = checkpoint.check_resume(run_dir, resume)
                with files.explain_write_errors(run_dir, "Nothing was trained"):
                    run_dir.mkdir(parents=True, exist_ok=True)
                with files.explain_write_errors(run_dir, "Its checkpoints are as they were"):
                    stack.enter_context(exclusive(run_dir))
                    files.remove_leftovers(run_dir)
            order = BatchOrder(
                len(windows_train),
                config.batch_size,
                config.seed,
                ranks.rank(),
                ranks.world_size(),
                windows_train.blocks,
            )
            data = fingerprint(windows_train)
        check_same_start(policy, config, data)
        stop = stack.enter_context(StopRequest())
        stack.enter_context(_threads(config.threads))

        learner = Learner(policy, config)
        step, seconds, skipped, skipped_total = 0, 0.0, 0, 0
        loss: float | None = None
        val_loss: float | None = None
        best_val_loss: float | None = None
        saved: Path | None = None
        notes: list[str] = []

        with ranks.together():
            found = _find_state(run_dir, policy, config, data, notes) if leader and resume else None
        if (told := tell_state(found)) is not None:
            state, model = told
            saved = checkpoint.folder_of(run_dir, state.step)
            with ranks.together():
                learner.restore(saved, model, state.weights, state.optimizer, state.scaler)
            step, seconds, skipped, skipped_total = state.step, state.seconds, state.skipped, state.skipped_total
            best_val_loss = state.best_val_loss

        rng = torch.Generator()  # on the CPU, whatever the device: a seed means the same everywhere
        share = order.share() if ranks.world_size() > 1 else None
        suspect: tuple[int, Batch] | None = None  # the first of a row of batches that gave no finite gradient
        with ranks.together():
            monitor: Monitor | Silent = Monitor(run_dir, config, step, console, title) if leader else Silent()
            stack.enter_context(monitor)
        loader = stack.enter_context(Loader(windows_train, order, step, config.workers))
        for note in notes:
            monitor.say(note)
        policy.train()
        clock = _CLOCKS[config.clock]
        started = clock() - seconds
        last_save = time.perf_counter()
        stopped_by = ""

        while (fraction := config.fraction(step, seconds)) < until and not stopped_by:
            batch = dataclasses.replace(next(loader), share=share).to(learner.device)
            rng.manual_seed(derive_seed(config.seed, _TRAINING, step))
            rate = learning_rate(config, step, fraction)

            with ranks.explain_loss():
                output = learner.gradient(batch, rng)
            if output.finite:
                learner.apply(rate, ema_decay(config, step))
                monitor.record(output)
                loss, skipped, suspect = output.loss, 0, None
            else:
                learner.undo()
                suspect = suspect or (step, batch)
                skipped, skipped_total = skipped + 1, skipped_total + 1
                if skipped >= config.max_skipped_steps:
                    with ranks.together():
                        _give_up(run_dir, skipped, suspect, config)
            step += 1
            now = time.perf_counter()
            clock_save = leader and 0 < 60 * config.checkpoint_minutes <= now - last_save
            with ranks.explain_loss():  # one clock, rank 0's, and one decision to stop
                seconds, clock_due, signalled = ranks.max_over_ranks(
                    [clock() - started if leader else 0.0, float(clock_save), float(stop.number)]
                )
            stopped_by = signal.Signals(int(signalled)).name if signalled else ""

            done = config.fraction(step, seconds) >= until
            save_due = done or _every(config.checkpoint_every, step) or clock_due > 0
            measured = None
            if windows_val is not None and (save_due or _every(config.val_every, step)):
                with ranks.explain_loss():
                    measured = _validate(learner, windows_val, config)
                val_loss = measured if measured is not None else val_loss
                best_val_loss = min((x for x in (measured, best_val_loss) if x is not None), default=None)
            with ranks.together() if save_due or stopped_by else nullcontext():
                if done or stopped_by or measured is not None or step % config.log_every == 0:
                    monitor.write(step, seconds, rate, measured, skipped_total)
                if leader and (save_due or stopped_by):
                    state = TrainingState(
                        step=step,
                        seconds=seconds,
                        train_config=config.to_json(),
                        data=data,
                        val_loss=measured,
                        best_val_loss=best_val_loss,
                        skipped=skipped,
                        skipped_total=skipped_total,
                        scaler=learner.scaler.state_dict(),
                        weights=learner.weight_tensors(),
                        optimizer=learner.optimizer_tensors(),
                    )
                    checkpoint.save_checkpoint(run_dir, policy.spec, learner.model_tensors(), state, config.keep_last)
            if save_due or stopped_by:
                saved, last_save = checkpoint.folder_of(run_dir, step), time.perf_counter()
            monitor.show(step, seconds, last=done)

        assert saved is not None  # the last step is always saved
        learner.synchronise_buffers()
    with ranks.explain_loss():  # also a signal that came after the last step, in the validation or the save
        (signalled,) = ranks.max_over_ranks([float(stop.number)])
    if signalled:
        stopped_by = signal.Signals(int(signalled)).name
        monitor.say(f"stopped by {stopped_by} at step {step}, all saved in {saved}; continue with --resume")
    return TrainResult(
        policy=learner.average,
        checkpoint=saved,
        step=step,
        seconds=seconds,
        loss=loss,
        val_loss=val_loss,
        best_val_loss=best_val_loss,
        skipped_steps=skipped_total,
        stopped_by=stopped_by,
    )


def _validate(learner: Learner, windows: Windows, config: TrainConfig) -> float | None:
    """The same held-out windows and the same random numbers every time; training does not notice it."""
    indices = validation_indices(len(windows), config.batch_size, config.val_batches)
    seeds = [derive_seed(config.seed, _VALIDATION, index) for index in range(len(indices))]
    return learner.validation_loss([partial(windows.batch, chosen) for chosen in indices], seeds)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _find_state(
    run_dir: Path, policy: Policy, config: TrainConfig, data: str, notes: list[str]
) -> tuple[TrainingState, dict[str, Tensor]] | None:
    """The newest intact checkpoint of the run, or None where there is none yet; `notes` say which."""
    folder = checkpoint.latest_checkpoint(run_dir, notes.append)
    notes.append(f"resuming {folder}" if folder else f"{run_dir} has no checkpoint yet: starting at step 0")
    if folder is None:
        return None
    state = checkpoint.load_training_state(folder)
    _check_same_run(folder, policy, config, data, state)
    model = checkpoint.load_model_tensors(folder)
    checkpoint.set_aside_newer(folder)
    return state, model


def _check_same_run(folder: Path, policy: Policy, config: TrainConfig, data: str, state: TrainingState) -> None:
    """A resumed run is the same run: same policy, same data, same mathematics."""
    if _plain(checkpoint.read_spec(folder)) != _plain(policy.spec):
        remedy = "resume with the options the run was started with, or start a new run"
        raise PrismError(f"{folder / 'config.json'} describes another policy than this one: {remedy}")
    stored, asked = state.train_config, config.to_json()
    different = sorted(
        key for key in stored.keys() | asked.keys() if key not in FREE_ON_RESUME and stored.get(key) != asked.get(key)
    )
    if different:
        changes = ", ".join(f"{key} = {stored.get(key)} there, {asked.get(key)} now" for key in different)
        raise PrismError(
            f"{folder / 'training.json'}: the run was started with other settings ({changes}): "
            "resume with the stored ones, or start a new run"
        )
    if data != state.data:
        raise PrismError(
            f"{folder / 'training.json'}: the run was started with other data: resume with the same --data"
        )


def _plain(spec: PolicySpec) -> str:
    return json.dumps(spec.to_json(), sort_keys=True)  # tuples and lists are the same there


def _give_up(run_dir: Path, skipped: int, suspect: tuple[int, Batch], config: TrainConfig) -> NoReturn:
    step, batch = suspect
    whose = f"-rank-{ranks.rank()}" if ranks.world_size() > 1 else ""
    path = run_dir / f"bad-batch-step-{step:08d}{whose}.safetensors"
    seed = derive_seed(config.seed, _TRAINING, step)
    dump_batch(path, batch, {"step": str(step), "generator_seed": str(seed)})
    broken = non_finite_names(batch)
    cause = f"{', '.join(broken)} of the data not finite" if broken else "the data are finite: lower the learning rate"
    raise PrismError(
        f"{skipped} steps in a row, from step {step} on, had a loss or gradient that is not finite "
        f"({cause}); the first of these batches is in {path}"
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
