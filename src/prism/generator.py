"""Sec. 4.2: learned queries and a latent become a whole action sequence in one pass.

    x = queries + positions + W_z z (+ W_c mean(context))      (B, K, Q, D)
    L times:  x += SelfAttention(x);  x += CrossAttention(x, context);  x += MLP(x)
    actions = W_a x                                            (B, K, Tp, Da), normalised

Attention is bidirectional. A query stands for `actions_per_query` consecutive actions (1 in the paper). `prepare`
computes the keys and values of the context in every block once; the K candidates share them. With `smooth` = w > 0
a plan is the least jerky one near the answers u,

    plan = argmin_a |a - u|^2 + w |third differences of a|^2 = (1 + w D'D)^-1 u

a fixed linear map, so the network learns through it: what it leaves of a plan is motion, not the error of each answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.attention import Attention, AttentionConfig, KeyValues
from prism.errors import PrismError, check_numbers


@dataclass(frozen=True)
class GeneratorConfig:
    width: int = 512  # D; paper
    blocks: int = 6  # L; paper, App. A.2
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(kind="auto", heads=8))
    latent: int = 32  # Z; not given in the paper
    mlp_ratio: float = 4.0
    actions_per_query: int = 1  # paper: one query an action
    smooth: float = 0.0  # ours: weight of a plan's jerk; 0: the answers as they are, as the paper
    context_in_queries: bool = True  # ours: the queries start from the context; False is the paper's
    query_scale: float = 0.5  # ours: queries that start small are hard to tell apart for a long time

    def __post_init__(self) -> None:
        numbers = {"[1, inf)": "width blocks latent actions_per_query", "(0, inf)": "mlp_ratio", "[0, inf)": "smooth"}
        check_numbers(self, "generator", numbers)
        if self.width % self.attention.heads:
            raise PrismError(f"generator.width {self.width} is not a multiple of the {self.attention.heads} heads")


@dataclass(frozen=True)
class Prepared:
    """Keys and values of a batch of contexts, computed once for any number of candidates."""

    keys_values: tuple[KeyValues, ...]  # one a block
    start: Float[Tensor, "B 1 Q D"]  # queries, positions and context


class Block(nn.Module):
    """Pre-norm transformer block: self-attention, cross-attention, MLP."""

    def __init__(self, config: GeneratorConfig, rng: torch.Generator) -> None:
        super().__init__()
        width, hidden = config.width, int(config.width * config.mlp_ratio)
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, config.attention, rng)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, config.attention, rng)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Float[Tensor, "B K Q D"], kv: KeyValues) -> Float[Tensor, "B K Q D"]:
        x = x + self.self_attention(self.self_norm(x))
        x = x + self.cross_attention(self.cross_norm(x), kv)
        y: Tensor = x + self.mlp(x)
        return y


class Generator(nn.Module):
    smooth: Tensor | None

    def __init__(self, config: GeneratorConfig, pred_horizon: int, action_dim: int, rng: torch.Generator) -> None:
        super().__init__()
        if pred_horizon % config.actions_per_query:
            raise PrismError(
                f"pred_horizon {pred_horizon} is not a multiple of "
                f"generator.actions_per_query {config.actions_per_query}"
            )
        self.config = config
        self.pred_horizon = pred_horizon
        self.action_dim = action_dim
        self.count = pred_horizon // config.actions_per_query
        width = config.width
        self.queries = nn.Parameter(torch.randn(self.count, width, generator=rng) * config.query_scale)
        self.position = nn.Parameter(torch.randn(self.count, width, generator=rng) * 0.02)
        self.latent = nn.Linear(config.latent, width)
        self.context = nn.Linear(width, width) if config.context_in_queries else None
        self.blocks = nn.ModuleList(Block(config, rng) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.actions_per_query * action_dim)
        self.register_buffer(
            "smooth", smoother(pred_horizon, config.smooth) if config.smooth else None, persistent=False
        )

    def prepare(self, context: Float[Tensor, "B S D"]) -> Prepared:
        start = (self.queries + self.position).expand(context.shape[0], 1, -1, -1)
        if self.context is not None:
            start = start + self.context(context.mean(1))[:, None, None, :]
        # The kernel is chosen for one candidate's queries, so that drawing K and training C of them agree.
        kvs = tuple(b.cross_attention.keys_values(context, queries=self.count) for b in self.blocks)  # type: ignore[operator,union-attr]
        return Prepared(kvs, start)

    def redraw(self, rng: torch.Generator) -> None:
        """Draw new random features in every layer."""
        for layer in self.modules():
            if isinstance(layer, Attention):
                layer.redraw(rng)

    def attention_logs(self) -> dict[str, Tensor]:
        """Linear attention in training: the largest mean |q~|^2 and |k~|^2 of any layer, the fewest effective features.

        If lengths diverge, the gradient's norm (logged as gradient_norm) grows with them, and the loss.
        """
        seen = [layer.seen for layer in self.modules() if isinstance(layer, Attention) and layer.seen is not None]
        if not seen:
            return {}
        queries, keys, features = (torch.stack(values) for values in zip(*seen, strict=True))
        return {
            "attention_q_squared": queries.max(),
            "attention_k_squared": keys.max(),
            "attention_features": features.min(),
        }

    def forward(self, prepared: Prepared, latent: Float[Tensor, "B K Z"]) -> Float[Tensor, "B K Tp Da"]:
        x = prepared.start + self.latent(latent).unsqueeze(2)  # (B, K, Q, D)
        for block, kv in zip(self.blocks, prepared.keys_values, strict=True):
            x = block(x, kv)
        actions: Tensor = self.head(self.norm(x))  # (B, K, Q, actions_per_query * Da)
        actions = actions.reshape(*latent.shape[:2], self.pred_horizon, self.action_dim)
        return actions if self.smooth is None else self.smooth @ actions


def smoother(steps: int, weight: float) -> Float[Tensor, "Tp Tp"]:
    """(1 + w D'D)^-1 with D the third differences within a plan; motion with constant acceleration is unchanged."""
    third = torch.diff(torch.eye(steps, dtype=torch.float64), n=3, dim=0)
    inverse: Tensor = torch.linalg.inv(torch.eye(steps, dtype=torch.float64) + weight * third.T @ third)
    return inverse.float()
