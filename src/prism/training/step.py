"""All that a training step changes: the weights, their average, the policy's buffers, AdamW, the loss scale.

A step is policy.loss(batch, rng), backward, AdamW, average; accumulation and ranks are wrapped around the loss here.
`part_losses` computes a batch in parts. With several ranks the gradient is averaged by DistributedDataParallel around a
module whose forward is the policy's loss, so it is sent while the backward pass still runs. DDP takes the plain mean
over ranks; a rank's loss is therefore weighted by its rows, W B_r / G, and the result is the gradient of the mean over
the global batch also where the ranks have unequal shares. Parts are weighted likewise; only the last one sends.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prism import ranks
from prism.errors import PrismError
from prism.policy import LossOutput, Policy
from prism.rows import PartRandom, Random, Share
from prism.training.config import TrainConfig
from prism.types import Batch, Observation

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class StepOutput:
    loss: float
    gradient_norm: float  # before clipping
    logs: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class _PauseError(Exception):
    """A part asked about the whole batch before every part had answered."""


class Questions:
    """What the losses of the parts ask about the whole batch: each question is answered once, for all parts."""

    def __init__(self, whole: Share) -> None:
        self.whole = whole
        self.answers: list[Tensor] = []
        self._asked = self._computed = 0  # by the part that runs now
        self._values: list[Tensor] = []  # of the parts, for the first question that is open
        self._answer: Callable[[Tensor], Tensor] = whole.gather

    def begin_part(self) -> None:
        self._asked = self._computed = 0

    def once(self, compute: Callable[[], Tensor], kept: list[Tensor]) -> Tensor:
        self._computed += 1
        if self._computed > len(kept):
            kept.append(compute())
        return kept[self._computed - 1]

    def ask(self, values: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
        self._asked += 1
        if self._asked <= len(self.answers):
            return self.answers[self._asked - 1]
        self._values.append(values.detach())
        self._answer = answer
        raise _PauseError

    def answer(self) -> None:
        """Every part has asked: answer, over the ranks too."""
        self.answers.append(self._answer(torch.cat(self._values)))
        self._values = []


@dataclass(frozen=True)
class PartShare(Share):
    """The rows of one part of an accumulated batch."""

    questions: Questions = field(kw_only=True)
    kept: list[Tensor] = field(default_factory=list)

    def once(self, compute: Callable[[], Tensor]) -> Tensor:
        return self.questions.once(compute, self.kept)

    def gather(self, own: Tensor) -> Tensor:
        return self.questions.ask(own, self.questions.whole.gather)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        return self.questions.ask(values.flatten(), partial(self.questions.whole.quantile, q=q))


def split_batch(batch: Batch, count: int, questions: Questions) -> list[Batch]:
    """At most `count` parts of nearly equal size, each of which knows its place in the global batch."""
    rows = len(batch.actions)
    count = min(count, rows)
    total = batch.share.total or rows
    parts = []
    for start, stop in pairwise(part * rows // count for part in range(count + 1)):
        streams = {name: value[start:stop] for name, value in batch.observation.streams.items()}
        present = {name: value[start:stop] for name, value in batch.observation.present.items()}
        share = PartShare(batch.share.start + start, total, questions=questions)
        observation = Observation(streams, present)
        parts.append(Batch(observation, batch.actions[start:stop], batch.action_valid[start:stop], share))
    return parts


def part_losses(
    policy: Policy, batch: Batch, count: int, seed: int, restore: Callable[[], None]
) -> Iterator[tuple[Batch, LossOutput]]:
    """Each of `count` parts with its loss, to be back-propagated before the next is asked for.

    The choices are those of the whole batch. A loss that asks about it (`Batch.share`) is paused there; when all parts
    have come to the question it is answered, and they start again. `restore` brings back the policy's buffers, so that
    a threshold moves once a step. One part alone is a plain policy.loss.
    """
    if count == 1:
        yield batch, policy.loss(batch, row_random(seed, batch))
        return
    questions = Questions(batch.share)
    parts = split_batch(batch, count, questions)

    def loss(part: Batch) -> LossOutput | None:
        restore()
        questions.begin_part()
        with suppress(_PauseError):
            return policy.loss(part, row_random(seed, part))
        return None

    while (first := loss(parts[0])) is None:
        with torch.no_grad():
            for part in parts[1:]:
                loss(part)
        questions.answer()
    yield parts[0], first
    del first
    for part in parts[1:]:
        output = loss(part)
        assert output is not None, "the parts of a batch asked different questions"
        yield part, output


def row_random(seed: int, batch: Batch) -> Random:
    """The random numbers of these rows, the same in every split of the global batch."""
    rows, total = len(batch.actions), batch.share.total
    return Random(seed) if total is None else PartRandom(seed, batch.share.start, rows, total)


class _Loss(nn.Module):
    """The next loss of an iterator, as a forward pass: DDP averages the gradients of what a forward pass returns."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy  # the parameters that DDP looks after

    def forward(self, losses: Iterator[tuple[Batch, LossOutput]]) -> tuple[Tensor, dict[str, Tensor], int]:
        part, output = next(losses)
        return output.loss, {name: torch.as_tensor(log) for name, log in output.logs.items()}, len(part.actions)


class Learner:
    """`gradient`, then `apply` or, when something was not finite, `undo`.

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

    def gradient(self, batch: Batch, seed: int) -> StepOutput:
        """Loss and clipped gradient of one batch, over all ranks. Waits for the device once, to see whether both are
        finite; they are so on every rank or on none."""
        torch._foreach_copy_(self._buffers_before, self._buffers)
        self.optimizer.zero_grad(set_to_none=True)
        count = min(self.config.accumulate, len(batch.actions))
        total = batch.share.total or len(batch.actions)
        losses = part_losses(self.policy, batch, count, seed, self._restore_buffers)
        outputs = []
        for part in range(count):
            model = self._model
            wait = model.no_sync() if isinstance(model, DistributedDataParallel) and part < count - 1 else nullcontext()
            with wait:  # only the last part sends
                with self.autocast:
                    loss, logs, rows = self._model(losses)
                weight = rows / total
                outputs.append((weight, loss.detach(), logs))
                with ranks.collective():
                    self.scaler.scale(loss * (weight * ranks.world_size())).backward()
        self.scaler.unscale_(self.optimizer)
        mean, logs = _mean_over_rows(outputs)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        length = torch.nn.utils.get_total_norm(gradients)
        value, norm = torch.stack([mean.float(), length.float()]).tolist()
        if 0 < self.config.grad_clip < norm:  # only then: scaling is one more pass over all the memory
            torch._foreach_mul_(gradients, self.config.grad_clip / norm)
        return StepOutput(value, norm, logs)

    def apply(self, learning_rate: float, decay: float) -> None:
        """AdamW on the gradient, then the average."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        update_average(self._averages, self._weights, decay)

    def undo(self) -> None:
        """Nothing of a step that was not finite may stay: not in the weights, and not in the threshold."""
        self._restore_buffers()
        self.scaler.update()  # float16: a smaller scale for the next step

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        torch._foreach_copy_(self._buffers, self._buffers_before)

    @torch.no_grad()
    def validation_loss(self, batches: Sequence[Callable[[], Batch]], seeds: Sequence[int]) -> float | None:
        """Loss of the average, weighted by batch size; each rank takes every W-th batch. None: not finite."""
        self.synchronise_buffers()
        sums = torch.zeros(len(batches), 2, dtype=torch.float64)
        for index in range(ranks.rank(), len(batches), ranks.world_size()):
            batch = batches[index]()
            with self.autocast:
                loss = self.average.loss(batch.to(self.device), Random(seeds[index])).loss
            rows = len(batch.actions)
            sums[index] = torch.tensor([float(loss) * rows, rows], dtype=torch.float64)
        values = ranks.sum_over_ranks(sums).tolist()
        total, count = sum(value for value, _ in values), sum(rows for _, rows in values)
        return total / count if math.isfinite(total) else None

    def synchronise_buffers(self) -> None:
        for mine, theirs in zip(self.average.buffers(), self._buffers, strict=True):
            mine.copy_(theirs)

    def model_tensors(self) -> dict[str, Tensor]:
        """What is deployed: averaged weights, and the buffers as they are."""
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
        """Take over the tensors of a checkpoint; `folder` is for the message when they do not fit."""
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
    """Wrap the model where there are other ranks; its weights and buffers become those of rank 0.

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


def learning_rate(config: TrainConfig, step: int, fraction: float) -> float:
    """eta = eta_0 warm-up (1 + cos(pi fraction)) / 2, where fraction is of the whole budget.

    The warm-up is linear. It takes `warmup_steps` steps, and a tenth of the budget where that is less.
    """
    warmup = min(1.0, max((step + 1) / config.warmup_steps, 10 * fraction)) if config.warmup_steps else 1.0
    return config.learning_rate * warmup * 0.5 * (1.0 + math.cos(math.pi * fraction))


def ema_decay(config: TrainConfig, step: int) -> float:
    """min(max_decay, 1 - (1 + t)^-power): the average covers about the last t^power steps, so it warms up by itself."""
    return min(config.ema_max_decay, 1.0 - math.pow(1.0 + step, -config.ema_power))


@torch.no_grad()
def update_average(average: list[Tensor], weights: list[Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * weights, one call for all tensors."""
    torch._foreach_lerp_(average, weights, 1.0 - decay)


def derive_seed(seed: int, stream: int, index: int) -> int:
    """A 64-bit seed from (seed, stream, index): three rounds of splitmix64.

    The generator of a step depends on nothing but its number, so a resumed run needs no generator state.
    """
    value = 0
    for part in (seed, stream, index):
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value
