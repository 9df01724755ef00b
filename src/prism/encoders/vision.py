"""Convolutional networks for image sensors (paper, App. A.2), and the preparation of pixels on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.errors import PrismError
from prism.rows import Random
from prism.sensors import SensorSpec

Shift = Int[Tensor, "2 N"] | None  # pixels down and to the right, an image
Drawn = tuple[Tensor, tuple[int, ...]]  # shifts, and height and width of the picture that they were drawn for
NormKind = Literal["group", "frozen_batch"]
# What torchvision's weights were trained with: mean and standard deviation of ImageNet's pixels in [0, 1].
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def prepare_image(pixels: Tensor, spec: SensorSpec, shift: Shift = None) -> Float[Tensor, "N C H W"]:
    """uint8 (N, H, W, C) -> float in [0, 1], cut and resized as the spec says; moved by `shift`."""
    image = cut(pixels, spec, shift).permute(0, 3, 1, 2).float() / 255.0
    if tuple(image.shape[-2:]) != spec.picture_size:
        image = _shrink(image, spec.picture_size)
    return image.contiguous(memory_format=torch.channels_last)


def prepare_depth(metres: Tensor, spec: SensorSpec, shift: Shift = None) -> Float[Tensor, "N 1 H W"]:
    """float32 (N, H, W) -> metres, clipped as the spec says; 0 where nothing was measured, NaN included.

    Resized by the nearest pixel: between the hand and the wall behind it there is nothing to interpolate.
    """
    depth = cut(metres.unsqueeze(-1), spec, shift).permute(0, 3, 1, 2).float()
    if tuple(depth.shape[-2:]) != spec.picture_size:
        depth = _nearest(depth, spec.picture_size)
    measured = depth.isfinite() & (depth > 0)
    if spec.clip is not None:
        depth = depth.clamp(*spec.clip)
    return torch.where(measured, depth, torch.zeros_like(depth))


def camera_of(spec: SensorSpec) -> str:
    """The camera that a sensor is a picture of: rgb_wrist and depth_wrist are one."""
    name = spec.name
    return next((name.removeprefix(kind) for kind in ("rgb_", "depth_") if name.startswith(kind)), name)


def draw_shift(count: int, spec: SensorSpec, rng: Random | None, drawn: dict[str, Drawn] | None = None) -> Shift:
    """Up to `spec.random_shift` pixels each way, one shift an image; None: no `rng`, or a sensor that is not moved.

    `drawn`: the shifts of this batch by camera. A second picture of it, its depth, moves with the first.
    """
    if rng is None or not spec.random_shift:
        return None
    camera, known = camera_of(spec), {} if drawn is None else drawn
    if camera not in known:
        shift = rng.randint(2 * spec.random_shift + 1, (2, count), dim=1) - spec.random_shift
        known[camera] = shift, spec.shape[:2]
    shift, sides = known[camera]
    if sides == spec.shape[:2]:
        return shift
    scale = torch.tensor([own / side for own, side in zip(spec.shape, sides, strict=False)])
    return (shift * scale[:, None]).round().to(shift.dtype)


def cut(image: Tensor, spec: SensorSpec, shift: Shift = None) -> Tensor:
    """(N, H, W, C) -> (N, h, w, C): the middle, as large as the spec's crop.

    Moved by `shift` (rows, columns). What lies beyond the border repeats it. A crop with a margin of that many pixels
    is Diffusion Policy's random crop; no crop is DrQ's shift.
    """
    n, height, width, _ = image.shape
    rows, columns = spec.crop or (height, width)
    top, left = (height - rows) // 2, (width - columns) // 2
    if shift is not None and height != spec.shape[0]:  # training sees pictures that are small already
        shift = (shift * (height / spec.shape[0])).round().to(shift.dtype)
    if shift is None:
        return image[:, top : top + rows, left : left + columns]
    offset = shift.to(image.device)
    row = (top + offset[0, :, None] + torch.arange(rows, device=image.device)).clamp(0, height - 1)  # (N, h)
    column = (left + offset[1, :, None] + torch.arange(columns, device=image.device)).clamp(0, width - 1)  # (N, w)
    batch = torch.arange(n, device=image.device)[:, None, None]
    return image[batch, row[:, :, None], column[:, None, :]]


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(max(1, channels // 16), channels)  # as Diffusion Policy: BatchNorm and EMA do not mix


class FrozenBatchNorm(nn.Module):
    """BatchNorm with the statistics and scales of the pretrained weights, which are not trained.

    y = (x - running_mean) / sqrt(running_var + eps) * weight + bias
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = norm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def read_weights(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a safetensors file that have these names and shapes; it may hold others."""
    from safetensors.torch import load_file

    try:
        stored = load_file(path)
    except Exception as error:  # safetensors raises its own kinds for a missing, cut or foreign file
        raise PrismError(
            f"{path}: cannot be read as safetensors ({error}); save torchvision's weights there"
        ) from error
    for name, value in own.items():
        if name not in stored or stored[name].shape != value.shape:
            raise PrismError(
                f"{path}: key '{name}' is missing or not of shape {tuple(value.shape)}; "
                "save torchvision's resnet18 state dict there"
            )
        if not stored[name].isfinite().all():
            raise PrismError(f"{path}: key '{name}' holds NaN or infinity; save the weights again")
    return {name: stored[name] for name in own}


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's parameter names and a linear projection for its last layer.

    norm: GroupNorm, trained with the rest; or BatchNorm frozen at what `load_pretrained` reads.
    """

    def __init__(self, features: int, norm: NormKind = "group", standardise: bool = False) -> None:
        """standardise: [0, 1] to ImageNet's mean and deviation first, which pretrained weights expect."""
        super().__init__()
        block = partial(BasicBlock, norm=_group_norm if norm == "group" else FrozenBatchNorm)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = block.keywords["norm"](64)
        self.layer1 = nn.Sequential(block(64, 64, 1), block(64, 64, 1))
        self.layer2 = nn.Sequential(block(64, 128, 2), block(128, 128, 1))
        self.layer3 = nn.Sequential(block(128, 256, 2), block(256, 256, 1))
        self.layer4 = nn.Sequential(block(256, 512, 2), block(512, 512, 1))
        self.project = nn.Linear(512, features)
        self.standardise = standardise
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def load_pretrained(self, path: Path) -> None:
        """A safetensors file with torchvision's names; all but the projection is replaced."""
        own = {k: v for k, v in self.state_dict().items() if not k.startswith("project")}
        self.load_state_dict(read_weights(path, own), strict=False)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        if self.standardise:
            mean, deviation = (x.new_tensor(values)[:, None, None] for values in IMAGENET)
            x = (x - mean) / deviation
        # The maximum first: relu commutes with it, has a quarter of the values left, and in int8 the pool stays float.
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 3, 2, 1), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.project(x.mean((2, 3)))
        return y


class SmallCNN(nn.Module):
    """Four convolutions and a spatial softmax: where each feature is in the picture. Learns on a CPU in minutes.

    A feature's place is the mean position under softmax(focus * map). Normalised maps reach about 3 at their peak: at
    focus 1 a peak among 100 places has a fifth of the weight, and the place hardly moves with it; at 5, nearly all.
    """

    def __init__(self, features: int, size: tuple[int, int], channels_in: int = 3, focus: float = 1.0) -> None:
        super().__init__()
        self.focus = focus
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
        sharp = maps if self.focus == 1.0 else maps * self.focus
        weight = sharp.flatten(2).softmax(-1).unflatten(2, (height, width))
        rows = torch.linspace(-1, 1, height, device=x.device)
        columns = torch.linspace(-1, 1, width, device=x.device)
        row = torch.einsum("nchw,h->nc", weight, rows)
        column = torch.einsum("nchw,w->nc", weight, columns)
        y: Tensor = self.project(torch.cat([row, column, maps.mean((2, 3))], dim=1))
        return y


class PooledCNN(nn.Module):
    """The paper's network for depth and tactile images (App. A.2): convolutions C-64-128-256 with ReLU, adaptive
    average pooling to 2x2, a linear layer. Kernels (5, 3, 3) and strides of 2 are ours: the paper names none.
    """

    def __init__(self, channels_in: int, widths: tuple[int, ...], features: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise((channels_in, *widths))):
            kernel = 5 if i == 0 else 3
            layers += [nn.Conv2d(before, after, kernel, 2, kernel // 2), nn.ReLU(inplace=True)]
        self.convolutions = nn.Sequential(*layers)
        self.project = nn.Linear(4 * widths[-1], features)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        maps = self.convolutions(x)
        y: Tensor = self.project(_pool_quarters(maps).flatten(1))
        return y


# --------------------------------------------------------------------------- what ONNX lacks, spelt out for an export


def _shrink(image: Float[Tensor, "N C H W"], size: tuple[int, int]) -> Float[Tensor, "N C h w"]:
    """Bilinear with antialiasing: linear in rows and in columns, so for ONNX two products with constant matrices."""
    if not torch.onnx.is_in_onnx_export():
        return F.interpolate(image, size, mode="bilinear", antialias=True)
    sides = (int(image.shape[2]), int(image.shape[3]))
    rows, columns = (
        F.interpolate(torch.eye(side)[None, None], (new, side), mode="bilinear", antialias=True)[0, 0]  # R I = R
        for side, new in zip(sides, size, strict=True)
    )  # (h, H), (w, W)
    shrunk: Tensor = rows @ image @ columns.T
    return shrunk


def _nearest(depth: Float[Tensor, "N C H W"], size: tuple[int, int]) -> Float[Tensor, "N C h w"]:
    """The nearest pixel to the middle of each new one."""
    if not torch.onnx.is_in_onnx_export():
        return F.interpolate(depth, size, mode="nearest-exact")
    sides = (int(depth.shape[2]), int(depth.shape[3]))
    rows, columns = (
        F.interpolate(torch.arange(side, dtype=torch.float32)[None, None], new, mode="nearest-exact")[0, 0].long()
        for side, new in zip(sides, size, strict=True)
    )
    return depth[:, :, rows][:, :, :, columns]


def _pool_quarters(maps: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C 2 2"]:
    """adaptive_avg_pool2d(maps, 2). ONNX has that for even sides only, so an export spells the quarters out."""
    if not torch.onnx.is_in_onnx_export():
        return F.adaptive_avg_pool2d(maps, 2)
    height, width = int(maps.shape[2]), int(maps.shape[3])
    rows = (slice(0, (height + 1) // 2), slice(height // 2, height))
    columns = (slice(0, (width + 1) // 2), slice(width // 2, width))
    means = [maps[:, :, row, column].mean((2, 3)) for row in rows for column in columns]
    quarters: Tensor = torch.stack(means, dim=-1).unflatten(-1, (2, 2))
    return quarters
