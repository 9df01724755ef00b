"""PRISM itself: encoder, generator and objective behind the two verbs (Sec. 4, Alg. 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prism import draws
from prism.encoder import Encoder, EncoderConfig
from prism.errors import PrismError
from prism.generator import Generator, GeneratorConfig, Prepared
from prism.jsonconfig import ADDED_LATER, from_json, to_json
from prism.normalize import Normalizer
from prism.objective import RSIMLE, Crowd, Distances, ObjectiveConfig
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
    observation_noise: float = field(default=0.0, metadata=ADDED_LATER)  # training: on vectors, in standard deviations

    def __post_init__(self) -> None:
        if self.observation_noise < 0:
            raise PrismError(f"observation_noise is {self.observation_noise}; it must be 0 or more")
        if self.obs_horizon < 1 or self.pred_horizon < 1:
            raise PrismError(f"obs_horizon {self.obs_horizon} and pred_horizon {self.pred_horizon} must be at least 1")
        if self.pred_horizon % self.generator.actions_per_query:
            raise PrismError(
                f"pred_horizon {self.pred_horizon} is not a multiple of "
                f"generator.actions_per_query {self.generator.actions_per_query}"
            )

    def spec(self, sensors: tuple[SensorSpec, ...], action_dim: int, fps: float) -> PolicySpec:
        return PolicySpec("prism", to_json(self), sensors, action_dim, fps, self.obs_horizon, self.pred_horizon)


@dataclass(frozen=True)
class Draft:
    """What Alg. 1 has of some rows before it chooses among their candidates."""

    target: Float[Tensor, "B Tp Da"]
    prepared: Prepared
    latent: Float[Tensor, "B K Z"]
    anchor: Float[Tensor, "B 1 1 Da"] | None


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

    def _disturb(self, observation: Observation, rng: torch.Generator) -> Observation:
        """Noise on every vector, in units of its standard deviation: a small dataset is soon known by heart."""
        streams = dict(observation.streams)
        for spec in self.spec.sensors:
            if spec.kind == "vector":
                clean = streams[spec.name].float()
                noise = draws.randn(clean.shape, rng).to(clean.device)
                streams[spec.name] = clean + self.config.observation_noise * self.normalizer.scale(spec.name) * noise
        return Observation(streams, observation.present)

    def _generate(self, prepared: Prepared, latent: Tensor, anchor: Tensor | None) -> Float[Tensor, "B K Tp Da"]:
        actions: Tensor = self.generator(prepared, latent)
        return actions if anchor is None else actions + anchor

    def latents(self, batch: int, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Z"]:
        """Drawn on the CPU, so that a seed means the same on every device."""
        device = self.normalizer.action_center.device
        return draws.randn((batch, candidates, self.config.generator.latent), rng).to(device)

    def loss(self, batch: Batch, rng: torch.Generator) -> LossOutput:
        """Alg. 1: draw K without gradient, choose, draw the chosen ones again with gradient.

        The gradient reaches only the chosen candidates, so it equals that of back-propagating all K (a test
        shows it) at a fraction of the time and memory.
        """
        return next(self.losses([batch], rng))

    def losses(self, parts: Sequence[Batch], rng: torch.Generator) -> Iterator[LossOutput]:
        """Alg. 1 on a batch in parts: measure all of them, move the threshold, then train the chosen ones of each.

        Several parts are encoded twice, the first time without gradient: only distances outlive the measuring.
        """
        single = len(parts) == 1
        begin = rng.get_state()
        crowd = self._crowd(parts)
        measured: list[Distances] = []
        for part in parts:
            rng.set_state(begin)
            with torch.set_grad_enabled(single and torch.is_grad_enabled()):
                draft = self._draft(part, rng)
            with torch.no_grad():
                candidates = self._generate(draft.prepared, draft.latent, draft.anchor)
                measured.append(self.objective.measure(candidates, draft.target, part.action_valid, crowd, part.share))
        if self.training:
            self.objective.calibrate(measured, parts[0].share)
        for part, distances in zip(parts, measured, strict=True):
            if not single:
                rng.set_state(begin)
                draft = self._draft(part, rng)
            choice = self.objective.decide(distances)
            index = choice.index.unsqueeze(-1).expand(-1, -1, draft.latent.shape[-1])
            chosen = self._generate(draft.prepared, draft.latent.gather(1, index), draft.anchor)
            loss, terms = self.objective.loss(chosen, choice, draft.target, part.action_valid)
            yield LossOutput(loss, {**terms, **choice.logs})

    def _draft(self, batch: Batch, rng: torch.Generator) -> Draft:
        rng = draws.for_rows(rng, batch)
        target = self.normalizer.normalize_actions(batch.actions)
        observation = self.encoder.drop(batch.observation, rng) if self.training else batch.observation
        anchor = self._anchor(observation)
        if self.training and self.config.observation_noise > 0:
            observation = self._disturb(observation, rng)
        context = self.encoder(observation, rng if self.training else None)
        prepared = self.generator.prepare(context)
        latent = self.latents(target.shape[0], self.config.objective.candidates, rng)
        return Draft(target, prepared, latent, anchor)

    def _crowd(self, parts: Sequence[Batch]) -> Crowd | None:
        """The targets of the global batch, where these rows are not all of it."""
        share = parts[0].share
        if share is None or not self.objective.needs_crowd:
            return None
        target = torch.cat([self.normalizer.normalize_actions(part.actions) for part in parts])
        return self.objective.gather(target, torch.cat([part.action_valid for part in parts]), share)

    @torch.inference_mode()
    def sample(self, observation: Observation, candidates: int, rng: torch.Generator) -> Float[Tensor, "B K Tp Da"]:
        prepared = self.generator.prepare(self.encoder(observation))
        latent = self.latents(observation.batch_size, candidates, rng)
        actions = self._generate(prepared, latent, self._anchor(observation))
        return self.normalizer.unnormalize_actions(actions.float())
