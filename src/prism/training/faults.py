"""What goes wrong with sensors on a robot, shown in training: chances of a sample and a sensor; text is left alone.

    step_dropout   absent at single time steps
    span_dropout   absent from a step of the window on, or until one: a sensor fails, or comes back
    frozen         one reading is repeated from a step of the window on
    occlusion      a rectangle before a camera, in its colours and its depth alike
    noise          on pixels, depth, sound and vectors

Dropout of whole windows is the encoder's (policy.encoder.dropout). No time step loses all its sensors. Like all random
numbers of a step these are a function of (seed, step) and of the row: the same in any split of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from prism.encoders.vision import camera_of
from prism.errors import check_numbers
from prism.normalize import Normalizer
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.types import Batch, Observation

_SIDES = (1 / 8, 1 / 2)  # of a picture: the shortest and the longest side of what covers it


@dataclass(frozen=True)
class RobustConfig:
    step_dropout: float = 0.0  # probabilities, each per sample and sensor
    span_dropout: float = 0.0
    frozen: float = 0.0
    occlusion: float = 0.0
    noise: float = 0.0
    noise_size: float = 0.05  # of the full scale of pixels and sound, of metres, of a vector's standard deviation
    limits: bool = False  # sensors get limits for their health from the training data (prism.experiments.robust)

    def __post_init__(self) -> None:
        check_numbers(
            self, "train.robust", {"[0, 1)": "step_dropout span_dropout frozen occlusion noise", "(0, 1]": "noise_size"}
        )

    @property
    def disturbs(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self) if f.name not in ("noise_size", "limits"))


def disturbed(
    batch: Batch, sensors: Sequence[SensorSpec], normalizer: Normalizer, config: RobustConfig, rng: Random
) -> Batch:
    """The batch as faulty sensors would have seen it; the actions stay. Streams that change are copied."""
    specs = [spec for spec in sensors if spec.kind != "text"]
    streams, rows = dict(batch.observation.streams), len(batch.actions)
    if not config.disturbs or not specs:
        return batch
    freeze = rng.rand((len(specs), rows, 2), dim=1)
    for spec, draw in zip(specs, freeze, strict=True):
        if (draw[:, 0] < config.frozen).any():
            known = batch.observation.present[spec.name]
            streams[spec.name] = _frozen(streams[spec.name], known, draw, config.frozen)
    covers = rng.rand((rows, len({camera_of(spec) for spec in specs}), 6))
    cameras = {name: number for number, name in enumerate(dict.fromkeys(camera_of(spec) for spec in specs))}
    for spec in specs:
        draw = covers[:, cameras[camera_of(spec)]]
        if spec.kind in ("rgb", "depth") and (draw[:, 0] < config.occlusion).any():
            streams[spec.name] = _covered(streams[spec.name], spec, draw, config.occlusion)
    noisy = rng.rand((len(specs), rows), dim=1) < config.noise
    seeds = rng.randint(2**31 - 1, (len(specs), rows), dim=1)
    for spec, hits, own in zip(specs, noisy, seeds, strict=True):
        if hits.any():
            streams[spec.name] = _noisy(streams[spec.name], spec, hits, own, normalizer, config.noise_size)
    present = {**batch.observation.present, **_dropped(batch.observation, specs, config, rng)}
    return replace(batch, observation=Observation(streams, present))


def _dropped(
    observation: Observation, specs: Sequence[SensorSpec], config: RobustConfig, rng: Random
) -> dict[str, Bool[Tensor, "B To"]]:
    present = torch.stack([observation.present[spec.name] for spec in specs])  # (M, B, To)
    shape, device = present.shape, present.device
    there = present.cpu()
    alone = rng.rand(shape, dim=1)  # (M, B, To)
    span = rng.rand((*shape[:2], 3), dim=1)
    steps = torch.arange(shape[2])
    at = (span[..., 1:2] * shape[2]).long()
    away = torch.where(span[..., 2:] < 0.5, steps >= at, steps <= at) & (span[..., :1] < config.span_dropout)
    keep = there & ~away & (alone >= config.step_dropout)
    lost = ~keep.any(0)  # (B, To): there the sensor with the luckiest draw stays, of those that are there
    luckiest = alone.masked_fill(~there, -1.0).argmax(0)
    spared = torch.nn.functional.one_hot(luckiest, shape[0]).permute(2, 0, 1).bool()
    keep |= spared & lost & there
    return {spec.name: mask for spec, mask in zip(specs, keep.to(device), strict=True)}


def _frozen(stream: Tensor, present: Tensor, draws: Tensor, chance: float) -> Tensor:
    """draws (B, 2): whether, and the step from which on its reading is repeated, if it has one."""
    stream, steps = stream.clone(), stream.shape[1]
    for row in torch.nonzero(draws[:, 0] < chance)[:, 0].tolist():
        at = int(draws[row, 1] * steps)
        if present[row, at]:
            stream[row, at + 1 :] = stream[row, at].clone()
    return stream


def _covered(stream: Tensor, spec: SensorSpec, draws: Tensor, chance: float) -> Tensor:
    """draws (B, 6): whether, height, width, top, left, brightness. Depth: nothing is measured there."""
    stream, sides = stream.clone(), torch.tensor(stream.shape[2:4])
    for row in torch.nonzero(draws[:, 0] < chance)[:, 0].tolist():
        lengths = (sides * (_SIDES[0] + (_SIDES[1] - _SIDES[0]) * draws[row, 1:3])).round().long()
        top, left = (draws[row, 3:5] * (sides - lengths + 1)).long().tolist()
        bottom, right = top + int(lengths[0]), left + int(lengths[1])
        stream[row, :, top:bottom, left:right] = 0.0 if spec.kind == "depth" else int(255 * draws[row, 5])
    return stream


def _noisy(
    stream: Tensor, spec: SensorSpec, hits: Tensor, seeds: Tensor, normalizer: Normalizer, size: float
) -> Tensor:
    """Each row from a seed of its own: noise for the few that get it."""
    stream = stream.clone()
    for row in torch.nonzero(hits)[:, 0].tolist():
        clean = stream[row]
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(int(seeds[row]))).to(clean.device)
        if spec.dtype.kind == "u":
            stream[row] = (clean.float() + 255 * size * noise).round().clamp(0, 255).to(clean.dtype)
        elif spec.kind == "depth":
            stream[row] = torch.where(clean > 0, (clean + size * noise).clamp(min=1e-3), clean)
        else:
            stream[row] = clean + size * noise * (normalizer.scale(spec.name) if spec.kind == "vector" else 1.0)
    return stream
