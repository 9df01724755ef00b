"""PRISM itself: encoder, generator and objective behind the two verbs (Sec. 4, Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encoder import Encoder, EncoderConfig
from prism.errors import PrismError
from prism.generator import Generator, GeneratorConfig, Prepared
from prism.jsonconfig import from_json, to_json
from prism.normalize import Normalizer
from prism.objective import RSIMLE, ObjectiveConfig
from prism.policy import LossOutput, Policy, PolicySpec
from prism.sensors import SensorSpec
from prism.types import Batch, Observation


@dataclass(frozen=True)
class PrismConfig:
    obs_horizon: int = 8  # To; paper, Sec. 5
    pred_horizon: int = 16  # Tp; paper, Sec. 5
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    anchor: str | None = None  # a vector sensor in the action's units: plans are offsets from its latest value

    def __post_init__(self) -> None:
        if self.obs_horizon < 1 or self.pred_horizon < 1:
            raise PrismError(f"obs_horizon {self.obs_horizon} and pred_horizon {self.pred_horizon} must be at least 1")
        if self.pred_horizon % self.generator.actions_per_query:
            raise PrismError(
                f"pred_horizon {self.pred_horizon} is not a multiple of "
                f"generator.actions_per_query {self.generator.actions_per_query}"
            )

    def spec(self, sensors: tuple[SensorSpec, ...], action_dim: int, fps: float) -> PolicySpec:
        return PolicySpec("prism", to_json(self), sensors, action_dim, fps, self.obs_horizon, self.pred_horizon)


class PrismPolicy(Policy):
    def __init__(self, spec: PolicySpec, normalizer: Normalizer, seed: int = 0) -> None:
        super().__init__()
        config = from_json(PrismConfig, spec.config)
        self.spec = spec
        self.config = config
        self.normalizer = normalizer
        rng = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise from the global generator
            torch.manual_seed(seed)
            width = config.generator.width
            self.encoder = Encoder(config.encoder, spec.sensors, config.obs_horizon, width, normalizer)
            self.generator = Generator(config.generator, config.pred_horizon, spec.action_dim, rng)
        self.objective = RSIMLE(config.objective, spec.action_dim)
        self.objective.set_action_std(normalizer.action_std)
        if config.anchor is not None:
            shapes = {s.name: s.shape for s in spec.sensors if s.kind == "vector"}
            if config.anchor not in shapes or shapes[config.anchor][0] < spec.action_dim:
                raise PrismError(
                    f"anchor '{config.anchor}' must be a vector sensor of at least {spec.action_dim} values; "
                    f"the vectors are {shapes}"
                )

    def _anchor(self, observation: Observation) -> Float[Tensor, "B 1 1 Da"] | None:
        """The latest anchor in normalised action space: what the generator's output is added to."""
        if self.config.anchor is None:
            return None
        latest = observation.streams[self.config.anchor][:, -1, : self.spec.action_dim].float()
        present = observation.present[self.config.anchor][:, -1:]
        normalised = self.normalizer.normalize_actions(latest)
        return torch.where(present, normalised, torch.zeros_like(normalised))[:, None, None, :]

    def _generate(self, prepared: Prepared, latent: Tensor, anchor: Tensor | None) -> Float[Tensor, "B K Tp Da"]:
        actions: Tensor = self.generator(prepared, latent)
        return actions if anchor is None else actions + anchor

    def latents(self, batch: int, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Z"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        device = self.normalizer.action_center.device
        return torch.randn(batch, candidates, self.config.generator.latent, generator=rng).to(device)

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        """Alg. 1: draw K without gradient, choose, draw the chosen ones again with gradient.

        The gradient reaches only the chosen candidates, so it equals that of back-propagating all K (a test
        shows it) at a fraction of the time and memory.
        """
        target = self.normalizer.normalize_actions(batch.actions)
        anchor = self._anchor(batch.observation)
        context = self.encoder(batch.observation, rng if self.training else None)
        prepared = self.generator.prepare(context)
        latent = self.latents(target.shape[0], self.config.objective.candidates, rng)
        with torch.no_grad():
            candidates = self._generate(prepared, latent, anchor)
            choice = self.objective.choose(candidates, target, batch.action_valid, update=self.training)
        index = choice.index.unsqueeze(-1).expand(-1, -1, latent.shape[-1])
        chosen = self._generate(prepared, latent.gather(1, index), anchor)
        loss, parts = self.objective.loss(chosen, choice, target, batch.action_valid)
        return LossOutput(loss, {**parts, **choice.logs})

    @torch.inference_mode()
    def sample(self, observation: Observation, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Tp Da"]:
        prepared = self.generator.prepare(self.encoder(observation))
        latent = self.latents(observation.batch_size, candidates, rng)
        actions = self._generate(prepared, latent, self._anchor(observation))
        return self.normalizer.unnormalize_actions(actions.float())
