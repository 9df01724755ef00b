"""ACT (Zhao et al. 2023): a transformer that answers in one pass, trained as a conditional VAE.

    training   [CLS, context, actions] -> style encoder -> N(mu, sigma^2) -> z
    always     [z, context tokens] -> encoder -> memory;   Tp queries -> decoder -> actions
    loss = L1 + kl_weight KL(N(mu, sigma^2) | N(0, I))

In use z = 0, the mean of the prior, so all K plans are one plan. Its other half, temporal ensembling over overlapping
plans, is the controller's (`ensemble`). Post-norm blocks with ReLU; dropout on the two residual branches, not inside
attention; positions are learned, not sinusoidal, and added once, at the input; no norm after the decoder: else as
published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.attention import Attention, AttentionConfig
from prism.encoder import Encoder
from prism.errors import PrismError, check_numbers
from prism.io.jsonconfig import from_json
from prism.methods.base import BaselineConfig, BaselinePolicy, Encoded, Method, seeded
from prism.normalize import Normalizer
from prism.policy import LossOutput, PolicySpec
from prism.rows import Random

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig


@dataclass(frozen=True)
class ActConfig(BaselineConfig):
    method: ClassVar[str] = "act"

    heads: int = 8
    feedforward: int = 3200  # published
    style_layers: int = 4
    encoder_layers: int = 4
    decoder_layers: int = 1  # published: 7, of which only the first was used
    latent: int = 32
    kl_weight: float = 10.0  # published
    dropout: float = 0.1  # published

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        own = {} if size == "paper" else {"feedforward": int(prism.generator.mlp_ratio * prism.generator.width)}
        if size == "tiny":
            own |= {"style_layers": 2, "encoder_layers": 2, "latent": 16}
        return cls.like(prism, heads=prism.generator.attention.heads, **own)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = "heads feedforward style_layers encoder_layers decoder_layers latent"
        check_numbers(self, "act", {"[1, inf)": sizes, "[0, inf)": "kl_weight", "[0, 1)": "dropout"})
        if self.width % self.heads:
            raise PrismError(f"act: width {self.width} must be a multiple of heads {self.heads}")


class Layer(nn.Module):
    """Post-norm: self-attention, cross-attention to a memory where there is one, MLP."""

    def __init__(self, config: ActConfig, rng: torch.Generator, cross: bool = False) -> None:
        super().__init__()
        attention = AttentionConfig(kind="softmax", heads=config.heads)
        self.dropout = config.dropout
        self.self_attention = Attention(config.width, attention, rng)
        self.cross_attention = Attention(config.width, attention, rng) if cross else None
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.feedforward), nn.ReLU(), nn.Linear(config.feedforward, config.width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3 if cross else 2))

    def forward(
        self, x: Tensor, rng: Random | None, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = self.norms[0](x + self._drop(self.self_attention(x, None, mask), rng))
        if self.cross_attention is not None:
            assert memory is not None
            x = self.norms[1](x + self._drop(self.cross_attention(x, self.cross_attention.keys_values(memory)), rng))
        y: Tensor = self.norms[-1](x + self._drop(self.mlp(x), rng))
        return y

    def _drop(self, x: Tensor, rng: Random | None) -> Tensor:
        if rng is None or self.dropout == 0:
            return x
        keep = rng.rand(x.shape).to(x.device) >= self.dropout
        return x * keep / (1.0 - self.dropout)


class ActPolicy(BaselinePolicy):
    config: ActConfig

    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        config = from_json(ActConfig, spec.config)
        super().__init__(spec, config, normalizer)
        width, horizon = config.width, config.pred_horizon
        with seeded(seed) as rng:
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, width, normalizer)
            self.style_action = nn.Linear(spec.action_dim, width)
            self.style_start = nn.Parameter(torch.randn(horizon + 2, width, generator=rng) * 0.5)  # CLS and positions
            self.style = nn.ModuleList(Layer(config, rng) for _ in range(config.style_layers))
            self.style_out = nn.Linear(width, 2 * config.latent)
            self.latent = nn.Linear(config.latent, width)
            self.position = nn.Parameter(torch.randn(self.encoder.tokens + 1, width, generator=rng) * 0.02)
            self.encode = nn.ModuleList(Layer(config, rng) for _ in range(config.encoder_layers))
            self.queries = nn.Parameter(torch.randn(horizon, width, generator=rng) * 0.5)
            self.decode = nn.ModuleList(Layer(config, rng, cross=True) for _ in range(config.decoder_layers))
            self.head = nn.Linear(width, spec.action_dim)

    def style_of(
        self,
        data: Float[Tensor, "B Tp Da"],
        valid: Bool[Tensor, "B Tp"],
        context: Float[Tensor, "B S D"],
        rng: Random | None,
    ) -> tuple[Float[Tensor, "B Z"], Float[Tensor, "B Z"]]:
        """Mean and log-variance of z given the demonstration; padded actions are not looked at."""
        summary = context.mean(1, keepdim=True)
        actions = self.style_action(data.masked_fill(~valid.unsqueeze(-1), 0.0))
        x = torch.cat([torch.zeros_like(summary), summary, actions], dim=1) + self.style_start
        mask = torch.cat([valid.new_ones(len(valid), 2), valid], dim=1)
        for layer in self.style:
            x = layer(x, rng, mask=mask)
        mean, log_variance = self.style_out(x[:, 0]).float().chunk(2, dim=1)
        return mean, log_variance

    def actions(
        self, latent: Float[Tensor, "B Z"], context: Float[Tensor, "B S D"], rng: Random | None
    ) -> Float[Tensor, "B Tp Da"]:
        memory = torch.cat([self.latent(latent).unsqueeze(1), context], dim=1) + self.position
        for layer in self.encode:
            memory = layer(memory, rng)
        x = self.queries.expand(len(context), -1, -1)
        for layer in self.decode:
            x = layer(x, rng, memory)
        plan: Tensor = self.head(x)
        return plan.float()

    def loss(self, draw: Encoded, choice: None = None) -> LossOutput:
        data, dropout = self.data(draw), draw.rng if self.training else None
        mean, log_variance = self.style_of(data, draw.batch.action_valid, draw.context, dropout)
        latent = mean + (0.5 * log_variance).exp() * draw.rng.randn(mean.shape).to(mean.device)
        plan = self.actions(latent, draw.context, dropout)
        error = self.row_mean(F.l1_loss(plan, data, reduction="none"), draw.batch.action_valid).mean()
        kl = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        logs = {"l1": error.detach(), "kl": kl.detach()}
        return LossOutput(error + self.config.kl_weight * kl, logs)

    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        plan = self.actions(context.new_zeros(len(context), self.config.latent), context, None)
        return self.config.offset_scale * plan.unsqueeze(1).expand(-1, candidates, -1, -1)


METHOD = Method(
    ActConfig,
    ActPolicy,  # temporal ensembling; one plan is all there is to choose from
    controller=("candidates=1", "exec_horizon=1", "ensemble=0.01", "selection.rule=first"),
)
