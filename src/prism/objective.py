"""Sec. 4.4, Eq. 5-9, Alg. 1: batch-global RS-IMLE.

For each item K candidates are drawn; those closer to a target than a threshold are rejected; the nearest of the rest
is pulled towards the item's own target (hard term). If all were rejected, all candidates count (fallback).
A small soft term pulls the K' nearest. Only the chosen candidates receive a gradient, so they are
chosen among candidates drawn without gradient, and `loss` is of the chosen ones drawn again with it.

Rules (docs/explanation/deviations.md has the measurements):
  paper       EMA of the q-quantile of *all pairs*, clipped to [1e-4, 0.2], against min_j D_{i,k->j}; distances are
              sums over dimensions. On real data it sits on its clamp.
  calibrated  EMA of the q-quantile of the very quantity that is thresholded, so that about a fraction q is rejected
              at every stage of training, and the threshold shrinks as the policy improves. That quantity is the
              distance divided by its mean over the row's candidates to the power `relative`: at 0 a row that the
              policy knows well loses all its candidates (the fallback), at 1 no row ever does.
  random      a placebo: each candidate is rejected with chance q, whatever its distance.
  none        plain IMLE.

"Batch" is the global batch, whatever it is spread over: targets and the quantile are asked of
`Batch.share`, candidates stay where they are. Two bounds keep a large G affordable; below them everything is exact:
  max_targets  G > max_targets: a candidate is compared with its own target and with this many others, evenly spread
               over the batch. One that has n targets nearer than the threshold is missed with chance
               (1 - max_targets / G)^n at most.
  EXACT_PAIRS  more pairs than that (paper rule): the quantile is that of SAMPLED_PAIRS pairs drawn at random, each
               independently. It then lies between the q - e and q + e quantiles of all pairs with probability 95 %,
               e = sqrt(ln(2 / 0.05) / (2 SAMPLED_PAIRS)) = 0.0014 (Dvoretzky, Kiefer and Wolfowitz; Massart).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prism.distance import EPS, batch_distance, nearest_distance, own_distance
from prism.errors import PrismError, check_choices, check_numbers
from prism.rows import WHOLE, Random, Share

Rule = Literal["calibrated", "paper", "random", "none"]
Scope = Literal["own", "batch"]
Weights = Literal["uniform", "inverse_std"]

_NO_THRESHOLD: tuple[Rule, ...] = ("random", "none")

EXACT_PAIRS = 1 << 22  # G K G of G = 512, K = 16
SAMPLED_PAIRS = 1 << 20
_PAIR_CHUNK = 1 << 16


@dataclass(frozen=True)
class ObjectiveConfig:
    """The paper is the default. A departure needs a proof, a benchmark, or a lower 95 % bound of (ours - paper) in
    success above 0 over three trainings at the full budget: docs/explanation/deviations.md."""

    candidates: int = 16  # K; paper, App. B: saturates at about 16
    rule: Rule = "calibrated"  # which candidates are rejected; "none" is plain IMLE
    scope: Scope = "batch"  # calibrated: reject by any target of the batch, as the paper, or by the own target
    quantile: float = 0.2  # q; paper: 0.2 to 0.35
    momentum: float = 0.9  # alpha of the EMA; paper, App. A.3
    clamp: tuple[float, float] = (1e-4, 0.2)  # paper rule only
    soft_weight: float = 0.02  # lambda_soft; paper
    soft_candidates: int = 3  # K'; paper
    temperature: float = 0.1  # tau; not given in the paper
    soft_scaled: bool = True  # multiply by tau, so that the term tends to min d; False is the paper's formula
    soft_respects_rejection: bool = True  # choose the K' among the candidates that were not rejected; paper: False
    weights: Weights = "uniform"  # actions are already normalised, so inverse_std scales twice
    eps: float = EPS
    discount: float = 1.0  # weight of an action of a plan against the one before it; paper: 1
    max_targets: int = 1024  # batch scope and paper rule: bound on the cost
    # calibrated: 0 distances as they are, as the paper .. 1 in units of the row's mean. Above 0 few rows fall back, and
    # the rarer of two ways becomes rarer (docs/explanation/deviations.md).
    relative: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, "objective")
        numbers = {
            "[1, inf)": "candidates soft_candidates max_targets",
            "[0, inf)": "soft_weight",
            "(0, inf)": "temperature eps",
        }
        fractions = {"(0, 1)": "quantile", "[0, 1)": "momentum", "[0, 1]": "relative", "(0, 1]": "discount"}
        soft = {f"[1, {self.candidates}]": "soft_candidates"} if self.soft_weight > 0 else {}
        check_numbers(self, "objective", {**numbers, **fractions, **soft})
        if not 0.0 < self.clamp[0] <= self.clamp[1]:
            raise PrismError(f"objective.clamp is {self.clamp}; it needs 0 < low <= high")


@dataclass(frozen=True)
class Targets:
    """The targets of the global batch, in its order; `start` is the place of the first row at hand."""

    actions: Float[Tensor, "G Tp Da"]
    valid: Bool[Tensor, "G Tp"]
    start: int = 0


@dataclass(frozen=True)
class Distances:
    own: Float[Tensor, "B K"]  # to the row's own target
    near: Float[Tensor, "B K"]  # what is compared with the threshold
    pool: Float[Tensor, "..."]  # the values whose quantile the threshold follows


@dataclass(frozen=True)
class Choice:
    """Which candidates are trained. Column 0 belongs to the hard term, the last K' columns to the soft term.

    When the soft term respects rejection its nearest candidate *is* the hard one, and the two share column 0.
    """

    index: Int[Tensor, "B C"]  # C = 1, K' or 1 + K'
    soft_valid: Bool[Tensor, "B K'"] | None  # None: no soft term
    logs: dict[str, Tensor]


@lru_cache(maxsize=1)
def _places(pairs: int) -> Int[Tensor, " N"]:
    """SAMPLED_PAIRS of `pairs` pairs, drawn independently of each other, sorted: those of a row stand together."""
    return torch.randint(0, pairs, (SAMPLED_PAIRS,), generator=torch.Generator().manual_seed(0)).sort().values


def choose_hard(
    own: Float[Tensor, "B K"], rejected: Bool[Tensor, "B K"]
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Eq. 6: argmin over the candidates that were not rejected, or over all if none is left. -> index, fallback."""
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
    weights: Tensor

    def __init__(self, config: ObjectiveConfig, action_dim: int) -> None:
        super().__init__()
        self.config = config
        self._form = config.eps, config.discount  # of every distance
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("calibrated", torch.zeros((), dtype=torch.bool))
        scale = 1.0 if config.rule == "paper" else 1.0 / action_dim  # the paper's distance sums over dimensions
        self.register_buffer("weights", torch.full((action_dim,), scale))

    def set_action_std(self, std: Float[Tensor, " Da"]) -> None:
        """Eq. 4's w_d, once, before training: inverse empirical scale for weights = inverse_std, otherwise equal; 0 for
        a dimension that is constant (std 0)."""
        moves = (std > 0).to(std.dtype)
        if self.config.weights != "inverse_std" and bool(moves.all()):
            return
        weights = moves / std.clamp(min=1e-3) if self.config.weights == "inverse_std" else moves
        if self.config.rule != "paper":
            weights = weights / weights.sum().clamp(min=1e-9)
        self.weights.copy_(weights)

    def targets(
        self, target: Float[Tensor, "B Tp Da"], valid: Bool[Tensor, "B Tp"], share: Share = WHOLE
    ) -> Targets | None:
        """The targets of the batch that candidates are also compared with, or None."""
        rule, scope = self.config.rule, self.config.scope
        if rule in _NO_THRESHOLD or (rule == "calibrated" and scope == "own"):
            return None
        steps = target.shape[1]
        rows = share.gather(torch.cat([target.float().flatten(1), valid.float()], dim=1))  # one message, not two
        return Targets(rows[:, :-steps].reshape(-1, *target.shape[1:]), rows[:, -steps:] > 0.5, share.start)

    @torch.no_grad()
    def distances(
        self,
        candidates: Float[Tensor, "B K Tp Da"],
        target: Float[Tensor, "B Tp Da"],
        valid: Bool[Tensor, "B Tp"],
        targets: Targets | None,
    ) -> Distances:
        """Alg. 1, lines 8-9: to the own target, and to the targets of the batch."""
        config = self.config
        own = own_distance(candidates, target, valid, self.weights, *self._form)  # (B, K)
        if targets is None:
            near = self._relative(own)
            return Distances(own, near, near)
        total, count = len(targets.actions), candidates.shape[1]
        exact = total * count * total <= EXACT_PAIRS
        if config.rule == "paper" and exact and total <= config.max_targets:
            pairs = batch_distance(candidates, targets.actions, targets.valid, self.weights, *self._form)  # (B, K, G)
            return Distances(own, pairs.amin(2), pairs)
        if total <= config.max_targets:
            near = nearest_distance(candidates, targets.actions, targets.valid, self.weights, *self._form)
        else:
            spread = torch.arange(config.max_targets, device=own.device) * total // config.max_targets
            others = (targets.actions[spread], targets.valid[spread])
            near = torch.minimum(own, nearest_distance(candidates, *others, self.weights, *self._form))
        if config.rule == "calibrated":
            near = self._relative(near)
            return Distances(own, near, near)
        return Distances(own, near, self._sample_pairs(candidates, targets))

    def _relative(self, near: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """Distances, divided in part (`relative`) by the row's mean distance."""
        if self.config.relative == 0.0:
            return near
        return near / near.mean(1, keepdim=True).clamp(min=self.config.eps) ** self.config.relative

    def _sample_pairs(self, candidates: Float[Tensor, "B K Tp Da"], targets: Targets) -> Float[Tensor, " N"]:
        """Distances of those of SAMPLED_PAIRS random pairs (i, k, j) of the global batch whose row i is at hand.

        The places are the same at every step and on every rank; the windows in them are shuffled.
        """
        rows, count = candidates.shape[:2]
        total = len(targets.actions)
        flat, of_a_row = _places(total * count * total), count * total
        first, end = torch.searchsorted(flat, of_a_row * torch.tensor([targets.start, targets.start + rows])).tolist()
        here = flat[first:end].to(candidates.device)
        row, k, j = here // of_a_row - targets.start, here // total % count, here % total
        parts = []
        for at in range(0, len(here), _PAIR_CHUNK):
            piece = slice(at, at + _PAIR_CHUNK)
            others = (targets.actions[j[piece]], targets.valid[j[piece]])
            one = candidates[row[piece], k[piece]].unsqueeze(1)
            parts.append(own_distance(one, *others, self.weights, *self._form).squeeze(1))
        return torch.cat(parts) if parts else candidates.new_zeros(0)

    @torch.no_grad()
    def calibrate(self, pool: Float[Tensor, "..."], share: Share = WHOLE) -> None:
        """Alg. 1, line 10, Eq. 7: the threshold follows the quantile over the global batch."""
        config = self.config
        if config.rule in _NO_THRESHOLD:
            return
        value = share.quantile(pool, config.quantile)
        momentum = torch.where(self.calibrated, config.momentum, 0.0)  # the first batch sets it outright
        self.threshold.copy_(torch.lerp(value, self.threshold, momentum))
        self.calibrated.fill_(True)
        if config.rule == "paper":
            self.threshold.clamp_(*config.clamp)

    @torch.no_grad()
    def reject(self, near: Float[Tensor, "B K"], rng: Random) -> Bool[Tensor, "B K"]:
        """Alg. 1, line 11. Only the rule `random` draws from `rng`."""
        if self.config.rule == "random":
            return (rng.rand(near.shape) < self.config.quantile).to(near.device)
        return torch.zeros_like(near, dtype=torch.bool) if self.config.rule == "none" else near < self.threshold

    @torch.no_grad()
    def choose(self, own: Float[Tensor, "B K"], rejected: Bool[Tensor, "B K"]) -> Choice:
        """Alg. 1, lines 12-14: the candidates to train, and what to log."""
        config = self.config
        hard, fallback = choose_hard(own, rejected)
        low, high = config.clamp
        clamped = (self.threshold <= low * 1.0001) | (self.threshold >= high * 0.9999)
        logs = {
            "rejection_rate": rejected.float().mean(),
            "fallback_rate": fallback.float().mean(),
            "threshold": self.threshold.clone(),
            "threshold_clamped": clamped.float() if config.rule == "paper" else own.new_zeros(()),
            "own_distance": own.mean(),
            "nearest_distance": own.amin(1).mean(),  # coverage: how far the best of the K is from the demonstration
        }
        index, soft_valid = hard.unsqueeze(1), None
        if config.soft_weight > 0:
            barred = rejected & ~fallback.unsqueeze(1) if config.soft_respects_rejection else torch.zeros_like(rejected)
            nearest = own.masked_fill(barred, math.inf).topk(config.soft_candidates, dim=1, largest=False)
            soft_valid = nearest.values.isfinite()
            shared = config.soft_respects_rejection
            index = nearest.indices if shared else torch.cat([index, nearest.indices], dim=1)
        return Choice(index, soft_valid, logs)

    def loss(
        self,
        chosen: Float[Tensor, "B C Tp Da"],
        choice: Choice,
        target: Float[Tensor, "B Tp Da"],
        valid: Bool[Tensor, "B Tp"],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 6-9 on the chosen candidates, drawn again with gradient: hard + lambda * soft."""
        distance = own_distance(chosen, target, valid, self.weights, *self._form)  # (B, C)
        hard = distance[:, 0].mean()
        if choice.soft_valid is None:
            return hard, {"hard": hard.detach(), **choice.logs}
        soft_distance = distance[:, -choice.soft_valid.shape[1] :]
        soft = soft_coverage(soft_distance, choice.soft_valid, self.config.temperature, self.config.soft_scaled)
        logs = {"hard": hard.detach(), "soft": soft.detach(), **choice.logs}
        return hard + self.config.soft_weight * soft, logs
