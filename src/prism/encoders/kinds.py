"""One encoder for each kind of sensor (paper, App. A.2): one time step -> features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.encoders.vision import Drawn, NormKind, ResNet18, Shift, SmallCNN, draw_shift, prepare_image
from prism.normalize import Normalizer
from prism.rows import Random
from prism.sensors import SensorSpec

Prepare = Callable[[Tensor, SensorSpec, Shift], Tensor]


class SensorEncoder(nn.Module, ABC):
    """One sensor, one time step: (N, ...) -> features (N, d_m). Absence is handled here, for every kind alike."""

    def __init__(self, spec: SensorSpec, features: int) -> None:
        super().__init__()
        self.spec = self.moved = spec  # `moved`: by which its pictures are shifted in training
        self.features = features
        self.absent = nn.Parameter(torch.randn(features, generator=torch.Generator().manual_seed(0)) * 0.02)

    @abstractmethod
    def encode(self, stream: Tensor, shift: Shift) -> Float[Tensor, "N F"]:
        """`shift` is given in training only, to sensors with a random_shift."""

    def forward(
        self,
        stream: Tensor,
        present: Bool[Tensor, " N"],
        rng: Random | None,
        drawn: dict[str, Drawn] | None = None,
    ) -> Float[Tensor, "N F"]:
        """`drawn`: the shifts of each camera in this batch, shared by its pictures."""
        shift = draw_shift(len(stream), self.moved, rng, drawn)  # for all: one's does not depend on the others
        if bool(present.all()):
            return self.encode(stream, shift)
        features = self.absent.expand(present.shape[0], -1)
        if bool(present.any()):  # what is absent may hold anything, NaN included: never let it in
            rows = present.nonzero().squeeze(1)
            moved = None if shift is None else shift[:, rows.cpu()]
            features = features.index_copy(0, rows, self.encode(stream[rows], moved).to(features.dtype))
        return features


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """One hidden layer, or none."""
    if hidden == 0:
        return nn.Linear(inputs, outputs)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class VectorEncoder(SensorEncoder):
    """Vectors (proprioception, object state, force and torque), z-normalised with the training statistics: an MLP."""

    def __init__(self, spec: SensorSpec, hidden: int, features: int, normalizer: Normalizer) -> None:
        super().__init__(spec, features)
        self.normalizer = [normalizer]  # in a list: shared, not a submodule twice
        self.mlp = mlp(spec.steps * spec.shape[0], hidden, features)

    def encode(self, stream: Tensor, shift: Shift) -> Tensor:
        x: Tensor = self.mlp(self.normalizer[0].normalize_vector(self.spec.name, stream.float()).flatten(1))
        return x


class NetworkEncoder(SensorEncoder):
    """Images, sound and text: a network on what `prepare` makes of the readings; without it, on the readings."""

    def __init__(self, spec: SensorSpec, features: int, network: nn.Module, prepare: Prepare | None = None) -> None:
        super().__init__(spec, features)
        self.backbone, self.prepare = network, prepare

    def encode(self, stream: Tensor, shift: Shift) -> Tensor:
        steps = self.spec.steps
        if steps > 1:  # readings of a history: one after the other, pictures as channels
            stream = stream.flatten(0, 1) if self.prepare is not None else stream.flatten(1)
            shift = None if shift is None else shift.repeat_interleave(steps, dim=1)
        if self.prepare is not None:
            stream = self.prepare(stream, self.spec, shift)
            stream = stream.reshape(-1, steps * stream.shape[1], *stream.shape[2:]) if steps > 1 else stream
        x: Tensor = self.backbone(stream)
        return x


class RgbEncoder(NetworkEncoder):
    """RGB: uint8 until here, cut and resized, to [0, 1], through a convolutional network."""

    def __init__(
        self, spec: SensorSpec, small: bool, features: int, norm: NormKind, weights: str | None, focus: float
    ) -> None:
        network = (
            SmallCNN(features, spec.picture_size, focus=focus)
            if small
            else ResNet18(features, norm, standardise=weights is not None)
        )
        super().__init__(spec, features, network, prepare_image)
        self.weights = weights

    def load_pretrained(self) -> None:
        if self.weights is not None and isinstance(self.backbone, ResNet18):
            self.backbone.load_pretrained(Path(self.weights))
