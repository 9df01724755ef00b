"""Slow, obvious float64 versions of the baselines' equations: DDPM, DDIM, flow matching, IMLE Policy's rejection."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def alphas(steps: int) -> Array:
    """Nichol and Dhariwal 2021, Eq. 17, with betas capped at 0.999."""
    products, product = [], 1.0
    for s in range(steps):
        upper = math.cos(((s + 1) / steps + 0.008) / 1.008 * math.pi / 2) ** 2
        lower = math.cos((s / steps + 0.008) / 1.008 * math.pi / 2) ** 2
        product *= 1.0 - min(1.0 - upper / lower, 0.999)
        products.append(product)
    return np.array(products)


def ddim(eps: Callable[[Array, int], Array], x: Array, visited: list[int], steps: int, clip: float) -> Array:
    """Song et al. 2021, Eq. 12 with sigma = 0; the predicted x_0 is clipped, the predicted noise is not changed."""
    table = alphas(steps)
    for i, t in enumerate(visited):
        noise = eps(x, t)
        data = np.clip((x - math.sqrt(1 - table[t]) * noise) / math.sqrt(table[t]), -clip, clip)
        before = table[visited[i + 1]] if i + 1 < len(visited) else 1.0
        x = math.sqrt(before) * data + math.sqrt(1 - before) * noise
    return x


def ddpm(
    eps: Callable[[Array, int], Array], x: Array, visited: list[int], steps: int, clip: float, fresh: list[Array]
) -> Array:
    """Ho et al. 2020, Eq. 7 (posterior mean and variance) with the stride's own beta."""
    table = alphas(steps)
    for i, t in enumerate(visited):
        before = table[visited[i + 1]] if i + 1 < len(visited) else 1.0
        beta = 1 - table[t] / before
        data = np.clip((x - math.sqrt(1 - table[t]) * eps(x, t)) / math.sqrt(table[t]), -clip, clip)
        mean = (math.sqrt(before) * beta * data + math.sqrt(1 - beta) * (1 - before) * x) / (1 - table[t])
        variance = (1 - before) / (1 - table[t]) * beta
        x = mean + (math.sqrt(variance) * fresh[i] if i + 1 < len(visited) else 0.0)
    return x


def euler(velocity: Callable[[Array, float], Array], x: Array, steps: int) -> Array:
    for i in range(steps):
        x = x + velocity(x, i / steps) / steps
    return x


def midpoint(velocity: Callable[[Array, float], Array], x: Array, steps: int) -> Array:
    for i in range(steps):
        half = x + velocity(x, i / steps) / (2 * steps)
        x = x + velocity(half, (i + 0.5) / steps) / steps
    return x


def imle_loss(plans: Array, target: Array, valid: NDArray[np.bool_], epsilon: float) -> float:
    """Rana et al. 2025: plans (B, K, Tp, Da); the nearest candidate further than epsilon; rows without one dropped."""
    kept = []
    for row, goal, mask in zip(plans, target, valid, strict=True):
        distances = [math.sqrt(((plan[mask] - goal[mask]) ** 2).sum()) for plan in row]
        allowed = [d for d in distances if d > epsilon]
        if allowed:
            kept.append(min(allowed))
    return sum(kept) / len(kept) if kept else 0.0
