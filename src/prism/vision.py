"""Convolutional networks for image sensors (paper, App. A.2), and the preparation of pixels on the device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.errors import PrismError
from prism.sensors import SensorSpec


def prepare_image(pixels: Tensor, spec: SensorSpec, rng: torch.Generator | None) -> Float[Tensor, "N C H W"]:
    """uint8 (N, H, W, C) -> float in [0, 1], resized as the spec says; randomly shifted when `rng` is given."""
    image = pixels.movedim(-1, 1).float() / 255.0
    if spec.resize is not None and tuple(image.shape[-2:]) != spec.resize:
        image = F.interpolate(image, spec.resize, mode="bilinear", antialias=True)
    if rng is not None and spec.random_shift:
        image = random_shift(image, spec.random_shift, rng)
    return image.contiguous(memory_format=torch.channels_last)


def random_shift(image: Float[Tensor, "N C H W"], pixels: int, rng: torch.Generator) -> Float[Tensor, "N C H W"]:
    """Pad by repeating the border and crop back at a random place, one shift an image."""
    n, _, height, width = image.shape
    padded = F.pad(image, (pixels,) * 4, mode="replicate")
    offset = torch.randint(0, 2 * pixels + 1, (2, n), generator=rng).to(image.device)
    rows = offset[0, :, None] + torch.arange(height, device=image.device)  # (N, H)
    columns = offset[1, :, None] + torch.arange(width, device=image.device)  # (N, W)
    batch = torch.arange(n, device=image.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // 16), channels)  # as Diffusion Policy: BatchNorm and EMA do not mix


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = _group_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = _group_norm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), _group_norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's parameter names, GroupNorm for BatchNorm, a linear projection for its last layer.

    `weights`: a safetensors file with torchvision's names; convolutions and normalisation scales are loaded.
    """

    def __init__(self, features: int, channels_in: int = 3, weights: str | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, 64, 7, 2, 3, bias=False)
        self.bn1 = _group_norm(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.project = nn.Linear(512, features)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if weights is not None:
            self._load(Path(weights))

    def _load(self, path: Path) -> None:
        from safetensors.torch import load_file

        try:
            stored = load_file(path)
        except Exception as error:  # safetensors raises its own kinds for a missing, cut or foreign file
            raise PrismError(
                f"{path}: cannot be read as safetensors ({error}); save torchvision's weights there"
            ) from error
        own = {k: v for k, v in self.state_dict().items() if not k.startswith("project")}
        for name, value in own.items():
            if name not in stored or stored[name].shape != value.shape:
                raise PrismError(f"{path}: key '{name}' is missing or not of shape {tuple(value.shape)}")
        self.load_state_dict({name: stored[name] for name in own}, strict=False)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.project(x.mean((2, 3)))
        return y


class SmallCNN(nn.Module):
    """Four convolutions and a spatial softmax: where each feature is in the picture. Learns on a CPU in minutes."""

    def __init__(self, features: int, size: tuple[int, int], channels_in: int = 3) -> None:
        super().__init__()
        if min(size) < 16:
            raise PrismError(
                f"images of {size[0]}x{size[1]} are too small for the 'small' backbone; use at least 16x16"
            )
        widths = (channels_in, 32, 48, 64, 64)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 5 if i == 0 else 3, 2 if i < 3 else 1, 2 if i == 0 else 1)]
            layers += [nn.GroupNorm(after // 16, after), nn.GELU()]
        self.convolutions = nn.Sequential(*layers)
        self.project = nn.Linear(3 * widths[-1], features)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        maps = self.convolutions(x)  # (N, C, h, w)
        height, width = maps.shape[-2:]
        weight = maps.flatten(2).softmax(-1).unflatten(2, (height, width))
        rows = torch.linspace(-1, 1, height, device=x.device)
        columns = torch.linspace(-1, 1, width, device=x.device)
        row = torch.einsum("nchw,h->nc", weight, rows)
        column = torch.einsum("nchw,w->nc", weight, columns)
        y: Tensor = self.project(torch.cat([row, column, maps.mean((2, 3))], dim=1))
        return y
