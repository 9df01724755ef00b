"""The training loop, top to bottom: batch, gradient, AdamW, average, validate, log, save.

Everything that a step needs is a function of its number: the windows (BatchOrder), the random numbers (a generator
seeded from (seed, step)), the learning rate (with a step budget). So a checkpoint holds no generator and no iterator,
and a resumed run equals an uninterrupted one bit for bit, on the same machine with the same thread count.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prism import ranks
from prism.data.episodes import IntArray
from prism.data.loader import Loader
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.io import files
from prism.policy import Policy
from prism.rows import Random, cut_rows, derive_seed
from prism.training import checkpoint, start
from prism.training.checkpoint import TrainingState
from prism.training.config import TrainConfig, ema_decay, learning_rate
from prism.training.faults import disturbed
from prism.training.log import INTACT, Monitor, Silent, StepOutput
from prism.types import Batch

_TRAINING, _VALIDATION, _FAULTS = 1, 2, 3  # streams of random numbers
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_FEW_STEPS = 500  # a budget of less is worth a warning
_TRIAL_STEPS = 20  # after which a time budget is converted into steps
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW


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
    that is there and starts one that is not. SIGTERM and Ctrl-C finish the step, save and return. `until` < 1 stops
    at that fraction of the budget, saved; a resume continues from there.

    Inside ranks.session() every rank calls this with the same arguments; rank 0 alone writes to `run_dir`.
    """
    with ExitStack() as stack:
        order, data, resume = stack.enter_context(start.open_run(policy, windows_train, config, run_dir, resume))
        stop = stack.enter_context(StopRequest())
        stack.enter_context(limited_threads(config.threads))
        learner = Learner(policy, config)
        keeper = _Keeper(learner, windows_val, run_dir, data, stop, until)
        notes = keeper.resume(resume)
        stack.enter_context(keeper.open_monitor(console, title, notes))
        loader = stack.enter_context(Loader(windows_train, order, keeper.step, config.workers))
        policy.train()
        while not keeper.over:
            step = keeper.step
            batch = dataclasses.replace(next(loader), share=order.share())
            keeper.count_windows(batch)
            batch = batch.to(learner.device)
            faults = batch.random(derive_seed(config.seed, _FAULTS, step))
            batch = disturbed(batch, policy.spec.sensors, policy.normalizer, config.robust, faults)
            rate, decay = learning_rate(config, step, keeper.fraction), ema_decay(config, step)
            output = learner.step(batch, derive_seed(config.seed, _TRAINING, step), rate, decay)
            keeper.after_step(output, batch, rate)
        learner.synchronise_buffers()
    return keeper.result()


class _Loss(nn.Module):
    """The last phase as a forward pass: DistributedDataParallel averages the gradients of what that returns."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy  # the parameters that DDP looks after

    def forward(self, draw: Any, choice: Any) -> tuple[Tensor, dict[str, Tensor]]:
        output = self.policy.loss(draw, choice)
        return output.loss, {name: torch.as_tensor(log) for name, log in output.logs.items()}


class Learner:
    """All that a training step changes: the weights, their average, the policy's buffers, AdamW, the loss scale.

    `average` is a policy of its own with the averaged weights. Buffers (normaliser, threshold) are not averaged:
    they are those of `policy`, copied when the average is used.
    """

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.policy, self.config = policy, config
        self.device = next(policy.parameters()).device
        self.average = copy.deepcopy(policy).eval().requires_grad_(False)
        named = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        twin = dict(self.average.named_parameters())
        self.named = named
        self._weights: list[Tensor] = list(named.values())
        self._averages: list[Tensor] = [twin[name] for name in named]
        self._buffers = list(policy.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        groups = parameter_groups(policy, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
        self.autocast, self.scaler = _precision(config, self.device)
        self._model = _spread(_Loss(policy))

    def step(self, batch: Batch, seed: int, learning_rate: float, decay: float) -> StepOutput:
        """Alg. 1: draw, choose, loss, AdamW; then the average.

        The batch is computed in `accumulate` parts, and each rank has its rows of it; the choice is that of the global
        batch. DDP takes the plain mean over ranks: weighted by its rows, W B_p / G, a part's loss has the gradient of
        the mean over all rows. Waits for the device once, to see whether loss and gradient are finite, which they are
        on every rank or on none; where they are not, nothing of the step stays but a smaller float16 scale.
        """
        policy, parts, drawn = self.policy, batch.split(self.config.accumulate), None
        torch._foreach_copy_(self._buffers_before, self._buffers)
        self.optimizer.zero_grad(set_to_none=True)
        if len(parts) == 1:
            with self.autocast:
                drawn = policy.draw(batch, batch.random(seed))
                choice = policy.choose([drawn], batch.share)
        else:  # every part, to choose; then again with gradient, one at a time
            with self.autocast, torch.no_grad():
                choice = policy.choose((policy.draw(part, part.random(seed)) for part in parts), batch.share)
        total, outputs = batch.share.total or len(batch.actions), []
        for part in parts:
            with self._sending(part is parts[-1]):
                with self.autocast:
                    draw = drawn or policy.draw(part, part.random(seed))
                    start = part.share.start - batch.share.start
                    loss, logs = self._model(draw, cut_rows(choice, start, start + len(part.actions)))
                weight = len(part.actions) / total
                outputs.append((weight, loss.detach(), logs))
                with ranks.collective():
                    self.scaler.scale(loss * (weight * ranks.world_size())).backward()
        self.scaler.unscale_(self.optimizer)
        mean, logs = _mean_over_rows(outputs)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        length = torch.nn.utils.get_total_norm(gradients)
        loss_value, norm = torch.stack([mean.float(), length.float()]).tolist()
        output = StepOutput(loss_value, norm, logs)
        if output.finite:
            if 0 < self.config.grad_clip < norm:  # only then: scaling passes over all the memory
                torch._foreach_mul_(gradients, self.config.grad_clip / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.scaler.step(self.optimizer)
            update_average(self._averages, self._weights, decay)
        else:
            torch._foreach_copy_(self._buffers, self._buffers_before)
        self.scaler.update()
        return output

    def _sending(self, last: bool) -> AbstractContextManager[None]:
        """Only the last part sends its gradient to the other ranks."""
        model = self._model
        return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()

    @torch.no_grad()
    def validation_loss(self, batches: Sequence[Callable[[], Batch]], seeds: Sequence[int]) -> float | None:
        """Loss of the average, weighted by batch size; each rank takes every W-th batch. None: not finite."""
        self.synchronise_buffers()
        sums = torch.zeros(len(batches), 2, dtype=torch.float64)
        for index in range(ranks.rank(), len(batches), ranks.world_size()):
            batch = batches[index]()
            with self.autocast:
                loss = self.average.batch_loss(batch.to(self.device), Random(seeds[index])).loss
            rows = len(batch.actions)
            sums[index] = torch.tensor([float(loss) * rows, rows], dtype=torch.float64)
        values = ranks.sum_over_ranks(sums).tolist()
        total, count = sum(value for value, _ in values), sum(rows for _, rows in values)
        return total / count if math.isfinite(total) else None

    def synchronise_buffers(self) -> None:
        for mine, theirs in zip(self.average.buffers(), self._buffers, strict=True):
            mine.copy_(theirs)

    def model_tensors(self) -> dict[str, Tensor]:
        """The policy to deploy: averaged weights, current buffers."""
        return {**self.policy.state_dict(), **dict(self.average.named_parameters())}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter name. A parameter that never had a gradient has none."""
        state = self.optimizer.state
        return {f"{kind}.{name}": state[p][kind] for name, p in self.named.items() if p in state for kind in _MOMENTS}

    @torch.no_grad()
    def restore(
        self, folder: Path, model: dict[str, Tensor], weights: dict[str, Tensor], optimizer: dict[str, Tensor],
        scaler: dict[str, float],
    ) -> None:  # fmt: skip
        """Load the tensors of a checkpoint; `folder` is for the message when they do not fit."""
        try:
            self.average.load_state_dict(model, strict=True)
            self.policy.load_state_dict({**model, **weights}, strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:200]
            raise PrismError(f"{folder} does not fit this policy ({detail}); start a new run") from None
        for name, parameter in self.named.items():
            kept = {kind: optimizer[f"{kind}.{name}"] for kind in _MOMENTS if f"{kind}.{name}" in optimizer}
            if kept:
                self.optimizer.state[parameter] = {kind: value.to(self.device) for kind, value in kept.items()}
        if scaler:
            self.scaler.load_state_dict(scaler)


def _spread(model: _Loss) -> _Loss | DistributedDataParallel:
    """Wrap the model if there are other ranks; weights and buffers become those of rank 0.

    A parameter may have no gradient in a step (a learned "absent" vector where no sensor is missing), on one rank or
    on all: DDP has to look for such ones, and warns once when it finds none.
    """
    if ranks.world_size() == 1:
        return model
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    # Buffers: the threshold moves alike on every rank, from the same distances. PyTorch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "find_unused_parameters": True}
    with ranks.collective():
        return DistributedDataParallel(model, **options)


def _mean_over_rows(outputs: list[tuple[float, Tensor, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and logs of parts with their weights, over all ranks. A single whole batch is left as it is."""
    if len(outputs) == 1 and ranks.world_size() == 1:
        return outputs[0][1], outputs[0][2]
    names = sorted(outputs[0][2])
    rows = [
        weight * torch.stack([loss.float(), *(logs[name].detach().float() for name in names)])
        for weight, loss, logs in outputs
    ]
    mean, *values = ranks.sum_over_ranks(torch.stack(rows).sum(0)).unbind()
    return mean, dict(zip(names, values, strict=True))


def _precision(
    config: TrainConfig, device: torch.device
) -> tuple[AbstractContextManager[object], torch.amp.GradScaler]:
    """Autocast and loss scale. On a CPU `auto` is float32: half precision is slower there, not faster."""
    name: str = config.precision
    if name == "auto":
        half = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float16"
        name = half if device.type == "cuda" else "float32"
    context: AbstractContextManager[object] = nullcontext()
    if name != "float32":
        half_type = torch.bfloat16 if name == "bfloat16" else torch.float16
        # No cache: PyTorch before 2026 keeps the half copy of a weight also from where it was made without gradient, as
        # candidates are drawn first, and those drawn again with it would give the weight none (pytorch#112583).
        context = torch.autocast(device.type, dtype=half_type, cache_enabled=False)
    return context, torch.amp.GradScaler(device.type, enabled=name == "float16")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay for matrices and kernels; none for biases, norms, embeddings and other learned vectors.

    A learned vector that is stored with leading dimensions (queries, absent vectors, positions) is a parameter
    owned directly by a module that is neither linear nor a convolution; it is not a map, so it is not decayed.
    """
    maps = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            is_map = isinstance(module, maps) and parameter.ndim >= 2
            (decayed if is_map else plain).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def update_average(average: list[Tensor], weights: list[Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * weights, one call for all tensors."""
    torch._foreach_lerp_(average, weights, 1.0 - decay)


class _Keeper:
    """Everything around the steps, equal on all ranks: counts, clock, signals, validation, log, checkpoints."""

    def __init__(
        self, learner: Learner, windows_val: Windows | None, run_dir: Path, data: str, stop: StopRequest, until: float
    ) -> None:
        self.learner, self.config, self.windows_val = learner, learner.config, windows_val
        self.run_dir, self.data, self.stop, self.until = run_dir, data, stop, until
        self.step, self.seconds = 0, 0.0
        self.skipped, self.skipped_total = 0, 0  # in a row, and of the run
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.best_val_loss: float | None = None
        self.saved: Path | None = None
        self.stopped_by = ""
        self._windows: Counter[str] = Counter()  # of the whole training: PolicySpec.trained_on
        self._own_windows: Counter[str] = Counter()  # of this rank, since the last checkpoint
        self._suspect: tuple[int, Batch] | None = None  # the first of a row of batches without a finite gradient
        self._estimated = self._warned = False  # how many steps the budget gives; that they are few

    def resume(self, wanted: bool) -> list[str]:
        """Load the newest checkpoint, if any; returns notes. Rank 0 decides and reads."""
        notes: list[str] = []
        found, policy = None, self.learner.policy
        with ranks.share_errors():
            if wanted and ranks.is_leader():
                found = start.find_state(self.run_dir, policy, self.config, self.data, notes)
        if (resumed := start.broadcast_state(found)) is None:
            return notes
        state, model = resumed
        self.saved = checkpoint.folder_of(self.run_dir, state.step)
        with ranks.share_errors():
            self.learner.restore(self.saved, model, state.weights, state.optimizer, state.scaler)
        self.step, self.seconds, self.best_val_loss = state.step, state.seconds, state.best_val_loss
        self.skipped, self.skipped_total = state.skipped, state.skipped_total
        self._windows.update(state.windows)
        return notes

    def open_monitor(self, console: Console | None, title: str, notes: list[str]) -> Monitor | Silent:
        """Start the log and the clocks."""
        with ranks.share_errors():
            leader = ranks.is_leader()
            self.monitor = Monitor(self.run_dir, self.config, self.step, console, title) if leader else Silent()
        for note in notes:
            self.monitor.say(note)
        self._clock = _CLOCKS[self.config.clock]
        self._started = self._clock() - self.seconds
        self._last_save = time.perf_counter()
        return self.monitor

    @property
    def fraction(self) -> float:
        return self.config.fraction(self.step, self.seconds)

    @property
    def over(self) -> bool:
        return self.fraction >= self.until or bool(self.stopped_by)

    def after_step(self, output: StepOutput, batch: Batch, rate: float) -> None:
        """Count the step; validate, log and save what is due."""
        config = self.config
        self._count(output, batch)
        by_clock = self._agree()
        due = self.fraction >= self.until or _every(config.checkpoint_every, self.step) or by_clock
        measured = None
        if self.windows_val is not None and (due or _every(config.val_every, self.step)):
            measured = self._validate(self.windows_val)
        save = due or bool(self.stopped_by)
        if save:
            self._gather_windows()
        with ranks.share_errors() if save else nullcontext():
            if self.over or measured is not None or self.step % config.log_every == 0:
                self.monitor.write(self.step, self.seconds, rate, measured, self.skipped_total)
            if save and ranks.is_leader():
                self._save(measured)
        if save:
            self.saved, self._last_save = checkpoint.folder_of(self.run_dir, self.step), time.perf_counter()
        self.monitor.show(self.step, self.seconds, last=self.fraction >= self.until)
        self._warn_of_few_steps()

    def result(self) -> TrainResult:
        assert self.saved is not None  # the last step is always saved
        self.learner.average.spec = self.learner.policy.spec
        (signalled,) = ranks.max_over_ranks([float(self.stop.number)])  # also one that came after the last step
        if signalled:
            self.stopped_by = signal.Signals(int(signalled)).name
            self.monitor.say(
                f"stopped by {self.stopped_by} at step {self.step}, all saved in {self.saved}; continue with --resume"
            )
        return TrainResult(
            policy=self.learner.average,
            checkpoint=self.saved,
            step=self.step,
            seconds=self.seconds,
            loss=self.loss,
            val_loss=self.val_loss,
            best_val_loss=self.best_val_loss,
            skipped_steps=self.skipped_total,
            stopped_by=self.stopped_by,
        )

    def count_windows(self, batch: Batch) -> None:
        """All of them, and those that have no reading of a sensor; as the data are, before faults are made."""
        lacking = {name: int((~present.any(1)).sum()) for name, present in batch.observation.present.items()}
        self._own_windows.update({"": len(batch.actions), **lacking})

    def _gather_windows(self) -> None:
        policy = self.learner.policy
        names = ["", *(sensor.name for sensor in policy.spec.sensors)]
        counts = ranks.sum_over_ranks(torch.tensor([self._own_windows[name] for name in names]))
        self._windows.update(dict(zip(names, counts.tolist(), strict=True)))
        self._own_windows.clear()
        policy.spec = policy.spec.trained_on(self._windows)

    def _count(self, output: StepOutput, batch: Batch) -> None:
        if output.finite:
            self.monitor.record(output)
            self.loss, self.skipped, self._suspect = output.loss, 0, None
        else:
            self._suspect = self._suspect or (self.step, batch)
            self.skipped, self.skipped_total = self.skipped + 1, self.skipped_total + 1
            if self.skipped >= self.config.max_skipped_steps:
                with ranks.share_errors():
                    _give_up(self.run_dir, self.skipped, self._suspect, self.config)
        self.step += 1

    def _agree(self) -> bool:
        """One clock, rank 0's, and one decision to stop; whether it is time to save."""
        leader = ranks.is_leader()
        by_clock = leader and 0 < 60 * self.config.checkpoint_minutes <= time.perf_counter() - self._last_save
        seconds = self._clock() - self._started if leader else 0.0
        self.seconds, save, signalled = ranks.max_over_ranks([seconds, float(by_clock), float(self.stop.number)])
        self.stopped_by = signal.Signals(int(signalled)).name if signalled else ""
        return save > 0

    def _validate(self, windows: Windows) -> float | None:
        """The same held-out windows and the same random numbers every time; training does not notice it."""
        config = self.config
        indices = validation_indices(len(windows), config.batch_size, config.val_batches)
        seeds = [derive_seed(config.seed, _VALIDATION, index) for index in range(len(indices))]
        measured = self.learner.validation_loss([partial(windows.batch, chosen) for chosen in indices], seeds)
        self.val_loss = measured if measured is not None else self.val_loss
        self.best_val_loss = min((x for x in (measured, self.best_val_loss) if x is not None), default=None)
        return measured

    def _save(self, measured: float | None) -> None:
        learner = self.learner
        state = TrainingState(
            step=self.step,
            seconds=self.seconds,
            train_config=self.config.to_json(),
            data=self.data,
            val_loss=measured,
            best_val_loss=self.best_val_loss,
            skipped=self.skipped,
            skipped_total=self.skipped_total,
            scaler=learner.scaler.state_dict(),
            weights=dict(learner.named),
            optimizer=learner.optimizer_tensors(),
            windows=dict(self._windows),
        )
        spec, model = learner.policy.spec, learner.model_tensors()
        checkpoint.save_checkpoint(self.run_dir, spec, model, state, self.config.keep_last)

    def _warn_of_few_steps(self) -> None:
        """Once: early, by an estimate, or at the end, where later steps were slower than the first ones."""
        over = self.fraction >= 1
        known = self.config.minutes == 0 or self.step >= _TRIAL_STEPS or over
        if self._warned or not known or self.fraction == 0 or (self._estimated and not over):
            return
        self._estimated = True
        steps = self.config.steps if self.config.minutes == 0 else round(self.step / self.fraction)
        if steps < _FEW_STEPS:
            self._warned = True
            self.monitor.say(few_steps_warning(steps, self.config, over))


def few_steps_warning(steps: int, config: TrainConfig, over: bool = False) -> str:
    """One line, with the one option that would help. `over`: they are counted, not estimated."""
    option = f"--steps {_FEW_STEPS}"
    if config.minutes:
        minutes = math.ceil(config.minutes * _FEW_STEPS / max(steps, 1))
        option = f"--minutes {minutes}" if minutes <= 120 else "--preset tiny"
    gives = "gave" if over else "gives" if config.minutes == 0 else "gives about"
    return f"warning: this budget {gives} {steps} steps; fewer than {_FEW_STEPS} seldom learn a task: try {option}"


class StopRequest:
    """Inside `with`, the first SIGTERM or SIGINT sets `.number`; a second Ctrl-C interrupts at once, as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Threads of PyTorch's arithmetic; 0: as they are."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def validation_indices(count: int, batch_size: int, batch_count: int) -> list[IntArray]:
    """At most batch_count batches spread evenly over `count` windows; always the same."""
    chosen = np.linspace(0, count - 1, min(count, batch_size * batch_count)).astype(np.int64)
    return [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]


def _give_up(run_dir: Path, skipped: int, suspect: tuple[int, Batch], config: TrainConfig) -> NoReturn:
    """Keep the batch that broke the training, to inspect it."""
    step, batch = suspect
    whose = f"-rank-{ranks.rank()}" if ranks.world_size() > 1 else ""
    path = run_dir / f"bad-batch-step-{step:08d}{whose}.safetensors"
    seed = derive_seed(config.seed, _TRAINING, step)
    tensors = {name: value.detach().cpu().contiguous() for name, value in start.batch_tensors(batch).items()}
    with files.explain_write_errors(path, INTACT):
        notes = {"step": str(step), "generator_seed": str(seed)}
        files.replace_file(path, safetensors.torch.save(tensors, notes))
    broken = non_finite_names(batch)
    cause = f"{', '.join(broken)} of the data not finite" if broken else "the data are finite: lower the learning rate"
    raise PrismError(
        f"{skipped} steps in a row, from step {step} on, had a loss or gradient that is not finite "
        f"({cause}); the first of these batches is in {path}"
    )


def non_finite_names(batch: Batch) -> list[str]:
    """The inputs that hold a NaN or an infinity where a sensor was present."""
    names = []
    for name, value in start.batch_tensors(batch).items():
        if not value.is_floating_point():
            continue
        present = batch.observation.present.get(name.removeprefix("streams."))
        relevant = value[present] if present is not None and name.startswith("streams.") else value
        if not bool(relevant.isfinite().all()):
            names.append(name)
    return names
