"""Sec. 4.4, Eq. 5-9, Alg. 1: batch-global RS-IMLE.

For each item K candidates are drawn; those closer to a target than a threshold are rejected; the nearest of the rest
is pulled towards the item's own target (hard term; all candidates count where every one was rejected: the fallback).
A small soft term pulls the K' nearest. Only the chosen candidates receive a gradient, so `choose` works on
candidates drawn without gradient, and `loss` on the chosen ones drawn again with it.

Two threshold rules (docs/deviations.md has the measurements):
  paper       EMA of the q-quantile of *all pairs*, clipped to [1e-4, 0.2], against min_j D_{i,k->j}; distances are
              sums over dimensions. On real data it sits on its clamp.
  calibrated  EMA of the q-quantile of the very quantity that is thresholded, so that about a fraction q is rejected
              at every stage of training, and the threshold shrinks as the policy improves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prism.distance import EPS, batch_distance, own_distance
from prism.errors import PrismError

Rule = Literal["calibrated", "paper", "none"]
Scope = Literal["own", "batch"]
Weights = Literal["uniform", "inverse_std"]


@dataclass(frozen=True)
class ObjectiveConfig:
    candidates: int = 16  # K; paper, App. B: saturates at about 16
    rule: Rule = "calibrated"  # threshold rule; "none" is plain IMLE
    scope: Scope = "own"  # calibrated: reject by the own target, or by any target of the batch
    quantile: float = 0.2  # q; paper: 0.2 to 0.35
    momentum: float = 0.9  # alpha of the EMA; paper, App. A.3
    clamp: tuple[float, float] = (1e-4, 0.2)  # paper rule only
    soft_weight: float = 0.0  # lambda_soft; paper: 0.02. Ours is off: docs/deviations.md
    soft_candidates: int = 3  # K'; paper
    temperature: float = 0.1  # tau; not given in the paper
    soft_scaled: bool = True  # multiply by tau, so that the term tends to min d; False is the paper's formula
    soft_respects_rejection: bool = True  # choose the K' among the candidates that were not rejected; paper: False
    weights: Weights = "uniform"  # actions are already normalised, so inverse_std scales twice
    eps: float = EPS

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("rule", self.rule, Rule),
            ("scope", self.scope, Scope),
            ("weights", self.weights, Weights),
        ):
            if value not in get_args(kind):
                raise PrismError(f"objective.{name} is '{value}'; use one of {', '.join(get_args(kind))}")
        if self.candidates < 1:
            raise PrismError(f"objective.candidates is {self.candidates}; it must be at least 1")
        if not 0.0 < self.quantile < 1.0:
            raise PrismError(f"objective.quantile is {self.quantile}; it must lie between 0 and 1")
        if not 0.0 <= self.momentum < 1.0:
            raise PrismError(f"objective.momentum is {self.momentum}; it must lie in [0, 1)")
        if not 0.0 < self.clamp[0] <= self.clamp[1]:
            raise PrismError(f"objective.clamp is {self.clamp}; it needs 0 < low <= high")
        if self.soft_weight < 0 or self.temperature <= 0 or self.eps <= 0:
            raise PrismError("objective.soft_weight must be >= 0, objective.temperature and objective.eps > 0")
        if not 1 <= self.soft_candidates <= self.candidates:
            raise PrismError(
                f"objective.soft_candidates is {self.soft_candidates}; it must lie in 1..{self.candidates}"
            )


@dataclass(frozen=True)
class Choice:
    """Which candidates are trained. Column 0 is the hard term's; the last K' columns are the soft term's.

    When the soft term respects rejection its nearest candidate *is* the hard one, and the two share column 0.
    """

    index: Int[Tensor, "B C"]  # C = 1, K' or 1 + K'
    soft_valid: Bool[Tensor, "B K'"] | None  # None: no soft term
    logs: dict[str, Tensor]


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of all entries, linearly interpolated; torch.quantile refuses more than 16 M of them."""
    flat = values.flatten()
    position = q * (flat.numel() - 1)
    low = math.floor(position)
    lower = flat.kthvalue(low + 1).values
    if low + 1 >= flat.numel():
        return lower
    return torch.lerp(lower, flat.kthvalue(low + 2).values, position - low)


def choose_hard(own: Float[Tensor, "B K"], rejected: Bool[Tensor, "B K"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """Eq. 6: argmin over the candidates that were not rejected; over all where none is left. -> index, fallback."""
    fallback = rejected.all(1)
    barred = rejected & ~fallback.unsqueeze(1)
    return own.masked_fill(barred, math.inf).argmin(1), fallback


def soft_coverage(
    distance: Float[Tensor, "B C"], valid: Bool[Tensor, "B C"], temperature: float, scaled: bool
) -> Float[Tensor, ""]:
    """Eq. 9: -mean_i log sum_k exp(-d_ik / tau), times tau when scaled (only then does tau -> 0 give min d)."""
    exponent = (-distance / temperature).masked_fill(~valid, -math.inf)
    value = -torch.logsumexp(exponent, dim=1).mean()
    return value * temperature if scaled else value


class RSIMLE(nn.Module):
    """The objective and its one piece of state, the threshold, which is saved with the policy."""

    threshold: Tensor
    calibrated: Tensor

    def __init__(self, config: ObjectiveConfig, action_dim: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("calibrated", torch.zeros((), dtype=torch.bool))
        scale = 1.0 if config.rule == "paper" else 1.0 / action_dim  # the paper's distance sums over dimensions
        self.register_buffer("weights", torch.full((action_dim,), scale))

    def set_action_std(self, std: Float[Tensor, "Da"]) -> None:
        """Eq. 4's w_d: inverse empirical scale, for weights = inverse_std. Call once, before training."""
        if self.config.weights != "inverse_std":
            return
        inverse = 1.0 / std.clamp(min=1e-3)
        if self.config.rule != "paper":
            inverse = inverse / inverse.sum()
        self.weights.copy_(inverse)

    @torch.no_grad()
    def choose(
        self,
        candidates: Float[Tensor, "B K Tp Da"],
        target: Float[Tensor, "B Tp Da"],
        valid: Bool[Tensor, "B Tp"],
        update: bool = True,
    ) -> Choice:
        """Alg. 1, lines 7-13, on candidates without gradient. `update` moves the threshold (training only)."""
        config = self.config
        own = own_distance(candidates, target, valid, self.weights, config.eps)  # (B, K)
        clamped = own.new_zeros(())
        if config.rule == "none":
            rejected = torch.zeros_like(own, dtype=torch.bool)
        elif config.rule == "paper":
            pairs = batch_distance(candidates, target, valid, self.weights, config.eps)  # (B, K, B)
            if update:
                self._update(quantile(pairs, config.quantile))
                self.threshold.clamp_(*config.clamp)
            low, high = config.clamp
            clamped = ((self.threshold <= low * 1.0001) | (self.threshold >= high * 0.9999)).float()
            rejected = pairs.amin(2) < self.threshold
        else:
            near = own
            if config.scope == "batch":
                near = batch_distance(candidates, target, valid, self.weights, config.eps).amin(2)
            if update:
                self._update(quantile(near, config.quantile))
            rejected = near < self.threshold
        hard, fallback = choose_hard(own, rejected)
        logs = {
            "rejection_rate": rejected.float().mean(),
            "fallback_rate": fallback.float().mean(),
            "threshold": self.threshold.clone(),
            "threshold_clamped": clamped,
            "own_distance": own.mean(),
        }
        index, soft_valid = hard.unsqueeze(1), None
        if config.soft_weight > 0:
            barred = rejected & ~fallback.unsqueeze(1) if config.soft_respects_rejection else torch.zeros_like(rejected)
            nearest = own.masked_fill(barred, math.inf).topk(config.soft_candidates, dim=1, largest=False)
            soft_valid = nearest.values.isfinite()
            shared = config.soft_respects_rejection
            index = nearest.indices if shared else torch.cat([index, nearest.indices], dim=1)
        return Choice(index, soft_valid, logs)

    def _update(self, value: Tensor) -> None:
        momentum = torch.where(self.calibrated, self.config.momentum, 0.0)  # the first batch sets it outright
        self.threshold.copy_(torch.lerp(value, self.threshold, momentum))
        self.calibrated.fill_(True)

    def loss(
        self,
        chosen: Float[Tensor, "B C Tp Da"],
        choice: Choice,
        target: Float[Tensor, "B Tp Da"],
        valid: Bool[Tensor, "B Tp"],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 6-9 on the chosen candidates, drawn again with gradient: hard + lambda * soft."""
        distance = own_distance(chosen, target, valid, self.weights, self.config.eps)  # (B, C)
        hard = distance[:, 0].mean()
        if choice.soft_valid is None:
            return hard, {"hard": hard.detach()}
        soft_distance = distance[:, -choice.soft_valid.shape[1] :]
        soft = soft_coverage(soft_distance, choice.soft_valid, self.config.temperature, self.config.soft_scaled)
        return hard + self.config.soft_weight * soft, {"hard": hard.detach(), "soft": soft.detach()}
