"""What every method here shares: one encoder, one anchor, one normaliser; a method adds its head (Sec. 4.1).

    observation -> encoder.steps -> encoder.mix -> context (B, S, D) -> plan -> (+ anchor) -> robot units

PRISM and the baselines differ in `plan` and `loss` alone, so a comparison between them compares just that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prism.encoder import Encoder, EncoderConfig
from prism.errors import PrismError, check_numbers
from prism.io.jsonconfig import to_json
from prism.normalize import Normalizer
from prism.policy import Draw, Policy, PolicySpec
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Batch, Observation

if TYPE_CHECKING:
    from prism.methods.prism import PrismConfig


@dataclass(frozen=True)
class ContextConfig:
    """The part of a method's config that all methods share."""

    method: ClassVar[str]

    obs_horizon: int = 8  # To; paper, Sec. 5
    pred_horizon: int = 16  # Tp; paper, Sec. 5
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    anchor: str | None = None  # a vector sensor in the action's units: plans are offsets from its newest reading
    observation_noise: float = 0.0  # training: on vectors, in standard deviations

    def __post_init__(self) -> None:
        check_numbers(self, "policy", {"[1, inf)": "obs_horizon pred_horizon", "[0, inf)": "observation_noise"})

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> ContextConfig:
        """This method in a size comparable to PRISM's (tiny, base, paper), with the encoder and horizons of `prism`."""
        raise NotImplementedError

    def spec(
        self, sensors: tuple[SensorSpec, ...], action_dim: int, fps: float, action: ActionSpec | None = None
    ) -> PolicySpec:
        horizons = (self.obs_horizon, self.pred_horizon)
        return PolicySpec(self.method, to_json(self), sensors, action_dim, fps, *horizons, action or ActionSpec())


@dataclass(frozen=True)
class Method:
    """A row of the table of methods."""

    config: type[ContextConfig]
    policy: type[Policy]
    controller: tuple[str, ...] = ()  # KEY=VALUE: what it executes otherwise than PRISM

    @property
    def teacher(self) -> str | None:
        """The method of its teacher, if it is distilled."""
        return getattr(self.policy, "teacher_method", None)


@dataclass(frozen=True)
class Encoded(Draw):
    """A batch, normalised and encoded: what a loss starts from."""

    target: Float[Tensor, "B Tp Da"]
    context: Float[Tensor, "B S D"]
    anchor: Float[Tensor, "B 1 1 Da"] | None


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """For building layers: torch's initialise from the global generator, ours from the one that is given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


class ContextPolicy(Policy):
    """A method on top of the shared encoder. A subclass makes `self.encoder` and its head, within seeded(seed)."""

    config: ContextConfig
    encoder: Encoder

    def __init__(self, spec: PolicySpec, config: ContextConfig, normalizer: Normalizer) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.normalizer = normalizer
        if config.anchor is not None:
            shapes = {s.name: s.shape for s in spec.sensors if s.kind == "vector"}
            if config.anchor not in shapes or shapes[config.anchor][0] < spec.action_dim:
                raise PrismError(
                    f"anchor '{config.anchor}' must be a vector sensor of at least {spec.action_dim} values; "
                    f"the vectors are {shapes}"
                )
            if next(s for s in spec.sensors if s.name == config.anchor).steps > 1:
                raise PrismError(f"anchor '{config.anchor}' is one reading: leave its history at 0")

    @abstractmethod
    def plan(self, context: Float[Tensor, "B S D"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        """K plans per context, normalised, before the anchor is added."""

    @torch.inference_mode()
    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        return self.finish(self.plan(self.encoder(observation), candidates, rng), self.anchor(observation))

    def finish(self, plans: Float[Tensor, "B K Tp Da"], anchor: Tensor | None) -> Float[Tensor, "B K Tp Da"]:
        """Convert the output of `plan` to robot units."""
        plans = plans if anchor is None else plans + anchor
        return self.normalizer.unnormalize_actions(plans.float())

    def anchor(self, observation: Observation) -> Float[Tensor, "B 1 1 Da"] | None:
        """What a plan is added to, in normalised action space: the newest reading in the window that is present.

        0, the middle of the actions' range, if the window has none.
        """
        if self.config.anchor is None:
            return None
        stream, present = observation.streams[self.config.anchor], observation.present[self.config.anchor]
        steps = torch.arange(1, present.shape[1] + 1, device=present.device)
        newest = (present * steps).argmax(1)  # (B,)
        latest = stream[torch.arange(len(stream), device=stream.device), newest, : self.spec.action_dim].float()
        normalised = self.normalizer.normalize_actions(latest[:, None])[:, 0]
        known = present.any(1, keepdim=True)
        return torch.where(known, normalised, torch.zeros_like(normalised))[:, None, None, :]

    def draw(self, batch: Batch, rng: Random) -> Encoded:
        """Normalise, disturb (in training) and encode."""
        target = self.normalizer.normalize_actions(batch.actions)
        observation = self.encoder.drop(batch.observation, rng) if self.training else batch.observation
        anchor = self.anchor(observation)
        if self.training and self.config.observation_noise > 0:
            observation = self._disturb(observation, rng)
        return Encoded(batch, rng, target, self.encoder(observation, rng if self.training else None), anchor)

    def _disturb(self, observation: Observation, rng: Random) -> Observation:
        """Noise on every vector, in units of its standard deviation: against overfitting of small datasets."""
        streams = dict(observation.streams)
        for spec in self.spec.sensors:
            if spec.kind == "vector":
                clean = streams[spec.name].float()
                noise = rng.randn(clean.shape).to(clean.device)
                streams[spec.name] = clean + self.config.observation_noise * self.normalizer.scale(spec.name) * noise
        return Observation(streams, observation.present)


@dataclass(frozen=True)
class BaselineConfig(ContextConfig):
    """A method that models plans in its own space, where offsets from an anchor are as large as noise:

    data = (normalised actions - anchor) / offset_scale          what it models
    plan = offset_scale * data                                   what `plan` returns; the anchor is added later
    """

    width: int = 512  # D of the context: PRISM's generator.width
    offset_scale: float = 1.0  # plans are modelled in this unit of the normalised action

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, self.method, {"[1, inf)": "width", "(0, inf)": "offset_scale"})

    @classmethod
    def sized(cls, prism: PrismConfig, size: str) -> Self:
        return cls.like(prism)

    @classmethod
    def like(cls, prism: PrismConfig, **own: Any) -> Self:
        """A config whose shared part is PRISM's, field by field."""
        shared = {f.name: getattr(prism, f.name) for f in fields(ContextConfig)}
        return cls(**shared, width=prism.generator.width, **own)


class BaselinePolicy(ContextPolicy):
    config: BaselineConfig

    def data(self, draw: Encoded) -> Float[Tensor, "B Tp Da"]:
        """The target in the method's own space."""
        target = draw.target if draw.anchor is None else draw.target - draw.anchor[:, 0]
        return target / self.config.offset_scale

    def noise(self, rows: int, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        shape = (rows, candidates, self.config.pred_horizon, self.spec.action_dim)
        return rng.randn(shape).to(self.normalizer.action_center.device)

    def row_mean(self, error: Float[Tensor, "B Tp Da"], valid: Bool[Tensor, "B Tp"]) -> Float[Tensor, " B"]:
        """Mean over the valid steps of each row and the action dimensions that move: the mean of these over ranks is
        that of the global batch."""
        moves = self.normalizer.action_moves
        mask = valid.unsqueeze(-1).to(torch.float32)
        return (error.float() * (mask * moves)).sum((1, 2)) / (mask.sum((1, 2)) * moves.sum()).clamp(min=1.0)
