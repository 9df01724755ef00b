"""All that a training step changes: the weights, their average, the policy's buffers, AdamW, the loss scale.

With several ranks the gradient is averaged by DistributedDataParallel around a module whose forward is the policy's
loss, so it is sent while the backward pass still runs. DDP takes the plain mean over ranks; a rank's loss is therefore
weighted by its rows, W B_r / G, and the result is the gradient of the mean over the global batch also where the ranks
have unequal shares. The parts of an accumulated batch are weighted likewise; only the last one sends.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prism.distributed import ranks
from prism.errors import PrismError
from prism.policy import LossOutput, Policy
from prism.training.batches import split_batch
from prism.training.config import TrainConfig
from prism.training.optim import parameter_groups, update_average
from prism.types import Batch

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class StepOutput:
    loss: float
    gradient_norm: float  # before clipping
    logs: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class _Loss(nn.Module):
    """The next loss of an iterator, as a forward pass: DDP averages the gradients of what a forward pass returns."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy  # the parameters that DDP looks after

    def forward(self, losses: Iterator[LossOutput]) -> tuple[Tensor, dict[str, Tensor]]:
        output = next(losses)
        return output.loss, output.logs


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

    def gradient(self, batch: Batch, rng: torch.Generator) -> StepOutput:
        """Loss and clipped gradient of one batch, over all ranks. Waits for the device once, to see whether both are
        finite; they are so on every rank or on none."""
        torch._foreach_copy_(self._buffers_before, self._buffers)
        self.optimizer.zero_grad(set_to_none=True)
        parts = split_batch(batch, self.config.accumulate) if self.config.accumulate > 1 else [batch]
        losses = self.policy.losses(parts, rng)
        outputs = []
        for part in parts:
            last = part is parts[-1]
            with (
                nullcontext() if last or not isinstance(self._model, DistributedDataParallel) else self._model.no_sync()
            ):
                with self.autocast:
                    loss, logs = self._model(losses)
                weight = 1.0 if part.share is None else len(part.actions) / part.share.total
                outputs.append((weight, loss.detach(), logs))
                self.scaler.scale(loss * (weight * ranks.world_size())).backward()
        self.scaler.unscale_(self.optimizer)
        mean, logs = _mean_over_rows(outputs)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        value, norm = torch.stack([mean.float(), total.float()]).tolist()
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
        torch._foreach_copy_(self._buffers, self._buffers_before)
        self.scaler.update()  # float16: a smaller scale for the next step

    @torch.no_grad()
    def validation_loss(self, batches: Sequence[Callable[[], Batch]], seeds: Sequence[int]) -> float | None:
        """Loss of the average, weighted by batch size; each rank takes every W-th batch. None: not finite."""
        self.synchronise_buffers()
        sums = torch.zeros(len(batches), 2, dtype=torch.float64)
        rng = torch.Generator()
        for index in range(ranks.rank(), len(batches), ranks.world_size()):
            batch = batches[index]()
            rng.manual_seed(seeds[index])
            with self.autocast:
                loss = self.average.loss(batch.to(self.device), rng).loss
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

    def weight_tensors(self) -> dict[str, Tensor]:
        return dict(self.named)

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
