"""All that a training step changes: the weights, their average, the policy's buffers, AdamW, the loss scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prism.errors import PrismError
from prism.policy import Policy
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

    def gradient(self, batch: Batch, rng: torch.Generator) -> StepOutput:
        """Loss and clipped gradient of one batch. Waits for the device once, to see whether both are finite."""
        torch._foreach_copy_(self._buffers_before, self._buffers)
        with self.autocast:
            output = self.policy.loss(batch, rng)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(output.loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        loss, norm = torch.stack([output.loss.detach().float(), total.float()]).tolist()
        if 0 < self.config.grad_clip < norm:  # only then: scaling is one more pass over all the memory
            torch._foreach_mul_(gradients, self.config.grad_clip / norm)
        return StepOutput(loss, norm, output.logs)

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
    def validation_loss(self, batches: Iterable[Batch], seeds: Iterable[int]) -> float | None:
        """Loss of the average, weighted by batch size. None when it is not finite."""
        self.synchronise_buffers()
        total, count = 0.0, 0
        rng = torch.Generator()
        for batch, seed in zip(batches, seeds, strict=True):
            rng.manual_seed(seed)
            with self.autocast:
                loss = self.average.loss(batch.to(self.device), rng).loss
            total, count = total + float(loss) * len(batch.actions), count + len(batch.actions)
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
        context = torch.autocast(device.type, dtype=torch.bfloat16 if name == "bfloat16" else torch.float16)
    return context, torch.amp.GradScaler(device.type, enabled=name == "float16")
