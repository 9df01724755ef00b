"""Attention of the generator (Sec. 4.2, Eq. 3, Alg. 3): exact softmax, FAVOR+, the paper's literal form, an average.

Legend of the shape suffixes: B batch, H heads, T queries, S keys, D head width, M random features,
E = D + 1 (values with a column of ones appended, so that one product gives numerator and normaliser).

Everything is bidirectional (no causal mask), so the queries of K candidates of one context can be
laid end to end as K * T queries against the same keys: keys and values are computed once a context.

| kind          | cost a head          | what it is                                                     |
| ------------- | -------------------- | -------------------------------------------------------------- |
| `softmax`     | T * S                | exact                                                          |
| `favor`       | (T + S) * M          | FAVOR+: unbiased kernel estimate, its error falls as M grows   |
| `favor_paper` | (T + S) * M          | Eq. 3 as printed: a biased estimate that does not converge     |
| `auto`        | the cheaper of two   | `softmax` or `favor`, by `choose`                              |
| `uniform`     | S                    | the mean of the values: a control without queries and keys     |

`length` > 0 gives FAVOR+ queries and keys of that length. The variance of its estimate grows with exp(|q~ + k~|^2), so
at heads of 64 free lengths that grow in training make the estimate noise (docs/explanation/attention.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.errors import PrismError, check_choices, check_numbers

Kind = Literal["softmax", "favor", "favor_paper", "auto", "uniform"]
Linear = Literal["favor", "favor_paper"]
Resolved = Literal["softmax", Linear, "uniform"]

_FEATURE_EPS = 1e-6  # keeps every feature positive: a query whose features all miss the keys' still gets an average
_DENOMINATOR_EPS = 1e-6  # eps_a of Eq. 3; the paper gives no value
_LENGTH_EPS = 1e-6  # added to a squared length before the division: a token of zeros stays zero, its gradient finite
_TINY = 1e-20  # only reached when every key is masked: 0 / tiny = 0


@dataclass(frozen=True)
class AttentionConfig:
    kind: Kind = "auto"
    heads: int = 4
    features: int = 256  # paper, Sec. 4.2: m random features a head
    bias: bool = True
    # favor: |q~| and |k~|, the lengths of queries and keys after the division by D^(1/4); 0: unchanged, as in the paper
    length: float = 0.0
    redraw: bool = False  # other random features at every step of the training; otherwise drawn once
    length_bound: float = 1.0  # a head learns its length between length / this and length * this; 1: it stays

    def __post_init__(self) -> None:
        check_choices(self, "attention")
        check_numbers(self, "attention", {"[1, inf)": "heads features length_bound", "[0, inf)": "length"})


# --------------------------------------------------------------------------- exact


def softmax_attention(
    q_BHTD: Float[Tensor, "B H T D"],
    k_BHSD: Float[Tensor, "B H S D"],
    v_BHSD: Float[Tensor, "B H S D"],
    mask_BS: Bool[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """softmax(q k^T / sqrt(D)) v over the keys where mask is True; zeros where no key is.

    PyTorch's fused kernel: on one CPU core, forward and backward, 2.5x faster than the three
    explicit operations at T = S = 8 and never slower at the lengths of `python -m research attention`.
    """
    if mask_BS is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD)
    out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=mask_BS[:, None, None, :])
    return out_BHTD.masked_fill(~mask_BS.any(dim=1)[:, None, None, None], 0.0)


# --------------------------------------------------------------------------- linear: features


def of_length(x_BHTD: Float[Tensor, "B H T D"], length: float | Tensor) -> Float[Tensor, "B H T D"]:
    """x with |x~| = length, where x~ = x / D^(1/4). `length` may be (H, 1, 1)."""
    squared_BHT1 = x_BHTD.square().sum(dim=-1, keepdim=True)
    return x_BHTD * (torch.rsqrt(squared_BHT1 + _LENGTH_EPS) * (length * float(x_BHTD.shape[-1] ** 0.25)))


def orthogonal_features(m: int, d: int, generator: torch.Generator) -> Float[Tensor, "M D"]:
    """Rows ~ N(0, I_d), orthogonal within each block of d: lower variance than independent rows.

    A block is a Haar-random rotation (QR of a Gaussian matrix, signs of R's diagonal made positive)
    whose rows are stretched to independent chi_d norms, so each row alone is exactly Gaussian.
    """
    blocks = -(-m // d)
    gaussian = torch.randn(blocks, d, d, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    rotations = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    norms = torch.randn(blocks, d, d, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    rows: Tensor = (rotations * norms).reshape(blocks * d, d)[:m]
    return rows.float().contiguous()


def gaussian_features(m: int, d: int, generator: torch.Generator) -> Float[Tensor, "M D"]:
    """Independent N(0, 1) entries. Alg. 3's N(0, 1/sqrt(d)), read as a variance, is this times d^(-1/4)."""
    return torch.randn(m, d, generator=generator)


def _project(x_BHTD: Tensor, w_MD: Tensor) -> Tensor:
    """W x~ with x~ = x / D^(1/4): the scale is applied to the small matrix, not to the tokens."""
    return torch.matmul(x_BHTD, (w_MD * float(w_MD.shape[1] ** -0.25)).T)


def _row_exponentials(x_BHTD: Tensor, w_MD: Tensor) -> Tensor:
    """m^(-1/2) exp(W x~ - s), s the maximum of each row. In place: these are the passes over memory that cost.

    FAVOR+'s phi has -|x~|^2/2 in the exponent, which is constant in a row of queries: s removes it. s cancels in the
    ratio of attention, so it carries no gradient.
    """
    u_BHTM = _project(x_BHTD, w_MD)
    return u_BHTM.sub_(u_BHTM.detach().amax(dim=-1, keepdim=True).add_(_half_log(w_MD))).exp_()


def _key_exponentials(x_BHSD: Tensor, w_MD: Tensor, mask_BS: Tensor | None) -> Tensor:
    """m^(-1/2) exp(W x~ - |x~|^2/2 - s), s one maximum over the keys that count and their features.

    A maximum per key would bias the logits. Masked keys are left out of it: they may be garbage of any size.
    """
    u_BHSM = _project(x_BHSD, w_MD)
    u_BHSM.sub_(x_BHSD.square().sum(dim=-1, keepdim=True), alpha=0.5 * w_MD.shape[1] ** -0.5)
    if mask_BS is not None:
        u_BHSM.masked_fill_(~mask_BS[:, None, :, None], torch.finfo(u_BHSM.dtype).min)
    return u_BHSM.sub_(u_BHSM.detach().amax(dim=(-2, -1), keepdim=True).add_(_half_log(w_MD))).exp_()


def _half_log(w_MD: Tensor) -> float:
    return 0.5 * math.log(w_MD.shape[0])  # exp(-this) = m^(-1/2)


def _feature_eps(kind: Linear, w_MD: Tensor) -> float:
    return _FEATURE_EPS * float(w_MD.shape[0] ** -0.5) if kind == "favor" else 0.0  # Eq. 3 has none


# --------------------------------------------------------------------------- linear: attention


def _values_and_ones(v_BHSD: Tensor, mask_BS: Tensor | None) -> Float[Tensor, "B H S E"]:
    """[V, 1], with zero rows for masked keys: that zeroes their features in every sum over keys."""
    v_BHSE = F.pad(v_BHSD, (0, 1), value=1.0)
    return v_BHSE if mask_BS is None else v_BHSE.masked_fill(~mask_BS[:, None, :, None], 0.0)


@dataclass(frozen=True)
class LinearKeys:
    """All that a query needs to know about the keys: attention is phi(Q) phi(K)^T [V, 1], then a division, where
    phi(x) = m^(-1/2) [exp(W x~ - |x~|^2/2 - s) + eps].

    That product can be taken in either order. Many keys: phi(K)^T [V, 1] first (S and n of Alg. 3), M E numbers a head
    whatever the number of keys. Few keys, S (M + E) <= M E: phi(Q) phi(K)^T first, the same numbers to rounding.
    """

    sums: Float[Tensor, "B H M X"]  # phi(K)^T [V, 1] (X = E), or phi(K)^T where the keys are few (X = S)
    values: Float[Tensor, "B H S E"] | None  # [V, 1] where they are


def linear_keys(
    kind: Linear, k_BHSD: Tensor, v_BHSD: Tensor, w_MD: Tensor, mask_BS: Tensor | None = None
) -> LinearKeys:
    """The key side. The eps of phi is added once, to whichever product is the smaller."""
    eps = _feature_eps(kind, w_MD)
    u_BHSM = _key_exponentials(k_BHSD, w_MD, mask_BS) if kind == "favor" else _row_exponentials(k_BHSD, w_MD)
    v_BHSE = _values_and_ones(v_BHSD, mask_BS)
    keys, features, columns = u_BHSM.shape[-2], u_BHSM.shape[-1], v_BHSE.shape[-1]
    if keys * (features + columns) <= features * columns:
        return LinearKeys((u_BHSM + eps).transpose(-1, -2), v_BHSE)
    return LinearKeys(u_BHSM.transpose(-1, -2) @ v_BHSE + eps * v_BHSE.sum(dim=-2, keepdim=True), None)


def linear_attend(kind: Linear, q_BHTD: Tensor, keys: LinearKeys, w_MD: Tensor) -> Float[Tensor, "B H T D"]:
    """The query side: phi(Q) S / phi(Q) n, the eps of phi(Q) again added after the product.

    `favor_paper` is Eq. 3 / Alg. 3 as printed: eps_a in the denominator, a maximum of its own for every query and key.
    Without -|k|^2/2 each key gets a random logit bias, so more features do not help (docs/explanation/attention.md).
    """
    eps = _feature_eps(kind, w_MD)
    out_BHTX = _row_exponentials(q_BHTD, w_MD) @ keys.sums + eps * keys.sums.sum(dim=-2, keepdim=True)
    out_BHTE = out_BHTX if keys.values is None else out_BHTX @ keys.values
    total_BHT1 = out_BHTE[..., -1:]
    return out_BHTE[..., :-1] / (total_BHT1.clamp_min(_TINY) if kind == "favor" else total_BHT1 + _DENOMINATOR_EPS)


@torch.no_grad()
def effective_features(kind: Linear, q_BHTD: Tensor, keys: LinearKeys, w_MD: Tensor) -> Float[Tensor, ""]:
    """How many of the M features carry the normaliser phi(q) . sum_s phi(k_s): (sum_m t_m)^2 / sum_m t_m^2 over its
    terms t_m, the mean over queries. 1: a single feature decides all weights."""
    phi_BHTM = _row_exponentials(q_BHTD, w_MD) + _feature_eps(kind, w_MD)
    total_BHM = keys.sums[..., -1] if keys.values is None else (keys.sums @ keys.values[..., -1:]).squeeze(-1)
    t_BHTM = phi_BHTM * total_BHM.unsqueeze(-2)
    return (t_BHTM.sum(-1).square() / t_BHTM.square().sum(-1).clamp_min(_TINY)).mean()


def choose(kind: Kind, queries: int, keys: int, features: int, head_dim: int) -> Resolved:
    """Resolve `auto` to the cheaper of exact and linear attention: exact if T S <= c(D) (T + S) M.

    T S and (T + S) M count the entries each one computes; c is what an entry of the linear one costs
    in entries of the exact one, 1.4 + 14 / D as measured by `python -m research attention` (one core,
    forward, float32): the exact kernel stays in cache, and the narrower the head the more that
    saves. Only lengths decide, never the mode: a policy must be the same function in training and use.
    """
    if kind != "auto":
        return kind
    exact_entries = queries * keys
    linear_entries = (queries + keys) * features
    return "softmax" if exact_entries <= (1.4 + 14.0 / head_dim) * linear_entries else "favor"


# --------------------------------------------------------------------------- module


@dataclass(frozen=True)
class Folded:
    """Exact attention with the query and output projections folded into a short context (see `Attention`)."""

    keys: Float[Tensor, "B W HS"]  # logits = x keys + bias
    bias: Float[Tensor, "B 1 HS"]  # the smallest number where masked
    values: Float[Tensor, "B HS W"]  # output = softmax(logits) values + output bias


@dataclass(frozen=True)
class KeyValues:
    """The context side of attention, made once a context and shared by all of its candidates.

    Exact: keys and values, or their folded form. Either way a candidate pays for its queries alone.
    """

    kind: Resolved
    contexts: int
    keys: Float[Tensor, "B H S D"] | None = None
    values: Float[Tensor, "B H S D"] | None = None  # uniform: their mean, S = 1
    mask: Bool[Tensor, "B S"] | None = None
    linear: LinearKeys | None = None
    folded: Folded | None = None
    squared: Float[Tensor, ""] | None = None  # linear, in training: mean |k~|^2 of the first context


class Attention(nn.Module):
    """Multi-head attention with q, k, v and output projections.

        context (B, S, W) --keys_values--> KeyValues (B contexts)
                                               |
        x (B, K, T, W) or (B*K, T, W) -----> forward -----> same shape as x

    `forward(x)` without key-values is self-attention inside each sequence of x, with one fused projection. The
    random features are a buffer: drawn once from `rng`, saved, never trained. In training a linear kind leaves in
    `seen` the mean |q~|^2 and |k~|^2 and the effective features of its last pass with gradient, of the first context.

    Folding. With many candidates of a short context the two projections of every query cost more than all the rest.
    They are linear, so they can be applied to the context instead, once:
        logits_ths = (W_q x_t + b_q)_h . k_sh / sqrt(D) = x_t . (W_qh^T k_sh) / sqrt(D) + b_qh . k_sh / sqrt(D)
        W_o out_t  = sum_hs p_ths (W_oh v_sh)
    which leaves 2 W H S multiplications a query instead of 2 W^2 + 2 W S. The same function, to rounding; 2x to 7x
    faster at the sizes of the presets. Used when it at least halves that work, that is when 2 S <= D.
    """

    random_features: Tensor | None
    length: nn.Parameter | None

    def __init__(self, width: int, config: AttentionConfig, rng: torch.Generator) -> None:
        super().__init__()
        if width % config.heads:
            raise PrismError(f"width {width} is not a multiple of attention.heads = {config.heads}; change one of them")
        self.config = config
        self.width = width
        self.head_dim = width // config.heads
        self.in_proj = nn.Linear(width, 3 * width, bias=config.bias)  # rows: queries, keys, values
        self.out_proj = nn.Linear(width, width, bias=config.bias)
        self.register_buffer("random_features", None if config.kind in ("softmax", "uniform") else self._drawn(rng))
        features = self.random_features
        learned = features is not None and config.length > 0 and config.length_bound > 1
        self.length = nn.Parameter(torch.zeros(config.heads, 1, 1)) if learned else None
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def _drawn(self, rng: torch.Generator) -> Float[Tensor, "M D"]:
        draw = gaussian_features if self.config.kind == "favor_paper" else orthogonal_features
        return draw(self.config.features, self.head_dim, rng)

    def redraw(self, rng: torch.Generator) -> None:
        """Other random features, in place."""
        if self.random_features is not None:
            self.random_features.copy_(self._drawn(rng))

    def keys_values(
        self,
        context_BSW: Float[Tensor, "B S W"],
        mask_BS: Bool[Tensor, "B S"] | None = None,
        queries: int | None = None,
    ) -> KeyValues:
        """Project a context once. `queries` a context (as many as keys if None) only informs `auto`."""
        w, bias, width = self.in_proj.weight, self.in_proj.bias, self.width
        kv_BSX = F.linear(context_BSW, w[width:], None if bias is None else bias[width:])
        k_BHSD, v_BHSD = self._split(kv_BSX, 2)
        keys = int(context_BSW.shape[1])  # fixed in an export, where the number of contexts is not
        queries = keys if queries is None else queries
        kind = choose(self.config.kind, queries, keys, self.config.features, self.head_dim)
        if kind == "softmax" and 2 * keys <= self.head_dim:
            return KeyValues(kind, context_BSW.shape[0], folded=self._fold(k_BHSD, v_BHSD, mask_BS))
        return self._key_values(kind, k_BHSD, v_BHSD, mask_BS)

    def forward(
        self,
        x: Float[Tensor, "... T W"],
        kv: KeyValues | None = None,
        mask_NT: Bool[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "... T W"]:
        """Attend from x to `kv`, or, without it, inside each sequence of x (mask: which of its tokens count)."""
        if kv is None:
            length = int(x.shape[-2])
            q_BHTD, k_BHSD, v_BHSD = self._split(self.in_proj(x.reshape(-1, length, self.width)), 3)
            kind = choose(self.config.kind, length, length, self.config.features, self.head_dim)
            kv = self._key_values(kind, k_BHSD, v_BHSD, mask_NT)
        else:
            if x.numel() % (kv.contexts * self.width):
                raise ValueError(f"queries of shape {tuple(x.shape)} do not divide over {kv.contexts} contexts")
            # K candidates of a context become K * T queries: exact, because no query sees another.
            x_BTW = x.reshape(kv.contexts, -1, self.width)
            if kv.folded is not None:
                return self._attend_folded(x_BTW, kv.folded).view(x.shape)
            w, bias, width = self.in_proj.weight, self.in_proj.bias, self.width
            (q_BHTD,) = self._split(F.linear(x_BTW, w[:width], None if bias is None else bias[:width]), 1)
        out: Tensor = self.out_proj(self._attend(q_BHTD, kv).transpose(1, 2).reshape(x.shape))
        return out

    def _split(self, x_BSX: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, S, parts * W) -> parts tensors (B, H, S, D), all views."""
        batch, length, _ = x_BSX.shape
        x = x_BSX.view(batch, length, parts, self.config.heads, self.head_dim)
        return x.permute(2, 0, 3, 1, 4).unbind(0)

    def _fold(self, k_BHSD: Tensor, v_BHSD: Tensor, mask_BS: Tensor | None) -> Folded:
        batch, heads, keys, dim = k_BHSD.shape
        if mask_BS is not None:  # masked values are zero, so that a context with no key at all gives zeros
            hidden = ~mask_BS[:, None, :, None]
            k_BHSD, v_BHSD = k_BHSD.masked_fill(hidden, 0.0), v_BHSD.masked_fill(hidden, 0.0)
        k_BHSD = k_BHSD * dim**-0.5
        k_HXD, v_HXD = (x.transpose(0, 1).reshape(heads, batch * keys, dim) for x in (k_BHSD, v_BHSD))
        w_q_HDW = self.in_proj.weight[: self.width].view(heads, dim, self.width)
        w_o_HDW = self.out_proj.weight.view(self.width, heads, dim).permute(1, 2, 0)
        folded_k = torch.bmm(k_HXD, w_q_HDW).view(heads, batch, keys, self.width).permute(1, 3, 0, 2)
        folded_v = torch.bmm(v_HXD, w_o_HDW).view(heads, batch, keys, self.width).transpose(0, 1)
        if self.in_proj.bias is None:
            bias_BHS = k_BHSD.new_zeros(batch, heads, keys)
        else:
            bias_BHS = (k_BHSD * self.in_proj.bias[: self.width].view(heads, 1, dim)).sum(-1)
        if mask_BS is not None:
            bias_BHS = bias_BHS.masked_fill(~mask_BS[:, None, :], torch.finfo(bias_BHS.dtype).min)
        flat = heads * keys
        return Folded(
            folded_k.reshape(batch, self.width, flat),
            bias_BHS.reshape(batch, 1, flat),
            folded_v.reshape(batch, flat, self.width),
        )

    def _attend_folded(self, x_BTW: Tensor, folded: Folded) -> Tensor:
        logits_BTX = torch.baddbmm(folded.bias, x_BTW, folded.keys)
        shape = (*logits_BTX.shape[:2], self.config.heads, -1)
        weights_BTX = _short_softmax(logits_BTX.view(shape)).view_as(logits_BTX)
        bias = self.out_proj.bias
        if bias is None:
            return torch.bmm(weights_BTX, folded.values)
        return torch.baddbmm(bias.view(1, 1, -1), weights_BTX, folded.values)

    def _key_values(self, kind: Resolved, k_BHSD: Tensor, v_BHSD: Tensor, mask_BS: Tensor | None) -> KeyValues:
        if kind == "softmax":
            return KeyValues(kind, k_BHSD.shape[0], keys=k_BHSD, values=v_BHSD, mask=mask_BS)
        if kind == "uniform":
            return KeyValues(kind, k_BHSD.shape[0], values=_mean(v_BHSD, mask_BS))
        with torch.autocast(k_BHSD.device.type, enabled=False):  # exponentials of sums: half precision overflows
            k_BHSD = self._sized(kind, k_BHSD.float())
            linear = linear_keys(kind, k_BHSD, v_BHSD.float(), self._features(), mask_BS)
        squared = _squared_length(k_BHSD, mask_BS) if self._watches() else None
        return KeyValues(kind, k_BHSD.shape[0], linear=linear, squared=squared)

    def _attend(self, q_BHTD: Tensor, kv: KeyValues) -> Tensor:
        if kv.kind == "softmax":
            assert kv.keys is not None
            assert kv.values is not None
            return softmax_attention(q_BHTD, kv.keys, kv.values, kv.mask)
        if kv.kind == "uniform":
            assert kv.values is not None
            return kv.values.expand_as(q_BHTD)
        assert kv.linear is not None
        with torch.autocast(q_BHTD.device.type, enabled=False):
            q = self._sized(kv.kind, q_BHTD.float())
            if kv.squared is not None and self._watches():
                first = LinearKeys(kv.linear.sums[:1], None if kv.linear.values is None else kv.linear.values[:1])
                features = effective_features(kv.kind, q[:1], first, self._features())
                self.seen = (_squared_length(q, None), kv.squared, features)
            return linear_attend(kv.kind, q, kv.linear, self._features()).to(q_BHTD.dtype)

    def _sized(self, kind: Linear, x_BHTD: Tensor) -> Tensor:
        """Queries or keys, of the length that the config asks for."""
        config = self.config
        if kind != "favor" or config.length == 0:
            return x_BHTD
        if self.length is None:
            return of_length(x_BHTD, config.length)
        return of_length(x_BHTD, config.length * config.length_bound ** torch.tanh(self.length.float()))

    def _watches(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _features(self) -> Tensor:
        assert self.random_features is not None
        return self.random_features


def _mean(v_BHSD: Tensor, mask_BS: Tensor | None) -> Float[Tensor, "B H 1 D"]:
    """Over the keys where mask is True; zeros where no key is."""
    if mask_BS is None:
        return v_BHSD.mean(dim=2, keepdim=True)
    weight_BHS1 = mask_BS[:, None, :, None]
    return v_BHSD.masked_fill(~weight_BHS1, 0.0).sum(2, keepdim=True) / weight_BHS1.sum(2, keepdim=True).clamp_min(1)


@torch.no_grad()
def _squared_length(x_BHTD: Tensor, mask_BT: Tensor | None) -> Float[Tensor, ""]:
    """Mean |x~|^2 of the first context."""
    squared_HT = x_BHTD[0].square().sum(-1) * float(x_BHTD.shape[-1] ** -0.5)
    return (squared_HT if mask_BT is None else squared_HT[:, mask_BT[0]]).mean()


def _short_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, overwriting the logits. torch.softmax is slow on rows of a few entries."""
    if logits.shape[-1] > 8:
        return torch.softmax(logits, dim=-1)
    exponentials = logits.sub_(logits.detach().amax(dim=-1, keepdim=True)).exp_()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)
