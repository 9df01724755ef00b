"""AdamW groups, the learning-rate schedule, the moving average of the weights, and seeds as functions of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prism.training.config import TrainConfig

_MASK = (1 << 64) - 1


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
    """eta = eta_0 min(1, (t+1)/warm-up) (1 + cos(pi fraction)) / 2, where fraction is of the whole budget."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
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
