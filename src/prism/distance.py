"""Sec. 4.3, Eq. 4: the Charbonnier distance between action sequences, own and all pairs.

    D(a, b) = sum_t v_t sum_d w_d sqrt((a_td - b_td)^2 + eps^2),     v_t ~ discount^t, sum_t v_t = 1

The paper's v_t is 1/T (discount 1). With weights w_d that sum to one (the default) it is a mean over dimensions, so its
scale does not grow with Da; the paper's literal form sums (`weights` of ones). Time is averaged over the steps of the
*target* that are valid, so a window that runs past the end of its episode is compared only where the demonstration
exists. With a discount below 1 what is executed counts more than what is planned anew before its turn comes. Always
float32: eps = 1e-6 squared underflows in half precision and gives NaN gradients.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPS = 1e-6  # paper, Sec. 4.3
_CHUNK_ELEMENTS = 8_000_000  # bound on a temporary: 32 MB of float32


def _charbonnier(difference: Tensor, eps: float) -> Tensor:
    return torch.sqrt(difference * difference + eps * eps)


def _full_precision(tensor: Tensor) -> torch.autocast:
    """Under autocast einsum would go back to half precision, whatever it is given."""
    return torch.autocast(tensor.device.type, enabled=False)


def step_weights(valid: Bool[Tensor, "B Tp"], discount: float = 1.0) -> Float[Tensor, "B Tp"]:
    """v_t of each row: over its valid steps they sum to 1."""
    steps = torch.arange(valid.shape[1], device=valid.device)
    mask = valid.float() * torch.pow(torch.tensor(discount, device=valid.device), steps)
    return mask / mask.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def own_distance(
    candidates: Float[Tensor, "B K Tp Da"],
    target: Float[Tensor, "B Tp Da"],
    valid: Bool[Tensor, "B Tp"],
    weights: Float[Tensor, " Da"],
    eps: float = EPS,
    discount: float = 1.0,
) -> Float[Tensor, "B K"]:
    """D_{i,k}: each candidate against its own target."""
    with _full_precision(candidates):
        gap = _charbonnier(candidates.float() - target.float().unsqueeze(1), eps)  # (B, K, Tp, Da)
        return torch.einsum("bkta,bt,a->bk", gap, step_weights(valid, discount), weights.to(gap.dtype))


@torch.no_grad()
def batch_distance(
    candidates: Float[Tensor, "B K Tp Da"],
    targets: Float[Tensor, "G Tp Da"],
    valid: Bool[Tensor, "G Tp"],
    weights: Float[Tensor, " Da"],
    eps: float = EPS,
    discount: float = 1.0,
) -> Float[Tensor, "B K G"]:
    """D_{i,k->j}: every candidate against every target of the (global) batch. Without gradient: it only decides.

    At eps <= 1e-5 Charbonnier is L1 to within eps, and `torch.cdist(p=1)` is some 10x faster than broadcasting. Targets
    whose episodes end at the same step of the plan have the same weights v_t, and share a call.
    """
    b, k, t, a = candidates.shape
    flat = candidates.float().reshape(b * k, t, a)
    targets = targets.float()
    out = flat.new_empty(b * k, targets.shape[0])
    ends, end_of = torch.unique(valid, dim=0, return_inverse=True)
    step_weight = step_weights(ends, discount)  # (E, Tp)
    for e in range(len(ends)):
        same = (end_of == e).nonzero().squeeze(1)
        weight = step_weight[e, :, None] * weights.float()  # (Tp, Da)
        if eps <= 1e-5:
            out[:, same] = torch.cdist((flat * weight).flatten(1), (targets[same] * weight).flatten(1), p=1.0)
            continue
        for j in same.split(max(1, _CHUNK_ELEMENTS // flat.numel())):
            gap = _charbonnier(flat.unsqueeze(1) - targets[j].unsqueeze(0), eps)  # (B K, chunk, Tp, Da)
            with _full_precision(candidates):
                out[:, j] = torch.einsum("njta,ta->nj", gap, weight)
    return out.reshape(b, k, -1)


@torch.no_grad()
def nearest_distance(
    candidates: Float[Tensor, "B K Tp Da"],
    targets: Float[Tensor, "G Tp Da"],
    valid: Bool[Tensor, "G Tp"],
    weights: Float[Tensor, " Da"],
    eps: float = EPS,
    discount: float = 1.0,
) -> Float[Tensor, "B K"]:
    """min_j D_{i,k->j}, in memory that does not grow with B K G: the pairs come and go in chunks of rows."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, candidates.shape[1] * targets.shape[0]))
    parts = [batch_distance(part, targets, valid, weights, eps, discount).amin(2) for part in candidates.split(rows)]
    return torch.cat(parts)
